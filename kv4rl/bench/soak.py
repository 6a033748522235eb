"""Ten minutes of everything at random: requests added, aborted, preempted, paused and carried over weight updates.

Two sets of weights take turns. After each update, with nothing resident, a canary rolls a few keyed responses: the same
weights must give the same bits as their first time, which they only do if captured graphs, page tables, caches and
buffers are what they were then. Counted besides: pages and device bytes still held with nothing resident, against
the first time. Any of these, a log-probability that is not finite (the engine raises), or a response whose length its
request does not allow, ends the run; so does a precision under which nobody was preempted, for which pages are few.

    python -m kv4rl.bench soak --minutes 10 --device cuda
    python -m kv4rl.bench soak --minutes 0.1
"""

import argparse
import gc
import json
from collections import Counter
from collections.abc import Sequence
from itertools import count
from time import perf_counter

import numpy as np
import torch

from kv4rl.bench.engines import bench_engine
from kv4rl.bench.refusals import require_counts, require_flashinfer, require_writable
from kv4rl.cache.main_cache import pages_for
from kv4rl.cli import one_sentence
from kv4rl.config import LARGEST, PRECISIONS, RolloutConfig, require, require_integer, require_number
from kv4rl.device import choose_device
from kv4rl.engine.request import Request
from kv4rl.model.shapes import random_model, shape_config
from kv4rl.results import result_row, write_rows

WEIGHTS = 2  # sets that take turns
EOS = (1,)
OPERATIONS = {"step": 0.854, "add": 0.1, "abort": 0.042, "pause": 0.004}  # chances; what is paused starts over
PROMPTS = 8  # at most this part of the longest is prompt: what is admitted small, and grows, is preempted
PATIENCE = 1000  # operations without a preemption after which a run has failed
UNITS = {"steps": "steps", "decode_tokens": "tokens", "finished": "requests", "aborts": "requests"}
UNITS |= {"preemptions": "requests", "weight_updates": "updates", "leaked_pages": "pages", "leaked_bytes": "B"}


class SoakFailure(RuntimeError):
    """The engine is not what it was; the message says in what."""


class Soak:
    """One engine under random operations; `counts` says what happened."""

    def __init__(self, options: argparse.Namespace, precision: str):
        model = lambda seed: random_model(options.model, seed=seed, device=options.device)
        self.weights = [dict(model(seed).named_parameters()) for seed in range(WEIGHTS)]
        self.config = RolloutConfig(
            max_active_requests=options.slots, step_tokens=max(256, options.slots), cache_pages=options.pages,
            workspace_tokens=2 * options.longest, max_prompt_tokens=options.longest // PROMPTS,
            max_response_tokens=options.longest - options.longest // PROMPTS,
        )  # fmt: skip
        self.engine = bench_engine(model(0), precision, self.config, eos_token_ids=EOS)
        self.engine.overlap = True  # on a CPU too
        self.engine.capture()
        self.rng = np.random.default_rng(options.seed)
        self.live: list[Request] = []
        self.counts = Counter(dict.fromkeys(UNITS, 0))
        self._made = 0
        self._canaries: dict[int, list] = {}
        self._bytes: int | None = None
        for version in range(1, WEIGHTS + 1):  # what every set of weights gives, and the memory that it takes
            self._update(version)

    def run(self, seconds: float) -> None:
        """Perform operations until the time is over, then check once more that all can be given back.

        It goes on until somebody was preempted, if need be; `SoakFailure` where nobody is in `PATIENCE` operations.
        """
        end, names = perf_counter() + seconds, list(OPERATIONS)
        chances = np.array([OPERATIONS[name] for name in names])
        for done in count():
            preempted = self.counts["preemptions"] > 0
            if perf_counter() >= end and (preempted or done >= PATIENCE):
                break
            getattr(self, f"_{names[self.rng.choice(len(names), p=chances / chances.sum())]}")()
        self._pause()
        if not preempted:
            raise SoakFailure(
                f"nobody was preempted in {self.counts['steps']} steps: take fewer --pages or a larger --longest"
            )

    def _add(self) -> None:
        vocabulary, limits = self.engine.decoder.config.vocab_size, self.config
        for _ in range(int(self.rng.integers(1, limits.max_active_requests))):
            if len(self.live) >= 2 * limits.max_active_requests:
                return
            prompt = self.rng.integers(
                vocabulary, size=int(self.rng.integers(1, limits.max_prompt_tokens + 1))
            ).tolist()
            cap = int(self.rng.integers(0, limits.max_response_tokens + 1))
            eos = EOS if self._made % 2 else ()  # every other one runs to its cap
            request = Request(f"p{self._made}", self._made % 8, prompt, cap, eos, (int(self.rng.integers(3)),))
            self._made += 1
            self.engine.add(request)
            self.live.append(request)

    def _step(self) -> None:
        for _ in range(int(self.rng.integers(1, 9))):
            for request in self.engine.step():
                self._finished(request)
            step = self.engine.last_step
            self.counts.update(steps=1, decode_tokens=step.decode_tokens, preemptions=step.preemptions)
        table, scheduler = self.engine.scheduler.table, self.engine.scheduler
        if int(table.held.sum()) != scheduler.used_pages:
            raise SoakFailure(f"slots hold {int(table.held.sum())} pages, {scheduler.used_pages} are in use")

    def _finished(self, request: Request) -> None:
        self.live.remove(request)
        self.counts["finished"] += 1
        count = len(request.tokens)
        ended = request.tokens[-1] in EOS if request.finish_reason == "eos" else count == request.max_response_tokens
        if not ended or len(request.sampler_logp) != count or max(request.sampler_logp, default=0.0) > 1e-3:
            raise SoakFailure(f"{request.label} finished ({request.finish_reason}) with {count} tokens")

    def _abort(self) -> None:
        if self.live:
            request = self.live.pop(int(self.rng.integers(len(self.live))))
            self.engine.abort(request)
            self.counts["aborts"] += 1

    def _pause(self) -> None:
        """Evict everything, change the weights, and go on with what was unfinished."""
        paused = self.engine.pause()
        if set(paused) != set(self.live):
            raise SoakFailure(f"{len(paused)} requests came back of {len(self.live)}")
        self._update(self.engine.policy_version + 1)
        for request in paused:
            self.engine.add(request)

    def _update(self, version: int) -> None:
        """Weights of `version`, nothing held, the same memory as ever, and the canary of these weights."""
        chosen = version % WEIGHTS
        self.engine.update_weights(self.weights[chosen], version)
        self.counts["weight_updates"] += 1
        rolled = self._canary()
        if rolled != self._canaries.setdefault(chosen, rolled):
            raise SoakFailure(f"weights {chosen} give other responses at version {version} than the first time")
        try:
            self.engine.check_drained()
        except RuntimeError as leak:
            raise SoakFailure(f"with nothing resident, at version {version}: {leak}") from leak
        self.counts["leaked_pages"] = self.engine.scheduler.used_pages
        held = _held_bytes(self.engine.decoder.device)
        if version >= WEIGHTS:
            self._bytes = held if self._bytes is None else self._bytes
            self.counts["leaked_bytes"] = held - self._bytes
            if held > self._bytes:
                raise SoakFailure(f"{held - self._bytes} bytes more are held than with every set of weights once in")

    def _canary(self) -> list:
        """Tokens and log-probabilities of as many keyed responses as there are slots, of lengths 1 … 16."""
        count, longest = self.config.max_active_requests, min(16, self.config.max_response_tokens)
        vocabulary, room = self.engine.decoder.config.vocab_size, self.config.max_prompt_tokens
        prompts = [[(7 * i + j) % vocabulary for j in range(1 + 5 * i % min(room, 30))] for i in range(count)]
        requests = [Request(f"canary{i}", 0, prompt, 1 + i % longest, ()) for i, prompt in enumerate(prompts)]
        for request in requests:
            self.engine.add(request)
        while self.engine.has_unfinished:
            self.engine.step()
        return [(request.tokens, request.sampler_logp) for request in requests]


