"""Weight sync into the engine: every parameter once, whole or not at all."""

import pytest
import torch
from transformers import Qwen3Config

from kv4rl.engine.sampler import Sampling
from kv4rl.engine.weights import copy_weights
from kv4rl.model.decoder import Decoder, DecoderConfig


@pytest.fixture
def tied():
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
    )
    return lambda seed: Decoder.random(DecoderConfig.from_hf(config), seed=seed)


@pytest.mark.parametrize("kind", ["mapping", "stream"])
def test_every_weight_is_written_exactly_once_tied_heads_included(tied, make_engine, kind):
    """TRL #5312 and #4571: weights that a sync leaves at their old values."""
    engine = make_engine(decoder=tied(1))
    parameters = list(engine.decoder.parameters())
    versions = [parameter._version for parameter in parameters]
    new = tied(2)
    named = dict(new.named_parameters()) if kind == "mapping" else new.named_parameters()
    addresses = [parameter.data_ptr() for parameter in parameters]
    engine.update_weights(named, 1)
    assert [p._version for p in parameters] == [version + 1 for version in versions]
    assert [p.data_ptr() for p in parameters] == addresses
    assert all(torch.equal(a, b) for a, b in zip(parameters, new.parameters(), strict=True))
    assert engine.policy_version == engine.cache.policy_version == 1
    fresh = make_engine(decoder=new)
    one, other = (e.generate([[5, 6, 7]], Sampling(max_response_tokens=10))[0] for e in (engine, fresh))
    assert one == other


def test_float32_masters_are_rounded_to_the_engine_dtype(tied):
    engine_side, learner = tied(1).bfloat16(), tied(2)
    copy_weights(engine_side, learner.named_parameters())
    for name, parameter in engine_side.named_parameters():
        assert torch.equal(parameter, learner.get_parameter(name).bfloat16())


def wrong(named, kind):
    name = "model.layers.0.mlp.up_proj.weight"
    if kind == "missing":
        del named[name]
    elif kind == "shape":
        named[name] = named[name][:-1]
    else:
        named["lm_head.weight"] = torch.zeros(61, 48)
    return named


MESSAGES = {
    "missing": r"missing weights=\['model.layers.0.mlp.up_proj.weight'\]",
    "shape": r"up_proj.weight.shape=\(95, 48\): expected \(96, 48\)",
    "unknown": "weight='lm_head.weight': expected one of the decoder's",
}


@pytest.mark.parametrize("kind", sorted(MESSAGES))
def test_a_wrong_mapping_changes_nothing(tied, make_engine, kind):
    engine = make_engine(decoder=tied(1))
    before = engine.generate([[5, 6]], Sampling(max_response_tokens=5))
    with pytest.raises(ValueError, match=MESSAGES[kind]):
        engine.update_weights(wrong(dict(tied(2).named_parameters()), kind), 1)
    assert engine.policy_version == 0
    assert engine.generate([[5, 6]], Sampling(max_response_tokens=5)) == before


@pytest.mark.parametrize("kind", sorted(MESSAGES))
def test_a_stream_that_fails_half_way_stops_the_engine_until_a_complete_one(tied, make_engine, kind):
    engine = make_engine(decoder=tied(1))
    with pytest.raises(ValueError, match=MESSAGES[kind]):
        engine.update_weights(iter(wrong(dict(tied(2).named_parameters()), kind).items()), 1)
    with pytest.raises(RuntimeError, match="stopped half-way"):
        engine.generate([[5, 6]], Sampling(max_response_tokens=5))
    engine.update_weights(tied(2).named_parameters(), 1)
    assert engine.policy_version == 1
    engine.generate([[5, 6]], Sampling(max_response_tokens=5))


def test_a_weight_that_comes_twice_is_refused(tied, make_engine):
    pairs = list(tied(2).named_parameters())
    with pytest.raises(ValueError, match="came twice"):
        make_engine(decoder=tied(1)).update_weights(iter(pairs[:2] + pairs[:1]), 1)


def test_weights_do_not_change_under_a_resident_request(tied, make_engine, make_request):
    engine = make_engine(decoder=tied(1))
    engine.add(make_request())
    engine.step()
    with pytest.raises(RuntimeError, match="pause first"):
        engine.update_weights(tied(2).named_parameters(), 1)
    engine.pause()
    engine.update_weights(tied(2).named_parameters(), 1)
