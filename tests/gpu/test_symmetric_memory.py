"""Two ranks that share one GPU: sums in symmetric memory, and the fallback that both must take where one lacks it."""

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
WORKER = Path(__file__).with_name("symmetric_memory_worker.py")


@pytest.fixture(scope="module")
def ranks(run_two_ranks):
    """What each of the two ranks found."""
    return run_two_ranks(WORKER)


def test_two_shot_sums_have_gloos_bits_also_when_their_buffers_are_used_again(ranks):
    """Two addends: whatever the order, one rounding."""
    for found in ranks:
        assert found["kind"] == "SymmetricCommunicator"
        assert all(torch.equal(*pair) for pair in found["sums"])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(ranks[0]["sums"], ranks[1]["sums"], strict=True))


def test_what_one_rank_lacks_no_rank_uses(ranks):
    for kind, total in (found["fallen"] for found in ranks):
        assert kind == "Communicator" and total.eq(2).all()
