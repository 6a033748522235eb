from kv4rl.fidelity.pareto import Point, front
from kv4rl.paper import PUBLISHED
from kv4rl.viz.fidelity import arm_dots, pareto, short_name, width_sweeps, widths
from kv4rl.viz.style import ACCENT, PRECISION_COLOURS


def row(arm, value, model="m", shape="4b"):
    labels = {"arm": arm, "model": model, "shape": shape, "metric": "sampler_kl", "n": "256"}
    return labels | {"value": str(value), "low": str(value / 2), "high": str(value * 4)}


def test_bars_keep_the_rows_order_and_colour_only_precisions():
    figure = arm_dots([row("kv4", 0.1), row("kv4-random144", 0.05)])
    assert list(figure.data[0].y) == ["KV4", "kv4-random144"]
    assert list(figure.data[0].marker.color) == [PRECISION_COLOURS["kv4"], ACCENT]
    assert list(figure.data[0].error_x.arrayminus) == [0.05, 0.025]
    assert figure.layout.xaxis.type == "log" and figure.layout.yaxis.autorange == "reversed"


def test_panels_stand_below_and_models_beside_one_another_with_their_states():
    places = [("a", "m"), ("a", "n"), ("b", "m"), ("b", "n")]
    figure = arm_dots([row("kv4", 0.1, model, shape) for shape, model in places] + [row("kv4", 0.3, "m", "a")])
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert titles == [f"{shape}: {model}, 256 states" for shape, model in places]
    assert figure.data[0].x[0] == 0.3  # the last row of an arm


def test_widths_are_read_from_the_arms_name():
    assert widths("kv4rl") == (16, 128) and widths("kv4rl-s0-w512") == (0, 512)
    assert widths("kv4") is None and widths("kv4rl-bf16") is None


def test_sweeps_join_their_widths_in_numerical_order():
    arms = {"kv4": 1.0, "kv4rl-s16-w64": 0.3, "kv4rl": 0.2, "kv4rl-s16-w512": 0.1, "kv4rl-s4-w128": 0.4}
    figure = width_sweeps([row(arm, value) for arm, value in arms.items()])
    recent, level, sink, _ = figure.data
    assert list(level.y) == [1.0, 1.0] and level.name == "KV4"
    assert list(recent.x) == ["64", "128", "512"] and list(recent.y) == [0.3, 0.2, 0.1]
    assert list(sink.x) == ["4", "16"] and list(sink.y) == [0.4, 0.2]


def test_the_papers_ratio_is_a_hollow_marker_below_our_kv4():
    published = PUBLISHED["fidelity/4b/kl_reduction_16_128"]
    figure = width_sweeps([row("kv4", 0.7), row("kv4rl", 0.2)], published=published)
    recent, sink = (trace for trace in figure.data if trace.marker.symbol == "circle-open")
    assert (recent.x[0], sink.x[0]) == ("128", "16") and abs(recent.y[0] - 0.1) < 1e-12
    assert "7x" in recent.name and "Fig. 4b" in recent.name


def test_short_names_are_widths():
    assert [short_name(arm) for arm in ("kv4rl", "kv4rl-s1-w64", "kv4-k5", "kv8")] == [
        "16/128",
        "1/64",
        "kv4-k5",
        "KV8",
    ]


POINTS = [Point("a", 0.1, 0, 1, 100, 2), Point("b", 0.2, 0, 1, 110, 1.9), Point("c", 0.05, 0, 1, 120, 1.8)]


def test_the_front_is_what_no_other_beats_in_both():
    assert [point.arm for point in front(POINTS)] == ["a", "c"]
    assert front([]) == []


def test_pareto_joins_the_front_and_greys_the_rest():
    beaten, best = pareto(POINTS).data
    assert [names for _, names in beaten.customdata] == ["b"] and list(best.text) == ["a", "c"] and "lines" in best.mode


def test_of_names_that_would_overlap_the_papers_widths_stay():
    crowd = [Point("kv4rl-s1-w128", 0.11, 0, 1, 100, 2), Point("kv4rl", 0.1, 0, 1, 101, 2), POINTS[2]]
    assert list(pareto(crowd).data[1].text) == ["", "16/128", "c"]
