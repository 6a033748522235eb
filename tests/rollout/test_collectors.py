"""Both collectors over the model-free engine: the rules of §3 and §A.1, and what they refuse."""

import json

import pytest

from kv4rl.rewards.grader import Verdict
from kv4rl.rollout.collector import PromptsExhausted
from kv4rl.rollout.group import ListStream, Prompt
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.sync import SyncCollector
from kv4rl.rollout.trace import Trace


def write_score(group, request):
    group.scores[request.sibling] = float(len(request.tokens))
    group.verdicts[request.sibling] = Verdict(verl=1.0, last_box=0.0, has_box=False)


def build(make, kind=PartialCollector, *, config=None, stream=None, lengths=None, grade=write_score, trace=None):
    config = config or make.settings()
    engine = make.fake(config, lengths)
    stream = stream or make.prompts(200)
    return kind(engine, stream, config, grade=grade, eos_token_ids=(make.EOS,), trace=trace)


def by_prompt(table, default=3):
    return lambda request: table.get(request.prompt_id, default)


def test_a_wave_returns_exactly_t_groups_with_every_response_finished(make):
    collector = build(make, SyncCollector)
    for wave in range(3):
        groups = collector.collect().groups
        assert [group.prompt.prompt_id for group in groups] == [f"p{2 * wave}", f"p{2 * wave + 1}"]
        assert all(request.finished for group in groups for request in group.requests)
        assert collector.pool == ()
        collector.engine.update_weights()


def test_a_collection_tops_the_pool_up_to_the_floor_of_t_times_one_plus_beta(make):
    config = make.settings(groups_per_update=3, oversubscription=0.5)
    collector = build(make, config=config)
    first = collector.collect()
    assert first.stats.new_groups == 4  # floor(4.5)
    assert len(first.groups) == 3 and len(collector.pool) == 1
    assert collector.collect().stats.new_groups == 3


def test_the_oldest_complete_groups_train_and_later_complete_ones_stay(make):
    # p1 and p2 end in the first step; p3 in the same step as p0's siblings would have been too late.
    collector = build(make, lengths=by_prompt({"p0": 20, "p1": 2, "p2": 2, "p3": 2}), config=make.settings(age_limit=9))
    first = collector.collect()
    assert [group.prompt.prompt_id for group in first.groups] == ["p1", "p2"]
    assert collector.pool[0].prompt.prompt_id == "p0"
    collector.engine.update_weights()
    second = collector.collect()
    assert second.groups[0].order < second.groups[1].order
    assert [group.order for group in collector.pool] == sorted(group.order for group in collector.pool)


def test_complete_groups_beyond_the_quota_are_returned_later_without_another_step(make):
    config = make.settings(groups_per_update=1, oversubscription=2, max_active_requests=8, cache_pages=40)
    collector = build(make, config=config, stream=make.prompts(20, longest=1), lengths=by_prompt({}, default=2))
    assert [group.prompt.prompt_id for group in collector.collect().groups] == ["p0"]
    collector.engine.update_weights()
    again = collector.collect()
    assert [group.prompt.prompt_id for group in again.groups] == ["p1"]
    assert again.stats.steps == 0 and again.stats.trained_ages == (1,)


@pytest.mark.parametrize(("eta", "must_wait"), [(2, True), (3, False)])
def test_a_group_blocks_the_stop_from_age_eta_on_and_not_one_update_earlier(make, eta, must_wait):
    config = make.settings(age_limit=eta, max_response_tokens=400, workspace_tokens=500, cache_pages=80)
    lengths = by_prompt({"p0": 400}, default=2)
    collector = build(make, config=config, lengths=lengths)
    for _ in range(2):  # p0 gets its first token under version 0; two updates make its age 2
        assert "p0" not in [group.prompt.prompt_id for group in collector.collect().groups]
        collector.engine.update_weights()
    oldest = collector.pool[0]
    assert oldest.prompt.prompt_id == "p0" and oldest.age(collector.engine.policy_version) == 2
    collection = collector.collect()
    assert (collection.groups[0] is oldest) == must_wait
    assert (collection.stats.wait_steps > 0) == must_wait
    assert oldest.complete == must_wait


def test_age_counts_from_the_first_sampled_token_not_from_the_pool(make):
    config = make.settings(max_active_requests=2, age_limit=50)
    collector = build(make, config=config, lengths=by_prompt({}, default=4))
    collector.collect()
    untouched = collector.pool[-1]
    assert untouched.first_version is None and untouched.age(10) == 0


