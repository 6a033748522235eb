"""Paper beside measured: each published number with the row of data/results that answers it, and why they differ."""

from dataclasses import dataclass
from pathlib import Path

from kv4rl.paper import PUBLISHED, Published
from kv4rl.results import RESULTS, latest, read_rows

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


def _replay(checkpoint: str, precision: str) -> Comparison:
    where = {"arm": precision, "shape": checkpoint, "metric": "speedup_vs_bf16"}
    quantity = f"decode replay, {precision} over BF16, {checkpoint}"
    return Comparison(f"replay/{checkpoint}/{precision}", quantity, "replay.csv", where, "random weights, true shapes")


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
    *(_replay(checkpoint, "kv4") for checkpoint in ("4B-100", "4B-300", "4B-500", "8B-100", "8B-400")),
    Comparison(
        "rollout/8b/cumulative", "rollout collection, KV4-RL over BF16, 8B", "rollout.csv",
        {"arm": "kv4rl", "model": "qwen3-8b", "metric": "speedup_vs_bf16"}, "forced lengths, frozen policy",
    ),
    Comparison(
        "iteration/8b/cumulative", "full iteration, KV4-RL over BF16, 8B", "iteration.csv",
        {"arm": "kv4rl", "model": "qwen3-8b", "metric": "speedup_vs_bf16"}, "forced lengths, random weights",
    ),
    Comparison(
        "table1/8b/kv4rl/mean", "accuracy after RL with KV4-RL rollout, %", "train.csv",
        {"arm": "kv4rl", "model": "mini-qwen3", "metric": "accuracy"},
        "mini model on its own task: only the distance to BF16 below compares",
    ),
    Comparison(
        "table1/8b/bf16/mean", "accuracy after RL with BF16 rollout, %", "train.csv",
        {"arm": "bf16", "model": "mini-qwen3", "metric": "accuracy"}, "mini model on its own task",
    ),
)  # fmt: skip


def answers(directory: Path = RESULTS) -> list[tuple[Comparison, Published, dict[str, str] | None]]:
    """Every comparison with its published number and the newest row that answers it, or None."""
    found = []
    for item in COMPARISONS:
        path = directory / item.file
        rows = read_rows(path, **item.where) if path.exists() else []
        found.append((item, PUBLISHED[item.published], latest(rows) if rows else None))
    return found


def compare(directory: Path = RESULTS) -> list[dict[str, str]]:
    """One dict a comparison: quantity, place, paper, ours, scope, remark, the row's origin; unanswered ones say so."""
    return [
        {
            "quantity": item.quantity,
            "place": published.locator,
            "paper": f"{published.value:g} {published.unit}",
            "ours": ours(row, published.unit) if row else ABSENT,
            "scope": row["scope"] if row else "-",
            "remark": item.remark,
        }
        | {name: row[name] if row else "-" for name in ORIGIN}
        for item, published, row in answers(directory)
    ]


def ours(row: dict, unit: str) -> str:
    """A row's value in the published number's unit, with its interval where it has one."""
    scale = 100 if unit == "%" and row["unit"] in ("fraction", "1") else 1
    value = f"{float(row['value']) * scale:.3g} {unit}"
    if row["low"] and row["low"] != row["high"]:
        value += f" [{float(row['low']) * scale:.3g}, {float(row['high']) * scale:.3g}]"
    return value
