"""The trade-off of sink and recent widths: numbers come from rows, predictions say so, sliders answer in time."""

import re
import time

import numpy as np
import pytest

from kv4rl.attention.regions import regions
from kv4rl.config import KVConfig
from kv4rl.results import read_rows
from kv4rl.viz.protection import number, tradeoff
from kv4rl.viz.protection_grid import PAPER, Grid, Workload, response_bytes, workloads
from kv4rl.viz.protection_widget import protection_explorer

SINKS, RECENTS = (0, 4, 16, 64), (0, 16, 128, 512)
MODEL = "some-model"


def row(sink, recent, value, **given):
    numbers = {"value": f"{value:.6g}", "low": f"{value / 2:.6g}", "high": f"{value * 2:.6g}", "date": "2026-11-29"}
    labels = {"arm": f"kv4rl-s{sink}-w{recent}", "model": MODEL, "shape": "grid", "metric": "sampler_kl"}
    return labels | numbers | given


def grid_rows(**given):
    return [row(s, w, 1e-2 / (1 + s) / (1 + w), **given) for s in SINKS for w in RECENTS]


@pytest.fixture
def grid():
    return Grid.from_rows(grid_rows(), MODEL)


@pytest.fixture(scope="module")
def loads():
    return workloads(read_rows("kernels.csv"))


def test_a_grid_holds_the_newest_row_of_every_pair(grid):
    assert (grid.sinks, grid.recents) == (list(SINKS), list(RECENTS))
    newer = [row(16, 128, 7e-6, date="2026-12-01"), row(16, 128, 9.0, shape="loop"), row(16, 128, 9.0, model="other")]
    assert Grid.from_rows([*newer, *grid_rows()], MODEL).at(*PAPER).kl == 7e-6


def test_missing_pairs_are_named_with_the_command_that_makes_them():
    with pytest.raises(ValueError, match=r"\[\(4, 128\)\].*--model some-model --panels grid"):
        Grid.from_rows([each for each in grid_rows() if each["arm"] != "kv4rl-s4-w128"], MODEL)
    with pytest.raises(ValueError, match="missing"):
        Grid.from_rows([], MODEL)


def test_a_pair_outside_the_grid_is_refused(grid):
    with pytest.raises(ValueError, match=r"\(5, 128\)"):
        grid.at(5, 128)


def test_the_cheapest_pair_is_the_fewest_positions_whose_interval_fits(grid):
    for budget in (1e-2, 1e-3, 1e-4, 1e-5):
        chosen = grid.cheapest(budget)
        fitting = [point for point in grid.points.values() if point.high <= budget]
        assert chosen in fitting and chosen.protected == min(point.protected for point in fitting)
    with pytest.raises(ValueError, match=r"budget=1e-12.*at least"):
        grid.cheapest(1e-12)


def test_a_budget_that_is_no_number_is_refused(grid):
    for budget in ("a", None, float("nan"), True):
        with pytest.raises(ValueError, match=r"budget=.*: expected a number"):
            grid.cheapest(budget)


def test_an_explorer_of_what_does_not_fit_together_is_refused_in_a_sentence(grid, loads):
    narrow = Grid(MODEL, {pair: point for pair, point in grid.points.items() if pair[1] < 512})
    without = Grid(MODEL, {pair: point for pair, point in grid.points.items() if pair[1] != 128})
    foreign = Workload(1, 1, loads[0].ms)
    for sentence, given, extra in (
        ("grids=.*: expected one model's grid or more", ({}, loads), {}),
        ("loads=.*: expected one workload or more", ({MODEL: grid}, []), {}),
        ("grids=.*: expected the same widths for every model", ({MODEL: grid, "other": narrow}, loads), {}),
        ("widths=.*: expected 16/128 among them", ({MODEL: without}, loads), {}),
        ("load='1 x 1': expected one of", ({MODEL: grid}, loads), {"load": foreign}),
    ):
        with pytest.raises(ValueError, match=sentence):
            protection_explorer(*given, **extra)


def test_the_front_has_no_point_that_another_beats(grid):
    front = grid.front()
    assert front[0].protected == 0
    for point in front:
        assert not [o for o in grid.points.values() if o.protected <= point.protected and o.kl < point.kl]


def test_speed_is_the_rows_where_they_exist_and_says_where_it_is_predicted(loads):
    stored = read_rows("kernels.csv", metric="speedup_vs_bf16", model="tp2_16q4kv")
    rows = {(row["shape"], row["arm"]): float(row["value"]) for row in stored}
    for load in loads:
        shape = f"{load.active_requests}x{load.context_tokens}"
        for widths, arm in (((0, 0), "kv4"), (PAPER, "kv4rl")):
            speed = load.speed(*widths)
            assert speed.scope == "measured" and speed.over_bf16 == pytest.approx(rows[shape, arm], rel=1e-4)
        assert load.speed(16, 64).scope == load.speed(0, 144).scope == "predicted"


