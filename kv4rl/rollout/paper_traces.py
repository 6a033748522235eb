"""`python -m kv4rl.rollout.paper_traces`: Figs. 2 and A1 and Table A3's phases, simulated with the fitted lengths.

Both schedulers at §B.3's settings (two replicas, three rounds to warm up, then twelve for 4B and six for 8B), timed by
`StepCost`. Rows go to data/results/rollout.csv with scope "simulated"; low and high are the extremes over the seeds.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kv4rl.cli import one_sentence
from kv4rl.config import require_integer
from kv4rl.paper import PUBLISHED
from kv4rl.results import result_row, write_rows
from kv4rl.rollout.fits import FITS, Fit, fit
from kv4rl.rollout.simulator import Simulation, TraceSummary, simulate, summarize
from kv4rl.rollout.trace import Trace
from kv4rl.theory.roofline import kv_bytes_per_token
from kv4rl.theory.step_cost import StepCost

WARMUP = int(PUBLISHED["trace/warmup_rounds"].value)
UNITS = {
    "active_requests": "requests", "resident_kv_gb": "GB", "decode_step_ms": "ms", "decode_tokens_per_s": "tokens/s",
    "calls_per_interval": "calls", "used_pages": "pages", "context_tokens": "tokens",
}  # fmt: skip


def measured_rounds(found: Fit) -> range:
    """The collections that count, after warm-up (§B.3)."""
    return range(WARMUP, WARMUP + int(PUBLISHED[f"trace/measured_rounds_{found.model}"].value))


def run(found: Fit, arm: str, *, seed: int = 6101, collections: int | None = None) -> Simulation:
    """One scheduler ("sync" or "partial") at the paper's settings, over two TP2 replicas."""
    cost = StepCost(found.shape)
    return simulate(
        found.rollout(arm),
        found.workload(seed),
        collections=collections or measured_rounds(found).stop,
        replicas=2,
        cost=cost,
        bytes_per_page=round(cost.page_bytes),
    )


def ratios(partial: TraceSummary, sync: TraceSummary) -> dict[str, float]:
    """Partial over synchronous: the five ratios of Fig. 2, under the names of `paper.PUBLISHED`."""
    return {
        "active_batch_ratio": partial.active_requests / sync.active_requests,
        "fewer_decode_calls": sync.calls_per_interval / partial.calls_per_interval,
        "resident_kv_ratio": partial.context_tokens / sync.context_tokens,
        "step_latency_ratio": partial.step_ms / sync.step_ms,
        "decode_throughput_ratio": partial.tokens_per_second / sync.tokens_per_second,
    }


def phases(trace: Trace, collections: Sequence[int], count: int = 5) -> list[tuple[float, float]]:
    """(active requests, context tokens) in equal phases of each interval's decode time, as Table A3 (§B.4)."""
    rows = trace.pure_decode()
    sums = np.zeros((3, count))
    interval = rows["collection"] * 1000 + rows["replica"]
    for one in np.unique(interval[np.isin(rows["collection"], list(collections))]):
        step, active, context = (rows[n][interval == one] for n in ("step_ms", "active_requests", "context_tokens"))
        middle = (np.cumsum(step) - step / 2) / step.sum()
        phase = np.minimum((middle * count).astype(int), count - 1)
        for row, weight in enumerate((step, active * step, context * step)):
            sums[row] += np.bincount(phase, weight, minlength=count)
    time, active, context = sums
    return [(float(a), float(c)) for a, c in zip(active / time, context / active, strict=True)]


def figures(summary: TraceSummary, kappa: float) -> dict[str, float]:
    """One scheduler's means, by metric."""
    return {
        "active_requests": summary.active_requests,
        "resident_kv_gb": summary.volume_gb(kappa),
        "decode_step_ms": summary.step_ms,
        "decode_tokens_per_s": summary.tokens_per_second,
        "calls_per_interval": summary.calls_per_interval,
        "used_pages": summary.used_pages,
    }


