"""Notebooks run top to bottom: parameters set, failures raised, Output widgets refused."""

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from kv4rl import execute as module


@pytest.fixture
def notebook(tmp_path):
    def write(*sources):
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        cells[0].metadata["tags"] = ["parameters"]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "n.ipynb")
        return tmp_path / "n.ipynb"

    return write


def test_parameters_reach_the_kernel_and_outputs_are_written(notebook, tmp_path):
    module.execute(notebook("X = 1", "print(X + 1)"), tmp_path / "out" / "n.ipynb", parameters={"X": 41})
    done = nbformat.read(tmp_path / "out" / "n.ipynb", as_version=4)
    assert done.cells[1].outputs[0].text == "42\n" and "execution" not in done.cells[1].metadata


def test_an_unknown_parameter_is_refused(notebook, tmp_path):
    with pytest.raises(ValueError, match="Y=2"):
        module.execute(notebook("X = 1"), tmp_path / "out.ipynb", parameters={"Y": 2})


def test_a_failing_cell_is_not_repeated(notebook, tmp_path):
    with pytest.raises(CellExecutionError, match="no such luck"):
        module.execute(notebook("X = 1", "raise RuntimeError('no such luck')"), tmp_path / "out.ipynb")
    assert not (tmp_path / "out.ipynb").exists()


def test_an_output_widget_is_refused(tmp_path):
    """Its callbacks' errors would hide in it, and nbclient's answers to it can stall a cell: so none runs here."""
    state = {"state": {"id": {"model_name": "OutputModel", "state": {"outputs": []}}}}
    ran = nbformat.v4.new_notebook(metadata={"widgets": {"application/vnd.jupyter.widget-state+json": state}})
    with pytest.raises(RuntimeError, match=r"n\.ipynb draws into an Output widget"):
        module.refuse_output_widgets(ran, tmp_path / "n.ipynb")


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"nbformat": 4}', "\N{SNOWMAN}"])
def test_a_file_that_is_no_notebook_is_named_before_anything_runs(tmp_path, capsys, content):
    (tmp_path / "a.ipynb").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        module.main([str(tmp_path / "a.ipynb"), "--output-dir", str(tmp_path / "out")])
    assert "a.ipynb': expected a Jupyter notebook" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named_before_anything_runs(tmp_path, capsys):
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "a.ipynb")
    with pytest.raises(SystemExit, match="2"):
        module.main([str(tmp_path / "a.ipynb"), "--output-dir", str(tmp_path / "a.ipynb")])
    assert capsys.readouterr().err.startswith("kv4rl.execute: error: ")
