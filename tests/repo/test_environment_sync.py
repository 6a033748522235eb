"""pyproject has floors, constraints.txt the tested pins, environment.yml neither: the three stay in step."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version

import pytest
import yaml

from kv4rl.results import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PINS = dict(
    line.split("==")
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
USER_PACKAGES = "torch triton transformers jupyterlab ipywidgets plotly numpy math-verify nbmake".split()


def floors() -> dict[str, str]:
    listed = PROJECT["dependencies"] + [word for extra in PROJECT["optional-dependencies"].values() for word in extra]
    return dict(re.match(r"([\w-]+)[>=]=([\d.]+)", word).groups() for word in listed)


def as_tuple(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


def test_every_dependency_has_a_pin_at_or_above_its_floor():
    # These need a GPU: measured there, never installed by `make test`.
    outside_ci = {"flashinfer-python", "torch-memory-saver"}
    for name, floor in floors().items():
        if name not in outside_ci:
            assert as_tuple(PINS[name]) >= as_tuple(floor), name


def test_the_packages_the_project_is_built_on_are_all_there():
    assert set(USER_PACKAGES) <= set(floors())


def test_environment_yml_delegates_to_pyproject():
    environment = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
    *names, pip = environment["dependencies"]
    assert names[1:] == ["pip"]
    python = names[0].removeprefix("python=")
    assert as_tuple(python) >= as_tuple(PROJECT["requires-python"])
    assert "prefix" not in environment
    constraint, editable = pip["pip"]
    assert constraint == "-c constraints.txt"
    extras = re.fullmatch(r"-e \.\[([\w,]+)\]", editable).group(1).split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("name", sorted(PINS))
def test_what_is_installed_is_what_is_pinned_or_newer_than_the_floor(name):
    try:
        installed = version(name).split("+")[0]
    except PackageNotFoundError:
        assert name in {"datasets", "gguf", "ninja", "kaleido"}, f"{name} is pinned and not installed"
        return
    floor = floors().get(name, PINS[name] if name not in floors() else "0")
    assert as_tuple(installed) >= as_tuple(floor) or installed == PINS[name]


def test_readme_makefile_and_ci_name_the_two_commands():
    readme = (REPOSITORY / "README.md").read_text()
    assert "make replicate" in readme and "make test" in readme
    assert "make test" in (REPOSITORY / ".ci" / "run").read_text()
