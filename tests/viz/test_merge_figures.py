import numpy as np

from kv4rl.viz.merge import error_by_context, merge_error, region_mass
from kv4rl.viz.style import PRECISION_COLOURS


def test_one_line_a_name():
    rows = [{"name": name, "regions": n, "error": 10.0**-n} for name in ("float64", "float32") for n in (1, 2)]
    figure = merge_error(rows)
    assert [line.name for line in figure.data] == ["float64", "float32"]
    assert list(figure.data[1].y) == [0.1, 0.01]


def test_positions_share_stands_beside_the_mass():
    figure = region_mass(np.array([[0.5, 0.25, 0.25]]), ["layer 0, head 0"], [0.1, 0.6, 0.3])
    assert [list(bar.y) for bar in figure.data] == [[0.5, 0.1], [0.25, 0.6], [0.25, 0.3]]


def test_precisions_keep_their_order_and_colours():
    figure = error_by_context([16, 32], {"kv4rl": [1e-2, 2e-2], "kv8": [1e-3, 1e-3]})
    assert [line.line.color for line in figure.data] == [PRECISION_COLOURS["kv8"], PRECISION_COLOURS["kv4rl"]]
