"""`bench error`: its rows, and what it refuses without a GPU."""

import pytest
import torch

from kv4rl.attention.backends import ReferenceBackend
from kv4rl.attention.float64 import bf16_peer
from kv4rl.bench import error
from kv4rl.bench.__main__ import main


def test_rows_hold_both_errors_and_their_quotient():
    rows = {row["metric"]: row for row in error.rows_of("kv4_p8", "tp2_16q4kv", 3e-3, 2e-3)}
    assert (rows["error_vs_float64"]["value"], rows["flashinfer_error_vs_float64"]["value"]) == (3e-3, 2e-3)
    assert rows["error_vs_flashinfer"]["value"] == 1.5 and rows["error_vs_flashinfer"]["unit"] == "x"


class Planned(ReferenceBackend):
    """In FlashInfer's place: BF16 attention by the reference."""

    def __init__(self, cache):
        assert cache.kv.precision == "bf16"

    def prepare(self, cache, contexts, page_ids, *, static):
        assert contexts.tolist() == list(error.LENGTHS) and page_ids.shape[0] == len(contexts) and not static


@pytest.mark.parametrize("arm", ["kv8", "kv4rl"])
def test_the_baseline_attends_to_the_dequantised_cache(arm, monkeypatch):
    monkeypatch.setattr(error, "FlashInferBackend", Planned)
    cache, batch, q = error.requests(error.ARMS[arm], (4, 2), "cpu")
    peer, _ = bf16_peer(cache, 0, q, batch, query="int8")
    out = error.flashinfer_decode(cache, batch, q)
    assert (out - peer).norm() < 5e-3 * peer.norm()
    ours, theirs = error.errors(error.ARMS[arm], (4, 2), "cpu")
    assert 0 < ours < 1e-2 and 0 < theirs < 1e-2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_ends_with_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["error"])
    assert (
        "device='cuda': expected cpu: this machine has no CUDA device" in capsys.readouterr().err
        and ended.value.code == 2
    )