def _held_bytes(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def rows(options: argparse.Namespace, precision: str, counts: Counter) -> list[dict]:
    """CSV rows of one precision."""
    about = {"experiment": "soak", "arm": precision, "model": options.model, "shape": f"{options.minutes:g}min"}
    return [result_row(**about, metric=name, unit=unit, value=counts[name]) for name, unit in UNITS.items()]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kv4rl.bench soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--minutes", type=float, default=10.0, help="in all, shared by the precisions")
    parser.add_argument("--model", default="mini-qwen3", help="qwen3-4b, qwen3-8b or a shipped one; weights are random")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--slots", type=int, default=128 if cuda else 8)
    parser.add_argument("--pages", type=int, default=400 if cuda else 20, help="of the cache: too few for all slots")
    parser.add_argument("--longest", type=int, default=1024 if cuda else 256, help="prompt and response tokens")
    parser.add_argument("--seed", type=int, default=43)
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", default="soak.csv", help="CSV under data/results, or an absolute path")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with one_sentence("kv4rl.bench soak"):
        require_number(options.minutes, "minutes", 0, LARGEST, open_low=True)
        require_counts(options, slots=2, longest=32)
        require_integer(options.seed, "seed", 0)
        require_writable(options.out)
        device = choose_device(options.device)
        require_flashinfer({"bf16"} & set(options.precisions), device.type)
        positions = shape_config(options.model).max_positions
        require(options.longest <= positions, "longest", options.longest, f"at most the model's {positions} positions")
        require_counts(options, pages=pages_for(options.longest))
    found = {}
    for precision in options.precisions:
        with one_sentence("kv4rl.bench soak"):
            soak = Soak(options, precision)
        with one_sentence("kv4rl.bench soak", kinds=(SoakFailure,), status=1):
            soak.run(options.minutes * 60 / len(options.precisions))
        found[precision] = soak.counts
        print(f"{precision:>6} " + " ".join(f"{name} {soak.counts[name]}" for name in UNITS), flush=True)
        path = write_rows(options.out, rows(options, precision, soak.counts))
        del soak
    total = {name: sum(counts[name] for counts in found.values()) for name in UNITS}
    print(json.dumps({"experiment": "soak", "file": str(path), "minutes": options.minutes, **total}))


if __name__ == "__main__":
    main()
