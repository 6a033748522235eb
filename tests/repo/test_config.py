"""The configuration refuses what cannot run, naming the field and the value."""

from pathlib import Path

import pytest

from kv4rl.config import GRPOConfig, InputError, KVConfig, RolloutConfig, TrainConfig


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
        (lambda: RolloutConfig(oversubscription="1"), "oversubscription='1'"),
        (lambda: RolloutConfig(oversubscription=1e9), "oversubscription=1000000000.0: expected .* <= 1000"),
        (lambda: RolloutConfig(responses_per_group=True), "responses_per_group=True"),
        (lambda: RolloutConfig(top_k=-1), "top_k=-1"),
        (lambda: RolloutConfig(top_p=0), "top_p=0: expected a number > 0 and <= 1"),
        (lambda: RolloutConfig(cache_pages=-1), "cache_pages=-1"),
        (lambda: GRPOConfig(tis_clip=0.5), "tis_clip=0.5"),
        (lambda: GRPOConfig(learning_rate="1e-4"), "learning_rate='1e-4'"),
        (lambda: GRPOConfig(learning_rate=float("inf")), "learning_rate=inf"),
        (lambda: GRPOConfig(betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\)"),
        (lambda: GRPOConfig(betas=0.9), "betas=0.9"),
        (lambda: GRPOConfig(dual_clip=1), "dual_clip=1: expected a number > 1"),
        (lambda: TrainConfig(model=Path("models/x")), "model=.*expected a string"),
        (lambda: TrainConfig(tasks=""), "tasks='': expected a string"),
        (lambda: TrainConfig(seed=1.5), "seed=1.5"),
        (lambda: TrainConfig(evaluate_prompts=2.5), "evaluate_prompts=2.5"),
        (lambda: TrainConfig(rollout=RolloutConfig(temperature=0.6)), "rollout.temperature"),
    ],
)
def test_out_of_range_settings_are_named(build, field):
    with pytest.raises(InputError, match=field):
        build()


def test_pool_holds_quota_times_one_plus_beta():
    assert RolloutConfig(groups_per_update=128, oversubscription=1.0).pool_groups == 256
    assert RolloutConfig(groups_per_update=10, oversubscription=0.3).pool_groups == 13


def test_protected_tokens_exist_only_for_kv4rl():
    assert KVConfig("kv4rl").protected_tokens == 144
    assert KVConfig("kv4").protected_tokens == 0
