"""Traces and prompt streams at their edges: empty, wrong columns, a foreign file, a cursor out of range."""

import numpy as np
import pytest

from kv4rl.engine.protocol import StepStats
from kv4rl.rollout.group import ListStream, Prompt, PromptGroup
from kv4rl.rollout.trace import COLUMNS, Trace

STEP = StepStats("mixed", 3, 40, 96, 7, 3, 6, 1, 0.5)


def block(count=2):
    return {name: np.array(["decode"] * count) if name == "kind" else np.zeros(count) for name in COLUMNS}


def test_an_empty_trace_has_every_column_and_reads_back(tmp_path):
    trace = Trace()
    assert len(trace) == 0 and all(len(values) == 0 for values in trace.columns().values())
    trace.to_csv(tmp_path / "empty.csv")
    assert len(Trace.from_csv(tmp_path / "empty.csv")) == 0


def test_rows_and_blocks_keep_their_order():
    trace = Trace()
    trace.record(STEP, collection=4, policy_version=9, carried_context_tokens=15)
    trace.extend(block())
    trace.record(STEP, collection=5, policy_version=9, carried_context_tokens=40)
    assert trace.column("kind").tolist() == ["mixed", "decode", "decode", "mixed"]
    assert trace.column("fresh_context_tokens").tolist() == [25, 0, 0, 0]
    assert len(trace) == 4 and trace.pure_decode()["collection"].tolist() == [0, 0]


def test_wrong_columns_are_named(tmp_path):
    trace = Trace()
    with pytest.raises(ValueError, match="column='tokens': expected one of kind, collection"):
        trace.column("tokens")
    short = block()
    del short["replica"]
    with pytest.raises(ValueError, match="expected exactly kind, collection"):
        trace.extend(short)
    with pytest.raises(ValueError, match="expected arrays of one length"):
        trace.extend(block() | {"replica": np.zeros(3)})
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"header of .*other\.csv"):
        Trace.from_csv(tmp_path / "other.csv")


def test_a_cursor_outside_the_list_is_named():
    stream = ListStream([Prompt("a", [1], "")])
    with pytest.raises(ValueError, match="cursor=2: expected within a list of 1 prompts"):
        stream.load_state({"cursor": 2})
    stream.load_state({"cursor": 1})
    with pytest.raises(StopIteration):
        stream.next()


def test_a_group_with_too_few_scores_is_named():
    with pytest.raises(ValueError, match="scores=2: expected one entry for each of 0 responses"):
        PromptGroup(Prompt("a", [1], ""), [], 0, scores=[1.0, 0.0])