def test_the_age_of_a_group_is_that_of_its_earliest_sibling(make):
    collector = build(make, config=make.settings(max_active_requests=1), lengths=by_prompt({}))
    collector.collect()
    group = collector.pool[-1]
    assert not any(request.tokens for request in group.requests)
    group.requests[1].append(1, -0.5, 4)
    group.requests[0].append(1, -0.5, 9)
    assert (group.first_version, group.age(9)) == (4, 5)


def test_carried_responses_keep_their_tokens_and_record_the_version_of_each(make):
    collector = build(make, lengths=by_prompt({"p0": 20}, default=2), config=make.settings(age_limit=9))
    collector.collect()
    carried = collector.pool[0].requests[0]
    tokens, logps = list(carried.tokens), list(carried.sampler_logp)
    assert tokens and not carried.finished
    collector.engine.update_weights()
    while not carried.finished:
        collector.collect()
        collector.engine.update_weights()
    assert carried.tokens[: len(tokens)] == tokens and carried.sampler_logp[: len(logps)] == logps
    assert len(carried.tokens) == 20 and carried.versions == sorted(carried.versions)
    assert carried.versions[0] == 0 and carried.versions[-1] > 0


def test_resumed_prefixes_run_before_fresh_requests_and_older_groups_first(make):
    collector = build(make, lengths=by_prompt({"p0": 20}, default=4), config=make.settings(age_limit=9))
    collector.collect()
    collector.engine.update_weights()
    added = []
    add = collector.engine.add
    collector.engine.add = lambda request: (added.append((request.prompt_id, len(request.tokens))), add(request))
    collector.collect()
    started = [tokens > 0 for _, tokens in added]
    assert started == sorted(started, reverse=True) and 0 < sum(started) < len(started)
    assert added[0][0] == "p0"
    fresh = [prompt_id for prompt_id, tokens in added if tokens == 0]
    assert fresh == sorted(fresh)


def test_every_finished_response_is_graded_once_and_an_aborted_one_too(make):
    seen = []

    def grade(group, request):
        seen.append((request.prompt_id, request.sibling, request.finish_reason))
        write_score(group, request)
        if len(seen) == 1:
            collector.abort(next(r for g in collector.pool for r in g.requests if not r.finished))

    collector = build(make, grade=grade)
    trained = [r for _ in range(4) for group in collector.collect().groups for r in group.requests]
    assert len({entry[:2] for entry in seen}) == len(seen)
    assert {(r.prompt_id, r.sibling) for r in trained} <= {entry[:2] for entry in seen}
    assert [entry[2] for entry in seen].count("abort") == 1


def test_a_response_aborted_on_the_engine_itself_counts_at_the_next_collection(make):
    collector = build(make, lengths=by_prompt({"p0": 20}, default=2), config=make.settings(age_limit=9))
    collector.collect()
    for request in collector.pool[0].requests:
        collector.engine.abort(request)
    kept = [len(request.tokens) for request in collector.pool[0].requests]
    collector.engine.update_weights()
    first = collector.collect().groups[0]
    assert first.prompt.prompt_id == "p0" and first.scores == [float(n) for n in kept]


def test_a_raising_grader_leaves_the_engine_empty_and_the_response_to_be_graded_again(make):
    calls = []

    def grade(group, request):
        calls.append(request)
        if len(calls) == 3:
            raise OSError("grader down")
        write_score(group, request)

    collector = build(make, grade=grade)
    with pytest.raises(OSError, match="grader down"):
        collector.collect()
    collector.engine.check_drained()
    assert len(collector.collect().groups) == 2
    assert calls.count(calls[2]) == 2 and len(set(calls)) == len(calls) - 1


def test_the_stats_describe_the_interval(make):
    collector = build(make, lengths=by_prompt({"p0": 20}, default=2), config=make.settings(age_limit=9))
    first = collector.collect().stats
    assert (first.collection, first.policy_version, first.new_groups, first.carried_requests) == (0, 0, 4, 0)
    assert first.left_tokens == sum(len(r.tokens) for r in collector.pool[0].requests) > 0
    collector.engine.update_weights()
    second = collector.collect().stats
    assert (second.collection, second.policy_version, second.new_groups) == (1, 1, 2)
    assert second.carried_tokens == first.left_tokens and second.carried_requests == 2
    assert second.left_max_age >= 1


def test_the_trace_splits_the_context_into_carried_and_fresh_and_survives_csv(make, tmp_path):
    trace = Trace()
    collector = build(make, lengths=by_prompt({"p0": 20}, default=2), config=make.settings(age_limit=9), trace=trace)
    steps = 0
    for _ in range(3):
        steps += collector.collect().stats.steps
        collector.engine.update_weights()
    columns = trace.columns()
    assert len(trace) == steps
    assert (columns["carried_context_tokens"][columns["collection"] == 0] == 0).all()
    assert (columns["carried_context_tokens"] > 0).any()
    both = columns["carried_context_tokens"] + columns["fresh_context_tokens"]
    assert (both == columns["context_tokens"]).all() and (columns["fresh_context_tokens"] >= 0).all()
    assert set(trace.pure_decode()["kind"]) == {"decode"}
    trace.to_csv(tmp_path / "trace.csv")
    read = Trace.from_csv(tmp_path / "trace.csv").columns()
    assert all((read[name] == columns[name]).all() for name in columns)


