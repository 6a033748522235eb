"""Sampling, beams, assisted decoding, further turns, and what the cache refuses."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig, T5Config

from kv4rl.integrations.transformers import KV4RLCache


@pytest.fixture(params=["bf16", "kv8", "kv4", "kv4rl"])
def precision(request):
    return request.param


def same_contents(one, other):
    """Whether two caches give attention the same keys and values in every layer, bit for bit."""
    pairs = zip(one.layers, other.layers, strict=True)
    return all(torch.equal(a, b) for x, y in pairs for a, b in zip(x.store.read(), y.store.read(), strict=True))


def test_sampling_follows_torchs_seed(qwen, make_cache, ids, generate):
    def sample(cache):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return generate(qwen, ids(20), cache, do_sample=True, num_return_sequences=3)

    plain = sample(DynamicCache(config=qwen.config))
    assert torch.equal(sample(make_cache(qwen, "bf16")), plain)
    assert not torch.equal(sample(make_cache(qwen, "kv4")), plain)
    assert torch.equal(sample(make_cache(qwen)), sample(make_cache(qwen)))


def test_beam_search_in_bf16_is_that_of_dynamic_cache(model, make_cache, ids, generate):
    prompts, beams = ids(17, rows=2), {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(generate(model, prompts, make_cache(model, "bf16"), **beams), generate(model, prompts, **beams))


def test_beams_carry_their_own_codes(qwen, make_cache, ids, forced, precision):
    """A beam's score is the sum of the log-probabilities that its own tokens get when they are forced."""
    prompts = ids(17, rows=2)
    mask = torch.ones_like(prompts)
    out = qwen.generate(
        prompts, past_key_values=make_cache(qwen, precision), attention_mask=mask, max_new_tokens=25, do_sample=False,
        num_beams=3, num_return_sequences=3, length_penalty=0.0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    # As many rows as there were beams: a product of another shape may round a key to another code.
    logits = forced(qwen, out.sequences, 17, make_cache(qwen, precision))[:, :-1]
    logp = logits.log_softmax(-1).gather(-1, out.sequences[:, 17:, None]).sum((1, 2))
    assert (logp - out.sequences_scores).abs().max() < 1e-5 * out.sequences_scores.abs().min()


def test_beams_of_a_left_padded_batch_keep_their_padding(qwen, make_cache, ids, generate):
    prompt = ids(12)
    batch = torch.cat((torch.cat((torch.zeros(1, 8, dtype=torch.int64), prompt), 1), ids(20, seed=1)))
    mask = torch.ones_like(batch)
    mask[0, :8] = 0
    together = generate(qwen, batch, make_cache(qwen, attention_mask=mask), attention_mask=mask, num_beams=2)
    assert torch.equal(together[:1], generate(qwen, prompt, make_cache(qwen), num_beams=2))


@pytest.mark.parametrize("how", ["prompt_lookup", "assistant"])
def test_assisted_decoding_in_bf16_gives_the_plain_greedy_tokens(qwen, models, make_cache, ids, generate, how):
    helper = {"prompt_lookup_num_tokens": 4} if how == "prompt_lookup" else {"assistant_model": qwen}
    prompt = ids(5).repeat(1, 4)  # something to look up
    assert torch.equal(generate(qwen, prompt, make_cache(qwen, "bf16"), **helper), generate(qwen, prompt))


def test_assisted_decoding_leaves_no_trace_of_rejected_candidates(qwen, make_cache, ids, generate, monkeypatch):
    """After every crop the cache is what it would be had the rejected candidates never been seen."""
    cache, twin, prompt = make_cache(qwen), make_cache(qwen), ids(5).repeat(1, 4)
    calls, removed = [], []
    update, crop = cache.update, cache.crop

    def recorded_update(k, v, layer, *args, **kwargs):
        calls.append((k, v, layer))
        return update(k, v, layer, *args, **kwargs)

    def checked_crop(tokens_to_remove):
        removed.append(-tokens_to_remove)
        for k, v, layer in calls:
            kept = k.shape[-2] + tokens_to_remove
            twin.update(k[:, :, :kept], v[:, :, :kept], layer)
        calls.clear()
        crop(tokens_to_remove)
        assert same_contents(cache, twin) and cache.nbytes == twin.nbytes

    monkeypatch.setattr(cache, "update", recorded_update)
    monkeypatch.setattr(cache, "crop", checked_crop)
    generate(qwen, prompt, cache, prompt_lookup_num_tokens=6)
    assert max(removed) > 0 and cache.get_seq_length() > 4 + 8 + max(removed)


@pytest.mark.parametrize("sizes", [(1, 0), (3, 2), (9, 1), (9, 8), (20, 20), (20, 7)])
def test_crop_undoes_part_of_the_latest_call(qwen, make_cache, sizes):
    added, removed = sizes
    generator = torch.Generator().manual_seed(added)
    k, v = torch.randn(2, 1, 2, 30 + added, 64, generator=generator)
    cache, twin = make_cache(qwen), make_cache(qwen)
    cache.activate_past_recording()
    for each, stop in ((cache, 30 + added), (twin, 30 + added - removed)):
        for layer in (0, 1):
            each.update(k[:, :, :30], v[:, :, :30], layer)
            if stop > 30:
                each.update(k[:, :, 30:stop], v[:, :, 30:stop], layer)
    cache.crop(-removed)
    assert same_contents(cache, twin)
    assert cache.get_seq_length() == 30 + added - removed


def test_crop_works_without_recording_where_nothing_was_overwritten(qwen, make_cache, precision):
    k = torch.randn(1, 2, 30, 64, generator=torch.Generator().manual_seed(0))
    for stop, fits in ((12, True), (30, precision != "kv4rl")):
        cache = make_cache(qwen, precision)
        for layer in (0, 1):
            cache.update(k[:, :, :stop], k[:, :, :stop], layer)
        if fits:
            cache.crop(-5)
            assert cache.get_seq_length() == stop - 5
        else:
            with pytest.raises(ValueError, match="tokens_to_remove=-5: expected 0: the ring of 8 recent positions"):
                cache.crop(-5)


def test_a_further_turn_continues_the_cache(model, make_cache, ids, generate, precision):
    cache, plain = make_cache(model, precision), DynamicCache(config=model.config)
    first = torch.cat((ids(18), generate(model, ids(18), cache)), 1)
    generate(model, ids(18), plain)
    turn = torch.cat((first, ids(9, seed=2)), 1)
    answer = generate(model, turn, cache)
    assert cache.get_seq_length() == turn.shape[1] + 39
    if precision == "bf16":
        assert torch.equal(answer, generate(model, turn, plain))


def test_reset_forgets_everything(qwen, make_cache, ids, generate):
    cache = make_cache(qwen)
    first = generate(qwen, ids(20), cache)
    cache.reset()
    assert (cache.nbytes, cache.get_seq_length()) == (0, 0)
    assert torch.equal(generate(qwen, ids(20), cache), first)


def test_rows_can_be_repeated_and_selected(qwen, make_cache):
    k = torch.randn(2, 2, 20, 64, generator=torch.Generator().manual_seed(0))

    def filled(states):
        cache = make_cache(qwen)
        for layer in (0, 1):
            cache.update(states, -states, layer)
        return cache

    cache = filled(k)
    cache.batch_repeat_interleave(2)
    assert same_contents(cache, filled(k[[0, 0, 1, 1]]))
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert same_contents(cache, filled(k[[1, 0]]))
    cache.batch_select_indices(torch.tensor([True, False]))
    assert same_contents(cache, filled(k[[1]]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_stay_in_their_row(qwen, make_cache, precision, bad):
    """Everything but their own vector reads as if they were not there."""
    clean = torch.randn(2, 2, 20, 64, generator=torch.Generator().manual_seed(0))
    k = clean.clone()
    k[0, 0, 3, 5] = bad

    def read(keys):
        cache = make_cache(qwen, precision)
        cache.update(keys[:, :, :19], clean[:, :, :19], 0)
        return cache.update(keys[:, :, 19:], clean[:, :, 19:], 0)

    (bad_k, bad_v), (clean_k, clean_v) = read(k), read(clean)
    assert not torch.equal(bad_k[0, 0, 3], clean_k[0, 0, 3])
    bad_k[0, 0, 3] = clean_k[0, 0, 3]
    assert torch.equal(bad_k, clean_k) and torch.equal(bad_v, clean_v)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(), "is_encoder_decoder=True: expected a decoder-only model"),
        (MistralConfig(sliding_window=32), r"layer_types=\['sliding_attention'\]: expected full_attention in every"),
        (LlamaConfig(hidden_size=96, num_attention_heads=2, head_dim=48), "head_dim=48: expected one of 64, 128, 256"),
    ],
)  # fmt: skip
def test_models_it_cannot_serve_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        KV4RLCache(config)


