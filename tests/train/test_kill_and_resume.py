"""SIGKILL at random moments of a whole run in its own process; then it must end as if nothing had happened."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kv4rl.checkpoint import list_checkpoints, load_checkpoint
from kv4rl.metrics import read_metrics, without_wall_clock
from kv4rl.presets import parse_config

# Grading at no cost, and every other part as the command line has it.
DRIVER = """
import sys
import torch
torch.set_num_threads(1)
import kv4rl.train
from kv4rl.rewards.grader import Verdict

class Parity:
    def __init__(self): self.done = {}
    def __enter__(self): return self
    def __exit__(self, *exc): pass
    def submit(self, key, text, gold): self.done[key] = Verdict(float(text.count("7") % 2 == 0), 0.0, False)
    def results(self, wait=True):
        done, self.done = self.done, {}
        return done
    def grade_many(self, items):
        for index, item in enumerate(items): self.submit(index, *item)
        return list(self.results().values())

kv4rl.train.Grader = Parity
kv4rl.train.main(sys.argv[1:])
"""


def command(model: str, output_dir: Path) -> list[str]:
    flags = {
        "--preset": "smoke", "--model": model, "--output_dir": output_dir, "--updates": 12, "--device": "cpu",
        "--rollout.max_response_tokens": 40, "--rollout.age_limit": 2, "--rollout.cache_pages": 48,
        "--rollout.max_active_requests": 12, "--evaluate_prompts": 2, "--checkpoint_every": 2,
        "--grpo.learning_rate": 1e-3, "--kv.sink_tokens": 2, "--kv.recent_tokens": 4,
    }  # fmt: skip
    return [sys.executable, "-c", DRIVER, *(str(part) for flag in flags.items() for part in flag)]


def killed(process: subprocess.Popen, output_dir: Path, lines: int, delay_s: float) -> bool:
    """SIGKILL `delay_s` after metrics.jsonl has `lines` lines more; False if the run ended before."""
    wanted = len(read_metrics(output_dir)) + lines
    while len(read_metrics(output_dir)) < wanted:
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_at_random_moments_ends_like_one_that_was_not(tiny_model, tmp_path):
    """Bug rows 18 and 19: counters that restart, a cursor ahead of what was trained, lost in-flight prompts."""
    rng = random.Random(7)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(command(tiny_model, whole), check=True, capture_output=True)
    kills = 0
    for _ in range(5):
        process = subprocess.Popen(command(tiny_model, broken), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        kills += killed(process, broken, lines=rng.randint(1, 4), delay_s=rng.uniform(0, 0.3))
    subprocess.run(command(tiny_model, broken), check=True, capture_output=True)
    assert kills >= 1
    lines = [[without_wall_clock(line) for line in read_metrics(run)] for run in (whole, broken)]
    assert lines[0] == lines[1]
    first, second = (newest(run, tiny_model) for run in (whole, broken))
    assert first.update == second.update == 12 and first.run == second.run
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, second.weights[name]), name


def newest(run: Path, model: str):
    config = parse_config(command(model, run)[3:])
    return load_checkpoint(list_checkpoints(run / "checkpoints")[-1], config)
