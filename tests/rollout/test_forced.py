"""Forced lengths: drawn from their law by key, and met to the token by the real engine, whatever interrupts it."""

import numpy as np
import pytest
import torch

from kv4rl.config import KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.request import Request
from kv4rl.engine.sampler import Sampling
from kv4rl.rollout.forced import ForcedLengths, RandomPrompts
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.workload import Workload
from kv4rl.theory.lengths import LengthDistribution

EOS, VOCABULARY, CAP = (3, 5), 12, 40
LAW = LengthDistribution.lognormal(15, 0.8, cap=CAP)


@pytest.fixture
def make_engine(decoder):
    def make(lengths, **changes):
        sizes = {"max_active_requests": 6, "step_tokens": 24, "workspace_tokens": 80, "cache_pages": 14}
        config = RolloutConfig(max_prompt_tokens=20, max_response_tokens=CAP, **sizes | changes)
        return RolloutEngine(decoder, KVConfig("bf16"), config, eos_token_ids=EOS, forced_lengths=lengths)

    return make


def test_lengths_follow_their_law_and_depend_on_the_key_alone():
    forced = ForcedLengths(LAW, seed=1)
    requests = [Request(f"p{i}", s, [1], CAP, EOS) for i in range(500) for s in range(4)]
    drawn = np.array([forced(request) for request in requests])
    assert drawn.tolist() == [ForcedLengths(LAW, seed=1)(r) for r in requests[::-1]][::-1]
    assert drawn.tolist() != [ForcedLengths(LAW, seed=2)(r) for r in requests]
    # Kolmogorov-Smirnov at one in a million: sqrt(ln(2e6) / 2n) for n draws.
    empirical = np.searchsorted(np.sort(drawn), LAW.support, side="right") / len(drawn)
    assert np.abs(empirical - LAW.cdf).max() < np.sqrt(np.log(2e6) / (2 * len(drawn)))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_every_response_has_its_forced_length_and_ends_with_eos(make_engine, temperature):
    forced = ForcedLengths(LAW, seed=3)
    responses = make_engine(forced).generate([[1] * 9, [2] * 20], Sampling(temperature=temperature), samples=8)
    for response in responses:
        wanted = forced(Request(response.prompt_id, response.sibling, [1], CAP, EOS))
        assert (len(response.tokens), response.finish_reason) == (wanted, "eos")
        assert response.tokens[-1] == EOS[0] and not set(response.tokens[:-1]) & set(EOS)
        assert response.sampler_logp[-1] == 0 and all(logp < 0 for logp in response.sampler_logp[:-1])
    assert len({len(response.tokens) for response in responses}) > 5


def test_a_cap_below_the_forced_length_cuts_it(make_engine):
    (response,) = make_engine(lambda request: 30).generate([[1]], Sampling(max_response_tokens=10))
    assert (len(response.tokens), response.finish_reason) == (10, "length")


def test_lengths_survive_preemption_and_policy_updates(make_engine, decoder):
    """Partial collection with pages so scarce that requests are preempted; prefixes carried over two updates."""
    workload = Workload(LAW, LengthDistribution.geometric(8, cap=20), prompt_share=0.5, seed=4, siblings=4)
    engine = make_engine(workload, groups_per_update=2, responses_per_group=4, age_limit=2, cache_pages=6)
    stream = RandomPrompts(workload, VOCABULARY)
    collector = PartialCollector(engine, stream, engine.rollout, grade=None, eos_token_ids=EOS)
    carried = preempted = 0
    for version in range(1, 5):
        collection = collector.collect()
        carried += collection.stats.carried_requests
        preempted += collection.stats.preemptions
        for group in collection.groups:
            assert [len(r.tokens) for r in group.requests] == list(workload.group(int(group.prompt.prompt_id))[1])
        engine.update_weights(decoder.named_parameters(), version)
    assert carried > 0 and preempted > 0


def test_random_prompts_have_the_workloads_lengths_and_resume():
    workload = Workload(LAW, LengthDistribution.geometric(8, cap=20), seed=4)
    stream, again = RandomPrompts(workload, VOCABULARY), RandomPrompts(workload, VOCABULARY)
    prompts = [stream.next() for _ in range(20)]
    assert [len(p.tokens) for p in prompts] == [workload.group(i)[0] for i in range(20)]
    assert {token for p in prompts for token in p.tokens} == set(range(VOCABULARY))
    again.load_state({"cursor": 7})
    assert again.next() == prompts[7] and again.state() == {"cursor": 8}


def test_what_cannot_end_a_response_is_refused(make_engine, decoder):
    with pytest.raises(ValueError, match="forced length of request '0' sibling 0=0: expected an integer >= 1"):
        make_engine(lambda request: 0).generate([[1]], Sampling())
    with pytest.raises(ValueError, match=r"eos_token_ids=\(7,\): expected the engine's \(3, 5\)"):
        make_engine(LAW.quantile).add(Request("p", 0, [1], CAP, (7,)))
    with pytest.raises(ValueError, match=r"eos_token_ids=\(\): expected a token to end"):
        RolloutEngine(decoder, KVConfig("bf16"), RolloutConfig(), eos_token_ids=(), forced_lengths=lambda r: 1)


def test_a_poisoned_row_is_still_named_at_its_forced_end(make_engine, decoder):
    engine = make_engine(lambda request: 1)
    weight = decoder.model.embed_tokens.weight
    kept = weight[1].clone()
    with torch.no_grad():
        weight[1] = float("nan")
    try:
        with pytest.raises(FloatingPointError, match="request '0' sibling 0"):
            engine.generate([[1]], Sampling())
    finally:
        with torch.no_grad():
            weight[1] = kept
