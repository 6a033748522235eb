import copy

import pytest
import torch
from torch.nn import functional as F

from kv4rl.config import GRPOConfig
from kv4rl.grpo.advantage import group_advantages
from kv4rl.grpo.learner import GRPOLearner
from kv4rl.grpo.logprobs import token_logprobs
from kv4rl.grpo.packing import pack
from kv4rl.model.attend import PackedCausal

CONFIG = GRPOConfig(learning_rate=1e-3, warmup_updates=0, kl_coefficient=0.05)


def weights_of(decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gradient(decoder, groups, *, microbatch_tokens: int, max_logits: int = 1 << 20) -> tuple[torch.Tensor, float]:
    """Flat gradient of one update's loss, and the number of microbatches."""
    config = GRPOConfig(kl_coefficient=0.05, microbatch_tokens=microbatch_tokens, max_grad_norm=1e9)
    learner = GRPOLearner(copy.deepcopy(decoder), config, reference=decoder, max_logits=max_logits)
    kept = {}
    learner._optimizer.step = lambda: kept.update(g=torch.cat([p.grad.flatten() for p in learner.weights.parameters()]))
    metrics = learner.update(groups)
    return kept["g"], metrics["actor/microbatches"]


def test_log_probs_match_a_padded_forward_over_whole_sequences(tiny_decoder, make_groups):
    """prime-rl #1525, trlx #582: an off-by-one shift between trainer and rollout log-probs."""
    decoder, groups = tiny_decoder(), make_groups(1)
    learner = GRPOLearner(decoder, CONFIG)
    with torch.no_grad():
        ours, _ = learner.log_probs(pack(groups, torch.zeros(3, 4)), decoder)
        expected = []
        for request in (request for group in groups for request in group.requests):
            ids = torch.tensor(request.prompt_tokens + request.tokens)
            hidden = decoder(ids, torch.arange(len(ids)), PackedCausal([0, len(ids)]))
            logp = F.log_softmax(decoder.logits(hidden), dim=-1)
            start = len(request.prompt_tokens)
            expected.append(logp[torch.arange(start - 1, len(ids) - 1), ids[start:]])
    torch.testing.assert_close(ours, torch.cat(expected))


def test_gradient_is_the_same_for_one_two_and_seven_microbatches(tiny_decoder, make_groups):
    """prime-rl #583, open-instruct #1161, TRL #3021. Yardstick: what FP32 leaves of the FP64 gradient."""
    decoder, groups = tiny_decoder(), make_groups(2, groups=4, siblings=4)
    rows = len(pack(groups, torch.zeros(4, 4)).input_ids)
    whole, one = gradient(decoder, groups, microbatch_tokens=rows)
    double = _gradient_in_fp64(decoder, groups)
    rounding = (whole - double).abs().max()
    for budget, wanted in ((rows * 6 // 10, 2), (rows * 2 // 11, 7)):
        split, parts = gradient(decoder, groups, microbatch_tokens=budget)
        assert (one, parts) == (1, wanted)
        assert (split - double).abs().max() <= 2 * rounding


def _gradient_in_fp64(decoder, groups) -> torch.Tensor:
    """The same loss written directly, in FP64, on one packed batch."""
    policy = copy.deepcopy(decoder).double()
    rewards = torch.tensor([group.scores for group in groups], dtype=torch.float64)
    batch = pack(groups, group_advantages(rewards).float())
    hidden = policy(batch.input_ids, batch.positions, PackedCausal(batch.cu_seqlens))[batch.predicting_rows]
    logp = F.log_softmax(hidden @ policy.head_weight.T, dim=-1).gather(1, batch.targets[:, None])[:, 0]
    weight = (logp.detach() - batch.sampler_logp.double()).exp().clamp(max=5.0)
    loss = (-weight * batch.advantages * (logp - logp.detach()).exp()).sum() / batch.num_tokens  # k3 has no slope at 0
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]).float()


def test_the_ratio_is_exactly_one_on_policy(tiny_decoder, make_groups):
    """verl #2088: old and new log-probs that differ through padding or microbatching. Then no clip can bind."""
    learner = GRPOLearner(tiny_decoder(), GRPOConfig(microbatch_tokens=40))
    metrics = learner.update(make_groups(3))
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0.0
    assert metrics["actor/kl_loss"] == 0.0  # the reference is the policy before its first update


def test_detached_old_log_probs_make_the_same_update(tiny_decoder, make_groups):
    groups = make_groups(4)
    learners = [GRPOLearner(tiny_decoder(), CONFIG, old_log_probs=mode) for mode in ("compute", "detach")]
    metrics = [[learner.update(groups) for _ in range(2)] for learner in learners]
    assert metrics[0] == metrics[1]
    assert same(weights_of(learners[0].weights.decoder), weights_of(learners[1].weights.decoder))


def test_on_policy_samples_weigh_one(tiny_decoder, sampled_on_policy):
    decoder = tiny_decoder()
    metrics = GRPOLearner(decoder, CONFIG).update(sampled_on_policy(decoder, 5))
    assert metrics["actor/tis_weight"] == 1.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0


def test_updates_raise_the_probability_of_rewarded_responses(tiny_decoder, sampled_on_policy):
    decoder = tiny_decoder()
    groups = sampled_on_policy(decoder, 6)
    learner = GRPOLearner(decoder, CONFIG)
    batch = pack(groups, group_advantages(torch.tensor([group.scores for group in groups])))

    def preference() -> float:
        with torch.no_grad():
            logp, _ = learner.log_probs(batch, decoder)
        return float((logp * batch.advantages).sum())

    before = preference()
    for _ in range(3):
        learner.update(groups)
    assert preference() > before


def test_the_penalty_pulls_back_to_the_fixed_reference(tiny_decoder, sampled_on_policy):
    """With equal rewards only k3 acts: the distance to the reference shrinks, and the reference stays."""
    decoder, reference = tiny_decoder(0), tiny_decoder(1)
    groups = sampled_on_policy(decoder, 7)
    for group in groups:
        group.scores = [1.0] * len(group.scores)
    learner = GRPOLearner(decoder, GRPOConfig(learning_rate=1e-3, warmup_updates=0, kl_coefficient=1.0), reference)
    before = weights_of(reference)
    distances = [learner.update(groups)["actor/kl_loss"] for _ in range(5)]
    assert distances[-1] < distances[0]
    assert same(weights_of(reference), before) and same(weights_of(learner.reference), before)


def test_a_gradient_that_is_not_finite_skips_the_step(tiny_decoder, make_groups):
    decoder = tiny_decoder()
    learner = GRPOLearner(decoder, CONFIG)
    learner.update(make_groups(8))
    before, moments = weights_of(decoder), copy.deepcopy(learner._optimizer.state_dict())
    handle = decoder.model.norm.weight.register_hook(lambda grad: grad * float("inf"))
    metrics = learner.update(make_groups(9))
    handle.remove()
    assert metrics["actor/skipped_steps"] == 1.0
    assert same(weights_of(decoder), before)
    for a, b in zip(moments["state"].values(), learner._optimizer.state_dict()["state"].values(), strict=True):
        assert same(a, b)
    assert learner.update(make_groups(9))["actor/skipped_steps"] == 0.0


def test_learning_rate_warms_up_then_stays(tiny_decoder, make_groups):
    learner = GRPOLearner(tiny_decoder(), GRPOConfig(learning_rate=1e-3, warmup_updates=4))
    rates = [learner.update(make_groups(10))["actor/lr"] for _ in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_gradient_norm_is_clipped_before_the_step(tiny_decoder, make_groups):
    groups = make_groups(11)
    norms = []
    for limit in (1e-3, 1e9):
        learner = GRPOLearner(tiny_decoder(), GRPOConfig(kl_coefficient=0, max_grad_norm=limit))
        step, seen = learner._optimizer.step, []
        learner._optimizer.step = lambda step=step, seen=seen, learner=learner: (
            seen.append(float(torch.stack([p.grad.norm() for p in learner.weights.parameters()]).norm())), step()
        )  # fmt: skip
        reported = learner.update(groups)["actor/grad_norm"]
        norms.append((reported, seen[0]))
    (reported, clipped), (unclipped_reported, unclipped) = norms
    assert reported == unclipped_reported == pytest.approx(unclipped, rel=1e-5)
    assert clipped == pytest.approx(1e-3, rel=1e-3)


def test_chunked_head_gives_the_same_log_probs_and_gradient(tiny_decoder, make_groups):
    decoder, groups = tiny_decoder(), make_groups(12)
    rows = len(pack(groups, torch.zeros(3, 4)).input_ids)
    whole, _ = gradient(decoder, groups, microbatch_tokens=rows)
    chunked, _ = gradient(decoder, groups, microbatch_tokens=rows, max_logits=48 * 5)
    rounding = (whole - _gradient_in_fp64(decoder, groups)).abs().max()
    assert (whole - chunked).abs().max() <= 2 * rounding


def test_logits_of_all_tokens_never_exist_at_once(tiny_decoder):
    """Forward or backward: the head sees at most `max_logits` values in one call, and keeps none of them."""
    decoder = tiny_decoder()
    rows, saved = [], []
    plain = decoder.logits
    decoder.logits = lambda hidden: (rows.append(len(hidden)), plain(hidden))[1]
    hidden = torch.randn(50, 32, requires_grad=True)
    keep = lambda tensor: (saved.append(tensor.numel()), tensor)[1]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logp, _ = token_logprobs(decoder, hidden, torch.arange(50) % 48, max_logits=48 * 8)
    assert max(saved, default=0) <= 50 * 32  # nothing of vocabulary size was kept
    forward = len(rows)
    logp.sum().backward()
    assert max(rows) == 8 and len(rows) == 2 * forward


def test_entropy_of_a_uniform_head_is_the_log_of_the_vocabulary(tiny_decoder):
    decoder = tiny_decoder()
    _, entropy = token_logprobs(decoder, torch.zeros(3, 32), torch.zeros(3, dtype=torch.int64), entropy=True)
    torch.testing.assert_close(entropy, torch.full((3,), 48.0).log())


def test_bf16_compute_keeps_fp32_masters_and_accumulates_in_fp32(tiny_decoder, make_groups):
    """Steps below BF16 resolution must not be lost, nor gradients of many microbatches rounded together."""
    decoder, groups = tiny_decoder(), make_groups(13)
    config = GRPOConfig(learning_rate=1e-5, warmup_updates=0, compute_dtype="bfloat16", microbatch_tokens=32)
    learner = GRPOLearner(decoder, config)
    before = weights_of(decoder)
    metrics = learner.update(groups)
    assert metrics["actor/microbatches"] > 3 and metrics["actor/ppo_kl"] == 0.0
    changed = [not torch.equal(before[name], master) for name, master in decoder.named_parameters()]
    assert all(changed)  # every master moved by about 1e-5, far below a BF16 step of weights near 1
    for name, parameter in learner.weights.decoder.named_parameters():
        assert parameter.dtype == torch.bfloat16 and parameter.grad is None
        assert torch.equal(parameter, dict(decoder.named_parameters())[name].bfloat16())


def test_state_restores_the_learner_exactly(tiny_decoder, make_groups):
    first = GRPOLearner(tiny_decoder(0), CONFIG)
    first.update(make_groups(14))
    state = copy.deepcopy(first.state())
    second = GRPOLearner(tiny_decoder(5), CONFIG, reference=tiny_decoder(0))
    second.load_state(state)
    assert first.update(make_groups(15)) == second.update(make_groups(15))
    assert same(first.state()["weights"], second.state()["weights"])


def test_bad_input_is_named(tiny_decoder, make_groups):
    learner, groups = GRPOLearner(tiny_decoder(), CONFIG), make_groups(16)
    groups[1].scores[2] = None
    with pytest.raises(ValueError, match="scores of prompt 'p1'"):
        learner.update(groups)
    with pytest.raises(ValueError, match="groups=0"):
        learner.update([])
    with pytest.raises(ValueError, match="float32 master"):
        GRPOLearner(tiny_decoder().bfloat16(), CONFIG)
    with pytest.raises(ValueError, match=r"shape of model\.norm\.weight"):
        state = learner.state()
        learner.load_state(state | {"weights": state["weights"] | {"model.norm.weight": torch.zeros(3)}})
