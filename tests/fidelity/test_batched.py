"""The batched probe equals the engine's decode path; its parts equal what they stand for."""

import pytest

from kv4rl.config import KVConfig
from kv4rl.fidelity.batched import batched_logits
from kv4rl.fidelity.forced import forced_logits
from kv4rl.fidelity.representation import Representation

ENGINE = [
    KVConfig("kv8"),
    KVConfig("kv4"),
    KVConfig("kv4rl", 2, 8),
    KVConfig("kv4rl", 0, 8),
    KVConfig("kv4rl", 4, 0),
    KVConfig("kv4", probability_operand="u8"),
    KVConfig("kv4rl", 2, 8, probability_operand="u8"),
]


@pytest.mark.parametrize("kv", ENGINE, ids=str)
def test_the_batched_probe_is_the_engines_decode_path(tiny_decoder, histories, kv):
    """The yardstick is what the arm itself changes: the two ways differ by FP32 rounding and the codes it flips."""
    stepped = forced_logits(tiny_decoder, kv, histories)
    batched = batched_logits(tiny_decoder, Representation.of(kv), histories)
    effect = stepped - forced_logits(tiny_decoder, KVConfig("bf16"), histories)
    assert (batched - stepped).square().mean().sqrt() < effect.square().mean().sqrt() / 50
