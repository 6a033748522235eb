"""The fitted workloads and what is made of them: settings are the paper's, phases and ratios are what they say."""

import numpy as np
import pytest

from kv4rl.paper import PUBLISHED, REPLAY_SHAPES
from kv4rl.results import read_rows
from kv4rl.rollout import paper_traces
from kv4rl.rollout.fits import CAP, FITS, Fit, fit
from kv4rl.rollout.simulator import summarize
from kv4rl.rollout.trace import COLUMNS, Trace


def test_there_is_a_fit_for_every_checkpoint_of_table_a3():
    assert set(FITS) == set(REPLAY_SHAPES)
    with pytest.raises(ValueError, match="checkpoint='4B-200': expected one of 4B-100"):
        fit("4B-200")


def test_the_settings_are_those_of_the_protocol():
    for found in FITS.values():
        config = found.rollout("partial")
        assert (config.groups_per_update, config.responses_per_group, config.pool_groups) == (128, 8, 256)
        assert config.max_active_requests == PUBLISHED["trace/max_active_requests"].value
        assert config.cache_pages == PUBLISHED[f"trace/pool_pages_{found.model}"].value
    assert list(paper_traces.measured_rounds(fit("4B-300"))) == list(range(3, 15))
    assert list(paper_traces.measured_rounds(fit("8B-400"))) == list(range(3, 9))


def test_mean_lengths_are_near_those_published():
    assert fit("4B-300").lengths.mean == pytest.approx(PUBLISHED["length/4b/mean_bf16"].value, rel=0.05)
    assert fit("4B-500").lengths.mean == pytest.approx(PUBLISHED["length/4b/late"].value, rel=0.05)
    assert fit("8B-400").lengths.mean == pytest.approx(PUBLISHED["length/8b/late"].value, rel=0.10)
    assert all(found.lengths.cap == CAP for found in FITS.values())


def step_rows(**columns):
    count = len(columns["active_requests"])
    rows = {name: np.zeros(count, dtype=np.int64) for name in COLUMNS} | {"kind": np.array(["decode"] * count)}
    columns.setdefault("decode_tokens", columns["active_requests"])
    trace = Trace()
    trace.extend(rows | {name: np.asarray(values) for name, values in columns.items()})
    return trace


def test_phases_split_the_time_of_each_interval_equally():
    # Ten steps of 1 ms with 8 rows, then five of 2 ms with 2 rows: two phases of 10 ms.
    trace = step_rows(
        active_requests=[8] * 10 + [2] * 5, context_tokens=[80] * 10 + [50] * 5, step_ms=[1.0] * 10 + [2.0] * 5
    )
    assert paper_traces.phases(trace, [0], count=2) == [(8.0, 10.0), (2.0, 25.0)]


def test_ratios_are_partial_over_synchronous():
    sync = summarize(step_rows(active_requests=[1] * 8, context_tokens=[10] * 8, step_ms=[1.0] * 8))
    partial = summarize(step_rows(active_requests=[4] * 2, context_tokens=[40] * 2, step_ms=[2.0] * 2))
    assert paper_traces.ratios(partial, sync) == {
        "active_batch_ratio": 4, "fewer_decode_calls": 4, "resident_kv_ratio": 4, "step_latency_ratio": 2,
        "decode_throughput_ratio": 2,
    }  # fmt: skip


def test_variations_change_one_assumption_at_a_time():
    found = fit("4B-300")
    for label, varied in paper_traces.variations(found).items():
        changed = [name for name, value in vars(varied).items() if value != getattr(found, name)]
        assert len(changed) == (label != "as fitted")


def test_rows_carry_every_metric_with_its_unit_and_extremes(monkeypatch):
    short = Fit("4b", 60, 0.6, 0.01, 0.4)
    monkeypatch.setitem(FITS, "tiny", short)
    monkeypatch.setattr(paper_traces, "measured_rounds", lambda found: range(1, 2))
    monkeypatch.setattr(Fit, "rollout", lambda self, arm: paper_traces_config(arm))
    made = paper_traces.rows("tiny", [1, 2])
    by_key = {(row["arm"], row["metric"]): row for row in made}
    assert len(by_key) == len(made) == 6 + 6 + 5 + 10
    row = by_key["partial_over_sync", "active_batch_ratio"]
    assert row["low"] <= row["value"] <= row["high"] and (row["n"], row["unit"], row["scope"]) == (2, "x", "simulated")
    assert by_key["partial", "phase3_context_tokens"]["unit"] == "tokens"
    assert "--checkpoints tiny --seeds 2" in row["command"]
    varied = paper_traces.sensitivity_rows("tiny")
    assert (
        len({(row["arm"], row["metric"]) for row in varied}) == len(varied) == 7 * len(paper_traces.variations(short))
    )
    as_fitted = {row["metric"]: row for row in varied if row["arm"] == "as fitted"}
    assert as_fitted["partial_resident_kv_gb"]["unit"] == "GB"
    volumes = [as_fitted[f"{arm}_resident_kv_gb"]["value"] for arm in ("partial", "sync")]
    assert volumes[0] / volumes[1] == pytest.approx(as_fitted["resident_kv_ratio"]["value"])


def test_the_stored_ratios_of_fig_2_are_within_fifteen_percent_of_the_papers():
    stored = {row["metric"]: row for row in read_rows("rollout.csv", experiment="traces", shape="4B-300")
              if row["arm"] == "partial_over_sync"}  # fmt: skip
    published = {name.split("/")[-1]: item for name, item in PUBLISHED.items() if name.startswith("trace/4b-300/")}
    compared = stored.keys() & published.keys()
    assert len(compared) == 5
    for metric in compared:
        assert float(stored[metric]["value"]) == pytest.approx(published[metric].value, rel=0.15), metric


def paper_traces_config(arm):
    from kv4rl.config import RolloutConfig

    return RolloutConfig(collector=arm, groups_per_update=4, responses_per_group=2, cache_pages=40000)
