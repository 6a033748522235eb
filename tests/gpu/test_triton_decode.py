"""The Triton kernels compiled for a GPU: what the interpreter cannot show is what Triton makes of them."""

import pytest
import torch

from kv4rl.attention.backends import choose_backend
from kv4rl.attention.float64 import bf16_peer, oracle
from kv4rl.cache.kv_cache import DecodeBatch
from kv4rl.config import KVConfig

pytestmark = pytest.mark.gpu
EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 143, 144, 145, 160, 161, 1023, 1024, 1025, 3000]
PRECISIONS = ("bf16", "kv8", "kv4", "kv4rl")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("d", "group"), [(64, 3), (64, 6), (128, 4), (256, 16)])
def test_decode_is_as_near_to_float64_as_bf16_attention(make_case, precision, d, group):
    case = make_case(KVConfig(precision), EDGES, d=d, group=group, backend="triton")
    out, lse = case.cache.decode(1, case.q, case.batch, return_lse=True)
    exact, exact_lse = oracle(case.cache, 1, case.q, case.batch, query="int8")
    peer, _ = bf16_peer(case.cache, 1, case.q, case.batch, query="int8")
    assert (out.double() - exact).norm() <= 1.5 * (peer.double() - exact).norm()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_written_bits_are_the_cuda_kernels(make_case, precision):
    """And so the reference's (`test_cuda_write.py`)."""
    ours, wanted = (make_case(KVConfig(precision), EDGES, backend=name).cache for name in ("triton", "cuda"))
    for a, b in zip(ours.tensors, wanted.tensors, strict=True):
        assert torch.equal(a.nan_to_num(7.0, torch.inf, -torch.inf), b.nan_to_num(7.0, torch.inf, -torch.inf))


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_a_request_has_the_same_bits_alone_and_in_a_batch(make_case, precision):
    case = make_case(KVConfig(precision), [5000, 17, 900, 1025], backend="triton")
    together, batch = case.cache.decode(1, case.q, case.batch), case.batch
    for row in range(4):
        alone = DecodeBatch(batch.page_table[[row]], batch.context_tokens[[row]], batch.slots[[row]])
        assert torch.equal(case.cache.decode(1, case.q[[row]], alone)[0], together[row])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_replay_serves_changing_lengths_and_padding_rows(make_case, precision):
    case = make_case(KVConfig(precision), [3000, 1100, 150, 17], backend="triton")
    case.check_replays([3000, 1100, 150, 17], [1, 0, 150, 16], [0, 0, 0, 0], [1025, 1024, 145, 3])


def test_eight_bit_probabilities_are_as_near_as_the_references(make_case):
    case = make_case(KVConfig("kv4", probability_operand="u8"), [1, 17, 150, 1000, 5000], backend="triton")
    exact, _ = oracle(case.cache, 1, case.q, case.batch, query="int8")
    reference = choose_backend("reference", "cuda").decode(case.cache, 1, case.q, case.batch)
    ours = case.cache.decode(1, case.q, case.batch)
    assert (ours.double() - exact).norm() <= 2 * (reference.double() - exact).norm()
