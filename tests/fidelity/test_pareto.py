"""Bytes at a stated context, the speed they predict, and points from rows."""

import pytest

from kv4rl.fidelity.pareto import known_arms, points, position_bytes, predicted_speedup
from kv4rl.fidelity.representation import Representation

KV4_BYTES = 2 * (128 / 2 + 4)


def test_protection_costs_its_share_of_the_context():
    arms = known_arms()
    assert position_bytes(arms["kv4"]) == KV4_BYTES
    assert position_bytes(arms["kv4rl"], context_tokens=1440) == pytest.approx(KV4_BYTES + 0.1 * 2 * 130)
    assert position_bytes(arms["kv4rl"], context_tokens=10) == KV4_BYTES + 2 * 130


def test_fewer_bytes_predict_more_speed_up_to_what_the_linear_layers_leave():
    unquantised = position_bytes(Representation("", "", "", arithmetic="storage"))
    assert predicted_speedup(unquantised) == pytest.approx(1)
    assert 1 < predicted_speedup(2 * 130) < predicted_speedup(KV4_BYTES) < predicted_speedup(0)


def test_rows_become_points_newest_last_and_unknown_arms_are_left_out():
    row = {"arm": "kv4", "metric": "sampler_kl", "value": "0.1", "low": "0.05", "high": "0.2"}
    (point,) = points([row, row | {"arm": "fp3"}, row | {"value": "0.15"}])
    assert (point.arm, point.kl, point.low, point.position_bytes) == ("kv4", 0.15, 0.05, KV4_BYTES)
    assert points([row | {"arm": "int4-k"}]) == []  # storage arithmetic is another experiment
    assert [p.arm for p in points([row | {"arm": "kv4rl"}, row | {"arm": "kv4rl-s16-w128"}])] == ["kv4rl"]
    with pytest.raises(ValueError, match="metric='bits_per_element'"):
        points([row | {"metric": "bits_per_element"}])
