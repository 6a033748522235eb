"""Learner states that leave their storages and come back: same tensors, same bits, host memory made once."""

import gc

import pytest
import torch

from kv4rl.config import GRPOConfig
from kv4rl.grpo import host_memory
from kv4rl.grpo.host_memory import HostMemory
from kv4rl.grpo.learner import GRPOLearner
from kv4rl.grpo.offload import Movable, Offloader


@pytest.fixture
def small_slabs(monkeypatch):
    """Several slabs are needed."""
    monkeypatch.setattr(host_memory, "SLAB", 256)


class Runtime:
    """Stands in for the CUDA runtime: what is page-locked, by address."""

    def __init__(self, error=0):
        self.locked, self.error = {}, error

    def cudaHostRegister(self, address, size, flags):
        self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address):
        del self.locked[address]


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return runtime


def test_slabs_are_page_locked_until_their_owner_is_gone(small_slabs, runtime):
    host = HostMemory(pinned=True)
    copies = [host.copy(str(i), torch.full((50,), float(i))) for i in range(9)]
    assert len(runtime.locked) > 1 and sum(runtime.locked.values()) == host.nbytes
    assert all((copy == i).all() for i, copy in enumerate(copies))
    del host
    gc.collect()
    assert not runtime.locked and all((copy == i).all() for i, copy in enumerate(copies))


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
    allocated = offloader._host.nbytes
    offloader.restore()
    for tensor in (state, frozen, derived):
        tensor.fill_(2)
    offloader.offload(movables)
    offloader.restore()
    assert offloader._host.nbytes == allocated
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


def test_names_share_slabs_and_keep_their_memory(small_slabs):
    host = HostMemory(pinned=False)
    tensors = {str(i): torch.randn(size) for i, size in enumerate((5, 1, 30, 7, 200, 3))}
    copies = {name: host.copy(name, tensor) for name, tensor in tensors.items()}
    assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())
    assert sum(tensor.nbytes for tensor in tensors.values()) <= host.nbytes <= 4096
    again, total = host.copy("2", torch.zeros(30)), host.nbytes
    assert again.data_ptr() == copies["2"].data_ptr() and not copies["2"].any() and host.nbytes == total
    assert host.copy("2", torch.ones(31)).data_ptr() != again.data_ptr()
