"""One look for every figure: the four precisions in one order and in Okabe-Ito colours, safe for the colour-blind."""

import plotly.graph_objects as go
import plotly.io

from kv4rl.viz.names import PRECISION_NAMES

__all__ = ["ACCENT", "PRECISION_COLOURS", "PRECISION_NAMES", "use_template"]

PRECISION_COLOURS = {"bf16": "#555555", "kv8": "#0072B2", "kv4": "#D55E00", "kv4rl": "#009E73"}
ACCENT = "#CC79A7"


def use_template() -> None:
    """Make `kv4rl` plotly's default template (white, thin grid, fixed margins)."""
    axis = {"showline": True, "linecolor": "#888888", "gridcolor": "#E6E6E6", "zeroline": False, "ticks": "outside"}
    layout = go.Layout(
        font={"family": "Helvetica, Arial, sans-serif", "size": 13},
        paper_bgcolor="white", plot_bgcolor="white", xaxis=axis, yaxis=axis, colorway=list(PRECISION_COLOURS.values()),
        margin={"l": 70, "r": 20, "t": 60, "b": 55}, legend={"bgcolor": "rgba(255,255,255,0.7)"},
    )  # fmt: skip
    plotly.io.templates["kv4rl"] = go.layout.Template(layout=layout)
    plotly.io.templates.default = "kv4rl"
