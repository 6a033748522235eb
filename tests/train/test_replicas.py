"""Several rollout replicas as one: the metrics of the whole, and as much work for each."""

from dataclasses import replace

import pytest

from kv4rl.grpo.batch_metrics import over_replicas
from kv4rl.rollout.fits import fit
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.share import SharedStream
from kv4rl.rollout.simulator import EOS
from kv4rl.rollout.skipping import SkippingEngine, one_step
from kv4rl.rollout.trace import Trace

REPLICAS, COLLECTIONS = 2, 4


def test_volumes_add_up_extremes_stay_and_states_are_averaged():
    first = {
        "rollout/finished_responses": 20.0, "rollout/left_tokens": 5.0, "rollout/steps": 10.0,
        "rollout/left_max_age": 1.0, "rollout/page_occupancy_max": 0.5, "rollout/page_occupancy_mean": 0.25,
        "rollout/group_age/max": 2.0, "rollout/group_age/min": 1.0, "rollout/group_age/mean": 1.5,
        "perf/decode_tokens_per_s": 100.0,
    }  # fmt: skip
    second = {
        "rollout/finished_responses": 16.0, "rollout/left_tokens": 7.0, "rollout/steps": 20.0,
        "rollout/left_max_age": 3.0, "rollout/page_occupancy_max": 0.75, "rollout/page_occupancy_mean": 0.75,
        "rollout/group_age/max": 1.0, "rollout/group_age/min": 0.0, "rollout/group_age/mean": 0.5,
        "perf/decode_tokens_per_s": 50.0,
    }  # fmt: skip
    assert over_replicas([first, second]) == {
        "rollout/finished_responses": 36.0, "rollout/left_tokens": 12.0, "rollout/steps": 15.0,
        "rollout/left_max_age": 3.0, "rollout/page_occupancy_max": 0.75, "rollout/page_occupancy_mean": 0.5,
        "rollout/group_age/max": 2.0, "rollout/group_age/min": 0.0, "rollout/group_age/mean": 1.0,
        "perf/decode_tokens_per_s": 150.0, "rollout/replica_balance": 1.25,
    }  # fmt: skip
    assert over_replicas([first]) == first | {"rollout/replica_balance": 1.0}


def test_a_replica_without_decode_steps_takes_no_part_in_their_means():
    parts = [{"rollout/finished_responses": 1.0}, {"rollout/finished_responses": 0.0, "perf/decode_tokens_per_s": 9.0}]
    assert over_replicas(parts) == {
        "rollout/finished_responses": 1.0, "perf/decode_tokens_per_s": 9.0, "rollout/replica_balance": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["4B-300", "8B-400"])
def test_two_replicas_at_the_papers_quota_finish_as_many_requests_within_ten_percent(name):
    """Each has a collector, half the quota and every other prompt, as in `Trainer`; lengths are those of the fits.

    Over the collections together: in one alone, a late 8B group can move a third of a quota into the next.
    """
    law = fit(name)
    workload, config = law.workload(), replace(law.rollout("partial"), groups_per_update=128 // REPLICAS)
    replicas = []
    for number in range(REPLICAS):
        engine = SkippingEngine.within(config, workload, cost=one_step, trace=Trace(), replica=number)
        prompts = SharedStream(workload.stream(), number, REPLICAS)
        collector = PartialCollector(engine, prompts, config, grade=None, eos_token_ids=(EOS,))
        finished = 0
        for _ in range(COLLECTIONS):
            finished += collector.collect().stats.finished_responses
            engine.policy_version += 1
        replicas.append({"rollout/finished_responses": float(finished)})
    assert over_replicas(replicas)["rollout/replica_balance"] <= 1.1
