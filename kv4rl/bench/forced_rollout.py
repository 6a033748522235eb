"""What the benches with forced lengths roll out: the flags that they share, as a workload and a configuration."""

import argparse
from dataclasses import replace

from kv4rl.bench.refusals import MOST_AT_ONCE, require_counts, require_writable
from kv4rl.config import LARGEST, RolloutConfig, require, require_integer, require_number
from kv4rl.rollout.fits import fit
from kv4rl.rollout.forced import shrunk
from kv4rl.rollout.workload import Workload


def require_flags(options: argparse.Namespace) -> None:
    """Raise `InputError`, before any model is made, for flags that no model and no machine could serve."""
    require_counts(options, tp=1, warmup=0, groups=1, siblings=1, slots=1, step_tokens=1, workspace_tokens=1)
    require_integer(options.seed, "seed", 0)
    require_number(options.shrink, "shrink", 1, MOST_AT_ONCE)
    require_number(options.hbm_gb, "hbm-gb", 0, LARGEST, open_low=True)
    responses = options.groups * options.siblings
    require(responses <= MOST_AT_ONCE, "groups x siblings", responses, f"at most {MOST_AT_ONCE} responses an interval")
    require_writable(options.out)


def shape_name(options: argparse.Namespace, name: str) -> str:
    """How rows name a fit whose lengths are divided by `options.shrink`."""
    return name if options.shrink == 1 else f"{name}/{options.shrink:g}"


def forced_rollout(options: argparse.Namespace, name: str, positions: int) -> tuple[Workload, RolloutConfig]:
    """The lengths of fit `name`, divided by `options.shrink`, and the engine's limits for them.

    Raises `ValueError` where they do not fit the model's `positions`.
    """
    workload = replace(shrunk(fit(name).workload(options.seed), options.shrink), siblings=options.siblings)
    longest = workload.prompts.cap + workload.lengths.cap
    expected = f"lengths within the model's {positions} positions, not {longest}"
    require(longest <= positions, "shrink", options.shrink, expected)
    return workload, RolloutConfig(
        groups_per_update=options.groups,
        responses_per_group=options.siblings,
        max_prompt_tokens=workload.prompts.cap,
        max_response_tokens=workload.lengths.cap,
        max_active_requests=options.slots,
        step_tokens=max(options.step_tokens, options.slots),
        workspace_tokens=max(options.workspace_tokens, longest),
    )
