"""The six sets' fields, whichever copy they come from; rows are our own in their form."""

import json

import pytest

from kv4rl.config import InputError
from kv4rl.evaluation.benchmarks import BENCHMARKS, benchmark_of, load_benchmark, load_sets
from kv4rl.paper import EVALUATION_TASKS
from kv4rl.rewards import Gold
from kv4rl.tasks.instruction import INSTRUCTION


@pytest.fixture
def write(tmp_path):
    def file(name, *rows):
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    return file


OLYMPIAD = {
    "question": "Find all n.", "final_answer": ["$3$,$17$"], "is_multiple_answer": True,
    "answer_type": "Numerical", "unit": None, "error": None,
}  # fmt: skip

GOLDS = [
    ("math500", {"problem": "Add.", "answer": "\\frac{3}{7}"}, "\\frac{3}{7}"),
    ("aime24", {"ID": "own-1", "Problem": "Add.", "Solution": "...", "Answer": 33}, "33"),
    ("aime24", {"problem": "Add.", "answer": "033"}, "33"),
    ("aime25", {"problem": "Add.", "answer": "70"}, "70"),
    ("amc23", {"question": "Add.", "answer": 27.0}, "27"),
    ("amc23", {"question": "Add.", "answer": "-4.0"}, "-4"),
    ("minerva", {"problem": "Add.", "solution": "So \\boxed{6.1e21}."}, Gold(("6.1 \\times 10^{21}",), relative=1e-4)),
    ("minerva", {"question": "Add.", "answer": "A,B"}, Gold(("A", "B"), relative=1e-4)),
    ("olympiad", OLYMPIAD, Gold(("3", "17"), absolute=1e-8)),
    ("olympiad", OLYMPIAD | {"final_answer": ["3", "17"]}, Gold(("3", "17"), absolute=1e-8)),
    ("olympiad", OLYMPIAD | {"final_answer": '["3"]', "error": "1e-1", "unit": "%"}, Gold(("3\\%",), absolute=0.1)),
    ("olympiad", OLYMPIAD | {"final_answer": ["$(1,2), (3,4)$"]}, Gold(("(1,2)", "(3,4)"), absolute=1e-8)),
    ("olympiad", OLYMPIAD | {"final_answer": ["$z[1,5)$"], "answer_type": "Interval"}, Gold(("[1,5)",), absolute=1e-8)),
]


@pytest.mark.parametrize(("name", "row", "gold"), GOLDS)
def test_every_set_is_read_into_its_kind_of_gold(write, name, row, gold):
    problems = load_benchmark(name, write("rows.jsonl", row))
    (problem,) = problems.problems
    assert problem.answer == gold and problem.problem_id == f"{name}-1"
    assert problem.text.count(INSTRUCTION) == 1 and problem.text.endswith(INSTRUCTION)
    assert problems.title == BENCHMARKS[name].title


def test_an_olympiad_context_comes_before_the_question(write):
    row = OLYMPIAD | {"context": "Let n be whole."}
    (problem,) = load_benchmark("olympiad", write("rows.jsonl", row)).problems
    assert problem.text == f"Let n be whole.\nFind all n. {INSTRUCTION}"


def test_a_task_file_is_asked_as_it_stands_and_gsm8ks_answer_is_behind_its_marks(write):
    tasks, words = load_sets(
        [str(write("own.jsonl", {"prompt": "n=05\n", "answer": "12"})),
         str(write("words.jsonl", {"question": "How many?", "answer": "4 * 300 = 1,200\n#### 1,200"}))]
    )  # fmt: skip
    assert [(p.text, p.answer) for p in tasks.problems] == [("n=05\n", "12")] and tasks.benchmark is None
    assert words.problems[0].answer == "1,200" and words.problems[0].text.endswith(INSTRUCTION)


def test_sets_are_table_a2s_and_known_by_their_files_names():
    assert BENCHMARKS.keys() == EVALUATION_TASKS.keys()
    assert [(b.hub, b.questions, b.samples) for b in BENCHMARKS.values() if b.periodic] == [
        ("HuggingFaceH4/MATH-500", 500, 8), ("Maxwell-Jia/AIME_2024", 30, 32), ("yentinglin/aime_2025", 30, 32)
    ]  # fmt: skip
    names = {"MATH-500": "math500", "AIME_2024": "aime24", "olympiadbench": "olympiad", "minerva_math": "minerva"}
    assert {name: benchmark_of(name).name for name in names} == names and benchmark_of("gsm8k_test") is None


def test_a_directory_gives_the_sets_it_holds_in_the_papers_order(write):
    write("aime25.jsonl", {"problem": "Add.", "answer": "1"})
    write("other.jsonl", {"question": "Add.", "answer": "1"})
    folder = write("olympiadbench.jsonl", OLYMPIAD).parent
    assert [problems.name for problems in load_sets([str(folder)])] == ["olympiad", "aime25"]


@pytest.mark.parametrize(
    ("name", "row", "named"),
    [("math500", {"answer": "1"}, "rows.jsonl:1 fields=.*`problem` or `question`"),
     ("math500", {"problem": "Add."}, "rows.jsonl:1 fields=.*also answer, or a boxed `solution`"),
     ("minerva", {"problem": "Add.", "solution": "no box"}, "also answer"),
     ("olympiad", {"question": "Add."}, "also final_answer"),
     ("olympiad", OLYMPIAD | {"error": "little"}, "error='little': expected one number"),
     ("mini", {"problem": "Add."}, "set='mini': expected one of math500, olympiad")],
)  # fmt: skip
def test_wrong_sets_and_rows_are_named(write, name, row, named):
    with pytest.raises(InputError, match=named):
        load_benchmark(name, write("rows.jsonl", row))


def test_sets_given_twice_or_not_there_are_refused(write, tmp_path):
    path = str(write("aime25.jsonl", {"problem": "Add.", "answer": "1"}))
    for given, named in (
        ([path, f"aime25={path}"], "each set once"),
        ([], "sets="),
        (["x.jsonl"], "a file that exists"),
    ):
        with pytest.raises(InputError, match=named):
            load_sets(given)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"a directory with files such as math500, .*\.jsonl"):
        load_sets([str(tmp_path / "empty")])


def test_the_hub_is_asked_by_the_papers_name_and_says_what_would_do(monkeypatch):
    asked = []

    def unreachable(name, *, split, instead):
        asked.append((name, split))
        raise ConnectionError(instead)

    monkeypatch.setattr("kv4rl.evaluation.benchmarks.read_hub", unreachable)
    with pytest.raises(ConnectionError, match=r"--sets amc23=FILE with a local .jsonl or .parquet"):
        load_sets(["amc23"])
    with pytest.raises(ConnectionError):
        load_sets(["all"])
    assert asked == [("math-ai/amc23", "test"), ("HuggingFaceH4/MATH-500", "test")]


@pytest.mark.parametrize("answer", ['{"a": 1}', '["29"]', "true"])
def test_an_answer_that_is_no_text_or_number_is_refused(tmp_path, answer):
    (tmp_path / "mine.jsonl").write_text(f'{{"prompt": "n", "answer": {answer}}}\n')
    with pytest.raises(ValueError, match=r"mine\.jsonl:1 answer=.*expected a text or a number"):
        load_sets([str(tmp_path / "mine.jsonl")])
