"""Scores of an evaluation as rows of data/results/evaluation.csv, and as the rows of Tables 1 and A5.

Rows: `arm` is the checkpoint, `shape` the set (`math500`, its first problems `math500[:8]`, the Mean `mean`),
`metric` `avg_at_k` or `pass_at_k`. In experiment `evaluation` the value is the mean over seeds, `low` and `high` lie a
sample standard deviation below and above it, and `n` counts seeds; in `evaluation_seed` the shape ends in `@seed43` and
`n` counts responses, so k is `n` over the set's questions.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kv4rl.evaluation.benchmarks import BENCHMARKS
from kv4rl.evaluation.evaluate import EvaluationResult
from kv4rl.evaluation.metrics import Spread, table_row
from kv4rl.results import RESULTS, latest, read_rows, result_row

FILE = "evaluation.csv"
METRICS: dict[str, Callable[[EvaluationResult, str], float]] = {
    "avg_at_k": EvaluationResult.avg_at_k,
    "pass_at_k": EvaluationResult.pass_at_k,
}
MEAN = "mean"

Results = Mapping[int, Mapping[str, EvaluationResult]]  # seed -> set -> result


def scores(results: Results, metric: str, reading: str) -> dict[str, Spread]:
    """Each set's `Spread` over seeds, then `"Mean"`: averaged over sets within a seed first (§B.2)."""
    score = METRICS[metric]
    by_seed = {seed: {name: score(result, reading) for name, result in sets.items()} for seed, sets in results.items()}
    return table_row(by_seed)


def evaluation_rows(results: Results, *, arm: str, model: str, reading: str, command: str | None = None) -> list[dict]:
    """The rows of one evaluated checkpoint; the Mean only of several sets."""
    common = {"arm": arm, "model": model, "unit": "fraction", "command": command}
    rows = []
    for metric, score in METRICS.items():
        for name, spread in scores(results, metric, reading).items():
            if name == "Mean" and len(next(iter(results.values()))) == 1:
                continue
            shape = MEAN if name == "Mean" else name
            band = {"low": spread.mean - spread.sd, "high": spread.mean + spread.sd, "n": spread.seeds}
            rows.append(
                result_row(experiment="evaluation", shape=shape, metric=metric, value=spread.mean, **band, **common)
            )
        for seed, sets in results.items():
            for name, result in sets.items():
                shape, n = f"{name}@seed{seed}", result.verl.size
                value = score(result, reading)
                rows.append(
                    result_row(experiment="evaluation_seed", shape=shape, metric=metric, value=value, n=n, **common)
                )
    return rows


def table(metric: str = "avg_at_k", *, file: str | Path = FILE, directory: Path = RESULTS) -> list[dict[str, str]]:
    """One dict a checkpoint as in Table 1 (`avg_at_k`) or A5 (`pass_at_k`): percent, mean±sd over seeds, newest rows.

    Columns: model, checkpoint, the sets in the paper's order, others, Mean. Without the file an empty list.
    """
    path = (Path(directory) / file).resolve()  # a relative one would be taken from data/results
    if not path.exists():
        return []
    rows = read_rows(path, experiment="evaluation", metric=metric)
    shapes = {row["shape"] for row in rows}
    papers = {name: index for index, name in enumerate(BENCHMARKS)}
    place = lambda shape: (papers.get(shape.partition("[")[0], len(papers)), shape)  # "aime24[:3]": the first three
    columns = [*sorted(shapes - {MEAN}, key=place), *({MEAN} & shapes)]
    lines = []
    for model, arm in dict.fromkeys((row["model"], row["arm"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["arm"]) == (model, arm)]
        cells = {name: [row for row in mine if row["shape"] == name] for name in columns}
        texts = {_title(name): _percent(latest(found)) if found else "" for name, found in cells.items()}
        lines.append({"model": model, "checkpoint": arm, **texts})
    return lines


def _title(shape: str) -> str:
    if shape == MEAN:
        return "Mean"
    return BENCHMARKS[shape].title if shape in BENCHMARKS else shape


def _percent(row: Mapping[str, str]) -> str:
    value, high = float(row["value"]), float(row["high"] or row["value"])
    return f"{100 * value:.1f}±{100 * (high - value):.1f}"


def format_table(lines: Sequence[Mapping[str, str]]) -> str:
    """`table`'s lines in columns."""
    if not lines:
        return "no rows"
    widths = {name: max(len(name), *(len(line[name]) for line in lines)) for name in lines[0]}
    shown = [{name: name for name in widths}, *lines]
    return "\n".join("  ".join(line[name].ljust(width) for name, width in widths.items()).rstrip() for line in shown)
