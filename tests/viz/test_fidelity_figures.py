from kv4rl.fidelity.pareto import Point, front
from kv4rl.viz.fidelity import arm_bars, pareto, width_sweeps, widths
from kv4rl.viz.style import ACCENT, PRECISION_COLOURS


def row(arm, value):
    return {"arm": arm, "metric": "sampler_kl", "value": str(value), "low": str(value / 2), "high": str(value * 4)}


def test_bars_keep_the_rows_order_and_colour_only_precisions():
    figure = arm_bars([row("kv4", 0.1), row("kv4-random144", 0.05)])
    assert list(figure.data[0].x) == ["KV4", "kv4-random144"]
    assert list(figure.data[0].marker.color) == [PRECISION_COLOURS["kv4"], ACCENT]
    assert list(figure.data[0].error_y.arrayminus) == [0.05, 0.025]
    assert figure.layout.yaxis.type == "log"


def test_widths_are_read_from_the_arms_name():
    assert widths("kv4rl") == (16, 128) and widths("kv4rl-s0-w512") == (0, 512)
    assert widths("kv4") is None and widths("kv4rl-bf16") is None


def test_sweeps_join_their_widths_in_numerical_order():
    arms = {"kv4": 1.0, "kv4rl-s16-w64": 0.3, "kv4rl": 0.2, "kv4rl-s16-w512": 0.1, "kv4rl-s4-w128": 0.4}
    figure = width_sweeps([row(arm, value) for arm, value in arms.items()])
    recent, sink = figure.data
    assert list(recent.x) == ["64", "128", "512"] and list(recent.y) == [0.3, 0.2, 0.1]
    assert list(sink.x) == ["4", "16"] and list(sink.y) == [0.4, 0.2]


POINTS = [Point("a", 0.1, 0, 1, 100, 2), Point("b", 0.2, 0, 1, 110, 1.9), Point("c", 0.05, 0, 1, 120, 1.8)]


def test_the_front_is_what_no_other_beats_in_both():
    assert [point.arm for point in front(POINTS)] == ["a", "c"]
    assert front([]) == []


def test_pareto_joins_the_front_and_greys_the_rest():
    beaten, best = pareto(POINTS).data
    assert list(beaten.text) == ["b"] and list(best.text) == ["a", "c"] and "lines" in best.mode
