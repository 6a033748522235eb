"""Replayed decode steps beside the paper's: Figs. 3b, A2 and A3b,d, from stored rows.

Rows of `replay.csv` name the model `qwen3-4b` at TP2 and `qwen3-4b-tp1` on one GPU; the paper's are TP2.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import plotly.graph_objects as go

from kv4rl.config import PRECISIONS, KVConfig
from kv4rl.paper import PUBLISHED, REPLAY_SHAPES
from kv4rl.theory.roofline import QWEN3_4B, QWEN3_8B
from kv4rl.theory.step_cost import StepCost
from kv4rl.viz.rows import without_empty_columns
from kv4rl.viz.style import PRECISION_COLOURS, PRECISION_NAMES

Rows = Sequence[Mapping[str, str]]
ARMS = {name: (PRECISION_NAMES[name], PRECISION_COLOURS[name]) for name in PRECISIONS[1:]} | {
    "fp8_kv": ("FlashInfer FP8 KV", "#56B4E9"),
    "w8a8": ("FP8 W8A8", "#E69F00"),
    "w4a16": ("W4A16", "#F0E442"),
}
PAPER_TP = 2
WINDOW_ARM = re.compile(r"kv4rl_w(\d+)")
DEFAULT_WINDOW = 128  # arm `kv4rl`
SHAPES = {"qwen3-4b": QWEN3_4B, "qwen3-8b": QWEN3_8B}


def of_model(row: Mapping[str, str]) -> tuple[str, int]:
    """Model and tensor-parallel size of a replay row: `qwen3-4b-tp1` -> ("qwen3-4b", 1)."""
    name, _, size = row["model"].partition("-tp")
    return name, int(size) if size else PAPER_TP


def speedups(rows: Rows, metric: str = "speedup_vs_bf16") -> dict[tuple[str, str], dict[str, float]]:
    """(group of states, model as the rows name it) -> arm -> value of a replay aggregate."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["experiment"] == "replay" and row["metric"] == metric:
            found.setdefault((row["shape"], row["model"]), {})[row["arm"]] = float(row["value"])
    return found


def replay_table(rows: Rows) -> list[dict[str, str]]:
    """One dict a checkpoint of Table A3 and model: the paper's KV4 beside each arm of ours with rows, in its order."""
    found = speedups(rows)
    lines = []
    for (group, model), arms in sorted(found.items(), key=lambda item: _place(item[0])):
        if group not in REPLAY_SHAPES:
            continue
        published = PUBLISHED.get(f"replay/{group}/kv4")
        line = {"checkpoint": group, "ours at": f"TP{of_model({'model': model})[1]}"}
        line["paper KV4, TP2"] = f"{published.value:.2f}x" if published else "drawn only"
        lines.append(line | {name: f"{arms[arm]:.2f}x" if arm in arms else "-" for arm, (name, _) in ARMS.items()})
    return without_empty_columns(lines)


def _place(key: tuple[str, str]) -> tuple[int, str]:
    group, model = key
    return (list(REPLAY_SHAPES).index(group) if group in REPLAY_SHAPES else len(REPLAY_SHAPES)), model


def checkpoint_speedups(rows: Rows) -> go.Figure:
    """Fig. 3b and A2: grouped bars of forward speedups (Eq. A2) a checkpoint; hollow: the paper's KV4 at TP2."""
    found = {key: arms for key, arms in speedups(rows).items() if key[0] in REPLAY_SHAPES}
    keys = sorted(found, key=_place)
    labels = [f"{group}<br>TP{of_model({'model': model})[1]}" for group, model in keys]
    figure = go.Figure()
    for arm, (name, colour) in ARMS.items():
        values = [found[key].get(arm) for key in keys]
        if any(values):
            figure.add_bar(x=labels, y=values, name=name, marker_color=colour)
        if arm == "kv4":
            paper = [PUBLISHED.get(f"replay/{group}/kv4") for group, _ in keys]
            hollow = {"color": "white", "line": {"color": colour, "width": 2}}
            values = [item and item.value for item in paper]
            figure.add_bar(x=labels, y=values, name="KV4, paper (TP2)", marker=hollow)
    figure.add_hline(y=1, line={"dash": "dash", "width": 1})
    figure.update_yaxes(title_text="decode step, speedup over BF16", rangemode="tozero")
    figure.update_layout(barmode="group", height=420, width=930, legend={"orientation": "h", "y": 1.15})
    return figure


