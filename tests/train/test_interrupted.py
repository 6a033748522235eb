"""Whatever interrupts a run between two updates, the run goes on as if nothing had happened, or says what to do."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch

import kv4rl.checkpoint as checkpoint_module
from kv4rl.checkpoint import CheckpointNotWritten, list_checkpoints, load_checkpoint, only_run
from kv4rl.config import InputError
from kv4rl.metrics import read_metrics, without_wall_clock
from kv4rl.rewards.grader import Grader
from kv4rl.train import main, train


def checkpoints(config):
    return list_checkpoints(f"{config.output_dir}/checkpoints")


def assert_same_end(a, b):
    first, second = (load_checkpoint(checkpoints(config)[-1], config) for config in (a, b))
    assert first.run == second.run
    assert all(torch.equal(tensor, second.weights[name]) for name, tensor in first.weights.items())
    lines = [[without_wall_clock(line) for line in read_metrics(config.output_dir)] for config in (a, b)]
    assert lines[0] == lines[1]


@pytest.fixture
def whole(parity_grader, tiny_config, tmp_path):
    """The configuration of a run of four updates that nothing disturbed."""
    config = tiny_config(output_dir=str(tmp_path / "whole"))
    train(config)
    return config


def test_a_disk_that_fills_up_at_a_checkpoint_costs_one_update(whole, tmp_path, monkeypatch):
    config = replace(whole, output_dir=str(tmp_path / "full"))
    real, saves = checkpoint_module.save_file, []

    def full(*arguments, **more):
        saves.append(arguments)
        if len(saves) == 5:  # two files a checkpoint: half of the third
            raise OSError(28, "No space left on device")
        return real(*arguments, **more)

    monkeypatch.setattr(checkpoint_module, "save_file", full)
    with pytest.raises(CheckpointNotWritten, match=r"No space left.*still whole: update_000001, update_000002"):
        train(config)
    assert train(config).updates == 4
    assert_same_end(whole, config)


def full(*arguments, **more):
    raise OSError(28, "No space left on device")


def smoke(model, folder) -> list[str]:
    """The words of a run of a second."""
    words = f"--preset smoke --model {model} --output_dir {folder / 'run'} --evaluate_prompts 1"
    limits = "--rollout.max_response_tokens 40 --rollout.cache_pages 64 --kv.sink_tokens 2 --kv.recent_tokens 4"
    return [*words.split(), *limits.split()]


def test_the_command_says_so_in_one_sentence(parity_grader, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint_module, "save_file", full)
    with pytest.raises(SystemExit, match="1"):
        main(smoke(tiny_model, tmp_path))
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("kv4rl.train: error: checkpoint ") and last.endswith("still whole: none")


@pytest.mark.parametrize(
    ("writer", "file"),
    [
        ("kv4rl.metrics._encode", "metrics.jsonl"),
        ("kv4rl.rollout.trace.Trace.to_csv", "000001.csv"),
        ("torch.utils.tensorboard.SummaryWriter.add_scalar", "tensorboard"),
        ("kv4rl.trainer.save_decoder", "model"),
    ],
)
def test_whatever_cannot_be_written_ends_the_command_with_one_sentence_that_names_it(
    parity_grader, tiny_model, tmp_path, monkeypatch, capsys, writer, file
):
    monkeypatch.setattr(writer, full)
    with pytest.raises(SystemExit, match="1"):
        main(smoke(tiny_model, tmp_path))
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{file} could not be written ([Errno 28] No space left on device)" in last


def damage_json(path):
    (path / "state.json").write_text((path / "state.json").read_text()[:-100])


def damage_weights(path):
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-9])


def damage_a_weight(path):
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-9] ^= 64
    (path / "model.safetensors").write_bytes(content)


def lose_a_group_s_order(path):
    state = json.loads((path / "state.json").read_text())
    del state["run"]["collectors"][0]["groups"][0]["order"]
    (path / "state.json").write_text(json.dumps(state))


def damage_optimizer(path):
    (path / "optimizer.pt").write_bytes((path / "optimizer.pt").read_bytes()[:99])


def lose_pool(path):
    (path / "pool.safetensors").unlink()


def test_a_damaged_checkpoint_is_named_and_without_it_the_run_goes_on(whole, tmp_path):
    config = replace(whole, output_dir=str(tmp_path / "damaged"))
    message = r"update_000004': expected whole files .*remove it to resume from update_000003"
    for damage in (damage_json, damage_weights, damage_a_weight, damage_optimizer, lose_pool, lose_a_group_s_order):
        shutil.copytree(whole.output_dir, config.output_dir, dirs_exist_ok=True)
        damage(checkpoints(config)[-1])
        with pytest.raises(InputError, match=message):
            train(config)
    shutil.rmtree(checkpoints(config)[-1])
    train(config)
    assert_same_end(whole, config)


def test_a_checkpoint_of_another_version_is_refused(whole):
    state = checkpoints(whole)[-1] / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 1}))
    with pytest.raises(InputError, match=r"format of .*update_000004=1: expected 3, this version's"):
        train(whole)


def test_a_finished_run_that_is_asked_for_less_stays_as_it_is(whole):
    said = []
    assert train(replace(whole, updates=2), said.append).updates == 4
    assert "resuming after update 4" in said[0] and "early" not in said[1]


def test_other_things_in_the_folder_are_left_alone(whole):
    folder = checkpoints(whole)[0].parent
    (folder / "update_backup").mkdir()
    (folder / "update_000009").write_text("not a folder")
    assert [path.name for path in checkpoints(whole)] == ["update_000003", "update_000004"]
    train(whole)
    assert (folder / "update_backup").exists()


def test_checkpoints_are_ordered_by_number_not_by_name(tmp_path):
    for name in ("update_1000000", "update_999999"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["update_999999", "update_1000000"]


def test_a_second_process_stays_out_of_a_run_and_the_first_goes_on(whole):
    with (
        only_run(whole.output_dir),
        pytest.raises(InputError, match=r"output_dir='.*whole': expected a folder that no"),
    ):
        train(whole)
    train(whole)


class DyingGrader(Grader):
    """Loses its workers to SIGKILL before the first responses come, as under the kernel's memory killer."""

    def submit(self, key, response_text, gold):
        for process in list(self._pool.processes) if not self.counters.graded else ():
            os.kill(process.pid, signal.SIGKILL)
        super().submit(key, response_text, gold)


def test_reward_workers_that_die_do_not_end_a_run(tiny_config, monkeypatch):
    monkeypatch.setattr("kv4rl.train.Grader", DyingGrader)
    result = train(tiny_config(updates=1, evaluate_prompts=1, evaluate_samples=1))
    assert result.updates == 1 and 0 <= result.metrics[-1]["critic/score/mean"] <= 1


def test_an_interrupted_run_says_how_it_goes_on(tmp_path, monkeypatch, capsys):
    def interrupted(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("kv4rl.train.train", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["--preset", "smoke", "--output_dir", str(tmp_path)])
    assert ended.value.code == 130
    assert capsys.readouterr().err == (
        "kv4rl.train: interrupted; the same command goes on from the newest checkpoint\n"
    )
