import math

import pytest
import torch

from kv4rl.config import RolloutConfig
from kv4rl.engine.noise import noise_key, splitmix64, uniforms
from kv4rl.engine.sampler import NoiseKeys, Sampling, sample


def keys_for(rows, seed=43, position=0):
    keys = torch.tensor([noise_key(seed, f"p{i}", 0) for i in range(rows)])
    return NoiseKeys(keys, torch.full((rows,), position))


def random_logits(rows, vocabulary, scale=2.0):
    return scale * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))


def test_splitmix64_gives_its_published_first_outputs():
    golden = 0x9E3779B97F4A7C15
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(golden) == 0x6E789E6AA1B965F4


def test_the_tensor_hash_is_the_integer_hash():
    keys = [0, 1, -1, 2**63 - 1, -(2**63), noise_key(43, "p", 5)]
    positions = [0, 1, 1000, 17, 2**40, 3]
    golden = 0x9E3779B97F4A7C15
    expected = [(splitmix64((k + p * golden) % 2**64) >> 12) * 2.0**-52 for k, p in zip(keys, positions, strict=True)]
    assert uniforms(torch.tensor(keys), torch.tensor(positions)).tolist() == expected


def test_noise_differs_by_seed_prompt_sibling_and_position():
    """Megatron-LM #5983, verl #6857: siblings and replicas that sample identical responses."""
    keys = {noise_key(s, p, i) for s in (1, 2) for p in ("a", "b", "ab") for i in range(8)}
    assert len(keys) == 48
    draws = uniforms(torch.tensor(sorted(keys))[:, None].expand(-1, 50), torch.arange(50).expand(48, 50))
    assert draws.unique().numel() == 48 * 50


def test_uniforms_are_uniform():
    n = 200_000
    draws = uniforms(torch.full((n,), noise_key(43, "p", 0)), torch.arange(n))
    assert draws.min() >= 0 and draws.max() < 1
    counts = torch.histc(draws, 100, 0, 1)
    chi_squared = ((counts - n / 100) ** 2 / (n / 100)).sum().item()
    assert abs(chi_squared - 99) < 5 * math.sqrt(2 * 99)  # mean and deviation of chi-squared with 99 degrees


def test_tokens_follow_the_softmax():
    logits = random_logits(1, 12)
    n = 40_000
    noise = NoiseKeys(torch.full((n,), noise_key(1, "p", 0)), torch.arange(n))
    tokens, _ = sample(logits.expand(n, -1).contiguous(), noise, Sampling())
    expected = n * torch.softmax(logits[0], -1)
    counts = torch.bincount(tokens, minlength=12)
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_squared < 11 + 5 * math.sqrt(2 * 11)


def test_sampler_logp_comes_from_the_very_logits_sampled_from():
    logits = random_logits(64, 50)
    tokens, logp = sample(logits, keys_for(64), Sampling())
    assert logp.dtype == torch.float32
    assert torch.equal(logp, torch.log_softmax(logits, -1)[torch.arange(64), tokens])


def test_a_row_is_sampled_the_same_alone_and_in_any_batch():
    logits, noise = random_logits(40, 300), keys_for(40)
    tokens, logp = sample(logits, noise, Sampling())
    for row in (0, 7, 39):
        alone = NoiseKeys(noise.keys[row : row + 1], noise.positions[row : row + 1])
        one_token, one_logp = sample(logits[row : row + 1], alone, Sampling())
        assert (one_token.item(), one_logp.item()) == (tokens[row].item(), logp[row].item())


def test_greedy_takes_the_largest_logit():
    logits = random_logits(20, 30)
    tokens, logp = sample(logits, keys_for(20), Sampling(temperature=0))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(logp, torch.log_softmax(logits, -1).max(-1).values)


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-4)])
def test_the_tightest_truncation_is_greedy(sampling):
    logits = random_logits(30, 40)
    tokens, logp = sample(logits, keys_for(30), sampling)
    assert torch.equal(tokens, logits.argmax(-1))
    assert logp.max() <= 0 and logp.min() > -1e-3


def test_top_k_and_top_p_keep_exactly_the_nucleus():
    logits = torch.log(torch.tensor([[0.4, 0.1, 0.3, 0.15, 0.05]])).expand(4000, -1).contiguous()
    noise = NoiseKeys(torch.full((4000,), noise_key(1, "p", 0)), torch.arange(4000))
    for sampling, kept in [
        (Sampling(top_k=2), {0, 2}),
        (Sampling(top_p=0.75), {0, 2, 3}),
        (Sampling(top_p=0.69), {0, 2}),
    ]:
        tokens, logp = sample(logits, noise, sampling)
        assert set(tokens.tolist()) == kept
        mass = sum([0.4, 0.1, 0.3, 0.15, 0.05][i] for i in kept)
        wanted = torch.log(torch.tensor([0.4, 0.1, 0.3, 0.15, 0.05]) / mass)[tokens]
        torch.testing.assert_close(logp, wanted)


def test_temperature_divides_the_logits_once():
    logits = random_logits(16, 30)
    tokens, logp = sample(logits, keys_for(16), Sampling(temperature=0.6))
    same_tokens, same_logp = sample(logits / 0.6, keys_for(16), Sampling())
    assert torch.equal(tokens, same_tokens) and torch.equal(logp, same_logp)


def test_a_row_of_nan_marks_itself_and_no_other():
    logits = random_logits(3, 10)
    expected = sample(logits, keys_for(3), Sampling())[0]
    logits[1, 4] = float("nan")
    tokens, logp = sample(logits, keys_for(3), Sampling())
    assert logp.isnan().tolist() == [False, True, False]
    assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()


def test_a_token_of_no_probability_is_never_drawn():
    logits = torch.full((5000, 6), float("-inf"))
    logits[:, [1, 4]] = 0.0
    noise = NoiseKeys(torch.full((5000,), noise_key(2, "q", 1)), torch.arange(5000))
    assert set(sample(logits, noise, Sampling())[0].tolist()) == {1, 4}


def test_the_smallest_uniform_skips_tokens_of_no_probability():
    golden = 0x9E3779B97F4A7C15
    noise = NoiseKeys(torch.tensor([2**64 - golden]).long(), torch.zeros(1, dtype=torch.int64))
    assert uniforms(noise.keys, noise.positions).item() == 0
    tokens, logp = sample(torch.tensor([[float("-inf"), float("-inf"), 1.0, 2.0]]), noise, Sampling())
    assert tokens.item() == 2 and logp.isfinite()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 1e-40),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("max_response_tokens", -1),
    ],
)
def test_wrong_sampling_settings_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        Sampling(**{field: value})


def test_half_precision_logits_are_refused():
    with pytest.raises(ValueError, match=r"logits.dtype=torch.bfloat16"):
        sample(random_logits(1, 4).bfloat16(), keys_for(1), Sampling())


def test_sampling_follows_the_rollout_configuration():
    sampling = Sampling.of(RolloutConfig(temperature=0.5, top_p=0.9, top_k=3, seed=7, max_response_tokens=11))
    assert sampling == Sampling(0.5, 0.9, 3, 7, 11)
