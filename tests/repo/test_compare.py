"""The comparison takes the newest row, keeps the paper's unit, and says so where nothing was measured."""

from kv4rl.compare import ABSENT, COMPARISONS, compare
from kv4rl.paper import PUBLISHED
from kv4rl.results import result_row, write_rows


def test_every_comparison_names_a_published_number():
    assert {item.published for item in COMPARISONS} <= set(PUBLISHED)


def test_an_unanswered_comparison_says_so(tmp_path):
    lines = compare(tmp_path)
    assert len(lines) == len(COMPARISONS) and {line["ours"] for line in lines} == {ABSENT}


def test_a_row_is_shown_in_the_papers_unit_with_its_interval(tmp_path):
    accuracy = result_row(
        experiment="train", arm="kv4rl", model="mini-qwen3", shape="seed43", metric="accuracy", unit="fraction",
        value=0.875, low=0.85, high=0.9,
    )  # fmt: skip
    write_rows(tmp_path / "train.csv", [accuracy])
    line = next(line for line in compare(tmp_path) if line["ours"] != ABSENT)
    assert line["ours"] == "87.5 % [85, 90]" and line["paper"] == "52.8 %"
