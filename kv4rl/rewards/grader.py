"""Grades responses in spawned worker processes that can be killed: never an exception, never a hang, in training.

    with Grader(workers=2) as grader:
        grader.submit("p1/0", response_text, gold)  # returns at once, also while the workers are still starting
        verdicts = grader.results()  # {"p1/0": Verdict(...)}

One thread per worker feeds it batches and holds the deadline of each response. A worker that overruns or dies is
replaced; the response it was on scores 0 and says why; the others of its batch are graded again elsewhere.
"""

import json
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe

from kv4rl.config import require
from kv4rl.rewards.boxes import last_box
from kv4rl.rewards.gold import Gold, to_plain

BATCH = 64  # responses per message: large enough to hide the round trip, small enough to share work
START_TIMEOUT_S = 120.0  # importing sympy takes half a second on an idle core, much longer on a crowded machine
MAX_FAILED_STARTS = 3


@dataclass(frozen=True)
class Verdict:
    """One response's scores under both readings (design decision 10), and what went wrong, if anything."""

    verl: float  # 0 or 1: any expression of the response equals the gold (the paper's reading, the default)
    last_box: float  # 0 or 1: the last balanced box equals the gold
    has_box: bool
    timed_out: bool = False
    worker_died: bool = False
    error: str | None = None

    def score(self, reading: str) -> float:
        """The score under `reading`: "verl" or "last_box"."""
        require(reading in ("verl", "last_box"), "reading", reading, "verl or last_box")
        return self.verl if reading == "verl" else self.last_box

    @property
    def correct_without_box(self) -> bool:
        """Rewarded by the verl reading though no box was given: logged as `reward/correct_without_box`."""
        return self.verl == 1.0 and not self.has_box


@dataclass
class GraderCounters:
    """Running totals, logged as `reward/graded`, `reward/timeouts`, `reward/deaths`, `reward/restarts`."""

    graded: int = 0
    timeouts: int = 0
    deaths: int = 0
    restarts: int = 0  # workers started again after a kill, a death or a retirement


@dataclass(eq=False)
class _Tickets:
    """What one caller waits for."""

    pending: set[Hashable] = field(default_factory=set)
    done: dict[Hashable, Verdict] = field(default_factory=dict)