def test_a_resumed_collector_continues_as_the_uninterrupted_one(make):
    lengths = lambda r: make.length_of(r.prompt_id, r.sibling, longest=60)
    config = make.settings(max_response_tokens=50, age_limit=2, workspace_tokens=100)
    whole = build(make, config=config, lengths=lengths)
    history = []
    for _ in range(6):
        history.append([group.to_state() for group in whole.collect().groups])
        whole.engine.update_weights()
    for cut in range(1, 5):
        first = build(make, config=config, lengths=lengths)
        for _ in range(cut):
            first.collect()
            first.engine.update_weights()
        saved = json.loads(json.dumps(first.state()))
        graded = []

        def grade(group, request, graded=graded):
            graded.append((request.prompt_id, request.sibling))
            write_score(group, request)

        resumed = build(make, config=config, lengths=lengths, grade=grade)
        resumed.engine.update_weights(version=cut)
        resumed.load_state(saved)
        assert [group.verdicts for group in resumed.pool] == [group.verdicts for group in first.pool]
        rest = []
        for _ in range(cut, 6):
            rest.append([group.to_state() for group in resumed.collect().groups])
            resumed.engine.update_weights()
        assert rest == history[cut:]
        before = {(r.prompt_id, r.sibling) for g in first.pool for r in g.requests if r.finished}
        assert not before & set(graded) and len(set(graded)) == len(graded)


def test_the_state_of_other_settings_is_refused_and_changes_nothing(make):
    saved = build(make).state()
    other = build(make, config=make.settings(oversubscription=2))
    before = other.state()
    with pytest.raises(ValueError, match=r"oversubscription=2: expected 1\.0"):
        other.load_state(saved)
    with pytest.raises(ValueError, match="collector='sync': expected 'partial'"):
        build(make, SyncCollector).load_state(saved)
    assert other.state() == before


def test_a_checkpoint_is_refused_while_a_verdict_is_still_on_its_way(make):
    collector = build(make, grade=lambda group, request: None, config=make.settings(age_limit=9))
    collector.collect()
    while not any(request.finished for group in collector.pool for request in group.requests):
        collector.collect()
    with pytest.raises(ValueError, match="score of request 'p"):
        collector.state()


def test_an_engine_older_than_the_pool_is_refused(make):
    collector = build(make, config=make.settings(age_limit=9), lengths=by_prompt({"p0": 20}, default=2))
    collector.engine.update_weights(version=5)
    collector.collect()
    resumed = build(make, config=make.settings(age_limit=9))
    resumed.load_state(collector.state())
    with pytest.raises(ValueError, match="policy_version=0: expected at least 5"):
        resumed.collect()


def test_an_ended_stream_says_how_many_prompts_were_wanted_and_loses_none(make):
    collector = build(make, stream=make.prompts(3))
    with pytest.raises(PromptsExhausted, match="after 3 of 4 new prompts wanted for a pool of 4 groups"):
        collector.collect()
    assert [group.prompt.prompt_id for group in collector.pool] == ["p0", "p1", "p2"]


def test_a_prompt_id_may_not_be_in_the_pool_twice(make):
    stream = ListStream([Prompt("same", [1], "1"), Prompt("same", [2], "2")])
    with pytest.raises(ValueError, match="prompt_id='same': expected an id that is not in the pool yet"):
        build(make, stream=stream).collect()


@pytest.mark.parametrize("tokens", [0, 13])
def test_a_prompt_outside_its_limits_is_named(make, tokens):
    with pytest.raises(ValueError, match=f"tokens of prompt 'odd'={tokens}: expected 1 to max_prompt_tokens=12"):
        build(make, stream=ListStream([Prompt("odd", [1] * tokens, "1")])).collect()


def test_a_request_that_can_never_fit_is_refused_and_nothing_stays_in_the_engine(make):
    collector = build(make, config=make.settings(cache_pages=1))
    with pytest.raises(ValueError, match="pages"):
        collector.collect()
    collector.engine.check_drained()


@pytest.mark.parametrize(
    ("field", "value"),
    [("groups_per_update", 0), ("responses_per_group", 0), ("oversubscription", -0.1), ("age_limit", 0)],
)
def test_quota_settings_out_of_range_are_named(make, field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        make.settings(**{field: value})
