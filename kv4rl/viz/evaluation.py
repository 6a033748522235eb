"""Accuracy after training, as a distance to BF16 rollout: the paper's two models and our runs, in one picture."""

import shlex
from collections.abc import Mapping

import plotly.graph_objects as go

from kv4rl.config import PRECISIONS
from kv4rl.learning import Band, Setting, describe, paired
from kv4rl.paper import PUBLISHED
from kv4rl.results import RESULTS, read_rows
from kv4rl.viz.style import PRECISION_COLOURS, PRECISION_NAMES


def sampled_as(file: str = "evaluation.csv") -> dict[tuple[str, str], dict[str, str]]:
    """(model, checkpoint) of stored evaluations -> their temperature and number of problems, read off their commands.

    {} without the file. A command without `--temperature` sampled at Table A2's.
    """
    rows = read_rows(file, experiment="evaluation_seed") if (RESULTS / file).exists() else []
    found = {}
    for row in rows:
        words = shlex.split(row["command"])
        given = lambda flag, other, words=words: words[words.index(flag) + 1] if flag in words else other
        temperature = float(given("--temperature", PUBLISHED["evaluation/temperature"].value))
        samples = given("--samples", "")
        problems = f"{int(row['n']) // int(samples):,}" if samples else "-"
        found[row["model"], row["arm"]] = {"temperature": f"{temperature:g}", "problems": problems}
    return found


def paper_distances(table: str = "table1") -> dict[str, dict[str, Band]]:
    """Model -> precision -> Mean minus BF16's Mean, percentage points, give or take both standard deviations.

    table: "table1" (avg@k) or "table_a5" (pass@k).
    """
    found: dict[str, dict[str, Band]] = {}
    for model in ("8b", "4b"):
        base = PUBLISHED[f"{table}/{model}/bf16/mean"]
        for precision in PRECISIONS[1:]:
            mine = PUBLISHED[f"{table}/{model}/{precision}/mean"]
            centre, around = mine.value - base.value, (mine.spread**2 + base.spread**2) ** 0.5
            name = f"paper, Qwen3-{model.upper()}"
            found.setdefault(name, {})[precision] = Band(centre, centre - around, centre + around, 3)
    return found


def our_distances(settings: Mapping[str, Setting]) -> dict[str, dict[str, Band]]:
    """Setting in words -> precision -> paired difference in accuracy, percentage points; single seeds left out."""
    found: dict[str, dict[str, Band]] = {}
    for name, setting in settings.items():
        for precision in PRECISIONS[1:]:
            difference = paired(setting, "accuracy", precision)
            if difference is not None and difference.seeds > 1:
                points = [100 * value for value in (difference.mean, difference.low, difference.high)]
                found.setdefault(describe(name), {})[precision] = Band(*points, difference.seeds)
    return found


SPREAD = 0.16  # between the precisions of a row


def distance_to_bf16(distances: Mapping[str, Mapping[str, Band]]) -> go.Figure:
    """One row a model or setting, one dot a precision, bars as the bands say; 0 is BF16 rollout."""
    figure = go.Figure()
    for place, precision in enumerate(PRECISIONS[1:], start=-1):
        rows = [(row, bands[precision]) for row, bands in enumerate(distances.values()) if precision in bands]
        error = {
            "array": [band.high - band.mean for _, band in rows],
            "arrayminus": [band.mean - band.low for _, band in rows],
        }
        figure.add_scatter(
            x=[band.mean for _, band in rows], y=[row + SPREAD * place for row, _ in rows], error_x=error,
            mode="markers", name=PRECISION_NAMES[precision], marker={"color": PRECISION_COLOURS[precision], "size": 10},
        )  # fmt: skip
    figure.add_vline(x=0, line={"dash": "dash", "width": 1})
    labels = [name.replace(" collection, ", ",<br>") for name in distances]
    figure.update_xaxes(title_text="accuracy minus that of BF16 rollout, percentage points")
    figure.update_yaxes(
        tickvals=list(range(len(labels))), ticktext=labels, range=[len(labels) - 0.5, -0.5], showgrid=False
    )
    figure.update_layout(
        height=170 + 70 * len(labels), width=900, margin={"l": 250}, legend={"orientation": "h", "y": 1.15}
    )
    return figure
