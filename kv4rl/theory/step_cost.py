"""How long a decode step takes on one H200 shard: a sum of measured rates, for simulations and the planner.

    step = W / gemm_bandwidth + F B / gemm_flops + KV bytes / attention_bandwidth + 2 all-reduces a layer

The rates are ours, measured on one H200 (torch 2.11, CUDA graphs) for the TP2 shard of Qwen3; they are inputs, so that
newer measurements replace them. The model leaves out sampling and scheduling, as the paper's decode timing does.
"""

from dataclasses import dataclass, field

import numpy as np

from kv4rl.config import PAGE_TOKENS, PRECISIONS, KVConfig, require
from kv4rl.formats.packing import chunk_bytes
from kv4rl.theory.roofline import BF16_BYTES, ModelShape, flops_per_token, kv_bytes_per_token, weight_bytes


@dataclass(frozen=True)
class Rates:
    """Sustained rates of one GPU, in bytes/s, FLOP/s and seconds."""

    gemm_bandwidth: float = 4.1e12  # with gemm_flops: the seven GEMM times measured for TP2 forwards, within 20 %
    gemm_flops: float = 980e12
    # KV bytes of the format over the time of its kernel, mean over Table A3's shapes in data/results/kernels.csv.
    attention_bandwidth: dict[str, float] = field(
        default_factory=lambda: {"bf16": 4.0e12, "kv8": 3.98e12, "kv4": 3.73e12, "kv4rl": 3.60e12}
    )
    all_reduce_s: float = 6.6e-6  # two-GPU symmetric memory, fixed part
    all_reduce_s_per_element: float = 6.4e-12  # and per element of [B, hidden]: 17.1 us at B = 640, hidden = 2,560

    def __post_init__(self):
        for name in ("gemm_bandwidth", "gemm_flops"):
            require(getattr(self, name) > 0, name, getattr(self, name), "a number > 0")
        given = self.attention_bandwidth
        require(set(given) >= set(PRECISIONS), "attention_bandwidth", given, f"a rate for {', '.join(PRECISIONS)}")
        require(min(given.values()) > 0, "attention_bandwidth", given, "numbers > 0")


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a step for one model, cache format and tensor-parallel size; a `Cost` for the simulator.

    Calling it with arrays (active_requests, context_tokens summed over them, prefill_tokens) gives an array of
    milliseconds. Prefill tokens cost their linear layers only.
    """

    model: ModelShape
    kv: KVConfig = field(default_factory=lambda: KVConfig("bf16"))
    tensor_parallel: int = 2
    rates: Rates = field(default_factory=Rates)

    def __post_init__(self):
        weight_bytes(self.model, tensor_parallel=self.tensor_parallel)  # raises for a size that does not divide

    @property
    def page_bytes(self) -> float:
        """Bytes of one 16-token page over all layers and the shard's KV heads."""
        model = self.model
        if self.kv.precision == "bf16":
            return PAGE_TOKENS * kv_bytes_per_token(model, tensor_parallel=self.tensor_parallel)
        return model.layers * model.kv_heads // self.tensor_parallel * chunk_bytes(self.kv.precision, model.head_dim)

    @property
    def slot_bytes(self) -> float:
        """Bytes of one request's side buffer: s + w positions in INT8 with FP16 scales."""
        entry = 2 * (self.model.head_dim + BF16_BYTES)
        return self.kv.protected_tokens * self.model.layers * self.model.kv_heads // self.tensor_parallel * entry

    def kv_bytes(self, active_requests, context_tokens):
        """KV bytes read in a step: protected positions from the side buffer, all others from pages."""
        per_position = self.page_bytes / PAGE_TOKENS
        protected = self.kv.protected_tokens
        if protected == 0:
            return per_position * context_tokens
        covered = np.minimum(np.multiply(active_requests, protected), context_tokens)
        return per_position * (context_tokens - covered) + self.slot_bytes / protected * covered

    def __call__(self, active_requests, context_tokens, prefill_tokens=0):
        rates, parallel = self.rates, {"tensor_parallel": self.tensor_parallel}
        tokens = np.add(active_requests, prefill_tokens)
        gemm = weight_bytes(self.model, **parallel) / rates.gemm_bandwidth
        gemm = gemm + flops_per_token(self.model, **parallel) * tokens / rates.gemm_flops
        attention = self.kv_bytes(active_requests, context_tokens)
        attention = attention / rates.attention_bandwidth[self.kv.precision]
        reduced = 0.0
        if self.tensor_parallel > 1:
            reduced = rates.all_reduce_s + rates.all_reduce_s_per_element * self.model.hidden * tokens
        return (gemm + attention + 2 * self.model.layers * reduced) * 1e3
