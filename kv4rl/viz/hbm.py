"""Where one GPU's memory goes when the engine is planned, format by format (§A.2 "Phase memory management")."""

from collections.abc import Mapping
from dataclasses import dataclass

import plotly.graph_objects as go
import torch

from kv4rl.cache.memory_plan import HBMPlan
from kv4rl.config import PRECISIONS, KVConfig, RolloutConfig
from kv4rl.engine.memory import plan_engine
from kv4rl.model.decoder import Decoder
from kv4rl.model.shapes import shape_config
from kv4rl.model.tensor_parallel import empty_shard
from kv4rl.viz.style import PRECISION_NAMES

ITEM_COLOURS = {
    "model": "#555555", "workspace": "#999999", "metadata": "#CCCCCC", "side buffer": "#CC79A7", "pages": "#009E73",
}  # fmt: skip


@dataclass(frozen=True)
class Rank:
    """A place in a tensor-parallel group that nobody has joined: enough to count a shard's weights."""

    rank: int
    size: int


def shapes_only(model: str, tensor_parallel: int) -> Decoder:
    """A model of `kv4rl.model.shapes`, or one rank's shard of it, without any weights."""
    config, given = shape_config(model), {"dtype": torch.bfloat16, "device": "meta"}
    if tensor_parallel > 1:
        return empty_shard(config, Rank(0, tensor_parallel), **given)
    with torch.device("meta"):
        return Decoder(config).to(torch.bfloat16)


def plans(model: str, rollout: RolloutConfig, *, tensor_parallel: int, budget_bytes: int) -> dict[str, HBMPlan]:
    """Precision -> the engine's plan of one GPU. Raises ValueError, item by item, where the budget is too small."""
    decoder = shapes_only(model, tensor_parallel)
    return {name: plan_engine(decoder, KVConfig(name), rollout, budget_bytes) for name in PRECISIONS}


def plan_rows(found: Mapping[str, HBMPlan]) -> list[dict[str, str]]:
    """One dict a precision: GB of each item, pages and the positions they hold."""
    return [
        {"precision": name}
        | {f"{item}, GB": f"{size / 1e9:.2f}" for item, size in plan.items.items()}
        | {"pages": f"{plan.cache.pages:,}", "positions": f"{plan.cache.tokens:,}"}
        for name, plan in found.items()
    ]


def hbm_plan(found: Mapping[str, Mapping[str, HBMPlan]]) -> go.Figure:
    """One stacked bar a model and precision, an item a colour, in GB.

    found: model -> precision -> plan.
    """
    bars = [(model, name, plan) for model, of_model in found.items() for name, plan in of_model.items()]
    labels = [f"{model} · {PRECISION_NAMES[name]}" for model, name, _ in bars]
    figure = go.Figure()
    for item, colour in ITEM_COLOURS.items():
        values = [plan.items[item] / 1e9 for *_, plan in bars]
        figure.add_bar(y=labels, x=values, name=item, orientation="h", marker_color=colour)
    positions = [f"{plan.cache.tokens / 1e6:.1f}M positions" for *_, plan in bars]
    figure.data[-1].update(text=positions, textposition="inside")
    figure.update_xaxes(title_text="GB of one GPU")
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        barmode="stack", height=160 + 34 * len(bars), width=900, margin={"l": 150},
        legend={"orientation": "h", "y": 1.12},
    )  # fmt: skip
    return figure
