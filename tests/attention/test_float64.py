import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kv4rl.attention.float64 import dequantised_context, stored_basis_query
from kv4rl.attention.regions import regions
from kv4rl.config import KVConfig
from kv4rl.formats.affine import dequantize_affine, quantize_affine
from kv4rl.formats.hadamard import rotate
from kv4rl.formats.symmetric import dequantize_symmetric, quantize_symmetric


def sdpa(q, k, v):
    """q [Hq, d], k and v [n, Hk, d] -> [Hq, d]."""
    k, v = (x.transpose(0, 1)[None] for x in (k, v))
    return scaled_dot_product_attention(q[None, :, None], k, v, enable_gqa=True)[0, :, 0]


def test_oracle_is_plain_attention_on_what_is_stored(make_case):
    case = make_case([70, 5], KVConfig("bf16"))
    out, lse = case.oracle()
    for row in range(2):
        q, k, v = case.q[row].double(), case.k[row].double(), case.v[row].double()
        torch.testing.assert_close(out[row], sdpa(q, k, v))
        scores = torch.einsum("hgd,nhd->hgn", q.unflatten(0, (2, 4)), k) / 128**0.5
        torch.testing.assert_close(lse[row], scores.logsumexp(-1).flatten())


@pytest.mark.parametrize("n", [1, 16, 20, 21, 100])
def test_context_is_int8_where_protected_and_int4_elsewhere(make_case, n):
    kv = KVConfig("kv4rl", 4, 16)
    case = make_case([n], kv)
    k, v = dequantised_context(case.cache, case.layer, case.batch, 0)
    source_k, source_v = rotate(case.k[0]), case.v[0]
    main = range(*regions(n, 4, 16).main)
    for p in range(n):
        decoded = (lambda x: dequantize_affine(quantize_affine(x))) if p in main else (
            lambda x: dequantize_symmetric(quantize_symmetric(x)))  # fmt: skip
        assert torch.equal(k[p].float(), decoded(source_k[p])) and torch.equal(v[p].float(), decoded(source_v[p]))


def test_exact_and_int8_queries_differ_by_less_than_half_a_step(make_case):
    case = make_case([3])
    exact, int8 = (stored_basis_query(case.cache, case.q, how) for how in ("exact", "int8"))
    step = exact.abs().amax(-1, keepdim=True) / 127
    assert not torch.equal(exact, int8) and ((exact - int8).abs() <= 0.5001 * step).all()


def test_the_peer_errs_as_bf16_does(make_case):
    case = make_case([300, 20])
    out, _ = case.oracle()
    error = (case.peer()[0] - out).norm() / out.norm()
    assert 2**-10 < error < 2**-7


def test_an_unknown_query_is_refused_by_name(make_case):
    with pytest.raises(ValueError, match="query='int4': expected exact or int8"):
        make_case([3]).oracle("int4")
