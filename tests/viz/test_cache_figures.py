import numpy as np
import pytest

from kv4rl.viz.cache import byte_owners, page_fill, region_codes, region_map, ring_contents


def test_regions_are_coloured_as_attention_reads_them():
    assert region_codes([3, 8], s=2, w=3)[1].tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert region_codes([3, 8], s=2, w=3)[0].tolist()[:3] == [0, 0, 2]
    assert np.isnan(region_codes([3, 8], s=2, w=3)[0, 3:]).all()
    figure = region_map([3, 8], 2, 3)
    assert list(figure.data[0].y) == [3, 8]


def test_empty_entries_are_left_blank():
    shown = ring_contents(np.array([[0, -1], [0, 1]]), s=1).data[0].z
    assert np.isnan(shown[1, 0]) and shown[1, 1] == 1


@pytest.mark.parametrize(
    ("snapshots", "owners"),
    [([[0, 0], [5, 0], [5, 0]], [0, -1]), ([[0, 0], [5, 1], [5, 2]], [0, 1]), ([[0, 0], [0, 0]], [-1, -1])],
)
def test_a_byte_belongs_to_its_last_writer(snapshots, owners):
    assert byte_owners(np.array(snapshots, dtype=np.uint8)).tolist() == owners


def test_a_page_fills_stage_by_stage():
    snapshots = np.tril(np.ones((129, 128), dtype=np.uint8), -1)  # token t writes byte t
    figure = page_fill(snapshots, [1, 128])
    assert np.isfinite(figure.data[0].z).sum() == 1 and np.isfinite(figure.data[1].z).sum() == 128
