"""Prompt streams: reproducible, resumable, and clear about wrong files."""

import json
from pathlib import Path

import pytest

from kv4rl.config import InputError
from kv4rl.tasks.golds import unusable_golds
from kv4rl.tasks.stream import JsonlStream, MiniStream, mini_problems, take
from kv4rl.tasks.tokenizer import build_tokenizer

PROMPTS = [problem.prompt for problem in mini_problems(0, "train", 5)]


@pytest.fixture
def task_file(tmp_path):
    def write(*lines):
        path = tmp_path / "tasks.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    return write


@pytest.fixture
def five(task_file):
    return task_file(*({"prompt": prompt, "answer": str(i)} for i, prompt in enumerate(PROMPTS)))


def test_a_mini_prompt_carries_id_tokens_answer_and_text():
    prompt, problem = MiniStream(3).next(), mini_problems(3, "train", 1)[0]
    assert (prompt.text, prompt.answer) == (problem.prompt, problem.answer)
    assert build_tokenizer().decode(prompt.tokens) == problem.prompt
    assert prompt.prompt_id == "mini-train-3-0"


def test_a_mini_stream_depends_on_its_seed_and_split_alone():
    assert take(MiniStream(3), 4) == take(MiniStream(3), 4)
    assert take(MiniStream(3), 4) != take(MiniStream(4), 4)
    assert take(MiniStream(3), 4) != take(MiniStream(3, split="evaluation"), 4)


def test_a_mini_stream_continues_from_its_state():
    whole, first, resumed = MiniStream(3), MiniStream(3), MiniStream(3)
    expected = take(whole, 6)
    take(first, 4)
    resumed.load_state(json.loads(json.dumps(first.state())))
    assert take(resumed, 2) == expected[4:]


def test_a_mini_stream_refuses_the_state_of_another():
    with pytest.raises(ValueError, match="seed, split"):
        MiniStream(3).load_state(MiniStream(4).state())
    with pytest.raises(ValueError, match="split"):
        MiniStream(3, split="test")


def test_a_file_is_read_once_an_epoch_in_an_order_of_its_own(five):
    stream = JsonlStream(five, build_tokenizer(), seed=1)
    first, second = take(stream, 5), take(stream, 5)
    assert sorted(p.text for p in first) == sorted(p.text for p in second) == sorted(PROMPTS)
    assert [p.text for p in first] != [p.text for p in second]
    assert len({p.prompt_id for p in first + second}) == 10


def test_a_file_stream_can_end_and_keep_the_order(five):
    stream = JsonlStream(five, build_tokenizer(), shuffle=False, epochs=1)
    assert [p.text for p in take(stream, 5)] == PROMPTS
    with pytest.raises(StopIteration):
        stream.next()


def test_a_file_stream_continues_from_its_state_also_between_epochs(five):
    for taken in (3, 5, 7):
        whole, first, resumed = (JsonlStream(five, build_tokenizer(), seed=1) for _ in range(3))
        expected = take(whole, 12)
        take(first, taken)
        resumed.load_state(json.loads(json.dumps(first.state())))
        assert take(resumed, 12 - taken) == expected[taken:]


def test_a_file_stream_refuses_the_state_of_other_content(five, task_file):
    state = JsonlStream(five, build_tokenizer()).state()
    other = task_file({"prompt": PROMPTS[0], "answer": "1"})
    with pytest.raises(ValueError, match="state of"):
        JsonlStream(other, build_tokenizer()).load_state(state)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "at least one line"),
        ([{"prompt": "n=A\u00e9A", "answer": "1"}], r"tasks.jsonl:1 prompt='Aé': expected only characters"),
        ([{"prompt": "k \\box", "answer": "1"}], r"tasks.jsonl:1 prompt=.*expected only characters"),
        ([{"prompt": "n", "answer": None}], r"tasks.jsonl:1 answer=None: expected text or a number"),
        ([{"prompt": "n", "answer": " "}], r"answer=' ': expected text or a number"),
        ([{"prompt": "n", "answer": True}], r"answer=True: expected text or a number"),
        ([{"prompt": "n", "answer": ["1"]}], r"answer=\['1'\]: expected text or a number"),
        ([{"prompt": "n", "answer": 1, "prompt_id": None}], r"tasks.jsonl:1 prompt_id=None: expected text"),
        (
            [{"prompt": "n", "answer": 1, "prompt_id": "a"}] * 2,
            r"tasks.jsonl:2 prompt_id='a': expected another id: .*tasks.jsonl:1 has this one",
        ),
        (
            [{"prompt": "n", "answer": 1, "prompt_id": "tasks-2"}, {"prompt": "n", "answer": 1}],
            r"tasks.jsonl:2 prompt_id='tasks-2': expected another id",
        ),
        ([{"prompt": [{"role": "user", "content": "n"}], "answer": 1}], r"this tokenizer has no chat template"),
        (["", "  "], "at least one line"),
        (['{"prompt": "n"'], r"tasks.jsonl:1.*one JSON object"),
        (["[1, 2]"], r"tasks.jsonl:1.*a JSON object"),
        ([{"prompt": "n", "answer": "1"}, {"prompt": "n"}], r"tasks.jsonl:2 fields.*also answer"),
        ([{"answer": "1"}], "also prompt"),
        ([{"prompt": "", "answer": "1"}], "text or a list"),
        ([{"prompt": 3, "answer": "1"}], "text or a list"),
        ([{"prompt": "1" * 41, "answer": "1"}], r"prompt tokens=41.*max_prompt_tokens=40"),
    ],
)
def test_a_wrong_file_is_refused_at_once(task_file, lines, message):
    with pytest.raises(ValueError, match=message):
        JsonlStream(task_file(*lines), build_tokenizer(), max_prompt_tokens=40)


