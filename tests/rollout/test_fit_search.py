"""The search behind the fits: the objective is zero at its own answer and never rises on the way."""

import itertools
import math

import pytest

from kv4rl.config import RolloutConfig
from kv4rl.paper import PUBLISHED, REPLAY_SHAPES
from kv4rl.rollout import fit_search, paper_traces
from kv4rl.rollout.fits import Fit, fit

START = Fit("4b", 60, 0.6, 0.01, 0.4)


def published_exactly(name):
    """What `measure` would return for a fit that meets every published number."""
    found = {("partial_over_sync", "active_batch_ratio"): PUBLISHED["trace/4b-300/active_batch_ratio"].value}
    for number, shape in enumerate(REPLAY_SHAPES[name], start=1):
        for metric, value in zip(("active_requests", "context_tokens"), shape, strict=True):
            found["partial", f"phase{number}_{metric}"] = value
    return found


def test_deviations_are_logarithms_of_ours_over_the_papers(monkeypatch):
    exact = published_exactly("4B-300")
    monkeypatch.setattr(fit_search, "measure", lambda found, seed: exact)
    off = fit_search.deviations("4B-300", fit("4B-300"))
    mean = math.log(fit("4B-300").lengths.mean / PUBLISHED["length/4b/mean_bf16"].value)
    assert off.pop("mean_length") == pytest.approx(mean)
    assert len(off) == 11 and set(off.values()) == {0.0}
    exact["partial", "phase2_active_requests"] *= 1.1
    assert fit_search.misfit("4B-300", fit("4B-300")) == pytest.approx(math.hypot(mean, math.log(1.1)) / 12**0.5)


def test_the_late_8b_case_is_weighed_by_its_volumes(monkeypatch):
    exact = published_exactly("8B-400") | {("partial", "resident_kv_gb"): 91.7, ("sync", "resident_kv_gb"): 66.8}
    monkeypatch.setattr(fit_search, "measure", lambda found, seed: exact)
    off = fit_search.deviations("8B-400", fit("8B-400"))
    assert off["active_kv_async"] == off["active_kv_sync"] == 0


def test_the_search_finds_the_minimum_of_a_bowl():
    goal = Fit("4b", 75, 0.5, 0.012, 0.5)
    bowl = lambda found: sum(math.log(getattr(found, n) / getattr(goal, n)) ** 2 for n in fit_search.FREE)
    steps = list(fit_search.search(START, bowl, 40))
    assert all(later <= earlier for (_, earlier), (_, later) in itertools.pairwise(steps))
    assert steps[0] == (START, bowl(START)) and steps[-1][1] < 1e-3
    assert len(steps) < 40  # it stops by itself once the step is fine


def test_two_steps_on_the_simulator_do_not_raise_the_misfit(monkeypatch, capsys):
    config = lambda self, arm: RolloutConfig(
        collector=arm, groups_per_update=4, responses_per_group=2, cache_pages=40000
    )
    monkeypatch.setattr(paper_traces, "measured_rounds", lambda found: range(1, 2))
    monkeypatch.setattr(Fit, "rollout", config)
    fit_search.main(["--checkpoint", "4B-300", "--iterations", "2"])
    lines = capsys.readouterr().out.split("\n")
    values = [float(line.split()[1].rstrip(":")) for line in lines if line.startswith("misfit")]
    assert len(values) == 3 and values == sorted(values, reverse=True) and values[-1] < values[0]


def test_a_search_without_steps_ends_with_one_sentence(capsys):
    with pytest.raises(SystemExit) as ending:
        fit_search.main(["--iterations", "0"])
    assert ending.value.code == 2 and "iterations=0: expected an integer >= 1" in capsys.readouterr().err
