"""The kernels' bench where no device is needed: its arms, its rows, and the Triton arms in the interpreter."""

import os

import pytest
import torch

from kv4rl.attention.backends import choose_backend
from kv4rl.bench import kernels

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


def test_every_arm_has_a_speedup_over_the_baseline_of_its_run():
    rows = {(row["arm"], row["metric"]): row["value"] for row in kernels.rows_of(SMALL, "tp2_16q4kv", TIMES)}
    assert {arm: rows[arm, "speedup_vs_bf16"] for arm in TIMES} == {
        "bf16_flashinfer": 1.0, "kv4": 3.0, "kv4_triton": 1.5,
    }  # fmt: skip
    assert rows["kv4_triton", "ms_per_layer"] == 2.0
    assert rows["kv4_triton", "kv_bytes_per_s"] == 80 / 2e-3


def test_a_run_of_other_arms_leaves_the_stored_baseline_alone():
    arms = lambda found: {row["arm"] for row in kernels.rows_of(SMALL, "tp2_16q4kv", found)}
    others = {arm: TIMES[arm] for arm in ("bf16_flashinfer", "kv4_triton")}
    assert arms(others) == {"kv4_triton"}
    assert arms({"bf16_flashinfer": (3.0, 300)}) == {"bf16_flashinfer"}
    assert arms(TIMES) == set(TIMES)


def test_an_unknown_arm_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        kernels.main(["--arms", "kv4_trition"])
    assert "kv4_triton" in capsys.readouterr().err
