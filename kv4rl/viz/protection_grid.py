"""What a choice of sink and recent widths costs and buys: sampler KL from rows, bytes and speed of Qwen3's shapes.

KL is measured, on a small model, at every pair of widths (`fidelity.csv`, shape `grid`). Attention time is measured on
one H200 without protection (`kv4`) and at the paper's 16/128 (`kv4rl`), at the shapes of Table A3 (`kernels.csv`); for
other widths it is predicted: on the straight line through those two times, by the bytes read.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from kv4rl.cache.kv_cache import CacheShape
from kv4rl.cache.memory_plan import page_bytes, side_bytes
from kv4rl.config import PAGE_TOKENS, KVConfig, require, require_number
from kv4rl.results import latest
from kv4rl.theory.roofline import QWEN3_4B
from kv4rl.theory.step_cost import StepCost
from kv4rl.viz.kernels import of_table_a3

ARM = re.compile(r"kv4rl-s(\d+)-w(\d+)")
COMMAND = "python -m kv4rl.fidelity.experiments --model {model} --panels grid"
NONE, PAPER = (0, 0), (16, 128)  # no protection; Table A1
HEADS = "tp2_16q4kv"  # the shard of kernels.csv that is shown: TP2 of Qwen3-4B and of Qwen3-8B
QWEN3 = CacheShape(QWEN3_4B.layers, QWEN3_4B.query_heads, QWEN3_4B.kv_heads, QWEN3_4B.head_dim, torch.bfloat16)


@dataclass(frozen=True)
class Point:
    """Sampler KL of one pair of widths, in nats, with its 95 % bootstrap interval."""

    sink: int
    recent: int
    kl: float
    low: float
    high: float

    @property
    def protected(self) -> int:
        return self.sink + self.recent


@dataclass(frozen=True)
class Grid:
    """One model's KL at every pair of a set of sink and of recent widths."""

    model: str
    points: dict[tuple[int, int], Point]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, str]], model: str) -> "Grid":
        """The newest row of each pair. Raises ValueError, with the command that helps, for a missing pair."""
        found = {}
        for row in rows:
            arm = ARM.fullmatch(row["arm"])
            if arm and (row["model"], row["shape"], row["metric"]) == (model, "grid", "sampler_kl"):
                found.setdefault((int(arm[1]), int(arm[2])), []).append(row)
        points = {pair: _point(*pair, latest(rows)) for pair, rows in sorted(found.items())}
        sinks, recents = ({pair[axis] for pair in points} for axis in (0, 1))
        missing = sorted({(s, w) for s in sinks for w in recents} - set(points))
        expected = f"all of them in fidelity.csv; run {COMMAND.format(model=model)}"
        require(bool(points) and not missing, f"missing (s, w) of {model}", missing or "all", expected)
        return cls(model, points)

    @property
    def sinks(self) -> list[int]:
        return sorted({sink for sink, _ in self.points})

    @property
    def recents(self) -> list[int]:
        return sorted({recent for _, recent in self.points})

    def at(self, sink: int, recent: int) -> Point:
        """Raises ValueError for a pair that was not measured."""
        expected = f"s of {self.sinks} and w of {self.recents}"
        require((sink, recent) in self.points, "(s, w)", (sink, recent), expected)
        return self.points[sink, recent]

    def front(self) -> list[Point]:
        """Pareto front: points that no other beats in both protected positions and KL; fewest positions first."""
        kept: list[Point] = []
        for point in sorted(self.points.values(), key=lambda point: (point.protected, point.kl)):
            if not kept or point.kl < kept[-1].kl:
                kept.append(point)
        return kept

    def cheapest(self, budget: float) -> Point:
        """The fewest protected positions whose interval ends at or below `budget` nats; the smaller KL of equals.

        Raises ValueError, with the smallest reachable budget, if there is none, and for what is no number.
        """
        require_number(budget, "budget", 0)
        least = min(point.high for point in self.points.values())
        require(budget >= least, "budget", budget, f"at least {least:.3g} nats, the least upper bound of {self.model}")
        fitting = (point for point in self.points.values() if point.high <= budget)
        return min(fitting, key=lambda point: (point.protected, point.kl))


def _point(sink: int, recent: int, row: Mapping[str, str]) -> Point:
    return Point(sink, recent, *(float(row[name]) for name in ("value", "low", "high")))


@dataclass(frozen=True)
class Speed:
    """Attention of one layer over BF16's, and whether a row says so or the bytes model does."""

    over_bf16: float
    scope: str  # "measured" or "predicted"


@dataclass(frozen=True)
class Workload:
    """Active requests with equal contexts on one GPU, as a row of Table A3, with what `kernels.csv` says of it."""

    active_requests: int
    context_tokens: int
    ms: dict[str, float]  # by arm: one layer's decode attention

    @property
    def name(self) -> str:
        return f"{self.active_requests} x {self.context_tokens:,}"

    def speed(self, sink: int, recent: int) -> Speed:
        """Speedup of one layer's decode attention over FlashInfer BF16 at widths (s, w).

        Between and beyond the two measured widths the time is linear in the bytes read, so protection never looks
        faster than none unless it was measured to be.
        """
        none, paper, here = (self._bytes_read(*widths) for widths in (NONE, PAPER, (sink, recent)))
        share = (here - none) / (paper - none)
        ms = (1 - share) * self.ms["kv4"] + share * self.ms["kv4rl"]
        scope = "measured" if (sink, recent) in (NONE, PAPER) else "predicted"
        return Speed(self.ms["bf16_flashinfer"] / ms, scope)

    def step_speed(self, sink: int, recent: int) -> float:
        """Predicted speedup of a whole decode step of Qwen3-4B at TP2: attention is a part of it (`StepCost`)."""
        bf16, ours = (StepCost(QWEN3_4B, kv) for kv in (KVConfig("bf16"), KVConfig("kv4rl", sink, recent)))
        state = (self.active_requests, self.active_requests * self.context_tokens)
        return float(bf16(*state) / ours(*state))

    def _bytes_read(self, sink: int, recent: int) -> float:
        shard = replace(QWEN3_4B, layers=1)
        cost = StepCost(shard, KVConfig("kv4rl", sink, recent), tensor_parallel=2)
        return float(cost.kv_bytes(self.active_requests, self.active_requests * self.context_tokens))


def workloads(rows: Iterable[Mapping[str, str]]) -> list[Workload]:
    """Table A3's shapes with BF16, KV4 and KV4-RL times in `kernels.csv`, by context. ValueError if there is none."""
    times: dict[str, dict[str, float]] = {}
    for row in of_table_a3(list(rows)):
        if row["model"] == HEADS and row["metric"] == "ms_per_layer":
            times.setdefault(row["shape"], {})[row["arm"]] = float(row["value"])
    wanted = {"bf16_flashinfer", "kv4", "kv4rl"}
    found = [Workload(*map(int, shape.split("x")), ms) for shape, ms in times.items() if wanted <= set(ms)]
    require(bool(found), "kernels.csv", sorted(times), f"a shape with ms_per_layer of {', '.join(sorted(wanted))}")
    return sorted(found, key=lambda load: load.context_tokens)


def response_bytes(context_tokens: int, kv: KVConfig) -> int:
    """Cache bytes of one request of Qwen3-4B (or 8B: its cache has the same shape) at that context: whole pages for
    every position, and the side buffer."""
    pages = -(-context_tokens // PAGE_TOKENS)
    return pages * page_bytes(kv, QWEN3) + side_bytes(kv, QWEN3, 1)
