"""The sums that SmolLM2 learns: their two splits, and prompts that show how to answer."""

import itertools

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kv4rl.presets import preset
from kv4rl.rewards.boxes import last_box
from kv4rl.rewards.grader import Grader
from kv4rl.tasks import sums
from kv4rl.tasks.datasets import held_out_stream, open_stream
from kv4rl.tasks.stream import take
from kv4rl.tasks.tokenizer import build_tokenizer

LIMIT = {"max_prompt_tokens": 512}


@pytest.fixture
def tokenizer():
    """One token a word; a chat is its messages, a line each."""
    core = Tokenizer(models.WordLevel({"[?]": 0}, unk_token="[?]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[?]")
    made.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
    return made


def test_every_sum_is_in_one_split_but_for_the_examples():
    splits = [{record["prompt_id"] for _, record in sums.records(split)} for split in ("train", "evaluation")]
    assert not splits[0] & splits[1] and len(splits[0] | splits[1]) == 9**3 - len(sums.EXAMPLES)
    assert 0.15 < len(splits[1]) / 9**3 < 0.25


def test_the_worked_answer_boxes_the_gold():
    for terms in itertools.product(sums.DIGITS, repeat=3):
        assert last_box(sums.solution(terms)) == str(sum(terms))
    assert sums.solution((6, 8, 5)) == "6 + 8 = 14. 14 + 5 = 19. The answer is \\boxed{19}."


def test_a_prompt_shows_the_examples_and_then_asks(tokenizer):
    prompt = open_stream("sums", tokenizer, seed=3, **LIMIT).next()
    terms = tuple(map(int, prompt.prompt_id.split("-")[1:]))
    *shown, asked = prompt.text.strip().split("\n")
    assert asked == f"user {sums.question(terms)}" and prompt.answer == str(sum(terms))
    assert shown[:2] == [f"user {sums.question((4, 7, 2))}", f"assistant {sums.solution((4, 7, 2))}"]
    assert len(shown) == 2 * len(sums.EXAMPLES)


def test_training_goes_on_without_end_and_evaluation_asks_each_once_in_order(tokenizer):
    first, again, other = (open_stream("sums", tokenizer, seed=seed, **LIMIT) for seed in (1, 1, 2))
    prompts = take(first, len(first) + 1)
    assert take(again, 9) == prompts[:9] != take(other, 9)
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)  # a second visit has an id of its own
    held_out = held_out_stream("sums", tokenizer, seed=1, **LIMIT)
    asked = [prompt.prompt_id for prompt in take(held_out, len(held_out))]
    assert asked == [record["prompt_id"] for _, record in sums.records("evaluation")]


def test_the_terms_repeated_earn_nothing_under_the_presets_reading():
    reading = preset("smollm2").reading
    with Grader(workers=1) as grader:
        texts = ("6 + 8 + 5", sums.solution((6, 8, 5)))
        repeated, worked = grader.grade_many([(text, "19") for text in texts])
    assert (repeated.score("verl"), repeated.score(reading), worked.score(reading)) == (1, 0, 1)


def test_a_tokenizer_without_chats_and_a_split_that_is_none_are_named():
    with pytest.raises(ValueError, match="this tokenizer has no chat template"):
        open_stream("sums", build_tokenizer(), seed=1, **LIMIT)
    with pytest.raises(ValueError, match="split='test': expected one of"):
        sums.records("test")
