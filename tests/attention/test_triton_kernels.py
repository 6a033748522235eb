"""The Triton kernels in the interpreter, on the CPU, against the reference.

The interpreter must be on before Triton is imported, so the tests run themselves once more in a process of their own.
"""

import os
import subprocess
import sys

import pytest
import torch
from cuda_emulator.harness import same_contents

from kv4rl.attention import triton as host
from kv4rl.attention.backends import BackendUnavailable, choose_backend
from kv4rl.attention.float64 import bf16_peer, oracle
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.cache.main_cache import pages_for
from kv4rl.config import KVConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")
PRECISIONS = ("bf16", "kv8", "kv4", "kv4rl")


@pytest.mark.skipif(INTERPRETED, reason="it is on")
def test_in_the_interpreter(passes_interpreted):
    passes_interpreted()


@pytest.mark.skipif(INTERPRETED, reason="it is on")
def test_without_the_interpreter_the_cpu_is_refused_with_the_fix():
    pytest.importorskip("triton")
    with pytest.raises(BackendUnavailable, match="TRITON_INTERPRET=1"):
        choose_backend("triton", "cpu")


def test_without_triton_the_backend_is_off_with_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(BackendUnavailable, match="Triton is not installed: pip install triton, or use backend='ref"):
        choose_backend("triton", "cpu")


def test_codes_are_not_written_to_pages_of_elements():
    """They would be read as garbage: the kernel knows INT4 and INT8 pages alone."""
    kv = KVConfig("bf16")
    cache = KVCache(kv, CacheShape(1, 2, 1, 64, torch.bfloat16), num_pages=2, num_slots=1, backend="reference")
    k, where = vectors(3, 1, 64, torch.bfloat16, 1), TokenSlots.for_chunk([1], 0, 0, 3, kv)
    with pytest.raises(ValueError, match=r"^precision='bf16': expected kv8, kv4 or kv4rl"):
        host.write_kv(cache, 0, None, k, k, where)


@pytest.mark.parametrize(("before", "printed"), [("", "True"), ("import triton; ", "restart Python")])
def test_the_interpreter_can_be_asked_for_only_before_triton_is_imported(before, printed):
    pytest.importorskip("triton")
    code = f"{before}from kv4rl.attention.triton import use_interpreter; print(use_interpreter())"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert printed in done.stdout + done.stderr


def poisoned(kv: KVConfig, shape: CacheShape, num_pages: int, backend: str) -> KVCache:
    cache = KVCache(kv, shape, num_pages=num_pages, num_slots=8, backend=backend)
    cache.main.storage.fill_(255)
    cache.side.k_scale.fill_(torch.nan)
    cache.side.v_scale.fill_(torch.nan)
    return cache


def vectors(n: int, heads: int, d: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(n, heads, d, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(kv: KVConfig, lengths: list[int], *, d=64, group=2, dtype=torch.float32) -> tuple[KVCache, DecodeBatch]:
    """Requests written by the reference (bit-equal, and faster here) into a cache that Triton decodes."""
    pages = [pages_for(n) for n in lengths]
    cache = poisoned(kv, CacheShape(1, group, 1, d, dtype), sum(pages) + 1, "triton")
    writer = choose_backend("reference", "cpu")
    order = torch.randperm(sum(pages) + 1, generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.full((len(lengths), max(pages)), -1)
    for row, n in enumerate(lengths):
        table[row, : pages[row]] = torch.tensor([order.pop() for _ in range(pages[row])])
        where = TokenSlots.for_chunk(table[row], row, 0, n, kv)
        k, v = vectors(n, 1, d, dtype, 10 + row), vectors(n, 1, d, dtype, 20 + row)
        if n:
            writer.write(cache, 0, k, v, where)
    return cache, DecodeBatch(table, torch.tensor(lengths), torch.arange(len(lengths)))


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinite and missing numbers
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("d", "dtype"), [(64, torch.float32), (128, torch.bfloat16), (256, torch.float16)])
def test_written_bits_are_the_references(awkward_vectors, precision, d, dtype):
    kv = KVConfig(precision, sink_tokens=18, recent_tokens=4)
    ours, reference = (poisoned(kv, CacheShape(1, 2, 1, d, dtype), 2, name) for name in ("triton", "reference"))
    where = TokenSlots.for_chunk(torch.tensor([1, 0]), 2, 0, 24, kv)
    where.page_ids[22] = -1  # a padding row writes nothing
    k, v = (awkward_vectors(1, d, dtype, seed) for seed in (1, 2))
    for cache in (ours, reference):
        cache.write(0, k, v, where)
    same_contents(ours, reference)


@interpreted
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("d", "group"), [(64, 3), (64, 6), (128, 5), (256, 16)])
def test_decode_matches_float64_within_bf16_attention(precision, dtype, d, group):
    kv = KVConfig(precision, sink_tokens=3, recent_tokens=30)
    cache, batch = filled(kv, [0, 1, 16, 33, 34, 150], d=d, group=group, dtype=dtype)
    q = vectors(6, group, d, dtype, 5)
    out, lse = cache.decode(0, q, batch, return_lse=True)
    exact, exact_lse = oracle(cache, 0, q, batch, query="int8")
    peer, _ = bf16_peer(cache, 0, q, batch, query="int8")
    assert (out.double() - exact).norm() <= 1.5 * (peer - exact).norm()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


@interpreted
@pytest.mark.parametrize(("s", "w"), [(0, 0), (0, 20), (16, 0), (16, 128)])
def test_decode_matches_float64_for_any_protected_widths(s, w):
    cache, batch = filled(KVConfig("kv4rl", sink_tokens=s, recent_tokens=w), [15, 16, 17, 143, 144, 145, 161])
    q = vectors(7, 2, 64, torch.float32, 6)
    out, lse = cache.decode(0, q, batch, return_lse=True)
    exact, exact_lse = oracle(cache, 0, q, batch, query="int8")
    assert (out.double() - exact).norm() <= 4e-3 * exact.norm()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


@interpreted
def test_eight_bit_probabilities_are_the_references():
    kv = KVConfig("kv4", probability_operand="u8")
    cache, batch = filled(kv, [40, 100])
    q = vectors(2, 2, 64, torch.float32, 7)
    wanted = choose_backend("reference", "cpu").decode(cache, 0, q, batch)
    torch.testing.assert_close(cache.decode(0, q, batch), wanted, rtol=1e-3, atol=1e-4)


@interpreted
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_request_has_the_same_bits_alone_and_in_a_batch(precision):
    cache, batch = filled(KVConfig(precision, sink_tokens=2, recent_tokens=5), [1100, 17, 64])
    q = vectors(3, 2, 64, torch.float32, 8)
    together = cache.decode(0, q, batch)
    for row in range(3):
        part = DecodeBatch(batch.page_table[[row]], batch.context_tokens[[row]], batch.slots[[row]])
        assert torch.equal(cache.decode(0, q[[row]], part)[0], together[row])
