"""Classic mistakes, put into the reference one at a time: the comparison with float64 must notice each of them."""

import pytest
import torch

from kv4rl.attention import reference
from kv4rl.attention.regions import main_region
from kv4rl.config import KVConfig


def patched(name):
    """A decorator: the function replaces `reference.<name>`, which it gets as its first argument."""

    def mark(mutant):
        original = getattr(reference, name)
        return name, lambda *arguments: mutant(original, *arguments)

    return mark


@patched("unpack_k4")
def wrong_nibble_order_of_keys(unpack, packed):
    return unpack((packed << 4) | (packed >> 4))


@patched("unpack_v4")
def wrong_nibble_order_of_values(unpack, packed):
    return unpack((packed << 4) | (packed >> 4))


@patched("main_region")
def window_off_by_one(_, context_tokens, s, w):
    start, stop = main_region(context_tokens, s, w)
    return start, torch.minimum(stop + 1, context_tokens)


@patched("main_region")
def window_one_short(_, context_tokens, s, w):
    start, stop = main_region(context_tokens, s, w)
    return start, torch.maximum(stop - 1, start)


@patched("main_region")
def double_counted_sink(_, context_tokens, s, w):
    return torch.zeros_like(context_tokens), main_region(context_tokens, s, w)[1]


@patched("live_pages")
def unmasked_tail(live_pages, *arguments):
    pages = live_pages(*arguments)
    return pages._replace(valid=torch.ones_like(pages.valid))


@patched("metadata")
def value_scale_of_the_tail_not_zeroed(_, values, pages):
    return values.float().unsqueeze(-2)


@patched("prepare_query")
def sum_of_the_unquantised_query(prepare, q, kv_heads):
    query = prepare(q, kv_heads)
    rotated_sum = reference.rotate(q).sum(-1).unflatten(1, (kv_heads, -1))
    return query._replace(total=rotated_sum / query.scale)


@patched("rotate")
def unrotated_query(_, q):
    return q.float()


@patched("merge_state")
def normaliser_in_base_two(merge, o_a, z_a, o_b, z_b):
    return merge(o_a, z_a * 1.442695, o_b, z_b)


@patched("segment_sum")
def neighbours_added_up(segment_sum, values, segments, count):
    return segment_sum(values, (segments + (segments % 2 == 0)).clamp(max=count - 1), count)


MUTANTS = {name: value for name, value in list(globals().items()) if isinstance(value, tuple)}


@pytest.fixture(scope="module")
def case(make_case):
    """Lengths that end in mid-page, keys with a mean (so that the affine offset matters), some protection."""

    def edit(k, v):
        for vectors in k:
            vectors[:, :, 0] += 3 * vectors.shape[-1] ** 0.5  # rotated: 3 on every channel

    return make_case([39, 90, 151, 61], KVConfig("kv4rl", 5, 3), edit=edit)


def test_the_unchanged_reference_passes(case):
    assert case.follows_oracle(1.0)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_the_comparison_notices(case, mutant, monkeypatch):
    monkeypatch.setattr(reference, *mutant)
    assert not case.follows_oracle(1.0)