def test_wrong_settings_are_refused_by_name(qwen, make_cache):
    with pytest.raises(ValueError, match="precision='int4'"):
        make_cache(qwen, "int4")
    with pytest.raises(ValueError, match="sink_tokens=-1"):
        make_cache(qwen, sink=-1)
    with pytest.raises(ValueError, match="left padding: zeros only before"):
        make_cache(qwen, attention_mask=torch.tensor([[1, 1, 0]]))
    with pytest.raises(ValueError, match="left padding"):
        make_cache(qwen, attention_mask=torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"attention_mask='list': expected a tensor"):
        make_cache(qwen, attention_mask=[[1, 1, 1]])
    with pytest.raises(ValueError, match=r"attention_mask of shape \(2, 999\), zeros a row=\[999, 0\]: expected left"):
        make_cache(qwen, attention_mask=torch.tensor([[0], [1]]).expand(2, 999))
    for wrong, name in ((qwen, "Qwen3ForCausalLM"), ("mini-qwen3", "mini-qwen3")):
        with pytest.raises(ValueError, match=f"model_config='{name}': expected a model's config"):
            KV4RLCache(wrong)


@pytest.mark.parametrize("chunks", [{}, {"prefill_chunk_size": 1}, {"prefill_chunk_size": 4}])
def test_a_mask_of_fewer_rows_is_refused_unless_they_repeat(qwen, make_cache, ids, generate, chunks):
    batch = ids(9, rows=2)
    batch[1, :6] = batch[0, :6]  # a shared beginning
    with pytest.raises(ValueError, match=r"attention_mask rows=1: expected the batch's 2 .fewer only where beams"):
        generate(qwen, batch, make_cache(qwen, attention_mask=torch.ones(1, 9)), **chunks)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    cache = make_cache(qwen, attention_mask=mask)
    generate(qwen, batch[:1], cache, attention_mask=mask, do_sample=True, num_return_sequences=2, **chunks)
    assert cache.layers[0].store.padding.tolist() == [3, 3]


