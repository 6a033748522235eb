import pytest
import torch
from transformers import Qwen3Config

from kv4rl.fidelity.corpus import History
from kv4rl.model.decoder import Decoder, DecoderConfig
from kv4rl.tasks.tokenizer import TOKENS


@pytest.fixture(scope="session")
def tiny_decoder():
    """A random two-layer Qwen3 with grouped queries over the mini task's vocabulary, peaked enough to notice errors."""
    config = Qwen3Config(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=96,
        initializer_range=0.15,
        eos_token_id=1,
    )
    return Decoder.random(DecoderConfig.from_hf(config), seed=7).requires_grad_(False)


@pytest.fixture(scope="session")
def histories():
    """Three random histories of different lengths; the last one's page is exactly full."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count):
        return torch.randint(2, len(TOKENS), (count,), generator=generator).tolist()

    return [
        History("a", tokens(5), tokens(8)),
        History("b", tokens(20), tokens(30)),
        History("c", tokens(17), tokens(15)),
    ]
