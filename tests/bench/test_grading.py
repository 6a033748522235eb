"""`bench grading`: responses of the fit's lengths that the grader reads, rows, and what it refuses."""

import pytest

from kv4rl.bench import grading
from kv4rl.bench.__main__ import main
from kv4rl.results import read_rows
from kv4rl.rollout.fits import FITS


def test_responses_have_the_fits_lengths_and_each_group_one_gold():
    items = grading.interval("4B-100", 3, seed=1)
    assert items == grading.interval("4B-100", 3, seed=1) and len(items) == 24
    workload = FITS["4B-100"].workload()
    tokens = [length for prompt in range(3) for length in workload.group(prompt)[1]]
    for (text, gold), wanted, index in zip(items, tokens, range(24), strict=True):
        assert 0 <= len(text) - grading.CHARACTERS * wanted < 200
        assert gold == items[index // 8 * 8][1]


def test_a_box_with_the_gold_is_right_and_nothing_fails():
    items = [(text, gold) for text, gold in grading.interval("4B-100", 2, seed=2) if len(text) < 3000]
    taken, verdicts = grading.seconds(items, workers=1, timeout_s=60.0)
    assert taken > 0 and all(verdict.error is None for verdict in verdicts)
    right = [f"\\boxed{{{gold}}}" in text for text, gold in items]
    assert any(right) and not all(right)
    assert [verdict.last_box == 1.0 for verdict in verdicts] == right


def test_rows_say_how_long_an_interval_takes(tmp_path):
    out = tmp_path / "grading.csv"
    main(["grading", "--fits", "4B-100", "--groups", "1", "--workers", "1", "--out", str(out)])
    rows = {row["metric"]: float(row["value"]) for row in read_rows(out)}
    assert rows["failed"] == 0 and rows["interval_s"] * rows["responses_per_s"] == pytest.approx(8, rel=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--groups", "0"], "groups=0: expected an integer >= 1"),
        (["--workers", "0"], "workers=0: expected an integer >= 1"),
        (["--timeout-s", "0"], "timeout-s=0.0: expected a number > 0"),
        (["--timeout-s", "inf"], "timeout-s=inf: expected a number > 0"),
        (["--seed", "-1"], "seed=-1: expected an integer >= 0"),
    ],
)
def test_bad_input_ends_with_one_sentence(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["grading", *words])
    assert message in capsys.readouterr().err and ended.value.code == 2
