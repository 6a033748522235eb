"""The rollout engine: a decoder over the quantised, paged cache, driven by the scheduler (§A.2, §A.3)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from kv4rl.cache.kv_cache import KVCache
from kv4rl.config import KVConfig, RolloutConfig, require, require_integer, require_protected_fits
from kv4rl.engine.base import BatchingEngine
from kv4rl.engine.clock import DeviceClock
from kv4rl.engine.decode_step import DecodeStep, default_buckets
from kv4rl.engine.draw import DrawKeys, ForcedEnd, draw, sampler_of
from kv4rl.engine.flashinfer import FlashInferBackend
from kv4rl.engine.graphs import StepGraphs, capturable
from kv4rl.engine.memory import max_pages, naming_the_plan
from kv4rl.engine.noise import noise_key
from kv4rl.engine.release import CacheMemory
from kv4rl.engine.request import Request, token_ids
from kv4rl.engine.sampler import Sampling
from kv4rl.engine.scheduler import Entry, Limits, Scheduler, StepPlan
from kv4rl.engine.step_batch import StepBatch
from kv4rl.engine.transfer import Download, upload
from kv4rl.engine.weights import check_weights, copy_weights
from kv4rl.model.decoder import Decoder


class NonFiniteLogits(FloatingPointError):
    """Logits of a request held NaN or +inf; the message names the request and the step."""


@dataclass(frozen=True)
class Response:
    """One finished response of `generate`; (prompt_id, sibling) is its key in the group."""

    prompt_id: str
    sibling: int
    prompt_tokens: list[int]
    tokens: list[int]  # the end-of-sequence token included
    sampler_logp: list[float]  # natural log, one per token
    finish_reason: str  # "eos" or "length"


def _require_fitting(decoder, kv, rollout, eos_token_ids: Sequence[int]) -> None:
    """ValueError for a name where a model belongs, one configuration where another does, tokens the model lacks."""
    require(hasattr(decoder, "cache_shape"), "decoder", decoder, "a model: load_decoder(name) makes one")
    require(isinstance(kv, KVConfig), "kv", kv, 'a KVConfig, such as KVConfig("kv4rl")')
    require(isinstance(rollout, RolloutConfig), "rollout", rollout, 'a RolloutConfig, such as preset("mini").rollout')
    vocabulary = decoder.config.vocab_size
    for token in token_ids(eos_token_ids, "eos_token_ids"):
        require(0 <= token < vocabulary, "eos_token_ids", token, f"a token id below the vocabulary's {vocabulary}")
    planned = "pages (0 stands for what plan_engine makes of a memory budget: `within` puts them here)"
    require(rollout.cache_pages >= 1, "rollout.cache_pages", rollout.cache_pages, planned)
    require_protected_fits(kv, decoder.config.max_positions)


class RolloutEngine(BatchingEngine):
    """Samples responses of one policy version through the KV cache of `kv`.

    The decoder becomes the engine's own: its projections are fused, `update_weights` writes into it. Requests added
    with `add` are sampled as the rollout configuration says; `generate` samples as its argument says and needs the
    engine for itself.
    `forced_lengths(request)`, if given, is where each response ends, its end-of-sequence token included (at least 1):
    the cap still cuts, and nothing else ends it (`rollout/forced.py`).
    `buckets` pads the rows of decode steps; None: `default_buckets` where steps are captured as CUDA graphs, that is
    with the CUDA kernels unless `graphs` is False, and no padding elsewhere. `overlap` (`BatchingEngine`) keeps the
    device busy between decode steps; None: where steps are captured. All work goes to the CUDA stream that is current
    when a method is called: the same one each time.
    `memory`, if given, is where the cache is allocated; while its memory is given back no step runs.
    Raises `InputError` for limits or widths that model and cache cannot have, `PlanTooLarge` if memory runs out.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVConfig,
        rollout: RolloutConfig,
        *,
        eos_token_ids: Sequence[int],
        backend: str = "auto",
        forced_lengths: Callable[[Request], int] | None = None,
        buckets: Sequence[int] | None = None,
        graphs: bool = True,
        overlap: bool | None = None,
        memory: CacheMemory | None = None,
    ):
        _require_fitting(decoder, kv, rollout, eos_token_ids)
        self.decoder = decoder
        self._communicator = getattr(decoder, "communicator", None)
        self.rollout = rollout
        self.eos_token_ids = tuple(eos_token_ids)
        slots = rollout.max_active_requests
        limits = Limits(slots, rollout.step_tokens, rollout.workspace_tokens, rollout.max_prompt_tokens)
        self.memory = memory or CacheMemory("cpu")
        self.cache = self._make_cache(kv, backend)
        super().__init__(Scheduler(self.cache.allocator, limits), bytes_per_page=self.cache.bytes_per_page)
        self._sampling = Sampling.of(rollout)
        self._noise = np.zeros(slots, dtype=np.int64)  # key of the request in each slot
        self._forced_lengths, self._forced = forced_lengths, None
        if forced_lengths is not None:
            require(len(self.eos_token_ids) > 0, "eos_token_ids", (), "a token to end responses of forced length with")
            self._forced = ForcedEnd.of(self.eos_token_ids, decoder)
        graphs = graphs and capturable(self.cache)
        buckets = default_buckets(slots) if graphs and buckets is None else buckets
        self._sampler = sampler_of(decoder)
        given = {"max_pages": max_pages(decoder, rollout), "forced": self._forced, "sampler": self._sampler}
        with self._naming_the_plan():
            self._decode = DecodeStep(decoder, self.cache, buckets=buckets, **given)
        self._graphs = StepGraphs(self._decode) if graphs else None
        self.overlap = graphs if overlap is None else overlap
        self._weights_whole = True

    def _make_cache(self, kv: KVConfig, backend: str) -> KVCache:
        decoder, rollout = self.decoder, self.rollout
        sizes = {"num_pages": rollout.cache_pages, "num_slots": rollout.max_active_requests}
        with naming_the_plan(decoder, kv, rollout):
            decoder.prepare_inference()
            with self.memory.allocating():
                return KVCache(kv, decoder.cache_shape(), **sizes, device=decoder.device, backend=backend)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs of every batch bucket now, rather than in the step that first needs one."""
        if self._graphs is not None:
            self._flight = None  # its results lie where padding is about to be sampled
            with self._naming_the_plan():
                self._graphs.capture_all(self._sampling)

    def use_flashinfer(self) -> None:
        """Decode the unquantised cache through FlashInfer, as the paper's baseline does; before anything is captured.

        Raises `BackendUnavailable` where it does not run.
        """
        with naming_the_plan(self.decoder, self.cache.kv, self.rollout, flashinfer=True):
            self.cache.backend = FlashInferBackend(self.cache)

    @property
    def graph_pool_bytes(self) -> int:
        """Device memory that captured graphs keep for their intermediates, whether they run or not."""
        return 0 if self._graphs is None else self._graphs.pool_bytes

    def add(self, request: Request) -> None:
        """Queue a request, new or carried.

        Raises `ValueError` if it can never fit (pages, workspace, prompt limit, the model's positions: both numbers
        are named) or holds a token outside the vocabulary.
        """
        self.check_fits(request)
        super().add(request)

    def check_fits(self, request: Request) -> None:
        """Raise what `add` would raise for a request that can never run, and change nothing."""
        config = self.decoder.config
        known = request.prompt_tokens + request.tokens
        for token in (min(known, default=0), max(known, default=0)):
            expected = f"an id below the vocabulary's {config.vocab_size} in {request.label}"
            require(0 <= token < config.vocab_size, "token", token, expected)
        longest = len(request.prompt_tokens) + request.max_response_tokens
        expected = f"at most the model's {config.max_positions}: prompt and cap of {request.label}"
        require(longest <= config.max_positions, "positions", longest, expected)
        if self._forced_lengths is not None:
            expected = f"the engine's {self.eos_token_ids}, with which it ends responses of forced length"
            require(request.eos_token_ids == self.eos_token_ids, "eos_token_ids", request.eos_token_ids, expected)
        self.scheduler.check_fits(request)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        prompt_ids: Sequence[str] | None = None,
        samples: int = 1,
    ) -> list[Response]:
        """Sample `samples` responses to each prompt (token ids); results in order of prompt, then sibling.

        `prompt_ids` (default "0", "1", …) key the noise and must be distinct. Raises `ValueError` on a prompt that
        can never fit, `RuntimeError` if requests of a collector are still in the engine.
        """
        if self.has_unfinished:
            raise RuntimeError("generate needs the engine for itself: pause it or step it until nothing is unfinished")
        require(isinstance(sampling, Sampling), "sampling", sampling, "a Sampling, such as Sampling(temperature=0.0)")
        listed = isinstance(prompts, list | tuple) or hasattr(prompts, "tolist")
        require(listed, "prompts", prompts, "a list of prompts, each of them a list of token ids")
        prompts = [token_ids(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
        ids = [str(i) for i in range(len(prompts))] if prompt_ids is None else list(prompt_ids)
        require(len(ids) == len(prompts), "prompt_ids", len(ids), f"one for each of the {len(prompts)} prompts")
        require(len(set(ids)) == len(ids), "prompt_ids", ids, "distinct ids")
        require_integer(samples, "samples", 1)
        cap = self.rollout.max_response_tokens if sampling.max_response_tokens is None else sampling.max_response_tokens
        requests = [
            Request(ids[i], sibling, list(prompt), cap, self.eos_token_ids, priority=(i, sibling))
            for i, prompt in enumerate(prompts)
            for sibling in range(samples)
        ]
        self._finish_all(requests, sampling)
        return [
            Response(r.prompt_id, r.sibling, r.prompt_tokens, r.tokens, r.sampler_logp, r.finish_reason)
            for r in requests
        ]

    def update_weights(
        self, named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """Replace every weight and move to policy `version` (design decision 8).

        Names and shapes are the decoder's own (`named_parameters`). A mapping is checked as a whole before anything
        is written; a stream is checked as it comes, and one that fails leaves the engine refusing to run until a
        complete update. Raises `RuntimeError` with anything resident: its K/V would be of an older policy.
        """
        self._begin_version(version)
        if isinstance(named_tensors, Mapping):
            check_weights(self.decoder, named_tensors)
            named_tensors = named_tensors.items()
        self._weights_whole = False
        copy_weights(self.decoder, named_tensors)
        self._weights_whole = True
        self.policy_version = self.cache.policy_version = version

    def _finish_all(self, requests: list[Request], sampling: Sampling) -> None:
        """Run requests to their end under `sampling`; whatever happens, nothing stays in the engine."""
        configured, self._sampling = self._sampling, sampling
        try:
            for request in requests:
                self.add(request)
            while self.has_unfinished:
                self.step()
        finally:
            self.pause()
            self._sampling = configured

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> tuple[DeviceClock, Download]:
        if not self._weights_whole:
            raise RuntimeError("the last update_weights stopped half-way: update again before the next step")
        if self.memory.away:
            raise RuntimeError("the cache's memory is given back: restore it before the next step")
        table, static, clock = self.scheduler.table, self._static(plan), DeviceClock(self.decoder.device)
        with self._naming_the_plan():
            if static:
                size = self._decode.load(table, plan.slots, self._noise, self._ends, plan.previous)
            clock.start()
            drawn = (self._graphs or self._decode).run(size, self._sampling) if static else self._run_with_prefill(plan)
            clock.stop()
            return clock, Download(drawn[:, : len(plan.sampled)])

    def _naming_the_plan(self) -> AbstractContextManager[None]:
        flashinfer = self.cache.backend.name == FlashInferBackend.name
        return naming_the_plan(self.decoder, self.cache.kv, self.rollout, flashinfer=flashinfer)

    def _land(self, plan: StepPlan, launched: tuple[DeviceClock, Download]) -> tuple[list[int], list[float]]:
        clock, download = launched
        self._device_ms = None
        if not plan.sampled:  # chunks of unfinished prefills: nothing to wait for
            return [], []
        tokens, logp = download.wait(self._communicator)
        self._device_ms = clock.elapsed_ms()
        if not np.isfinite(logp).all():
            self._require_finite(plan, logp.tolist())
        return tokens.astype(np.int64).tolist(), logp.tolist()

    def _plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        ahead = super()._plan_ahead(plan) if self._static(plan) else None
        return ahead if ahead is not None and self._static(ahead) else None

    def _static(self, plan: StepPlan) -> bool:
        """Whether a step runs over the static buffers of `DecodeStep`."""
        return plan.kind == "decode" and self._decode.fits(self.scheduler.table, plan.slots)

    def _run_with_prefill(self, plan: StepPlan) -> torch.Tensor:
        """A step with prefill chunks, or with requests longer than the static buffers: float64 [2, sampled]."""
        batch = StepBatch(plan, self.scheduler.table, self.cache, self.decoder.device)
        hidden = self.decoder(batch.input_ids, batch.positions, batch.attend)
        if not plan.sampled:
            return hidden.new_empty((2, 0))
        for entry in plan.sampled[len(plan.decode) :]:
            self._enter(entry)
        slots = [entry.slot for entry in plan.sampled]
        noise, ends = (upload(array[slots], hidden.device) for array in (self._noise, self._ends))
        keys = DrawKeys(noise, batch.sampled_positions, ends)
        logits = self.decoder.sampling_logits(hidden[batch.sampled_rows])
        return draw(logits, keys, self._sampling, forced=self._forced, sampler=self._sampler)

    def _enter(self, entry: Entry) -> None:
        """Note what the tokens of a request depend on, when its first one in this slot is sampled."""
        request = entry.request
        self._noise[entry.slot] = noise_key(self._sampling.seed, request.prompt_id, request.sibling)
        if self._forced_lengths is not None:
            length = self._forced_lengths(request)
            whole = isinstance(length, int | np.integer) and length >= 1
            require(whole, f"forced length of {request.label}", length, "an integer >= 1")
            self._ends[entry.slot] = len(request.prompt_tokens) + length

    def _require_finite(self, plan: StepPlan, logps: list[float]) -> None:
        for entry, logp in zip(plan.sampled, logps, strict=True):
            if not math.isfinite(logp) and entry.slot >= 0:  # a row given up meanwhile may hold anything
                where = f"engine step {self.steps}, policy_version {self.policy_version}"
                raise NonFiniteLogits(
                    f"logits of {entry.request.label} are not finite at {where}, "
                    f"position {entry.request.context_tokens}"
                )
