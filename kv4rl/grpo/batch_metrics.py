"""What was collected and trained on, in figures: rewards, lengths, ages, cache use; verl's names where verl has one."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from kv4rl.metrics import summary
from kv4rl.rewards.grader import Verdict
from kv4rl.rollout.collector import CollectionStats
from kv4rl.rollout.group import PromptGroup

SUMMED = (
    "rollout/new_groups", "rollout/carried_requests", "rollout/carried_tokens", "rollout/finished_responses",
    "rollout/decode_tokens", "rollout/prefill_tokens", "rollout/preemptions", "rollout/left_complete_groups",
    "rollout/left_unfinished_groups", "rollout/left_tokens", "perf/decode_tokens_per_s",
)  # fmt: skip


def response_metrics(groups: Sequence[PromptGroup], version: int) -> dict[str, float | list]:
    """Rewards, lengths and staleness of the trained responses; `version`: the policy that is about to be updated.

    Staleness counts policy updates between the sampling of a token and this one. `token_age/histogram`[a] is the
    number of trained tokens of age a.
    """
    requests = [request for group in groups for request in group.requests]
    scores = torch.tensor([group.scores for group in groups], dtype=torch.float64)
    lengths = torch.tensor([len(request.tokens) for request in requests], dtype=torch.float64)
    cut = [request.finish_reason == "length" for request in requests]
    metrics: dict[str, float | list] = {
        **summary("critic/score", scores),
        **summary("critic/rewards", scores),
        **summary("response_length", lengths),
        "response_length/clip_ratio": float(np.mean(cut)),
        "response/aborted_ratio": float(np.mean([request.finish_reason == "abort" for request in requests])),
        **summary("prompt_length", torch.tensor([len(group.prompt.tokens) for group in groups])),
        "frac_reward_zero_std": float((scores == scores[:, :1]).all(dim=1).double().mean()),
        "perf/total_num_tokens": float(sum(request.context_tokens for request in requests)),
    }
    return metrics | _staleness(groups, version) | _reward_metrics(groups)


def collection_metrics(stats: CollectionStats, trace: Mapping[str, np.ndarray], total_pages: int) -> dict[str, float]:
    """Carry-over, page occupancy and decode throughput of one collection interval (columns of `rollout.trace`)."""
    metrics = {
        f"rollout/{name}": float(getattr(stats, name))
        for name in (
            "new_groups", "carried_requests", "carried_tokens", "finished_responses", "steps", "decode_steps",
            "wait_steps", "decode_tokens", "prefill_tokens", "preemptions", "left_complete_groups",
            "left_unfinished_groups", "left_tokens", "left_max_age",
        )
    }  # fmt: skip
    if stats.trained_ages:
        metrics |= summary("rollout/group_age", torch.tensor(stats.trained_ages))
    if len(trace["used_pages"]):
        metrics |= {
            "rollout/active_requests_mean": float(trace["active_requests"].mean()),
            "rollout/page_occupancy_mean": float(trace["used_pages"].mean() / total_pages),
            "rollout/page_occupancy_max": float(trace["used_pages"].max() / total_pages),
            "rollout/resident_kv_bytes_mean": float(trace["resident_kv_bytes"].mean()),
            "perf/decode_tokens_per_s": float(trace["decode_tokens"].sum() / max(trace["step_ms"].sum() / 1e3, 1e-9)),
        }
    return metrics


def over_replicas(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The collection metrics of all replicas as one's: volumes and rates add up, extremes stay so, states are averaged.

    `rollout/replica_balance`: responses finished by the replica of most over those by the replica of fewest.
    """
    names = dict.fromkeys(name for each in metrics for name in each)
    joined = {name: _reduction(name)([each[name] for each in metrics if name in each]) for name in names}
    finished = [each["rollout/finished_responses"] for each in metrics]
    return joined | {"rollout/replica_balance": max(finished) / max(1.0, min(finished))}


def _reduction(name: str) -> Callable[[list[float]], float]:
    """How a collection metric of several replicas becomes one; steps are taken side by side, so they do not add up."""
    if name.endswith(("/max", "_max", "_max_age")):
        return max
    if name.endswith("/min"):
        return min
    return sum if name in SUMMED else lambda values: float(np.mean(values))


def max_over_ranks(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Times and peaks of the slowest and the fullest rank (§B.6)."""
    names = dict.fromkeys(name for each in metrics for name in each)
    return {name: max(each[name] for each in metrics if name in each) for name in names}


def _staleness(groups: Sequence[PromptGroup], version: int) -> dict[str, float | list]:
    versions = [request.versions for group in groups for request in group.requests if request.versions]
    ages = version - np.concatenate([np.asarray(v, dtype=np.int64) for v in versions])
    oldest = [version - min(v) for v in versions]
    return {
        "training/off_policy/trajectory_spans": float(np.mean([len(set(v)) for v in versions])),
        "training/off_policy/trajectory_staleness": float(np.mean(oldest)),
        "training/off_policy/trajectory_staleness_worst": float(max(oldest)),
        "rollout/token_age/mean": float(ages.mean()),
        "rollout/token_age/max": float(ages.max()),
        "rollout/token_age/histogram": np.bincount(ages).tolist(),
    }


def _reward_metrics(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Both readings of design decision 10, what each pays for by mistake, and how often grading failed."""
    pairs = [
        (request, Verdict(**verdict) if isinstance(verdict, dict) else verdict)  # a dict comes from a checkpoint
        for group in groups
        for request, verdict in zip(group.requests, group.verdicts, strict=True)
        if verdict is not None
    ]
    if not pairs:
        return {}
    share = lambda values: float(np.mean([float(value) for value in values]))
    return {
        "reward/verl": share(v.verl for _, v in pairs),
        "reward/last_box": share(v.last_box for _, v in pairs),
        "reward/correct_without_box": share(v.correct_without_box for _, v in pairs),
        "reward/correct_truncated": share(v.verl * (r.finish_reason == "length") for r, v in pairs),
        "reward/timeouts": float(sum(v.timed_out for _, v in pairs)),
        "reward/worker_deaths": float(sum(v.worker_died for _, v in pairs)),
    }
