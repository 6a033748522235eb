"""Bugs other engines had in the life of a request, each under the name of its symptom (model-free)."""

import json

import pytest

from kv4rl.engine.protocol import Engine
from kv4rl.engine.request import Request, RequestStatus


def snapshot(request):
    return list(request.tokens), list(request.sampler_logp), list(request.versions)


def step_until(engine, request, status):
    while request.status is not status:
        engine.step()


def test_the_fake_engine_satisfies_the_protocol(make_fake):
    assert isinstance(make_fake(), Engine)


def test_a_resumed_response_does_not_get_the_full_token_budget_again(make_fake, make_request, run):
    """slime #2260, verl #7207: the cap counts once over pause, checkpoint and preemption."""
    engine = make_fake(length=10**6)
    request = make_request(cap=40)
    engine.add(request)
    for _ in range(3):
        for _ in range(9):
            engine.step()
        assert engine.pause() == [request]
        assert request.remaining_tokens == 40 - len(request.tokens)
        request = Request.from_state(json.loads(json.dumps(request.to_state())))
        engine.add(request)
    run(engine)
    assert len(request.tokens) == 40
    assert request.finish_reason == "length"


def test_arrays_of_unequal_length_are_caught_at_append(make_request):
    """slime #1440 and #2207."""
    request = make_request()
    request.append(1, -0.5, 0)
    request.sampler_logp.append(-1.0)
    with pytest.raises(RuntimeError, match="differ in length"):
        request.append(2, -0.5, 0)


def test_a_token_after_the_end_is_refused(make_request):
    request = make_request(cap=5)
    request.append(7, -0.1, 0)
    assert (request.finish_reason, request.tokens) == ("eos", [7])
    with pytest.raises(RuntimeError, match="has finished"):
        request.append(1, -0.1, 0)


def test_end_of_sequence_on_the_last_allowed_token_counts_as_eos(make_request):
    request = make_request(cap=1)
    request.append(7, -0.1, 0)
    assert request.finish_reason == "eos"


@pytest.mark.parametrize("logp", [float("nan"), float("inf"), float("-inf")])
def test_a_log_probability_that_is_not_finite_is_never_recorded(make_request, logp):
    request = make_request()
    with pytest.raises(ValueError, match="finite log-probability for request 'p' sibling 0"):
        request.append(1, logp, 0)
    assert request.tokens == []


def test_state_survives_a_checkpoint_exactly(make_request):
    request = make_request("a", 3, [1, 2], 9, (7, 8), (4, 3))
    request.append(5, -0.25, 2)
    request.preemptions = 2
    again = Request.from_state(json.loads(json.dumps(request.to_state())))
    assert again.to_state() == request.to_state()
    assert (again.priority, again.eos_token_ids, again.status) == ((4, 3), (7, 8), RequestStatus.WAITING)
    request.append(8, -0.25, 2)
    done = Request.from_state(request.to_state())
    assert done.finished and done.status is RequestStatus.FINISHED


def test_a_checkpoint_with_arrays_of_unequal_length_is_refused(make_request):
    state = make_request().to_state() | {"tokens": [1]}
    with pytest.raises(ValueError, match="one length for all three"):
        Request.from_state(state)


def test_abort_while_queued_or_preempted_does_not_return_an_empty_result(make_fake, make_request):
    """sglang #11673, #11093: everything generated survives an abort in any state."""
    engine = make_fake(length=10**6, slots=2, pages=7)
    first = make_request("first", cap=60, prompt=20, priority=(0,))
    second = make_request("second", cap=60, prompt=20, priority=(1,))
    for request in (first, second):
        engine.add(request)
    step_until(engine, second, RequestStatus.PREEMPTED)
    before = snapshot(second)
    assert before[0]
    engine.abort(second)
    assert snapshot(second) == before
    assert (second.status, second.finish_reason) == (RequestStatus.ABORTED, "abort")

    step_until(engine, first, RequestStatus.DECODING)
    before = snapshot(first)
    engine.abort(first)
    assert snapshot(first) == before
    engine.check_drained()


