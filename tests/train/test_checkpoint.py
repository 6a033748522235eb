import resource
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kv4rl.checkpoint as module
from kv4rl.checkpoint import (
    BackgroundSave,
    Checkpoint,
    fingerprint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from kv4rl.checkpoint_digests import file_digest, write_digests
from kv4rl.config import InputError, KVConfig, TrainConfig
from kv4rl.trainer import Trainer

CONFIG = TrainConfig()


def checkpoint(update: int, elements: int = 8) -> Checkpoint:
    weights = {"model.weight": torch.full((elements,), float(update)), "model.bias": torch.tensor([0.5])}
    parameter = torch.nn.Parameter(torch.zeros(elements))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.full((elements,), float(update))
    optimizer.step()
    tokens = list(range(update, update + 40))
    run = {"collector": {"groups": [{"tokens": tokens, "logps": [-token / 3 for token in tokens], "ages": [1, None]}]}}
    return Checkpoint(update, module.settings(CONFIG), weights, optimizer.state_dict(), run)


def assert_loads(path, update: int) -> None:
    read, wanted = load_checkpoint(path, CONFIG), checkpoint(update)
    assert read.update == update and read.run == wanted.run and read.config == wanted.config
    assert all(torch.equal(read.weights[name], tensor) for name, tensor in wanted.weights.items())
    for name, moment in wanted.optimizer["state"][0].items():
        assert torch.equal(read.optimizer["state"][0][name], moment)


def test_everything_comes_back(tmp_path):
    path = save_checkpoint(tmp_path, checkpoint(7), keep=2)
    assert path.name == "update_000007"
    assert sorted(file.name for file in path.iterdir()) == [
        "digests.json", "model.safetensors", "optimizer.pt", "pool.safetensors", "state.json",
    ]  # fmt: skip
    assert_loads(path, 7)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)
numbers = st.lists(st.integers(-(2**62), 2**62), min_size=15, max_size=18) | st.lists(
    st.floats(allow_nan=False), min_size=15, max_size=18
)


@settings(deadline=None, max_examples=40)
@given(run=st.dictionaries(st.text(max_size=4), plain | numbers | st.lists(numbers, max_size=2), max_size=4))
def test_any_plain_state_comes_back_exactly(tmp_path_factory, run):
    directory = tmp_path_factory.mktemp("checkpoints")
    path = save_checkpoint(directory, replace(checkpoint(1), run=run), keep=1)
    assert repr(load_checkpoint(path, CONFIG).run) == repr(run)  # repr: -0.0, 1 and True differ


def test_only_the_newest_are_kept(tmp_path):
    for update in range(1, 6):
        save_checkpoint(tmp_path, checkpoint(update), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["update_000004", "update_000005"]
    assert_loads(list_checkpoints(tmp_path)[0], 4)


class Killed(BaseException):
    """What SIGKILL looks like from inside: nothing after it runs, no handler either."""


STEPS = ("os.replace", "os.fsync", "shutil.rmtree", "save_file", "torch.save", "json.dumps")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_before_or_after_any_step_leaves_whole_checkpoints(tmp_path, monkeypatch, step, after):
    """At every call of every operation that touches the disk; then the run goes on and saves again."""
    owner, _, name = f"kv4rl.checkpoint.{step}".rpartition(".")
    save_checkpoint(tmp_path, checkpoint(1), keep=2)
    save_checkpoint(tmp_path, checkpoint(2), keep=2)
    kills = 0
    for update in range(3, 30):
        with monkeypatch.context() as patch:
            real, calls = getattr(_resolve(owner), name), [0]

            def dying(*args, real=real, calls=calls, fatal=update - 3, **kwargs):
                calls[0] += 1
                if calls[0] - 1 == fatal and not after:
                    raise Killed
                result = real(*args, **kwargs)
                if calls[0] - 1 == fatal:
                    raise Killed
                return result

            patch.setattr(_resolve(owner), name, dying)
            try:
                save_checkpoint(tmp_path, checkpoint(update), keep=2)
            except Killed:
                kills += 1
        whole = list_checkpoints(tmp_path)
        assert len(whole) >= 2
        for path in whole[-2:]:
            assert_loads(path, int(path.name.removeprefix("update_")))
    assert kills >= 1
    save_checkpoint(tmp_path, checkpoint(99), keep=2)
    assert len(list(tmp_path.iterdir())) == 2  # nothing of the kills is left behind


def _resolve(owner: str):
    names = owner.split(".")[2:]
    return getattr(module, names[0]) if names else module


@pytest.mark.parametrize("limit", [0, 100, 600, 3000])
def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path, limit):
    """The limit on file size makes real writes fail, in safetensors, in torch and in plain files."""
    save_checkpoint(tmp_path, checkpoint(1, 4000), keep=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match=r"update_000002 could not be written .*still whole: update_000001"):
            save_checkpoint(tmp_path, checkpoint(2, 4000), keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["update_000001"]
    load_checkpoint(tmp_path / "update_000001", CONFIG)
    save_checkpoint(tmp_path, checkpoint(2, 4000), keep=2)


def test_a_changed_field_is_named_with_both_values(tmp_path):
    path = save_checkpoint(tmp_path, checkpoint(1), keep=1)
    with pytest.raises(ValueError, match=r"kv\.precision: 'kv4rl' in the checkpoint, 'bf16' now"):
        load_checkpoint(path, replace(CONFIG, kv=KVConfig(precision="bf16")))
    load_checkpoint(path, replace(CONFIG, updates=999, output_dir="elsewhere", keep_checkpoints=9))


def test_fingerprint_names_what_decides_the_run():
    names = {
        fingerprint(module.settings(config)) for config in (CONFIG, replace(CONFIG, seed=1), replace(CONFIG, updates=5))
    }
    assert len(names) == 2


def test_weights_only_loading_refuses_code(tmp_path):
    class Payload:
        def __reduce__(self):
            return (print, ("ran",))

    path = save_checkpoint(tmp_path, checkpoint(1), keep=1)
    torch.save({"state": Payload()}, path / "optimizer.pt")
    (path / "digests.json").unlink()
    write_digests(path)
    with pytest.raises(Exception, match="weights_only"):
        load_checkpoint(path, CONFIG)


@pytest.mark.parametrize(
    "name", ["digests.json", "model.safetensors", "optimizer.pt", "pool.safetensors", "state.json"]
)
@pytest.mark.parametrize("place", [0.1, 0.5, 0.97])
def test_a_flipped_bit_anywhere_is_refused(tmp_path, name, place):
    """Damage that still parses: a weight, a token or a counter of another value."""
    file = save_checkpoint(tmp_path, checkpoint(1, 4000), keep=1) / name
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError):
        load_checkpoint(file.parent, CONFIG)


