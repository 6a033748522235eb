"""Who has the GPU's memory: a colocated engine and learner take turns (§A.2 "Phase memory management").

Before a collection the learner's FP32 masters, AdamW moments and frozen reference go to pinned CPU memory and the
engine's cache comes back; before learning the cache goes, at addresses that captured graphs keep, and the learner
returns. The engine's own weights stay, for a sync writes them while the learner is there, and so does the memory pool
of its graphs, one step's intermediates.
"""

import gc
import resource
from dataclasses import replace

import torch

from kv4rl.cache.kv_cache import CacheShape
from kv4rl.cache.memory_plan import page_bytes
from kv4rl.config import KVConfig, RolloutConfig, require
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.release import CacheMemory
from kv4rl.grpo.learner import GRPOLearner
from kv4rl.grpo.offload import Offloader
from kv4rl.metrics import Timers

USABLE = 0.8  # of free memory, for pages: steps need workspace beside them
PHASES = ("collect", "learn", "evaluate")  # the engine's turn, the learner's, and neither's: another engine's


class PhaseController:
    """Switches between the phases of one learner and, once `attach`ed, one engine; a new one is in phase "learn".

    With `take_turns` False everything stays where it is, and only what a phase uses is measured. On a CPU switches move
    nothing either: there is no second memory to move to.
    """

    def __init__(self, learner: GRPOLearner, device: torch.device, *, take_turns: bool):
        self.phase = "learn"
        self.peak_bytes: dict[str, int] = {}  # phase -> most bytes allocated in its latest turn
        self.reserved_bytes: dict[str, int] = {}  # the same with what torch keeps back: graphs' pools
        self._cuda, self._device = device.type == "cuda", device
        self._turns = take_turns and self._cuda
        self._learner = learner
        self._offloader = Offloader(pinned=self._cuda)
        self._engine: RolloutEngine | None = None
        self._released = 0  # bytes that torch counts as allocated, though they are given back
        self._dropped = 0  # the same of engines that are gone: torch keeps their pools, as reserved ones
        self._start_peak()

    def memory(self) -> CacheMemory | None:
        """Where the engine that will be attached allocates its cache."""
        return CacheMemory(self._device) if self._turns else None

    def attach(self, engine: RolloutEngine | None) -> None:
        """The engine whose cache takes turns with the learner, made in phase "collect"; None when it is dropped."""
        self._dropped += self._released
        self._engine, self._released = engine, 0

    def enter(self, phase: str, timers: Timers | None = None) -> None:
        """Give the memory to `phase`, if it does not have it; the time adds to `timers`' "switch".

        Raises RuntimeError with requests in the engine, ValueError for an unknown phase.
        """
        require(phase in PHASES, "phase", phase, f"one of {', '.join(PHASES)}")
        if phase == self.phase:
            return
        with (timers or Timers(self._device))("switch"):
            self._note_peak()
            if self._turns:
                self._move(phase)
            self.phase = phase
            self._start_peak()

    def metrics(self) -> dict[str, float]:
        """`perf/peak_memory_gb/<phase>` of each phase's latest turn, in GB of 1e9 bytes (on a CPU the process's).

        On CUDA `perf/peak_reserved_gb/<phase>` as well, and with an engine `perf/graph_pool_gb`: what its captured
        graphs keep in every phase (`StepGraphs.pool_bytes` says why).
        """
        self._note_peak()
        named = {"peak_memory_gb": self.peak_bytes, "peak_reserved_gb": self.reserved_bytes}
        found = {f"perf/{name}/{phase}": size / 1e9 for name, sizes in named.items() for phase, size in sizes.items()}
        if self._cuda and self._engine is not None:
            found["perf/graph_pool_gb"] = self._engine.graph_pool_bytes / 1e9
        return found

    def within_free(self, rollout: RolloutConfig, kv: KVConfig, shape: CacheShape) -> RolloutConfig:
        """`rollout` with no more pages than the memory that is free now holds, for an engine beside this one's."""
        if not self._turns:
            return rollout
        free = int(torch.cuda.mem_get_info(self._device)[0] * USABLE)
        return replace(rollout, cache_pages=min(rollout.cache_pages, max(1, free // page_bytes(kv, shape))))

    def _move(self, phase: str) -> None:
        engine = self._engine
        if phase != "collect" and engine is not None:
            self._released += engine.memory.release(engine.cache)
        if phase != "learn" and not self._offloader.away:
            self._offloader.offload(self._learner.movables())
        if self.phase == "evaluate":
            gc.collect()  # that engine's cache and plans name each other: dropping it frees nothing yet
        torch.cuda.empty_cache()  # what torch holds in reserve, the other's allocator cannot use
        if phase == "learn" and self._offloader.away:
            self._offloader.restore()
            self._learner.weights.refresh()
        if phase == "collect" and engine is not None and engine.memory.away:
            engine.memory.restore(engine.cache)
            self._released = 0

    def _start_peak(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def _note_peak(self) -> None:
        if self._cuda:
            self.peak_bytes[self.phase] = torch.cuda.max_memory_allocated(self._device) - self._released
            given_back = self._released + self._dropped
            self.reserved_bytes[self.phase] = torch.cuda.max_memory_reserved(self._device) - given_back
        else:
            self.peak_bytes[self.phase] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
