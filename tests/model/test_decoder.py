"""The decoder against transformers, per family: logits, gradients, greedy tokens."""

import copy

import pytest
import torch

from kv4rl.model.attend import PackedCausal
from kv4rl.model.decoder import Decoder, DecoderConfig

SCHEDULES = {"prefill": [64], "chunks": [1, 15, 16, 7], "decode": [1], "prefill-then-decode": [33, 1]}


def _ids(count, vocab=211, seed=3):
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_float32_logits_are_as_close_to_float64_as_transformers_own(config, make_family, run_in_chunks, schedule):
    family, ids = make_family(config), _ids(60)
    with torch.no_grad():
        theirs = family.error(family.hf(ids[None]).logits[0], ids)
        ours = family.error(run_in_chunks(family.decoder, ids, SCHEDULES[schedule]), ids)
    assert ours[0] <= 1.25 * theirs[0] and ours[1] <= 2 * theirs[1], (ours, theirs)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bfloat16_logits_are_as_close_to_float64_as_transformers_own(config, make_family, run_in_chunks, schedule):
    family, ids = make_family(config, torch.bfloat16), _ids(60)
    with torch.no_grad():
        theirs = family.error(family.hf(ids[None]).logits[0], ids)
        ours = family.error(run_in_chunks(family.decoder, ids, SCHEDULES[schedule]), ids)
    assert ours[0] <= 1.05 * theirs[0] and ours[1] <= 1.5 * theirs[1], (ours, theirs)


def test_float64_logits_and_gradients_are_transformers(config, make_family):
    """In float64 only the order of sums differs: a millionth of float32's rounding bounds it."""
    family, ids = make_family(config, torch.float64), _ids(40)
    exact = family.exact()
    theirs = exact(ids[None]).logits[0]
    ours = family.decoder.logits(family.decoder(ids, torch.arange(40), PackedCausal([0, 40])))
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (theirs.log_softmax(-1) * weights).sum().backward()
    (ours.log_softmax(-1) * weights).sum().backward()
    pairs = [("logits", ours, theirs)]
    reference = dict(exact.named_parameters())
    pairs += [(name, p.grad, reference[name].grad) for name, p in family.decoder.named_parameters()]
    for name, ours, theirs in pairs:
        assert (ours - theirs).norm() <= 1e-6 * torch.finfo(torch.float32).eps * theirs.norm(), name


def test_greedy_tokens_are_transformers(config, make_family, list_cache):
    family, prompt = make_family(config), _ids(20)
    generated = family.hf.generate(
        prompt[None], attention_mask=torch.ones(1, 20, dtype=torch.long), max_new_tokens=24, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )[0, 20:]  # fmt: skip
    cache, tokens, rows, positions = list_cache(), [], prompt, torch.arange(20)
    with torch.no_grad():
        while len(tokens) < 24:
            hidden = family.decoder(rows, positions, cache)
            rows = family.decoder.logits(hidden[-1:]).argmax(-1)
            tokens.append(rows.item())
            positions = positions[-1:] + 1
    assert tokens == generated.tolist()


def test_packed_sequences_do_not_see_one_another(some_config, make_family):
    decoder = make_family(some_config("qwen3-9q3kv-d64-bias"), torch.float64).decoder
    lengths = [1, 17, 16, 5]
    parts = [_ids(length, seed=length) for length in lengths]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        packed = decoder(torch.cat(parts), positions, PackedCausal(bounds))
        alone = [decoder(ids, torch.arange(len(ids)), PackedCausal([0, len(ids)])) for ids in parts]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_recomputed_layers_give_the_same_gradients(some_config, make_family):
    decoder, ids = make_family(some_config("llama-4q4kv-d128-biases-llama3")).decoder, _ids(30)
    gradients = []
    for recompute in (False, True):
        decoder.recompute_layers = recompute
        decoder.zero_grad()
        decoder.logits(decoder(ids, torch.arange(30), PackedCausal([0, 30]))).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in decoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_casting_the_model_keeps_float32_rope_frequencies(some_config):
    config = DecoderConfig.from_hf(some_config("qwen2-4q2kv-d64"))
    decoder = Decoder.random(config, seed=0).to(torch.bfloat16)
    assert torch.equal(decoder.rotary.frequencies, config.rope_frequencies()[0])
    assert decoder.rotary.frequencies.dtype == torch.float32


def test_logits_of_a_bfloat16_model_are_float32_sums_of_its_weights(some_config):
    decoder = Decoder.random(DecoderConfig.from_hf(some_config("qwen2-4q2kv-d64")), seed=0, dtype=torch.bfloat16)
    hidden = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = decoder.logits(hidden)
    exact = hidden.double() @ decoder.head_weight.double().t()
    # A sum of 256 float32 products errs by at most 256 half ulps of the sum of magnitudes.
    magnitude = hidden.double().abs() @ decoder.head_weight.double().abs().t()
    assert logits.dtype == torch.float32
    assert ((logits - exact).abs() <= 128 * torch.finfo(torch.float32).eps * magnitude).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(decoder.logits(hidden), logits)


def test_random_models_depend_on_the_seed_alone(some_config):
    config = DecoderConfig.from_hf(some_config("qwen2-4q2kv-d64"))
    state = torch.get_rng_state()
    first, again, other = (Decoder.random(config, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_cache_shape_is_the_models(some_config):
    decoder = Decoder.random(DecoderConfig.from_hf(some_config("qwen3-9q3kv-d64-bias")), seed=0, dtype=torch.bfloat16)
    shape = decoder.cache_shape()
    sizes = (shape.num_layers, shape.query_heads, shape.kv_heads, shape.head_dim)
    assert sizes == (3, 9, 3, 64) and shape.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='dynamic'"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "layer_types=.*sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': expected silu"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, r"query_heads, kv_heads=\(4, 3\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*unquantised"),
    ],
)
def test_what_the_decoder_would_compute_wrongly_is_refused(some_config, fields, message):
    config = type(some_config("qwen2-4q2kv-d64"))(
        **{**some_config("qwen2-4q2kv-d64").to_dict(), "layer_types": None, **fields}
    )
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf(config)


def test_unknown_family_is_refused_by_name(some_config):
    config = some_config("llama-9q3kv-d64-tied")
    config.model_type = "gemma"
    with pytest.raises(ValueError, match="model_type='gemma': expected a supported model family: qwen3, qwen2, llama"):
        DecoderConfig.from_hf(config)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_bfloat16_logits_are_as_close_to_float64_as_transformers_own(config, make_family):
    family, ids = make_family(config, torch.bfloat16), _ids(60)
    with torch.no_grad():
        theirs = family.error(copy.deepcopy(family.hf).cuda()(ids[None].cuda()).logits[0].cpu(), ids)
        decoder = family.decoder.cuda()
        hidden = decoder(ids.cuda(), torch.arange(60).cuda(), PackedCausal([0, 60]))
        logits = decoder.logits(hidden)
    ours = family.error(logits.cpu(), ids)
    assert ours[0] <= 1.05 * theirs[0] and ours[1] <= 1.5 * theirs[1], (ours, theirs)
    # Rollout multiplies BF16 into float32, training float32 by float32: the same products, summed in another order.
    magnitude = hidden.double().abs() @ decoder.head_weight.double().abs().t()
    rounding = hidden.shape[1] * torch.finfo(torch.float32).eps * magnitude
    assert ((decoder.logits(hidden) - logits).abs() <= rounding).all() and logits.dtype == torch.float32
