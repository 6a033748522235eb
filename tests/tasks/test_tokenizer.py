"""The mini tokenizer: one token a character, the box's opening as one, and what AutoTokenizer makes of it."""

import pytest
from transformers import AutoTokenizer

from kv4rl.tasks.mini import MiniProblem, write_solution
from kv4rl.tasks.pretrain_data import EOS_ID, PAD_ID, PROMPT_TOKENS, encode_worked
from kv4rl.tasks.tokenizer import TOKENS, build_tokenizer, save_tokenizer

PROBLEM = MiniProblem(last=8, probe=2, divisor=2, start=(12, 45, 78, 3))


def test_text_survives_a_round_trip_and_nothing_is_added():
    tokenizer = build_tokenizer()
    text = PROBLEM.prompt + write_solution(PROBLEM)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text) - len("boxed{")
    assert len(tokenizer.encode(PROBLEM.prompt)) == PROMPT_TOKENS


def test_the_vocabulary_is_small_even_and_has_distinct_ends():
    tokenizer = build_tokenizer()
    assert len(tokenizer) == len(TOKENS) == len(set(TOKENS)) == 32
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_the_saved_tokenizer_is_the_same(tmp_path):
    save_tokenizer(tmp_path)
    text = PROBLEM.prompt + write_solution(PROBLEM)
    saved, built = AutoTokenizer.from_pretrained(tmp_path), build_tokenizer()
    assert saved.encode(text) == built.encode(text)
    assert (saved.eos_token_id, saved.pad_token_id) == (built.eos_token_id, built.pad_token_id)
    assert saved.decode([*saved.encode(text), saved.eos_token_id], skip_special_tokens=True) == text


def test_a_character_outside_the_vocabulary_raises():
    with pytest.raises(Exception, match="UNK"):
        build_tokenizer().encode("y=1")


def test_the_table_encoder_of_pretraining_agrees_with_the_tokenizer():
    tokenizer, solution = build_tokenizer(), write_solution(PROBLEM)
    expected = [*tokenizer.encode(PROBLEM.prompt + solution), tokenizer.eos_token_id]
    assert encode_worked(PROBLEM, solution).tolist() == expected
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS_ID, PAD_ID)
