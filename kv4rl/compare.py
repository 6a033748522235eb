"""Paper beside measured: each published number with the row of data/results that answers it, and why they differ.

`python -m kv4rl.compare` prints the list.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from kv4rl.paper import PUBLISHED, REPLAY_SHAPES, Published
from kv4rl.results import RESULTS, latest, read_rows
from kv4rl.viz.names import PRECISION_NAMES

ABSENT = "not measured"
ON_CPU = "{} on a CPU in place of Qwen3; shorter contexts"
GROUPS = {"group128": "int4-k", "group32": "int4_g32-k", "group16": "int4_g16-k"}  # name in the paper's table -> arm
ORIGIN = ("hardware", "date", "commit", "command")  # of the row


@dataclass(frozen=True)
class Comparison:
    """Which row stands beside which published number."""

    published: str  # a key of PUBLISHED
    quantity: str  # in a reader's words
    file: str  # in data/results
    where: dict  # columns that select the row
    remark: str  # what is different about our setting
    models: tuple[str, ...] = ()  # of several models' rows, those of the first that has any
    base: str = ""  # the answer is this arm's value over the row's
    whole: str = ""  # the answer is the row's share of this metric
    of_all: Callable | None = None  # min or max: the answer is that one of several shapes' rows


def _bits(group: str, shape: str, arm: str) -> Comparison:
    where = {"arm": arm, "model": "mini-qwen3", "shape": shape, "metric": "bits_per_element"}  # head_dim 128
    return Comparison(
        f"storage/{group}/bits", f"bits per element, {group}", "fidelity.csv", where, "counted from bytes"
    )


def _storage_kl(group: str, arm: str) -> Comparison:
    where = {"arm": arm, "model": "mini-qwen3", "shape": "A4b", "metric": "sampler_kl"}  # head_dim 128: same groups
    quantity = f"sampler KL of stored INT4, {group} (mini-qwen3)"
    remark = "mini-qwen3, nearly certain of most tokens, in place of Qwen3: the order of groups compares, not the KL"
    return Comparison(f"storage/4b/{group}/kl", quantity, "fidelity.csv", where, remark)


def _rotation(model: str) -> Comparison:
    where = {"arm": "int4-kv", "model": model, "shape": "A4a", "metric": "kl_geometric_ratio_vs_int4-k"}
    quantity = f"sampler KL, K and V rotated over K alone ({model})"
    return Comparison("storage/4b/rotate_kv_over_k", quantity, "fidelity.csv", where, ON_CPU.format(model))


def _at_scale(model: str, first: str) -> dict:
    """Rows on two GPUs, as the paper's, before those on one; `first` is how a file names the former."""
    other = f"{model}-tp1" if first == model else model
    return {"models": (first, other)}


def _replay(published: str, arm: str, shape: str, words: str, metric: str = "speedup_vs_bf16") -> Comparison:
    where = {"experiment": "replay", "arm": arm, "shape": shape, "metric": metric}
    model = f"qwen3-{shape.split('-')[0 if shape[0].isdigit() else 1].lower()}"
    return Comparison(published, words, "replay.csv", where, "random weights, true shapes", **_at_scale(model, model))


EXTREMES = {"lowest": min, "highest": max}
ARM_WORDS = {"kv8": "KV8", "fp8_kv": "FP8 KV", "w8a8": "FP8 W8A8"}


def _replay_extreme(size: str, arm: str, extreme: str) -> Comparison:
    where = {"experiment": "replay", "arm": arm, "metric": "speedup_vs_bf16"}
    words = f"decode replay, {ARM_WORDS[arm]} over BF16, {extreme} of the {size.upper()} checkpoints"
    model, remark = f"qwen3-{size}", "random weights, true shapes"
    given = _at_scale(model, model) | {"of_all": EXTREMES[extreme]}
    return Comparison(f"replay/{size}/{arm}_{extreme}", words, "replay.csv", where, remark, **given)


