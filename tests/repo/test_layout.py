"""The tree keeps its promises: short files, complete package list, no clash with PyPI's `kernels`."""

import ast
import subprocess
import sys
import tomllib

import pytest

from kv4rl.results import REPOSITORY

SOURCES = sorted(
    path
    for folder in ("kv4rl", "kernels", "tests")
    for path in (REPOSITORY / folder).rglob("*")
    if path.suffix in (".py", ".cu", ".cuh", ".cpp")
)
TOP_LEVEL = set("notebooks kv4rl kernels data tests environment.yml README.md pyproject.toml constraints.txt Makefile "
                "LICENSE CITATION.cff .gitignore .ci".split())  # fmt: skip


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "-C", str(REPOSITORY), "ls-files"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return listed.stdout.split()


def test_no_file_is_longer_than_400_lines():
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: count for name, count in lengths.items() if count > 400} == {}


def test_no_function_of_the_package_is_longer_than_40_lines():
    long = {}
    for path in (path for path in SOURCES if path.suffix == ".py" and "tests" not in path.parts):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.end_lineno - node.body[0].lineno + 1
                if body > 40:
                    long[f"{path.relative_to(REPOSITORY)}:{node.name}"] = body
    assert long == {}


def test_top_level_holds_what_the_readme_says_and_nothing_else():
    assert {name.split("/")[0] for name in tracked_files()} <= TOP_LEVEL


def test_every_package_is_listed_for_installation():
    listed = set(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"kv4rl"} | {
        ".".join(path.parent.relative_to(REPOSITORY).parts) for path in (REPOSITORY / "kv4rl").rglob("__init__.py")
    }
    found |= {
        "kv4rl." + ".".join(path.parent.relative_to(REPOSITORY).parts)
        for path in (REPOSITORY / "kernels").rglob("__init__.py")
    }
    assert listed == found


@pytest.mark.parametrize("foreign", [True, False], ids=["kernels installed", "kernels absent"])
def test_transformers_imports_from_the_root_with_and_without_pypis_kernels(foreign, tmp_path):
    if foreign:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '0.10.0'\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import transformers, kv4rl.kernels; " + (
        "import kernels; assert kernels.__version__ == '0.10.0'" if foreign else "print(transformers.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_unfinished_marks_in_the_sources():
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X ", "NotImplemented" + "Error")
    hits = [
        f"{path.name}: {mark}" for path in SOURCES if path.suffix == ".py" for mark in marks if mark in path.read_text()
    ]
    assert hits == []
