"""Whole training iterations at a model's true shape: rollout, log-probs, update, sync, phase switches (§B.6, Fig. A8).

Weights are random, response lengths forced to a fit of `rollout/fits.py`, rewards random; collector, engine, learner
(Table A1), sync and phase controller are those of `kv4rl.train`. Each precision gets the pages that one memory budget
buys it, and collects under a frozen policy first, so that the carry pool has formed. The learner's share of the dense
rate counts 6 N FLOPs a token (N: multiplied weights) against large BF16 products in the same process; recomputed
layers and attention are not counted, so 6/8 of the rate is the most it can reach.

    torchrun --nproc-per-node 2 -m kv4rl.bench iteration --model qwen3-4b --fits 4B-300 --tp 2
    python -m kv4rl.bench iteration --model qwen3-4b --parts learner --tokens 65536

Without the part `rollout` the learner is fed made-up groups of at least `--tokens` tokens, and nothing is collected.
`--learner-share` below 1 trains on that share of the collected groups and multiplies the learner's seconds by the
tokens left out: rows that contain them are then marked as simulated.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from kv4rl.bench.carried import carry_simulated, dealt
from kv4rl.bench.engines import bench_engine, bench_plan
from kv4rl.bench.forced_rollout import forced_rollout, require_flags, shape_name
from kv4rl.bench.learner_load import dense_flops_per_s, input_tokens, multiplied_parameters, reward, synthetic_groups
from kv4rl.bench.refusals import require_counts, require_flashinfer
from kv4rl.cache.memory_plan import HBMPlan
from kv4rl.checkpoint import BackgroundSave, Checkpoint
from kv4rl.cli import one_sentence
from kv4rl.config import PRECISIONS, GRPOConfig, RolloutConfig, require
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.memory import within
from kv4rl.grpo.batch_metrics import max_over_ranks
from kv4rl.grpo.host_memory import HostMemory
from kv4rl.grpo.learner import GRPOLearner
from kv4rl.grpo.masters import cast_copy, compute_dtype
from kv4rl.grpo.weight_sync import sync
from kv4rl.metrics import Timers
from kv4rl.model.decoder import Decoder
from kv4rl.model.shapes import SHAPES, random_model
from kv4rl.model.tensor_parallel import shard_decoder
from kv4rl.phases import PhaseController
from kv4rl.ranks import Ranks, Replica, connect
from kv4rl.results import RESULTS, result_row, write_rows
from kv4rl.rollout.fits import FITS
from kv4rl.rollout.forced import RandomPrompts
from kv4rl.rollout.group import PromptGroup
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.workload import Workload

EOS = 1
LEARNER = ("old_logprob_s", "reference_logprob_s", "logprob_s", "update_s")
SCALED = (*LEARNER, "iteration_s", "learner_tokens_per_s", "learner_share_of_dense", "speedup_vs_bf16")
NEED_ENGINE = {"rollout", "sync", "switch"}
PARTS = ("rollout", "learner", "sync", "switch", "checkpoint")
SECONDS = {  # metric -> the timers that make it up
    "rollout_s": ("gen",), "old_logprob_s": ("old_log_prob",), "reference_logprob_s": ("ref",),
    "logprob_s": ("old_log_prob", "ref"), "update_s": ("update_actor",), "sync_s": ("update_weights",),
    "switch_s": ("switch",), "iteration_s": ("step",),
}  # fmt: skip


@dataclass
class Bench:
    """What all arms share: one learner, one engine decoder, one phase controller."""

    options: argparse.Namespace
    ranks: Ranks
    replica: Replica
    workload: Workload
    rollout: RolloutConfig
    learner: GRPOLearner
    decoder: Decoder | None  # the engine's, in the compute dtype, perhaps a shard; None if no part needs an engine
    phases: PhaseController
    parameters: int  # N
    dense: float  # FLOP/s of one GPU
    version: int = 0
    started: float = field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        """A line of progress with the seconds so far, from the first rank."""
        if self.ranks.leads:
            print(f"[{time.perf_counter() - self.started:7.1f} s] {text}", flush=True)

    def plan(self, precision: str) -> HBMPlan:
        """The engine's memory. Raises `ValueError`, item by item, where the budget is too small."""
        return bench_plan(self.decoder, precision, self.rollout, int(self.options.hbm_gb * 1e9))

    def gathered(self, items: list) -> list:
        """What the replicas hold, on all ranks."""
        return [item for share in self.ranks.gather(items if self.replica.leads else []) for item in share]


