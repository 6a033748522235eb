"""The model-free twin: the same scheduler, tokens from a formula. What collectors and schedulers are tested with."""

from collections.abc import Callable
from dataclasses import replace

from kv4rl.cache.page_allocator import PageAllocator
from kv4rl.engine.base import BatchingEngine
from kv4rl.engine.noise import noise_key, splitmix64
from kv4rl.engine.protocol import StepStats
from kv4rl.engine.request import Request
from kv4rl.engine.scheduler import Limits, Scheduler, StepPlan

VOCABULARY = 1000


class FakeEngine(BatchingEngine):
    """An `Engine` that knows how long each response will be.

    `lengths(request)` is the response's length, its end-of-sequence token included (at least 1); the request's own
    cap still cuts it. A request without end-of-sequence ids runs to its cap. Token and log-probability depend on
    (prompt id, sibling, position) alone. `cost(stats) -> ms`, if given, replaces the wall clock in `step_ms`.
    """

    def __init__(
        self,
        lengths: Callable[[Request], int],
        *,
        slots: int,
        pages: int,
        step_tokens: int = 8192,
        workspace_tokens: int = 32768,
        max_prompt_tokens: int = 1024,
        bytes_per_page: int = 1,
        cost: Callable[[StepStats], float] | None = None,
        overlap: bool = False,
    ):
        limits = Limits(slots, step_tokens, workspace_tokens, max_prompt_tokens)
        super().__init__(Scheduler(PageAllocator(pages), limits), bytes_per_page=bytes_per_page, overlap=overlap)
        self._lengths = lengths
        self._cost = cost

    def step(self) -> list[Request]:
        finished = super().step()
        if self._cost is not None:
            self.last_step = replace(self.last_step, step_ms=self._cost(self.last_step))
        return finished

    def update_weights(self, named_tensors: object = (), version: int | None = None) -> None:
        """Move to the next policy version (or `version`); there are no weights. Raises with anything resident."""
        version = self.policy_version + 1 if version is None else version
        self._begin_version(version)
        self.policy_version = version

    def _launch(self, plan: StepPlan) -> tuple[list[int], list[float]]:
        tokens, logps = [], []
        for entry in plan.sampled:
            token, logp = self._next(entry.request, plan.lead)
            tokens.append(token)
            logps.append(logp)
        return tokens, logps

    def _next(self, request: Request, lead: int) -> tuple[int, float]:
        draw = splitmix64(noise_key(0, request.prompt_id, request.sibling) + request.context_tokens + lead)
        logp = -1e-3 - (draw % 997) / 997
        if request.eos_token_ids and len(request.tokens) + lead + 1 >= self._lengths(request):
            return request.eos_token_ids[0], logp
        token = draw % VOCABULARY
        while token in request.eos_token_ids:
            token += 1
        return token, logp
