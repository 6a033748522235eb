"""Learner states that leave their storages and come back: same tensors, same bits, host memory made once."""

import pytest
import torch

from kv4rl.config import GRPOConfig
from kv4rl.grpo import offload
from kv4rl.grpo.learner import GRPOLearner
from kv4rl.grpo.offload import Movable, Offloader


@pytest.fixture
def small_slabs(monkeypatch):
    """Tensors cross the ends of slabs."""
    monkeypatch.setattr(offload, "SLAB", 64)


def test_storages_are_empty_while_away_and_come_back_bit_for_bit(small_slabs):
    tensors = {name: torch.randn(size) for name, size in (("a", 33), ("b", 3), ("c", 100))}
    view, before = tensors["a"][2:9], {name: tensor.clone() for name, tensor in tensors.items()}
    offloader = Offloader(pinned=False)
    movables = [Movable(name, tensor) for name, tensor in tensors.items()] + [Movable("view", view)]
    freed = offloader.offload(movables)
    assert freed == 4 * 136 and offloader.away
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors.values())
    assert offloader.restore() == freed and not offloader.away
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    assert torch.equal(view, before["a"][2:9])


def test_state_is_copied_each_time_frozen_once_and_derived_never(small_slabs):
    state, frozen, derived = torch.ones(9), torch.ones(9), torch.ones(9)
    movables = [Movable("s", state), Movable("f", frozen, "frozen"), Movable("d", derived, "derived")]
    offloader = Offloader(pinned=False)
    offloader.offload(movables)
    slabs = len(offloader._slabs)
    offloader.restore()
    for tensor in (state, frozen, derived):
        tensor.fill_(2)
    offloader.offload(movables)
    offloader.restore()
    assert len(offloader._slabs) == slabs
    assert (state == 2).all() and (frozen == 1).all() and derived.shape == (9,)


def test_offloading_twice_is_refused():
    offloader = Offloader(pinned=False)
    offloader.offload([Movable("a", torch.ones(2))])
    with pytest.raises(RuntimeError, match="restore first"):
        offloader.offload([])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_that_was_away_between_updates_learns_the_same(tiny_decoder, make_groups, dtype):
    config = GRPOConfig(learning_rate=1e-3, warmup_updates=0, compute_dtype=dtype)
    stayed, moved = (GRPOLearner(tiny_decoder(), config) for _ in range(2))
    offloader = Offloader(pinned=False)
    for seed in range(3):
        offloader.offload(moved.movables())
        assert all(master.untyped_storage().nbytes() == 0 for master in moved.weights.parameters())
        offloader.restore()
        moved.weights.refresh()
        groups = make_groups(seed)
        assert stayed.update(groups) == moved.update(groups)
    for name, weight in stayed.state()["weights"].items():
        assert torch.equal(weight, moved.state()["weights"][name]), name


def test_masters_moments_and_the_reference_may_leave(tiny_decoder, make_groups):
    learner = GRPOLearner(tiny_decoder(), GRPOConfig())
    learner.update(make_groups(0))
    kinds = [(movable.name.split(".")[0], movable.kind) for movable in learner.movables()]
    count = len(learner.weights.parameters())
    for expected in (("master", "state"), ("exp_avg", "state"), ("exp_avg_sq", "state"), ("reference", "frozen")):
        assert kinds.count(expected) == count
