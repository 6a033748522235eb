"""What holds for every workload, and for every interleaving of finish, abort, preempt, update and resume."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.config import RolloutConfig
from kv4rl.engine.fake import FakeEngine
from kv4rl.rollout.group import ListStream, Prompt
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.sync import SyncCollector

EOS = 7
CAP = 40


@st.composite
def workloads(draw):
    """A configuration, prompt lengths, response lengths, and what happens between and inside the collections."""
    slots = draw(st.integers(1, 6))
    config = RolloutConfig(
        groups_per_update=draw(st.integers(1, 3)),
        responses_per_group=draw(st.integers(1, 3)),
        oversubscription=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        age_limit=draw(st.integers(1, 3)),
        max_prompt_tokens=20,
        max_response_tokens=CAP,
        max_active_requests=slots,
        step_tokens=slots + draw(st.integers(0, 30)),
        workspace_tokens=draw(st.integers(20 + CAP, 200)),
        cache_pages=draw(st.integers(4, 14)),  # 20 + 40 tokens need 4 pages: the smallest pool preempts all the time
    )
    seed = draw(st.integers(0, 2**20))
    events = draw(st.lists(st.sampled_from(["collect", "update", "resume", "abort", "abort in hook"]), max_size=12))
    return config, seed, [*events, "collect", "update", "collect"]


class Run:
    """One collector under a script of events, with everything the invariants need to look back on."""

    def __init__(self, kind, config, seed):
        self.kind, self.config, self.seed = kind, config, seed
        self.stream = self._stream()
        self.trained, self.graded, self.aborted = [], [], 0
        self.abort_next = False
        self.collector = self._collector()

    def _stream(self):
        mix = [(self.seed * 31 + i * 17) % 20 + 1 for i in range(400)]
        return ListStream([Prompt(f"p{i}", [1] * tokens, str(i)) for i, tokens in enumerate(mix)])

    def length(self, request) -> int:
        text = int(request.prompt_id[1:]) * 1000003 + request.sibling * 7919 + self.seed
        draw = (text * 2654435761) % 2**32
        return 1 + draw % 5 if draw % 3 else 1 + draw % (CAP + 10)

    def _collector(self):
        config = self.config
        engine = FakeEngine(
            self.length,
            slots=config.max_active_requests,
            pages=config.cache_pages,
            step_tokens=config.step_tokens,
            workspace_tokens=config.workspace_tokens,
            max_prompt_tokens=config.max_prompt_tokens,
        )
        return self.kind(engine, self.stream, config, grade=self.grade, eos_token_ids=(EOS,))

    def grade(self, group, request):
        assert request.finished
        self.graded.append((request.prompt_id, request.sibling))
        group.scores[request.sibling] = float(len(request.tokens))
        if self.abort_next:
            self.abort_next = False
            self.abort(lambda request: self.collector.abort(request))

    def abort(self, how):
        finished = set(self.graded)
        for group in self.collector.pool:
            for request in group.requests:
                if not request.finished and (request.prompt_id, request.sibling) not in finished:
                    self.aborted += 1
                    return how(request)

    def resume(self):
        saved = json.loads(json.dumps(self.collector.state()))
        version = self.collector.engine.policy_version
        self.stream = self._stream()
        self.collector = self._collector()
        self.collector.engine.update_weights(version=version)
        self.collector.load_state(saved)

    def do(self, event):
        if event == "collect":
            self.collect()
        elif event == "update":
            self.collector.engine.update_weights()
        elif event == "resume":
            self.resume()
        elif event == "abort":
            self.abort(lambda request: self.collector.engine.abort(request))
        elif event == "abort in hook":
            self.abort_next = True

    def collect(self):
        held = {group.order: group for group in self.collector.pool}
        collection = self.collector.collect()
        self.collector.engine.check_drained()
        self.check_selection(collection, held)
        self.trained += collection.groups

    def check_selection(self, collection, held):
        config, pool, stats = self.config, self.collector.pool, collection.stats
        assert len(collection.groups) == config.groups_per_update
        assert all(group.complete and None not in group.scores for group in collection.groups)
        newest = collection.groups[-1].order
        assert all(group.order > newest for group in pool if group.complete)
        assert [g.order for g in collection.groups] == sorted(g.order for g in collection.groups)
        version = self.collector.engine.policy_version
        assert all(group.age(version) < config.age_limit for group in pool if not group.complete)
        assert len(held) + stats.new_groups == len(pool) + config.groups_per_update
        assert stats.left_complete_groups + stats.left_unfinished_groups == len(pool)

    def check_end(self):
        groups = [*self.trained, *self.collector.pool]
        assert sorted(group.order for group in groups) == list(range(len(groups)))  # nothing lost, nothing doubled
        assert {group.prompt.prompt_id for group in groups} == {f"p{i}" for i in range(len(groups))}
        assert len(set(self.graded)) == len(self.graded)
        for group in groups:
            assert len(group.requests) == self.config.responses_per_group
            for request in group.requests:
                self.check_response(request)

    def check_response(self, request):
        count = len(request.tokens)
        assert count == len(request.sampler_logp) == len(request.versions) <= CAP
        assert request.versions == sorted(request.versions)
        assert EOS not in request.tokens[:-1]
        wanted = min(self.length(request), CAP)
        if request.finish_reason in ("eos", "length"):
            assert count == wanted  # whatever was paused, preempted or resumed on the way, and the cap once
            assert request.finish_reason == ("eos" if self.length(request) <= CAP else "length")
        else:
            assert count < wanted


@settings(deadline=None, max_examples=150)
@given(workloads())
def test_partial_collection_keeps_its_invariants(workload):
    config, seed, events = workload
    run = Run(PartialCollector, config, seed)
    for event in events:
        run.do(event)
    run.check_end()


@settings(deadline=None, max_examples=60)
@given(workloads())
def test_synchronous_waves_keep_the_same_invariants(workload):
    config, seed, events = workload
    run = Run(SyncCollector, config, seed)
    for event in events:
        run.do(event)
    run.check_end()


@settings(deadline=None, max_examples=40)
@given(workloads())
def test_tokens_do_not_depend_on_the_schedule(workload):
    config, seed, _ = workload
    wide = RolloutConfig(**(vars(config) | {"max_active_requests": 8, "step_tokens": 64, "cache_pages": 60}))
    by_key = []
    for settings_ in (config, wide):
        run = Run(PartialCollector, settings_, seed)
        for event in ("collect", "update", "collect"):
            run.do(event)
        groups = [*run.trained, *run.collector.pool]
        by_key.append({(r.prompt_id, r.sibling): r for g in groups for r in g.requests})
    for key in by_key[0].keys() & by_key[1].keys():
        first, second = by_key[0][key], by_key[1][key]
        shared = min(len(first.tokens), len(second.tokens))
        assert first.tokens[:shared] == second.tokens[:shared]
        assert first.sampler_logp[:shared] == second.sampler_logp[:shared]


def test_long_prompts_and_long_responses_are_not_starved():
    """Completed lengths follow the policy's law: after n updates exactly the oldest groups have trained, bar a few."""
    config = RolloutConfig(
        groups_per_update=8, responses_per_group=2, oversubscription=1.0, age_limit=3, max_prompt_tokens=20,
        max_response_tokens=CAP, max_active_requests=12, step_tokens=32, workspace_tokens=80, cache_pages=30,
    )  # fmt: skip
    run = Run(PartialCollector, config, seed=5)
    for _ in range(40):
        run.do("collect")
        run.do("update")
    run.check_end()
    orders = [group.order for group in run.trained]
    # Whatever its length, a group trains at most eta + 1 collections after it entered a pool of 2 T groups.
    assert all(order < (index // 8 + 2) * 8 for index, order in enumerate(orders))
    assert max(index // 8 - order // 8 for index, order in enumerate(orders)) <= config.age_limit + 1
    trained = [len(r.tokens) for group in run.trained for r in group.requests]
    known = {(r.prompt_id, r.sibling) for group in run.trained for r in group.requests}
    drawn = [min(run.length(r), CAP) for group in [*run.trained, *run.collector.pool] for r in group.requests]
    # All drawn lengths but those of the T (1 + beta) - T groups still held: the means differ by their share at most.
    held = len(drawn) - len(trained)
    assert len(known) == len(trained) and held == 8 * 2
    assert abs(sum(trained) / len(trained) - sum(drawn) / len(drawn)) <= CAP * held / len(drawn)
