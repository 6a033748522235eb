"""Every published number once more, in the paper's order: our answers to it, or what stands for one (notebook 11)."""

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from kv4rl.compare import ABSENT, answers, ours, with_unit
from kv4rl.config import PAGE_TOKENS, TrainConfig
from kv4rl.paper import PUBLISHED
from kv4rl.results import RESULTS

INSTEAD = {  # of a row, by the number's key; the first pattern that fits counts
    "checked in 02": ("trace/kv_bytes_per_position", "roofline/weight_*", "roofline/gflop_*"),
    "shown in 02": ("trace/*/first_interval_calls_*", "trace/*/displayed_calls", "trace/*/pool_capacity"),
    "setting": (
        "config/*", "evaluation/*", "trace/pool_*", "trace/max_*", "trace/*_rounds*", "trace/sampling_seed",
        "trace/smoothing_*", "trace/requests_per_replica", "roofline/*", "replay/samples_*", "replay/blocks",
        "replay/phases", "replay/sampled_*", "ragged/*/states", "ragged/*/requests_*", "ragged/*/mean_context_*",
        "ragged/*_calls", "fidelity/*/checkpoint", "fidelity/prompts", "fidelity/positions_*", "fidelity/bootstraps",
        "fidelity/states", "fidelity/protected_*", "fidelity/*est_recent", "storage/*/scale_group",
        "storage/*/global_scale_bits", "updates/*", "smoothing/*",
    ),
}  # fmt: skip


def every_number(directory: Path = RESULTS) -> list[dict[str, str]]:
    """One dict a published number: key, place, the paper's value, and all of our rows that answer it, each named.

    Without a row: `setting` (of the paper's experiments, no result), the notebook that checks or shows it, or that it
    was not measured.
    """
    found: dict[str, list[str]] = {}
    for item, published, row in answers(directory):
        if row:
            said = f"{row['scope']}, {row['model']}: {ours(row, published.unit)}"
            found.setdefault(item.published, []).append(said)
    return [
        {"number": key, "place": item.locator, "paper": with_unit(f"{item.value:.10g}", item.unit)}
        | {"ours": "; ".join(found[key]) if key in found else instead(key)}
        for key, item in PUBLISHED.items()
    ]


def instead(key: str) -> str:
    """What stands in place of a row for this number."""
    fits = (state for state, patterns in INSTEAD.items() if any(fnmatch(key, pattern) for pattern in patterns))
    return next(fits, ABSENT)


def preset_values(config: TrainConfig) -> Mapping[str, float]:
    """Key of `paper.PUBLISHED` -> the preset's value, of every setting of Table A1 that is a field or a constant."""
    named = {key: key.removeprefix("config/") for key in PUBLISHED if key.startswith("config/")}
    parts = (config.rollout, config.kv, config.grpo)
    found = {key: getattr(part, name) for key, name in named.items() for part in parts if hasattr(part, name)}
    clips = {"config/clip_lowest": 1 - config.grpo.clip_low, "config/clip_highest": 1 + config.grpo.clip_high}
    betas = {f"config/adam_beta{place}": beta for place, beta in enumerate(config.grpo.betas, start=1)}
    return found | clips | betas | {"config/page_tokens": PAGE_TOKENS, "config/training_seed": config.seed}
