"""Commands that run on a GPU machine need torch and the grader there, not the packages of the notebooks."""

import subprocess
import sys

from kv4rl.results import REPOSITORY

COMMANDS = (
    "train", "train_rows", "sweep", "learning", "evaluation.__main__", "bench.kernels", "bench.replay", "bench.rollout",
    "bench.today", "doctor",
)  # fmt: skip
ABSENT = ("plotly", "ipywidgets", "anywidget", "kaleido", "nbclient", "nbformat", "IPython", "datasets", "gguf")


def test_they_start_without_the_notebooks_packages():
    hide = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))"
    code = f"{hide}; import importlib; [importlib.import_module('kv4rl.' + name) for name in {COMMANDS}]"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
