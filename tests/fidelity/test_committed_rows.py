"""The committed rows: every panel for both models, with intervals, and the paper's orderings, held or listed."""

import pytest

from kv4rl.fidelity.orderings import (
    EQUAL,
    NOT_EQUAL,
    NOT_HELD,
    ORDERINGS,
    STATISTICS,
    Ordering,
    holds,
    intervals_overlap,
    value,
)
from kv4rl.fidelity.panels import PANELS
from kv4rl.results import read_rows

HEAD_DIMS = {"mini-qwen3": 128, "smollm2-135m": 64}
PAPERS = ("4b", "4c", "A3", "A4a", "A4b", "A4c")
ROWS = {model: read_rows("fidelity.csv", experiment="fidelity", model=model) for model in HEAD_DIMS}
ORDERED = [(model, ordering, statistic) for model in HEAD_DIMS for ordering in ORDERINGS for statistic in STATISTICS]


@pytest.mark.parametrize("model", HEAD_DIMS)
@pytest.mark.parametrize("name", PANELS)
def test_every_arm_of_every_panel_has_its_rows_with_intervals(model, name):
    rows = {(row["arm"], row["metric"]): row for row in ROWS[model] if row["shape"] == name}
    for arm in PANELS[name].arms(HEAD_DIMS[model]):
        kl = rows[arm.name, "sampler_kl"]
        assert 0 < float(kl["low"]) <= float(kl["value"]) <= float(kl["high"])
        assert int(kl["n"]) == 256 or (name not in PAPERS and int(kl["n"]) == 128)  # 32 responses (§B.5), or 16
        bits = float(rows[arm.name, "bits_per_element"]["value"])
        assert bits == pytest.approx(arm.representation.bits_per_element(HEAD_DIMS[model]))
        assert float(rows[arm.name, "bytes_per_position"]["value"]) > 0
        if arm.name != PANELS[name].baseline:
            for metric in ("kl_reduction", "kl_geometric_ratio"):
                ratio = rows[arm.name, f"{metric}_vs_{PANELS[name].baseline}"]
                assert float(ratio["low"]) <= float(ratio["value"]) <= float(ratio["high"])


@pytest.mark.parametrize("model", HEAD_DIMS)
def test_the_control_is_bit_identical_and_rows_name_a_commit_and_their_panel(model):
    rows = [row for row in ROWS[model] if row["shape"] in PANELS]
    controls = [row for row in rows if row["metric"] == "control_kl"]
    assert {row["shape"] for row in controls} == set(PANELS) and all(float(row["value"]) == 0 for row in controls)
    assert all(f"--panels {row['shape']}" in row["command"] and not row["commit"].endswith("+") for row in rows)


@pytest.mark.parametrize(("model", "ordering", "statistic"), ORDERED, ids=str)
def test_an_ordering_of_the_paper_holds_unless_listed_with_a_reason(model, ordering, statistic):
    listed = (model, ordering.shape, ordering.lower, ordering.higher, statistic) in NOT_HELD
    assert holds(ROWS[model], ordering, statistic) != listed


def test_every_exception_is_an_ordering_and_gives_a_reason():
    asked = {(model, o.shape, o.lower, o.higher, statistic) for model, o, statistic in ORDERED}
    assert set(NOT_HELD) <= asked
    assert set(NOT_EQUAL) <= {(model, *equal[1:]) for model in HEAD_DIMS for equal in EQUAL}
    assert all(len(reason) > 20 for reason in (*NOT_HELD.values(), *NOT_EQUAL.values()))


@pytest.mark.parametrize("model", HEAD_DIMS)
@pytest.mark.parametrize(("place", "shape", "arm", "other"), EQUAL)
def test_what_the_paper_calls_equal_within_error_is_unless_listed_with_a_reason(model, place, shape, arm, other):
    listed = (model, shape, arm, other) in NOT_EQUAL
    assert intervals_overlap(ROWS[model], shape, arm, other) != listed


def test_what_the_reasons_say_is_in_the_rows():
    """Rotated NVFP4 keys are as good as INT4's; the mean's exceptions of the mini model have the geometric order."""
    assert intervals_overlap(ROWS["smollm2-135m"], "A4c", "nvfp4-k", "int4-k")
    by_statistic = {statistic: {key[:-1] for key in NOT_HELD if key[-1] == statistic} for statistic in STATISTICS}
    assert {key[1:] for key in by_statistic["geometric"]} == {("A4c", "nvfp4-none", "nvfp4-k")}


def test_missing_rows_and_unknown_statistics_are_refused():
    with pytest.raises(ValueError, match="rows of 4b"):
        holds([], Ordering("Fig. 4b", "4b", "kv8", "kv4"), "mean")
    with pytest.raises(ValueError, match="statistic='median'"):
        value([], "4b", "kv4", "median")
