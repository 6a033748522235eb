"""`bench rollout` on the shipped model's shape with lengths of a few tokens: every arm, row and refusal."""

import json

import pytest
import torch

from kv4rl.bench.__main__ import main
from kv4rl.bench.carried import simulated_state
from kv4rl.bench.outcome import Outcome, gains
from kv4rl.bench.rollout import COLLECTORS, EOS, make_setting, parse, run
from kv4rl.cache.memory_plan import page_bytes
from kv4rl.config import KVConfig, RolloutConfig
from kv4rl.model.shapes import random_model
from kv4rl.ranks import Ranks
from kv4rl.results import read_rows
from kv4rl.rollout.fits import fit
from kv4rl.rollout.forced import shrunk

SMALL = (
    "rollout --device cpu --fits 4B-300 --shrink 400 --hbm-gb 0.06 --groups 2 --siblings 2 --slots 8 --step-tokens 64 "
    "--workspace-tokens 512 --collections 2 --warmup 1"
).split()


def test_rollout_writes_both_comparisons_and_splits_the_gain(tmp_path, capsys):
    out = tmp_path / "rollout.csv"
    main([*SMALL, "--precisions", "bf16", "kv4", "--out", str(out)])
    rows = {(row["arm"], row["metric"]): row for row in read_rows(out)}
    assert {row["shape"] for row in rows.values()} == {"4B-300/400"}
    assert {row["scope"] for row in rows.values()} == {"measured"}
    for arm in ("sync", "partial", "bf16", "kv4"):
        for metric in ("collection_s", "active_requests", "resident_kv_bytes", "decode_step_ms", "decode_tokens_per_s"):
            assert float(rows[arm, metric]["value"]) > 0
    assert float(rows["partial_over_sync", "active_batch_ratio"]["value"]) > 1
    assert int(float(rows["kv4", "cache_pages"]["value"])) > 3 * int(float(rows["bf16", "cache_pages"]["value"]))
    assert rows["kv4", "cache_pages_at_bf16_pages"]["value"] == rows["bf16", "cache_pages"]["value"]
    both, execution, capacity = (
        float(rows["kv4", f"speedup_{name}"]["value"]) for name in ("vs_bf16", "at_bf16_pages", "of_capacity")
    )
    assert both == pytest.approx(execution * capacity, rel=1e-4)
    curves = read_rows(tmp_path / "rollout_trace.csv", metric="active_requests")
    assert {row["arm"] for row in curves} == {"sync", "partial"}
    assert {row["shape"].split("/")[2] for row in curves} == {"1", "2"}, "the measured intervals alone"
    ours = [row for row in curves if row["arm"] == "partial"]
    mean = sum(float(row["value"]) * int(row["n"]) for row in ours) / sum(int(row["n"]) for row in ours)
    assert mean == pytest.approx(float(rows["partial", "active_requests"]["value"]), rel=1e-4)
    printed = capsys.readouterr().out
    assert "random weights" in printed and "pages" in printed
    said = json.loads(printed.splitlines()[-1])["gains"]["4B-300/400"]["kv4"]["speedup_vs_bf16"]
    assert said == pytest.approx(both, rel=1e-4)  # rows keep six digits


def test_a_pinned_pool_gives_the_others_what_its_bytes_buy(tmp_path, capsys):
    out = tmp_path / "rollout.csv"
    words = ["--parts", "precisions", "--precisions", "bf16", "kv4", "--pages", "own", "--bf16-pages", "40"]
    main([*SMALL, *words, "--out", str(out)])
    pages = {row["arm"]: float(row["value"]) for row in read_rows(out, metric="cache_pages")}
    bytes_of = {name: page_bytes(KVConfig(name), random_model("mini-qwen3").cache_shape()) for name in pages}
    assert pages["bf16"] == 40
    assert 40 * bytes_of["bf16"] <= (pages["kv4"] + 1) * bytes_of["kv4"] <= 41 * bytes_of["bf16"] + bytes_of["kv4"]
    assert {row["shape"] for row in read_rows(out)} == {"4B-300/400, 40 BF16 pages"}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["gains"]["4B-300/400, 40 BF16 pages"]


def test_a_pool_too_small_for_an_arm_that_is_not_run_stops_nobody(tmp_path):
    """BF16's 2 pages do not hold the longest response; those that the budget buys KV4 do."""
    words = ["--parts", "precisions", "--precisions", "kv4", "--pages", "own", "--bf16-pages", "2"]
    main([*SMALL, *words, "--out", str(tmp_path / "rollout.csv")])
    assert {row["arm"] for row in read_rows(tmp_path / "rollout.csv")} == {"kv4"}


def test_lengths_without_a_pure_decode_step_end_with_a_sentence(tmp_path, capsys):
    words = ["--shrink", "1000000", "--parts", "precisions", "--precisions", "kv4", "--out", str(tmp_path / "r.csv")]
    with pytest.raises(SystemExit, match="1"):
        main([*SMALL, *words])
    assert "error: trace=0: expected at least one pure-decode call" in capsys.readouterr().err


