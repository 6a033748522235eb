"""Steps launched before their predecessor's tokens are known: the same rollout as without, whatever happens between."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.config import PRECISIONS
from kv4rl.engine.engine import NonFiniteLogits
from kv4rl.engine.fake import FakeEngine
from kv4rl.engine.protocol import StepStats
from kv4rl.engine.request import Request

EOS = (7,)
SHOWN = [field.name for field in fields(StepStats) if not field.name.endswith("_ms")]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60), st.integers(0, 90), st.integers(0, 3)),
        st.tuples(st.just("step"), st.integers(1, 40)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("pause")),
    ),
    min_size=3,
    max_size=25,
)

SIZES = st.tuples(st.integers(1, 6), st.integers(5, 14), st.integers(0, 40))  # slots, pages, spare step tokens


class Run:
    """A model-free engine under operations; what could be seen of it after each of them."""

    def __init__(self, overlap: bool, eos: tuple[int, ...], slots: int, pages: int, step_tokens: int):
        room = 16 * pages
        self.engine = FakeEngine(
            lambda request: 1 + (31 * request.sibling) % 70, slots=slots, pages=pages, overlap=overlap,
            step_tokens=slots + step_tokens, workspace_tokens=room, max_prompt_tokens=room,
        )  # fmt: skip
        self.eos, self.room = eos, room
        self.requests: list[Request] = []
        self.seen = []
        self.launched_ahead = 0

    def add(self, prompt: int, cap: int, priority: int) -> None:
        made = len(self.requests)
        cap = min(cap, self.room - prompt)
        self.requests.append(Request(f"p{made}", made, list(range(prompt)), cap, self.eos, (priority,)))
        self.engine.add(self.requests[-1])

    def step(self, count: int) -> None:
        for _ in range(count):
            finished = self.engine.step()
            self.launched_ahead += self.engine._flight is not None
            self.seen.append(([r.label for r in finished], [getattr(self.engine.last_step, name) for name in SHOWN]))

    def abort(self, index: int) -> None:
        if self.requests:
            self.engine.abort(self.requests[index % len(self.requests)])

    def pause(self) -> None:
        paused = self.engine.pause()
        self.engine.check_drained()
        self.engine.update_weights()
        for request in paused:
            self.engine.add(request)

    def perform(self, operations) -> "Run":
        for name, *arguments in operations:
            getattr(self, name)(*arguments)
            self.seen.append([(r.tokens[:], r.sampler_logp[:], r.versions[:], r.status) for r in self.requests])
        while self.engine.has_unfinished:
            self.step(1)
        self.engine.check_drained()
        return self


@settings(deadline=None, max_examples=150)
@given(OPERATIONS, SIZES)
def test_where_ends_are_known_every_step_is_the_one_without_overlap(operations, sizes):
    """Finished requests, statistics, tokens, versions and preemptions of every step, in any interleaving."""
    plain, ahead = (Run(overlap, (), *sizes).perform(operations) for overlap in (False, True))
    assert ahead.seen == plain.seen


@settings(deadline=None, max_examples=150)
@given(OPERATIONS, SIZES)
def test_sampled_ends_give_the_same_responses(operations, sizes):
    """A slot may come free a step later, so an abort may find a token more or less; nothing else changes."""
    plain, ahead = (Run(overlap, EOS, *sizes).perform(operations) for overlap in (False, True))
    for expected, found in zip(plain.requests, ahead.requests, strict=True):
        common = min(len(expected.tokens), len(found.tokens))
        assert found.tokens[:common] == expected.tokens[:common]
        assert found.sampler_logp[:common] == expected.sampler_logp[:common]
        if "abort" not in (found.finish_reason, expected.finish_reason):
            assert (found.tokens, found.finish_reason) == (expected.tokens, expected.finish_reason)


def test_steps_are_launched_ahead_while_requests_decode():
    run = Run(True, (), 4, 14, 40)
    run.perform([("add", 10, 30, 0), ("add", 10, 30, 0)])
    steps = sum(kind == "decode" for _, (kind, *_) in (seen for seen in run.seen if isinstance(seen, tuple)))
    assert steps == 29 and run.launched_ahead == steps - 1


def roll(engine, prompts, eos=()):
    requests = [Request(f"p{i}", 0, prompt, 9 + 3 * i, eos, (i,)) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    shown = []
    while engine.has_unfinished:
        finished = engine.step()
        shown.append(([r.label for r in finished], [getattr(engine.last_step, name) for name in SHOWN]))
    engine.check_drained()
    return requests, shown


@pytest.mark.parametrize("buckets", [None, (3, 5, 8)])
@pytest.mark.parametrize("pages", [64, 11])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_engine_computes_the_same_bits(make_engine, prompts, precision, pages, buckets):
    made = lambda overlap: make_engine(precision, eos=(), cache_pages=pages, buckets=buckets, overlap=overlap)
    (plain, expected), (ahead, found) = (roll(made(overlap), prompts) for overlap in (False, True))
    assert found == expected
    assert [r.tokens for r in ahead] == [r.tokens for r in plain]
    assert [r.sampler_logp for r in ahead] == [r.sampler_logp for r in plain]


def test_a_row_that_ended_does_not_write_into_pages_given_away(make_engine, prompts):
    """Many sampled ends over few pages: every page changes hands while a useless row may still write to it."""
    eos = tuple(range(3, 13))
    made = lambda overlap: make_engine("kv4rl", eos=eos, cache_pages=12, overlap=overlap)
    many = [prompt[:40] for prompt in prompts * 5]
    (plain, _), (ahead, _) = (roll(made(overlap), many, eos) for overlap in (False, True))
    assert sum(r.finish_reason == "eos" for r in plain) > 20
    assert [(r.tokens, r.finish_reason) for r in ahead] == [(r.tokens, r.finish_reason) for r in plain]


def test_forced_ends_are_known_ahead(make_engine, prompts):
    made = lambda overlap: make_engine(eos=(3,), overlap=overlap, forced_lengths=lambda request: 4, cache_pages=12)
    (plain, expected), (ahead, found) = (roll(made(overlap), prompts * 2, (3,)) for overlap in (False, True))
    assert found == expected and [r.tokens for r in ahead] == [r.tokens for r in plain]
    assert all(len(r.tokens) == 4 for r in ahead)


def test_a_step_that_raises_can_be_taken_again(make_engine, prompts):
    engine, twin = (make_engine(eos=(), overlap=True) for _ in range(2))
    expected, _ = roll(twin, prompts[:3])
    requests = [Request(f"p{i}", 0, prompt, 9 + 3 * i, (), (i,)) for i, prompt in enumerate(prompts[:3])]
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    head = engine.decoder.head_weight.detach().clone()
    engine.decoder.head_weight.data.fill_(torch.nan)
    engine.step()  # was launched before
    with pytest.raises(NonFiniteLogits, match="request 'p0' sibling 0 are not finite at engine step 6"):
        engine.step()
    engine.decoder.head_weight.data.copy_(head)
    while engine.has_unfinished:
        engine.step()
    assert [r.tokens for r in requests] == [r.tokens for r in expected]


def test_weights_may_change_when_all_that_is_under_way_has_ended(make_engine, make_decoder):
    """The last response ends by a sampled token: what was launched beyond it is nobody's."""
    engine = make_engine(eos=tuple(range(1, 61)), overlap=True)
    requests, _ = roll(engine, [[5] * 20], engine.eos_token_ids)
    assert requests[0].finish_reason == "eos"
    engine.update_weights(dict(make_decoder(seed=1).named_parameters()), 1)
    fresh = make_engine(decoder=make_decoder(seed=1), eos=tuple(range(1, 61)), overlap=True)
    assert roll(engine, [[6] * 9])[0][0].tokens == roll(fresh, [[6] * 9])[0][0].tokens
