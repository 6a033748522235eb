"""The curves of a rollout's intervals: every decode call counts once, and a second run replaces the first."""

import numpy as np

from kv4rl.bench.trace_bins import binned, write_bins
from kv4rl.results import read_rows
from kv4rl.rollout.trace import COLUMNS, Trace


def make_trace(calls: int) -> Trace:
    """Two intervals of `calls` decode calls with one prefill step before each."""
    kinds = np.array((["prefill"] + ["decode"] * calls) * 2)
    columns = {name: np.ones(len(kinds), dtype=np.int64) for name in COLUMNS}
    columns |= {"kind": kinds, "collection": np.arange(len(kinds)) // (calls + 1), "step_ms": np.full(len(kinds), 2.0)}
    columns["active_requests"] = np.tile(np.arange(calls + 1), 2)
    columns["context_tokens"] = 10 * columns["active_requests"]
    trace = Trace()
    trace.extend(columns)
    return trace


def test_bins_hold_the_means_of_consecutive_decode_calls():
    found = binned(make_trace(6), [1], bins=3)
    assert [(b.interval, b.place, b.calls) for b in found] == [(1, 0, 2), (1, 1, 2), (1, 2, 2)]
    assert [b.active_requests for b in found] == [1.5, 3.5, 5.5]
    assert {b.context_tokens for b in found} == {10.0} and {b.decode_step_ms for b in found} == {2.0}
    assert len(binned(make_trace(2), [0, 1], bins=100)) == 4 and binned(make_trace(2), [7]) == []


def test_a_shorter_run_leaves_nothing_of_a_longer_one(tmp_path):
    out = str(tmp_path / "rollout.csv")
    for calls in (6, 2):
        path = write_bins(out, "4B-300/32", "mini-qwen3", "sync", binned(make_trace(calls), [0]))
    write_bins(out, "4B-300/32", "mini-qwen3", "partial", binned(make_trace(3), [0]))
    rows = read_rows(path, metric="active_requests")
    assert path.name == "rollout_trace.csv"
    assert [(row["arm"], row["shape"], float(row["value"])) for row in rows] == [
        ("sync", "4B-300/32/0/00", 1.0), ("sync", "4B-300/32/0/01", 2.0),
        *(("partial", f"4B-300/32/0/0{i}", 1.0 + i) for i in range(3)),
    ]  # fmt: skip
