"""The engine and transformers with the drop-in cache: two decoders and two attentions over one cache format."""

import pytest
import torch
from transformers import DynamicCache

from kv4rl.config import KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.sampler import Sampling
from kv4rl.fidelity.corpus import History
from kv4rl.fidelity.divergence import sampler_kl
from kv4rl.fidelity.forced import forced_logits
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
    """(engine's logits, drop-in's logits by cache settings), float64 [7, vocab]: the states after the prefill's."""
    tokens, prompt = ids(45, seed=4), 20
    history = History("h", tokens[0, :prompt].tolist(), tokens[0, prompt:].tolist())
    steps = torch.tensor(history.positions[1:])

    def engine(precision, sink=4, recent=8):
        kv = KVConfig(precision, sink_tokens=sink, recent_tokens=recent)
        return forced_logits(decoder, kv, [history])[0, 1:].double()

    def drop_in(*settings):
        cache = make_cache(model, *settings) if settings else DynamicCache(config=model.config)
        return forced(model, tokens, prompt, cache)[0, steps].double()

    return engine, drop_in


def rms(x):
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize(("precision", "share"), [("kv8", 1.0), ("kv4", 0.25), ("kv4rl", 0.25)])
def test_logits_are_the_engines_but_for_its_integer_arithmetic(along_one_history, precision, share):
    """Both store the same format; the engine adds an INT8 query and FP16 or BF16 probabilities.

    That costs about what INT8 storage does, so less than all of kv8's error and a small share of INT4's.
    """
    engine, drop_in = along_one_history
    plain, deployed, stored = drop_in(), engine(precision), drop_in(precision)
    assert 0 < rms(deployed - stored) <= share * rms(stored - plain)
    assert 0.5 < sampler_kl(plain, deployed).mean() / sampler_kl(plain, stored).mean() < 2


def test_of_all_settings_the_engines_own_fit_it_best(along_one_history):
    """One protected position more or less, or another precision, fits the engine worse than the same settings do."""
    engine, drop_in = along_one_history
    widths = [(4, 8), (3, 8), (5, 8), (4, 7), (4, 9)]
    settings = [("kv8", 4, 8), ("kv4", 4, 8), *(("kv4rl", s, w) for s, w in widths)]
    stored = {setting: drop_in(*setting) for setting in settings}
    for setting in (("kv8", 4, 8), ("kv4", 4, 8), ("kv4rl", 4, 8)):
        deployed = engine(*setting)
        assert min(settings, key=lambda other: rms(deployed - stored[other])) == setting
