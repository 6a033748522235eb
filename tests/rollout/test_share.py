"""Replicas share one prompt stream: together they draw every prompt, and none of them twice."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv4rl.rollout.group import ListStream, Prompt
from kv4rl.rollout.share import SharedStream


def shares(count: int, replicas: int) -> list[SharedStream]:
    prompts = [Prompt(str(index), [index], "1") for index in range(count)]
    return [SharedStream(ListStream(prompts), replica, replicas) for replica in range(replicas)]


def drain(stream) -> list[str]:
    found = []
    while True:
        try:
            found.append(stream.next().prompt_id)
        except StopIteration:
            return found


@given(count=st.integers(0, 40), replicas=st.integers(1, 6))
def test_every_prompt_belongs_to_exactly_one_replica(count, replicas):
    drawn = [drain(stream) for stream in shares(count, replicas)]
    assert sorted(itertools.chain(*drawn), key=int) == [str(index) for index in range(count)]
    assert max(map(len, drawn)) - min(map(len, drawn)) <= 1


@given(before=st.integers(0, 10), replica=st.integers(0, 2))
def test_a_state_continues_where_it_was_taken(before, replica):
    stream, again = shares(60, 3)[replica], shares(60, 3)[replica]
    for _ in range(before):
        stream.next()
    again.load_state(stream.state())
    assert drain(again) == drain(stream)


def test_another_replicas_state_and_places_out_of_range_are_refused():
    first, second = shares(4, 2)
    with pytest.raises(ValueError, match="replica, replicas"):
        first.load_state(second.state())
    with pytest.raises(ValueError, match="replica=2"):
        SharedStream(ListStream([]), 2, 2)
    with pytest.raises(ValueError, match="replicas=0"):
        SharedStream(ListStream([]), 0, 0)
