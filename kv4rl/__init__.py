"""kv4rl: INT4 KV caches with INT8-protected sink and recent positions, for asynchronous RL rollout."""

__version__ = "0.1.0"
