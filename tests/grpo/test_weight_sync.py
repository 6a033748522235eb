import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.config import GRPOConfig, KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.request import Request
from kv4rl.grpo.learner import GRPOLearner
from kv4rl.grpo.masters import cast_copy
from kv4rl.grpo.weight_sync import checksum, sync

ROLLOUT = RolloutConfig(
    groups_per_update=1, responses_per_group=2, max_prompt_tokens=16, max_response_tokens=8, max_active_requests=2,
    step_tokens=32, workspace_tokens=32, cache_pages=8,
)  # fmt: skip


@pytest.fixture
def engine_for():
    """A function: an engine over a cast copy of a decoder, with a cache that takes head_dim 64."""

    def make(decoder, dtype=torch.float32) -> RolloutEngine:
        return RolloutEngine(cast_copy(decoder, dtype), KVConfig(precision="bf16"), ROLLOUT, eos_token_ids=(1,))

    return make


def test_after_a_sync_the_engine_holds_the_updated_policy(wide_decoder, make_groups, engine_for):
    decoder = wide_decoder()
    engine = engine_for(decoder)
    learner = GRPOLearner(decoder, GRPOConfig(learning_rate=1e-2, warmup_updates=0))
    learner.update(make_groups(0))
    held = dict(engine.decoder.named_parameters())
    assert not any(torch.equal(held[name], sent) for name, sent in learner.weights.named_compute_weights())
    sync(learner, engine, 1)
    assert all(torch.equal(held[name], sent) for name, sent in learner.weights.named_compute_weights())
    assert engine.policy_version == engine.cache.policy_version == 1


def test_a_lower_precision_engine_is_compared_in_its_own_dtype(wide_decoder, engine_for):
    decoder = wide_decoder()
    engine = engine_for(decoder, torch.bfloat16)
    sync(GRPOLearner(decoder, GRPOConfig()), engine, 1)
    assert engine.policy_version == 1


def test_a_sync_that_keeps_old_weights_is_noticed(wide_decoder, make_groups, engine_for):
    """TRL #5312: sleep and wake restored old weights; only the mismatch showed it."""
    decoder = wide_decoder()
    engine = engine_for(decoder)
    learner = GRPOLearner(decoder, GRPOConfig(learning_rate=1e-2, warmup_updates=0))
    learner.update(make_groups(1))
    honest = engine.update_weights

    def forgetful(named_tensors, version):
        old = engine.decoder.model.norm.weight.detach().clone()
        honest(named_tensors, version)
        engine.decoder.model.norm.weight.data.copy_(old)

    engine.update_weights = forgetful
    with pytest.raises(RuntimeError, match=r"other values of model\.norm\.weight$"):
        sync(learner, engine, 1)


def test_a_sync_with_kv_of_the_old_policy_resident_is_refused(wide_decoder, engine_for):
    """Bug row 5: K/V that survives a weight update."""
    decoder = wide_decoder()
    engine = engine_for(decoder)
    engine.add(Request("p", 0, [2, 3], 8, (1,)))
    engine.step()
    with pytest.raises(RuntimeError, match="pause first"):
        sync(GRPOLearner(decoder, GRPOConfig()), engine, 1)


@settings(deadline=None, max_examples=60)
@given(values=st.lists(st.floats(-4, 4, width=16), min_size=2, max_size=50), seed=st.integers(0, 10**6))
def test_checksum_sees_changed_bits_and_changed_order(values, seed):
    tensor = torch.tensor(values, dtype=torch.bfloat16)
    assert checksum(tensor) == checksum(tensor.clone()) == checksum(tensor.view(1, -1))
    generator = torch.Generator().manual_seed(seed)
    index = int(torch.randint(len(values), (1,), generator=generator))
    changed = tensor.clone()
    changed[index] += 1
    assert checksum(changed) != checksum(tensor)
    swapped = tensor.roll(1)
    assert torch.equal(swapped, tensor) or checksum(swapped) != checksum(tensor)


def test_right_tensors_that_the_engine_does_not_read_are_noticed_by_the_canary(wide_decoder, make_groups, engine_for):
    """Checksums pass, the policy is another one: here the fused QKV buffer kept the weights of before."""
    decoder = wide_decoder()
    engine = engine_for(decoder)
    learner = GRPOLearner(decoder, GRPOConfig(learning_rate=1e-2, warmup_updates=0))
    learner.update(make_groups(2))
    attention = engine.decoder.model.layers[0].self_attn
    old = {name: p.detach().clone() for name, p in attention.named_parameters()}
    apart = {name: torch.empty_like(p) for name, p in old.items()}
    for name, parameter in attention.named_parameters():
        parameter.data = apart[name]  # written by the sync
    fused = attention.fused
    attention.fused = lambda x: tuple(x @ old[f"{part}_proj.weight"].t() for part in "qkv")
    attention.fused.current = True
    with pytest.raises(RuntimeError, match=r"canary's token \d+ has log-probability -\S+ in the engine and -"):
        sync(learner, engine, 1)
    attention.fused = fused
    assert sync(learner, engine, 1)["sync/canary_difference"] <= 1e-4


def test_the_canary_of_equal_weights_differs_by_rounding_only(wide_decoder, engine_for):
    """Yardstick: one rounding of the dtype, of log-probs below 8 nats."""
    decoder = wide_decoder()
    for dtype in ("float32", "bfloat16"):
        found = sync(
            GRPOLearner(decoder, GRPOConfig(compute_dtype=dtype)), engine_for(decoder, getattr(torch, dtype)), 1
        )
        assert found["sync/canary_difference"] <= 8 * torch.finfo(getattr(torch, dtype)).eps
