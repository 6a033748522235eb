"""What `kv4rl.browser` does before and without a browser."""

import nbformat
import pytest

from kv4rl import browser as module
from kv4rl.results import REPOSITORY

NOTEBOOK = REPOSITORY / "notebooks" / "07_choose_sink_and_recent.ipynb"


def test_a_copy_has_its_parameters_and_no_outputs_and_the_original_stays(tmp_path):
    before = NOTEBOOK.read_bytes()
    module.copy_without_outputs(NOTEBOOK, tmp_path, parameters={"PRESET": "smoke"})
    cells = [c for c in nbformat.read(tmp_path / NOTEBOOK.name, as_version=4).cells if c.cell_type == "code"]
    assert any("PRESET = 'smoke'" in cell.source for cell in cells) and NOTEBOOK.read_bytes() == before
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.ipynb", "--pages", "x"], "notebook='nowhere.ipynb': expected a file that exists"),
        ([str(NOTEBOOK)], "expected what to save"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        module.main(words)
    assert end.value.code == 2 and sentence in capsys.readouterr().err


def test_where_a_browser_is_missing_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(module, "DRIVER", None)
    with pytest.raises(SystemExit):
        module.main([str(NOTEBOOK), "--pages", "x"])
    assert "apt-get install chromium chromium-driver" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_reported_with_its_log(tmp_path, monkeypatch):
    def start(folder, home, port, token):
        (home / "log").write_text("port 1 is not to be had")
        return module.subprocess.Popen([module.sys.executable, "-c", "raise SystemExit(1)"])

    monkeypatch.setattr(module, "_start", start)
    with pytest.raises(RuntimeError, match="port 1 is not to be had"), module.jupyter_lab(tmp_path):
        pass