def _replays() -> list[Comparison]:
    found = [
        _replay(f"replay/{name}/kv4", "kv4", name, f"decode replay, KV4 over BF16, {name}")
        for name in ("4B-100", "4B-300", "4B-500", "8B-100", "8B-400")
    ]
    found += [_replay_extreme(size, "kv8", extreme) for size in ("4b", "8b") for extreme in EXTREMES]
    found += [
        _replay_extreme("8b", *ends) for ends in (("fp8_kv", "lowest"), ("fp8_kv", "highest"), ("w8a8", "highest"))
    ]
    where = {"arm": "bf16_repeat", "metric": "repeat_spread"}
    given = _at_scale("qwen3-4b", "qwen3-4b") | {"of_all": max}
    words = "decode replay, BF16 timed twice in a run, largest difference"
    found.append(
        Comparison("replay/bf16_repeat_spread", words, "replay.csv", where, "random weights, true shapes", **given)
    )
    words = "decode replay, heterogeneous states"
    found.append(_replay("ragged/4b/kv4rl", "kv4rl", "ragged-4B", f"{words}, KV4-RL over BF16, 4B"))
    for size in ("4B", "8B"):
        shown = f"{words}, share of KV4's throughput, {size}"
        key = f"ragged/{size.lower()}/retention_vs_kv4"
        found.append(_replay(key, "kv4rl", f"ragged-{size}", shown, "retention_vs_kv4"))
    return found


def _collection_of_iteration(published: str, model: str, shape: str) -> Comparison:
    where = {"experiment": "iteration", "arm": "kv4rl", "shape": shape, "metric": "rollout_s"}
    words = f"late collection of a full iteration, KV4-RL over BF16, {shape}"
    remark = "one collection, forced lengths; not comparable one to one"
    return Comparison(published, words, "iteration.csv", where, remark, **_at_scale(model, f"{model}-tp2"), base="bf16")


def _collection_of_a_full_pool(size: str, shape: str, pages: int, collected: str) -> Comparison:
    where = {"arm": "kv4rl", "shape": f"{shape}, {pages} BF16 pages", "metric": "speedup_vs_bf16"}
    words = f"late collection, an eighth of the paper's requests and pool, KV4-RL over BF16, {shape}"
    remark, given = f"{collected}, forced lengths", _at_scale(f"qwen3-{size}", f"qwen3-{size}-tp2")
    return Comparison(f"rollout/{size}/last_50", words, "rollout.csv", where, remark, **given)


def _iteration(published: str, model: str) -> Comparison:
    where = {"arm": "kv4rl", "metric": "speedup_vs_bf16"}
    remark = "one iteration with forced lengths and random weights; the paper's is cumulative over the run"
    words = f"full iteration, KV4-RL over BF16, {model}"
    return Comparison(published, words, "iteration.csv", where, remark, **_at_scale(model, f"{model}-tp2"))


def _share(phase: str, arm: str) -> Comparison:
    where = {"experiment": "iteration", "arm": arm, "shape": "8B-400", "metric": f"{phase}_s"}
    words = f"share of an iteration, {phase}, {PRECISION_NAMES[arm]}, 8B-400"
    remark, key = "one iteration, forced lengths", f"iteration/8b/{phase}_share_{arm}_last_50"
    given = _at_scale("qwen3-8b", "qwen3-8b-tp2") | {"whole": "iteration_s"}
    return Comparison(key, words, "iteration.csv", where, remark, **given)


TASKS = {  # model -> what is different about its learning
    "smollm2-135m": "SmolLM2 on sums, contexts of 245 tokens and more, paired over seeds",
    "mini-qwen3": "mini model on its own task, paired over seeds",
}


