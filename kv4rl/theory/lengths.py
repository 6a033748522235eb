"""Response-length distributions with finite support: the D of Prop. 4.1, exact to rounding."""

import csv
import functools
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kv4rl.config import require

_NEGLIGIBLE = 1e-18  # survival probability at which an unbounded geometric tail is cut: below float64's resolution


def finite(value: object) -> bool:
    """Whether `value` is a finite number, Python's or numpy's (a bool is none)."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def whole(value: object) -> bool:
    """Whether `value` is a finite number without a fractional part, of an integer type or a float."""
    return finite(value) and value == int(value)


@dataclass(frozen=True, eq=False)
class LengthDistribution:
    """Positive integer lengths in tokens and their probabilities.

    `support` int64 [n], strictly increasing; `probabilities` float64 [n], positive, summing to one.
    """

    support: np.ndarray
    probabilities: np.ndarray

    def __post_init__(self):
        support, probabilities = np.asarray(self.support), np.asarray(self.probabilities, dtype=np.float64)
        require(support.ndim == 1 and support.size > 0, "support", self.support, "a non-empty list of lengths")
        require(support.dtype.kind in "iuf", "support", self.support, "numbers")
        require(bool(np.all(np.isfinite(support))), "support", self.support, "finite lengths")
        require(bool(np.all(support == np.floor(support))), "support", self.support, "integer lengths")
        require(support.min() >= 1, "support", support.min(), "lengths >= 1")
        require(bool(np.all(np.diff(support) > 0)), "support", self.support, "strictly increasing lengths")
        require(probabilities.shape == support.shape, "probabilities", probabilities.shape, f"shape {support.shape}")
        require(bool(np.all(probabilities >= 0)), "probabilities", probabilities.min(), "numbers >= 0")
        total = math.fsum(probabilities)
        rounding = support.size * np.finfo(np.float64).eps
        require(abs(total - 1) <= max(rounding, 1e-12), "probabilities", total, "a sum of 1")
        object.__setattr__(self, "support", support.astype(np.int64))
        object.__setattr__(self, "probabilities", probabilities / total)

    @property
    def mean(self) -> float:
        """mu = E[L]."""
        return self.moment(1)

    @property
    def variance(self) -> float:
        """sigma^2, from the centred lengths."""
        return float(np.dot((self.support - self.mean) ** 2, self.probabilities))

    @property
    def cap(self) -> int:
        """Largest length."""
        return int(self.support[-1])

    def moment(self, order: int) -> float:
        """E[L^order]."""
        return float(np.dot(self.support.astype(np.float64) ** order, self.probabilities))

    @property
    def survival(self) -> np.ndarray:
        """Pr(L > support[i]), float64 [n], summed from the tail so that small values keep their digits."""
        tail = np.cumsum(self.probabilities[::-1])[::-1]
        return np.minimum(np.append(tail[1:], 0.0), 1.0)  # a long sum may round to just above one

    @functools.cached_property
    def cdf(self) -> np.ndarray:
        """Pr(L <= support[i]), float64 [n]."""
        return np.cumsum(self.probabilities)

    def quantile(self, level: float) -> int:
        """Smallest length whose cumulative probability reaches `level`."""
        require(0 <= level <= 1, "level", level, "a probability")
        reached = np.searchsorted(self.cdf, level - 1e-12)
        return int(self.support[min(reached, len(self.support) - 1)])

    def sample(self, shape: int | tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        """Independent lengths, int64 of `shape`."""
        positions = np.searchsorted(self.cdf, rng.random(shape), side="right")
        return self.support[np.minimum(positions, len(self.support) - 1)]

    @classmethod
    def deterministic(cls, length: int) -> "LengthDistribution":
        """Every response has the same length: C_KV = 1."""
        return cls(np.array([length]), np.array([1.0]))

    @classmethod
    def geometric(cls, mean: float, cap: int | None = None) -> "LengthDistribution":
        """Pr(L = l) = p (1 - p)^(l - 1) with p = 1 / mean; `cap`, if given, takes the mass beyond it."""
        require(finite(mean) and mean >= 1, "mean", mean, "a finite number >= 1")
        stop = 1.0 - 1.0 / mean  # probability to go on after each token
        if cap is None:
            cap = 1 if stop == 0 else 1 + math.ceil(math.log(_NEGLIGIBLE) / math.log(stop))
        return _from_survival(lambda length: stop**length, cap)

    @classmethod
    def lognormal(cls, median: float, sigma: float, cap: int) -> "LengthDistribution":
        """exp(N(log median, sigma^2)) rounded up to whole tokens; the cap takes the mass beyond it, as a token limit
        does. `median` is that of the uncapped law; without a cap the law is fitted by no finite model."""
        require(finite(median) and median > 0, "median", median, "a finite number > 0")
        require(finite(sigma) and sigma > 0, "sigma", sigma, "a finite number > 0")
        scale = sigma * math.sqrt(2)
        erfc = np.frompyfunc(math.erfc, 1, 1)
        return _from_survival(lambda length: 0.5 * erfc(np.log(length / median) / scale).astype(np.float64), cap)

    @classmethod
    def bimodal(cls, short: int, long: int, long_share: float) -> "LengthDistribution":
        """Two lengths: `long` with probability `long_share`, else `short`."""
        require(whole(short) and whole(long), "short, long", (short, long), "two integers")
        require(short < long, "short", short, f"less than long={long}")
        require(0 < long_share < 1, "long_share", long_share, "a number in (0, 1)")
        return cls(np.array([short, long]), np.array([1 - long_share, long_share]))

    @classmethod
    def pareto(cls, minimum: int, exponent: float, cap: int | None = None) -> "LengthDistribution":
        """Power-law tail, Pr(L > l) = (l / minimum)^-exponent from `minimum` on; the cap takes the rest."""
        require(finite(exponent) and exponent > 0, "exponent", exponent, "a number > 0")
        require(whole(minimum) and minimum >= 1, "minimum", minimum, "an integer >= 1")
        if cap is None:
            reason = (
                "E[L^2] is infinite, and Prop. 4.1 needs it finite" if exponent <= 2 else "the support is unbounded"
            )
            require(False, "cap", cap, f"a token limit: without one and with exponent {exponent}, {reason}")
        return _from_survival(lambda length: np.minimum(1.0, (length / minimum) ** -exponent), cap)

    @classmethod
    def mixture(cls, laws: Sequence["LengthDistribution"], shares: Sequence[float]) -> "LengthDistribution":
        """A response follows `laws[i]` with probability `shares[i]`."""
        require(len(laws) == len(shares) > 0, "shares", shares, f"one share for each of {len(laws)} laws")
        dense = np.zeros(max(law.cap for law in laws) + 1)
        for law, share in zip(laws, shares, strict=True):
            dense[law.support] += share * law.probabilities
        support = np.flatnonzero(dense)
        return cls(support, dense[support])

    @classmethod
    def empirical(cls, lengths: Sequence[int]) -> "LengthDistribution":
        """The observed lengths, each equally likely."""
        values = np.asarray(lengths)
        require(values.ndim == 1 and values.size > 0, "lengths", lengths, "a non-empty list of integers")
        require(values.dtype.kind in "iu", "lengths", values.dtype, "integers")
        support, counts = np.unique(values, return_counts=True)
        return cls(support, counts / values.size)

    @classmethod
    def from_csv(cls, path: str | Path, column: str) -> "LengthDistribution":
        """The empirical law of one column of integers in a CSV file with a header."""
        with Path(path).open(newline="") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            require(column in names, "column", column, f"one of {', '.join(names)} in {path}")
            texts = [row[column] for row in reader]
        for line, text in enumerate(texts, start=2):
            require(text.strip().lstrip("+-").isdigit(), f"{path}:{line}", text, "an integer length")
        return cls.empirical([int(text) for text in texts])


def _from_survival(survival, cap: int) -> LengthDistribution:
    """The law on 1 … cap with Pr(L > l) = survival(l) for l < cap; zero-probability lengths are left out."""
    require(whole(cap) and cap >= 1, "cap", cap, "a token limit, an integer >= 1")
    cap = int(cap)
    lengths = np.arange(1, cap, dtype=np.float64)
    beyond = np.concatenate([[1.0], np.asarray(survival(lengths), dtype=np.float64), [0.0]])
    probabilities = beyond[:-1] - beyond[1:]
    keep = probabilities > 0
    return LengthDistribution(np.arange(1, cap + 1)[keep], probabilities[keep])
