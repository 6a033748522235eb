"""One arm of the replay: a cache of random content, the engine's own decode step, and its time at each state (§B.4)."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import perf_counter

import numpy as np
import torch

from kv4rl.bench.bf16_protected import Bf16Protected
from kv4rl.bench.replay_states import State
from kv4rl.bench.weight_arms import PRODUCTS
from kv4rl.cache.kv_cache import CacheShape, KVCache, TokenSlots
from kv4rl.cache.main_cache import pages_for
from kv4rl.cache.memory_plan import page_bytes, side_bytes
from kv4rl.config import PAGE_TOKENS, KVConfig, require
from kv4rl.engine.decode_step import DecodeStep
from kv4rl.engine.flashinfer import FlashInferBackend
from kv4rl.engine.graphs import StepGraphs, capturable
from kv4rl.engine.memory import naming_items
from kv4rl.engine.page_table import PageTable
from kv4rl.engine.sampler import NoiseKeys, Sampling
from kv4rl.engine.transfer import wait_for
from kv4rl.model.decoder import Decoder
from kv4rl.model.tensor_parallel import ShardedDecoder

GREEDY = Sampling(temperature=0.0)
WINDOWS = (16, 32, 64, 128, 256, 512)  # recent positions of Fig. A3b,d
ARMS = {  # arm -> cache format
    "bf16": KVConfig("bf16"), "bf16_ours": KVConfig("bf16"), "bf16_repeat": KVConfig("bf16"),
    "kv8": KVConfig("kv8"), "kv4": KVConfig("kv4"), "kv4_p8": KVConfig("kv4", probability_operand="u8"),
    "kv4rl": KVConfig("kv4rl"), "fp8_kv": KVConfig("kv8"), "w8a8": KVConfig("bf16"), "w4a16": KVConfig("bf16"),
    **{f"kv4rl_w{window}": KVConfig("kv4rl", recent_tokens=window) for window in WINDOWS},
    "kv4rl_bf16": KVConfig("kv4rl"),
}  # fmt: skip
BF16_PROTECTED = ("kv4rl_bf16",)  # the same positions in BF16 pages (bench/bf16_protected.py)
OURS = ("bf16_ours",)  # unquantised through our own kernel; the other BF16 caches through FlashInfer where it runs
NEED_CUDA = ("fp8_kv", *PRODUCTS)  # FlashInfer, and products that torch has for CUDA
FILL = 1 << 16  # positions written at once


def baseline(arm: str, device_type: str) -> bool:
    """Whether FlashInfer decodes the arm's cache: on CUDA whatever is unquantised and not `OURS`, and FP8 pages."""
    return device_type == "cuda" and arm not in OURS and (arm == "fp8_kv" or ARMS[arm].precision == "bf16")


def arm_side_bytes(arm: str, shape: CacheShape, slots: int) -> int:
    """Bytes of the protected positions: the side buffer's, or the BF16 pages' in its place."""
    return side_bytes(ARMS[arm], shape, slots) * (2 if arm in BF16_PROTECTED else 1)


