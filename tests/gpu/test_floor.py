"""`bench floor` on a GPU: every part takes time, and the forward as much as all of them to within their overlap."""

import pytest

from kv4rl.attention.backends import BackendUnavailable
from kv4rl.bench.__main__ import main
from kv4rl.engine.flashinfer import import_flashinfer
from kv4rl.results import read_rows

pytestmark = pytest.mark.gpu


def test_floor_times_products_and_attention_beside_the_forward(tmp_path):
    try:
        import_flashinfer()
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    out = tmp_path / "replay.csv"
    main(["floor", "--model", "mini-qwen3", "--shapes", "64x200", "--out", str(out)])
    found = {row["metric"]: float(row["value"]) for row in read_rows(out, shape="64x200/64x200")}
    assert found["products_ms"] > 0 and found["attention_ms"] > 0 and found["sums_ms"] == 0
    assert found["floor_ms"] == pytest.approx(found["products_ms"] + found["attention_ms"], rel=1e-4)
    assert found["forward_ms"] > 0.5 * found["floor_ms"]
