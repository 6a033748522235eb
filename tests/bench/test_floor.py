"""`bench floor`: its sum, and what it refuses without a GPU."""

import pytest
import torch

from kv4rl.bench.__main__ import main
from kv4rl.bench.floor import over_floor, rows_of
from kv4rl.bench.replay_states import uniform

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_the_floor_is_the_sum_of_the_parts_and_rows_name_the_state():
    found = over_floor(6.0, {"products_ms": 2.0, "attention_ms": 2.5, "sums_ms": 0.5})
    assert (found["floor_ms"], found["forward_ms"], found["over_floor"]) == (5.0, 6.0, 1.2)
    rows = {row["metric"]: row for row in rows_of({uniform("4B-300", 640, 874): found}, "qwen3-4b")}
    assert rows["over_floor"]["shape"] == "4B-300/640x874" and rows["over_floor"]["unit"] == "x"
    assert rows["products_ms"]["value"] == 2.0 and rows["products_ms"]["unit"] == "ms"
    assert [rows[m]["n"] for m in ("products_ms", "forward_ms", "floor_ms")] == [15, 30, ""], "samples, where timed"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "0"], "tp=0: expected an integer >= 1"),
        (["--model", "mini-qwen3"], "model='mini-qwen3': expected one of qwen3-4b, qwen3-8b"),
        (["--shapes", "4"], "shapes=['4']: expected batch x context"),
        pytest.param(
            ["--shapes", "4x9"], "device='cuda': expected cpu: this machine has no CUDA device", marks=no_cuda
        ),
    ],
)
def test_bad_input_ends_with_one_sentence(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["floor", *words])
    assert message in capsys.readouterr().err and ended.value.code == 2
