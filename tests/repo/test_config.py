"""The configuration refuses what cannot run, naming the field and the value."""

import pytest

from kv4rl.config import GRPOConfig, KVConfig, RolloutConfig, TrainConfig


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: KVConfig(precision="int4"), "precision='int4'"),
        (lambda: KVConfig(sink_tokens=-1), "sink_tokens=-1"),
        (lambda: KVConfig(recent_tokens=-5), "recent_tokens=-5"),
        (lambda: RolloutConfig(groups_per_update=0), "groups_per_update=0"),
        (lambda: RolloutConfig(responses_per_group=0), "responses_per_group=0"),
        (lambda: RolloutConfig(oversubscription=-0.1), "oversubscription=-0.1"),
        (lambda: RolloutConfig(age_limit=0), "age_limit=0"),
        (lambda: RolloutConfig(age_limit=1.5), "age_limit=1.5"),
        (lambda: RolloutConfig(groups_per_update=2.5), "groups_per_update=2.5"),
        (lambda: RolloutConfig(oversubscription=float("inf")), "oversubscription=inf"),
        (lambda: RolloutConfig(oversubscription=float("nan")), "oversubscription=nan"),
        (lambda: KVConfig(sink_tokens=10**9), "sink_tokens=1000000000"),
        (lambda: KVConfig(recent_tokens="16"), "recent_tokens='16'"),
        (lambda: GRPOConfig(tis_clip=0.5), "tis_clip=0.5"),
        (lambda: TrainConfig(rollout=RolloutConfig(temperature=0.6)), "rollout.temperature"),
    ],
)
def test_out_of_range_settings_are_named(build, field):
    with pytest.raises(ValueError, match=field.replace("(", r"\(")):
        build()


def test_pool_holds_quota_times_one_plus_beta():
    assert RolloutConfig(groups_per_update=128, oversubscription=1.0).pool_groups == 256
    assert RolloutConfig(groups_per_update=10, oversubscription=0.3).pool_groups == 13


def test_protected_tokens_exist_only_for_kv4rl():
    assert KVConfig("kv4rl").protected_tokens == 144
    assert KVConfig("kv4").protected_tokens == 0
