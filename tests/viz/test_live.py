"""Explorers: what their figures take over, what they refuse, and that they ask nothing of nbclient."""

import re

import ipywidgets as widgets
import nbformat
import plotly.graph_objects as go
import pytest
from nbclient import NotebookClient
from nbclient.output_widget import OutputWidget

from kv4rl.results import REPOSITORY
from kv4rl.viz.live import Explorer, redraw, slider, stops

VIEW = "application/vnd.jupyter.widget-view+json"


def line(height: int, kind: str = "line") -> go.Figure:
    if height > 3:
        raise ValueError(f"height={height}: expected at most 3")
    figure = go.Figure(go.Bar(y=[height]) if kind == "bar" else go.Scatter(y=[0, height]))
    return figure.update_layout(title=f"height {height}", shapes=[{"type": "line", "y0": height, "y1": height}])


def explorer() -> Explorer:
    kinds = widgets.Dropdown(options=["line", "bar"])
    return Explorer(line, {"height": slider(widgets.IntSlider, 1, 0, 9, 1, "height"), "kind": kinds})


def test_a_move_changes_data_and_layout_of_the_one_figure():
    shown = explorer()
    figure, trace = shown.figure, shown.figure.data[0]
    shown.controls["height"].value = 3
    assert shown.figure is figure and figure.data[0] is trace, "traces change in place"
    assert list(trace.y) == [0, 3] and figure.layout.title.text == "height 3" and figure.layout.shapes[0].y1 == 3


def test_an_impossible_setting_is_a_sentence_and_leaves_with_the_setting():
    shown = explorer()
    shown.controls["height"].value = 7
    assert "height=7: expected at most 3" in shown.sentence.value and list(shown.figure.data[0].y) == [0, 1]
    shown.controls["height"].value = 2
    assert shown.sentence.value == "" and list(shown.figure.data[0].y) == [0, 2]


def test_figures_of_another_kind_and_no_controls_are_refused():
    with pytest.raises(ValueError, match=r"traces=\['bar'\]: expected those already shown, \['scatter'\]"):
        redraw(go.FigureWidget(line(1)), line(1, "bar"))
    with pytest.raises(ValueError, match="controls"):
        Explorer(line, {})
    with pytest.raises(ValueError, match="height=9"):
        Explorer(line, {"height": stops(9, [1, 9], "height")})


CELL = """
import ipywidgets as widgets, plotly.graph_objects as go
from kv4rl.viz.live import Explorer, slider
shown = Explorer(lambda a: go.Figure(go.Bar(y=[a])), {"a": slider(widgets.IntSlider, 1, 0, 9, 1, "a")})
shown.controls["a"].value = 5
shown
"""


def test_a_cell_with_an_explorer_has_nbclient_send_nothing(monkeypatch):
    """An answer of nbclient's may swallow the wake-up for the cell's own reply: the cell would idle to its limit."""
    sent = []
    monkeypatch.setattr(OutputWidget, "_publish_msg", lambda self, *args, **given: sent.append(args))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert VIEW in notebook.cells[0].outputs[-1].data and sent == []


def test_nothing_here_draws_into_an_output_widget():
    sources = [*(REPOSITORY / "kv4rl").rglob("*.py"), *(REPOSITORY / "notebooks").glob("*.ipynb")]
    words = re.compile(r"\b(interact(ive|ive_output|_manual)?|widgets\.Output|Output)\(")
    assert len(sources) > 50 and [path.name for path in sources if words.search(path.read_text())] == []


@pytest.mark.parametrize("path", sorted((REPOSITORY / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_still_picture_follows_every_widget(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for at, cell in enumerate(cells):
        if any(VIEW in output.get("data", {}) for output in cell.outputs):
            following = cells[at + 1].outputs if at + 1 < len(cells) else []
            assert any("image/png" in output.get("data", {}) for output in following), cell.source
