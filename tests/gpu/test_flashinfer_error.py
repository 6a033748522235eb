"""Our error beside that of FlashInfer's BF16 decode on the same dequantised values, both against float64."""

import pytest
import torch

from kv4rl.attention.float64 import dequantised_context, oracle, stored_basis_query
from kv4rl.cache.main_cache import pages_for
from kv4rl.config import KVConfig

flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer's error is the yardstick: pip install kv4rl[gpu]")
pytestmark = pytest.mark.gpu
LENGTHS = [1, 17, 150, 1000, 5000]


def in_bf16_pages(case) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantised keys and values of all requests, each BF16 [pages, kv_heads, 16, d], request after request."""
    pages = ([], [])
    for row, n in enumerate(LENGTHS):
        for vectors, to in zip(dequantised_context(case.cache, 1, case.batch, row), pages, strict=True):
            padded = vectors.new_zeros(16 * pages_for(n), *vectors.shape[1:])
            padded[:n] = vectors
            to.append(padded.unflatten(0, (-1, 16)).transpose(1, 2))
    k, v = (torch.cat(parts).bfloat16().contiguous() for parts in pages)
    return k, v


def flashinfer_decode(case) -> torch.Tensor:
    """As the benchmark's baseline runs it (bench/kernels.py), with the query that our integer path uses."""
    k, v = in_bf16_pages(case)
    counts = torch.tensor([pages_for(n) for n in LENGTHS])
    indptr = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0))).int().cuda()
    last = torch.tensor([(n - 1) % 16 + 1 for n in LENGTHS]).int().cuda()
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True, backend="fa2")
    shape = case.cache.shape
    indices = torch.arange(len(k), device="cuda").int()
    wrapper.plan(
        indptr, indices, last, shape.query_heads, shape.kv_heads, shape.head_dim, 16,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return wrapper.run(stored_basis_query(case.cache, case.q, "int8").flatten(1, 2).bfloat16(), (k, v))


def errors(case) -> tuple[float, float]:
    """Relative errors of (our output, FlashInfer's)."""
    exact, _ = oracle(case.cache, 1, case.q, case.batch, query="int8")
    ours, theirs = (
        float((out.double() - exact).norm() / exact.norm()) for out in (case.decode()[0], flashinfer_decode(case))
    )
    return ours, theirs


@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
def test_error_is_at_most_one_and_a_half_times_flashinfers(make_case, precision):
    ours, theirs = errors(make_case(KVConfig(precision), LENGTHS))
    assert 0 < theirs < 1e-2  # it computed the same attention
    assert ours <= 1.5 * theirs, (ours, theirs)


@pytest.mark.parametrize("precision", ["kv4", "kv4rl"])
def test_error_of_eight_bit_probabilities_is_below_a_percent(make_case, precision, record_property):
    """Reported, not held to FlashInfer's: P itself has only 255 steps."""
    ours, theirs = errors(make_case(KVConfig(precision, probability_operand="u8"), LENGTHS))
    record_property("error_over_flashinfer", ours / theirs)
    print(f"{precision}, 8-bit P: {ours:.2e}, FlashInfer BF16 {theirs:.2e}, {ours / theirs:.2f} times")
    assert ours <= 1e-2