@dataclass
class _Pool:
    """State shared by the caller's thread and the supervisors; every field is read and written under `changed`."""

    workers: int
    timeout_s: float
    memory_bytes: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    tasks: deque = field(default_factory=deque)  # (tickets, key, text, gold)
    processes: set = field(default_factory=set)
    counters: GraderCounters = field(default_factory=GraderCounters)
    failure: str | None = None
    closed: bool = False

    def put(self, tickets: _Tickets, items: Sequence[tuple[Hashable, str, str | Gold]]) -> None:
        with self.changed:
            self.check_usable()
            for key, text, gold in items:
                require(isinstance(text, str), "response_text", text, "a string")
                require(isinstance(gold, str | Gold), "gold", gold, "a string or a Gold")
                fresh = key not in tickets.pending and key not in tickets.done
                require(fresh, "key", key, "a key whose verdict is neither pending nor waiting in results()")
            for key, text, gold in items:
                tickets.pending.add(key)
                self.tasks.append((tickets, key, text, gold))
            self.changed.notify_all()

    def take(self) -> list:
        """A batch to grade, its share of what waits; empty when the pool is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.tasks or self.closed)
            share = 0 if self.closed else min(BATCH, -(-len(self.tasks) // self.workers))
            return [self.tasks.popleft() for _ in range(share)]

    def give_back(self, batch: list) -> None:
        with self.changed:
            self.tasks.extendleft(reversed(batch))
            self.changed.notify_all()

    def finish(self, task: tuple, verdict: Verdict) -> None:
        tickets, key, _, _ = task
        with self.changed:
            tickets.pending.discard(key)
            tickets.done[key] = verdict
            self.counters.graded += 1
            self.counters.timeouts += verdict.timed_out
            self.counters.deaths += verdict.worker_died
            if not tickets.pending:
                self.changed.notify_all()

    def check_usable(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)
        if self.closed:
            raise RuntimeError("the Grader is closed")

    def wait(self, tickets: _Tickets) -> None:
        with self.changed:
            self.changed.wait_for(lambda: not tickets.pending or self.failure or self.closed)
            if tickets.pending:
                self.check_usable()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            processes = tuple(self.processes)
            self.changed.notify_all()
        for process in processes:
            process.kill()
            process.wait()


class _Worker:
    """One process and its socket."""

    def __init__(self, pool: _Pool):
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", "kv4rl.rewards.worker"]
        arguments = [str(theirs.fileno()), str(pool.memory_bytes), str(pool.timeout_s)]
        self.process = subprocess.Popen(command + arguments, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self.ready = False

    def await_ready(self) -> bool:
        """Whether the worker came up; the first message it sends says so."""
        self.ready = self.ready or self.receive(START_TIMEOUT_S) == b"ready"
        return self.ready

    def receive(self, seconds: float) -> bytes | None:
        """The next message; None when none came in time, or the worker ended (then `poll()` is not None)."""
        try:
            return self.connection.recv_bytes() if self.connection.poll(seconds) else None
        except (EOFError, ConnectionResetError):
            self.process.wait()
            return None

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


def _lost(worker: _Worker, text: str, timeout_s: float) -> Verdict:
    """The verdict on the response that a worker did not come back from."""
    has_box = last_box(text) is not None
    code = worker.process.poll()
    if code is None:
        reason = f"no verdict in {timeout_s:g} s: worker killed"
        return Verdict(0.0, 0.0, has_box, timed_out=True, error=reason)
    reason = f"signal {-code}" if code < 0 else f"exit status {code}"
    return Verdict(0.0, 0.0, has_box, worker_died=True, error=f"worker died ({reason})")


def _grade_batch(pool: _Pool, worker: _Worker, batch: list) -> tuple[bool, list]:
    """Grade `batch` in order; returns (the worker can go on, what is left to grade)."""
    try:
        worker.connection.send_bytes(json.dumps([[text, to_plain(gold)] for _, _, text, gold in batch]).encode())
    except (BrokenPipeError, ConnectionResetError):
        worker.process.wait()
        return False, batch  # it died between batches: nobody's answer is to blame
    for index, task in enumerate(batch):
        message = worker.receive(pool.timeout_s)
        if message is None:
            if not pool.closed:
                pool.finish(task, _lost(worker, task[2], pool.timeout_s))
            return False, batch[index + 1 :]
        fields = json.loads(message)
        retire = fields.pop("retire")
        pool.finish(task, Verdict(**fields))
        if retire:
            return False, batch[index + 1 :]
    return True, []


def _start(pool: _Pool) -> _Worker | None:
    """A ready worker; None when the pool is closed or the start failed too often (then `pool.failure` is set)."""
    for attempt in range(MAX_FAILED_STARTS):
        with pool.changed:
            if pool.closed:
                return None
            worker = _Worker(pool)
            pool.processes.add(worker.process)
        if worker.await_ready():
            return worker
        _stop(pool, worker)
        time.sleep(attempt)
    with pool.changed:
        command = f"{sys.executable} -m kv4rl.rewards.worker"
        pool.failure = f"grading workers do not start ({MAX_FAILED_STARTS} attempts of {command}); stderr says why"
        pool.changed.notify_all()
    return None


def _stop(pool: _Pool, worker: _Worker) -> None:
    worker.stop()
    with pool.changed:
        pool.processes.discard(worker.process)


def _supervise(pool: _Pool) -> None:
    """Keep one worker busy until the pool closes. Starts it at once, so that it is warm when work comes."""
    worker = _start(pool)
    while worker is not None:
        batch = pool.take()
        if not batch:
            break
        alive, rest = _grade_batch(pool, worker, batch)
        pool.give_back(rest)
        if not alive:
            _stop(pool, worker)
            worker = _start(pool)
            with pool.changed:
                pool.counters.restarts += worker is not None
    if worker is not None:
        _stop(pool, worker)


class Grader:
    """Pool of killable Math-Verify workers.

    Args:
        workers: processes, at least 1.
        timeout_s: seconds one response may take, wall clock; each of its two readings gets 45 % of them.
        memory_bytes: address space of one worker (RLIMIT_AS).
    """

    def __init__(self, workers: int = 2, timeout_s: float = 10.0, memory_bytes: int = 2 << 30):
        require(workers >= 1, "workers", workers, "an integer >= 1")
        require(timeout_s > 0, "timeout_s", timeout_s, "seconds > 0")
        require(memory_bytes >= 256 << 20, "memory_bytes", memory_bytes, "at least 256 MiB: sympy alone needs 100")
        self._pool = _Pool(workers, timeout_s, memory_bytes)
        self._submitted = _Tickets()
        self._threads = [
            threading.Thread(target=_supervise, args=(self._pool,), daemon=True, name=f"grader-{i}")
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, self._pool.close)  # also at interpreter exit

    def submit(self, key: Hashable, response_text: str, gold: str | Gold) -> None:
        """Queue one response under `key`; returns at once.

        Raises:
            ValueError: neither strings nor a `Gold`, or `key` is being graded already.
            RuntimeError: the Grader is closed, or its workers cannot start.
        """
        self._pool.put(self._submitted, [(key, response_text, gold)])

    def results(self, wait: bool = True) -> dict[Hashable, Verdict]:
        """Verdicts of submitted responses, each returned once; with `wait`, of all of them."""
        if wait:
            self._pool.wait(self._submitted)
        with self._pool.changed:
            if not self._submitted.done:
                self._pool.check_usable()
            done, self._submitted.done = self._submitted.done, {}
            return done

    def grade_many(self, items: Sequence[tuple[str, str | Gold]]) -> list[Verdict]:
        """Verdicts of `[(response_text, gold), ...]`, in order; independent of `submit` and `results`."""
        tickets = _Tickets()
        self._pool.put(tickets, [(index, text, gold) for index, (text, gold) in enumerate(items)])
        self._pool.wait(tickets)
        return [tickets.done[index] for index in range(len(items))]

    @property
    def counters(self) -> GraderCounters:
        """A snapshot of the running totals."""
        with self._pool.changed:
            return GraderCounters(**vars(self._pool.counters))

    def close(self) -> None:
        """Kill the workers and drop what is still queued. May be called twice."""
        self._finalizer()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def check_gold(gold: str) -> None:
    """Raise `ValueError` unless Math-Verify parses `gold` and finds it equal to itself (see `readings.check_gold`)."""
    from kv4rl.rewards.readings import check_gold as check  # sympy: only for those who load data

    check(gold)
