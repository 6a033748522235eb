"""Collection with a frozen policy at a stated length law: Fig. 2 and Fig. A1's traces, Fig. 6a and A6a's capacity gain.

Two comparisons on one engine, or on the replicas that torchrun's processes make (T is a replica's share of the quota):

- schedulers: synchronous against partial collection, unquantised cache. Means over pure-decode calls after warm-up,
  step time by CUDA events (§B.3); the curves behind them go to a second file, "_trace" (`bench/trace_bins.py`);
- precisions: partial collection under one memory budget. Each format first gets the pages that the budget buys it
  (execution and capacity together), then BF16's pages (execution alone); the quotient is the capacity's share.
  `--bf16-pages` lowers the budget until it buys BF16 so many, as §B.3 pins them: 83,022 for 1,024 requests, say, or an
  eighth of them for 128. On CUDA FlashInfer's workspace, 0.5 GB, is of BF16's budget; the others have it in pages.

Lengths are forced to a fit of `rollout/fits.py`, so weights may be random: `--model qwen3-4b` and `qwen3-8b` build the
true shape without any file. `--shrink` divides all lengths, for small models. On CUDA the unquantised arm decodes
through FlashInfer, and every batch bucket is captured before the first collection.

    python -m kv4rl.bench rollout --model qwen3-4b --fits 4B-300
    torchrun --nproc-per-node 4 -m kv4rl.bench rollout --model qwen3-8b --fits 8B-400 --tp 2
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch

from kv4rl.bench.carried import carry_simulated, dealt
from kv4rl.bench.engines import bench_engine, bench_plan
from kv4rl.bench.forced_rollout import forced_rollout, require_flags, shape_name
from kv4rl.bench.outcome import Outcome, gains, over_replicas, rows, table
from kv4rl.bench.refusals import require_counts, require_flashinfer
from kv4rl.bench.trace_bins import binned, write_bins
from kv4rl.cache.main_cache import pages_for
from kv4rl.cache.memory_plan import HBMPlan
from kv4rl.cli import one_sentence
from kv4rl.config import PAGE_TOKENS, PRECISIONS, RolloutConfig, require, require_integer
from kv4rl.device import release_memory
from kv4rl.engine.engine import RolloutEngine
from kv4rl.model.decoder import Decoder
from kv4rl.model.shapes import SHAPES, random_model
from kv4rl.ranks import Ranks, Replica, connect
from kv4rl.results import RESULTS, write_rows
from kv4rl.rollout.collector import CollectionStats
from kv4rl.rollout.fits import FITS
from kv4rl.rollout.forced import RandomPrompts
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.simulator import summarize
from kv4rl.rollout.sync import SyncCollector
from kv4rl.rollout.trace import Trace
from kv4rl.rollout.workload import Workload

EOS = 1
COLLECTORS = {"sync": SyncCollector, "partial": PartialCollector}
PARTS = ("schedulers", "precisions")


class DeviceTrace(Trace):
    """A trace whose `step_ms` is the device's time for the step, as in the paper, and not the scheduler's as well.

    `wall_ms` has the latter, a step each.
    """

    def __init__(self):
        super().__init__()
        self.wall_ms: list[float] = []

    def record(self, stats, **given) -> None:
        self.wall_ms.append(stats.step_ms)
        ms = stats.step_ms if stats.device_ms is None else stats.device_ms
        super().record(replace(stats, step_ms=ms), **given)


@dataclass(frozen=True)
class Setting:
    """What all arms share."""

    decoder: Decoder
    workload: Workload
    rollout: RolloutConfig
    budget_bytes: int
    collections: int  # measured
    warmup: int  # before them, to form the carry pool (§B.3)
    ranks: Ranks
    replica: Replica  # that this process belongs to: prompts are dealt out to replicas, everything else is shared
    simulate_warmup: bool  # the intervals before those measured (`bench/carried.py`)
    say: Callable[[str], None]

    def pages(self, precision: str) -> int:
        """What the budget buys a format. Raises `ValueError`, item by item, if it buys none, or not one response."""
        pages, rollout = self.plan(precision).cache.pages, self.rollout
        longest = pages_for(rollout.max_prompt_tokens + rollout.max_response_tokens)
        require(pages >= longest, f"pages of {precision}", pages, f"at least {longest}, of the longest response")
        return pages

    def plan(self, precision: str) -> HBMPlan:
        return bench_plan(self.decoder, precision, self.rollout, self.budget_bytes)


def run(setting: Setting, collector: str, precision: str, pages: int) -> Outcome:
    """Roll one arm out: the same prompts and lengths in every arm, the policy frozen over simulated updates.

    Replicas take turns at one prompt stream; noise is keyed by prompt, so no two of them draw the same.
    """
    config = replace(setting.rollout, collector=collector, cache_pages=pages)
    vocabulary, replica, kind = setting.decoder.config.vocab_size, setting.replica, COLLECTORS[collector]
    begin = time.perf_counter()
    engine = _engine(setting, precision, config)
    setting.say(f"{collector} {precision}: engine of {pages} pages ready in {time.perf_counter() - begin:.1f} s")
    prompts, trace = dealt(RandomPrompts(setting.workload, vocabulary), replica), DeviceTrace()
    collecting = kind(engine, prompts, config, grade=None, eos_token_ids=(EOS,), trace=trace)
    first = setting.warmup if setting.simulate_warmup else 0
    if first:
        carry_simulated(collecting, config, setting.workload, replica, intervals=first, vocab_size=vocabulary, eos=EOS)
    intervals = []
    for version in range(first, setting.warmup + setting.collections):
        engine.policy_version = version  # a simulated update: the policy stays frozen, ages grow (§B.3)
        intervals.append(collecting.collect().stats)
        setting.say(f"{collector} {precision}: {interval_line(intervals[-1])}")
    engine.check_drained()
    measured = range(setting.warmup, setting.warmup + setting.collections)
    summary = summarize(trace, measured)
    metrics = {
        "active_requests": summary.active_requests,
        "resident_kv_bytes": summary.context_tokens * engine.bytes_per_page / PAGE_TOKENS,
        "decode_step_ms": summary.step_ms,
        "decode_tokens_per_s": summary.tokens_per_second,
        "decode_wall_tokens_per_s": wall_tokens_per_second(trace, measured),
        "calls_per_interval": summary.calls_per_interval,
        "preemptions": float(trace.column("preemptions")[np.isin(trace.column("collection"), measured)].sum()),
        "cache_pages": float(pages),
    }
    kept = intervals[-setting.collections :]
    responses = sum(stats.finished_responses for stats in kept)
    bins = tuple(binned(trace, measured))
    own = Outcome(metrics, [stats.collection_s for stats in kept], summary, (responses,), bins)
    return over_replicas(own, setting.ranks, replica)


def interval_line(stats: CollectionStats) -> str:
    """What one collection took, for whoever waits."""
    rate = stats.decode_tokens / stats.collection_s
    return (
        f"collection {stats.collection} took {stats.collection_s:.1f} s, {stats.steps} steps "
        f"({stats.decode_steps} pure decode), {stats.decode_tokens} tokens decoded, {stats.prefill_tokens} prefilled, "
        f"{rate:.0f} tokens/s in all"
    )


def wall_tokens_per_second(trace: DeviceTrace, collections: Sequence[int]) -> float:
    """Tokens of pure-decode calls over all the time they took on the host's clock."""
    kept = (trace.column("kind") == "decode") & np.isin(trace.column("collection"), list(collections))
    return float(trace.column("decode_tokens")[kept].sum() / np.array(trace.wall_ms)[kept].sum() * 1e3)


