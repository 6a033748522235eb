"""`bench overhead`: the engine's step beside the replay's, at the same contexts."""

import json

import pytest
import torch

from kv4rl.bench.__main__ import main
from kv4rl.results import read_rows

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_overhead_writes_the_step_of_engine_and_replay(tmp_path, capsys):
    out = tmp_path / "rollout.csv"
    words = ["--device", "cpu", "--shapes", "3x20", "2x40", "--steps", "4", "--step-tokens", "24", "--out", str(out)]
    main(["overhead", *words])
    found = {(row["arm"], row["shape"], row["metric"]): float(row["value"]) for row in read_rows(out)}
    timed = {row["metric"]: row["n"] for row in read_rows(out)}
    assert timed["engine_step_ms"] == timed["serial_step_ms"] == "4" and timed["decode_replay_ms"] == "8"
    assert timed["share_of_replay"] == timed["prefill_tokens_per_s"] == ""
    for arm in ("bf16", "kv4rl"):
        for shape in ("3x20", "2x40"):
            share, replay, own = (
                found[arm, shape, f"{m}"] for m in ("share_of_replay", "decode_replay_ms", "engine_step_ms")
            )
            assert share == pytest.approx(replay / own, rel=1e-4)
            assert found[arm, shape, "prefill_tokens_per_s"] > 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["share_of_replay"]) == {
        f"{arm} {shape}" for arm in ("bf16", "kv4rl") for shape in ("3x20", "2x40")
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "3y4"], "shapes=['3y4']"),
        (["--steps", "1"], "steps=1"),
        (["--tp", "0"], "tp=0"),
        (["--shapes", "2x3000"], "shapes='2x3000': expected at most 2048 positions"),
        (["--shapes", "9999999999x1"], "expected batches of at most 1048576"),
        (["--out", "/proc/none/rollout.csv"], "/proc/none"),
        (["--tp", "2"], "tensor_parallel=2: expected 1, or a multiple of 2 processes started with torchrun"),
        pytest.param(
            ["--device", "cuda"], "device='cuda': expected cpu: this machine has no CUDA device", marks=no_cuda
        ),
    ],
)
def test_wrong_words_end_with_one_sentence(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["overhead", "--device", "cpu", *words])
    assert message in capsys.readouterr().err and ended.value.code == 2