def _deficits(model: str) -> list[Comparison]:
    found = []
    for published, arm, metric, words in (
        ("learning/8b/mean_deficit_kv4", "kv4", "accuracy", "accuracy lost to KV4 rollout"),
        ("learning/accuracy_gap_limit", "kv4rl", "accuracy", "accuracy lost to KV4-RL rollout"),
        ("learning/4b/reward_gap/kv4", "kv4", "reward_last", "reward lost to KV4 rollout"),
        ("learning/4b/reward_gap/kv4rl", "kv4rl", "reward_last", "reward lost to KV4-RL rollout"),
    ):
        where = {"experiment": "learning", "arm": arm, "model": model, "metric": f"deficit_{metric}"}
        remark = f"{TASKS[model]}: its sign compares, not its size"
        found.append(Comparison(published, f"{words} ({model})", "train.csv", where, remark))
    return found


def _kl_reduction(published: str, model: str) -> Comparison:
    where = {"arm": "kv4rl", "model": model, "shape": "4b", "metric": "kl_reduction_vs_kv4"}
    quantity = f"sampler KL, KV4 over KV4-RL at 16/128 ({model})"
    return Comparison(published, quantity, "fidelity.csv", where, ON_CPU.format(model))


TRACE_RATIOS = {
    "active_batch_ratio": "active batch, partial over synchronous",
    "fewer_decode_calls": "decode calls per interval, synchronous over partial",
    "resident_kv_ratio": "resident KV, partial over synchronous",
    "step_latency_ratio": "decode step, partial over synchronous",
    "decode_throughput_ratio": "decode throughput, partial over synchronous",
}


def _trace(checkpoint: str, metric: str) -> Comparison:
    where = {"experiment": "traces", "arm": "partial_over_sync", "shape": checkpoint, "metric": metric}
    quantity, remark = f"{TRACE_RATIOS[metric]}, {checkpoint}", "real scheduler, lengths fitted to Table A3"
    return Comparison(f"trace/{checkpoint.lower()}/{metric}", quantity, "rollout.csv", where, remark)


def _resident(arm: str, published: str) -> Comparison:
    where = {"experiment": "traces", "arm": arm, "shape": "8B-400", "metric": "resident_kv_gb"}
    remark = "real scheduler, lengths fitted to Table A3"
    return Comparison(published, f"resident KV at 8B-400, {arm}", "rollout.csv", where, remark)


COMPARISONS = (
    *(_trace("4B-300", metric) for metric in TRACE_RATIOS),
    _trace("8B-400", "decode_throughput_ratio"),
    _resident("partial", "trace/8b-400/active_kv_async"),
    _resident("sync", "trace/8b-400/active_kv_sync"),
    *(_bits(group, "A4b", arm) for group, arm in GROUPS.items()),
    *(_bits(group, "A4c", f"{group}-none") for group in ("nvfp4", "mxfp4")),
    *(_storage_kl(group, arm) for group, arm in GROUPS.items()),
    *(_rotation(model) for model in ("smollm2-135m", "mini-qwen3")),
    _kl_reduction("fidelity/4b/kl_reduction_16_128", "smollm2-135m"),
    _kl_reduction("fidelity/4b/kl_reduction_16_128", "mini-qwen3"),
    *_replays(),
    _collection_of_a_full_pool("4b", "4B-500", 10377, "one collection"),
    _collection_of_a_full_pool("8b", "8B-400", 9955, "half a collection (8 of 16 groups)"),
    _collection_of_iteration("rollout/4b/last_50", "qwen3-4b", "4B-500"),
    _collection_of_iteration("rollout/8b/last_50", "qwen3-8b", "8B-400"),
    _iteration("iteration/4b/cumulative", "qwen3-4b"),
    _iteration("iteration/8b/cumulative", "qwen3-8b"),
    *(_share(phase, arm) for phase in ("rollout", "update") for arm in ("bf16", "kv4rl")),
    *(comparison for model in TASKS for comparison in _deficits(model)),
)  # fmt: skip


