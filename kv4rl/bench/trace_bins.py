"""What a collection interval looked like from its first decode call to its last: the measured curves of Fig. 2.

An interval has ten thousand calls; their means over a hundred equal runs of calls are what a figure can show.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kv4rl.results import result_row, write_rows
from kv4rl.rollout.trace import Trace

BINS = 100  # of an interval; as many as it has calls where these are fewer
UNITS = {"active_requests": "requests", "context_tokens": "tokens", "resident_kv_bytes": "B", "decode_step_ms": "ms"}


@dataclass(frozen=True)
class Bin:
    """Means over consecutive pure-decode calls of one interval."""

    interval: int
    place: int  # among the interval's bins, from 0
    calls: int
    active_requests: float
    context_tokens: float  # of an active request
    resident_kv_bytes: float
    decode_step_ms: float


def binned(trace: Trace, collections: Sequence[int], bins: int = BINS) -> list[Bin]:
    """The bins of some intervals of one replica's trace, in order."""
    rows, made = trace.pure_decode(), []
    for interval in collections:
        calls = np.flatnonzero(rows["collection"] == interval)
        for place, part in enumerate(np.array_split(calls, min(bins, len(calls)) or 1)):
            if len(part):
                active, context, kv, ms = (
                    float(rows[name][part].mean())
                    for name in ("active_requests", "context_tokens", "resident_kv_bytes", "step_ms")
                )
                made.append(Bin(interval, place, len(part), active, context / active, kv, ms))
    return made


def write_bins(out: str, shape: str, model: str, arm: str, bins: Sequence[Bin]) -> Path:
    """Put the bins of one arm beside the results file `out`, in place of its earlier ones: shape "FIT/interval/bin"."""
    about = {"experiment": "rollout_trace", "arm": arm, "model": model}
    rows = [
        result_row(
            **about, shape=f"{shape}/{b.interval}/{b.place:02d}", metric=metric, unit=unit, value=getattr(b, metric),
            n=b.calls,
        )
        for b in bins
        for metric, unit in UNITS.items()
    ]  # fmt: skip
    earlier = lambda row: (row["arm"], row["model"], row["shape"].rsplit("/", 2)[0]) == (arm, model, shape)
    return write_rows(Path(out).with_stem(f"{Path(out).stem}_trace"), rows, drop=earlier)
