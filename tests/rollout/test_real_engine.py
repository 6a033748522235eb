"""The simulator against the real engine: a model decides the lengths, then the simulator replays them, step by step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.config import KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.rollout.group import ListStream, Prompt
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.skipping import SkippingEngine
from kv4rl.rollout.sync import SyncCollector
from kv4rl.rollout.trace import COLUMNS, Trace

EOS, CAP = 3, 40
COLLECTORS = {"partial": PartialCollector, "sync": SyncCollector}


@st.composite
def configs(draw):
    slots = draw(st.integers(1, 5))
    return RolloutConfig(
        collector=draw(st.sampled_from(sorted(COLLECTORS))),
        groups_per_update=draw(st.integers(1, 2)),
        responses_per_group=draw(st.integers(1, 3)),
        age_limit=draw(st.integers(1, 3)),
        max_prompt_tokens=20,
        max_response_tokens=CAP,
        max_active_requests=slots,
        step_tokens=slots + draw(st.integers(0, 30)),
        workspace_tokens=60 + draw(st.integers(0, 60)),
        cache_pages=4 + draw(st.integers(0, 8)),
        seed=draw(st.integers(0, 1000)),
    )


def run(engine, config, trace):
    stream = ListStream([Prompt(f"p{i}", [4 + i % 8] * (1 + 7 * i % 20), "") for i in range(40)])
    collector = COLLECTORS[config.collector](
        engine, stream, config, grade=None, eos_token_ids=(EOS,), trace=trace if type(engine) is RolloutEngine else None
    )
    groups = [*collector.collect().groups, *collector.collect().groups, *collector.pool]
    return {(r.prompt_id, r.sibling): r for group in groups for r in group.requests}


@pytest.mark.slow
def test_the_simulator_replays_the_engine_step_by_step(decoder):
    @settings(deadline=None, max_examples=200)
    @given(configs())
    def check(config):
        measured, simulated = Trace(), Trace()
        engine = RolloutEngine(decoder, KVConfig("bf16"), config, eos_token_ids=(EOS,), backend="reference")
        responses = run(engine, config, measured)
        # What had not ended when the collections did ends later: any longer length gives the same steps.
        lengths = {key: len(r.tokens) if r.finish_reason == "eos" else CAP + 1 for key, r in responses.items()}
        forced = lambda request: lengths[request.prompt_id, request.sibling]
        twin = SkippingEngine.within(config, forced, bytes_per_page=engine.bytes_per_page, trace=simulated)
        replayed = run(twin, config, simulated)
        for name in (name for name in COLUMNS if name != "step_ms"):
            assert measured.column(name).tolist() == simulated.column(name).tolist(), name
        for key, response in responses.items():
            assert (len(response.tokens), response.finish_reason) == (
                len(replayed[key].tokens),
                replayed[key].finish_reason,
            )

    check()


@settings(deadline=None, max_examples=5)
@given(configs())
def test_launching_steps_ahead_changes_no_collection(decoder, config):
    """Quota, age limit and carried work over two collections: the same groups, tokens and trace, step by step."""
    seen = []
    for overlap in (False, True):
        trace = Trace()
        engine = RolloutEngine(
            decoder, KVConfig("kv4rl", 4, 8), config, eos_token_ids=(EOS,), backend="reference", overlap=overlap,
            forced_lengths=lambda request: 1 + 17 * (request.sibling + len(request.prompt_tokens)) % 39,
        )  # fmt: skip
        responses = run(engine, config, trace)
        engine.check_drained()
        steps = {name: values.tolist() for name, values in trace.columns().items() if name != "step_ms"}
        seen.append((steps, {key: (r.tokens, r.sampler_logp, r.versions) for key, r in responses.items()}))
    assert seen[0] == seen[1]