@pytest.mark.parametrize("state", ["[1]", "{}", "3", "[[1, 2]]", '{"format": 3}', '{"format": 3, "config": 7}'])
def test_a_state_of_another_kind_is_refused(tmp_path, state):
    path = save_checkpoint(tmp_path, checkpoint(1), keep=1)
    (path / "state.json").write_text(state)
    with pytest.raises(InputError, match="update_000001"):
        load_checkpoint(path, CONFIG)


def test_a_digest_covers_every_block_in_its_order(tmp_path, monkeypatch):
    monkeypatch.setattr("kv4rl.checkpoint_digests.BLOCK", 4)
    digests = set()
    for content in (b"aaaabbbbc", b"bbbbaaaac", b"aaaabbbbd", b"aaaabbbb", b""):
        (tmp_path / "file").write_bytes(content)
        digests.add(file_digest(tmp_path / "file"))
    assert len(digests) == 5


def test_a_save_in_the_background_is_whole_when_finished_and_waits_for_the_one_before(tmp_path):
    saver = BackgroundSave()
    assert saver.finish() is None
    for update in (1, 2):
        saver.start(tmp_path, checkpoint(update), keep=2)
    assert saver.finish().name == "update_000002" == saver.finish().name
    assert_loads(list_checkpoints(tmp_path)[0], 1)
    with BackgroundSave() as other:
        other.start(tmp_path, checkpoint(3), keep=2)
    assert_loads(list_checkpoints(tmp_path)[-1], 3)


def test_a_failure_in_the_background_is_raised_once_by_whoever_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "save_file", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left")))
    saver = BackgroundSave()
    saver.start(tmp_path, checkpoint(1), keep=2)
    with pytest.raises(module.CheckpointNotWritten, match="No space left"):
        saver.start(tmp_path, checkpoint(2), keep=2)
    assert saver.finish() is None
    with pytest.raises(module.CheckpointNotWritten), BackgroundSave() as other:
        other.start(tmp_path, checkpoint(3), keep=2)
    with pytest.raises(ZeroDivisionError), BackgroundSave() as third:
        third.start(tmp_path, checkpoint(3), keep=2)
        raise ZeroDivisionError


def test_a_checkpoint_does_not_change_while_the_run_goes_on(tiny_config, parity_grader):
    """It is written from copies: training on during the write leaves no later weight or moment in it."""
    trainer = Trainer(tiny_config(), parity_grader())
    trainer.iterate()
    wanted, kept = trainer.learner.state(), {}
    trainer.saver.start = lambda directory, checkpoint, keep: kept.update(given=checkpoint)
    trainer.start_save()
    trainer.iterate()
    for name, tensor in wanted["weights"].items():
        assert torch.equal(kept["given"].weights[name], tensor), name
    for number, entry in wanted["optimizer"]["state"].items():
        for name, value in entry.items():
            assert torch.equal(kept["given"].optimizer["state"][number][name], value)
