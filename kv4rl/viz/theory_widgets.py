"""Sliders for notebooks 01 and 02; every figure comes from a function that a static cell calls as well."""

import math

import ipywidgets as widgets
import plotly.graph_objects as go

from kv4rl.config import require, require_number
from kv4rl.theory.lengths import LengthDistribution
from kv4rl.theory.planner import H200_BYTES, kv_budget_bytes
from kv4rl.theory.roofline import QWEN3_4B, QWEN3_8B
from kv4rl.theory.step_cost import StepCost
from kv4rl.viz.concentration import explore
from kv4rl.viz.live import Explorer, slider, stops
from kv4rl.viz.planner import plan_figure

CAP = 16384  # Table A1
FAMILIES = ("deterministic", "geometric", "log-normal", "bimodal")
MODELS = {"Qwen3-4B": QWEN3_4B, "Qwen3-8B": QWEN3_8B}


def law(family: str, mean: int, spread: float) -> LengthDistribution:
    """A law of the family with about that mean before the cap. `spread`: sigma of the log-normal; for the bimodal law
    the long response is exp(2 spread) times the short one and one response in ten is long. Raises ValueError for
    another family, a mean outside [1, CAP] or a spread outside (0, 3]."""
    require(family in FAMILIES, "family", family, f"one of {', '.join(FAMILIES)}")
    require_number(mean, "mean", 1, CAP)
    require_number(spread, "spread", 0, 3, open_low=True)
    if family == "deterministic":
        return LengthDistribution.deterministic(mean)
    if family == "geometric":
        return LengthDistribution.geometric(mean, cap=CAP)
    if family == "log-normal":
        return LengthDistribution.lognormal(mean / math.exp(spread**2 / 2), spread, cap=CAP)
    ratio = math.exp(2 * spread)
    short = max(1, round(mean / (0.9 + 0.1 * ratio)))
    return LengthDistribution.bimodal(short, min(CAP, max(short + 1, round(short * ratio))), 0.1)


def concentration_explorer() -> Explorer:
    """Slots, law and prompt length in; C_KV, a wave's occupancy and the length-biased law out."""

    def draw(family: str, mean: int, spread: float, slots: int, prompt_tokens: int) -> go.Figure:
        return explore(law(family, mean, spread), slots, prompt_tokens)

    return Explorer(
        draw,
        {
            "family": widgets.Dropdown(options=FAMILIES, value="log-normal", description="law"),
            "mean": slider(widgets.IntSlider, 1500, 50, 6000, 50, "mean length"),
            "spread": slider(widgets.FloatSlider, 0.8, 0.1, 1.5, 0.05, "spread"),
            "slots": stops(512, [2**k for k in range(1, 12)], "slots B"),
            "prompt_tokens": slider(widgets.IntSlider, 130, 0, 1024, 10, "prompt"),
        },
    )


def planner_explorer() -> Explorer:
    """Model, GPUs and their memory, protection, law and prompt in; pages, requests, volume and both speedups out."""

    def draw(model, tensor_parallel, hbm_gb, family, mean, spread, **given) -> go.Figure:
        cost = StepCost(MODELS[model], tensor_parallel=tensor_parallel)
        budget = kv_budget_bytes(cost.model, tensor_parallel=tensor_parallel, hbm_bytes=hbm_gb * 1e9)
        return plan_figure(cost, law(family, mean, spread), kv_budget=budget, **given)

    return Explorer(
        draw,
        {
            "model": widgets.Dropdown(options=list(MODELS), value="Qwen3-8B", description="model"),
            "tensor_parallel": widgets.Dropdown(options=[1, 2, 4, 8], value=2, description="TP"),
            "hbm_gb": slider(widgets.IntSlider, round(H200_BYTES / 1e9), 100, 288, 1, "GB a GPU"),
            "slots": stops(1024, [128, 256, 512, 1024, 2048], "slots"),
            "sink_tokens": stops(16, range(0, 65, 16), "sink"),
            "recent_tokens": stops(128, range(0, 513, 16), "recent"),
            "family": widgets.Dropdown(options=FAMILIES, value="log-normal", description="law"),
            "mean": slider(widgets.IntSlider, 4500, 200, 8000, 100, "mean length"),
            "spread": slider(widgets.FloatSlider, 0.6, 0.1, 1.5, 0.05, "spread"),
            "prompt_tokens": slider(widgets.IntSlider, 130, 0, 1024, 10, "prompt"),
        },
    )
