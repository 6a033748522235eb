"""Models by their published shape, with random weights: what timing needs, without any file or download."""

import torch
from transformers import Qwen3Config

from kv4rl.config import require
from kv4rl.model.communicator import Communicator
from kv4rl.model.config import DecoderConfig
from kv4rl.model.decoder import Decoder, fill_random
from kv4rl.model.tensor_parallel import empty_shard
from kv4rl.model.weights import MODELS_DIR, load_config

_QWEN3 = {
    "vocab_size": 151936, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
SHAPES = {  # the config.json of Qwen3-4B-Base and Qwen3-8B-Base
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True, **_QWEN3},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False, **_QWEN3},
}


def shape_config(name: str) -> DecoderConfig:
    """The configuration of a model in `SHAPES`, or of one under data/models; `ValueError` names the known ones."""
    if name in SHAPES:
        return DecoderConfig.from_hf(Qwen3Config(**SHAPES[name]))
    here = (MODELS_DIR / name / "config.json").is_file()
    require(here, "model", name, f"one of {', '.join(SHAPES)}, or a name under {MODELS_DIR}")
    return load_config(name)


def random_model(
    name: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device="cpu",
    communicator: Communicator | None = None,
) -> Decoder:
    """Random weights at the true shape, or one rank's shard of it.

    Their values mean nothing; GEMMs, caches, kernels and sums cost what they cost.
    """
    if communicator is None:
        return Decoder.random(shape_config(name), seed=seed, dtype=dtype, device=device)
    shard = empty_shard(shape_config(name), communicator, dtype=dtype, device=device)
    fill_random(shard, seed + communicator.rank)
    return shard
