"""Collection with a frozen policy at a stated length law: Fig. 2 and Fig. A1's traces, Fig. 6a and A6a's capacity gain.

Two comparisons on one engine, or on the replicas that torchrun's processes make (T is a replica's share of the quota):

- schedulers: synchronous against partial collection, unquantised cache. Means over pure-decode calls after warm-up,
  step time by CUDA events (§B.3);
- precisions: partial collection under one memory budget. Each format first gets the pages that the budget buys it
  (execution and capacity together), then BF16's pages (execution alone); the quotient is the capacity's share.

Lengths are forced to a fit of `rollout/fits.py`, so weights may be random: `--model qwen3-4b` and `qwen3-8b` build the
true shape without any file. `--shrink` divides all lengths, for small models. On CUDA the unquantised arm decodes
through FlashInfer, and every batch bucket is captured before the first collection.

    python -m kv4rl.bench rollout --model qwen3-4b --fits 4B-300
    torchrun --nproc-per-node 4 -m kv4rl.bench rollout --model qwen3-8b --fits 8B-400 --tp 2
"""

import argparse
import gc
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch

from kv4rl.bench.outcome import BALANCE, Outcome, over_replicas
from kv4rl.cli import one_sentence
from kv4rl.config import PAGE_TOKENS, PRECISIONS, KVConfig, RolloutConfig, require
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.flashinfer import FlashInferBackend
from kv4rl.engine.memory import plan_engine
from kv4rl.model.decoder import Decoder
from kv4rl.model.shapes import SHAPES, random_model
from kv4rl.ranks import Ranks, Replica, connect
from kv4rl.results import result_row, write_rows
from kv4rl.rollout.fits import FITS, fit
from kv4rl.rollout.forced import RandomPrompts, shrunk
from kv4rl.rollout.paper_traces import ratios
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.share import SharedStream
from kv4rl.rollout.simulator import summarize
from kv4rl.rollout.sync import SyncCollector
from kv4rl.rollout.trace import Trace
from kv4rl.rollout.workload import Workload

EOS = 1
COLLECTORS = {"sync": SyncCollector, "partial": PartialCollector}
UNITS = {
    "active_requests": "requests", "resident_kv_bytes": "B", "decode_step_ms": "ms", "decode_tokens_per_s": "tokens/s",
    "decode_wall_tokens_per_s": "tokens/s",
    "calls_per_interval": "calls", "collection_s": "s", "cache_pages": "pages", "preemptions": "requests", BALANCE: "x",
}  # fmt: skip


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

    def pages(self, precision: str) -> int:
        """What the budget buys a format. Raises `ValueError`, item by item, if it buys none."""
        return plan_engine(self.decoder, KVConfig(precision), self.rollout, self.budget_bytes).cache.pages


def run(setting: Setting, collector: str, precision: str, pages: int) -> Outcome:
    """Roll one arm out: the same prompts and lengths in every arm, the policy frozen over simulated updates.

    Replicas take turns at one prompt stream; noise is keyed by prompt, so no two of them draw the same.
    """
    config = replace(setting.rollout, collector=collector, cache_pages=pages)
    engine = _engine(setting, precision, config)
    prompts, replica = RandomPrompts(setting.workload, setting.decoder.config.vocab_size), setting.replica
    if replica.count > 1:
        prompts = SharedStream(prompts, replica.number, replica.count)
    trace = DeviceTrace()
    kind = COLLECTORS[collector]
    collecting = kind(engine, prompts, config, grade=None, eos_token_ids=(EOS,), trace=trace)
    intervals = []
    for version in range(1, setting.warmup + setting.collections + 1):
        intervals.append(collecting.collect().stats)
        engine.policy_version = version  # a simulated update: the policy stays frozen, ages grow (§B.3)
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
    kept = intervals[setting.warmup :]
    responses = sum(stats.finished_responses for stats in kept)
    own = Outcome(metrics, [stats.collection_s for stats in kept], summary, (responses,))
    return over_replicas(own, setting.ranks, replica)


def wall_tokens_per_second(trace: DeviceTrace, collections: Sequence[int]) -> float:
    """Tokens of pure-decode calls over all the time they took on the host's clock."""
    kept = (trace.column("kind") == "decode") & np.isin(trace.column("collection"), list(collections))
    return float(trace.column("decode_tokens")[kept].sum() / np.array(trace.wall_ms)[kept].sum() * 1e3)


