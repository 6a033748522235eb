"""Every committed notebook keeps its contract: claim first, one parameters cell, pictures a reader sees on GitHub."""

import ast
import importlib
import inspect
import itertools
import json
import re

import nbformat
import pytest

from kv4rl.results import REPOSITORY

PATHS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
FORBIDDEN = ("!pip", "%pip", "%cd", "sys.path", "cuda:", "except:", "input(", "/home/", "/root/", "/work/", "/tmp/")
HEADER = ["Goal", "Paper", "Needs", "Hardware", "Time", "Leaves behind"]
ENDING = ["Try it", "Exercises", "Limitations", "Next"]


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert PATHS and PATHS[0].stem.startswith("00_")


def test_first_cell_states_the_claim_and_six_fields(notebook):
    first = notebook.cells[0].source
    assert first.startswith("# ") and "\n> " in first
    header = next(line for line in first.split("\n") if line.startswith("| Goal"))
    assert [word.strip() for word in header.strip("|").split("|")] == HEADER
    meta = notebook.metadata["kv4rl"]
    assert meta["requires"] in ("cpu", "cuda") and meta["minutes_cpu"] > 0 and meta["paper"]


def test_one_parameters_cell_of_literals(notebook):
    tagged = [cell for cell in code_cells(notebook) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    for statement in ast.parse(tagged[0].source).body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)
    mock = tagged[0].metadata["nbmake"]["mock"]
    assert mock["PRESET"] == "smoke"


def test_nothing_that_ties_a_notebook_to_one_machine(notebook):
    text = json.dumps([cell.source for cell in notebook.cells] + [c.get("outputs", []) for c in notebook.cells])
    assert [word for word in FORBIDDEN if word in text] == []


def test_outputs_are_committed_in_order_without_errors_or_widget_state(path, notebook):
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no picture a reader on GitHub would see"
    assert "widgets" not in notebook.metadata
    assert not [cell for cell in cells if "execution" in cell.metadata]
    assert path.stat().st_size < 500_000


def test_cells_are_short_and_introduced(notebook):
    cells = notebook.cells
    assert max(len(cell.source.split("\n")) for cell in code_cells(notebook)) <= 15
    for before, cell in itertools.pairwise(cells):
        if cell.cell_type == "code" and "parameters" not in cell.metadata.get("tags", []):
            assert before.cell_type == "markdown" or "parameters" in before.metadata.get("tags", []), cell.source


def test_a_statement_of_the_paper_is_asserted(notebook):
    assert any(re.search(r"^\s*assert ", cell.source, re.M) for cell in code_cells(notebook))


def test_it_ends_with_what_to_do_next(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    positions = [text.rfind(f"## {word}") for word in ENDING]
    assert positions == sorted(positions) and positions[0] > 0


def test_it_says_what_was_seen_in_numbers_made_from_the_run(notebook):
    cells = notebook.cells
    (at,) = (i for i, cell in enumerate(cells) if cell.source.startswith("## What you saw\n"))
    code = cells[at + 1]
    assert "notebook.saw(" in code.source and not re.search(r"(?<![\w{:.\[])\d+\.\d+(?![\w}])", code.source)
    said = code.outputs[-1]["data"]["text/markdown"].split("\n")
    assert len(said) >= 3 and all(line.startswith("- ") for line in said) and re.search(r"\d", "".join(said))


def test_tables_have_as_many_cells_as_columns(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    texts = [output.get("data", {}).get("text/markdown", "") for output in outputs]
    for block in (block for text in texts for block in text.split("\n\n") if block.startswith("| ")):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.split("\n")}
        assert len(widths) == 1, block.split("\n")[0]


def test_no_output_is_a_raw_repr(notebook):
    """A widget's, a list's or a dict's repr is for programmers: a sentence or a table stands in its place."""
    for output in (output for cell in code_cells(notebook) for output in cell.outputs):
        text = output.get("text") or ""
        data = output.get("data", {})
        shown = text if text or data.keys() - {"text/plain"} else data.get("text/plain", "")
        assert "children=(" not in data.get("text/plain", "")
        assert not [line for line in shown.split("\n") if line.startswith(("{'", "[{", "(Regions"))]


def test_readme_lists_it_with_the_same_facts(path, notebook):
    row = next(line for line in (REPOSITORY / "README.md").read_text().split("\n") if f"notebooks/{path.name}" in line)
    meta = notebook.metadata["kv4rl"]
    assert meta["requires"].upper() in row and f"| {meta['minutes_cpu']:g} |" in row
    assert all(place in row for place in meta["paper"])


def test_a_shown_source_is_todays(notebook):
    """`notebook.show_source(x)` prints a function of the package, which may have changed since the notebook ran."""
    imports = re.findall(r"^from (kv4rl[\w.]*) import (.+)$", "\n".join(c.source for c in code_cells(notebook)), re.M)
    modules = {name: module for module, names in imports for name in names.split(", ")}
    for cell in code_cells(notebook):
        for name, *parts in (path.split(".") for path in re.findall(r"show_source\(([\w.]+)\)", cell.source)):
            shown = getattr(importlib.import_module(modules[name]), name)
            for part in parts:
                shown = getattr(shown, part)
            printed = "".join(output.get("data", {}).get("text/markdown", "") for output in cell.outputs)
            assert inspect.getsource(shown).strip() in printed, f"run the notebook again: {name} has changed"
