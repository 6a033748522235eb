"""`python -m kv4rl.doctor`: what this machine can run, and the one-line fix for what it cannot."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from kv4rl.chromium import find_chromium
from kv4rl.results import REPOSITORY, hardware

MINIMUM_FREE_BYTES = 2 << 30


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report."""

    name: str
    ok: bool
    found: str
    fix: str  # what to do when not ok
    needed: bool = False  # without it nothing runs; the rest are extras


def examine() -> list[Check]:
    """Look at this machine. Reads only; needs neither network nor GPU."""
    return [*_needed(), *_notebooks(), *_models(), *_gpu()]


def _needed() -> list[Check]:
    python = ".".join(map(str, sys.version_info[:3]))
    free = shutil.disk_usage(REPOSITORY).free
    return [
        Check("Python", sys.version_info >= (3, 11), python, "use Python 3.11 or 3.12", needed=True),
        _package("torch", needed=True),
        _package("transformers", needed=True),
        _package("math-verify", needed=True),
        Check("disk", free > MINIMUM_FREE_BYTES, f"{free >> 30} GiB free", "free 2 GiB for runs and checkpoints"),
    ]


def _notebooks() -> list[Check]:
    browser = find_chromium()
    fix = "install Chromium or Chrome; without it figures stay interactive and GitHub shows none"
    extra = "pip install -e '.[notebooks]'"
    packages = [_package(name, fix=extra) for name in ("jupyterlab", "ipywidgets", "anywidget", "plotly")]
    return [*packages, Check("browser for PNG figures", browser is not None, browser or "none", fix)]


def _models() -> list[Check]:
    found = []
    for name, fix in (
        ("mini-qwen3", "it is part of the repository: git checkout data/models/mini-qwen3"),
        ("smollm2-135m", "python -m kv4rl.model.fetch smollm2"),
    ):
        weights = REPOSITORY / "data" / "models" / name / "model.safetensors"
        size = f"{weights.stat().st_size / 1e6:.0f} MB" if weights.exists() else "absent"
        found.append(Check(f"model {name}", weights.exists(), size, fix))
    return found


def _gpu() -> list[Check]:
    cuda = torch.cuda.is_available()
    build = torch.version.cuda or "CPU build"
    fix = "none needed for the CPU path; for a GPU: pip install torch with CUDA and check the driver with nvidia-smi"
    checks = [Check("CUDA device", cuda, f"{hardware()} (torch {build})" if cuda else f"none (torch {build})", fix)]
    arch = torch.cuda.get_device_capability() if cuda else None
    hopper = arch == (9, 0)
    checks.append(
        Check("sm_90a kernels", hopper, f"sm_{arch[0]}{arch[1]}" if arch else "no GPU", "Hopper only; Triton elsewhere")
    )
    nvcc = shutil.which("nvcc") or next(iter(map(str, Path("/usr/local").glob("cuda*/bin/nvcc"))), None)
    checks.append(Check("nvcc", nvcc is not None, nvcc or "absent", "install the CUDA toolkit (>= 12.4)"))
    checks.append(_package("triton", fix="pip install triton (Linux)"))
    ninja = shutil.which("ninja") is not None or find_spec("ninja") is not None
    checks.append(Check("ninja", ninja, "found" if ninja else "absent", "pip install -e '.[gpu]'"))
    checks.append(_package("flashinfer-python", fix="pip install -e '.[gpu]' (BF16 baseline)"))
    checks.append(_package("torch-memory-saver", fix="pip install -e '.[gpu]' (the KV cache gives its memory back)"))
    return checks


def _package(name: str, *, fix: str = "make test installs it", needed: bool = False) -> Check:
    try:
        return Check(name, True, version(name), fix, needed)
    except PackageNotFoundError:
        return Check(name, False, "absent", fix, needed)


def report(checks: list[Check]) -> str:
    """The report as text: one line a check, the fix on the lines that need one."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        mark = "ok" if check.ok else ("NEEDED" if check.needed else "-")
        lines.append(f"{mark:>6}  {check.name:<{width}}  {check.found}" + ("" if check.ok else f"  ->  {check.fix}"))
    return "\n".join(lines)


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report; 1 if something that everything needs is absent."""
    argparse.ArgumentParser(prog="python -m kv4rl.doctor", description=__doc__.split("\n")[0]).parse_args(arguments)
    checks = examine()
    print(report(checks))
    return int(any(check.needed and not check.ok for check in checks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
