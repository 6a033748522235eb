"""What the notebooks' "Try it" sections tell a reader to set runs to the end of what it changes."""

import nbformat
import pytest

from kv4rl.execute import set_parameters
from kv4rl.results import REPOSITORY

RECIPES = {  # notebook -> (parameters, the text of the last cell to run; "" for all)
    "01, two slots": ("01_prove_and_simulate_kv_concentration", {"SLOTS": 2}, ""),
    "04, no window": ("04_pack_pages_and_side_buffer", {"RECENT": 0}, ""),
    "04, a wide sink": ("04_pack_pages_and_side_buffer", {"SINK": 40}, ""),
    "06, one full page": ("06_write_the_kernels", {"TOKENS": 16}, "mutants = {"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(name, monkeypatch):
    stem, parameters, last = RECIPES[name]
    notebook = nbformat.read(REPOSITORY / "notebooks" / f"{stem}.ipynb", as_version=4)
    set_parameters(notebook, {"PRESET": "smoke"} | parameters)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for key, value in parameters.items():
        assert f"`{key} = {value}`" in text, "the recipe is one that the notebook gives"
    monkeypatch.chdir(REPOSITORY / "notebooks")
    monkeypatch.setattr("kv4rl.attention.triton.use_interpreter", lambda: True)  # none of these cells needs Triton
    names: dict = {"display": lambda *shown: None}
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        exec(compile(cell.source, stem, "exec"), names)
        if last and last in cell.source:
            break
