"""What an engine is handed and cannot use is named with what would be right; the engine stays as it was."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kv4rl.config import InputError, KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.request import Request
from kv4rl.engine.sampler import Sampling

SHORT = Sampling(max_response_tokens=3)


def refused(message):
    return pytest.raises(InputError, match=re.escape(message))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["text"], "prompt 0='text': expected a list of token ids: tokenizer(text)['input_ids'] makes one"),
        ("text", "prompts='text': expected a list of prompts, each of them a list of token ids"),
        ({"input_ids": [5]}, "prompts={'input_ids': [5]}: expected a list of prompts"),
        ([5, 6], "prompt 0=5: expected a list of token ids"),
        ([[5], ["a"]], "prompt 1=\"list ['a']\": expected a list of token ids"),
        ([[5.0]], "prompt 0='list [5.0]': expected a list of token ids"),
        ([[True]], "prompt 0='list [True]': expected a list of token ids"),
        ([None], "prompt 0='NoneType None': expected a list of token ids"),
        ([[]], "prompt_tokens=[]: expected at least one token in request '0' sibling 0"),
        ([[5, -1]], "token=-1: expected an id below the vocabulary's 61"),
        ([[5, 61]], "token=61: expected an id below the vocabulary's 61"),
        ([[5] * 129], "prompt_tokens=129: expected at most max_prompt_tokens=128"),
    ],
)
def test_prompts(make_engine, prompts, message):
    engine = make_engine()
    with refused(message):
        engine.generate(prompts, SHORT)
    engine.check_drained()
    assert len(engine.generate([[5]], SHORT)) == 1


def test_arrays_and_tensors_of_ids_are_prompts(make_engine):
    engine = make_engine()
    expected = engine.generate([[5, 6]], SHORT)
    for prompts in ([torch.tensor([5, 6])], torch.tensor([[5, 6]]), [np.array([5, 6])], ((5, 6),)):
        assert engine.generate(prompts, SHORT) == expected


def test_sampling(make_engine):
    engine = make_engine()
    with refused("sampling=None: expected a Sampling"):
        engine.generate([[5]], None)
    with refused("samples=1.5: expected an integer >= 1"):
        engine.generate([[5]], SHORT, samples=1.5)
    with refused("prompt_id=3: expected a string"):
        engine.generate([[5]], SHORT, prompt_ids=[3])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"), ("temperature", -1), ("temperature", float("nan")), ("top_p", 0), ("top_p", 1.1),
        ("top_k", 1.5), ("top_k", -1), ("seed", None), ("max_response_tokens", -1), ("max_response_tokens", 1.5),
    ],
)  # fmt: skip
def test_fields_of_sampling(field, value):
    with refused(f"{field}={value!r}: expected"):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt_id", 3, "prompt_id=3: expected a string"),
        ("sibling", -1, "sibling=-1: expected an integer >= 0"),
        ("prompt_tokens", "text", "prompt_tokens of request 'p' sibling 0='text': expected a list of token ids"),
        ("max_response_tokens", 2.5, "max_response_tokens=2.5: expected an integer >= 0"),
    ],
)
def test_fields_of_a_request(field, value, message):
    fields = {"prompt_id": "p", "sibling": 0, "prompt_tokens": [5], "max_response_tokens": 3, "eos_token_ids": ()}
    with refused(message):
        Request(**fields | {field: value})


def test_what_an_engine_is_made_of(make_decoder):
    decoder, kv, rollout = make_decoder(), KVConfig(), RolloutConfig(max_active_requests=4, cache_pages=4)
    for arguments, message in (
        (("mini-qwen3", kv, rollout), "decoder='mini-qwen3': expected a model: load_decoder(name) makes one"),
        ((decoder, "kv4rl", rollout), "kv='kv4rl': expected a KVConfig"),
        ((decoder, kv, Path()), "expected a RolloutConfig"),
        (
            (decoder, KVConfig("kv4rl", 256, 257), rollout),
            "sink_tokens + recent_tokens = 256 + 257=513: expected at most the model's 512 positions",
        ),
    ):
        with refused(message):
            RolloutEngine(*arguments, eos_token_ids=(3,))
    with refused("eos_token_ids=3: expected a list of token ids"):
        RolloutEngine(decoder, kv, rollout, eos_token_ids=3)
    with refused("eos_token_ids=\"tuple ('a',)\": expected a list of token ids"):
        RolloutEngine(decoder, kv, rollout, eos_token_ids=("a",))
    with refused("step_tokens=8192: expected at least max_active_requests (9000)"):
        RolloutEngine(decoder, kv, RolloutConfig(max_active_requests=9000), eos_token_ids=())
    for precision in ("bf16", "kv8", "kv4"):  # they protect nothing, so nothing has to fit
        RolloutEngine(decoder, KVConfig(precision, 256, 257), rollout, eos_token_ids=())
