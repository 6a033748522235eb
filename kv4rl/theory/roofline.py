"""Nominal demands of a decode step (Fig. 3a, §B.4), from a model's configuration alone.

Per GPU of a tensor-parallel shard: W bytes of linear weights, F FLOPs per active token, kappa bytes of KV per context
position. Embedding rows, norms and biases are left out, as in the paper's nominal figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kv4rl.config import require
from kv4rl.theory.lengths import finite, whole

BF16_BYTES = 2
H200_BANDWIDTH = 4.8e12  # bytes/s, vendor peak (§B.4)
H200_BF16_FLOPS = 989.5e12  # FLOP/s, dense (§B.4)


@dataclass(frozen=True)
class ModelShape:
    """What the linear layers and the cache of a dense decoder need; whole model, before it is sharded."""

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied_embedding: bool = False  # the output head is the embedding: one matrix in memory

    def __post_init__(self):
        for name in ("layers", "hidden", "intermediate", "query_heads", "kv_heads", "head_dim", "vocab"):
            value = getattr(self, name)
            require(whole(value) and value >= 1, name, value, "an integer >= 1")
        require(
            self.query_heads % self.kv_heads == 0, "query_heads", self.query_heads, f"a multiple of {self.kv_heads}"
        )

    @classmethod
    def from_config(cls, config) -> "ModelShape":
        """From a `transformers` configuration, or the mapping in a `config.json`."""
        fields = config if isinstance(config, Mapping) else config.to_dict()
        wanted = {
            "layers": "num_hidden_layers",
            "hidden": "hidden_size",
            "intermediate": "intermediate_size",
            "query_heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads",
            "vocab": "vocab_size",
        }
        missing = [name for name in wanted.values() if fields.get(name) is None]
        require(not missing, "config", missing, f"all of {', '.join(wanted.values())}")
        given = {ours: fields[theirs] for ours, theirs in wanted.items()}
        head_dim = fields.get("head_dim") or given["hidden"] // given["query_heads"]
        return cls(head_dim=head_dim, tied_embedding=bool(fields.get("tie_word_embeddings")), **given)

    @property
    def linear_parameters(self) -> int:
        """Weights of the projections and the output head."""
        attention = self.hidden * self.head_dim * (2 * self.query_heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab


QWEN3_4B = ModelShape(36, 2560, 9728, 32, 8, 128, 151936, tied_embedding=True)
QWEN3_8B = ModelShape(36, 4096, 12288, 32, 8, 128, 151936)


def weight_bytes(model: ModelShape, *, tensor_parallel: int = 1, bytes_per_weight: float = BF16_BYTES) -> float:
    """W: bytes of linear weights one GPU reads in a step (§B.4: 4.022272 GB for Qwen3-4B at TP2)."""
    return model.linear_parameters * bytes_per_weight / _ranks(model, tensor_parallel)


def flops_per_token(model: ModelShape, *, tensor_parallel: int = 1) -> float:
    """F: linear-layer FLOPs per active token and GPU (§B.4: 4.022272 GFLOP for Qwen3-4B at TP2)."""
    return 2 * model.linear_parameters / _ranks(model, tensor_parallel)


def kv_bytes_per_token(model: ModelShape, *, tensor_parallel: int = 1, bits_per_element: float = 16) -> float:
    """kappa: bytes of K and V per context position and GPU (§B.3: 73,728 for both models at TP2 in BF16)."""
    elements = 2 * model.layers * model.kv_heads * model.head_dim
    return elements * bits_per_element / 8 / _ranks(model, tensor_parallel)


@dataclass(frozen=True)
class Demands:
    """Idealised service times of one decode step in milliseconds: equal heights are equal times (Fig. 3a)."""

    weights_ms: float  # W / bandwidth
    compute_ms: float  # F B / FLOP rate
    kv_ms: float  # V / bandwidth

    @property
    def largest(self) -> str:
        """ "weights", "compute" or "kv"."""
        return max(("weights", "compute", "kv"), key=lambda name: getattr(self, f"{name}_ms"))


def demands(
    model: ModelShape,
    active_requests: float,
    context_tokens: float,
    *,
    tensor_parallel: int = 1,
    bandwidth: float = H200_BANDWIDTH,
    flops: float = H200_BF16_FLOPS,
) -> Demands:
    """The three demands at B active requests whose contexts sum to `context_tokens` (B lbar)."""
    given = {"active_requests": active_requests, "bandwidth": bandwidth, "flops": flops}
    for name, value in given.items():
        require(finite(value) and value > 0, name, value, "a finite number > 0")
    require(finite(context_tokens) and context_tokens >= 0, "context_tokens", context_tokens, "a finite number >= 0")
    parallel = {"tensor_parallel": tensor_parallel}
    return Demands(
        weights_ms=weight_bytes(model, **parallel) / bandwidth * 1e3,
        compute_ms=flops_per_token(model, **parallel) * active_requests / flops * 1e3,
        kv_ms=kv_bytes_per_token(model, **parallel) * context_tokens / bandwidth * 1e3,
    )


def _ranks(model: ModelShape, tensor_parallel: int) -> int:
    ranks = tensor_parallel
    fits = whole(ranks) and ranks >= 1 and model.kv_heads % ranks == 0
    require(fits, "tensor_parallel", ranks, f"a divisor of kv_heads={model.kv_heads}")
    return ranks
