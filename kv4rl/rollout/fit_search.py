"""`python -m kv4rl.rollout.fits`: how far a fit is from what the paper publishes, and a search that brings it nearer.

The misfit is the root mean square of log(ours / paper) over Table A3's five batches and five contexts, the ratios of
Fig. 2 and the volumes of §D.1 where published for the checkpoint, and its mean length (§6.2) where published.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

from kv4rl.cli import one_sentence
from kv4rl.config import require_integer
from kv4rl.paper import PUBLISHED, REPLAY_SHAPES
from kv4rl.rollout.fits import FITS, Fit, fit
from kv4rl.rollout.paper_traces import measure

MEAN_LENGTHS = {"4B-300": "length/4b/mean_bf16", "4B-500": "length/4b/late", "8B-400": "length/8b/late"}
VOLUMES = {"partial": "active_kv_async", "sync": "active_kv_sync"}  # of §D.1, by our arm
FREE = tuple(field.name for field in fields(Fit) if field.name != "model")
COARSEST, FINEST = 0.10, 0.005  # relative steps of the search


def deviations(name: str, found: Fit, seed: int = 6101) -> dict[str, float]:
    """log(ours / paper) of everything published about checkpoint `name`; simulates both schedulers once."""
    ours, off = measure(found, seed), {}
    for number, shape in enumerate(REPLAY_SHAPES[name], start=1):
        for metric, paper in zip(("active_requests", "context_tokens"), shape, strict=True):
            off[f"phase{number}_{metric}"] = math.log(ours["partial", f"phase{number}_{metric}"] / paper)
    for (arm, metric), value in ours.items():
        published = PUBLISHED.get(f"trace/{name.lower()}/{metric}")
        if arm == "partial_over_sync" and published:
            off[metric] = math.log(value / published.value)
    for arm, metric in VOLUMES.items():
        published = PUBLISHED.get(f"trace/{name.lower()}/{metric}")
        if published:
            off[metric] = math.log(ours[arm, "resident_kv_gb"] / published.value)
    if name in MEAN_LENGTHS:
        off["mean_length"] = math.log(found.lengths.mean / PUBLISHED[MEAN_LENGTHS[name]].value)
    return off


def misfit(name: str, found: Fit, seed: int = 6101) -> float:
    """Root mean square of `deviations`: 0.05 is about 5 % off in each."""
    off = deviations(name, found, seed).values()
    return math.sqrt(sum(value**2 for value in off) / len(off))


def search(start: Fit, objective: Callable[[Fit], float], iterations: int) -> Iterator[tuple[Fit, float]]:
    """Coordinate search: the start, then the best fit after each iteration; the objective never rises.

    An iteration moves each of the four numbers up and down by a relative step and keeps what is better; where nothing
    is, the step halves, and the search ends once it is below half a percent.
    """
    best, lowest, step = start, objective(start), COARSEST
    yield best, lowest
    for _ in range(iterations):
        before = lowest
        for name in FREE:
            for factor in (1 + step, 1 / (1 + step)):
                moved = replace(best, **{name: getattr(best, name) * factor})
                if moved.prompt_share > 1 or moved.capped_share >= 1:
                    continue
                value = objective(moved)
                if value < lowest:
                    best, lowest = moved, value
        yield best, lowest
        if lowest == before:
            step /= 2
            if step < FINEST:
                return


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kv4rl.rollout.fits", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default="4B-300", choices=list(FITS))
    parser.add_argument("--iterations", type=int, default=4, help="of up to eight simulations of both schedulers each")
    given = parser.parse_args(arguments)
    with one_sentence("kv4rl.rollout.fits"):
        require_integer(given.iterations, "iterations", 1)
    start = fit(given.checkpoint)
    for best, lowest in search(start, lambda found: misfit(given.checkpoint, found), given.iterations):
        print(f"misfit {lowest:.4f}: {best}", flush=True)
    for name, value in deviations(given.checkpoint, best).items():
        print(f"  {name:<26} {math.expm1(value):+.1%}")


if __name__ == "__main__":
    main()