def measure(found: Fit, seed: int) -> dict[tuple[str, str], float]:
    """(arm, metric) -> value: both schedulers, their ratios, and the phases of the partial one."""
    counted, kappa = measured_rounds(found), kv_bytes_per_token(found.shape, tensor_parallel=2)
    traces = {arm: run(found, arm, seed=seed).trace for arm in ("sync", "partial")}
    summaries = {arm: summarize(trace, counted) for arm, trace in traces.items()}
    values = {(arm, name): v for arm, one in summaries.items() for name, v in figures(one, kappa).items()}
    for name, value in ratios(**summaries).items():
        values["partial_over_sync", name] = value
    for number, (active, context) in enumerate(phases(traces["partial"], counted), start=1):
        values["partial", f"phase{number}_active_requests"] = active
        values["partial", f"phase{number}_context_tokens"] = context
    return values


def variations(found: Fit) -> dict[str, Fit]:
    """One assumption of the fit changed at a time: which of them the ratios hang on."""
    changed = {"as fitted": {}}
    for name, factor in (("median", 1.2), ("sigma", 1.1)):
        changed |= {f"{name} x {factor:.2g}": {name: getattr(found, name) * factor}}
        changed |= {f"{name} / {factor:.2g}": {name: getattr(found, name) / factor}}
    for share in (0.0, 2 * found.capped_share):
        changed[f"capped_share {share:.2g}"] = {"capped_share": share}
    for share in (0.0, 0.8):
        changed[f"prompt_share {share:.2g}"] = {"prompt_share": share}
    return {label: replace(found, **change) for label, change in changed.items()}


def sensitivity_rows(name: str) -> list[dict]:
    """The five ratios of Fig. 2 and both volumes of §D.1 under every variation of a fit, one seed."""
    made = []
    for label, found in variations(fit(name)).items():
        values = measure(found, 6101)
        shown = {metric: (values["partial_over_sync", metric], "x") for metric in ratios_of(values)}
        shown |= {f"{arm}_resident_kv_gb": (values[arm, "resident_kv_gb"], "GB") for arm in ("sync", "partial")}
        for metric, (value, unit) in shown.items():
            given = {"arm": label, "metric": metric, "unit": unit, "value": value}
            made.append(_row("traces_sensitivity", name, **given, command=f"--checkpoints {name} --sensitivity"))
    return made


def ratios_of(values: dict[tuple[str, str], float]) -> list[str]:
    """The names of the ratios among what `measure` returned."""
    return [metric for arm, metric in values if arm == "partial_over_sync"]


def rows(name: str, seeds: Sequence[int]) -> list[dict]:
    """The rows of one checkpoint: means over the seeds, with their extremes."""
    runs = [measure(fit(name), seed) for seed in seeds]
    made = []
    for arm, metric in runs[0]:
        found_values = [values[arm, metric] for values in runs]
        unit = "x" if arm == "partial_over_sync" else UNITS[metric.split("_", 1)[1] if "phase" in metric else metric]
        given = {"arm": arm, "metric": metric, "unit": unit, "value": float(np.mean(found_values))}
        given |= {"low": min(found_values), "high": max(found_values), "n": len(found_values)}
        made.append(_row("traces", name, **given, command=f"--checkpoints {name} --seeds {len(seeds)}"))
    return made


def _row(experiment: str, name: str, *, command: str, **given) -> dict:
    model = f"qwen3-{fit(name).model}"
    command = f"python -m kv4rl.rollout.paper_traces {command}"
    return result_row(experiment=experiment, model=model, shape=name, scope="simulated", command=command, **given)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoints", nargs="+", default=list(FITS), choices=list(FITS))
    parser.add_argument("--seeds", type=int, default=3, help="seeds to average over, from 6101 on")
    parser.add_argument("--sensitivity", action="store_true", help="vary the fit instead, one seed")
    given = parser.parse_args(arguments)
    with one_sentence("kv4rl.rollout.paper_traces"):
        require_integer(given.seeds, "seeds", 1)
    for name in given.checkpoints:
        made = sensitivity_rows(name) if given.sensitivity else rows(name, range(6101, 6101 + given.seeds))
        write_rows("rollout.csv", made)
        print(name)
        for row in made:
            print(f"  {row['arm']:>18} {row['metric']:<26} {row['value']:>12.4g} {row['unit']}")


if __name__ == "__main__":
    main()
