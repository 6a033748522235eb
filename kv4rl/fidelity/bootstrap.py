"""Bootstrap over clusters: whole responses are drawn, each with all of its positions (§B.5)."""

import numpy as np
from numpy.typing import ArrayLike

from kv4rl.config import require

DRAWS = 10_000  # §B.5
LEVEL = 0.95


def cluster_draws(clusters: int, *, seed: int, draws: int = DRAWS) -> np.ndarray:
    """How often each cluster is drawn: int64 [draws, clusters], every row summing to `clusters`.

    Two statistics computed from one such table are paired: they see the same draws.
    """
    require(clusters >= 1, "clusters", clusters, "an integer >= 1")
    require(draws >= 1, "draws", draws, "an integer >= 1")
    chosen = np.random.default_rng(seed).integers(clusters, size=(draws, clusters))
    flat = chosen + np.arange(draws)[:, None] * clusters
    return np.bincount(flat.ravel(), minlength=draws * clusters).reshape(draws, clusters)


def bootstrap_means(per_cluster: ArrayLike, *, seed: int, draws: int = DRAWS) -> np.ndarray:
    """Mean of equal-sized clusters in each draw: per_cluster [clusters] of cluster means -> [draws]."""
    values = np.asarray(per_cluster, dtype=np.float64)
    require(values.ndim == 1, "per_cluster.shape", values.shape, "[clusters]")
    return cluster_draws(len(values), seed=seed, draws=draws) @ values / len(values)


def interval(draws: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval of bootstrap draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_interval(per_cluster: ArrayLike, *, seed: int, draws: int = DRAWS) -> tuple[float, float]:
    """95 % interval of the mean over clusters."""
    return interval(bootstrap_means(per_cluster, seed=seed, draws=draws))
