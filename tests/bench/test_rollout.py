"""`bench rollout` on the shipped model's shape with lengths of a few tokens: every arm, row and refusal."""

import json

import pytest

from kv4rl.bench.__main__ import main
from kv4rl.bench.outcome import Outcome
from kv4rl.bench.rollout import gains
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
    printed = capsys.readouterr().out
    assert "random weights" in printed and "pages" in printed
    assert json.loads(printed.splitlines()[-1])["gains"]["4B-300/400"]["kv4"]["speedup_vs_bf16"] == pytest.approx(both)


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
    ],
)
def test_what_cannot_be_run_ends_with_one_sentence_before_any_work(words, message, capsys):
    with pytest.raises(SystemExit):
        main([*SMALL, *words])
    assert message in capsys.readouterr().err


def test_shrunk_workloads_keep_mass_and_means():
    workload = fit("8B-400").workload()
    small = shrunk(workload, 32)
    assert small.lengths.cap == workload.lengths.cap // 32
    assert small.lengths.mean == pytest.approx(workload.lengths.mean / 32 + 0.5, rel=0.02)  # rounded up
    with pytest.raises(ValueError, match=r"factor=0\.5: expected a finite number >= 1"):
        shrunk(workload, 0.5)
