"""The phase controller: who has the memory when, in an order that two collect-update cycles repeat."""

import gc
import weakref

import pytest
import torch

from kv4rl.phases import PhaseController
from kv4rl.train import Trainer, train


class Memory:
    """Stands in for the elastic memory of an engine."""

    def __init__(self, log):
        self.log, self.away = log, False

    def release(self, cache):
        self.log.append("cache away")
        self.away = True
        return 7

    def restore(self, cache):
        self.log.append("cache back")
        self.away = False


class Engine:
    cache = None

    def __init__(self, log):
        self.memory = Memory(log)


@pytest.fixture
def turns(monkeypatch, tiny_config, parity_grader):
    """(controller that takes turns on a CPU, what moved in which order, its learner)."""
    trainer = Trainer(tiny_config(), parity_grader())
    log, controller = [], PhaseController(trainer.learner, torch.device("cpu"), take_turns=True)
    controller._turns = True
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("reserve freed"))
    offloader = controller._offloader
    out, back = offloader.offload, offloader.restore
    monkeypatch.setattr(offloader, "offload", lambda movables: (log.append("learner away"), out(movables))[1])
    monkeypatch.setattr(offloader, "restore", lambda: (log.append("learner back"), back())[1])
    return controller, log, trainer.learner


def test_one_leaves_before_the_other_comes(turns):
    controller, log, _ = turns
    controller.enter("collect")
    controller.attach(Engine(log))
    for _ in range(2):
        log.clear()
        controller.enter("learn")
        controller.enter("learn")
        assert log == ["cache away", "reserve freed", "learner back"]
        log.clear()
        controller.enter("collect")
        assert log == ["learner away", "reserve freed", "cache back"]


def test_evaluation_has_neither_cache_nor_learner_beside_it(turns):
    controller, log, learner = turns
    controller.enter("collect")
    controller.attach(engine := Engine(log))
    controller.enter("learn")
    controller.enter("evaluate")
    assert engine.memory.away and not any(p.untyped_storage().nbytes() for p in learner.weights.parameters())
    controller.enter("learn")
    assert engine.memory.away and all(p.untyped_storage().nbytes() for p in learner.weights.parameters())


def test_what_an_evaluation_left_in_a_cycle_is_freed_before_the_cache_returns(turns, monkeypatch):
    """A cache and its plans name each other: on a GPU the cache of 104 GB found no room to come back."""
    controller, _, _ = turns
    left = []
    controller.enter("evaluate")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(engine() is not None))
    gc.disable()
    try:
        whole = Engine([])
        whole.myself, engine = whole, weakref.ref(whole)
        del whole
        controller.enter("collect")
    finally:
        gc.enable()
    assert left == [False]


def test_memory_that_a_dropped_engine_gave_back_is_not_counted_as_reserved(turns, monkeypatch):
    """The second arm of `bench iteration` had 206 GB reserved on a GPU of 150: the first one's cache was counted."""
    controller, log, _ = turns
    controller.enter("collect")
    controller.attach(Engine(log))
    controller.enter("learn")  # 7 bytes are given back
    controller.attach(None)
    controller._cuda = True
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 93)  # the dropped tensors are not in it
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 107)
    found = controller.metrics()
    assert found["perf/peak_memory_gb/learn"] == 93e-9 and found["perf/peak_reserved_gb/learn"] == 100e-9


def test_an_unknown_phase_is_named(turns):
    with pytest.raises(ValueError, match="phase='dream': expected one of collect, learn, evaluate"):
        turns[0].enter("dream")


def test_a_learner_that_leaves_and_returns_trains_bit_for_bit_like_one_that_stays(
    monkeypatch, parity_grader, tiny_config, tmp_path
):
    """Masters, moments and reference go to the CPU's copies and back before and after each collection."""
    stayed, returned = (Trainer(tiny_config(output_dir=str(tmp_path / name)), parity_grader()) for name in "ab")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    returned.phases._turns = True
    returned.phases.attach(Engine([]))
    returned.phases.enter("learn")
    offload, moved = returned.phases._offloader.offload, []
    monkeypatch.setattr(returned.phases._offloader, "offload", lambda movables: moved.append(offload(movables)))
    for _ in range(2):
        stayed.iterate(), returned.iterate()
    assert len(moved) == 2 and all(moved)
    one, other = stayed.learner.state(), returned.learner.state()
    assert one["weights"].keys() == other["weights"].keys()
    for name, tensor in one["weights"].items():
        assert torch.equal(tensor, other["weights"][name]), name
    for number, entry in one["optimizer"]["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, other["optimizer"]["state"][number][name]), (number, name)


def test_seconds_and_peaks_of_phases_are_logged(parity_grader, tiny_config, tmp_path):
    phased = train(tiny_config(updates=2, memory="phased", output_dir=str(tmp_path / "phased"))).metrics
    for line in phased[1:]:
        assert line["timing_s/switch"] >= 0 and line["sync/canary_difference"] >= 0
        assert line["perf/peak_memory_gb/collect"] > 0 and line["perf/peak_memory_gb/learn"] > 0


def test_memory_takes_one_of_two_names(tiny_config):
    with pytest.raises(ValueError, match="memory='swap': expected resident or phased"):
        tiny_config(memory="swap")


def test_whole_replicas_are_wanted(parity_grader, tiny_config):
    with pytest.raises(
        ValueError, match=r"tensor_parallel=2: expected a divisor of 1, .* `torchrun --nproc-per-node 2 -m"
    ):
        Trainer(tiny_config(tensor_parallel=2), parity_grader())