def test_a_mask_longer_than_the_prompt_is_refused_where_it_hides_a_token(qwen, make_cache, ids, generate):
    long = torch.ones(2, 20)
    generate(qwen, ids(9, rows=2), make_cache(qwen, attention_mask=long))
    long[0, :12] = 0
    with pytest.raises(ValueError, match=r"attention_mask.shape=\(2, 20\): expected \[batch, 9\], as many columns as"):
        generate(qwen, ids(9, rows=2), make_cache(qwen, attention_mask=long))


def test_a_prompt_that_begins_in_a_later_chunk(qwen, make_cache, ids, generate):
    prompt, mask = ids(3), torch.tensor([[0] * 6 + [1] * 3])
    padded = torch.cat((torch.zeros(1, 6, dtype=torch.int64), prompt), 1)
    for size in (4, 8):
        cache = make_cache(qwen, "bf16", attention_mask=mask)
        out = generate(qwen, padded, cache, attention_mask=mask, prefill_chunk_size=size)
        assert torch.equal(out, generate(qwen, prompt))


def test_a_cache_made_for_another_model_is_refused(qwen, models, make_cache, ids, generate):
    other = models["llama-3q1kv-d128"]
    with pytest.raises(ValueError, match=r"\(KV heads, head_dim\) of the keys=\(2, 64\): expected model_.*\(1, 128\)"):
        generate(qwen, ids(9), make_cache(other))
    shallow = type(qwen.config)(**qwen.config.to_dict() | {"num_hidden_layers": 1, "layer_types": None})
    with pytest.raises(ValueError, match="layers of the model=2: expected at most model_config's 1"):
        generate(qwen, ids(9), KV4RLCache(shallow))


def test_padding_without_a_mask_is_noticed(qwen, make_cache, ids, generate):
    batch = torch.cat((torch.zeros(1, 6, dtype=torch.int64), ids(14)), 1)
    batch = torch.cat((batch, ids(20, seed=1)))
    with pytest.raises(
        ValueError, match=r"attention_mask=None: expected the prompts' mask.*: rows \[0\] look left-padded"
    ):
        generate(qwen, batch, make_cache(qwen), attention_mask=(batch != 0).long())


@pytest.mark.parametrize("change", [torch.ones_like, lambda mask: mask.flip(0), lambda mask: mask[:, -5:]])
def test_a_mask_that_hides_less_than_the_padding_is_refused(qwen, make_cache, ids, generate, change):
    """All ones, another order of rows, fewer columns: each would count padding as the protected sink."""
    batch = ids(12, rows=3)
    batch[0, :4], batch[1, :7] = 0, 0
    mask = torch.ones_like(batch)
    mask[0, :4], mask[1, :7] = 0, 0
    generate(qwen, batch, make_cache(qwen, attention_mask=mask), attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask='of shape .*look left-padded further"):
        generate(qwen, batch, make_cache(qwen, attention_mask=change(mask)), attention_mask=mask)


def test_a_mask_of_another_batch_is_refused(qwen, make_cache, ids, generate):
    with pytest.raises(ValueError, match="attention_mask rows=2: expected a divisor of the batch of 3"):
        generate(qwen, ids(9, rows=3), make_cache(qwen, attention_mask=torch.ones(2, 9)))


def test_float64_models_are_refused(make_cache, qwen):
    states = torch.zeros(1, 2, 3, 64, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"dtype=torch.float64: expected bfloat16, float16 or float32"):
        make_cache(qwen, attention_mask=torch.ones(1, 3)).update(states, states, 0)


def test_only_removals_can_be_cropped(qwen, make_cache):
    cache = make_cache(qwen)
    with pytest.raises(ValueError, match="tokens_to_remove=7: expected 0 or minus the tokens to remove"):
        cache.crop(7)
