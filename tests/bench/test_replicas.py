"""Rollout replicas over torchrun: prompts dealt out, results put together, and a rank that dies."""

import json
import os
import subprocess
import sys
import time

import pytest

from kv4rl.bench.outcome import BALANCE, Outcome, combined
from kv4rl.results import read_rows
from kv4rl.rollout.simulator import TraceSummary

ENDS_WITHIN_S = 60
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def summary(active: float) -> TraceSummary:
    return TraceSummary(active, 10 * active, 10.0, 2.0, 5.0, active / 2e-3, 3.0, 0.5, 1)


def test_rates_are_summed_states_averaged_and_the_slowest_replica_makes_an_interval():
    parts = [
        Outcome({"decode_tokens_per_s": 10.0, "cache_pages": 7.0}, [1.0, 5.0], summary(4.0), (20,)),
        Outcome({"decode_tokens_per_s": 30.0, "cache_pages": 7.0}, [2.0, 3.0], summary(6.0), (25,)),
    ]
    whole = combined(parts)
    assert whole.metrics == {"decode_tokens_per_s": 40.0, "cache_pages": 7.0, BALANCE: 1.25}
    assert (whole.seconds, whole.responses, whole.summary.active_requests) == ([2.0, 5.0], (20, 25), 5.0)
    assert combined(parts[:1]) is parts[0]


@pytest.mark.slow
def test_two_replicas_of_two_ranks_share_one_prompt_stream(tmp_path):
    """Four gloo processes, DP2 x TP2: the replicas finish as many requests within ten percent."""
    out = tmp_path / "rollout.csv"
    words = (
        "-m kv4rl.bench rollout --device cpu --tp 2 --fits 4B-300 --shrink 300 --hbm-gb 0.06 --groups 6 --siblings 4 "
        "--slots 24 --step-tokens 128 --workspace-tokens 512 --collections 4 --warmup 1 --parts schedulers "
        "--precisions bf16"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*TORCHRUN, "4", *words.split(), "--out", str(out)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("card: mini-qwen3-tp2-dp2") and sum("card" in line for line in lines) == 1
    assert json.loads(lines[-1])["file"] == str(out)
    rows = {(row["arm"], row["metric"]): float(row["value"]) for row in read_rows(out)}
    assert {row["model"] for row in read_rows(out)} == {"mini-qwen3-tp2-dp2"}
    for arm in ("sync", "partial"):
        assert 1 <= rows[arm, BALANCE] <= 1.1
    assert rows["partial_over_sync", "active_batch_ratio"] > 1


@pytest.mark.slow
def test_a_rank_that_dies_ends_all_of_them(tmp_path):
    """One of four is killed in the middle of a rollout; torchrun and every other rank end within a minute."""
    words = (
        "-m kv4rl.bench rollout --device cpu --tp 2 --fits 4B-300 --shrink 20 --hbm-gb 0.06 --groups 6 --siblings 4 "
        "--slots 24 --collections 50 --parts schedulers --precisions bf16"
    )
    run = subprocess.Popen(
        [*TORCHRUN, "4", *words.split(), "--out", str(tmp_path / "r.csv")], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert "card" in run.stdout.readline()
        workers = [int(pid) for pid in children(run.pid)]
        assert len(workers) == 4
        os.kill(workers[-1], 9)
        begin = time.monotonic()
        run.communicate(timeout=2 * ENDS_WITHIN_S)
    finally:
        run.kill()
    assert run.returncode != 0 and time.monotonic() - begin < ENDS_WITHIN_S
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]


def children(pid: int) -> list[str]:
    """Processes started by `pid`."""
    with open(f"/proc/{pid}/task/{pid}/children") as listed:
        return listed.read().split()