def test_gains_are_quotients_of_summed_collection_times():
    found = {
        ("bf16", "own pages"): Outcome({}, [4.0, 6.0]),
        ("kv4", "own pages"): Outcome({}, [2.0, 2.0]),
        ("kv4", "bf16 pages"): Outcome({}, [4.0, 4.0]),
    }
    assert gains(found) == {"kv4": {"speedup_vs_bf16": 2.5, "speedup_at_bf16_pages": 1.25, "speedup_of_capacity": 2.0}}
    assert gains({("kv4", "own pages"): Outcome({}, [1.0])}) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hbm-gb", "0.001"], "for bf16: model 4.74 MB (short by 3.74 MB)"),
        (["--shrink", "2"], "shrink=2.0: expected lengths within the model's 2048 positions"),
        (["--model", "qwen9"], "model='qwen9': expected one of qwen3-4b, qwen3-8b"),
        (["--parts", "preciions"], "argument --parts: invalid choice: 'preciions'"),
        (["--collections", "0"], "collections=0: expected an integer >= 1"),
        (["--warmup", "-1"], "warmup=-1: expected an integer >= 0"),
        (["--tp", "0"], "tp=0: expected an integer >= 1"),
        (["--groups", "100000000000"], "groups=100000000000: expected at most 16777216"),
        (["--groups", "1000000", "--siblings", "64"], "groups x siblings=64000000: expected at most 1048576 responses"),
        (["--shrink", "0.5"], "shrink=0.5: expected a number >= 1"),
        (["--out", "/proc/none/rollout.csv"], "/proc/none"),
        (["--hbm-gb", "nan"], "hbm-gb=nan: expected a number > 0"),
        (["--seed", "-1"], "seed=-1: expected an integer >= 0"),
        (["--bf16-pages", "1"], "pages of bf16=1: expected at least "),
        (["--bf16-pages", "2", "--precisions", "kv4", "--pages", "own", "bf16"], "pages of bf16=2: expected at least "),
        (["--bf16-pages", "0"], "bf16-pages=0: expected an integer >= 1"),
        (["--bf16-pages", "9000000"], "bf16-pages=9000000: expected at most "),
    ],
)
def test_what_cannot_be_run_ends_with_one_sentence_before_any_work(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, *words])
    assert message in capsys.readouterr().err and ended.value.code == 2


@pytest.mark.parametrize(("words", "message"), [([], "required: bench"), (["kernel"], "invalid choice: 'kernel'")])
def test_a_misspelt_bench_is_named_with_the_known_ones(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert message in said and "kernels" in said and "today" in said and ended.value.code == 2


def test_shrunk_workloads_keep_mass_and_means():
    workload = fit("8B-400").workload()
    small = shrunk(workload, 32)
    assert small.lengths.cap == workload.lengths.cap // 32
    assert small.lengths.mean == pytest.approx(workload.lengths.mean / 32 + 0.5, rel=0.02)  # rounded up
    with pytest.raises(ValueError, match=r"factor=0\.5: expected a finite number >= 1"):
        shrunk(workload, 0.5)


@pytest.mark.parametrize("collector", ["partial", "sync"])
def test_a_simulated_warm_up_leaves_the_pool_that_an_engine_leaves(collector):
    """The measured interval then takes the same steps over the same contexts, preemptions included; tokens differ."""
    seen = {}
    for words in ((), ("--simulate-warmup",)):
        options = parse([*SMALL[1:], "--shrink", "60", "--warmup", "3", "--collections", "1", *words])
        ranks = Ranks(torch.device("cpu"))
        replica = ranks.replica(1)
        setting = make_setting(options, "4B-300", random_model("mini-qwen3"), ranks, replica)
        outcome = run(setting, collector, "kv4", 40)
        kept = ("active_requests", "resident_kv_bytes", "calls_per_interval", "preemptions")
        seen[words] = [outcome.metrics[name] for name in kept], outcome.responses, outcome.summary.carried_share
    assert seen[()] == seen["--simulate-warmup",]
    assert collector == "sync" or seen[()][2] > 0


def test_invented_tokens_end_only_what_has_ended():
    workload = fit("4B-300").workload()
    replica = Ranks(torch.device("cpu")).replica(1)
    config = RolloutConfig(groups_per_update=2, responses_per_group=4, max_active_requests=16, cache_pages=20000)
    kind = COLLECTORS["partial"]
    state = simulated_state(kind, config, shrunk(workload, 30), replica, intervals=2, vocab_size=32, eos=EOS)
    requests = [request for group in state["groups"] for request in group["requests"]]
    assert any(request["tokens"] for request in requests)
    for request in requests:
        ends = [token == EOS for token in request["tokens"]]
        assert not any(ends[:-1]) and (request["finish_reason"] == "eos") == (ends[-1:] == [True])
        assert all(0 <= token < 32 for token in request["tokens"] + request["prompt_tokens"])