def make(options: argparse.Namespace, ranks: Ranks, name: str) -> Bench:
    """Everything but the engine. Raises `ValueError` where ranks, lengths and positions do not fit together."""
    started, replica, dense = time.perf_counter(), ranks.replica(options.tp), dense_flops_per_s(ranks.device)
    decoder = random_model(options.model, dtype=torch.float32, device=ranks.device)
    workload, rollout = forced_rollout(options, name, decoder.config.max_positions)
    parameters = multiplied_parameters(decoder)
    rollout_decoder = _rollout_decoder(decoder, replica) if NEED_ENGINE & set(options.parts) else None
    decoder.recompute_layers = True  # Table A1
    learner = GRPOLearner(decoder, GRPOConfig(microbatch_tokens=options.microbatch_tokens), mesh=ranks.mesh)
    phases = PhaseController(learner, ranks.device, take_turns="switch" in options.parts)
    bench = Bench(
        options, ranks, replica, workload, rollout, learner, rollout_decoder, phases, parameters, dense, started=started
    )
    for precision in options.precisions if rollout_decoder is not None else ():
        bench.plan(precision)
    bench.say(
        f"card: {options.model} tp{options.tp}, random weights, {parameters / 1e9:.3g}B multiplied, "
        f"{ranks.size} x {dense / 1e12:.4g} dense TFLOP/s, T={options.groups} a replica: built"
    )
    return bench


def _rollout_decoder(decoder: Decoder, replica: Replica) -> Decoder:
    copy = cast_copy(decoder, compute_dtype("auto", decoder.device))
    return copy if replica.communicator is None else shard_decoder(copy, replica.communicator)


def make_engine(bench: Bench, precision: str) -> RolloutEngine | None:
    """The engine of one arm, its graphs captured; the memory of the one before has been given back."""
    bench.phases.attach(None)
    gc.collect()
    if bench.decoder is None:
        return None
    bench.phases.enter("collect")
    bench.say("the learner is away")
    rollout = within(bench.plan(precision), bench.rollout)
    if not {"rollout", "switch"} & set(bench.options.parts):
        rollout = replace(rollout, cache_pages=1)  # a sync needs none
    given = {"forced_lengths": bench.workload, "memory": bench.phases.memory()}
    engine = bench_engine(bench.decoder, precision, rollout, eos_token_ids=(EOS,), **given)
    bench.phases.attach(engine)
    engine.policy_version = bench.version
    if "rollout" in bench.options.parts:
        engine.capture()
    bench.say(f"{precision} engine with {rollout.cache_pages} pages")
    return engine


def make_collector(bench: Bench, engine: RolloutEngine) -> PartialCollector:
    prompts = RandomPrompts(bench.workload, bench.learner.weights.decoder.config.vocab_size)
    return PartialCollector(engine, dealt(prompts, bench.replica), engine.rollout, grade=None, eos_token_ids=(EOS,))


def prepare(bench: Bench, engine: RolloutEngine | None) -> None:
    """An update between two switches: compiles, makes AdamW's moments, pins host memory; none of it is timed.

    A microbatch a rank of the measured lengths: kernels compiled for smaller ones would be compiled again.
    """
    vocabulary, tokens = bench.learner.weights.decoder.config.vocab_size, bench.options.microbatch_tokens
    warm = synthetic_groups(bench.workload, vocabulary, tokens * bench.ranks.size, eos=EOS)
    bench.phases.enter("learn")
    iterate_learner(bench, engine, warm, Timers(bench.ranks.device))
    bench.say("compiled and warmed up")
    bench.phases.enter("collect")
    bench.say("the learner is away, moments too")


def iterate_learner(bench: Bench, engine: RolloutEngine | None, groups: list[PromptGroup], timers: Timers) -> None:
    bench.version += 1
    if "learner" in bench.options.parts:
        bench.learner.update(groups, timers)
    if "sync" in bench.options.parts:
        with timers("update_weights"):
            sync(bench.learner, engine, bench.version)
    elif engine is not None:
        engine.policy_version = bench.version


def iterate(bench: Bench, engine: RolloutEngine | None, collector: PartialCollector | None, made: list) -> dict:
    """One iteration: seconds of its parts, the slowest rank's; tokens to train on; peaks."""
    timers = Timers(bench.ranks.device)
    with timers("step"):
        bench.phases.enter("collect", timers)
        groups = made
        if not made:
            with timers("gen"):
                collected = collector.collect().groups
            groups = reward(bench.gathered(collected))
            bench.say(f"collected in {timers.seconds['gen']:.1f} s")
        bench.phases.enter("learn", timers)
        part = groups[: max(1, round(len(groups) * bench.options.learner_share))]
        iterate_learner(bench, engine, part, timers)
    found = {name: sum(timers.seconds.get(part, 0.0) for part in parts) for name, parts in SECONDS.items()}
    found |= {name.removeprefix("perf/").replace("/", "_"): v for name, v in bench.phases.metrics().items()}
    slowest = max_over_ranks(bench.ranks.gather(found))
    bench.say(", ".join(f"{name} {slowest[name]:.2f}" for name in SECONDS if slowest[name]))
    return scaled(slowest, input_tokens(groups), input_tokens(part))


