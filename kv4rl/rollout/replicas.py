"""Several simulated engines behind one: data-parallel rollout replicas that serve one collector."""

from collections.abc import Sequence

from kv4rl.config import require
from kv4rl.engine.protocol import StepStats
from kv4rl.engine.request import Request
from kv4rl.rollout.skipping import SkippingEngine


class Replicas:
    """An `Engine` made of `SkippingEngine`s: each request stays on the least loaded replica it was given to.

    Replicas run side by side in simulated time. When one of them may have met the quota, the others finish the step
    they are in, as running replicas would.
    """

    def __init__(self, engines: Sequence[SkippingEngine]):
        require(len(engines) >= 1, "engines", len(engines), "at least one replica")
        self.engines = list(engines)
        self.last_step: StepStats | None = None
        self._home: dict[Request, int] = {}
        self._load = [0] * len(self.engines)

    @property
    def policy_version(self) -> int:
        return self.engines[0].policy_version

    @property
    def has_unfinished(self) -> bool:
        return any(engine.has_unfinished for engine in self.engines)

    @property
    def clock_ms(self) -> float:
        """Simulated time; all replicas agree on it between collections."""
        return max(engine.clock_ms for engine in self.engines)

    def add(self, request: Request) -> None:
        replica = min(range(len(self.engines)), key=self._load.__getitem__)
        self.engines[replica].add(request)
        self._home[request] = replica
        self._load[replica] += 1

    def step(self) -> list[Request]:
        first = min(self.engines, key=lambda engine: engine.next_event_ms)
        finished = self._step(first)
        for engine in self.engines:
            while engine is not first and engine.next_event_ms < first.clock_ms:
                finished += self._step(engine)
        return finished

    def abort(self, request: Request) -> None:
        engine = self.engines[self._forget(request) if request in self._home else 0]  # any, if none holds it
        engine.abort(request)

    def pause(self) -> list[Request]:
        now, paused = self.clock_ms, []
        for engine in self.engines:
            engine.run_quietly_until(now)
        for engine in self.engines:
            paused += engine.pause()
        now = self.clock_ms
        for engine in self.engines:
            engine.clock_ms = now
        self._home.clear()
        self._load = [0] * len(self.engines)
        return sorted(paused, key=lambda request: request.priority)

    def update_weights(self, named_tensors: object = (), version: int | None = None) -> None:
        for engine in self.engines:
            engine.update_weights(named_tensors, version)

    def _step(self, engine: SkippingEngine) -> list[Request]:
        finished = engine.step()
        self.last_step = engine.last_step
        for request in finished:
            self._forget(request)
        return finished

    def _forget(self, request: Request) -> int:
        replica = self._home.pop(request)
        self._load[replica] -= 1
        return replica
