"""An engine as the benches time it: FlashInfer decodes its unquantised cache on CUDA, as in the paper (§A.2)."""

import torch

from kv4rl.cache.memory_plan import HBMPlan
from kv4rl.config import KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.memory import plan_engine
from kv4rl.model.decoder import Decoder


def decodes_baseline(precision: str, device: torch.device) -> bool:
    """Whether FlashInfer decodes the cache, and not our kernels."""
    return precision == "bf16" and device.type == "cuda"


def bench_engine(decoder: Decoder, precision: str, rollout: RolloutConfig, **given) -> RolloutEngine:
    """The engine of one arm; `given` as in `RolloutEngine`. Raises what that raises."""
    engine = RolloutEngine(decoder, KVConfig(precision), rollout, **given)
    if decodes_baseline(precision, decoder.device):
        engine.use_flashinfer()
    return engine


def bench_plan(decoder: Decoder, precision: str, rollout: RolloutConfig, budget_bytes: int) -> HBMPlan:
    """That engine's memory. Raises `ValueError`, item by item, where the budget is too small."""
    flashinfer = decodes_baseline(precision, decoder.device)
    return plan_engine(decoder, KVConfig(precision), rollout, budget_bytes, flashinfer=flashinfer)
