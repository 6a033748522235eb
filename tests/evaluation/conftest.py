import pytest
from transformers import Qwen3Config

from kv4rl.model.decoder import Decoder, DecoderConfig


@pytest.fixture(scope="session")
def tiny_decoder():
    """A random two-layer Qwen3 with grouped queries, 97 tokens, peaked enough to be no uniform sampler."""
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.15,
    )
    return Decoder.random(DecoderConfig.from_hf(config), seed=7)
