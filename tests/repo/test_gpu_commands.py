"""Commands that run on a GPU machine need torch and the grader there, not the packages of the notebooks."""

import subprocess
import sys

import pytest

from kv4rl.results import REPOSITORY

COMMANDS = (
    "train", "train_rows", "sweep", "learning", "evaluation.__main__", "bench.kernels", "bench.replay", "bench.rollout",
    "bench.today", "doctor",
)  # fmt: skip
ABSENT = ("plotly", "ipywidgets", "anywidget", "kaleido", "nbclient", "nbformat", "IPython", "datasets", "gguf")


@pytest.mark.parametrize("command", COMMANDS)
def test_it_starts_without_the_notebooks_packages(command):
    hide = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))"
    code = f"{hide}; import importlib; importlib.import_module('kv4rl.{command}')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
