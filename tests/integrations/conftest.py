"""Tiny random models of two families, and what a test asks of a run: tokens, and logits along given tokens."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from kv4rl.integrations.transformers import KV4RLCache

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "max_position_embeddings": 512, "initializer_range": 0.15, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "qwen3-4q2kv-d64": (Qwen3ForCausalLM, Qwen3Config, (4, 2, 64)),
    "llama-3q1kv-d128": (LlamaForCausalLM, LlamaConfig, (3, 1, 128)),
}


def make_model(name):
    cls, config_class, (query_heads, kv_heads, head_dim) = FAMILIES[name]
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(config_class(**SIZES, **heads)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="session")
def models():
    return {name: make_model(name) for name in FAMILIES}


@pytest.fixture(params=FAMILIES)
def model(request, models):
    return models[request.param]


@pytest.fixture
def qwen(models):
    return models["qwen3-4q2kv-d64"]


@pytest.fixture
def make_cache():
    """A cache with a short sink and ring, so that short texts leave them."""

    def make(model, precision="kv4rl", sink=4, recent=8, **more):
        return KV4RLCache(model.config, precision, sink, recent, **more)

    return make


@pytest.fixture
def ids():
    """`ids(length, rows=1, seed=0)`: random tokens without the padding token."""

    def make(length, rows=1, seed=0):
        return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture
def generate():
    """Greedy tokens after the prompt, [batch, new]; keyword arguments go to transformers' generate."""

    def run(model, ids, cache=None, new=40, **how):
        cache = DynamicCache(config=model.config) if cache is None else cache
        how = {"do_sample": False, "attention_mask": torch.ones_like(ids), **how}
        return model.generate(ids, past_key_values=cache, max_new_tokens=new, **how)[:, ids.shape[1] :]

    return run


@pytest.fixture
def forced():
    """Logits [batch, steps, vocab] of one-token steps along `ids` after a prefill of `prompt` columns."""

    @torch.no_grad()
    def run(model, ids, prompt, cache, mask=None):
        mask = torch.ones_like(ids) if mask is None else mask
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        spans = [(0, prompt), *((stop, stop + 1) for stop in range(prompt, ids.shape[1]))]
        logits = [
            model(
                ids[:, a:b], attention_mask=mask[:, :b], position_ids=positions[:, a:b], past_key_values=cache
            ).logits[:, -1]
            for a, b in spans
        ]
        return torch.stack(logits, 1)

    return run
