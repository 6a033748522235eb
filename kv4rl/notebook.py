"""What every notebook needs and should not have to show: where data lies, which machine this is, how to show code."""

import inspect
import platform
import time
from importlib.metadata import version
from pathlib import Path

import torch

from kv4rl.results import REPOSITORY, hardware

PACKAGES = ("torch", "transformers", "triton", "numpy", "plotly", "ipywidgets")


class Notebook:
    """One run of one notebook: prints the versions at the start and the time at the end."""

    def __init__(self, number: int):
        self.number = number
        self.started = time.perf_counter()

    def finish(self) -> None:
        """Print the seconds since `start`, so that the header's minutes can be checked against a reader's machine."""
        print(f"notebook {self.number:02d} took {time.perf_counter() - self.started:.0f} s on {hardware()}")


def start(number: int) -> Notebook:
    """First cell of every notebook: versions and machine on two lines, figures in the project's template."""
    from kv4rl.viz.style import use_template

    use_template()
    print(f"Python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in PACKAGES))
    print(f"{hardware()}; CUDA {'available' if torch.cuda.is_available() else 'not available: the CPU path runs'}")
    return Notebook(number)


def data_path(*parts: str) -> Path:
    """A path under the repository's `data/`, from wherever the notebook runs."""
    return REPOSITORY.joinpath("data", *parts)


def show_source(function):
    """The source of a package function as a code block, so that a notebook shows it without copying it."""
    from IPython.display import Markdown

    return Markdown(f"```python\n{inspect.getsource(function)}```")


def table(rows: list[dict], columns: list[str] | None = None, *, made_by: str = ""):
    """A list of dicts as a Markdown table (renders on GitHub, unlike widgets).

    Without rows a sentence stands instead: what was not measured, and `made_by`, the command that would make the rows.
    """
    from IPython.display import Markdown

    if not rows:
        return Markdown(f"*Not measured: `{made_by}` makes the rows.*" if made_by else "*No rows.*")
    columns = columns or list(rows[0])
    lines = [_line(columns), "|" + "---|" * len(columns)]
    return Markdown("\n".join(lines + [_line(row.get(name, "") for name in columns) for row in rows]))


def _line(cells) -> str:
    """One line of a Markdown table; a bar inside a cell would begin another."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def saw(*sentences: str):
    """The closing list "What you saw": one item a sentence, each made from the values of the run."""
    from IPython.display import Markdown

    return Markdown("\n".join(f"- {sentence}" for sentence in sentences))