@pytest.mark.parametrize("status", [RequestStatus.WAITING, RequestStatus.PREFILLING, RequestStatus.DECODING])
def test_abort_and_pause_free_everything_in_every_state(make_fake, make_request, status):
    for end in ("abort", "pause"):
        engine = make_fake(step_tokens=8, slots=1)
        request, carried = (
            make_request("a", prompt=30, priority=(0,)),
            make_request("carried", prompt=30, priority=(-1,)),
        )
        for token in range(20, 25):
            carried.append(token, -0.5, 0)
        before = snapshot(carried)
        for r in (request, carried):
            engine.add(r)
        if status is not RequestStatus.WAITING:
            step_until(engine, carried, status)
        if end == "abort":
            engine.abort(request)
            engine.abort(carried)
            assert not engine.has_unfinished
            assert engine.step() == []
        else:
            assert engine.pause() == [carried, request]
            assert carried.status is request.status is RequestStatus.WAITING
        assert tuple(kept[:5] for kept in snapshot(carried)) == before
        engine.check_drained()


def test_abort_of_a_finished_or_paused_request(make_fake, make_request, run):
    engine = make_fake(length=3)
    request, held = make_request("a"), make_request("b")
    engine.add(request)
    run(engine)
    engine.abort(request)
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, "eos")
    engine.add(held)
    engine.pause()
    engine.abort(held)
    assert (held.status, held.finish_reason) == (RequestStatus.ABORTED, "abort")


def test_every_request_is_returned_exactly_once(make_fake, make_request, run):
    engine = make_fake(length=5)
    requests = [make_request(f"p{i}", prompt=1 + 3 * i) for i in range(9)]
    for request in requests:
        engine.add(request)
    assert sorted(r.prompt_id for r in run(engine)) == sorted(r.prompt_id for r in requests)
    assert engine.step() == []


@pytest.mark.parametrize(
    ("prompt", "cap", "sizes", "numbers"),
    [
        (20, 500, {"pages": 10}, ("33", "10")),
        (65, 10, {"max_prompt_tokens": 64}, ("65", "64")),
        (20, 100, {"workspace_tokens": 100}, ("119", "100")),
    ],
)
def test_a_request_that_can_never_fit_does_not_block_the_queue(
    make_fake, make_request, run, prompt, cap, sizes, numbers
):
    """vLLM #39734, nano-vllm #274: refused when added, with both numbers; the others run on."""
    engine = make_fake(**sizes)
    small = make_request("small", prompt=4, cap=20)
    engine.add(small)
    with pytest.raises(ValueError) as error:
        engine.add(make_request("large", prompt=prompt, cap=cap))
    assert all(number in str(error.value) for number in numbers)
    assert "'large'" in str(error.value)
    assert run(engine) == [small]


def test_a_request_that_fits_exactly_is_accepted(make_fake, make_request, run):
    engine = make_fake(length=10**6, pages=4, workspace_tokens=63, max_prompt_tokens=20)
    request = make_request(prompt=20, cap=44)
    engine.add(request)
    run(engine)
    assert len(request.tokens) == 44


def test_a_request_cannot_be_added_twice_or_after_its_end(make_fake, make_request, run):
    engine = make_fake(length=3)
    request = make_request()
    engine.add(request)
    with pytest.raises(ValueError, match="already in the engine"):
        engine.add(request)
    run(engine)
    with pytest.raises(ValueError, match="status='finished'"):
        engine.add(request)


def test_an_empty_response_carries_no_token_and_still_counts(make_fake, make_request, run):
    """verl #6310: a response of no tokens is finished, returned once, and holds nothing."""
    engine = make_fake()
    empty, other = make_request("empty", cap=0), make_request("other", cap=2)
    engine.add(empty)
    assert engine.pause() == [empty]
    for request in (empty, other):
        engine.add(request)
    finished = run(engine)
    assert finished[0] is empty and set(finished) == {empty, other}
    assert (empty.tokens, empty.finish_reason, empty.status) == ([], "length", RequestStatus.FINISHED)
    engine.check_drained()