def _engine(setting: Setting, precision: str, config: RolloutConfig) -> RolloutEngine:
    """The engine of one arm; the memory of the one before is given back first."""
    gc.collect()
    if setting.decoder.device.type == "cuda":
        torch.cuda.empty_cache()
    engine = RolloutEngine(
        setting.decoder, KVConfig(precision), config, eos_token_ids=(EOS,), forced_lengths=setting.workload
    )
    if precision == "bf16" and engine.cache.backend.name == "cuda":
        engine.cache.backend = FlashInferBackend(engine.cache)
    engine.capture()
    return engine


def schedulers(setting: Setting) -> dict[str, Outcome]:
    """Synchronous and partial collection over the unquantised cache, same pages (Figs. 2 and A1)."""
    pages = setting.pages("bf16")
    return {name: run(setting, name, "bf16", pages) for name in COLLECTORS}


def precisions(
    setting: Setting, names: Sequence[str], pages: Sequence[str] = ("own", "bf16")
) -> dict[tuple[str, str], Outcome]:
    """(precision, "own pages" or "bf16 pages") -> outcome of partial collection under one budget."""
    shared, found = setting.pages("bf16"), {}
    for name in names:
        if "own" in pages or name == "bf16":
            found[name, "own pages"] = run(setting, "partial", name, setting.pages(name))
        if "bf16" in pages and name != "bf16":
            found[name, "bf16 pages"] = run(setting, "partial", name, shared)
    return found


def gains(found: dict[tuple[str, str], Outcome]) -> dict[str, dict[str, float]]:
    """precision -> collection speedups over BF16: together, at BF16's pages, and what the pages add, as far as run."""
    total = {key: sum(outcome.seconds) for key, outcome in found.items()}
    if ("bf16", "own pages") not in total:
        return {}
    made: dict[str, dict[str, float]] = {}
    for (name, pages), seconds in total.items():
        if name != "bf16":
            metric = "speedup_vs_bf16" if pages == "own pages" else "speedup_at_bf16_pages"
            made.setdefault(name, {})[metric] = total["bf16", "own pages"] / seconds
    for values in made.values():
        if len(values) == 2:
            values["speedup_of_capacity"] = values["speedup_vs_bf16"] / values["speedup_at_bf16_pages"]
    return made


def rows(shape: str, model: str, setting: Setting, traces: dict, found: dict) -> list[dict]:
    """CSV rows of one fit: the schedulers' metrics and ratios, the precisions' metrics and gains."""
    about = {"experiment": "rollout", "model": model, "shape": shape}
    made = []
    arms = [(name, "", outcome) for name, outcome in traces.items()]
    arms += [(name, "" if pages == "own pages" else "_at_bf16_pages", o) for (name, pages), o in found.items()]
    for arm, suffix, outcome in arms:
        per = np.array(outcome.seconds)
        bounds = {"low": float(per.min()), "high": float(per.max()), "n": len(per)}
        given = {"arm": arm, "metric": f"collection_s{suffix}", "unit": "s", "value": float(per.mean())}
        made.append(result_row(**about, **given, **bounds))
        for metric, value in outcome.metrics.items():
            given = {"arm": arm, "metric": metric + suffix, "unit": UNITS[metric], "value": value}
            made.append(result_row(**about, **given, n=setting.collections))
    if traces:
        summaries = {name: outcome.summary for name, outcome in traces.items()}
        for metric, value in ratios(**summaries).items():
            made.append(result_row(**about, arm="partial_over_sync", metric=metric, unit="x", value=value))
    for arm, values in gains(found).items():
        made += [result_row(**about, arm=arm, metric=m, unit="x", value=v) for m, v in values.items()]
    return made


def table(title: str, outcomes: dict) -> str:
    """Lines of one comparison, an arm a line."""
    names = ("active_requests", "decode_step_ms", "decode_tokens_per_s", "decode_wall_tokens_per_s", "cache_pages")
    lines = [f"{title:>24} " + " ".join(f"{name:>24}" for name in ("collection_s", *names))]
    for arm, outcome in outcomes.items():
        values = [sum(outcome.seconds) / len(outcome.seconds), *(outcome.metrics[name] for name in names)]
        label = " ".join(arm) if isinstance(arm, tuple) else arm
        lines.append(f"{label:>24} " + " ".join(f"{value:>24.4g}" for value in values))
    return "\n".join(lines)


