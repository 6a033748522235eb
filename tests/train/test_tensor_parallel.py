"""A run whose one rollout engine is split over two processes, beside the run of one process."""

import subprocess
import sys

import pytest
import torch

from kv4rl.metrics import read_metrics
from kv4rl.model.weights import load_decoder

FLAGS = (
    "--preset smoke --device cpu --memory phased --updates 2 --rollout.max_response_tokens 48 --evaluate_prompts 1 "
    "--rollout.responses_per_group 4 --reading verl --grpo.learning_rate 1e-3 --evaluate_samples 2"
).split()


def run(folder, *words, flags=()) -> list[dict]:
    command = [sys.executable, *words, *FLAGS, "--output_dir", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return read_metrics(folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_halves_of_an_engine_train_like_a_whole_one_which_can_go_on_from_them(tmp_path):
    """Bug row 22: ranks of one replica that sample apart. The noise is keyed, so tokens differ by rounding alone."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "kv4rl.train")
    halves = run(tmp_path / "halves", *torchrun, flags=("--tensor_parallel", "2"))
    whole = run(tmp_path / "whole", "-m", "kv4rl.train")
    for one, other in zip(halves, whole, strict=True):
        for name in ("critic/score/mean", "response_length/mean", "val/avg_at_k", "perf/total_num_tokens"):
            assert one.get(name) == other.get(name), name
    for name in ("actor/entropy", "actor/kl_loss", "rollout_corr/kl"):
        assert halves[-1][name] == pytest.approx(whole[-1][name], rel=0.05, abs=1e-4), name
    before = load_decoder("mini-qwen3").head_weight
    steps = [load_decoder(tmp_path / name / "model").head_weight - before for name in ("halves", "whole")]
    assert steps[0].shape == steps[1].shape and torch.linalg.vector_norm(steps[0]) > 0
    assert torch.linalg.vector_norm(steps[0] - steps[1]) <= 0.2 * torch.linalg.vector_norm(steps[1])
    more = run(tmp_path / "halves", "-m", "kv4rl.train", flags=("--updates", "3"))  # one rank, one replica too
    assert more[:3] == halves and more[3]["update"] == 3
