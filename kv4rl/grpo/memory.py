"""What a run needs of each GPU in its two phases, and of its node's CPU memory, item by item, counted before anything
is loaded (§A.2, Table A1)."""

from dataclasses import dataclass

import torch

from kv4rl.cache.memory_plan import page_bytes, side_bytes
from kv4rl.config import KVConfig, RolloutConfig, TrainConfig, require
from kv4rl.engine.memory import plan_engine, reserved_bytes
from kv4rl.grpo.logprobs import MAX_LOGITS
from kv4rl.grpo.masters import compute_dtype
from kv4rl.model.config import DecoderConfig
from kv4rl.model.decoder import Decoder
from kv4rl.model.tensor_parallel import shard_config

FP32 = 4
USED_SHARE = 0.75  # of a GPU, where pages are counted to fill it: `bench iteration` ran 4B and 8B within as much
LOGIT_COPIES = 2.5  # logits in FP32, their gradient in BF16, a compiled function's transient
LAYER_WIDTHS = 14  # activations of the one layer that is recomputed, in units of hidden plus a third of the MLP


@dataclass(frozen=True)
class RunPlan:
    """Bytes by item: of a GPU in each phase, and of a node's CPU memory."""

    collect: dict[str, int]
    learn: dict[str, int]
    host: dict[str, int]

    def check(self, total_bytes: int, host_bytes: int) -> None:
        """Raise `ValueError`, item by item, where a phase needs more than a GPU has, or all of them than their node."""
        for phase, items in (("collect", self.collect), ("learn", self.learn)):
            _require(items, total_bytes, f"this GPU's {total_bytes / 1e9:.4g} GB for phase {phase!r}")
        _require(self.host, host_bytes, _left_of_node(host_bytes))


def _require(items: dict[str, int], most: int, whose: str) -> None:
    named = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in items.items())
    needed = sum(items.values())
    require(needed <= most, "memory needed", f"{needed / 1e9:.4g} GB", f"at most {whose}: {named}")


@dataclass(frozen=True)
class Machine:
    """What a run is planned for."""

    ranks: int
    ranks_of_node: int
    elastic: bool  # the cache's memory can be given back while the learner works


def plan_run(config: TrainConfig, model: DecoderConfig, rollout: RolloutConfig, machine: Machine) -> RunPlan:
    """The plan of a run."""
    shard, dtype = _shard(config, model)
    engine = _engine(shard, config.kv, rollout)
    learner, work = _learner(config, model, machine.ranks, dtype)
    host = _host(config, learner, machine)
    cache = {name: engine.pop(name) for name in ("side buffer", "pages")}
    if config.memory == "phased":
        at_learning = {"engine's weights": engine["model"], **({} if machine.elastic else cache)}
        return RunPlan({**engine, **cache}, {**learner, **work, **at_learning}, host)
    at_learning = {"engine's weights": engine["model"], **cache}
    return RunPlan({**engine, **cache, **learner}, {**learner, **work, **at_learning}, host)


def pool_pages(
    config: TrainConfig, model: DecoderConfig, rollout: RolloutConfig, machine: Machine, total_bytes: int
) -> int:
    """Pages that a GPU of `total_bytes` holds in the run's cache format: floor(M_q / b_q) of §A.2.

    A share of the memory stays free, for what is not counted: the CUDA context, NCCL's buffers, graphs and fragments.
    Raises `ValueError`, item by item, where not even one page is left.
    """
    shard, dtype = _shard(config, model)
    learner, work = _learner(config, model, machine.ranks, dtype)
    alone = config.memory == "phased" and machine.elastic
    beside = 0 if alone else sum(learner.values()) + sum(work.values())
    return plan_engine(shard, config.kv, rollout, int(USED_SHARE * total_bytes) - beside).cache.pages


def check_without_gpu(config: TrainConfig, model: DecoderConfig, machine: Machine, host_bytes: int) -> None:
    """Raise `ValueError`, item by item, where the weights and states of a run on CPUs exceed their node's memory.

    Caches and activations come on top: they are filled as needed, so no plan of them is refused.
    """
    shard, dtype = _shard(config, model, "cpu")
    states, work = _learner(config, model, machine.ranks, dtype)
    weights = sum(parameter.nbytes for parameter in shard.parameters())
    each = {"engine's weights": weights, **states, "gradients": work["gradients"]}
    items = {f"{name} of {machine.ranks_of_node}": size * machine.ranks_of_node for name, size in each.items()}
    items["checkpoint"] = (states["masters"] + states["moments"]) * machine.ranks
    _require(items, host_bytes, _left_of_node(host_bytes))


def _left_of_node(host_bytes: int) -> str:
    return f"the {host_bytes / 1e9:.4g} GB of CPU memory that this node has left"


def _shard(config: TrainConfig, model: DecoderConfig, device: str = "cuda") -> tuple[Decoder, torch.dtype]:
    """The engine's part of the model, its weights on `meta`, and their dtype."""
    dtype = compute_dtype(config.grpo.compute_dtype, torch.device(device))
    with torch.device("meta"):
        return Decoder(shard_config(model, config.tensor_parallel)).to(dtype), dtype


def _host(config: TrainConfig, learner: dict[str, int], machine: Machine) -> dict[str, int]:
    """What leaves the GPUs of a node while they collect, and the whole copy that a checkpoint is written from."""
    away = ("masters", "moments", "reference") if config.memory == "phased" else ()
    states = {
        f"{name} of {machine.ranks_of_node}": learner[name] * machine.ranks_of_node for name in away if name in learner
    }
    return states | {"checkpoint": (learner["masters"] + learner["moments"]) * machine.ranks}


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
