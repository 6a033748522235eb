import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.engine.request import Request
from kv4rl.grpo.packing import microbatches, pack, pack_requests

EOS = 1


def response(prompt: list[int], tokens: list[int], logps: list[float] | None = None, name: str = "p") -> Request:
    request = Request(name, 0, prompt, max(1, len(tokens)), (EOS,))
    for token, logp in zip(tokens, logps or [-1.0] * len(tokens), strict=True):
        request.append(token, logp, 0)
    return request


def test_layout_of_two_responses_by_hand():
    batch = pack_requests(
        [response([5, 6], [7, 8, EOS], [-0.1, -0.2, -0.3]), response([9], [10, 11], [-0.4, -0.5])], [2.0, -1.0]
    )
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.targets.tolist() == [7, 8, EOS, 10, 11]  # EOS is learnt; the truncated response has none
    assert batch.predicting_rows.tolist() == [1, 2, 3, 4, 5]  # row 1 holds token 6, whose successor is 7
    assert batch.sampler_logp.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5])
    assert batch.advantages.tolist() == [2.0, 2.0, 2.0, -1.0, -1.0]
    assert batch.response_lengths.tolist() == [3, 2]
    assert batch.num_tokens == 5


def test_a_pad_id_equal_to_eos_inside_a_response_counts_like_any_token():
    """Automodel #1336, GRPO-Zero: masks made from ids lose such tokens."""
    request = Request("p", 0, [3], 4, (2,))
    for token in (EOS, 5, EOS, 2):
        request.append(token, -1.0, 0)
    assert pack_requests([request], [1.0]).targets.tolist() == [EOS, 5, EOS, 2]


def test_an_empty_response_carries_no_token_and_still_counts_in_its_group(make_groups):
    """verl #6310: a reward written at index -1, or a fake token trained."""
    groups = make_groups(0, groups=1, siblings=3)
    empty = Request(groups[0].prompt.prompt_id, 1, groups[0].prompt.tokens, 5, (EOS,))
    empty.finish("abort")
    groups[0].requests[1] = empty
    batch = pack(groups, torch.tensor([[1.0, 2.0, 3.0]]))
    assert len(batch.response_lengths) == 2
    assert set(batch.advantages.tolist()) == {1.0, 3.0}
    assert len(microbatches(pack_requests([empty], [1.0]), 10)) == 0


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12)), min_size=1, max_size=12),
    budget=st.integers(1, 40),
)
def test_microbatches_hold_every_token_once_within_the_budget(lengths, budget):
    rng = random.Random(0)
    requests = [
        response([rng.randrange(2, 50) for _ in range(p)], [rng.randrange(2, 50) for _ in range(r)]) for p, r in lengths
    ]
    batch = pack_requests(requests, [float(i) for i in range(len(requests))])
    parts = microbatches(batch, budget)
    for part in parts:
        rows = len(part.input_ids)
        assert rows <= budget or len(part.response_lengths) == 1
        assert part.cu_seqlens[0] == 0 and part.cu_seqlens[-1] == rows
        assert torch.equal(part.input_ids[part.predicting_rows[1:]][_inside(part)], part.targets[:-1][_inside(part)])
    for name in ("input_ids", "positions", "targets", "sampler_logp", "advantages", "response_lengths"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))


def _inside(part) -> torch.Tensor:
    """Which pairs of neighbouring targets belong to one response: the row after a token holds that token."""
    owner = torch.repeat_interleave(torch.arange(len(part.response_lengths)), part.response_lengths)
    return owner[1:] == owner[:-1]


def test_a_sequence_longer_than_the_budget_is_a_microbatch_of_its_own():
    batch = pack_requests([response([2], [3] * n) for n in (2, 30, 2)], [0.0] * 3)
    assert [len(part.input_ids) for part in microbatches(batch, 8)] == [2, 30, 2]


@pytest.mark.parametrize("logp", [0.03125, 1e-3])
def test_positive_log_probs_of_a_bf16_head_are_refused(logp):
    """maxtext #5231: a BF16 head steps by 0.03125 and reports positive log-probs."""
    with pytest.raises(ValueError, match=r"sampler_logp of response 0 to prompt 'p'.*<= 0"):
        pack_requests([response([2], [3], [logp])], [1.0])


def test_bad_input_is_named(make_groups):
    with pytest.raises(ValueError, match="prompt of response 0 to prompt 'x'"):
        pack_requests([response([], [3], name="x")], [1.0])
    short = response([2], [3, 4])
    short.sampler_logp.pop()
    with pytest.raises(ValueError, match="equal lengths"):
        pack_requests([short], [1.0])
    with pytest.raises(ValueError, match=r"advantages\.shape"):
        pack(make_groups(0, groups=2), torch.zeros(1, 4))
