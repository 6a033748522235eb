"""Sampling by blocks draws what one cumulative sum over the whole row draws, at any vocabulary size."""

import pytest
import torch

from kv4rl.engine.block_cdf import block_masses, block_size, locate
from kv4rl.engine.sampler import NoiseKeys, Sampling, sample, sample_by_blocks


@pytest.mark.parametrize("tokens", [1, 2, 12, 32, 61, 128, 1000, 151936, 75968])
def test_block_sizes_divide_and_are_about_the_square_root(tokens):
    size = block_size(tokens)
    assert tokens % size == 0 and size * size >= tokens
    assert all(tokens % other for other in range(int(tokens**0.5) + 1, size) if other * other >= tokens)


@pytest.mark.parametrize("tokens", [1, 12, 61, 1000])
def test_tokens_are_those_of_one_cumulative_sum(tokens):
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(3000, tokens, generator=generator) * 3
    logits[:, tokens // 3 : tokens // 2] = -torch.inf  # whole blocks of no mass
    top = logits.amax(-1)
    masses = block_masses(logits, top)
    target = torch.rand(3000, generator=generator, dtype=torch.float64) * masses.sum(-1)
    found = locate(logits, top, masses, target)
    cdf = (logits - top[:, None]).exp().cumsum(-1, dtype=torch.float64)
    expected = torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
    assert (found == expected).float().mean() > 0.999  # a target within rounding of a boundary may fall either way
    assert ((found - expected).abs() <= 1 + tokens // 2 - tokens // 3).all()
    assert logits.gather(1, found[:, None]).isfinite().all()


def test_the_ends_of_the_range_are_tokens_of_mass():
    logits = torch.tensor([[-torch.inf, -torch.inf, 0.5, -torch.inf, 1.0, -torch.inf]])
    top = logits.amax(-1)
    masses = block_masses(logits, top)
    total = masses.sum(-1)
    assert locate(logits, top, masses, torch.zeros(1, dtype=torch.float64)).item() == 2
    assert locate(logits, top, masses, total * (1 - 2.0**-52)).item() == 4
    assert locate(logits, top, masses, total).item() == 4


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0), Sampling(temperature=0.6, top_p=0.9), Sampling(top_k=3)]
)
def test_the_sampler_by_blocks_draws_as_the_sampler_does(sampling):
    logits = torch.randn(2000, 60, generator=torch.Generator().manual_seed(8)) * 3
    logits[5] = float("nan")
    keys = NoiseKeys(torch.arange(2000) * 7919, torch.arange(2000))
    (tokens, logp), (found, found_logp) = (f(logits, keys, sampling) for f in (sample, sample_by_blocks))
    assert found_logp[5].isnan() and 0 <= found[5] < 60
    healthy = torch.arange(2000) != 5
    assert torch.equal(found[healthy], tokens[healthy])
    torch.testing.assert_close(found_logp[healthy], logp[healthy], rtol=1e-5, atol=1e-6)
