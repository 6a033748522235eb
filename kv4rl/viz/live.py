"""Sliders above a figure that follows them: a plotly FigureWidget whose traces change in place, no flicker, no redraw.

`interact` and `interactive_output` are not used. They draw into an Output widget, and nbclient (so also nbmake and
nbconvert) answers every message of one with a raw send on the socket on which it awaits the reply to the cell. A reply
that arrives during that send is never noticed, since libzmq wakes a waiting socket once, and the send consumes that
one wake-up: kernel and client then idle until the cell's time limit (jupyter/nbclient#312, jupyter/nbconvert#2029). A
FigureWidget draws itself and asks the client for nothing.
"""

from collections.abc import Callable, Mapping

import ipywidgets as widgets
import plotly.graph_objects as go

from kv4rl.config import require


class Explorer(widgets.VBox):
    """Controls, a sentence and a figure, one below the other.

    Args: `draw` makes the figure from the controls' values, by keyword; it is called once now and at each move. A
    ValueError it raises is shown as the sentence, and the figure stays as it was: sliders reach settings that no plan
    fits. At the first call it is raised, as is any other exception at any call.
    """

    def __init__(self, draw: Callable[..., go.Figure], controls: Mapping[str, widgets.ValueWidget]):
        require(bool(controls), "controls", controls, "at least one")
        self.draw, self.controls = draw, dict(controls)
        self.sentence = widgets.HTML()
        self.figure = go.FigureWidget(draw(**self.settings))
        for control in self.controls.values():
            control.observe(self._move, names="value")
            control.style.description_width = "90px"  # wide enough for "mean length"
        wrapped = widgets.Layout(flex_flow="row wrap")
        super().__init__([widgets.Box(list(self.controls.values()), layout=wrapped), self.sentence, self.figure])

    @property
    def settings(self) -> dict:
        """The controls' values by name."""
        return {name: control.value for name, control in self.controls.items()}

    def _move(self, change: Mapping) -> None:
        try:
            figure = self.draw(**self.settings)
        except ValueError as impossible:
            self.sentence.value = f"Not possible: {impossible}"
            return
        self.sentence.value = ""
        redraw(self.figure, figure)


def redraw(shown: go.FigureWidget, figure: go.Figure) -> None:
    """Give `shown` the traces and the layout of `figure`, in one message; both come from one drawing function.

    Raises ValueError unless the two have traces of the same types in the same order.
    """
    kinds, wanted = ([trace.type for trace in drawn.data] for drawn in (shown, figure))
    require(kinds == wanted, "traces", wanted, f"those already shown, {kinds}")
    with shown.batch_update():
        for trace, new in zip(shown.data, figure.data, strict=True):
            trace.update(new.to_plotly_json(), overwrite=True)
        layout = figure.layout.to_plotly_json()
        layout.pop("template", None)
        shown.layout.update(layout, overwrite=True)


def slider(kind: type, value, low, high, step, name: str) -> widgets.ValueWidget:
    """A slider of `kind` (IntSlider, FloatSlider) that reports where it is let go, not every value on the way."""
    return kind(value=value, min=low, max=high, step=step, description=name, continuous_update=False)


def stops(value, options, name: str) -> widgets.SelectionSlider:
    """A slider over the given values only."""
    return widgets.SelectionSlider(value=value, options=options, description=name, continuous_update=False)
