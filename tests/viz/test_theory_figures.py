"""Figures and sliders of notebooks 01 and 02: they show the values they claim, over the whole range of every slider."""

import itertools
import time

import numpy as np
import pytest
from traitlets import TraitError

from kv4rl.config import RolloutConfig
from kv4rl.rollout.simulator import simulate, summarize
from kv4rl.rollout.workload import Workload
from kv4rl.theory import concentration
from kv4rl.theory.lengths import LengthDistribution
from kv4rl.theory.roofline import QWEN3_4B, QWEN3_8B, demands
from kv4rl.theory.step_cost import StepCost
from kv4rl.viz import planner, theory_widgets
from kv4rl.viz import workload as figures
from kv4rl.viz.concentration import by_slots, explore, length_bias, schedules, survivors

LAW = LengthDistribution.lognormal(200, 0.8, cap=3000)


def test_schedules_draw_every_response_once_and_never_two_in_a_slot():
    lengths = [3, 9, 2, 5, 7, 1, 4, 4]
    for bars in schedules(lengths, 3).data:
        assert sorted(bars.x) == sorted(lengths)
        for slot in set(bars.y):
            spans = sorted((b, b + x) for b, x, y in zip(bars.base, bars.x, bars.y, strict=True) if y == slot)
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def test_by_slots_plots_the_exact_factor():
    figure = by_slots({"a": LAW}, [2, 64, 512], mark=64)
    assert figure.data[0].y[1] == pytest.approx(concentration.kv_concentration(LAW, 64))
    assert figure.data[1].y[1] == pytest.approx(concentration.wave_occupancy(LAW, 64))


def test_length_bias_curves_are_distributions_with_their_means_in_the_legend():
    figure = length_bias(LAW, observed=[10, 20, 500])
    assert [sum(trace.y) for trace in figure.data] == pytest.approx([1, 1, 1])
    assert f"{concentration.length_biased(LAW).mean:,.0f}" in figure.data[2].name


def test_the_survivors_of_a_wave_sum_to_its_occupancy():
    steps, active = survivors(LAW, 64)
    assert active[0] == 64 and active[-1] == 0
    area = (np.diff(steps) * active[:-1]).sum()
    assert area == pytest.approx(64 * LAW.mean)


def test_the_explorer_states_the_exact_values():
    titles = [note.text for note in explore(LAW, 512, 100).layout.annotations]
    assert f"C_KV = {concentration.kv_concentration(LAW, 512):.2f} at B = 512" in titles
    assert f"context {concentration.wave_context(LAW, 512, 100):,.0f} (sync)" in titles[1]
    assert titles[1].endswith(f"{concentration.refill_context(LAW, 100):,.0f} (refill)")
    assert f"{concentration.length_biased(LAW).mean:,.0f} seen in a slot" in titles[2]


def test_every_panel_of_the_explorer_has_a_y_label_and_every_law_a_name():
    figure = explore(LAW, 512, 100)
    assert [axis.title.text for axis in figure.select_yaxes()] == ["C_KV", "active requests", "probability"]
    named = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert named == ["a wave", "refill", "L, one a response", "L*, one a slot-step"]


def simulated():
    config = RolloutConfig(
        groups_per_update=8, responses_per_group=4, max_response_tokens=3000, max_active_requests=64, cache_pages=9000
    )
    workload = Workload(LAW, LengthDistribution.deterministic(20), 0.4, siblings=4)
    return simulate(config, workload, collections=4, replicas=2).trace


def test_traces_are_smoothed_as_the_papers_and_keep_their_mean():
    values = np.arange(1000.0)
    smooth = figures.smoothed(values)
    assert len(smooth) == 125 and smooth[50] == pytest.approx(values[400])
    assert figures.smoothed(np.array([1.0, 3.0])).tolist() == [2.0]


def test_trace_figures_show_every_arm_and_panel():
    trace = simulated()
    shown = {"kv_bytes_per_token": 73728, "replica": 0, "collections": [1, 2, 3]}
    figure = figures.concentration_trace({"sync": trace, "partial": trace}, calls=500, **shown)
    assert len(figure.data) == 8
    figure = figures.carried_and_fresh(trace, **shown)
    total = np.asarray(figure.data[0].y) + np.asarray(figure.data[1].y)
    assert total.mean() == pytest.approx(summarize(trace).volume_gb(73728), rel=0.25)


def test_demand_and_ratio_figures_carry_their_values():
    found = demands(QWEN3_4B, 640, 640 * 874, tensor_parallel=2)
    figure = figures.service_demands({"early": found})
    assert [bar.y[0] for bar in figure.data] == [found.weights_ms, found.compute_ms, found.kv_ms]
    row = {"active batch": 8.0, "resident KV": 7.9, "step latency": 4.0, "throughput": 2.0}
    figure = figures.ratios({"4B-300": row}, {"4B-300": {"active batch": 8.27}})
    assert figure.data[0].y == (8.0,) and figure.data[1].y == (8.27,) and figure.data[3].y == (None,)


