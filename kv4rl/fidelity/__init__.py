"""Fidelity: how far a quantised cache moves the sampler along fixed token histories (Eq. 5.2, §B.5)."""

from kv4rl.fidelity.bootstrap import bootstrap_means, cluster_draws, interval, mean_interval

__all__ = ["bootstrap_means", "cluster_draws", "interval", "mean_interval"]
