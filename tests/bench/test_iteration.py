"""`bench iteration` on the mini model's shape with lengths of a few tokens: whole, in parts, on two ranks."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from kv4rl.bench import iteration
from kv4rl.bench.iteration import main, scaled, speedups
from kv4rl.bench.learner_load import input_tokens, multiplied_parameters, synthetic_groups
from kv4rl.grpo.packing import pack
from kv4rl.model.decoder import Decoder
from kv4rl.model.shapes import random_model, shape_config
from kv4rl.results import read_rows
from kv4rl.rollout.fits import fit
from kv4rl.rollout.forced import shrunk
from kv4rl.rollout.partial import PartialCollector

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
SMALL = "--device cpu --shrink 400 --groups 2 --slots 8 --step-tokens 64 --workspace-tokens 256 --warmup 1".split()


def rows_of(path) -> dict[tuple[str, str], float]:
    return {(row["arm"], row["metric"]): float(row["value"]) for row in read_rows(path)}


@pytest.mark.parametrize("flags", [[], ["--simulate-warmup"]])
def test_whole_iterations_are_divided_into_their_parts(tmp_path, capsys, flags):
    out = tmp_path / "iteration.csv"
    main([*SMALL, *flags, "--out", str(out)])
    rows = rows_of(out)
    for arm in ("bf16", "kv4rl"):
        parts = [rows[arm, f"{name}_s"] for name in ("rollout", "logprob", "update", "sync", "switch")]
        assert all(part > 0 for part in parts) and sum(parts) <= rows[arm, "iteration_s"] * (1 + 1e-5)
        both = rows[arm, "old_logprob_s"] + rows[arm, "reference_logprob_s"]
        assert rows[arm, "logprob_s"] == pytest.approx(both, rel=1e-4)
        share = 6 * 2.37e6 * rows[arm, "learner_tokens_per_s"] / rows["dense_matmul", "flops_per_s"]
        assert rows[arm, "learner_share_of_dense"] == pytest.approx(share, rel=0.3)  # a mean of quotients
        assert rows[arm, "peak_memory_gb_collect"] > 0 and rows[arm, "peak_memory_gb_learn"] > 0
    quotient = rows["bf16", "iteration_s"] / rows["kv4rl", "iteration_s"]
    assert rows["kv4rl", "speedup_vs_bf16"] == pytest.approx(quotient, rel=1e-4)
    assert rows["kv4rl", "cache_pages"] > 3 * rows["bf16", "cache_pages"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["experiment"] == "iteration"


def test_a_simulated_warmup_carries_responses_into_the_measured_collection(tmp_path, monkeypatch):
    carried = []
    collect = PartialCollector.collect

    def watched(self):
        carried.append(sum(1 for group in self.state()["groups"] for r in group["requests"] if r["tokens"]))
        return collect(self)

    monkeypatch.setattr(PartialCollector, "collect", watched)
    main([*SMALL, "--simulate-warmup", "--iterations", "1", "--out", str(tmp_path / "iteration.csv")])
    real = [count for count in carried if count]
    assert len(real) >= 2  # each arm's measured collection begins with a pool


def test_learner_sync_switch_and_checkpoint_alone_collect_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("kv4rl.engine.engine.RolloutEngine.step", lambda self: 1 / 0)
    out = tmp_path / "iteration.csv"
    parts = ["--parts", "learner", "sync", "switch", "checkpoint", "--iterations", "1", "--tokens", "200"]
    main([*SMALL, *parts, "--out", str(out)])
    rows = rows_of(out)
    assert {arm for arm, _ in rows} == {"learner", "dense_matmul"}
    assert ("learner", "rollout_s") not in rows and ("learner", "speedup_vs_bf16") not in rows
    for metric in ("update_s", "sync_s", "switch_s", "checkpoint_s", "learner_tokens_per_s"):
        assert rows["learner", metric] > 0


def test_the_learner_alone_needs_no_engine_and_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kv4rl.bench.iteration.bench_engine", None)
    main([*SMALL, "--parts", "learner", "--iterations", "1", "--tokens", "200", "--out", str(tmp_path / "x.csv")])
    said = capsys.readouterr().out
    for stage in ("built", "compiled and warmed up", "update_s"):
        assert re.search(rf"\[ +\d+\.\d s\] .*{stage}", said), stage


def test_an_arm_that_is_done_keeps_its_rows_when_the_next_one_fails(tmp_path, monkeypatch):
    out, collect = tmp_path / "iteration.csv", iteration.PartialCollector.collect
    refuse = lambda self: 1 / 0 if self.engine.cache.kv.precision == "kv4rl" else collect(self)
    monkeypatch.setattr("kv4rl.bench.iteration.PartialCollector.collect", refuse)
    with pytest.raises(ZeroDivisionError):
        main([*SMALL, "--iterations", "1", "--out", str(out)])
    assert rows_of(out)["bf16", "iteration_s"] > 0


def test_a_learner_that_trains_on_a_share_is_scaled_to_all_tokens_and_marked_as_simulated(tmp_path):
    out = tmp_path / "iteration.csv"
    main([*SMALL, "--precisions", "bf16", "--iterations", "1", "--learner-share", "0.5", "--out", str(out)])
    scopes = {row["metric"]: row["scope"] for row in read_rows(out)}
    assert scopes["iteration_s"] == scopes["update_s"] == "simulated" and scopes["rollout_s"] == "measured"
    seconds = {"old_logprob_s": 1.0, "reference_logprob_s": 2.0, "logprob_s": 3.0, "update_s": 4.0}
    seconds |= {"iteration_s": 10.0, "rollout_s": 3.0}
    found = scaled(seconds, tokens=30, trained=10)
    assert found["logprob_s"] == 9 and found["update_s"] == 12 and found["rollout_s"] == 3
    assert found["iteration_s"] == 10 + 2 * 7 and found["trained_tokens"] == 30
    assert scaled(seconds, 10, 10) == seconds | {"trained_tokens": 10.0}


def test_two_ranks_share_learner_and_engine(tmp_path):
    out = tmp_path / "iteration.csv"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "kv4rl.bench.iteration", *SMALL, "--tp", "2", "--iterations", "1", "--precisions", "kv4rl"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *words, "--out", str(out)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = rows_of(out)
    assert rows["kv4rl", "iteration_s"] > 0 and rows["kv4rl", "sync_s"] > 0
    assert {row["model"] for row in read_rows(out)} == {"mini-qwen3-tp2"}


def test_speedup_is_the_quotient_of_summed_iteration_times():
    arm = lambda *seconds: {"iteration_s": list(seconds), "rollout_s": [1.0] * len(seconds)}
    assert speedups({"bf16": arm(4.0, 6.0), "kv4rl": arm(2.0, 3.0)}) == {"kv4rl": 2.0}
    assert speedups({"kv4rl": arm(1.0)}) == {} == speedups({"learner": {"rollout_s": [0.0], "iteration_s": [1.0]}})


def test_made_up_groups_have_the_lengths_of_the_workload_and_enough_tokens():
    workload = shrunk(fit("4B-300").workload(), 50)
    groups = synthetic_groups(workload, 32, 700, eos=1)
    lengths = [len(request.tokens) for request in groups[0].requests]
    assert tuple(lengths) == workload.group(0)[1] and all(score in (0.0, 1.0) for score in groups[0].scores)
    batch = pack(groups, torch.zeros(len(groups), 8))
    assert len(batch.input_ids) == input_tokens(groups)
    assert sum(request.context_tokens for group in groups for request in group.requests) >= 700


def test_the_embedding_counts_only_where_it_is_the_head():
    decoder = random_model("mini-qwen3")
    total = sum(parameter.numel() for parameter in decoder.parameters())
    assert decoder.config.tied_head and multiplied_parameters(decoder) == total
    with torch.device("meta"):
        untied = Decoder(shape_config("qwen3-8b"))
    total = sum(parameter.numel() for parameter in untied.parameters())
    assert not untied.config.tied_head
    assert multiplied_parameters(untied) == total - untied.config.vocab_size * untied.config.hidden_size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learner-share", "0"], "learner-share=0.0: expected a number > 0 and <= 1"),
        (["--tp", "2"], "tensor_parallel=2: expected a divisor of 1"),
        (["--shrink", "2"], "shrink=2.0: expected lengths within the model's 2048"),
        (["--model", "qwen9"], "model='qwen9': expected one of qwen3-4b, qwen3-8b"),
        (["--iterations", "0"], "iterations=0: expected an integer >= 1"),
        (["--parts", "learner", "--tokens", "0"], "tokens=0: expected an integer >= 1"),
        (["--warmup", "-1"], "warmup=-1: expected an integer >= 0"),
        (["--tp", "0"], "tp=0: expected an integer >= 1"),
        (["--seed", "-1"], "seed=-1: expected an integer >= 0"),
        pytest.param(
            ["--device", "cuda"], "device='cuda': expected cpu: this machine has no CUDA device", marks=no_cuda
        ),
    ],
)
def test_what_cannot_be_run_ends_with_one_sentence(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, *words])
    assert message in capsys.readouterr().err and ended.value.code == 2
