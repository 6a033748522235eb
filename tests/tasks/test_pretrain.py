"""Pretraining: batches, the sampling-free reward, and a run of a few steps whose result transformers loads."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv4rl.tasks.measure import sample_responses
from kv4rl.tasks.mini import draw_problem, write_solution
from kv4rl.tasks.pretrain import (
    PretrainConfig,
    build_model,
    expected_reward,
    held_out_batches,
    learning_rate_at,
    pretrain,
)
from kv4rl.tasks.pretrain_data import (
    IGNORED,
    PAD_ID,
    PROMPT_TOKENS,
    encode_worked,
    labels_of,
    length_batches,
    training_batches,
)
from kv4rl.tasks.stream import mini_problems

TINY = PretrainConfig(
    steps=4, batch_tokens=2048, warmup=2, evaluate_every=2, evaluate_problems=8, workers=0, hidden=32, intermediate=32,
    layers=1, device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    rng = random.Random(0)
    return [encode_worked(problem, write_solution(problem)) for problem in (draw_problem(rng) for _ in range(64))]


def test_length_batches_lose_nothing_and_keep_to_the_budget(rows):
    batches = length_batches(rows, 2048)
    assert sum(len(batch) for batch in batches) == len(rows)
    assert all(batch.numel() <= 2048 for batch in batches)
    assert sum(int((batch != PAD_ID).sum()) for batch in batches) == sum(map(len, rows))


def test_labels_cover_the_response_and_its_end_alone(rows):
    ids = length_batches(rows[:3], 10**6)[0]
    labels = labels_of(ids)
    for row, label in zip(ids, labels, strict=True):
        kept = label[label != IGNORED]
        assert kept.tolist() == row[PROMPT_TOKENS:][row[PROMPT_TOKENS:] != PAD_ID].tolist()
        assert (label[: PROMPT_TOKENS - 1] == IGNORED).all()


def test_batches_depend_on_the_seed_alone():
    first = [next(training_batches(1, 0.03, 2048, workers=0)) for _ in range(2)]
    other = next(training_batches(2, 0.03, 2048, workers=0))
    assert torch.equal(*first)
    assert first[0].shape != other.shape or not torch.equal(first[0], other)


def test_expected_reward_is_the_product_of_the_correct_tokens_probabilities():
    model = build_model(TINY)
    batches = held_out_batches(replace(TINY, evaluate_problems=2), torch.device("cpu"))
    total = 0.0
    for row in torch.cat([torch.nn.functional.pad(b, (0, 900 - b.shape[1])) for b in batches]):
        ids = row[row != PAD_ID].long()
        logp = model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
        total += logp[PROMPT_TOKENS - 1 :].gather(1, ids[PROMPT_TOKENS:, None]).sum().exp().item() / 2
    assert expected_reward(model, batches)["reward"] == pytest.approx(total, rel=1e-3)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    config = replace(TINY, learning_rate=1.0, warmup=10, steps=100)
    rates = [learning_rate_at(step, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[99] == pytest.approx(0.1, abs=0.01)


def test_a_short_run_learns_keeps_its_stages_and_can_be_loaded(tmp_path):
    output = tmp_path / "model"
    curve = pretrain(replace(TINY, output=str(output), stages=(0.0,)))
    assert [row["step"] for row in curve] == [2, 4]
    assert curve[-1]["held_out_loss"] < curve[0]["held_out_loss"]
    assert (tmp_path / "model-0.00" / "model.safetensors").exists()
    assert len((output / "loss.csv").read_text().splitlines()) == 3
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert model.dtype == torch.bfloat16
    assert model.config.head_dim == 128
    measured = sample_responses(model.float(), tokenizer, mini_problems(0, "evaluation", 4), seed=0, max_tokens=8)
    assert measured.summary()["n"] == 4
    assert (measured.tokens <= 8).all()


def test_two_runs_of_one_seed_are_equal(tmp_path):
    curves = [pretrain(replace(TINY, output=str(tmp_path / name), steps=2)) for name in ("a", "b")]
    assert curves[0][-1]["loss"] == curves[1][-1]["loss"]
    assert curves[0][-1]["reward"] == curves[1][-1]["reward"]
