"""The drop-in cache on its own: what it stores, what attention gets, and every way that generate uses a cache."""

import pytest
import torch
from transformers import DynamicCache

from kv4rl.attention.float64 import oracle
from kv4rl.cache.main_cache import pages_for
from kv4rl.config import PRECISIONS
from kv4rl.fidelity.divergence import sampler_kl
from kv4rl.formats.packing import chunk_bytes

QUANTISED = PRECISIONS[1:]


@pytest.fixture(params=PRECISIONS)
def precision(request):
    return request.param


def rms(x):
    return x.double().square().mean().sqrt().item()


def test_bf16_gives_exactly_the_tokens_of_dynamic_cache(model, make_cache, ids, generate):
    for dtype in (torch.float32, torch.bfloat16):
        cast, prompts = model.to(dtype), ids(21, rows=3)
        assert torch.equal(generate(cast, prompts, make_cache(cast, "bf16")), generate(cast, prompts))
    model.to(torch.float32)


@pytest.mark.parametrize("prompt", [1, 4, 12, 15, 16, 17, 33])
def test_attention_over_what_it_returns_is_the_oracle_on_what_it_stores(
    model, make_cache, ids, forced, precision, prompt
):
    """`attention.float64.oracle` reads the codes through its own region logic, in the rotated basis, in float64."""
    cache = make_cache(model, precision)
    forced(model, ids(prompt + 5, rows=2), prompt, cache)
    for layer in cache.layers:
        group = model.config.num_attention_heads // model.config.num_key_value_heads
        k, v = (x.double().repeat_interleave(group, 1) for x in layer.store.read())
        generator = torch.Generator().manual_seed(prompt)
        q = torch.randn(2, k.shape[1], k.shape[-1], generator=generator, dtype=torch.float32)
        weights = ((k @ q.double()[..., None])[..., 0] * k.shape[-1] ** -0.5).softmax(-1)
        out = (weights[:, :, None] @ v)[:, :, 0]
        # Same codes on both sides; only the FP32 rotation back to the model's basis lies between.
        cache_of_layer = layer.store.cache
        q_grouped = q.reshape(2, -1, group, k.shape[-1])
        for g in range(group):
            expected, _ = oracle(cache_of_layer, 0, q_grouped[:, :, g].contiguous(), layer.store.decode_batch())
            assert (out.reshape(2, -1, group, k.shape[-1])[:, :, g] - expected).abs().max() < 2**-20 * v.abs().max()


class Frozen(DynamicCache):
    """Gives attention the dequantised contexts of another cache, whatever the model computes; float64."""

    def __init__(self, cache):
        super().__init__()
        self.contexts = [tuple(x.double() for x in layer.store.read()) for layer in cache.layers]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return self.contexts[layer_idx]

    def get_seq_length(self, layer_idx=0):
        return self.contexts[layer_idx][0].shape[2] - 1

    def get_mask_sizes(self, query_length, layer_idx):
        return self.contexts[layer_idx][0].shape[2], 0


@pytest.mark.parametrize("quantised", QUANTISED)
def test_logits_are_those_of_float64_attention_over_the_dequantised_cache(qwen, make_cache, ids, forced, quantised):
    tokens, prompt = ids(40, rows=2), 30
    cache, plain = make_cache(qwen, quantised), DynamicCache(config=qwen.config)
    logits, unquantised = (forced(qwen, tokens, prompt, c)[:, -1] for c in (cache, plain))
    exact = qwen.double()
    try:
        with torch.no_grad():
            last = {"position_ids": torch.full((2, 1), 39), "attention_mask": torch.ones(2, 40, dtype=torch.int64)}
            reference = exact(tokens[:, -1:], past_key_values=Frozen(cache), **last).logits[:, -1]
            plain64 = forced(exact, tokens, prompt, DynamicCache(config=qwen.config))[:, -1]
    finally:
        qwen.to(torch.float32)
    peer = rms(unquantised - plain64)  # what FP32 costs the same model without any quantisation
    assert rms(logits - reference) <= 3 * peer
    assert rms(logits - unquantised) > 100 * peer, "quantisation was not seen at all"


def test_prefill_attends_to_its_own_unquantised_keys_and_values(model, make_cache, ids, precision):
    tokens = ids(37)
    with torch.no_grad():
        assert torch.equal(
            model(tokens, past_key_values=make_cache(model, precision)).logits,
            model(tokens, past_key_values=DynamicCache(config=model.config)).logits,
        )


def test_nbytes_is_pages_plus_side_buffer(model, make_cache, ids, generate, precision):
    rows, prompt, new = 3, 21, 30
    cache = make_cache(model, precision)
    assert cache.nbytes == 0
    generate(model, ids(prompt, rows=rows), cache, new=new)
    config = model.config
    layers, heads, d = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    stored = prompt + new - 1  # the last token is never fed back
    main = layers * rows * pages_for(stored) * heads * chunk_bytes(precision, d, torch.float32)
    side = layers * rows * heads * (4 + 8) * (2 * d + 2 * 2) if precision == "kv4rl" else 0
    assert cache.nbytes == main + side == sum(
        t.nbytes
        for layer in cache.layers
        for t in (layer.store.cache.main.storage, *layer.store.copy_side().values())
    )  # fmt: skip


