"""Two GPUs against one: sums, logits and greedy text of a small random Qwen3."""

from pathlib import Path

import pytest
import torch

from kv4rl.config import PRECISIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
WORKER = Path(__file__).with_name("tensor_parallel_worker.py")


@pytest.fixture(scope="module")
def ranks(run_two_ranks):
    """What each of the two ranks found."""
    return run_two_ranks(WORKER)


def test_two_shot_sums_are_nccls(ranks):
    """Two addends: whatever the order, one rounding, so the same bits."""
    for found in ranks:
        assert found["symmetric"], "symmetric memory is not available: the two-shot sum was not tried"
        assert torch.equal(*found["sums"])
    assert torch.equal(ranks[0]["sums"][0], ranks[1]["sums"][0])


def test_logits_are_as_near_fp32_as_one_gpus(ranks):
    for found in ranks:
        exact, whole, shard = found["logits"]
        assert (shard - exact).norm() <= 1.5 * (whole - exact).norm()
    assert torch.equal(ranks[0]["logits"][2], ranks[1]["logits"][2])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_greedy_tokens_are_one_gpus_up_to_the_first_near_tie(ranks, precision):
    """Where two texts part, both chose what they found likeliest, and found it as likely, up to rounding."""
    assert ranks[0][precision][1] == ranks[1][precision][1], "one text on both ranks, to the bit"
    (whole, whole_logp), (shard, shard_logp) = ranks[0][precision]
    agreed = 0
    for row, (ours, theirs) in enumerate(zip(shard, whole, strict=True)):
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        agreed += same
        if same < len(ours):
            assert shard_logp[row][same] == pytest.approx(whole_logp[row][same], abs=0.5)
    assert agreed >= 4 * len(whole), f"only {agreed} tokens before the first differences"
