"""The model in data/models/mini-qwen3: size, shape, reward in the band that leaves RL room, skill, lengths."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv4rl.tasks.measure import sample_responses
from kv4rl.tasks.pretrain import PretrainConfig, expected_reward, held_out_batches
from kv4rl.tasks.stream import mini_problems
from kv4rl.tasks.tokenizer import build_tokenizer

DIRECTORY = Path(__file__).parents[2] / "data" / "models" / "mini-qwen3"


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)


def test_it_is_small_grouped_and_complete(model):
    assert sum(parameter.numel() for parameter in model.parameters()) <= 8_000_000
    assert sum(file.stat().st_size for file in DIRECTORY.iterdir()) <= 16_000_000
    config = model.config
    assert (config.model_type, config.head_dim) == ("qwen3", 128)
    assert config.num_attention_heads == 2 * config.num_key_value_heads == 4
    assert {"README.md", "loss.csv", "generation_config.json"} <= {file.name for file in DIRECTORY.iterdir()}


def test_its_tokenizer_is_ours(model):
    tokenizer, ours = AutoTokenizer.from_pretrained(DIRECTORY), build_tokenizer()
    assert tokenizer.get_vocab() == ours.get_vocab()
    assert model.config.vocab_size == len(ours)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (ours.eos_token_id, ours.pad_token_id)


def test_temperature_one_leaves_rl_room_that_skill_can_fill(model):
    batches = held_out_batches(PretrainConfig(seed=7, evaluate_problems=192, batch_tokens=8192), torch.device("cpu"))
    expected = expected_reward(model, batches)
    assert 0.3 <= expected["reward"] <= 0.6
    assert expected["greedy"] >= 0.95


def test_it_stops_where_the_prompt_says(model):
    """Its own temperature-1 lengths are the references', which are heavy-tailed (test_mini.py)."""
    problems = [problem for problem in mini_problems(7, "evaluation", 48) if problem.steps <= 20]
    measured = sample_responses(model, AutoTokenizer.from_pretrained(DIRECTORY), problems, seed=0, max_tokens=256)
    references = [9 * problem.steps + 8 for problem in measured.problems]
    assert (measured.tokens == references).mean() >= 0.95
    assert not measured.truncated.any()
