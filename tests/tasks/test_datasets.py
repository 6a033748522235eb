"""Training data sets: fields, the instruction once, golds and prompts that cannot be used, and the hub (a fake)."""

import json
import sys
import types

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kv4rl.config import InputError
from kv4rl.tasks.datasets import DAPO, DataSetStream, open_stream
from kv4rl.tasks.instruction import INSTRUCTION, with_instruction
from kv4rl.tasks.rows import read_file, read_hub
from kv4rl.tasks.stream import JsonlStream, MiniStream, take
from kv4rl.tasks.tokenizer import build_tokenizer

ROWS = [
    {"prompt": "What is 17 + 25?", "solution": "42"},
    {"prompt": f"How many halves are in 9? {INSTRUCTION}", "solution": "It is \\boxed{18}.", "data_source": "own"},
    {"prompt": [{"role": "user", "content": "Add one to 30."}], "reward_model": {"ground_truth": 31}},
    {"prompt": "Who is it?", "solution": "\\frac{"},
    {"prompt": "word " * 60, "solution": "1"},
]


@pytest.fixture(scope="module")
def tokenizer():
    """One token a word, all of them unknown: as many as the text has words."""
    core = Tokenizer(models.WordLevel({"[?]": 0, "<eos>": 1}, unk_token="[?]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[?]", eos_token="<eos>")


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


@pytest.fixture
def hub(monkeypatch):
    """A `datasets` module whose `load_dataset` does as `hub.answer` says, and remembers how it was called."""
    module = types.ModuleType("datasets")
    module.calls = []

    def load_dataset(name, config=None, *, split):
        module.calls.append((name, config, split))
        if isinstance(module.answer, Exception):
            raise module.answer
        return iter(module.answer)

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


@pytest.mark.parametrize(
    "more", [{"reward_model": {"style": "rule"}}, {"reward_model": {"ground_truth": ""}}, {"answer": ""}]
)
def test_a_solution_is_the_gold_where_the_row_has_no_other(tmp_path, tokenizer, more):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"prompt": "What is 17 + 25?", "solution": "42"} | more))
    assert DataSetStream(path, tokenizer, max_prompt_tokens=40).next().answer == "42"


def test_rows_become_prompts_with_the_instruction_once(data_file, tokenizer):
    stream = DataSetStream(data_file, tokenizer, max_prompt_tokens=40, shuffle=False, epochs=1)
    prompts = take(stream, len(stream))
    assert [prompt.answer for prompt in prompts] == ["42", "18", "31"]
    assert [prompt.text.count(INSTRUCTION) for prompt in prompts] == [1, 1, 1]
    assert prompts[2].text == f"Add one to 30. {INSTRUCTION}"
    assert [prompt.prompt_id for prompt in prompts] == ["own-1", "own-2", "own-3"]
    with pytest.raises(StopIteration):
        stream.next()


def test_what_cannot_be_used_is_counted_and_named(data_file, tokenizer):
    stream = DataSetStream(data_file, tokenizer, max_prompt_tokens=40)
    assert len(stream) == 3 and len(stream.left_out) == 2
    long, unusable = stream.left_out
    assert long.where == f"{data_file}:5" and "a prompt of 72 tokens" in long.reason and "40" in long.reason
    assert unusable.where == f"{data_file}:4" and "gold='\\\\frac{'" in unusable.reason


def test_a_stream_continues_where_it_was(data_file, tokenizer):
    first, second = (DataSetStream(data_file, tokenizer, max_prompt_tokens=40, seed=5) for _ in range(2))
    take(first, 4)
    second.load_state(first.state())
    assert take(first, 4) == take(second, 4)
    other = DataSetStream(data_file, tokenizer, max_prompt_tokens=100, seed=5)  # keeps the long prompt
    with pytest.raises(ValueError, match="state of"):
        other.load_state(first.state())


def test_parquet_holds_the_same_data(tmp_path, data_file, tokenizer):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "own.parquet"
    parquet.write_table(arrow.Table.from_pylist(ROWS[:2]), path)
    stream = DataSetStream(path, tokenizer, shuffle=False)
    assert [prompt.answer for prompt in take(stream, 2)] == ["42", "18"]
    path.write_bytes(b"no parquet")
    with pytest.raises(InputError, match="a whole parquet file"):
        read_file(path)