def _windows(arms: Mapping[str, float]) -> list[tuple[int, str]]:
    """(recent width, arm) of the KV4-RL arms, ascending; of two arms of one width the named one."""
    widths = {DEFAULT_WINDOW: "kv4rl"} if "kv4rl" in arms else {}
    widths |= {int(found[1]): arm for arm in arms if (found := WINDOW_ARM.fullmatch(arm))}
    return sorted(widths.items())


OTHER_ARMS = {name: shown for name, (shown, _) in ARMS.items() if name != "kv4rl"} | {
    "kv4rl_bf16": "KV4, protected positions in BF16"
}


def other_speedups(rows: Rows) -> list[dict[str, str]]:
    """Fig. A3b,d as a table, and what else was replayed off Table A3: speedups, and shares of KV4's throughput.

    One dict a group of states, model and arm; KV4-RL's arms by recent width.
    """
    lines, kept = [], speedups(rows, "retention_vs_kv4")
    for (group, model), arms in speedups(rows).items():
        if group in REPLAY_SHAPES:
            continue
        named = [(arm, "KV4-RL", str(width)) for width, arm in _windows(arms)]
        named += [(arm, shown, "") for arm, shown in OTHER_ARMS.items() if arm in arms]
        for arm, shown, width in named:
            line = {"states": group, "ours at": f"TP{of_model({'model': model})[1]}", "cache or weights": shown}
            line |= {"recent positions": width, "speedup over BF16": f"{arms[arm]:.2f}x"}
            share = kept.get((group, model), {}).get(arm)
            line["share of KV4's throughput"] = f"{share:.1%}" if share else "-"
            paper = PUBLISHED.get(f"ragged/{group[-2:].lower()}/retention_vs_kv4")
            lines.append(
                line | {"paper's share": f"{paper.value:g}%" if paper and width == str(DEFAULT_WINDOW) else ""}
            )
    return lines


def unmeasured(rows: Rows) -> list[str]:
    """Names of the arms of Fig. 3b and A2 that have no speedup at any checkpoint of Table A3."""
    there = {arm for (group, _), arms in speedups(rows).items() if group in REPLAY_SHAPES for arm in arms}
    return [name for arm, (name, _) in ARMS.items() if arm not in there]


ORDER = ("fp8_kv", "kv8", "kv4")  # Fig. A2: each above the one before


def order_checks(rows: Rows) -> list[tuple[str, str, str, str, bool]]:
    """(group of states, model, lower arm, higher arm, held) of each neighbouring pair of `ORDER` with both measured."""
    return [
        (group, model, lower, higher, arms[lower] < arms[higher])
        for (group, model), arms in speedups(rows).items()
        for lower, higher in pairwise(ORDER)
        if {lower, higher} <= arms.keys()
    ]


def measured_windows(rows: Rows) -> dict[tuple[str, str], list[int]]:
    """(heterogeneous states, model) -> the recent widths that have rows, ascending."""
    found = {key: [width for width, _ in _windows(arms)] for key, arms in speedups(rows).items()}
    return {key: widths for key, widths in found.items() if key[0].startswith("ragged") and widths}


