import numpy as np

from kv4rl.viz.formats import FORMAT_NAMES, channel_magnitudes, error_against_bits, rotation_bars

ROWS = [
    {"tensor": tensor, "format": form, "rotated": rotated, "bits": bits, "error": error - 0.01 * rotated}
    for tensor in ("keys", "values")
    for form, bits, error in (("int4", 4.25, 0.12), ("int4_g32", 5.0, 0.08), ("nvfp4", 4.75, 0.09))
    for rotated in (False, True)
]


def test_heat_maps_share_one_colour_scale():
    figure = channel_magnitudes({"before": np.array([[1.0, -5.0]]), "after": np.array([[2.0, 2.0]])})
    assert [heat.zmax for heat in figure.data] == [5.0, 5.0]
    assert np.array_equal(figure.data[0].z, [[1.0], [5.0]])


def test_bars_show_every_tensor_with_and_without_rotation():
    figure = rotation_bars(ROWS)
    assert len(figure.data) == 4
    assert list(figure.data[1].x) == [FORMAT_NAMES[f] for f in ("int4", "int4_g32", "nvfp4")]
    assert list(figure.data[1].y) == [0.12 - 0.01, 0.08 - 0.01, 0.09 - 0.01]


def test_int4_groups_are_joined_in_order_of_bits():
    figure = error_against_bits([row for row in ROWS[::-1] if row["tensor"] == "keys"])
    assert list(figure.data[0].x) == [4.25, 5.0] and list(figure.data[2].x) == [4.75]
    assert "lines" in figure.data[0].mode and "lines" not in figure.data[2].mode
