"""Tiny random models of every family, transformers' own runs of them, and an unquantised K/V list to decode with."""

import copy

import pytest
import torch
import transformers

from kv4rl.model.attend import causal_chunk
from kv4rl.model.decoder import Decoder, DecoderConfig

SMALL = {"num_hidden_layers": 3, "intermediate_size": 160, "vocab_size": 211, "initializer_range": 0.08}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}


def _config(family, hidden_size, query_heads, kv_heads, **fields):
    cls = {"qwen3": transformers.Qwen3Config, "qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig}
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads}
    return cls[family](hidden_size=hidden_size, **heads, **SMALL, **fields)


CONFIGS = {
    "qwen3-4q2kv-d128-tied": _config("qwen3", 96, 4, 2, head_dim=128, tie_word_embeddings=True),
    "qwen3-9q3kv-d64-bias": _config("qwen3", 96, 9, 3, head_dim=64, attention_bias=True),
    "qwen2-4q2kv-d64": _config("qwen2", 256, 4, 2),
    "qwen2-3q1kv-d128-tied-yarn": _config(
        "qwen2", 384, 3, 1, tie_word_embeddings=True, rope_parameters=YARN, max_position_embeddings=128
    ),
    "llama-9q3kv-d64-tied": _config("llama", 99, 9, 3, head_dim=64, tie_word_embeddings=True),
    "llama-4q4kv-d128-biases-llama3": _config(
        "llama", 96, 4, 4, head_dim=128, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3
    ),
    "llama-2q1kv-d64-linear": _config(
        "llama", 96, 2, 1, head_dim=64, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
}


class Family:
    """One model three ways: ours, transformers', and transformers' in float64."""

    def __init__(self, config, dtype=torch.float32):
        self.hf = transformers.AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(7)
        for name, parameter in self.hf.named_parameters():
            # A fresh model has norms of one and biases of zero, which would hide a forgotten one.
            spread = 0.3 if parameter.ndim == 1 else config.initializer_range
            parameter.data = torch.randn(parameter.shape, generator=generator) * spread + name.endswith("norm.weight")
        self.hf = self.hf.to(dtype).eval()
        self.hf.model.rotary_emb.to(torch.float32)  # as from_pretrained leaves it
        self.decoder = Decoder(DecoderConfig.from_hf(config))
        self.decoder.load_state_dict(self.hf.state_dict(), strict=not config.tie_word_embeddings)
        self.decoder.to(dtype)

    def exact(self):
        """transformers' model in float64, its norms too (they compute in float32 whatever the model's dtype)."""
        exact = copy.deepcopy(self.hf).double()
        for module in exact.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = _float64_norm(module.weight, module.variance_epsilon)
        exact.model.rotary_emb = self.hf.model.rotary_emb
        return exact

    def error(self, logits, ids):
        """(RMS, largest) error of logits [N, vocab] against the float64 model."""
        with torch.no_grad():
            difference = logits.double() - self.exact()(ids[None]).logits[0]
        return difference.square().mean().sqrt().item(), difference.abs().max().item()


def _float64_norm(weight, epsilon):
    return lambda x: weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon))


class ListCache:
    """`attend` for one sequence whose K/V stay unquantised in a list."""

    def __init__(self):
        self.k, self.v = {}, {}

    def __call__(self, layer, q, k, v):
        start = self.k[layer].shape[0] if layer in self.k else 0
        self.k[layer] = torch.cat((self.k[layer], k)) if start else k
        self.v[layer] = torch.cat((self.v[layer], v)) if start else v
        return causal_chunk(q, self.k[layer], self.v[layer], start)


@pytest.fixture(params=CONFIGS)
def config(request):
    return copy.deepcopy(CONFIGS[request.param])


@pytest.fixture
def some_config():
    return lambda name: copy.deepcopy(CONFIGS[name])


@pytest.fixture
def make_family():
    return Family


@pytest.fixture
def list_cache():
    return ListCache


@pytest.fixture
def run_in_chunks():
    """(decoder, ids, sizes) -> logits, feeding ids in chunks of those sizes, the last one repeated."""

    def run(decoder, ids, sizes):
        cache, start, pieces, sizes = ListCache(), 0, [], list(sizes)
        while start < len(ids):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            rows = torch.arange(start, min(start + size, len(ids)))
            pieces.append(decoder.logits(decoder(ids[rows], rows, cache)))
            start += size
        return torch.cat(pieces)

    return run
