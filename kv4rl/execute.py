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
from nbclient.exceptions import CellTimeoutError

from kv4rl.chromium import find_chromium
from kv4rl.cli import one_sentence
from kv4rl.config import InputError, require

PLOTLY = "application/vnd.plotly.v1+json"
STATIC_SIZE = {"width": 900, "height": 420}


def execute(path: Path, output: Path, *, parameters: dict | None = None, timeout_s: int = 600) -> float:
    """Run the notebook at `path` and write it, executed and cleaned, to `output`; returns the seconds it took.

    `parameters` replace those of the cell tagged `parameters`. Raises nbclient's CellExecutionError, with the cell's
    traceback, if a cell fails, and CellTimeoutError if one takes longer than `timeout_s` twice: once may be a kernel
    with widgets and its client waiting for each other, which a second run does not repeat. ValueError for a parameter
    the notebook does not have.
    """
    started = time.perf_counter()
    try:
        notebook = run(path, parameters, timeout_s)
    except CellTimeoutError as error:
        print(f"{path.name}: a cell took more than {timeout_s} s, running it again ({str(error).splitlines()[0]})")
        notebook = run(path, parameters, timeout_s)
    seconds = time.perf_counter() - started
    fail_on_hidden_errors(notebook, path)
    clean(notebook)
    output.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, output)
    return seconds


def run(path: Path, parameters: dict | None, timeout_s: int):
    """The notebook at `path`, executed once in a fresh kernel."""
    notebook = nbformat.read(path, as_version=4)
    if parameters:
        set_parameters(notebook, parameters)
    resources = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=timeout_s, kernel_name="python3", resources=resources).execute()
    return notebook


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


def fail_on_hidden_errors(notebook, path: Path) -> None:
    """Errors raised inside widget callbacks hide in Output widgets (ipywidgets #3208): find them and raise."""
    widgets = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {})
    for model in widgets.get("state", {}).values():
        for output in model.get("state", {}).get("outputs", []) if model.get("model_name") == "OutputModel" else []:
            if output.get("output_type") == "error":
                raise RuntimeError(f"{path.name}: a widget callback raised {output['ename']}: {output['evalue']}")


def clean(notebook) -> None:
    """Add a PNG to each plotly output and drop its JSON (if a browser is there to draw it); drop widget state."""
    notebook.metadata.pop("widgets", None)
    draw = find_chromium() is not None
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if draw and PLOTLY in output.get("data", {}):
                output.data = {"image/png": png(output.data[PLOTLY])}


def png(figure: dict) -> str:
    """Base64 PNG of a plotly figure given as JSON, at its own size or STATIC_SIZE."""
    import plotly.graph_objects as go

    drawn = go.Figure({name: figure[name] for name in ("data", "layout") if name in figure})
    size = {side: drawn.layout[side] or STATIC_SIZE[side] for side in STATIC_SIZE}
    return base64.b64encode(drawn.to_image(format="png", scale=1.25, **size)).decode()


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
            if words.preset:
                set_parameters(nbformat.read(path, as_version=4), {"PRESET": words.preset})
    for path in words.notebooks:
        output = path if words.in_place else words.output_dir / path.name
        seconds = execute(path, output, parameters={"PRESET": words.preset} if words.preset else None)
        print(f"{path.name}: {seconds:.0f} s, {output.stat().st_size // 1000} KB")


if __name__ == "__main__":
    main()
