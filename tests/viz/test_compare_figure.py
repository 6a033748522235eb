"""The picture of ours over the paper's: one dot an answered comparison, at the ratio, with the row's interval."""

import pytest

from kv4rl.compare import Comparison
from kv4rl.paper import PUBLISHED
from kv4rl.viz.compare import over_paper


def test_dots_stand_at_the_ratio_with_the_rows_interval():
    key = "trace/4b-300/active_batch_ratio"
    item = Comparison(key, "active batch", "rollout.csv", {}, "")
    rows = [
        {"value": "7.7", "low": "7.4", "high": "8.1", "scope": "simulated"},
        {"value": "8.27", "low": "", "high": "", "scope": "measured"},
    ]
    measured, simulated = over_paper([(item, PUBLISHED[key], row) for row in rows]).data
    assert measured.x[0] == pytest.approx(1) and measured.error_x.array[0] == 0
    assert simulated.x[0] == pytest.approx(7.7 / 8.27)
    assert simulated.x[0] + simulated.error_x.array[0] == pytest.approx(8.1 / 8.27)
    assert simulated.x[0] - simulated.error_x.arrayminus[0] == pytest.approx(7.4 / 8.27)
    assert "§4.1" in simulated.y[0]
