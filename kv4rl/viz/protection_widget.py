"""Two sliders, sink and recent width, and what they do to KL, speed, bytes and the map (notebook 07)."""

from collections.abc import Mapping, Sequence

import ipywidgets as widgets
import plotly.graph_objects as go

from kv4rl.config import require
from kv4rl.viz.live import Explorer, stops
from kv4rl.viz.protection import tradeoff
from kv4rl.viz.protection_grid import PAPER, Grid, Workload


def protection_explorer(
    grids: Mapping[str, Grid], loads: Sequence[Workload], *, load: Workload | None = None
) -> Explorer:
    """Sliders over the measured widths, at the paper's 16/128 first; model and workload from lists.

    Args: `grids` by model, all of the same widths, 16/128 among them; `load`: the one of `loads` that is shown first,
    or None for its first. Raises ValueError for no grids or loads, other widths, or a `load` that is not in `loads`.
    """
    by_name = {workload.name: workload for workload in loads}
    load = _checked(grids, loads, load)
    first = next(iter(grids.values()))

    def draw(sink: int, recent: int, model: str, workload: str) -> go.Figure:
        return tradeoff(grids[model], by_name[workload], sink, recent)

    return Explorer(
        draw,
        {
            "sink": stops(PAPER[0], first.sinks, "sink s"),
            "recent": stops(PAPER[1], first.recents, "recent w"),
            "model": widgets.Dropdown(options=list(grids), description="KL of"),
            "workload": widgets.Dropdown(options=list(by_name), value=load.name, description="speed at"),
        },
    )


def _checked(grids: Mapping[str, Grid], loads: Sequence[Workload], load: Workload | None) -> Workload:
    """The workload to begin with, once everything given fits together."""
    require(bool(grids), "grids", list(grids), "one model's grid or more: Grid.from_rows")
    require(bool(loads), "loads", list(loads), "one workload or more: kv4rl.viz.protection_grid.workloads")
    widths = {name: (grid.sinks, grid.recents) for name, grid in grids.items()}
    first = next(iter(widths.values()))
    require(all(found == first for found in widths.values()), "grids", widths, "the same widths for every model")
    require(PAPER[0] in first[0] and PAPER[1] in first[1], "widths", first, f"{PAPER[0]}/{PAPER[1]} among them")
    require(load is None or load in loads, "load", load and load.name, f"one of {[each.name for each in loads]}")
    return load or loads[0]
