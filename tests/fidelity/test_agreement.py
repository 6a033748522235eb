"""Agreement counts equal texts, common tokens and the log-prob distance on them."""

from types import SimpleNamespace

import pytest

from kv4rl.fidelity.agreement import agreement_table, common_tokens


def response(tokens, logp):
    return SimpleNamespace(tokens=tokens, sampler_logp=logp)


def test_common_tokens_stop_at_the_first_difference_or_the_shorter_end():
    assert [common_tokens([1, 2, 3], b) for b in ([1, 2, 3], [1, 9, 3], [1], [])] == [3, 1, 1, 0]


def test_table_compares_with_the_baseline():
    texts = {
        "bf16": [response([1, 2], [-1.0, -1.0]), response([3, 4], [-1.0, -1.0])],
        "kv4": [response([1, 2], [-1.5, -1.0]), response([3, 5], [-1.0, -9.0])],
    }
    same, other = agreement_table(texts, baseline="bf16")
    assert same["equal texts"] == "2 of 2" and same["log-prob distance there, nats"] == "0.0e+00"
    assert other["equal texts"] == "1 of 2" and other["tokens before the first difference"] == "75%"
    assert float(other["log-prob distance there, nats"]) == pytest.approx(0.5 / 3, rel=0.05)


def test_an_unknown_baseline_is_refused():
    with pytest.raises(ValueError, match="baseline='bf16'"):
        agreement_table({"kv4": []}, baseline="bf16")