@pytest.mark.parametrize(
    ("row", "named"),
    [({"solution": "1"}, ":1 fields=.*`prompt`"), ({"prompt": "Say one."}, ":1 fields=.*`solution`"),
     ({"prompt": "", "solution": "1"}, "`prompt`"), ({"prompt": [], "solution": "1"}, "`prompt`")],
)  # fmt: skip
def test_a_row_without_the_needed_fields_is_named(tmp_path, tokenizer, row, named):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(InputError, match=named):
        DataSetStream(path, tokenizer)


def test_prompts_that_are_all_too_long_are_an_error(data_file, tokenizer):
    with pytest.raises(InputError, match="max_prompt_tokens=3: expected at least 15"):
        DataSetStream(data_file, tokenizer, max_prompt_tokens=3)


def test_the_hub_is_asked_for_the_english_training_split(hub, tokenizer):
    hub.answer = ROWS[:1]
    stream = DataSetStream(DAPO, tokenizer)
    assert hub.calls == [(DAPO, "en", "train")]
    assert stream.next().prompt_id == "DAPO-Math-17k-Processed-1"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [(ConnectionError("Couldn't reach it"), ConnectionError, "the hub did not deliver it .*HF_HUB_OFFLINE"),
     (ValueError("Unknown split"), InputError, "expected one with 'test' .Unknown split"),
     (FileNotFoundError("doesn't exist on the Hub"), InputError, "doesn't exist on the Hub")],
)  # fmt: skip
def test_a_hub_that_fails_says_which_local_file_would_do(hub, error, kind, message):
    hub.answer = error
    with pytest.raises(kind, match=f"data set='a/b'.*{message}.*pass FILE"):
        read_hub("a/b", split="test", instead="pass FILE")


def test_without_the_datasets_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"needs the datasets package .pip install 'kv4rl.data.'., or pass FILE"):
        read_hub("a/b", split="test", instead="pass FILE")


def test_a_name_opens_the_stream_it_means(hub, data_file, tmp_path, tokenizer):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": "n=05\n", "answer": "1"}))
    options = {"seed": 1, "max_prompt_tokens": 40}
    assert isinstance(open_stream("mini", build_tokenizer(), **options), MiniStream)
    assert open_stream(str(tasks), build_tokenizer(), **options).next().text == "n=05\n"
    assert type(open_stream(str(tasks), build_tokenizer(), **options)) is JsonlStream
    assert type(open_stream(str(data_file), tokenizer, **options)) is DataSetStream
    hub.answer = ROWS[:1]
    assert type(open_stream(DAPO, tokenizer, **options)) is DataSetStream
    for wrong in ("minni", "nowhere.jsonl", "nowhere.parquet", str(tmp_path)):
        with pytest.raises(InputError, match=f"tasks='{wrong}': expected mini, sums, a .jsonl or .parquet file"):
            open_stream(wrong, tokenizer, **options)


PROBLEM = "How many primes are below 30?"


@pytest.mark.parametrize(
    "carried",
    [PROBLEM, f"  {PROBLEM}\n", f"{PROBLEM} {INSTRUCTION}", f"{PROBLEM}\n{INSTRUCTION} {INSTRUCTION}",
     f"{INSTRUCTION}\n{PROBLEM}", f"{PROBLEM} {INSTRUCTION.replace(chr(39), chr(8217)).lower()}",
     "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
     f"$Answer (without quotes) where $Answer is the answer to the problem.\n\n{PROBLEM}\n\n"
     'Remember to put your answer on its own line after "Answer:".'],
)  # fmt: skip
def test_the_instruction_is_there_once_whatever_the_row_carries(carried):
    assert with_instruction(carried) == f"{PROBLEM} {INSTRUCTION}"


def test_another_boxed_instruction_is_left_alone():
    text = f"{PROBLEM} Please reason, and put your final answer within \\boxed{{}}."
    assert with_instruction(text) == text
    assert with_instruction("Copy \\boxed{}. How often?").endswith(INSTRUCTION)


def test_a_prompt_of_unknown_characters_names_its_row(tmp_path):
    path = tmp_path / "words.jsonl"
    path.write_text(json.dumps({"problem": "What is 1+1?", "solution": "2"}))
    with pytest.raises(InputError, match=r"words.jsonl:1 prompt=.*: expected only characters that"):
        DataSetStream(str(path), build_tokenizer(), seed=0)
