"""The batched probe equals the engine's decode path, and plain attention over what its formats leave of the vectors."""

import pytest
import torch
import torch.nn.functional as F

from kv4rl.config import KVConfig
from kv4rl.fidelity.batched import BatchedAttention, batched_logits
from kv4rl.fidelity.forced import forced_logits, prefill
from kv4rl.fidelity.representation import Protection, Representation
from kv4rl.fidelity.row_blocks import TILE
from kv4rl.fidelity.stored import MainCopy
from kv4rl.formats.probe import FORMATS

ENGINE = [
    KVConfig("kv8"),
    KVConfig("kv4"),
    KVConfig("kv4rl", 2, 8),
    KVConfig("kv4rl", 0, 8),
    KVConfig("kv4rl", 4, 0),
    KVConfig("kv4", probability_operand="u8"),
    KVConfig("kv4rl", 2, 8, probability_operand="u8"),
]
EVERYTHING = 1000  # positions: more than any history here has


def rms(x):
    return x.square().mean().sqrt()


@pytest.fixture(scope="module")
def reference(tiny_decoder, histories):
    return forced_logits(tiny_decoder, KVConfig("bf16"), histories)


@pytest.mark.parametrize("kv", ENGINE, ids=str)
def test_the_batched_probe_is_the_engines_decode_path(tiny_decoder, histories, reference, kv):
    """The yardstick is what the arm itself changes: the two ways differ by FP32 rounding and the codes it flips."""
    stepped = forced_logits(tiny_decoder, kv, histories)
    batched = batched_logits(tiny_decoder, Representation.of(kv), histories)
    assert rms(batched - stepped) < rms(stepped - reference) / 50


def test_unquantised_it_is_as_close_to_the_engine_as_rounding_lets_it(tiny_decoder, histories, reference):
    batched = batched_logits(tiny_decoder, Representation.of(KVConfig("bf16")), histories)
    step = torch.finfo(torch.float32).eps * reference.abs().max()
    assert (batched - reference).abs().max() < 64 * step


@pytest.mark.parametrize("rotated", ["", "k", "v", "kv"])
@pytest.mark.parametrize("form", ["int4", "int4_g16", "nvfp4", "mxfp4", "int8"])
def test_storage_is_plain_attention_over_reconstructed_vectors(tiny_decoder, histories, form, rotated):
    histories = histories[:1]
    prompts = prefill(tiny_decoder, histories)
    representation = Representation(form, form, rotated, arithmetic="storage")
    attend = BatchedAttention(representation, histories, prompts)
    generator = torch.Generator().manual_seed(0)
    rows, n = len(histories[0].response) - 1, len(histories[0].prompt) + len(histories[0].response) - 1
    q, k, v = (torch.randn(rows, heads, 64, generator=generator) for heads in (4, 2, 2))
    stored = [
        FORMATS[form].reconstruct(torch.cat((prompt, new)).transpose(0, 1), rotated=name in rotated).double()
        for prompt, new, name in ((prompts.keys[1], k, "k"), (prompts.values[1], v, "v"))
    ]
    mask = torch.ones(rows, n, dtype=torch.bool).tril(n - rows)
    exact = F.scaled_dot_product_attention(q.transpose(0, 1).double(), *stored, attn_mask=mask, enable_gqa=True)
    step = torch.finfo(torch.float32).eps * exact.abs().max()
    assert (attend(1, q, k, v).transpose(0, 1) - exact).abs().max() < 16 * step


@pytest.mark.parametrize("arithmetic", ["deployed", "storage"])
def test_with_every_position_protected_the_selection_does_not_matter(tiny_decoder, histories, arithmetic):
    whole = [
        Protection(recent=EVERYTHING),
        Protection(sink=EVERYTHING),
        Protection(select="random", count=EVERYTHING),
        Protection(select="attention", count=EVERYTHING),
    ]
    first, *others = (
        batched_logits(tiny_decoder, Representation(protection=protection, arithmetic=arithmetic), histories)
        for protection in whole
    )
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("select", ["random", "attention"])
def test_a_few_protected_positions_change_something_and_cost_less_than_none(tiny_decoder, histories, reference, select):
    def distance(count):
        representation = Representation(protection=Protection(select=select, count=count))
        return rms(batched_logits(tiny_decoder, representation, histories, seed=1) - reference)

    assert distance(EVERYTHING) < distance(12) < distance(0)


def test_bf16_protection_is_closer_than_int8(tiny_decoder, histories, reference):
    arms = (Representation(protection=Protection(recent=EVERYTHING, form=form)) for form in ("bf16", "int8"))
    bf16, int8 = (rms(batched_logits(tiny_decoder, arm, histories) - reference) for arm in arms)
    assert bf16 < int8


def test_eight_bit_probabilities_are_further_than_fp16():
    """From the product with exact P over the same stored values."""
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randn(2, TILE, 64, generator=generator) for _ in range(2))
    p = torch.softmax(3 * torch.randn(2, 3, 7, TILE, generator=generator), -1)
    exact = p.double() @ FORMATS["int4"].reconstruct(v).double().unsqueeze(1)
    fp16, u8 = (
        rms(MainCopy(Representation(probability_operand=operand), k, v).product(p) - exact)
        for operand in ("fp16", "u8")
    )
    assert 0 < fp16 < u8


def test_the_probability_operand_reaches_the_logits(tiny_decoder, histories):
    fp16, u8 = (
        batched_logits(tiny_decoder, Representation(probability_operand=name), histories) for name in ("fp16", "u8")
    )
    assert not torch.equal(fp16, u8)


def test_histories_do_not_reach_one_another(tiny_decoder, histories):
    """Also not with a NaN in one of them: its keys and logits alone have it."""
    arm = Representation.of(KVConfig("kv4rl", 2, 8))
    alone = batched_logits(tiny_decoder, arm, histories[1:])
    prompts = prefill(tiny_decoder, histories)
    keys = prompts.keys[0].clone()
    keys[1, 0, 3] = torch.nan  # of the first history
    prompts.keys[0] = keys
    together = batched_logits(tiny_decoder, arm, histories, prompts=prompts)
    assert together[0, 1:].isnan().all()
    assert torch.isfinite(together[1:]).all()
    assert rms(together[1:] - alone) < rms(alone) * 1e-4


def test_a_format_that_the_decode_path_lacks_is_refused(tiny_decoder, histories):
    with pytest.raises(ValueError, match="values='int4_g16'"):
        batched_logits(tiny_decoder, Representation("int4", "int4_g16"), histories)
    with pytest.raises(ValueError, match="histories"):
        batched_logits(tiny_decoder, Representation(), [])
