"""Stored pictures and outputs that come from kernels.csv and fidelity.csv are those of the rows that stand there."""

import re

import nbformat
import pytest

from kv4rl import readme
from kv4rl.results import REPOSITORY, read_rows
from kv4rl.viz.kernels import of_table_a3
from kv4rl.viz.protection import tradeoff
from kv4rl.viz.protection_grid import PAPER, Grid, Workload, workloads
from kv4rl.viz.stamp import digest, stamp, stamped
from kv4rl.viz.style import use_template

FIGURES = REPOSITORY / "data" / "figures"
WIDGET = (
    "python -m kv4rl.browser notebooks/07_choose_sink_and_recent.ipynb --widget data/figures/widget_sink_recent.png"
)


def shown_in_07() -> tuple[Grid, Workload]:
    """The grid and the workload that notebook 07 opens with."""
    grid = Grid.from_rows(read_rows("fidelity.csv", shape="grid", metric="sampler_kl"), "smollm2-135m")
    return grid, next(load for load in workloads(read_rows("kernels.csv")) if load.context_tokens == 1463)


def stored_text(stem: str) -> str:
    """Everything that the stored notebook printed or shows as Markdown."""
    cells = nbformat.read(REPOSITORY / "notebooks" / f"{stem}.ipynb", as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/markdown", "") for output in outputs)


def test_a_stamp_is_read_back_and_the_picture_stays_a_picture(tmp_path):
    path = tmp_path / "picture.png"
    drawn = (FIGURES / "width_sweeps.png").read_bytes()
    path.write_bytes(drawn[:8])
    assert stamped(path) == ""
    path.write_bytes(drawn)
    stamp(path, "a\nb ± c")
    assert stamped(path) == "a\nb ± c" and path.read_bytes().endswith(drawn[33:])


@pytest.mark.parametrize("name", ["kernel_speedups", "width_sweeps"])
def test_a_picture_of_the_readme_is_of_todays_rows(name):
    """The learning curves are left out: `make replicate` adds runs of the reader's machine."""
    use_template()
    assert stamped(FIGURES / f"{name}.png") == digest(readme.PICTURES[name]()), "run python -m kv4rl.readme"


def test_the_widgets_picture_has_the_numbers_of_todays_rows():
    figure = tradeoff(*shown_in_07(), *PAPER)
    titles = [re.sub("<[^>]+>", "", note.text).replace("\u25a0", "-") for note in figure.layout.annotations]
    assert stamped(FIGURES / "widget_sink_recent.png").split("\n") == titles, f"run {WIDGET}"


def test_notebook_07_shows_the_speeds_of_todays_rows():
    (grid, load), text = shown_in_07(), stored_text("07_choose_sink_and_recent")
    for recent in grid.recents:
        speed = load.speed(16, recent)
        assert f"| {speed.over_bf16:.2f}x {speed.scope} |" in text, "run python -m kv4rl.execute on notebook 07"
    assert f"{load.speed(0, 0).over_bf16:.2f}x to {load.speed(*PAPER).over_bf16:.2f}x BF16" in text


def test_notebook_06_shows_the_ranges_of_todays_rows():
    rows = of_table_a3(read_rows("kernels.csv", model="tp2_16q4kv", experiment="kernels"))
    text = stored_text("06_write_the_kernels")
    for arm in ("kv8", "kv4", "kv4rl"):
        speeds = [float(r["value"]) for r in rows if (r["arm"], r["metric"]) == (arm, "speedup_vs_bf16")]
        said = f"{min(speeds):.2f} to {max(speeds):.2f}x on {len(speeds)} shapes"
        assert said in text, "run python -m kv4rl.execute on notebook 06"