def scaled(seconds: dict[str, float], tokens: int, trained: int) -> dict[str, float]:
    """A learner that trained on some of the tokens, at the same rate on all of them."""
    factor = tokens / trained
    left_out = (factor - 1) * (seconds["logprob_s"] + seconds["update_s"])
    learner = {name: seconds[name] * factor for name in LEARNER}
    return seconds | learner | {"iteration_s": seconds["iteration_s"] + left_out, "trained_tokens": float(tokens)}


def form_carry_pool(bench: Bench, engine: RolloutEngine, collector: PartialCollector) -> None:
    """The collections before those measured, at a policy version each; simulated on request (`bench/carried.py`)."""
    first = bench.options.warmup if bench.options.simulate_warmup else 0
    if first:
        vocabulary = bench.learner.weights.decoder.config.vocab_size
        given = {"intervals": first, "vocab_size": vocabulary, "eos": EOS}
        carry_simulated(collector, engine.rollout, bench.workload, bench.replica, **given)
        bench.version = engine.policy_version = max(bench.version, first)
    for _ in range(first, bench.options.warmup):
        collector.collect()
        bench.version = engine.policy_version = bench.version + 1


def run_arm(bench: Bench, precision: str, made: list[PromptGroup]) -> dict[str, list[float]]:
    """Metric -> its value in each measured iteration."""
    engine = make_engine(bench, precision)
    collector = None if made else make_collector(bench, engine)
    prepare(bench, engine)
    if not made:
        form_carry_pool(bench, engine, collector)
    found = [iterate(bench, engine, collector, made) for _ in range(bench.options.iterations)]
    columns = {name: [each[name] for each in found] for name in found[0]}
    if "learner" in bench.options.parts:
        rates = [t / s for t, s in zip(columns["trained_tokens"], columns["update_s"], strict=True)]
        columns["learner_tokens_per_s"] = rates
        ceiling = bench.dense * bench.ranks.size
        columns["learner_share_of_dense"] = [6 * bench.parameters * rate / ceiling for rate in rates]
    if engine is not None:
        columns["cache_pages"] = [float(engine.rollout.cache_pages)]
    bench.phases.enter("learn")
    return columns


def checkpoint_seconds(bench: Bench) -> dict[str, list[float]]:
    """Seconds that a checkpoint keeps the run from going on, and until it is on the disk (a temporary folder's)."""
    host, saver = HostMemory(pinned=bench.ranks.device.type == "cuda"), BackgroundSave()
    bench.phases.enter("learn")
    bench.learner.state(host, whole=bench.ranks.leads)  # makes the host memory, once a run
    with tempfile.TemporaryDirectory() as folder:
        bench.ranks.gather(None)
        started = time.perf_counter()
        state = bench.learner.state(host, whole=bench.ranks.leads)
        if bench.ranks.leads:
            saver.start(folder, Checkpoint(bench.version, {}, state["weights"], state["optimizer"], {}), keep=1)
        bench.ranks.gather(None)
        stopped = time.perf_counter() - started
        bench.say(f"a checkpoint stopped the run for {stopped:.1f} s; it is being written")
        saver.finish()
        return {"checkpoint_s": [stopped], "checkpoint_written_s": [time.perf_counter() - started]}


def rows(bench: Bench, shape: str, found: dict[str, dict[str, list[float]]]) -> list[dict]:
    """CSV rows: means over iterations with least and most, and for whole iterations the speedup of summed times."""
    options = bench.options
    about = {"experiment": "iteration", "model": options.model + (f"-tp{options.tp}" if options.tp > 1 else "")}
    about |= {"shape": shape}
    scope = lambda metric: "simulated" if options.learner_share < 1 and metric in SCALED else "measured"
    made = []
    for arm, columns in found.items():
        for metric, values in columns.items():
            if metric.endswith("_s") and not any(values):
                continue  # a part that was not asked for
            given = {"arm": arm, "metric": metric, "unit": unit(metric), "scope": scope(metric), "value": fmean(values)}
            made.append(result_row(**about, **given, low=min(values), high=max(values), n=len(values)))
    for arm, value in speedups(found).items():
        given = {"arm": arm, "metric": "speedup_vs_bf16", "unit": "x", "scope": scope("speedup_vs_bf16")}
        made.append(result_row(**about, **given, value=value, n=options.iterations))
    dense = {"arm": "dense_matmul", "metric": "flops_per_s", "unit": "FLOP/s"}
    return [*made, result_row(**about, **dense, value=bench.dense * bench.ranks.size)]


def unit(metric: str) -> str:
    named = {"learner_tokens_per_s": "tokens/s", "learner_share_of_dense": "share", "cache_pages": "pages"}
    if metric in named:
        return named[metric]
    return "GB" if "_gb" in metric else "tokens" if metric.endswith("tokens") else "s"


