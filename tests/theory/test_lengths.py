"""Length distributions: exact laws, and what they refuse."""

import numpy as np
import pytest

from kv4rl.theory.lengths import LengthDistribution

LAWS = {
    "deterministic": LengthDistribution.deterministic(9),
    "geometric": LengthDistribution.geometric(20.0),
    "geometric, capped": LengthDistribution.geometric(20.0, cap=30),
    "lognormal": LengthDistribution.lognormal(100, 0.8, cap=800),
    "bimodal": LengthDistribution.bimodal(10, 300, 0.1),
    "pareto": LengthDistribution.pareto(5, 1.2, cap=500),
    "empirical": LengthDistribution.empirical([3, 9, 9, 40]),
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_probabilities_sum_to_one_and_moments_agree(law):
    assert law.probabilities.sum() == pytest.approx(1, abs=1e-12)
    assert law.variance == pytest.approx(law.moment(2) - law.mean**2, abs=1e-9 * law.moment(2))
    assert law.survival[-1] == 0 and law.cap == law.support[-1]
    assert np.allclose(law.survival, 1 - np.cumsum(law.probabilities), atol=1e-12)


def test_geometric_moments_are_the_closed_forms():
    law = LengthDistribution.geometric(50.0)
    assert law.mean == pytest.approx(50, rel=1e-12)
    assert law.variance == pytest.approx(50 * 49, rel=1e-11)


def test_a_cap_takes_the_mass_beyond_it():
    law = LengthDistribution.geometric(20.0, cap=30)
    assert law.probabilities[-1] == pytest.approx((1 - 1 / 20) ** 29)


def test_lognormal_has_its_median():
    law = LengthDistribution.lognormal(100, 0.8, cap=100000)
    assert law.quantile(0.5) == 100
    assert law.mean == pytest.approx(100 * np.exp(0.32) + 0.5, rel=1e-3)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_samples_follow_the_law(law):
    draws = law.sample(40000, np.random.default_rng(0))
    error = np.sqrt(law.variance / draws.size)
    assert abs(draws.mean() - law.mean) <= 4.5 * error
    assert set(np.unique(draws)) <= set(law.support)


def test_a_csv_column_makes_an_empirical_law(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("prompt,tokens\na,3\nb,5\nc,5\n")
    law = LengthDistribution.from_csv(file, "tokens")
    assert law.support.tolist() == [3, 5] and law.probabilities.tolist() == pytest.approx([1 / 3, 2 / 3])
    with pytest.raises(ValueError, match="column='length': expected one of prompt, tokens"):
        LengthDistribution.from_csv(file, "length")
    file.write_text("tokens\n3\n2.5\n")
    with pytest.raises(ValueError, match=r"lengths\.csv:3='2\.5': expected an integer length"):
        LengthDistribution.from_csv(file, "tokens")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LengthDistribution.empirical([]), "lengths="),
        (lambda: LengthDistribution.empirical([1.5, 2.0]), "expected integers"),
        (lambda: LengthDistribution.empirical([0, 2]), "expected lengths >= 1"),
        (lambda: LengthDistribution([1, 2], [0.5, 0.4]), "expected a sum of 1"),
        (lambda: LengthDistribution([1, 2], [1.5, -0.5]), "expected numbers >= 0"),
        (lambda: LengthDistribution([2, 1], [0.5, 0.5]), "strictly increasing"),
        (lambda: LengthDistribution([1, np.inf], [0.5, 0.5]), "finite lengths"),
        (lambda: LengthDistribution([1.5], [1.0]), "integer lengths"),
        (lambda: LengthDistribution([1, 2], [1.0]), r"expected shape \(2,\)"),
        (lambda: LengthDistribution.deterministic(0), "expected lengths >= 1"),
        (lambda: LengthDistribution.geometric(0.5), "mean=0.5"),
        (lambda: LengthDistribution.lognormal(10, 0, cap=5), "sigma=0"),
        (lambda: LengthDistribution.lognormal(10, 1, cap=0), "cap=0"),
        (lambda: LengthDistribution.bimodal(10, 10, 0.5), "less than long=10"),
        (lambda: LengthDistribution.bimodal(1, 10, 1.0), "long_share=1.0"),
        (lambda: LengthDistribution.pareto(1, 2.0), r"E\[L\^2\] is infinite, and Prop. 4.1 needs it finite"),
        (lambda: LengthDistribution.pareto(1, 2.5), "the support is unbounded"),
    ],
)
def test_bad_laws_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
