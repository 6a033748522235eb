"""Sampler KL of cache formats against the unquantised cache, with response-cluster intervals (Eq. 5.2, §B.5)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kv4rl.config import KVConfig, require
from kv4rl.fidelity.batched import batched_logits
from kv4rl.fidelity.bootstrap import DRAWS, bootstrap_means, interval
from kv4rl.fidelity.corpus import POSITIONS, History
from kv4rl.fidelity.divergence import sampler_kl
from kv4rl.fidelity.forced import forced_logits, prefill
from kv4rl.fidelity.representation import Representation
from kv4rl.model.decoder import Decoder

DEFAULT = KVConfig()
WAYS = ("batched", "engine")


@dataclass(frozen=True)
class Arm:
    """One representation under its name in the result rows; `kv` if the engine's cache can hold it."""

    name: str
    representation: Representation
    kv: KVConfig | None = None


def make_arm(
    precision: str, *, sink_tokens: int = DEFAULT.sink_tokens, recent_tokens: int = DEFAULT.recent_tokens
) -> Arm:
    """The arm of a precision; protection widths other than 16/128 are part of a `kv4rl` arm's name.

    Raises ValueError for an unknown precision or a negative width.
    """
    kv = KVConfig(precision, sink_tokens, recent_tokens)
    default = (sink_tokens, recent_tokens) == (DEFAULT.sink_tokens, DEFAULT.recent_tokens)
    plain = default or precision != "kv4rl"
    name = precision if plain else f"{precision}-s{sink_tokens}-w{recent_tokens}"
    return Arm(name, Representation.of(kv), kv)


UNQUANTISED = make_arm("bf16")


@dataclass(frozen=True)
class Estimate:
    """A statistic with its 95 % bootstrap interval over responses."""

    value: float
    low: float
    high: float


class Probe:
    """The histories and what every arm shares: one unquantised prefill and the reference logits.

    way: "batched" (one pass a layer, any representation) or "engine" (the engine's cache, step by step and on any of
    its backends; arms with a `KVConfig` only). `seed` orders the random control. Raises ValueError for another way.
    """

    def __init__(
        self,
        decoder: Decoder,
        histories: Sequence[History],
        *,
        way: str = "batched",
        backend: str = "auto",
        with_attention: bool = False,
        seed: int = 0,
    ):
        require(way in WAYS, "way", way, f"one of {', '.join(WAYS)}")
        self.decoder, self.histories, self.way, self.backend, self.seed = decoder, histories, way, backend, seed
        self.prompts = prefill(decoder, histories, with_attention=with_attention)
        self.reference = self.logits(UNQUANTISED)
        self._kl: dict[Representation, np.ndarray] = {}

    def logits(self, arm: Arm) -> Tensor:
        """The arm's logits at all states, float32 [histories, 8, vocab]."""
        given = {"prompts": self.prompts}
        if self.way == "batched":
            return batched_logits(self.decoder, arm.representation, self.histories, seed=self.seed, **given)
        require(arm.kv is not None, "arm", arm.name, "one that the engine's cache can hold, or the batched way")
        return forced_logits(self.decoder, arm.kv, self.histories, backend=self.backend, **given)

    def kl(self, arm: Arm) -> np.ndarray:
        """The arm's KL in nats, float64 [histories, 8]; one representation is computed once, whatever its name."""
        if arm.representation not in self._kl:
            self._kl[arm.representation] = sampler_kl(self.reference, self.logits(arm)).numpy()
        return self._kl[arm.representation]


def measure_kl(
    decoder: Decoder,
    histories: Sequence[History],
    arms: Sequence[Arm],
    *,
    way: str = "engine",
    backend: str = "auto",
    report: Callable[[str], None] = lambda arm: None,
) -> tuple[dict[str, np.ndarray], Tensor]:
    """KL in nats of every arm, name -> float64 [histories, 8]; and the reference logits, for the control.

    The reference is the unquantised cache (`bf16`: the model's own dtype) on the same path (`Probe`). `report` is told
    each arm's name before its run. Raises ValueError without arms, and for two arms of one name.
    """
    names = [arm.name for arm in arms]
    require(len(names) > 0, "arms", names, "at least one")
    require(len(set(names)) == len(names), "arms", names, "distinct names")
    report("bf16")
    by_attention = any(arm.representation.protection.select == "attention" for arm in arms)
    probe = Probe(decoder, histories, way=way, backend=backend, with_attention=by_attention)
    kl = {}
    for arm in arms:
        report(arm.name)
        kl[arm.name] = probe.kl(arm)
    return kl, probe.reference


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
