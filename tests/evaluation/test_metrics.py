"""avg@k, pass@k and their spread over seeds, against numbers worked out by hand (§B.2)."""

import math

import pytest

from kv4rl.evaluation import avg_at_k, pass_at_k, spread, table_row
from kv4rl.evaluation.metrics import t_95

CORRECT = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]  # c = 2, 0, 4


def test_avg_at_k_averages_all_samples():
    assert avg_at_k(CORRECT) == 6 / 12


def test_pass_at_k_counts_questions_with_a_correct_sample():
    assert pass_at_k(CORRECT) == 2 / 3


def test_one_sample_makes_both_equal():
    assert avg_at_k([[1], [0], [0], [1]]) == pass_at_k([[1], [0], [0], [1]]) == 0.5


@pytest.mark.parametrize("correct", [[], [[]], [1, 0], [[0.5, 1.0]]])
def test_malformed_scores_are_refused(correct):
    for metric in (avg_at_k, pass_at_k):
        with pytest.raises(ValueError, match="correct"):
            metric(correct)


def test_spread_is_the_sample_standard_deviation():
    result = spread([0.5, 0.7, 0.6])
    assert math.isclose(result.mean, 0.6) and math.isclose(result.sd, 0.1) and result.seeds == 3
    assert spread([0.4]).sd == 0.0
    with pytest.raises(ValueError, match="per_seed"):
        spread([])


def test_mean_averages_tasks_within_a_seed_before_spreading_over_seeds():
    row = table_row({42: {"a": 0.8, "b": 0.2}, 43: {"a": 0.2, "b": 0.8}, 44: {"a": 0.5, "b": 0.5}})
    assert math.isclose(row["a"].mean, 0.5) and math.isclose(row["a"].sd, 0.3)
    assert math.isclose(row["Mean"].mean, 0.5)
    assert row["Mean"].sd < 1e-15  # the tasks of every seed average to 0.5


def test_seeds_with_different_tasks_are_refused():
    with pytest.raises(ValueError, match="tasks of seed 43"):
        table_row({42: {"a": 1.0}, 43: {"b": 1.0}})


@pytest.mark.parametrize(("count", "expected"), [(2, 12.706), (12, 2.201), (13, 2.179), (20, 2.093), (31, 2.042)])
def test_students_t_is_that_of_the_tables_beyond_them_too(count, expected):
    """Thirteen seeds of one setting had a whole report refused."""
    assert t_95(count) == pytest.approx(expected, abs=6e-4)
    with pytest.raises(ValueError, match="seeds=1: expected 2 or more"):
        t_95(1)