def test_a_bfloat16_model_is_served_in_its_dtype(qwen, make_cache, ids, generate):
    cast, plain = qwen.to(torch.bfloat16), DynamicCache(config=qwen.config)
    try:
        cache = make_cache(cast, sink=4, recent=8)
        generate(cast, ids(40, rows=2), cache, new=60)
        generate(cast, ids(40, rows=2), plain, new=60)
        k, v = cache.update(*torch.ones(2, 2, 2, 1, 64, dtype=torch.bfloat16), 0)
    finally:
        qwen.to(torch.float32)
    assert (k.dtype, v.dtype) == (torch.bfloat16, torch.bfloat16) and k.shape == (2, 2, 100, 64)
    assert cache.nbytes < sum(x.nbytes for layer in plain.layers for x in (layer.keys, layer.values)) / 2


def test_left_padding_changes_nothing_but_rounding(qwen, make_cache, ids, forced, precision):
    """Rows of 13, 30 and 22 tokens in one batch: each row's logits are those of the row alone, so its sink, its ring
    and its pages count from its first token."""
    lengths, steps = (13, 30, 22), 12
    longest = max(lengths)
    rows = [ids(length + steps, seed=length)[0] for length in lengths]
    batch, mask = torch.zeros(3, longest + steps, dtype=torch.int64), torch.zeros(3, longest + steps, dtype=torch.int64)
    for b, row in enumerate(rows):
        batch[b, -len(row) :], mask[b, -len(row) :] = row, 1
    cache = make_cache(qwen, precision, attention_mask=mask[:, :longest])
    together = forced(qwen, batch, longest, cache, mask)
    noise = forced(qwen, batch, longest, DynamicCache(config=qwen.config), mask)
    for b, row in enumerate(rows):
        alone = forced(qwen, row[None], len(row) - steps, make_cache(qwen, precision))[0]
        peer = forced(qwen, row[None], len(row) - steps, DynamicCache(config=qwen.config))[0]
        rounding = (noise[b] - peer).abs().max()
        # A code on a rounding boundary may flip with the batch's own noise; the error it makes is far below a step.
        assert (together[b] - alone).abs().max() <= 4 * rounding + 0.02 * (alone - peer).abs().max()
    assert cache.layers[0].store.tokens.tolist() == [length + steps for length in lengths]


def test_left_padded_generate_gives_the_unpadded_tokens(qwen, make_cache, ids, generate):
    prompts = [ids(length, seed=length) for length in (9, 20)]
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :11] = 0
    batch = torch.cat((torch.cat((torch.zeros(1, 11, dtype=torch.int64), prompts[0]), 1), prompts[1]))
    together = generate(qwen, batch, make_cache(qwen, attention_mask=mask), attention_mask=mask)
    alone = [generate(qwen, prompt, make_cache(qwen)) for prompt in prompts]
    assert torch.equal(together, torch.cat(alone))


def test_kl_falls_in_the_papers_order(models, ids, forced, make_cache):
    """kv8 < kv4rl < kv4 in mean KL to the unquantised sampler over both models' states (Fig. 4b)."""
    kl = dict.fromkeys(QUANTISED, 0.0)
    for model in models.values():
        tokens = ids(56, rows=4, seed=3)
        plain = forced(model, tokens, 20, DynamicCache(config=model.config))[:, 1:]
        for name in QUANTISED:
            cache = make_cache(model, name, sink=8, recent=16)
            kl[name] += sampler_kl(plain, forced(model, tokens, 20, cache)[:, 1:]).mean().item()
    assert 0 < kl["kv8"] < kl["kv4rl"] < kl["kv4"]


def test_everything_protected_is_int8_like_kv8(qwen, make_cache, ids, forced):
    tokens = ids(40)
    protected = forced(qwen, tokens, 20, make_cache(qwen, "kv4rl", sink=8, recent=64))
    assert torch.equal(protected, forced(qwen, tokens, 20, make_cache(qwen, "kv8")))


def test_nothing_protected_is_kv4(qwen, make_cache, ids, forced):
    tokens = ids(40)
    assert torch.equal(
        forced(qwen, tokens, 20, make_cache(qwen, "kv4rl", sink=0, recent=0)),
        forced(qwen, tokens, 20, make_cache(qwen, "kv4")),
    )


def test_more_protected_positions_than_the_model_has_are_refused(qwen, make_cache):
    most = qwen.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"sink_tokens \\+ recent_tokens = 4 \\+ {most}"):
        make_cache(qwen, recent=most)
    make_cache(qwen, precision="kv4", recent=most)  # protects nothing