def _engine(setting: Setting, precision: str, config: RolloutConfig) -> RolloutEngine:
    """The engine of one arm; the memory of the one before is given back first."""
    release_memory(setting.decoder.device)
    engine = bench_engine(setting.decoder, precision, config, eos_token_ids=(EOS,), forced_lengths=setting.workload)
    engine.capture()
    return engine


@dataclass(frozen=True)
class Arm:
    """One run: its place among the outcomes, and what differs from the others."""

    key: str | tuple[str, str]  # a collector's name, or (precision, "own pages" or "bf16 pages")
    collector: str
    precision: str
    pages: int


def arms(setting: Setting, options: argparse.Namespace) -> Iterator[Arm]:
    """Both collectors over the unquantised cache (Figs. 2, A1), then partial collection by format under one budget."""
    if "schedulers" in options.parts:
        yield from (Arm(name, name, "bf16", setting.pages("bf16")) for name in COLLECTORS)
    for name in options.precisions if "precisions" in options.parts else ():
        if "own" in options.pages or name == "bf16":
            yield Arm((name, "own pages"), "partial", name, setting.pages(name))
        if "bf16" in options.pages and name != "bf16":
            yield Arm((name, "bf16 pages"), "partial", name, setting.pages("bf16"))


def make_setting(options: argparse.Namespace, name: str, decoder: Decoder, ranks: Ranks, replica: Replica) -> Setting:
    """The setting of one fit. Raises `ValueError` where the model has too few positions for its lengths."""
    workload, rollout = forced_rollout(options, name, decoder.config.max_positions)
    budget = int(options.hbm_gb * 1e9)
    say = (lambda text: print(text, flush=True)) if ranks.leads else (lambda text: None)
    setting = Setting(
        decoder, workload, rollout, budget, options.collections, options.warmup, ranks, replica,
        options.simulate_warmup, say,
    )  # fmt: skip
    if options.bf16_pages is None:
        return setting
    free = setting.plan("bf16").cache
    require(options.bf16_pages <= free.pages, "bf16-pages", options.bf16_pages, f"at most {free.pages}, what fits")
    return replace(setting, budget_bytes=budget - (free.pages - options.bf16_pages) * free.page_bytes)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kv4rl.bench rollout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", default="mini-qwen3", help=f"{', '.join(SHAPES)} (random weights) or a shipped one")
    parser.add_argument("--fits", nargs="+", default=["4B-300", "8B-400"], choices=tuple(FITS))
    parser.add_argument("--shrink", type=float, default=1.0 if cuda else 32.0, help="divide all lengths by this")
    parser.add_argument("--tp", type=int, default=1, help="GPUs a model is split over: start as many with torchrun")
    parser.add_argument(
        "--hbm-gb", type=float, default=130.0 if cuda else 0.06, help="budget of a GPU, GB of 1e9 bytes"
    )
    parser.add_argument("--bf16-pages", type=int, help="pin the budget to so many pages of the unquantised pool")
    parser.add_argument("--groups", type=int, default=64 if cuda else 8, help="T of this replica")
    parser.add_argument("--siblings", type=int, default=8 if cuda else 4, help="G")
    parser.add_argument("--slots", type=int, default=1024 if cuda else 64, help="active requests at most")
    parser.add_argument("--step-tokens", type=int, default=8192 if cuda else 512)
    parser.add_argument("--workspace-tokens", type=int, default=32768 if cuda else 4096)
    parser.add_argument("--collections", type=int, default=6, help="measured intervals")
    parser.add_argument("--warmup", type=int, default=3, help="intervals before them")
    parser.add_argument("--simulate-warmup", action="store_true", help="simulate these: only their tokens are invented")
    parser.add_argument("--seed", type=int, default=6101)
    parser.add_argument("--device", default="auto", help="under torchrun auto or cpu")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--pages", nargs="+", default=["own", "bf16"], choices=("own", "bf16"), help="page counts")
    parser.add_argument("--out", default="rollout.csv", help="CSV under data/results, or an absolute path")
    options = parser.parse_args(arguments)
    with one_sentence("kv4rl.bench rollout"):
        require_counts(options, collections=1)
        if options.bf16_pages is not None:
            require_integer(options.bf16_pages, "bf16-pages", 1)
        require_flags(options)
    return options