def answers(directory: Path = RESULTS) -> list[tuple[Comparison, Published, dict[str, str] | None]]:
    """Every comparison with its published number and the newest row that answers it, or None."""
    found = []
    for item in COMPARISONS:
        path = directory / item.file
        rows = read_rows(path, **item.where) if path.exists() else []
        if item.base or item.whole:
            other = {"arm": item.base} if item.base else {"metric": item.whole}
            rows = _quotients(rows, read_rows(path, **item.where | other) if rows else [], inverse=bool(item.whole))
        if item.models:
            by_model = [[row for row in rows if row["model"] == model] for model in item.models]
            rows = next((mine for mine in by_model if mine), [])
        if item.of_all:
            rows = _extreme(rows, item.of_all)
        found.append((item, PUBLISHED[item.published], latest(rows) if rows else None))
    return found


def _extreme(rows: Sequence[dict], of_all: Callable) -> list[dict]:
    """Of the checkpoints' aggregates, each at its newest, the one that `of_all` picks by value; `among` names them."""
    by_shape = {}
    for row in rows:
        if row["shape"] in REPLAY_SHAPES:
            by_shape.setdefault(row["shape"], []).append(row)
    newest = [latest(mine) for mine in by_shape.values()]
    among = {"among": ", ".join(by_shape)}
    return [of_all(newest, key=lambda row: float(row["value"])) | among] if newest else []


def _quotients(rows: Sequence[dict], others: Sequence[dict], *, inverse: bool) -> list[dict]:
    """Each other's value over the row's, or the `inverse`, of those of one run: equal model, machine and command."""
    run = itemgetter("model", "hardware", "command")
    by_run, made = {run(row): row for row in others}, []
    for row in rows:
        if run(row) in by_run:
            other = by_run[run(row)]
            own, others_own = float(row["value"]), float(other["value"])
            value, unit = (own / others_own, "fraction") if inverse else (others_own / own, "x")
            scope = "simulated" if "simulated" in (row["scope"], other["scope"]) else row["scope"]
            made.append(row | {"value": str(value), "low": "", "high": "", "unit": unit, "scope": scope})
    return made


def compare(directory: Path = RESULTS) -> list[dict[str, str]]:
    """One dict a comparison: quantity, place, paper, ours, scope, remark, the row's origin; unanswered ones say so."""
    return [
        {
            "quantity": item.quantity,
            "place": published.locator,
            "paper": with_unit(f"{published.value:g}", published.unit),
            "ours": ours(row, published.unit) if row else ABSENT,
            "scope": row["scope"] if row else "-",
            "remark": item.remark + (_setting(item, row) if row else ""),
        }
        | {name: row[name] if row else "-" for name in ORIGIN}
        for item, published, row in answers(directory)
    ]


def _setting(item: Comparison, row: dict) -> str:
    """What a remark ends with: of several models' rows whose it is, and of which checkpoints an extreme is taken."""
    among = [f"of {row['among']}"] if item.of_all else []
    return "".join(f"; {part}" for part in among + [f"{row['model']}, {row['hardware']}"] * bool(item.models))


def ours(row: dict, unit: str) -> str:
    """A row's value in the published number's unit, with its interval where it has one."""
    shares = row["unit"] in ("fraction", "1") or row["metric"] == "retention_vs_kv4"
    scale = 100 if unit in ("%", "points") and shares else 1
    value = with_unit(f"{float(row['value']) * scale:.3g}", unit)
    if row["low"] and row["low"] != row["high"]:
        value += f" [{float(row['low']) * scale:.3g}, {float(row['high']) * scale:.3g}]"
    return value


def with_unit(value: str, unit: str) -> str:
    """The value and its unit; a number without one has the unit "1", which is not printed."""
    return value if unit == "1" else f"{value} {unit}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kv4rl.compare", description=__doc__.split("\n")[0])
    parser.parse_args(arguments)
    lines = compare()
    for line in lines:
        print(f"{line['quantity']} ({line['place']}): paper {line['paper']}, ours {line['ours']}, {line['scope']}")
    print(f"{sum(line['ours'] != ABSENT for line in lines)} of {len(lines)} answered")


if __name__ == "__main__":
    main()
