"""The kernels' bench where no device is needed: its arms, its rows, and the Triton arms in the interpreter."""

import os

import pytest
import torch

from kv4rl.attention.backends import choose_backend
from kv4rl.bench import kernels
from kv4rl.bench.replay_states import heterogeneous, ragged_aggregate

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = kernels.Workload("edges", (17, 170))
TIMES = {"bf16_flashinfer": (3.0, 300), "kv4": (1.0, 80), "kv4_triton": (2.0, 80)}  # ms, KV bytes


@pytest.mark.skipif(INTERPRETED, reason="it is on")
def test_in_the_interpreter(passes_interpreted):
    passes_interpreted()


@pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")
@pytest.mark.parametrize("precision", kernels.ARMS)
def test_a_triton_arm_decodes_the_content_of_its_cache(precision, monkeypatch):
    monkeypatch.setattr(kernels, "layers_beyond_cache", lambda _: 2)
    arm = kernels.TritonDecode(precision, SMALL, (2, 1), device="cpu")
    arm.launch(1)
    wanted = choose_backend("reference", "cpu").decode(arm.cache, 1, arm.q, arm.batch)
    rounding = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(arm.out, wanted, rtol=2 * rounding, atol=2 * rounding)


def test_without_the_baseline_a_line_claims_no_speedup():
    found = {"kv4": (0.1, 10**8)}
    alone, beside = (kernels.line_of(kernels.uniform(2, 40), "tp2_16q4kv", f, 4e12) for f in (
        found, {kernels.BASELINE: (0.35, 4 * 10**8)} | found,
    ))  # fmt: skip
    assert not alone.rstrip().endswith("x") and beside.endswith(" 3.50x")


def test_every_arm_has_a_speedup_over_the_baseline_of_its_run():
    rows = {(row["arm"], row["metric"]): row["value"] for row in kernels.rows_of(SMALL, "tp2_16q4kv", TIMES, 1e5)}
    assert {arm: rows[arm, "speedup_vs_bf16"] for arm in TIMES} == {
        "bf16_flashinfer": 1.0, "kv4": 3.0, "kv4_triton": 1.5,
    }  # fmt: skip
    assert rows["kv4_triton", "ms_per_layer"] == 2.0
    assert rows["kv4_triton", "kv_bytes_per_s"] == 80 / 2e-3
    assert rows["bf16_flashinfer", "share_of_copy_rate"] == 1.0 and rows["kv4", "share_of_copy_rate"] == 0.8


def test_a_run_of_other_arms_leaves_the_stored_baseline_alone():
    arms = lambda found: {row["arm"] for row in kernels.rows_of(SMALL, "tp2_16q4kv", found, 1e5)}
    others = {arm: TIMES[arm] for arm in ("bf16_flashinfer", "kv4_triton")}
    assert arms(others) == {"kv4_triton"}
    assert arms({"bf16_flashinfer": (3.0, 300)}) == {"bf16_flashinfer"}
    assert arms(TIMES) == set(TIMES)


def test_ragged_workloads_are_the_replays_vectors():
    found = kernels.workloads("ragged")
    states = [state for size in ("4b", "8b") for state in heterogeneous(size)]
    assert [w.lengths for w in found] == [state.contexts for state in states]
    assert {w.group: sum(v.group == w.group for v in found) for w in found} == {"ragged-4B": 24, "ragged-8B": 11}
    assert len({w.name for w in kernels.workloads("all")}) == len(kernels.workloads("all"))
    assert found[0].name == f"ragged-4B/{states[0].name}"


def test_vectors_of_a_group_have_the_speedup_of_their_summed_times():
    times = [(3.0, 1.0), (5.0, 3.0)]  # ms: BF16, KV4
    vectors = [kernels.Workload(f"ragged-4B/{i}", (1,), "ragged-4B") for i in range(2)]
    measured = [
        (vector, {"bf16_flashinfer": (base, 300), "kv4": (ms, 80)})
        for vector, (base, ms) in zip(vectors, times, strict=True)
    ]
    for vector, found in measured:
        assert not [row for row in kernels.rows_of(vector, "tp2_16q4kv", found, 1e5) if row["unit"] == "x"]
    ((group, found),) = kernels.grouped([(SMALL, TIMES), *measured])
    rows = {(r["shape"], r["arm"], r["metric"]): r["value"] for r in kernels.rows_of(group, "tp2_16q4kv", found, 1e5)}
    speedup = ragged_aggregate(*zip(*times, strict=True))
    assert rows["ragged-4B", "kv4", "speedup_vs_bf16"] == pytest.approx(speedup) == 2.0
    assert rows["ragged-4B", "kv4", "ms_per_layer"] == 2.0
    assert rows["ragged-4B", "kv4", "kv_bytes_per_s"] == 160 / 4e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_cuda_device_it_ends_with_one_sentence(capsys):
    with pytest.raises(SystemExit) as ending:
        kernels.main([])
    out, err = capsys.readouterr()
    assert ending.value.code == 2 and not out
    assert err.startswith("kv4rl.bench kernels: error: torch.cuda.is_available()=False: expected a CUDA device")


def test_an_unknown_arm_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        kernels.main(["--arms", "kv4_trition"])
    assert "kv4_triton" in capsys.readouterr().err
