"""Response-length laws fitted to what the paper publishes about its traces (§4.1, §B.3, Table A3).

The paper gives no length distribution. One family is fitted to each checkpoint: a log-normal body cut at the token
limit, a share of responses that run to the limit, and a share of the log-variance that siblings have in common. The
four numbers are such that the simulated partial collection meets Table A3's five phases and, where published, the
ratios of Fig. 2, the volumes of §D.1 and the mean lengths of §6.2. They came from a simplex search of these targets
whose weights were not kept. `python -m kv4rl.rollout.fits --checkpoint 4B-300 --iterations 4` weighs all targets alike,
says how far off a fit is, and searches on from it (`fit_search.py`). The same laws give the forced lengths of rollout
benchmarks.
"""

from dataclasses import dataclass

from kv4rl.config import RolloutConfig, require
from kv4rl.paper import PUBLISHED
from kv4rl.rollout.workload import Workload
from kv4rl.theory.lengths import LengthDistribution
from kv4rl.theory.roofline import QWEN3_4B, QWEN3_8B, ModelShape

CAP = 16384  # Table A1, response token limit
PROMPTS = LengthDistribution.lognormal(130, 0.5, cap=1024)  # DAPO-Math prompts; Table A3's first contexts bound them


@dataclass(frozen=True)
class Fit:
    """One checkpoint's law and the model it belongs to."""

    model: str  # "4b" or "8b"
    median: float  # of the log-normal body, tokens
    sigma: float  # of its logarithm
    capped_share: float  # responses that run to the limit
    prompt_share: float  # of the log-variance, common to the siblings of a prompt

    @property
    def shape(self) -> ModelShape:
        return {"4b": QWEN3_4B, "8b": QWEN3_8B}[self.model]

    @property
    def lengths(self) -> LengthDistribution:
        body = LengthDistribution.lognormal(self.median, self.sigma, cap=CAP)
        return LengthDistribution.mixture(
            [body, LengthDistribution.deterministic(CAP)], [1 - self.capped_share, self.capped_share]
        )

    def workload(self, seed: int = 6101) -> Workload:
        """Prompts and lengths; the paper's trace uses sampling seed 6101."""
        return Workload(self.lengths, PROMPTS, self.prompt_share, seed)

    def rollout(self, collector: str) -> RolloutConfig:
        """Table A1's collection and the pinned page budget of §B.3, per replica; T is the global quota."""
        pages = int(PUBLISHED[f"trace/pool_pages_{self.model}"].value)
        return RolloutConfig(collector=collector, cache_pages=pages)


FITS: dict[str, Fit] = {
    "4B-100": Fit("4b", 709, 0.658, 0.0025, 0.33),
    "4B-300": Fit("4b", 1110, 0.680, 0.0030, 0.44),
    "4B-500": Fit("4b", 1395, 0.731, 0.0107, 0.52),
    "8B-100": Fit("8b", 612, 0.675, 0.0016, 0.45),
    "8B-250": Fit("8b", 2670, 0.763, 0.0182, 0.47),
    "8B-400": Fit("8b", 3542, 0.599, 0.1353, 0.51),
}


def fit(name: str) -> Fit:
    """The fit of one checkpoint, e.g. "4B-300"."""
    require(name in FITS, "checkpoint", name, f"one of {', '.join(FITS)}")
    return FITS[name]


if __name__ == "__main__":
    from kv4rl.rollout.fit_search import main  # imports this module by its name

    main()
