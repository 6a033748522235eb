"""Runs notebooks top to bottom and leaves them as GitHub can show them: figures as PNG, no widget state.

`python -m kv4rl.execute notebooks/*.ipynb --in-place` refreshes the committed outputs;
`kv4rl.replicate` calls `execute` with another preset and another folder.
"""

import argparse
import base64
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from kv4rl.chromium import find_chromium
from kv4rl.cli import one_sentence
from kv4rl.config import InputError, require

PLOTLY = "application/vnd.plotly.v1+json"
STATIC_SIZE = {"width": 900, "height": 420}
WIDGET = "application/vnd.jupyter.widget-view+json"
WORDS = 80  # characters of nbformat's complaint, which may quote the whole file
INSTEAD = "(a widget: it is drawn where the notebook runs)"  # of its repr, which is long and says nothing


def execute(path: Path, output: Path, *, parameters: dict | None = None, timeout_s: int = 600) -> float:
    """Run the notebook at `path` and write it, executed and cleaned, to `output`; returns the seconds it took.

    `parameters` replace those of the cell tagged `parameters`. Raises nbclient's CellExecutionError, with the cell's
    traceback, if a cell fails, CellTimeoutError if one takes longer than `timeout_s`, ValueError for a parameter the
    notebook does not have, RuntimeError for a notebook that draws into an Output widget.
    """
    started = time.perf_counter()
    notebook = run(path, parameters, timeout_s)
    seconds = time.perf_counter() - started
    refuse_output_widgets(notebook, path)
    clean(notebook)
    output.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, output)
    return seconds


def run(path: Path, parameters: dict | None, timeout_s: int):
    """The notebook at `path`, executed once in a fresh kernel."""
    notebook = read(path)
    if parameters:
        set_parameters(notebook, parameters)
    resources = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=timeout_s, kernel_name="python3", resources=resources).execute()
    return notebook


def read(path: Path):
    """The notebook at `path`. InputError for a file that is none: nbformat names each kind of damage otherwise."""
    try:
        return nbformat.read(path, as_version=4)
    except (ValueError, AttributeError, KeyError, nbformat.ValidationError) as error:
        raise InputError(f"notebook={str(path)!r}: expected a Jupyter notebook ({str(error)[:WORDS]})") from error


def set_parameters(notebook, parameters: dict) -> None:
    """Replace the literals `NAME = value` of the cell tagged `parameters`."""
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    require(len(tagged) == 1, "cells tagged `parameters`", len(tagged), "exactly one to set PRESET and the like in")
    cell = tagged[0]
    lines = cell.source.split("\n")
    for name, value in parameters.items():
        hits = [i for i, line in enumerate(lines) if line.split("=")[0].strip() == name]
        if not hits:
            raise InputError(f"{name}={value!r}: expected a parameter of the notebook, which has {cell.source!r}")
        lines[hits[0]] = f"{name} = {value!r}"
    cell.source = "\n".join(lines)


def refuse_output_widgets(notebook, path: Path) -> None:
    """Raise RuntimeError for a notebook with an Output widget (`interactive_output` makes one): it hides the errors of
    its callbacks (ipywidgets #3208), and answering it can stall a cell (`kv4rl.viz.live` says how)."""
    widgets = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {})
    if any(model.get("model_name") == "OutputModel" for model in widgets.get("state", {}).values()):
        raise RuntimeError(f"{path.name} draws into an Output widget: use kv4rl.viz.live.Explorer")


def clean(notebook) -> None:
    """Add a PNG to each plotly output and drop its JSON (if a browser is there to draw it); drop widget state."""
    notebook.metadata.pop("widgets", None)
    draw = find_chromium() is not None
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if draw and PLOTLY in output.get("data", {}):
                output.data = {"image/png": png(output.data[PLOTLY])}
            if WIDGET in output.get("data", {}):
                output.data["text/plain"] = INSTEAD


def png(figure: dict) -> str:
    """Base64 PNG of a plotly figure given as JSON, at its own size or STATIC_SIZE."""
    import plotly.graph_objects as go

    drawn = go.Figure({name: figure[name] for name in ("data", "layout") if name in figure})
    size = {side: drawn.layout[side] or STATIC_SIZE[side] for side in STATIC_SIZE}
    return base64.b64encode(drawn.to_image(format="png", scale=1.1, **size)).decode()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--in-place", action="store_true", help="write the outputs back into the notebooks")
    where.add_argument("--output-dir", type=Path, help="write the executed notebooks here")
    parser.add_argument("--preset", help="value for the parameter PRESET")
    words = parser.parse_args(arguments)
    with one_sentence("kv4rl.execute"):
        for path in words.notebooks:
            require(path.is_file(), "notebook", str(path), "a file that exists")
            notebook = read(path)
            if words.preset:
                set_parameters(notebook, {"PRESET": words.preset})
        if words.output_dir:  # a folder that cannot be made would be found out after minutes of work
            words.output_dir.mkdir(parents=True, exist_ok=True)
    for path in words.notebooks:
        output = path if words.in_place else words.output_dir / path.name
        seconds = execute(path, output, parameters={"PRESET": words.preset} if words.preset else None)
        print(f"{path.name}: {seconds:.0f} s, {output.stat().st_size // 1000} KB")


if __name__ == "__main__":
    main()