@pytest.mark.parametrize("priority", [3, None, ("late",), [1]])
def test_a_priority_that_orders_nothing_is_refused_and_leaves_no_trace(make_fake, make_request, run, priority):
    """It stayed among the requests and in no queue: the engine had unfinished work for ever."""
    engine, good, bad = make_fake(length=3), make_request("good"), make_request("bad")
    engine.add(good)
    bad.priority = priority
    with pytest.raises(ValueError, match=r"priority of request 'bad' sibling \d+=.*expected a tuple of numbers"):
        engine.add(bad)
    assert run(engine) == [good] and not engine.has_unfinished
    engine.check_drained()


@pytest.mark.parametrize("wrong", [3, None, "3", (1.5,)])
def test_end_of_sequence_ids_that_are_no_list_of_ids_are_refused_at_once(wrong):
    """An int was taken, and broke a step after it had recorded tokens."""
    with pytest.raises(ValueError, match="eos_token_ids of request 'p' sibling 0"):
        Request("p", 0, [5], 4, wrong)
    assert Request("p", 0, [5], 4, [1, 2]).eos_token_ids == (1, 2)


def test_an_empty_prompt_is_refused(make_fake, make_request):
    with pytest.raises(ValueError, match="at least one token"):
        make_fake().add(make_request(prompt=[]))


def test_the_policy_version_is_recorded_with_every_token(make_fake, make_request, run):
    engine = make_fake(length=25)
    request = make_request()
    engine.add(request)
    for version in (1, 5):
        for _ in range(6):
            engine.step()
        engine.pause()
        engine.update_weights(version=version)
        engine.add(request)
    run(engine)
    assert request.versions == sorted(request.versions)
    assert set(request.versions) == {0, 1, 5}


def test_memory_is_not_released_while_requests_still_run(make_fake, make_request):
    """miles #1335: weights change only with nothing resident."""
    engine = make_fake()
    engine.add(make_request())
    engine.step()
    with pytest.raises(RuntimeError, match="1 requests still hold K/V of policy_version 0"):
        engine.update_weights()
    engine.pause()
    engine.update_weights()
    assert engine.policy_version == 1
    for version in (0, 2.5, "2"):
        with pytest.raises(ValueError, match="at least 1"):
            engine.update_weights(version=version)


def test_a_leak_is_named(make_fake, make_request):
    engine = make_fake()
    engine.add(make_request(prompt=4))
    engine.step()
    with pytest.raises(RuntimeError, match="1 slots, 1 pages"):
        engine.check_drained()


def test_more_slots_than_step_tokens_are_refused(make_fake):
    with pytest.raises(ValueError, match=r"step_tokens=8: expected at least max_active_requests \(9\)"):
        make_fake(slots=9, step_tokens=8)


def test_step_stats_count_what_the_step_held(make_fake, make_request):
    engine = make_fake(bytes_per_page=160)
    engine.add(make_request(prompt=15))
    engine.step()
    stats = engine.last_step
    assert (stats.kind, stats.prefill_tokens, stats.active_requests, stats.context_tokens) == ("prefill", 15, 0, 0)
    assert (stats.used_pages, stats.resident_kv_bytes) == (1, 0)  # nominal: prefill holds no decode context
    engine.step()
    assert (engine.last_step.kind, engine.last_step.context_tokens, engine.last_step.used_pages) == ("decode", 16, 1)
    engine.step()
    assert (engine.last_step.context_tokens, engine.last_step.used_pages) == (17, 2)
    assert engine.last_step.resident_kv_bytes == 170  # ten bytes a position, pages not rounded up


def test_a_cost_model_replaces_the_clock(make_fake, make_request):
    engine = make_fake(cost=lambda stats: 2.0 + stats.context_tokens)
    engine.add(make_request(prompt=15))
    engine.step()
    engine.step()
    assert engine.last_step.step_ms == 18.0