def speedups(found: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """BF16's summed iteration times over each arm's, where whole iterations were measured (§B.6)."""
    if "bf16" not in found or not any(found["bf16"]["rollout_s"]):
        return {}
    total = {arm: sum(columns["iteration_s"]) for arm, columns in found.items()}
    return {arm: total["bf16"] / seconds for arm, seconds in total.items() if arm != "bf16"}


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """A line a metric, an arm a column."""
    lines = [f"{'':>28} " + " ".join(f"{arm:>12}" for arm in found)]
    for metric in next(iter(found.values())):
        lines.append(f"{metric:>28} " + " ".join(f"{fmean(columns[metric]):>12.4g}" for columns in found.values()))
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kv4rl.bench iteration", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--model", default="mini-qwen3", help=f"{', '.join(SHAPES)} or a shipped one; random weights")
    add("--fits", nargs="+", default=["4B-300"], choices=tuple(FITS))
    add("--shrink", type=float, default=1.0 if cuda else 64.0, help="divide all lengths by this")
    add("--tp", type=int, default=1, help="GPUs of a rollout replica; the learner is sharded over all of them")
    add("--hbm-gb", type=float, default=110.0 if cuda else 0.06, help="the engine's budget a GPU, GB of 1e9 bytes")
    add("--groups", type=int, default=64 if cuda else 4, help="T of a replica")
    add("--siblings", type=int, default=8 if cuda else 2, help="G")
    add("--slots", type=int, default=1024 if cuda else 16, help="active requests at most")
    add("--step-tokens", type=int, default=8192 if cuda else 256)
    add("--workspace-tokens", type=int, default=32768 if cuda else 1024)
    add("--microbatch-tokens", type=int, default=16384 if cuda else 512)
    add("--tokens", type=int, default=131072 if cuda else 512, help="made-up tokens of an update without rollout")
    add("--learner-share", type=float, default=1.0, help="of the collected groups that the learner trains on")
    add("--iterations", type=int, default=2, help="measured")
    add("--warmup", type=int, default=3, help="collections before them")
    add("--simulate-warmup", action="store_true", help="simulate these: only their tokens are invented")
    add("--seed", type=int, default=6101)
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--parts", nargs="+", default=list(PARTS[:-1]), choices=PARTS)
    add("--precisions", nargs="+", default=["bf16", "kv4rl"], choices=PRECISIONS)
    add("--out", default="iteration.csv", help="CSV under data/results, or an absolute path")
    options = parser.parse_args(arguments)
    with one_sentence("kv4rl.bench iteration"):
        require_counts(options, tokens=1, microbatch_tokens=1, iterations=1)
        require_flags(options)
        share = options.learner_share
        require(0 < share <= 1, "learner-share", share, "a number > 0 and <= 1")
    return options


def keep(bench: Bench, shape: str, found: dict[str, dict[str, list[float]]]) -> None:
    if bench.ranks.leads:
        write_rows(bench.options.out, rows(bench, shape, found))


def measure(bench: Bench, shape: str) -> dict[str, dict[str, list[float]]]:
    """Every arm at one fit, its rows written at once; without rollout one arm, "learner", and the first precision's
    engine."""
    options, found = bench.options, {}
    for precision in options.precisions if "rollout" in options.parts else options.precisions[:1]:
        arm, made = precision, []
        if "rollout" not in options.parts:
            vocabulary = bench.learner.weights.decoder.config.vocab_size
            arm, made = "learner", synthetic_groups(bench.workload, vocabulary, options.tokens, eos=EOS)
        found[arm] = run_arm(bench, precision, made)
        keep(bench, shape, found)
        if "checkpoint" in options.parts:
            found[arm] |= checkpoint_seconds(bench)
            keep(bench, shape, found)
    if bench.ranks.leads:
        print(table(found), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    options, summary = parse(arguments), {}
    with ExitStack() as stack:
        with one_sentence("kv4rl.bench iteration"):
            ranks = stack.enter_context(connect(options.device))
            if NEED_ENGINE & set(options.parts):
                require_flashinfer({"bf16"} & set(options.precisions), ranks.device.type)
        for name in options.fits:
            with one_sentence("kv4rl.bench iteration"):
                bench = make(options, ranks, name)
            shape = shape_name(options, name)
            found = measure(bench, shape)
            summary[shape] = {arm: {m: fmean(v) for m, v in columns.items()} for arm, columns in found.items()}
            summary[shape]["speedup_vs_bf16"] = speedups(found)
            del bench
            gc.collect()
        if ranks.leads:
            print(json.dumps({"experiment": "iteration", "file": str(RESULTS / options.out), "found": summary}))


if __name__ == "__main__":
    main()
