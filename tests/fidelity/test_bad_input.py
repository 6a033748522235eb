"""Vectors that no format can hold: the damage stays in the request that brought them, on both ways of forcing."""

from dataclasses import replace

import pytest
import torch

from kv4rl.config import KVConfig
from kv4rl.fidelity.batched import batched_logits
from kv4rl.fidelity.forced import forced_logits, prefill
from kv4rl.fidelity.representation import Representation

BROKEN = 1  # the history whose prompt holds the value
WAYS = {
    "engine": forced_logits,
    "batched": lambda decoder, kv, *args, **how: batched_logits(decoder, Representation.of(kv), *args, **how),
}


def spoilt(prompts, histories, tensor, value):
    """The prefill with `value` at one channel of one prompt token of history `BROKEN`, in the first layer."""
    layers = [layer.clone() for layer in getattr(prompts, tensor)]
    layers[0][len(histories[0].prompt) + 2, 1, 5] = value
    return replace(prompts, **{tensor: layers})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
@pytest.mark.parametrize("tensor", ["keys", "values"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e6])
def test_one_bad_element_reaches_its_own_request_only(tiny_decoder, histories, way, precision, tensor, value):
    kv, force = KVConfig(precision, sink_tokens=2, recent_tokens=8), WAYS[way]
    prompts = prefill(tiny_decoder, histories)
    clean = force(tiny_decoder, kv, histories, prompts=prompts)
    bad = force(tiny_decoder, kv, histories, prompts=spoilt(prompts, histories, tensor, value))
    others = [row for row in range(len(histories)) if row != BROKEN]
    assert torch.equal(bad[others], clean[others])
    own = bad[BROKEN, 1:]  # the state before the first token is the prefill's
    if value != value:
        assert own.isnan().all()
    else:  # FP16 metadata saturates: wrong, but finite
        assert torch.isfinite(own).all() and not torch.equal(own, clean[BROKEN, 1:])
