"""Notebooks as a reader has them: JupyterLab on a loopback port, with a token, in headless Chromium.

    python -m kv4rl.browser notebooks/07_choose_sink_and_recent.ipynb --widget data/figures/widget_sink_recent.png

runs the notebook (a copy: the file stays as it is) and saves a picture of its first widget; `--pages` saves the whole
notebook, screen by screen. Needs selenium (extra `test`), Chromium and its driver; tests/browser is built on this.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import nbformat

from kv4rl.chromium import find_chromium
from kv4rl.cli import one_sentence
from kv4rl.config import require
from kv4rl.execute import set_parameters
from kv4rl.viz.stamp import stamp

CHROMIUM = find_chromium()
DRIVER = shutil.which("chromedriver")
# Nothing that looks beyond this machine: no updates, no reports, no look-ups at start.
QUIET = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight are in the page as well
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
START_S, LOAD_S, RUN_S, SHOW_S = 90, 90, 240, 30

# What JupyterLab knows of the open notebook: code cells that have not run, and errors among the outputs.
STATE = """
const panel = window.jupyterapp?.shell?.currentWidget;
const status = panel?.sessionContext?.session?.kernel?.status;
if (!panel?.content?.widgets?.length || !status) return null;
const cells = panel.content.widgets.filter(cell => cell.model.type === 'code').map(cell => cell.model.toJSON());
const errors = cells.flatMap(cell => cell.outputs).filter(output => output.output_type === 'error');
return {
  idle: status === 'idle', waiting: cells.filter(cell => cell.execution_count === null).length,
  errors: errors.map(error => error.ename + ': ' + error.evalue),
};
"""
RUN_ALL = """
const done = arguments[0];
window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => done(true), error => done(String(error)));
"""
WIDGET = ".jp-OutputArea-output:has(.noUi-handle)"  # an output with a slider in it
# The drawing as the browser holds it: every mark and every word of a widget's figure.
DRAWING = "return [...arguments[0].querySelectorAll('.js-plotly-plot svg.main-svg')].map(x => x.innerHTML).join('')"
TITLES = "return [...arguments[0].querySelectorAll('.annotation-text')].map(x => x.textContent)"


def missing() -> str:
    """What has to be installed first, in a sentence; empty if nothing."""
    if CHROMIUM is None or DRIVER is None:
        return "no chromium and chromedriver here (Debian: apt-get install chromium chromium-driver)"
    if find_spec("selenium") is None:
        return "no selenium here (pip install -e '.[test]')"
    return ""


@contextmanager
def chromium(width: int = 1400, height: int = 1600) -> Iterator:
    """A selenium driver of headless Chromium with an empty profile. Raises InputError where it is not installed."""
    from selenium import webdriver

    require(not missing(), "browser", missing(), "Chromium and its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for word in (*QUIET, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(word)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
        try:
            yield driver
        finally:
            driver.quit()


@contextmanager
def jupyter_lab(folder: Path) -> Iterator[Callable[[str], str]]:
    """JupyterLab over `folder`, with settings of its own; gives a function from a notebook's name to its address."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        home, port, token = Path(name), _free_port(), secrets.token_hex(16)
        _write_settings(home / "settings")
        process = _start(folder, home, port, token)
        address = f"http://127.0.0.1:{port}"
        try:
            _await_start(process, f"{address}/api?token={token}", home / "log")
            yield lambda file: f"{address}/lab/workspaces/w{file[:2]}/tree/{file}?token={token}"
        finally:
            process.send_signal(signal.SIGTERM)  # the server ends its kernels before itself
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def copy_without_outputs(source: Path, folder: Path, *, parameters: dict | None = None) -> None:
    """Put the notebook, as if never run, with `parameters` set, into `folder`."""
    notebook = nbformat.read(source, as_version=4)
    if parameters:
        set_parameters(notebook, parameters)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, folder / source.name)


def run_all(driver, address: str) -> None:
    """Open the notebook at `address` and run every cell. Raises RuntimeError with the errors that its cells show."""
    driver.get(address)
    wait(driver, LOAD_S, lambda: (driver.execute_script(STATE) or {}).get("idle"), "no idle kernel")
    driver.set_script_timeout(RUN_S)
    done = driver.execute_async_script(RUN_ALL)
    state = driver.execute_script(STATE)
    if done is not True or state["errors"] or state["waiting"]:
        raise RuntimeError(f"run-all-cells: {done}; cells that did not run: {state['waiting']}; {state['errors']}")


def wait(driver, seconds: float, condition: Callable[[], object], what: str):
    """The first truthy value of `condition`, asked four times a second. Raises selenium's TimeoutException."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, seconds, poll_frequency=0.25).until(lambda _: condition(), what)


def first_widget(driver):
    """The first output with sliders, once its figure is drawn."""
    found = wait(driver, SHOW_S, lambda: driver.find_elements("css selector", WIDGET), "no output with a slider")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found[0])
    wait(driver, SHOW_S, lambda: drawing(driver, found[0]), "the widget shows no figure")
    return found[0]


def drawing(driver, output) -> str:
    """The SVG of the figure in that output, empty while there is none."""
    return driver.execute_script(DRAWING, output)


def titles(driver, output) -> str:
    """The titles of the figure's panels in that output, a line each: the picture's numbers."""
    return "\n".join(driver.execute_script(TITLES, output)).replace("\u25a0", "-")


def save_pages(driver, folder: Path) -> list[Path]:
    """The whole notebook as pictures of one screen each."""
    scroller = driver.find_element("css selector", ".jp-WindowedPanel-outer")
    height, total = driver.execute_script("return [arguments[0].clientHeight, arguments[0].scrollHeight]", scroller)
    paths = []
    for number, top in enumerate(range(0, total, height)):
        driver.execute_script("arguments[0].scrollTop = arguments[1]", scroller, top)
        time.sleep(1)  # figures that come into sight are drawn
        paths.append(folder / f"page{number:02d}.png")
        driver.save_screenshot(str(paths[-1]))
    return paths


def _write_settings(folder: Path) -> None:
    for name, settings in SETTINGS.items():
        path = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(folder: Path, home: Path, port: int, token: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    command += ["--LabApp.expose_app_in_browser=True"]  # window.jupyterapp: STATE and RUN_ALL ask it
    own = {name: str(home / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces")}
    with (home / "log").open("w") as log:
        return subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT)


def _await_start(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:  # not listening yet
            time.sleep(0.3)
    raise RuntimeError(f"JupyterLab did not start within {START_S} s:\n{log.read_text()[-2000:]}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--widget", type=Path, help="save a picture of the first widget here")
    parser.add_argument("--pages", type=Path, help="save the notebook, screen by screen, in this folder")
    given = parser.parse_args(arguments)
    with one_sentence("kv4rl.browser"):
        require(given.notebook.is_file(), "notebook", str(given.notebook), "a file that exists")
        require(bool(given.widget or given.pages), "--widget, --pages", "neither", "what to save")
        require(not missing(), "browser", missing(), "Chromium and its driver")
    with tempfile.TemporaryDirectory() as name, jupyter_lab(Path(name)) as address, chromium() as driver:
        copy_without_outputs(given.notebook, Path(name))
        run_all(driver, address(given.notebook.name))
        if given.pages:
            given.pages.mkdir(parents=True, exist_ok=True)
            print(*save_pages(driver, given.pages), sep="\n")
        if given.widget:
            given.widget.parent.mkdir(parents=True, exist_ok=True)
            widget = first_widget(driver)
            widget.screenshot(str(given.widget))
            stamp(given.widget, titles(driver, widget))
            print(given.widget)


if __name__ == "__main__":
    main()