def window_figure(rows: Rows) -> go.Figure:
    """Fig. A3b,d: speedup over BF16 against the recent width; star: the paper's.

    Diamond: the same positions protected in BF16. Levels: KV4, without protection, dotted, and KV8 in dots and dashes.
    """
    figure, widest = go.Figure(), [math.log10(width) for width in (14, 590)]
    colours = {"ragged-4B": PRECISION_COLOURS["kv4rl"], "ragged-8B": PRECISION_COLOURS["kv8"]}
    for (group, model), arms in speedups(rows).items():
        points = [(width, arms[arm]) for width, arm in _windows(arms)]
        if not points or group not in colours:
            continue
        size = of_model({"model": model})[1]
        name, dash = f"{group[-2:]}, TP{size}", "solid" if size == PAPER_TP else "dash"
        line = {"color": colours[group], "width": 3 if size == PAPER_TP else 2, "dash": dash}
        x, y = zip(*points, strict=True)
        figure.add_scatter(x=x, y=y, name=f"KV4-RL, {name}", mode="lines+markers", line=line)
        ends = [10**end for end in widest]  # over the whole axis: a model may have one width only
        for arm, pattern in (("kv4", "dot"), ("kv8", "dashdot")):
            if arm in arms:
                level = line | {"dash": pattern}
                shown = f"{PRECISION_NAMES[arm]}, {name}"
                figure.add_scatter(x=ends, y=[arms[arm]] * 2, name=shown, mode="lines", line=level)
        if "kv4rl_bf16" in arms:
            diamond = {"symbol": "diamond-open", "size": 11, "color": colours[group]}
            given = {"mode": "markers", "marker": diamond, "name": f"protected in BF16, {name}"}
            figure.add_scatter(x=[DEFAULT_WINDOW], y=[arms["kv4rl_bf16"]], **given)
    published = PUBLISHED["ragged/4b/kv4rl"]
    marker = {"symbol": "star", "size": 14, "color": "black"}
    figure.add_scatter(
        x=[DEFAULT_WINDOW], y=[published.value], mode="markers", name="paper, 4B at 128, TP2", marker=marker
    )
    ticks = [16, 32, 64, 128, 256, 512]
    figure.update_xaxes(title_text="recent positions in INT8", type="log", tickvals=ticks, range=widest)
    figure.update_yaxes(title_text="speedup over BF16")
    figure.update_layout(height=400, width=900)
    return figure


def predicted_and_measured(rows: Rows) -> go.Figure:
    """Milliseconds of a decode step at Table A3's states: `StepCost` against the replay, one dot a state and format."""
    figure, largest = go.Figure(), 1.0
    for precision in PRECISIONS:
        points = [
            (predicted_ms(row), float(row["value"]), f"{row['model']}, {row['shape'].replace('/', ', ')}")
            for row in _timed(rows)
            if row["arm"] == precision
        ]
        if points:
            x, y, text = zip(*points, strict=True)
            largest = max(largest, *x, *y)
            marker = {"color": PRECISION_COLOURS[precision], "size": 8}
            figure.add_scatter(x=x, y=y, text=text, mode="markers", name=PRECISION_NAMES[precision], marker=marker)
    line = {"color": "#888888", "dash": "dash", "width": 1}
    figure.add_scatter(x=[0, largest], y=[0, largest], mode="lines", line=line, showlegend=False, hoverinfo="skip")
    figure.update_xaxes(title_text="predicted from rates, ms")
    figure.update_yaxes(title_text="measured, ms")
    figure.update_layout(height=460, width=640)
    return figure


def over_predicted(rows: Rows) -> list[dict[str, str]]:
    """Mean quotient of measured and predicted step at Table A3's states: one dict a model, a column a format."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in _timed(rows):
        found.setdefault(of_model(row), {}).setdefault(row["arm"], []).append(float(row["value"]) / predicted_ms(row))
    return without_empty_columns(
        [
            {"model": model, "ours at": f"TP{size}"}
            | {PRECISION_NAMES[p]: f"{sum(arms[p]) / len(arms[p]):.2f}" if p in arms else "-" for p in PRECISIONS}
            for (model, size), arms in sorted(found.items())
        ]
    )


def _timed(rows: Rows) -> list[Mapping[str, str]]:
    """The rows of whole steps, by cache format, at states of Table A3."""
    return [
        row
        for row in rows
        if (row["experiment"], row["metric"]) == ("replay", "decode_replay_ms")
        and row["arm"] in PRECISIONS
        and row["shape"].partition("/")[0] in REPLAY_SHAPES
    ]


def predicted_ms(row: Mapping[str, str]) -> float:
    """What `StepCost` says of the state of a replay row."""
    model, parallel = of_model(row)
    batch, context = (int(part) for part in row["shape"].partition("/")[2].split("x"))
    cost = StepCost(SHAPES[model], KVConfig(row["arm"]), tensor_parallel=parallel)
    return float(cost(batch, batch * context))
