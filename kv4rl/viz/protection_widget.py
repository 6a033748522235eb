"""Two sliders, sink and recent width, and what they do to KL, speed, bytes and the map (notebook 07)."""

from collections.abc import Mapping, Sequence

import ipywidgets as widgets
import plotly.graph_objects as go

from kv4rl.viz.live import Explorer, stops
from kv4rl.viz.protection import tradeoff
from kv4rl.viz.protection_grid import PAPER, Grid, Workload


def protection_explorer(
    grids: Mapping[str, Grid], loads: Sequence[Workload], *, load: Workload | None = None
) -> Explorer:
    """Sliders over the measured widths, at the paper's 16/128 first; model and workload from lists.

    Args: `grids` by model, all of the same widths; `load`: the workload shown first, or None for the first of `loads`.
    """
    by_name = {workload.name: workload for workload in loads}
    first = next(iter(grids.values()))

    def draw(sink: int, recent: int, model: str, workload: str) -> go.Figure:
        return tradeoff(grids[model], by_name[workload], sink, recent)

    return Explorer(
        draw,
        {
            "sink": stops(PAPER[0], first.sinks, "sink s"),
            "recent": stops(PAPER[1], first.recents, "recent w"),
            "model": widgets.Dropdown(options=list(grids), description="KL of"),
            "workload": widgets.Dropdown(options=list(by_name), value=(load or loads[0]).name, description="speed at"),
        },
    )
