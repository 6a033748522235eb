"""What the benches with forced lengths roll out: the flags that they share, as a workload and a configuration."""

import argparse
from dataclasses import replace

from kv4rl.config import RolloutConfig, require, require_integer
from kv4rl.rollout.fits import fit
from kv4rl.rollout.forced import shrunk
from kv4rl.rollout.workload import Workload


def require_counts(options: argparse.Namespace, **least: int) -> None:
    """Raise `InputError` unless each option named is an integer of at least what is given for it."""
    for name, number in least.items():
        require_integer(getattr(options, name), name.replace("_", "-"), number)


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
