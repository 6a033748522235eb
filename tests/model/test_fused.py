"""Fused projections: the same numbers, the same parameters, and nothing stale after anything happens to them."""

import copy

import pytest
import torch

from kv4rl.engine.weights import copy_weights
from kv4rl.model.attend import PackedCausal
from kv4rl.model.decoder import Decoder, DecoderConfig
from kv4rl.model.weights import load_decoder, save_decoder

IDS = torch.randint(211, (40,), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(decoder):
    return decoder.logits(decoder(IDS, torch.arange(40), PackedCausal([0, 17, 40])))


def test_fused_logits_are_as_close_to_float64_as_the_unfused_ones(config, make_family):
    family = make_family(config)
    exact = make_family(config, torch.float64)
    reference = logits(exact.decoder)
    plain = logits(family.decoder).double() - reference
    family.decoder.fuse_projections()
    fused = logits(family.decoder).double() - reference
    assert fused.square().mean() <= 1.1 * plain.square().mean()
    assert fused.abs().max() <= 1.5 * plain.abs().max()


def test_parameters_keep_names_values_and_identity_and_are_written_once_by_a_sync(config, make_family):
    decoder, other = make_family(config).decoder, Decoder.random(DecoderConfig.from_hf(config), seed=9)
    before = {name: (p, p.detach().clone()) for name, p in decoder.named_parameters()}
    decoder.fuse_projections()
    assert all(p is before[name][0] and torch.equal(p, before[name][1]) for name, p in decoder.named_parameters())
    fused = [block.fused for layer in decoder.model.layers for block in (layer.self_attn, layer.mlp)]
    poison = [tensor.fill_(float("nan")) for f in fused for tensor in (f.weight, f.bias) if tensor is not None]
    versions = {name: p._version for name, p in decoder.named_parameters()}
    copy_weights(decoder, other.named_parameters())
    assert {name: p._version - versions[name] for name, p in decoder.named_parameters()} == dict.fromkeys(before, 1)
    assert not any(tensor.isnan().any() for tensor in poison)
    decoder.fuse_projections()
    assert [block.fused for layer in decoder.model.layers for block in (layer.self_attn, layer.mlp)] == fused
    other.fuse_projections()
    assert torch.equal(logits(decoder), logits(other))


def test_checkpoints_of_a_fused_model_are_those_of_the_plain_one(config, make_family, tmp_path):
    decoder = make_family(config).decoder
    save_decoder(decoder, tmp_path / "plain")
    decoder.fuse_projections()
    save_decoder(decoder, tmp_path / "fused")
    plain, fused = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "fused"))
    assert plain == fused
    assert torch.equal(logits(load_decoder(tmp_path / "fused")), logits(make_family(config).decoder))


@pytest.mark.parametrize("change", ["cast", "assign", "copy", "one weight"])
def test_no_stale_buffer_is_used_after_parameters_were_replaced(some_config, make_family, change):
    decoder = make_family(some_config("qwen3-9q3kv-d64-bias")).decoder
    other = Decoder.random(decoder.config, seed=9)
    decoder.fuse_projections()
    if change == "cast":
        decoder = decoder.double().float()
        copy_weights(decoder, other.named_parameters())
    elif change == "assign":
        decoder.load_state_dict(other.state_dict(), assign=True)
    elif change == "copy":
        decoder = copy.deepcopy(decoder)
        copy_weights(decoder, other.named_parameters())
    else:
        copy_weights(decoder, other.named_parameters())
        for layer in (decoder.model.layers[1], other.model.layers[1]):
            layer.self_attn.k_proj.weight = torch.nn.Parameter(layer.self_attn.k_proj.weight.detach() * 2)
    expected = logits(other)
    torch.testing.assert_close(logits(decoder), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_gradients_still_reach_every_parameter(some_config, make_family):
    plain, fused = (make_family(some_config("llama-4q4kv-d128-biases-llama3")).decoder for _ in range(2))
    fused.fuse_projections()
    for decoder in (plain, fused):
        decoder.logits(decoder(IDS, torch.arange(40), PackedCausal([0, 40]))).logsumexp(-1).sum().backward()
    for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