def measure(options: argparse.Namespace, name: str, setting: Setting) -> dict[str, dict[str, float]]:
    """Both comparisons at one fit; rows are written after each arm, so that a run cut short keeps what it measured."""
    shape = shape_name(options, name)
    shape += "" if options.bf16_pages is None else f", {options.bf16_pages} BF16 pages"
    model = model_name(options, setting.replica)
    for precision in options.precisions:
        setting.say(f"{shape} {precision:>6} {setting.plan(precision)}")
    traces, found = {}, {}
    for arm in arms(setting, options):
        outcome = run(setting, arm.collector, arm.precision, arm.pages)
        (traces if isinstance(arm.key, str) else found)[arm.key] = outcome
        if setting.ranks.leads:
            write_rows(options.out, rows(shape, model, traces, found))
            if arm.key in traces:
                write_bins(options.out, shape, model, arm.key, outcome.bins)
    for outcomes in filter(None, (traces, found)):
        setting.say(table(shape, outcomes))
    return {shape: gains(found)}


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with ExitStack() as stack:
        with one_sentence("kv4rl.bench rollout"):
            ranks = stack.enter_context(connect(options.device))
            measured = ["bf16"] if "schedulers" in options.parts else options.precisions
            require_flashinfer({"bf16"} & set(measured), ranks.device.type)
            replica = ranks.replica(options.tp)
            decoder = random_model(options.model, device=ranks.device, communicator=replica.communicator)
            settings = {name: make_setting(options, name, decoder, ranks, replica) for name in options.fits}
            for setting in settings.values():
                shared = ["bf16"] if "schedulers" in options.parts or "bf16" in options.pages else []
                for precision in (*options.precisions, *shared):
                    setting.pages(precision)
        report(options, settings)


def report(options: argparse.Namespace, settings: dict[str, Setting]) -> None:
    """Measure every setting; the first rank writes rows and prints."""
    first = next(iter(settings.values()))
    weights = "random weights at the true shape" if options.model in SHAPES else "random weights"
    card = f"card: {model_name(options, first.replica)}, {weights}, {first.decoder.dtype}, lengths / {options.shrink:g}"
    first.say(card + (", warm-up intervals simulated" if options.simulate_warmup else ""))
    summary = {}
    for name, setting in settings.items():
        summary |= measure(options, name, setting)
    path = RESULTS / options.out  # an absolute path stays itself
    first.say(json.dumps({"experiment": "rollout", "file": str(path), "gains": summary}))


def model_name(options: argparse.Namespace, replica: Replica) -> str:
    """How rows name the model: with its tensor parallelism and its replicas, where there is more than one."""
    parts = [(options.tp, f"-tp{options.tp}"), (replica.count, f"-dp{replica.count}")]
    return options.model + "".join(suffix for count, suffix in parts if count > 1)


if __name__ == "__main__":
    main()