def test_chat_messages_go_through_the_template(task_file):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    path = task_file({"prompt": [{"role": "user", "content": "k=1"}], "answer": "1", "prompt_id": "one"})
    prompt = JsonlStream(path, tokenizer).next()
    assert (prompt.prompt_id, prompt.text, prompt.tokens) == ("one", "k=1=", tokenizer.encode("k=1="))


@pytest.mark.parametrize("messages", [[], ["n"], [{"role": "user"}], [{"role": "user", "content": 3}], [{"n": 1}]])
def test_messages_that_are_none_are_refused(task_file, messages):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match=r"tasks.jsonl:1 prompt=.*objects with `role` and `content`"):
        JsonlStream(task_file({"prompt": messages, "answer": "1"}), tokenizer)


def test_a_file_that_is_no_utf8_is_refused_naming_the_line(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"prompt": "n", "answer": "1"}\n{"prompt": "\xff", "answer": "1"}\n')
    with pytest.raises(InputError, match=r"tasks.jsonl:2=b'\\xff': expected UTF-8"):
        JsonlStream(path, build_tokenizer())


def test_a_byte_order_mark_and_line_separators_inside_strings_are_fine(tmp_path):
    path = tmp_path / "tasks.jsonl"
    lines = [{"prompt": "n=1", "answer": 1}, {"prompt": "n=2", "answer": "a\u2028b"}]
    path.write_text("\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8-sig")
    assert [p.answer for p in take(JsonlStream(path, build_tokenizer(), shuffle=False), 2)] == ["1", "a\u2028b"]


def test_answers_that_the_grader_cannot_use_are_left_out_and_named(task_file):
    answers = ["4", "?", "\\frac{1}{2}", "", "7"]
    lines = [{"prompt": PROMPTS[i], "answer": answer or "1e"} for i, answer in enumerate(answers)]
    stream = JsonlStream(task_file(*lines), build_tokenizer(), shuffle=False, check_golds=True)
    assert [p.answer for p in take(stream, len(stream))] == ["4", "\\frac{1}{2}", "1e", "7"]
    (left,) = stream.left_out
    assert left.where.endswith("tasks.jsonl:2") and "gold='?': expected an answer that" in left.reason
    everything = JsonlStream(task_file(*lines), build_tokenizer())
    with pytest.raises(InputError, match="state of"):  # the cursor of one means other prompts in the other
        everything.load_state(stream.state())


def test_a_file_of_nothing_gradable_is_an_error(task_file):
    path = task_file(*({"prompt": prompt, "answer": "x="} for prompt in PROMPTS))
    with pytest.raises(InputError, match=r"none of 5 is, the first because of gold='x='"):
        JsonlStream(path, build_tokenizer(), check_golds=True)


def test_a_gold_that_keeps_the_checker_busy_is_given_up_and_the_rest_checked():
    endless = "\\binom{99999999}{3999999}"
    reasons = unusable_golds(["3", endless, "1", "?"], limit_s=2.0)
    assert set(reasons) == {endless, "?"} and "within 2 s" in reasons[endless]


def test_the_shipped_task_file_holds_the_evaluation_split():
    path = Path(__file__).parents[2] / "data" / "tasks" / "mini-evaluation.jsonl"
    shipped = take(JsonlStream(path, build_tokenizer(), shuffle=False, epochs=1), 128)
    assert shipped == take(MiniStream(7, split="evaluation"), 128)
