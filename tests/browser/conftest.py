"""One headless Chromium and one JupyterLab for all tests here; skipped, visibly, where there is no browser."""

import pytest

from kv4rl import browser as module
from kv4rl.results import REPOSITORY

NOTEBOOKS = ("01_prove_and_simulate_kv_concentration", "07_choose_sink_and_recent")


@pytest.fixture(scope="session")
def browser():
    if module.missing():
        pytest.skip(module.missing())
    with module.chromium() as driver:
        yield driver


@pytest.fixture(scope="session")
def lab(browser, tmp_path_factory):
    """From a notebook's stem to its address. Depends on `browser`, so that no server starts where there is none."""
    folder = tmp_path_factory.mktemp("notebooks")
    for name in NOTEBOOKS:
        module.copy_without_outputs(REPOSITORY / "notebooks" / f"{name}.ipynb", folder, parameters={"PRESET": "smoke"})
    with module.jupyter_lab(folder) as address:
        yield lambda name: address(f"{name}.ipynb")
