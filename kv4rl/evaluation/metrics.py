"""avg@k, pass@k and their spread over evaluation seeds (§B.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kv4rl.config import require

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)  # by degrees of freedom, from 1


def _correct(correct: ArrayLike) -> np.ndarray:
    array = np.asarray(correct)
    require(array.ndim == 2 and array.size > 0, "correct.shape", array.shape, "[questions, k], neither of them 0")
    require(bool(np.isin(array, (0, 1)).all()), "correct", np.unique(array)[:5].tolist(), "zeros and ones only")
    return array.astype(np.float64)


def avg_at_k(correct: ArrayLike) -> float:
    """Fraction of all samples that are correct: (nk)^-1 sum_i c_i (§B.2). correct: [n questions, k samples], 0 or 1."""
    return float(_correct(correct).mean())


def pass_at_k(correct: ArrayLike) -> float:
    """Fraction of questions with at least one correct sample: n^-1 sum_i 1{c_i > 0} (§B.2). correct: [n, k]."""
    return float(_correct(correct).max(axis=1).mean())


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (ddof = 1) over seeds; sd is 0 for a single seed, which shows no spread."""

    mean: float
    sd: float
    seeds: int


def spread(per_seed: Sequence[float]) -> Spread:
    """`Spread` of one score per seed. Raises ValueError without seeds."""
    values = np.asarray(per_seed, dtype=np.float64)
    require(values.ndim == 1 and values.size > 0, "per_seed", list(per_seed), "at least one score")
    return Spread(float(values.mean()), float(values.std(ddof=1)) if values.size > 1 else 0.0, values.size)


def table_row(scores: Mapping[int, Mapping[str, float]]) -> dict[str, Spread]:
    """One row of Table 1: each task's `Spread` over seeds, then `"Mean"`.

    scores: seed -> task -> score. Mean averages all tasks, equally weighted, within each seed, and only then takes the
    mean and standard deviation over seeds (§B.2). Raises ValueError if the seeds have different tasks.
    """
    require(len(scores) > 0, "scores", dict(scores), "at least one seed")
    tasks = list(next(iter(scores.values())))
    require(len(tasks) > 0, "tasks", tasks, "at least one task a seed")
    for seed, by_task in scores.items():
        require(set(by_task) == set(tasks), f"tasks of seed {seed}", sorted(by_task), f"{sorted(tasks)}")
    row = {task: spread([by_task[task] for by_task in scores.values()]) for task in tasks}
    row["Mean"] = spread([float(np.mean([by_task[task] for task in tasks])) for by_task in scores.values()])
    return row


def t_95(count: int) -> float:
    """Student's t for a two-sided 95 % interval of a mean over `count` >= 2 seeds, else ValueError.

    From the table to 12 seeds, above by its expansion about the normal quantile (Abramowitz and Stegun 26.7.5).
    """
    require(count >= 2, "seeds", count, "2 or more")
    if count - 2 < len(T_95):
        return T_95[count - 2]
    z, freedom = 1.959964, count - 1
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