def argmax(decoder: Decoder):
    """The sampler of the timing boundary: the largest logit's token, and nothing else (§B.4 "captured argmax")."""
    sharded = isinstance(decoder, ShardedDecoder)

    def pick(logits: torch.Tensor, noise: NoiseKeys, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
        if not sharded:
            return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
        value, token = logits.max(-1)
        both = torch.stack((value, (token + decoder.first_token).float()))  # ids below 2^24 are exact
        values, tokens = decoder.communicator.all_gather(both).unbind(1)
        return tokens.gather(0, values.argmax(0)[None])[0].long(), torch.zeros_like(value)

    return pick


class Replay:
    """The decode step of one arm over enough pages for the largest of `states`, all of them holding random K/V."""

    def __init__(self, arm: str, decoder: Decoder, states: Sequence[State], *, seed: int = 0):
        self.arm, self.decoder, self._communicator = arm, decoder, getattr(decoder, "communicator", None)
        slots = max(len(state.contexts) for state in states)
        pages = max(sum(map(pages_for, state.contexts)) for state in states)
        kv, shape = KVConfig("kv4") if arm in BF16_PROTECTED else ARMS[arm], decoder.cache_shape()
        require(arm not in NEED_CUDA or decoder.device.type == "cuda", "arm", arm, f"another on {decoder.device}")
        self._planned = lambda: {
            "model": sum(parameter.nbytes for parameter in decoder.parameters()),
            f"{pages} pages": pages * page_bytes(kv, shape), "protected": arm_side_bytes(arm, shape, slots),
        }  # fmt: skip
        with self._naming_the_plan():
            self.step = self._build(kv, states, pages, slots, seed)
        self._runner = StepGraphs(self.step) if capturable(self.cache) else self.step
        self._order = np.random.default_rng(seed).permutation(pages)  # a used pool is not in order

    def _build(self, kv: KVConfig, states: Sequence[State], pages: int, slots: int, seed: int) -> DecodeStep:
        """The filled cache and the step over it: all the memory that is allocated before the first run."""
        arm, decoder = self.arm, self.decoder
        self.cache = KVCache(kv, decoder.cache_shape(), num_pages=pages, num_slots=slots, device=decoder.device)
        if baseline(arm, decoder.device.type):
            self.cache.backend = FlashInferBackend(self.cache, fp8=arm == "fp8_kv")
        generator = torch.Generator(decoder.device).manual_seed(seed)
        fill(self.cache, generator)
        if arm in BF16_PROTECTED:
            self.cache.backend = Bf16Protected(self.cache, ARMS[arm])
            fill(self.cache.backend.pool, generator)
        longest = max(pages_for(max(state.contexts)) for state in states)
        sizes = sorted({len(state.contexts) for state in states})
        decoder.prepare_inference()
        return DecodeStep(decoder, self.cache, max_pages=longest, buckets=sizes, sampler=argmax(decoder))

    @torch.inference_mode()
    def time(self, state: State, samples: int, warmups: int) -> list[float]:
        """Milliseconds of `samples` steps at a state, after `warmups`; between CUDA events, or by the CPU's clock."""
        table = self.page_table(state)
        slots, none = np.arange(len(state.contexts)), np.zeros(self.cache.num_slots, dtype=np.int64)
        size = self.step.load(table, slots, none, none)
        with self._naming_the_plan():  # the first run captures
            for _ in range(max(1, warmups)):
                self._runner.run(size, GREEDY)
        return [self._once(size) for _ in range(samples)]

    def _naming_the_plan(self) -> AbstractContextManager[None]:
        remedy = "lower --hbm-gb, so that the states which do not fit are left out"
        return naming_items(f"the {self.arm} replay", self._planned, self.decoder.device, remedy)

    def _once(self, size) -> float:
        if self.cache.device.type != "cuda":
            begin = perf_counter()
            self._runner.run(size, GREEDY)
            return (perf_counter() - begin) * 1e3
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._runner.run(size, GREEDY)
        stop.record()
        wait_for(stop, self._communicator)
        return start.elapsed_time(stop)

    def page_table(self, state: State) -> PageTable:
        """Pages for each request, scattered over the pool; the step writes its token again and again."""
        table, next_page = PageTable(self.cache.num_slots), 0
        for slot, context in enumerate(state.contexts):
            count = pages_for(context)
            table.set(slot, self._order[next_page : next_page + count].tolist())
            next_page += count
        table.context[: len(state.contexts)] = state.contexts
        table.last_token[: len(state.contexts)] = np.arange(len(state.contexts)) % self.decoder.config.vocab_size
        return table


@torch.inference_mode()
def fill(cache: KVCache, generator: torch.Generator) -> None:
    """Write every position and every side-buffer entry of layer 0 with random vectors; copy it to the others."""
    shape = cache.shape
    total, entries = cache.allocator.num_pages * PAGE_TOKENS, cache.side.entries
    for start in range(0, total, FILL):
        positions = torch.arange(start, min(start + FILL, total), device=cache.device)
        kept = positions < cache.num_slots * entries
        where = TokenSlots(
            page_ids=positions // PAGE_TOKENS, offsets=positions % PAGE_TOKENS, positions=positions,
            slots=torch.where(kept, positions // max(entries, 1), 0),
            side_entries=torch.where(kept, positions % max(entries, 1), -1),
        )  # fmt: skip
        size = (len(positions), shape.kv_heads, shape.head_dim)
        k, v = (torch.randn(size, generator=generator, device=cache.device).to(shape.dtype) for _ in range(2))
        cache.write(0, k, v, where)
    for tensor in cache.tensors:
        tensor[1:] = tensor[:1]