def make_setting(options: argparse.Namespace, name: str, decoder: Decoder, ranks: Ranks, replica: Replica) -> Setting:
    """The setting of one fit. Raises `ValueError` where the model has too few positions for its lengths."""
    workload = replace(shrunk(fit(name).workload(options.seed), options.shrink), siblings=options.siblings)
    rollout = RolloutConfig(
        groups_per_update=options.groups,
        responses_per_group=options.siblings,
        max_prompt_tokens=workload.prompts.cap,
        max_response_tokens=workload.lengths.cap,
        max_active_requests=options.slots,
        step_tokens=max(options.step_tokens, options.slots),
        workspace_tokens=max(options.workspace_tokens, workload.prompts.cap + workload.lengths.cap),
    )
    longest, most = workload.prompts.cap + workload.lengths.cap, decoder.config.max_positions
    require(longest <= most, "shrink", options.shrink, f"lengths within the model's {most} positions, not {longest}")
    budget = int(options.hbm_gb * 1e9)
    return Setting(decoder, workload, rollout, budget, options.collections, options.warmup, ranks, replica)


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
    parser.add_argument("--groups", type=int, default=64 if cuda else 8, help="T of this replica")
    parser.add_argument("--siblings", type=int, default=8 if cuda else 4, help="G")
    parser.add_argument("--slots", type=int, default=1024 if cuda else 64, help="active requests at most")
    parser.add_argument("--step-tokens", type=int, default=8192 if cuda else 512)
    parser.add_argument("--workspace-tokens", type=int, default=32768 if cuda else 4096)
    parser.add_argument("--collections", type=int, default=6, help="measured intervals")
    parser.add_argument("--warmup", type=int, default=3, help="intervals before them")
    parser.add_argument("--seed", type=int, default=6101)
    parser.add_argument("--device", default="auto", help="under torchrun auto or cpu")
    parser.add_argument("--parts", nargs="+", default=["schedulers", "precisions"])
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--pages", nargs="+", default=["own", "bf16"], choices=("own", "bf16"), help="page counts")
    parser.add_argument("--out", default="rollout.csv", help="CSV under data/results, or a path")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, name: str, setting: Setting, say) -> tuple[list[dict], dict]:
    """Both comparisons at one fit: its rows and its gains."""
    shape = name if options.shrink == 1 else f"{name}/{options.shrink:g}"
    for precision in options.precisions:
        plan = plan_engine(setting.decoder, KVConfig(precision), setting.rollout, setting.budget_bytes)
        say(f"{shape} {precision:>6} {plan}")
    traces = schedulers(setting) if "schedulers" in options.parts else {}
    if traces:
        say(table(shape, traces))
    found = precisions(setting, options.precisions, options.pages) if "precisions" in options.parts else {}
    if found:
        say(table(shape, found))
    model = model_name(options, setting.replica)
    return rows(shape, model, setting, traces, found), {shape: gains(found)}


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with ExitStack() as stack:
        with one_sentence("kv4rl.bench rollout"):
            ranks = stack.enter_context(connect(options.device))
            replica = ranks.replica(options.tp)
            decoder = random_model(options.model, device=ranks.device, communicator=replica.communicator)
            settings = {name: make_setting(options, name, decoder, ranks, replica) for name in options.fits}
            for setting in settings.values():
                for precision in options.precisions:
                    setting.pages(precision)
        report(options, settings)


def report(options: argparse.Namespace, settings: dict[str, Setting]) -> None:
    """Measure every setting; the first rank writes rows and prints."""
    ranks, replica = (getattr(next(iter(settings.values())), name) for name in ("ranks", "replica"))
    say = (lambda text: print(text, flush=True)) if ranks.leads else (lambda text: None)
    weights = "random weights at the true shape" if options.model in SHAPES else "random weights"
    dtype = next(iter(settings.values())).decoder.dtype
    say(f"card: {model_name(options, replica)}, {weights}, {dtype}, lengths / {options.shrink:g}")
    summary, path = {}, options.out
    for name, setting in settings.items():
        made, found = measure(options, name, setting, say)
        summary |= found
        if ranks.leads:
            path = write_rows(options.out, made)  # at once: a run cut short keeps what it measured
    say(json.dumps({"experiment": "rollout", "file": str(path), "gains": summary}))


def model_name(options: argparse.Namespace, replica: Replica) -> str:
    """How rows name the model: with its tensor parallelism and its replicas, where there is more than one."""
    parts = [(options.tp, f"-tp{options.tp}"), (replica.count, f"-dp{replica.count}")]
    return options.model + "".join(suffix for count, suffix in parts if count > 1)


if __name__ == "__main__":
    main()
