"""What a run needs of each GPU in its two phases, item by item, counted before anything is loaded (§A.2, Table A1)."""

from dataclasses import dataclass

import torch

from kv4rl.cache.memory_plan import page_bytes, side_bytes
from kv4rl.config import KVConfig, RolloutConfig, TrainConfig, require
from kv4rl.engine.memory import reserved_bytes
from kv4rl.grpo.logprobs import MAX_LOGITS
from kv4rl.grpo.masters import compute_dtype
from kv4rl.model.config import DecoderConfig
from kv4rl.model.decoder import Decoder
from kv4rl.model.tensor_parallel import shard_config

FP32 = 4
LOGIT_COPIES = 2.5  # logits in FP32, their gradient in BF16, a compiled function's transient
LAYER_WIDTHS = 14  # activations of the one layer that is recomputed, in units of hidden plus a third of the MLP


@dataclass(frozen=True)
class RunPlan:
    """Bytes a GPU, by phase and item."""

    collect: dict[str, int]
    learn: dict[str, int]

    def check(self, total_bytes: int) -> None:
        """Raise `ValueError`, item by item, where a phase needs more than a GPU has."""
        for phase, items in (("collect", self.collect), ("learn", self.learn)):
            named = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in items.items())
            needed = sum(items.values())
            expected = f"at most this GPU's {total_bytes / 1e9:.4g} GB for phase {phase!r}: {named}"
            require(needed <= total_bytes, "memory needed", f"{needed / 1e9:.4g} GB", expected)


def plan_run(
    config: TrainConfig, model: DecoderConfig, rollout: RolloutConfig, ranks: int, *, elastic: bool
) -> RunPlan:
    """The plan of a run on `ranks` GPUs; `elastic`: the cache's memory can be given back while the learner works."""
    dtype = compute_dtype(config.grpo.compute_dtype, torch.device("cuda"))
    with torch.device("meta"):
        shard = Decoder(shard_config(model, config.tensor_parallel)).to(dtype)
    engine = _engine(shard, config.kv, rollout)
    learner, work = _learner(config, model, ranks, dtype)
    cache = {name: engine.pop(name) for name in ("side buffer", "pages")}
    if config.memory == "phased":
        at_learning = {"engine's weights": engine["model"], **({} if elastic else cache)}
        return RunPlan({**engine, **cache}, {**learner, **work, **at_learning})
    return RunPlan({**engine, **cache, **learner}, {**learner, **work, "engine's weights": engine["model"], **cache})


def _engine(shard: Decoder, kv: KVConfig, rollout: RolloutConfig) -> dict[str, int]:
    shape = shard.cache_shape()
    return {
        **reserved_bytes(shard, kv, rollout),
        "side buffer": side_bytes(kv, shape, rollout.max_active_requests),
        "pages": rollout.cache_pages * page_bytes(kv, shape),
    }


def _learner(config: TrainConfig, model: DecoderConfig, ranks: int, dtype: torch.dtype) -> tuple[dict, dict]:
    """Bytes of states that may leave the GPU, and of what only an update holds."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Decoder(model).parameters())
    states = {"masters": parameters * FP32 // ranks, "moments": 2 * parameters * FP32 // ranks}
    if ranks == 1 and dtype != torch.float32:
        states["compute weights"] = parameters * dtype.itemsize
    if config.grpo.kl_coefficient > 0:
        states["reference"] = parameters * dtype.itemsize // ranks
    tokens = max(config.grpo.microbatch_tokens, config.rollout.max_prompt_tokens + config.rollout.max_response_tokens)
    width = model.hidden_size + model.intermediate_size // 3
    activations = tokens * dtype.itemsize * (model.num_layers * model.hidden_size + LAYER_WIDTHS * width)
    logits = LOGIT_COPIES * FP32 * min(MAX_LOGITS, tokens * model.vocab_size)
    head = 2 * FP32 * model.vocab_size * model.hidden_size  # its gradient, summed over chunks
    work = {"gradients": parameters * FP32 // ranks, "activations": activations, "head": int(logits) + head}
    return states, work
