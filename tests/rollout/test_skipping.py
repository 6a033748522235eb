"""The event-skipping engine against the stepping one: the same steps, row by row, under the same collectors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.config import RolloutConfig
from kv4rl.engine.fake import FakeEngine
from kv4rl.engine.request import Request
from kv4rl.engine.scheduler import Limits
from kv4rl.rollout.group import ListStream, Prompt
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.replicas import Replicas
from kv4rl.rollout.skipping import CountingScheduler, PageCount, SkippingEngine
from kv4rl.rollout.sync import SyncCollector
from kv4rl.rollout.trace import COLUMNS, Trace

EOS = 3
COMPARED = [name for name in COLUMNS if name != "step_ms"]


@st.composite
def cases(draw):
    """Small configurations where every mechanism bites: few pages, chunked prefill, carried work, caps."""
    slots = draw(st.integers(1, 6))
    cap = draw(st.integers(1, 60))
    longest_prompt = draw(st.integers(1, 40))
    smallest_pool = -(-(longest_prompt + cap) // 16)
    config = RolloutConfig(
        collector=draw(st.sampled_from(["partial", "sync"])),
        groups_per_update=draw(st.integers(1, 3)),
        responses_per_group=draw(st.integers(1, 3)),
        oversubscription=draw(st.sampled_from([0.0, 0.5, 1.0])),
        age_limit=draw(st.integers(1, 3)),
        max_prompt_tokens=longest_prompt,
        max_response_tokens=cap,
        max_active_requests=slots,
        step_tokens=slots + draw(st.integers(0, 40)),
        workspace_tokens=longest_prompt + cap + draw(st.integers(0, 60)),
        cache_pages=smallest_pool + draw(st.integers(0, 12)),
    )
    table = draw(st.lists(st.integers(1, 80), min_size=7, max_size=7))
    prompts = draw(st.lists(st.integers(1, longest_prompt), min_size=3, max_size=3))
    return config, table, prompts


def run(kind, config, table, prompts, rounds=3, **more):
    def lengths(request):
        return table[(int(request.prompt_id[1:]) * 5 + request.sibling * 3) % len(table)]

    trace = Trace()
    limits = {"slots": config.max_active_requests, "pages": config.cache_pages, "step_tokens": config.step_tokens}
    limits |= {"workspace_tokens": config.workspace_tokens, "max_prompt_tokens": config.max_prompt_tokens}
    if kind is SkippingEngine:
        engine, own_trace = kind(lengths, bytes_per_page=5, trace=trace, **limits, **more), None
    else:
        engine, own_trace = kind(lengths, bytes_per_page=5, **limits), trace
    stream = ListStream([Prompt(f"p{i}", [1] * prompts[i % len(prompts)], "") for i in range(60)])
    collector = {"partial": PartialCollector, "sync": SyncCollector}[config.collector]
    collect = collector(engine, stream, config, grade=None, eos_token_ids=(EOS,), trace=own_trace)
    trained = []
    for _ in range(rounds):
        trained += collect.collect().groups
        engine.check_drained()
        engine.update_weights()
    return trace.columns(), trained, collect.pool


@settings(deadline=None, max_examples=200)
@given(cases())
def test_it_agrees_with_the_stepping_engine_step_by_step(case):
    stepped, skipped = run(FakeEngine, *case), run(SkippingEngine, *case)
    for name in COMPARED:
        assert stepped[0][name].tolist() == skipped[0][name].tolist(), name
    for one, other in zip(stepped[1:], skipped[1:], strict=True):
        assert [describe(group) for group in one] == [describe(group) for group in other]


def describe(group):
    return group.order, [(len(r.tokens), r.versions, r.finish_reason, r.preemptions) for r in group.requests]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 60))
def test_pages_of_quiet_steps_are_those_of_growing_one_by_one(contexts, steps):
    scheduler = CountingScheduler(PageCount(1000), Limits(4, 4, 100, 100), lambda request: 1)
    held = [-(-context // 16) for context in contexts]
    slots = np.arange(len(contexts))
    for slot, pages in enumerate(held):
        scheduler.table.set(slot, [0] * pages)
    scheduler.table.context[slots] = contexts
    scheduler._slots = slots
    expected = []
    for step in range(steps):
        short = [slot for slot in slots if held[slot] * 16 < contexts[slot] + step]
        for slot in short:
            held[slot] += 1
        expected.append(len(short))
    assert scheduler.new_pages(steps).tolist() == expected
    scheduler.grow(steps)
    assert scheduler.table.held[slots].tolist() == held
    assert scheduler.table.context[slots].tolist() == [context + steps for context in contexts]


def test_responses_without_an_end_token_run_to_their_cap():
    config = RolloutConfig(
        groups_per_update=1, responses_per_group=2, max_prompt_tokens=4, max_response_tokens=30, max_active_requests=4,
        step_tokens=16, workspace_tokens=64, cache_pages=20,
    )  # fmt: skip
    engine = SkippingEngine(lambda request: 5, slots=4, pages=20, step_tokens=16, workspace_tokens=64)
    stream = ListStream([Prompt(f"p{i}", [1, 2], "") for i in range(4)])
    groups = PartialCollector(engine, stream, config, grade=None, eos_token_ids=()).collect().groups
    assert [(len(r.tokens), r.finish_reason) for r in groups[0].requests] == [(30, "length")] * 2


def test_step_times_come_from_the_cost_model_and_add_up():
    case = (
        RolloutConfig(
            collector="sync", groups_per_update=2, responses_per_group=3, max_prompt_tokens=9, max_response_tokens=50,
            max_active_requests=4, step_tokens=20, workspace_tokens=80, cache_pages=30,
        ),
        [40, 3, 17, 25, 6, 9, 50],
        [9, 4, 1],
    )  # fmt: skip
    price = lambda active, context, prefill: 1.0 + 0.5 * active + 0.01 * context + 0.1 * prefill
    columns, *_ = run(SkippingEngine, *case, cost=price)
    assert len(columns["step_ms"]) > 100
    expected = price(columns["active_requests"], columns["context_tokens"], columns["prefill_tokens"])
    assert columns["step_ms"] == pytest.approx(expected, rel=1e-12)


def two_replicas(costs, trace=None, lengths=lambda request: 10):
    engines = [
        SkippingEngine(lengths, slots=8, pages=60, cost=cost, trace=trace, replica=replica)
        for replica, cost in enumerate(costs)
    ]
    return Replicas(engines)


def constant(milliseconds):
    return lambda active, context, prefill: np.full(np.shape(active), float(milliseconds))


def test_replicas_share_the_work_and_agree_on_the_time():
    trace = Trace()
    replicas = two_replicas([constant(1), constant(2)], trace, lengths=lambda r: 20 + r.sibling)
    config = RolloutConfig(
        groups_per_update=4, responses_per_group=4, oversubscription=0, max_prompt_tokens=4, max_response_tokens=64,
        max_active_requests=8, cache_pages=60,
    )  # fmt: skip
    stream = ListStream([Prompt(f"p{i}", [1, 2], "") for i in range(20)])
    collector = PartialCollector(replicas, stream, config, grade=None, eos_token_ids=(EOS,))
    for _ in range(2):
        assert len(collector.collect().groups) == 4
        assert len({engine.clock_ms for engine in replicas.engines}) == 1
        replicas.update_weights()
    columns = trace.columns()
    # Requests alternate: replica 0 gets siblings 0 and 2, so its longest has 22 tokens, the first from its prefill.
    decode_steps = [((columns["replica"] == r) & (columns["decode_tokens"] > 0)).sum() for r in (0, 1)]
    assert decode_steps == [2 * 21, 2 * 22]
    # The slow replica takes twice as long for the same steps: an interval lasts as long as the slow one.
    slow = columns["step_ms"][columns["replica"] == 1].sum()
    assert replicas.clock_ms == pytest.approx(slow)


def test_when_one_replica_meets_the_quota_the_other_stops_at_the_same_time():
    # Replica 0 holds the short responses, replica 1 the long ones and steps at half the speed.
    trace = Trace()
    lengths = lambda r: 30 if r.prompt_id in ("p0", "p2") else 400
    replicas = two_replicas([constant(1), constant(2)], trace, lengths=lengths)
    config = RolloutConfig(
        groups_per_update=2, responses_per_group=1, oversubscription=1, max_prompt_tokens=4, max_response_tokens=500,
        max_active_requests=8, cache_pages=60,
    )  # fmt: skip
    stream = ListStream([Prompt(f"p{i}", [1, 2], "") for i in range(20)])
    collector = PartialCollector(replicas, stream, config, grade=None, eos_token_ids=(EOS,))
    collector.collect()
    steps = [int((trace.column("replica") == replica).sum()) for replica in (0, 1)]
    assert steps == [30, 15]
    carried = [r for group in collector.pool for r in group.requests]
    assert [len(request.tokens) for request in carried] == [15, 15]


def test_replicas_abort_what_none_of_them_holds():
    """Paused between collections, or finished: as `Engine.abort` says of any state."""
    replicas = two_replicas([constant(1), constant(1)], lengths=lambda r: 3)
    done, paused = (Request(f"p{i}", 0, [1, 2], 8, (EOS,)) for i in range(2))
    replicas.add(done)
    while replicas.has_unfinished:
        replicas.step()
    replicas.add(paused)
    assert replicas.pause() == [paused]
    for request in (done, paused):
        replicas.abort(request)
    assert (done.finish_reason, paused.finish_reason) == ("eos", "abort")


def test_replicas_keep_count_of_aborted_requests():
    replicas = two_replicas([constant(1), constant(1)], lengths=lambda r: 10 + 5 * r.sibling)
    config = RolloutConfig(
        groups_per_update=2, responses_per_group=2, oversubscription=0, max_prompt_tokens=4, max_response_tokens=64,
        max_active_requests=8, cache_pages=60,
    )  # fmt: skip
    stream = ListStream([Prompt(f"p{i}", [1, 2], "") for i in range(20)])

    def grade(group, request):
        if request.finish_reason != "abort":
            open_ = [r for g in collector.pool for r in g.requests if not r.finished]
            if open_:
                collector.abort(open_[0])

    collector = PartialCollector(replicas, stream, config, grade=grade, eos_token_ids=(EOS,))
    groups = collector.collect().groups
    reasons = sorted(r.finish_reason for group in groups for r in group.requests)
    assert "abort" in reasons and not replicas.has_unfinished
    with pytest.raises(ValueError, match="at least one replica"):
        Replicas([])