def test_the_plan_table_has_a_line_a_precision_and_bf16_is_its_own_yardstick():
    rows = planner.plan_rows(StepCost(QWEN3_8B), LAW, prompt_tokens=100, sink_tokens=16, recent_tokens=128)
    assert [row["cache"] for row in rows] == ["BF16", "KV8", "KV4", "KV4-RL"]
    assert rows[0]["decode speedup"] == rows[0]["rollout speedup"] == "1.00x"


def test_the_plan_figure_draws_what_the_plan_table_lists():
    given = {"prompt_tokens": 100, "slots": 2048, "kv_budget": 30e9, "sink_tokens": 32, "recent_tokens": 64}
    rows, figure = (make(StepCost(QWEN3_8B), LAW, **given) for make in (planner.plan_rows, planner.plan_figure))
    titles = [note.text for note in figure.layout.annotations]
    assert [title.split(" (")[0] for title in titles] == [
        "pages, thousands", "active requests of 2,048 slots", "resident KV, GB", "decode speedup", "rollout speedup",
    ]  # fmt: skip
    columns = ("pages", "active requests", "resident KV, GB", "decode speedup", "rollout speedup")
    for bars, column, scale in zip(figure.data, columns, (1e3, 1, 1, 1, 1), strict=True):
        listed = [float(row[column].split(" (")[0].rstrip("x").replace(",", "")) for row in rows]
        assert [y * scale for y in bars.y] == pytest.approx(listed, rel=0.02), column


def test_the_planner_takes_memory_and_law_and_counts_both():
    explorer = theory_widgets.planner_explorer()
    pages = explorer.figure.data[0].y
    explorer.controls["hbm_gb"].value = 180
    assert all(more > fewer for more, fewer in zip(explorer.figure.data[0].y, pages, strict=True))
    requests = explorer.figure.data[1].y
    explorer.controls["family"].value = "geometric"
    assert explorer.figure.data[1].y != requests


@pytest.mark.parametrize("make", [theory_widgets.concentration_explorer, theory_widgets.planner_explorer])
def test_every_slider_moves_over_its_range_in_time_and_changes_the_figure(make):
    explorer = make()
    for name, control in explorer.controls.items():
        before = control.value
        ends = control.options if hasattr(control, "options") else (control.min, control.max)
        for value in {ends[0], ends[-1]} - {before}:
            standing = explorer.figure.to_json()
            quickest = min(move_and_back(control, value, before) for _ in range(3))
            control.value = value
            assert explorer.sentence.value == "" and explorer.figure.to_json() != standing, (name, value)
            assert quickest < 0.3, (name, value)  # 0.2 s at most on a core of its own; a busy sibling thread slows it
            control.value = before
            assert explorer.figure.to_json() == standing, (name, value)


def move_and_back(control, value, before):
    """Processor seconds of one move: what other processes take from this one does not count."""
    began = time.process_time()
    control.value = value
    seconds = time.process_time() - began
    control.value = before
    return seconds


def test_a_plan_that_cannot_be_is_a_sentence_and_the_figure_stays():
    explorer = theory_widgets.planner_explorer()
    for name, value in {"slots": 2048, "sink_tokens": 64, "recent_tokens": 512}.items():
        explorer.controls[name].value = value
    possible = explorer.figure.to_json()
    explorer.controls["tensor_parallel"].value = 1
    assert "side buffers of 2048 slots" in explorer.sentence.value and explorer.figure.to_json() == possible
    explorer.controls["tensor_parallel"].value = 2
    assert explorer.sentence.value == ""


def test_the_laws_of_the_sliders_have_the_mean_they_say():
    for family in theory_widgets.FAMILIES:
        assert theory_widgets.law(family, 1000, 0.5).mean == pytest.approx(1000, rel=0.01)
    with pytest.raises(ValueError, match="family='zipf': expected one of deterministic"):
        theory_widgets.law("zipf", 10, 1)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("bimodal", -3, 0.5), "mean=-3: expected a number >= 1"),
        (("geometric", "10", 0.5), "mean='10': expected a number"),
        (("log-normal", 100, float("nan")), "spread=nan: expected a number > 0"),
        (("log-normal", 100, -1), "spread=-1: expected a number > 0"),
        (("deterministic", 10**6, 0.5), "mean=1000000: expected a number >= 1 and <= 16384"),
    ],
)
def test_a_law_that_cannot_be_is_refused_in_a_sentence(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        theory_widgets.law(*given)


def test_the_planners_widths_are_whole_pages():
    explorer = theory_widgets.planner_explorer()
    for name in ("sink_tokens", "recent_tokens"):
        with pytest.raises(TraitError, match="Invalid selection"):
            explorer.controls[name].value = 7
