"""What an engine needs beside its cache, counted before anything is allocated, and the pages that a budget then buys.

The paper's profiler "reserves model state and execution workspace before sizing the KV pool, including
precision-dependent metadata and protected side-cache storage" (§A.2). Here the same items are counted from sizes, so
that a plan can be made, compared between precisions and refused without a GPU.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from kv4rl.attention.cuda_arguments import SUMS_TAIL, UNIT_BYTES, chunk_weight_of, most_chunks
from kv4rl.cache.main_cache import pages_for
from kv4rl.cache.memory_plan import HBMPlan, page_bytes, plan_hbm, side_bytes
from kv4rl.config import KVConfig, RolloutConfig
from kv4rl.engine.decode_step import PADDING
from kv4rl.engine.flashinfer import WORKSPACE_BYTES
from kv4rl.model.communicator import Communicator
from kv4rl.model.decoder import Decoder

SAMPLER_BYTES = 20  # a logit while its row is sampled in plain torch: itself, log-probability, probability, FP64 CDF
OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED", re.IGNORECASE)
VECTORS = len(PADDING) + 2  # int64 a row in the decode step's static buffers: what is uploaded, token and its logp


class PlanTooLarge(RuntimeError):
    """The device ran out of memory; the message sets the plan's items against what was there."""


def max_pages(decoder: Decoder, rollout: RolloutConfig) -> int:
    """Pages of the longest request that the limits and the model's positions allow."""
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    return pages_for(min(longest, decoder.config.max_positions))


def reserved_bytes(
    decoder: Decoder, kv: KVConfig, rollout: RolloutConfig, *, flashinfer: bool = False
) -> dict[str, int]:
    """Bytes of model, workspace and metadata of an engine on this decoder (or shard); its weights may be on `meta`.

    Workspace: unquantised K/V of the prefills under way, the activations of the largest step, once more those of a
    captured decode step, and the sampler's logits. Metadata: page tables, static buffers and the kernels' work items.
    Where there are such: FlashInfer's workspace (`flashinfer`: the cache is decoded through it) and the memory in which
    ranks add up.
    """
    shape, slots = decoder.cache_shape(), rollout.max_active_requests
    model = sum(parameter.nbytes for parameter in decoder.parameters())
    prefill = 2 * shape.num_layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize * rollout.workspace_tokens
    activations = _activation_bytes(decoder) * (rollout.step_tokens + slots)
    logits = slots * decoder.head_weight.shape[0] * SAMPLER_BYTES
    pages = max_pages(decoder, rollout)
    regions = (kv.sink_tokens, kv.recent_tokens) if kv.protected_tokens else (0, 0)
    chunks = most_chunks(pages, regions, chunk_weight_of(slots, shape.kv_heads))
    partial = shape.query_heads * (shape.head_dim + SUMS_TAIL) * 4 if chunks > 1 else 0
    metadata = slots * (2 * 8 * pages + 8 * VECTORS + chunks * (UNIT_BYTES + partial))
    items = {"model": model, "workspace": prefill + activations + logits, "metadata": metadata}
    return items | _items_of_a_kind(decoder, flashinfer)


def _items_of_a_kind(decoder: Decoder, flashinfer: bool) -> dict[str, int]:
    communicator = getattr(decoder, "communicator", None)
    shared = communicator.nbytes if isinstance(communicator, Communicator) else 0  # a plan's stand-in has joined none
    items = {"baseline workspace": WORKSPACE_BYTES if flashinfer else 0, "ranks' sums": shared}
    return {name: size for name, size in items.items() if size}


def _activation_bytes(decoder: Decoder) -> int:
    """Bytes a token holds at the widest point of a layer: residual and normed stream beside attention or MLP."""
    layer = decoder.model.layers[0]
    qkv = layer.self_attn.q_proj.out_features + 2 * layer.self_attn.k_proj.out_features
    attention = 2 * qkv + layer.self_attn.q_proj.out_features  # projected, rotated, and the output
    mlp = 3 * layer.mlp.gate_proj.out_features
    return (3 * decoder.config.hidden_size + max(attention, mlp)) * decoder.dtype.itemsize


def plan_engine(
    decoder: Decoder, kv: KVConfig, rollout: RolloutConfig, budget_bytes: int, *, flashinfer: bool = False
) -> HBMPlan:
    """The plan of an engine that may use `budget_bytes` of its GPU. Raises `ValueError`, item by item, if too few."""
    return plan_hbm(
        kv, decoder.cache_shape(), budget_bytes=budget_bytes, num_slots=rollout.max_active_requests,
        reserved=reserved_bytes(decoder, kv, rollout, flashinfer=flashinfer),
    )  # fmt: skip


def within(plan: HBMPlan, rollout: RolloutConfig) -> RolloutConfig:
    """The rollout configuration with the plan's pages."""
    return replace(rollout, cache_pages=plan.cache.pages)


@contextmanager
def naming_the_plan(
    decoder: Decoder, kv: KVConfig, rollout: RolloutConfig, *, flashinfer: bool = False
) -> Iterator[None]:
    """Within the block, running out of device memory raises `PlanTooLarge`, which says what the engine had planned."""

    def items() -> dict[str, int]:
        shape = decoder.cache_shape()
        return reserved_bytes(decoder, kv, rollout, flashinfer=flashinfer) | {
            "side buffer": side_bytes(kv, shape, rollout.max_active_requests),
            f"{rollout.cache_pages} pages": rollout.cache_pages * page_bytes(kv, shape),
        }

    remedy = "lower cache_pages (plan_engine computes it from a budget), max_active_requests, step_tokens or "
    with naming_items(f"the {kv.precision} engine", items, decoder.device, remedy + "workspace_tokens"):
        yield


@contextmanager
def naming_items(
    what: str, items: Callable[[], Mapping[str, int]], device: torch.device, remedy: str
) -> Iterator[None]:
    """Within the block, running out of device memory raises `PlanTooLarge` with the bytes that `what` meant to hold.

    Torch's own allocator says so by an error of its own; graphs, products and sums among ranks by RuntimeErrors.
    """
    try:
        yield
    except RuntimeError as error:
        exhausted = isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY.search(str(error))
        if not exhausted or isinstance(error, PlanTooLarge):
            raise
        sizes = items()
        planned = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in sizes.items())
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        raise PlanTooLarge(
            f"out of memory on {device} ({total / 1e9:.4g} GB): {what}'s plan is {planned}, "
            f"{sum(sizes.values()) / 1e9:.4g} GB in all; {remedy}"
        ) from error
