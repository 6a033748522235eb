"""Sliders for notebooks 01 and 02; every figure comes from a function that a static cell calls as well."""

import math
from collections.abc import Callable

import ipywidgets as widgets
from IPython.display import display

from kv4rl.config import require
from kv4rl.theory.lengths import LengthDistribution
from kv4rl.theory.roofline import QWEN3_4B, QWEN3_8B
from kv4rl.theory.step_cost import StepCost
from kv4rl.viz.concentration import explore
from kv4rl.viz.planner import plan_figure

CAP = 16384  # Table A1
FAMILIES = ("deterministic", "geometric", "log-normal", "bimodal")
MODELS = {"Qwen3-4B": QWEN3_4B, "Qwen3-8B": QWEN3_8B}


def law(family: str, mean: int, spread: float) -> LengthDistribution:
    """A law of the family with about that mean before the cap. `spread`: sigma of the log-normal; for the bimodal law
    the long response is exp(2 spread) times the short one and one response in ten is long."""
    require(family in FAMILIES, "family", family, f"one of {', '.join(FAMILIES)}")
    if family == "deterministic":
        return LengthDistribution.deterministic(mean)
    if family == "geometric":
        return LengthDistribution.geometric(mean, cap=CAP)
    if family == "log-normal":
        return LengthDistribution.lognormal(mean / math.exp(spread**2 / 2), spread, cap=CAP)
    ratio = math.exp(2 * spread)
    short = max(1, round(mean / (0.9 + 0.1 * ratio)))
    return LengthDistribution.bimodal(short, min(CAP, max(short + 1, round(short * ratio))), 0.1)


def concentration_explorer() -> widgets.VBox:
    """Slots, law and prompt length in; C_KV, a wave's occupancy and the length-biased law out."""

    def show(family: str, mean: int, spread: float, slots: int, prompt_tokens: int) -> None:
        display(explore(law(family, mean, spread), slots, prompt_tokens))

    controls = {
        "family": widgets.Dropdown(options=FAMILIES, value="log-normal", description="law"),
        "mean": _slider(widgets.IntSlider, 1500, 50, 6000, 50, "mean length"),
        "spread": _slider(widgets.FloatSlider, 0.8, 0.1, 1.5, 0.05, "spread"),
        "slots": widgets.SelectionSlider(
            options=[2**k for k in range(1, 12)], value=512, description="slots B", continuous_update=False
        ),
        "prompt_tokens": _slider(widgets.IntSlider, 130, 0, 1024, 10, "prompt"),
    }
    return _explorer(show, controls)


def planner_explorer() -> widgets.VBox:
    """Model, GPUs, memory, protection and lengths in; pages, requests, volume and throughput out."""

    def show(model, tensor_parallel, slots, sink_tokens, recent_tokens, mean, spread, prompt_tokens) -> None:
        cost = StepCost(MODELS[model], tensor_parallel=tensor_parallel)
        protection = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
        lengths = law("log-normal", mean, spread)
        try:
            shown = plan_figure(cost, lengths, prompt_tokens=prompt_tokens, slots=slots, **protection)
        except ValueError as impossible:  # the sliders reach budgets that no plan fits: the reader sees which
            shown = widgets.Label(f"No plan: {impossible}")
        display(shown)

    controls = {
        "model": widgets.Dropdown(options=list(MODELS), value="Qwen3-8B", description="model"),
        "tensor_parallel": widgets.Dropdown(options=[1, 2, 4, 8], value=2, description="TP"),
        "slots": widgets.SelectionSlider(
            options=[128, 256, 512, 1024, 2048], value=1024, description="slots", continuous_update=False
        ),
        "sink_tokens": _slider(widgets.IntSlider, 16, 0, 64, 16, "sink"),
        "recent_tokens": _slider(widgets.IntSlider, 128, 0, 512, 16, "recent"),
        "mean": _slider(widgets.IntSlider, 4500, 200, 8000, 100, "mean length"),
        "spread": _slider(widgets.FloatSlider, 0.6, 0.1, 1.5, 0.05, "spread"),
        "prompt_tokens": _slider(widgets.IntSlider, 130, 0, 1024, 10, "prompt"),
    }
    return _explorer(show, controls)


def _slider(kind: type, value, low, high, step, name: str):
    return kind(value=value, min=low, max=high, step=step, description=name, continuous_update=False)


def _explorer(show: Callable[..., None], controls: dict) -> widgets.VBox:
    return widgets.VBox([*controls.values(), widgets.interactive_output(show, controls)])