def test_predicted_time_is_linear_in_bytes_through_both_measurements(loads):
    for load in loads:
        ends = [load.speed(*widths).over_bf16 for widths in ((0, 0), PAPER)]
        if ends[0] >= ends[1]:
            inside = [load.speed(s, w).over_bf16 for s, w in ((0, 16), (0, 32), (1, 64), (16, 64), (0, 128), (16, 112))]
            assert ends[0] >= max(inside) and min(inside) >= ends[1], "protection never looks faster than none"
        near = [load.speed(16, recent).over_bf16 for recent in (127, 128, 129)]
        assert near == sorted(near, reverse=True) and near[0] / near[2] < 1.01
        assert load.speed(128, 16).over_bf16 == pytest.approx(load.speed(*PAPER).over_bf16), "where does not matter"
        assert 1 < load.step_speed(*PAPER) < load.speed(*PAPER).over_bf16


def test_kernel_rows_without_the_arms_are_refused():
    bare = {"model": "tp2_16q4kv", "metric": "ms_per_layer", "shape": "8x100", "arm": "kv4", "value": "1"}
    with pytest.raises(ValueError, match="bf16_flashinfer, kv4, kv4rl"):
        workloads([bare])


def test_bytes_of_a_response_are_whole_pages_and_the_side_buffer():
    kv4, kv4rl = (KVConfig("kv4rl", *widths) for widths in ((0, 0), PAPER))
    assert response_bytes(16, KVConfig("bf16")) == 16 * 147_456  # twice the 73,728 B a token of a TP2 shard (§B.3)
    assert response_bytes(17, kv4) == 2 * 36 * 8 * 2176
    assert response_bytes(17, kv4rl) - response_bytes(17, kv4) == 144 * 36 * 8 * 260


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (16, 128), (64, 512)])
def test_the_picture_states_the_rows_numbers_and_maps_the_regions(grid, loads, sink, recent):
    load, point = loads[0], grid.at(sink, recent)
    figure = tradeoff(grid, load, sink, recent)
    titles = [note.text for note in figure.layout.annotations]
    assert titles[0] == f"KL {number(point.kl)} nats [{number(point.low)}, {number(point.high)}]"
    speed = load.speed(sink, recent)
    assert f"{speed.over_bf16:.2f}x BF16 ({speed.scope})" in titles[1]
    assert f"{response_bytes(load.context_tokens, KVConfig('kv4rl', sink, recent)) / 1e6:.1f} MB" in titles[2]
    (heat,) = (trace for trace in figure.data if trace.type == "heatmap")
    for context, codes in zip(heat.y, heat.z, strict=True):
        for code, (start, stop) in enumerate(regions(int(context), sink, recent)):
            shown = np.asarray(heat.x)[np.asarray(codes) == code]
            assert set(shown) == {at for at in heat.x if start <= at < stop}


def test_numbers_are_two_digits_and_a_power():
    assert [number(value) for value in (1.84e-3, 0.076, 2.4e-12)] == ["1.8e-3", "7.6e-2", "2.4e-12"]


def test_every_slider_moves_over_its_range_in_time_and_back(grid, loads):
    explorer = protection_explorer({MODEL: grid, "twin": grid}, loads, load=loads[2])
    assert (explorer.controls["sink"].value, explorer.controls["recent"].value) == PAPER
    assert explorer.controls["workload"].value == loads[2].name
    standing = explorer.figure.to_json()
    for name in ("sink", "recent", "workload"):
        control = explorer.controls[name]
        first = control.value
        for value in control.options:
            assert min(seconds(control, value, first) for _ in range(3)) < 0.2, (name, value)
            assert explorer.sentence.value == "" and (explorer.figure.to_json() != standing) == (value != first)
        control.value = first
    assert explorer.figure.to_json() == standing


def seconds(control, value, first):
    """Processor time of a move from `first` to `value`: what other processes take from this one does not count."""
    control.value = first
    began = time.process_time()
    control.value = value
    return time.process_time() - began


def test_the_picked_workload_decides_speed_bytes_and_map(grid, loads):
    pictures = [tradeoff(grid, load, *PAPER) for load in (loads[0], loads[-1])]
    contexts = [max(trace.y) for figure in pictures for trace in figure.data if trace.type == "heatmap"]
    assert contexts == [loads[0].context_tokens, loads[-1].context_tokens]
    assert isinstance(loads[0], Workload) and re.fullmatch(r"\d+ x [\d,]+", loads[0].name)
