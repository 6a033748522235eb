"""The paper's orderings of KL, each asked of our rows, and the ones that do not hold at our scale with the reason.

An ordering is asked of two statistics: the paper's mean over states, and the response-paired geometric mean, which one
response of large KL cannot decide. What the paper calls equal is asked of the means' intervals. A test over the
committed rows (`tests/fidelity/test_committed_rows.py`) asserts the ones that hold and asserts that the others still do
not, so that this list stays true.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from kv4rl.config import require
from kv4rl.fidelity.panels import panel

STATISTICS = ("mean", "geometric")
MODELS = ("mini-qwen3", "smollm2-135m")


@dataclass(frozen=True)
class Ordering:
    """KL of `lower` is below that of `higher`, in the rows of one panel."""

    place: str  # in the paper
    shape: str  # the panel
    lower: str
    higher: str

    def __str__(self) -> str:
        return f"{self.place}: {self.lower} < {self.higher}"


def _chain(place: str, shape: str, *arms: str) -> tuple[Ordering, ...]:
    """Every arm below the next."""
    return tuple(Ordering(place, shape, a, b) for a, b in pairwise(arms))


ORDERINGS = (
    *_chain("Fig. 4b", "4b", "kv8", "kv4rl", "kv4"),
    Ordering("Fig. 4b", "4b", "kv4rl", "kv4rl-s144-w0"),
    Ordering("Fig. 4b", "4b", "kv4rl", "kv4rl-s0-w144"),
    Ordering("Fig. 4b, our control", "4b", "kv4rl", "kv4-random144"),
    Ordering("Fig. 4b, our control", "4b", "kv4rl", "kv4-attention144"),
    *_chain("Fig. 4c", "4c", *(f"kv4rl-s16-w{w}" for w in (512, 256)), "kv4rl"),
    *_chain("Fig. 4c", "4c", "kv4rl", *(f"kv4rl-s16-w{w}" for w in (64, 32, 16, 0))),
    Ordering("§D.3", "A3", "kv4rl-s16-w512", "kv4rl"),
    Ordering("§D.3", "A3", "kv4rl", "kv4rl-s16-w16"),
    Ordering("Fig. A4a", "A4a", "int4-k", "int4-none"),
    Ordering("Fig. A4a", "A4a", "int4-kv", "int4-none"),
    Ordering("Fig. A4a", "A4a", "int4-k", "int4-v"),
    *_chain("Fig. A4b", "A4b", "int4_g16-k", "int4_g32-k", "int4-k"),
    Ordering("Fig. A4c", "A4c", "nvfp4-none", "nvfp4-k"),
    Ordering("Fig. A4c", "A4c", "int4-k", "int4-none"),
)

# What the paper calls equal within error, or close: their 95 % intervals overlap.
EQUAL = (
    ("Fig. A4a", "A4a", "int4-kv", "int4-k"),
    ("Fig. A3", "A3", "kv4rl-bf16", "kv4rl"),
    ("§D.4", "A4c", "nvfp4-none", "int4-k"),
)


_ONE_STATE = (
    "the mini model is nearly certain of most tokens, so a few uncertain states set the mean and its interval spans a "
    "factor of five and more; the geometric ratio has the paper's order"
)
_SAME_CHANNELS = (
    "as in the paper, rotation makes the error of NVFP4 keys no smaller, but here it makes that of q·k smaller (by 7 % "
    "on SmolLM2, 20 % on the mini model): queries weigh the large channels, whose error grows with their size"
)
# (model, panel, lower, higher, statistic) -> why our rows do not have the paper's order.
NOT_HELD = {
    ("mini-qwen3", "4b", "kv4rl", "kv4-random144", "mean"): _ONE_STATE,
    ("mini-qwen3", "4b", "kv4rl", "kv4-attention144", "mean"): _ONE_STATE,
    ("mini-qwen3", "4c", "kv4rl", "kv4rl-s16-w64", "mean"): _ONE_STATE,
    ("mini-qwen3", "4c", "kv4rl-s16-w64", "kv4rl-s16-w32", "mean"): _ONE_STATE,
    ("mini-qwen3", "A4a", "int4-k", "int4-none", "mean"): _ONE_STATE,
    ("mini-qwen3", "A4a", "int4-kv", "int4-none", "mean"): _ONE_STATE,
    ("mini-qwen3", "A4a", "int4-k", "int4-v", "mean"): _ONE_STATE,
    ("mini-qwen3", "A4c", "int4-k", "int4-none", "mean"): _ONE_STATE,
    **{
        (model, "A4c", "nvfp4-none", "nvfp4-k", statistic): _SAME_CHANNELS
        for model in MODELS
        for statistic in STATISTICS
    },
}
# (model, panel, arm, other) -> why the intervals of what the paper calls equal do not meet.
NOT_EQUAL = {
    ("smollm2-135m", "A4c", "nvfp4-none", "int4-k"): (
        "the same cause as NVFP4's other exception: rotation helps NVFP4 keys here, and with it NVFP4 equals INT4 with "
        "rotated keys within error. INT4 also has an advantage: its group is the head, 64 channels instead of 128"
    ),
}


def interval(rows: Iterable[Mapping[str, str]], shape: str, arm: str) -> tuple[float, float]:
    """95 % bootstrap interval of an arm's mean KL in nats. Raises ValueError for an arm without its row."""
    row = _row(rows, shape, arm, "sampler_kl")
    return float(row["low"]), float(row["high"])


def intervals_overlap(rows: Iterable[Mapping[str, str]], shape: str, arm: str, other: str) -> bool:
    """Whether two arms' intervals have a value in common."""
    rows = list(rows)
    (low, high), (other_low, other_high) = (interval(rows, shape, name) for name in (arm, other))
    return low <= other_high and other_low <= high


def _row(rows: Iterable[Mapping[str, str]], shape: str, arm: str, metric: str) -> Mapping[str, str]:
    found = [row for row in rows if (row["shape"], row["arm"], row["metric"]) == (shape, arm, metric)]
    require(bool(found), f"rows of {shape}", (arm, metric), "a row: run python -m kv4rl.fidelity.experiments")
    return found[-1]


def value(rows: Iterable[Mapping[str, str]], shape: str, arm: str, statistic: str) -> float:
    """An arm's mean KL in nats, or its geometric ratio to the panel's baseline. Rows are of one model.

    Raises ValueError for an unknown statistic and for an arm without its row.
    """
    require(statistic in STATISTICS, "statistic", statistic, f"one of {', '.join(STATISTICS)}")
    baseline = panel(shape).baseline
    if statistic == "geometric" and arm == baseline:
        return 1.0
    metric = "sampler_kl" if statistic == "mean" else f"kl_geometric_ratio_vs_{baseline}"
    return float(_row(rows, shape, arm, metric)["value"])


def holds(rows: Iterable[Mapping[str, str]], ordering: Ordering, statistic: str) -> bool:
    """Whether the ordering is that of our rows of one model."""
    rows = list(rows)
    lower, higher = (value(rows, ordering.shape, arm, statistic) for arm in (ordering.lower, ordering.higher))
    return lower < higher


def failures(rows: Iterable[Mapping[str, str]]) -> list[tuple[Ordering, str]]:
    """(ordering, statistic) of every ordering that our rows of one model do not have."""
    rows = list(rows)
    return [(o, statistic) for o in ORDERINGS for statistic in STATISTICS if not holds(rows, o, statistic)]
