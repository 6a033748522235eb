"""The engine and transformers with the drop-in cache: two decoders and two attentions over one cache format."""

from dataclasses import replace
from statistics import median

import pytest
import torch
from transformers import DynamicCache

from kv4rl.config import KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.sampler import Sampling
from kv4rl.fidelity.batched import batched_logits
from kv4rl.fidelity.corpus import History
from kv4rl.fidelity.divergence import sampler_kl
from kv4rl.fidelity.forced import forced_logits
from kv4rl.fidelity.representation import Representation
from kv4rl.model.decoder import Decoder, DecoderConfig


@pytest.fixture
def decoder(model):
    ours = Decoder(DecoderConfig.from_hf(model.config))
    ours.load_state_dict(model.state_dict())
    return ours.requires_grad_(False)


def test_greedy_tokens_are_the_engines(model, decoder, ids, generate, make_cache):
    limits = RolloutConfig(max_active_requests=4, cache_pages=64, max_prompt_tokens=64, max_response_tokens=40)
    engine = RolloutEngine(decoder, KVConfig("bf16"), limits, eos_token_ids=())
    prompts = [ids(length, seed=length) for length in (1, 16, 29)]
    responses = engine.generate([prompt[0].tolist() for prompt in prompts], Sampling(temperature=0.0))
    for prompt, response in zip(prompts, responses, strict=True):
        assert generate(model, prompt, make_cache(model, "bf16"))[0].tolist() == response.tokens


@pytest.fixture
def along_one_history(model, decoder, ids, forced, make_cache):
    """(engine's, drop-in's, storage probe's logits by settings), float64 [7, vocab]: the states after the prefill's."""
    return logits_along(model, decoder, ids(45, seed=4), forced, make_cache)


def logits_along(model, decoder, tokens, forced, make_cache):
    prompt = 20
    history = History("h", tokens[0, :prompt].tolist(), tokens[0, prompt:].tolist())
    steps = torch.tensor(history.positions[1:])

    def engine(precision, sink=4, recent=8):
        kv = KVConfig(precision, sink_tokens=sink, recent_tokens=recent)
        return forced_logits(decoder, kv, [history])[0, 1:].double()

    def drop_in(*settings):
        cache = make_cache(model, *settings) if settings else DynamicCache(config=model.config)
        return forced(model, tokens, prompt, cache)[0, steps].double()

    def storage(precision, sink=4, recent=8):
        stored = Representation.of(KVConfig(precision, sink_tokens=sink, recent_tokens=recent))
        return batched_logits(decoder, replace(stored, arithmetic="storage"), [history])[0, 1:].double()

    return engine, drop_in, storage


def rms(x):
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize(("precision", "share"), [("kv8", 1.0), ("kv4", 0.25), ("kv4rl", 0.25)])
def test_logits_are_the_engines_but_for_its_integer_arithmetic(along_one_history, precision, share):
    """Both store the same format; the engine adds an INT8 query and FP16 or BF16 probabilities.

    That costs about what INT8 storage does, so less than all of kv8's error and a small share of INT4's.
    """
    engine, drop_in, _ = along_one_history
    plain, deployed, stored = drop_in(), engine(precision), drop_in(precision)
    assert 0 < rms(deployed - stored) <= share * rms(stored - plain)
    assert 0.5 < sampler_kl(plain, deployed).mean() / sampler_kl(plain, stored).mean() < 2


@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
def test_its_kl_is_the_storage_probes(model, decoder, ids, forced, make_cache, precision):
    """Two implementations of one cache under full-precision arithmetic: what they differ by is FP32 rounding.

    Where that rounding flips a code, a history differs by a code's step, so the median of five histories is asked.
    """
    ratios, shares = [], []
    for seed in range(4, 9):
        _, drop_in, storage = logits_along(model, decoder, ids(45, seed=seed), forced, make_cache)
        plain, ours, probe = drop_in(), drop_in(precision), storage(precision)
        ratios.append(float(sampler_kl(plain, ours).mean() / sampler_kl(plain, probe).mean()))
        shares.append(rms(ours - probe) / rms(probe - plain))
    assert median(ratios) == pytest.approx(1, abs=1e-3)
    assert median(shares) < 1e-3


def test_of_all_settings_the_engines_own_fit_it_best(along_one_history):
    """One protected position more or less, or another precision, fits the engine worse than the same settings do."""
    engine, drop_in, _ = along_one_history
    widths = [(4, 8), (3, 8), (5, 8), (4, 7), (4, 9)]
    settings = [("kv8", 4, 8), ("kv4", 4, 8), *(("kv4rl", s, w) for s, w in widths)]
    stored = {setting: drop_in(*setting) for setting in settings}
    for setting in (("kv8", 4, 8), ("kv4", 4, 8), ("kv4rl", 4, 8)):
        deployed = engine(*setting)
        assert min(settings, key=lambda other: rms(deployed - stored[other])) == setting
