"""What the precisions are called; apart from `style`, so that commands on a GPU machine need no plotly."""

PRECISION_NAMES = {"bf16": "BF16", "kv8": "KV8", "kv4": "KV4", "kv4rl": "KV4-RL"}
