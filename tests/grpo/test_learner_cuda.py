import copy
import math

import pytest
import torch

from kv4rl.config import GRPOConfig
from kv4rl.grpo.learner import GRPOLearner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: packed BF16 attention, FP32 head"),
]


def flat_gradient(learner, groups) -> tuple[torch.Tensor, dict]:
    kept = {}
    learner._optimizer.step = lambda: kept.update(
        g=torch.cat([p.grad.flatten().cpu() for p in learner.weights.parameters()])
    )
    return learner.update(groups), kept["g"]


def test_bf16_on_cuda_finds_the_gradient_of_fp32_on_cpu(wide_decoder, sampled_on_policy):
    """Yardstick: BF16 compute on the CPU, whose gradient has the same rounding."""
    decoder = wide_decoder()
    groups = sampled_on_policy(decoder, 0)
    learner = lambda where, dtype: GRPOLearner(
        copy.deepcopy(decoder).to(where), GRPOConfig(compute_dtype=dtype, max_grad_norm=1e9, microbatch_tokens=64)
    )
    _, exact = flat_gradient(learner("cpu", "float32"), groups)
    _, rounded = flat_gradient(learner("cpu", "bfloat16"), groups)
    metrics, ours = flat_gradient(learner("cuda", "auto"), groups)
    assert (ours - exact).norm() <= 2 * (rounded - exact).norm()
    assert abs(metrics["actor/ppo_kl"]) < 2**-16  # with and without gradient the head sums in another order


def test_recomputed_layers_and_a_chunked_head_change_nothing_but_memory(wide_decoder, sampled_on_policy):
    decoder = wide_decoder()
    groups = sampled_on_policy(decoder, 1)
    gradients = []
    for recompute, max_logits in ((False, 1 << 27), (True, 48 * 7)):
        twin = copy.deepcopy(decoder).cuda()
        twin.recompute_layers = recompute
        learner = GRPOLearner(twin, GRPOConfig(max_grad_norm=1e9), max_logits=max_logits)
        gradients.append(flat_gradient(learner, groups)[1])
    whole, chunked = gradients
    assert (whole - chunked).norm() <= 2**-8 * whole.norm()  # one BF16 rounding


def test_updates_learn_and_keep_fp32_masters(wide_decoder, sampled_on_policy):
    decoder = wide_decoder()
    groups = sampled_on_policy(decoder, 2)
    learner = GRPOLearner(decoder.cuda(), GRPOConfig(learning_rate=1e-3, warmup_updates=0))
    losses = [learner.update(groups)["actor/pg_loss"] for _ in range(3)]
    assert all(math.isfinite(loss) for loss in losses)
    assert all(master.dtype == torch.float32 for master in learner.weights.parameters())
    assert {parameter.dtype for _, parameter in learner.weights.named_compute_weights()} == {torch.bfloat16}
