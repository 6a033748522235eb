"""Sampler KL of cache formats against the unquantised cache, with response-cluster intervals (Eq. 5.2, §B.5)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kv4rl.config import KVConfig, require
from kv4rl.fidelity.bootstrap import DRAWS, bootstrap_means, interval
from kv4rl.fidelity.corpus import POSITIONS, History
from kv4rl.fidelity.divergence import sampler_kl
from kv4rl.fidelity.forced import forced_logits, prefill
from kv4rl.model.decoder import Decoder

DEFAULT = KVConfig()


@dataclass(frozen=True)
class Arm:
    """One cache format under its name in the result rows."""

    name: str
    kv: KVConfig


def make_arm(
    precision: str, *, sink_tokens: int = DEFAULT.sink_tokens, recent_tokens: int = DEFAULT.recent_tokens
) -> Arm:
    """The arm of a precision; protection widths other than 16/128 are part of a `kv4rl` arm's name.

    Raises ValueError for an unknown precision or a negative width.
    """
    kv = KVConfig(precision, sink_tokens, recent_tokens)
    default = (sink_tokens, recent_tokens) == (DEFAULT.sink_tokens, DEFAULT.recent_tokens)
    plain = default or precision != "kv4rl"
    return Arm(precision if plain else f"{precision}-s{sink_tokens}-w{recent_tokens}", kv)


@dataclass(frozen=True)
class Estimate:
    """A statistic with its 95 % bootstrap interval over responses."""

    value: float
    low: float
    high: float


def measure_kl(
    decoder: Decoder,
    histories: Sequence[History],
    arms: Sequence[Arm],
    *,
    backend: str = "auto",
    report: Callable[[str], None] = lambda arm: None,
) -> tuple[dict[str, np.ndarray], Tensor]:
    """KL in nats of every arm, name -> float64 [histories, 8]; and the reference logits, for the control.

    The reference is the unquantised cache (`bf16`: the model's own dtype) on the same path. `report` is told each
    arm's name before its run. Raises ValueError without arms, and for two arms of one name.
    """
    names = [arm.name for arm in arms]
    require(len(names) > 0, "arms", names, "at least one")
    require(len(set(names)) == len(names), "arms", names, "distinct names")
    prompts = prefill(decoder, histories)
    report("bf16")
    reference = forced_logits(decoder, KVConfig("bf16"), histories, prompts=prompts, backend=backend)
    kl = {}
    for arm in arms:
        report(arm.name)
        logits = forced_logits(decoder, arm.kv, histories, prompts=prompts, backend=backend)
        kl[arm.name] = sampler_kl(reference, logits).numpy()
    return kl, reference


def _responses(kl: np.ndarray) -> np.ndarray:
    require(
        kl.ndim == 2 and kl.shape[1] == POSITIONS and len(kl) > 0, "kl.shape", kl.shape, f"[responses, {POSITIONS}]"
    )
    return kl.mean(axis=1)


def mean_kl(kl: np.ndarray, *, seed: int = 0, draws: int = DRAWS) -> Estimate:
    """Mean over states, equally weighted; whole responses are resampled. kl: [responses, 8]."""
    per_response = _responses(kl)
    return Estimate(float(per_response.mean()), *interval(bootstrap_means(per_response, seed=seed, draws=draws)))


def reduction(kl: np.ndarray, of: np.ndarray, *, seed: int = 0, draws: int = DRAWS) -> Estimate:
    """How many times smaller the mean of `kl` is than that of `of` (the paper's "7.0x lower"); draws are paired."""
    a, b = _responses(kl), _responses(of)
    require(len(a) == len(b), "responses", len(a), f"{len(b)}, the same histories")
    ratios = bootstrap_means(b, seed=seed, draws=draws) / bootstrap_means(a, seed=seed, draws=draws)
    return Estimate(float(b.mean() / a.mean()), *interval(ratios))


def geometric_ratio(kl: np.ndarray, of: np.ndarray, *, seed: int = 0, draws: int = DRAWS) -> Estimate:
    """Response-paired geometric ratio: exp of the mean over responses of log(KL / KL of the other arm) (§D.4).

    Below 1 where `kl` is the smaller. Raises ValueError if a response's KL is zero in one of them.
    """
    a, b = _responses(kl), _responses(of)
    require(len(a) == len(b), "responses", len(a), f"{len(b)}, the same histories")
    smallest = float(min(a.min(), b.min()))
    require(smallest > 0, "smallest KL of a response", smallest, "a number > 0: a ratio needs both arms to differ")
    logs = np.log(a / b)
    low, high = interval(bootstrap_means(logs, seed=seed, draws=draws))
    return Estimate(float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high)))
