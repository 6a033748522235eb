"""Build a CUDA file on first use: nvcc alone, cached by source, configuration, architecture and torch version."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from kv4rl.attention.backends import BackendUnavailable

ARCHITECTURE = "90a"  # Hopper: bulk copies into shared memory
CACHE_VARIABLE = "KV4RL_CACHE"  # directory of built kernels; default ~/.cache/kv4rl
CHECKED_VARIABLE = "KV4RL_EVERY_LANE_ARRIVES"  # 1: builds that compute-sanitizer's racecheck can follow (decode.cuh)
FIX = "install the CUDA 13 toolkit, or set CUDA_HOME"


def sources() -> Path:
    """The directory of the .cu files: of the installed `kv4rl.kernels`, which is `kernels/` of the repository."""
    from kv4rl import kernels

    return Path(kernels.__file__).resolve().parent / "cuda"


def compiler() -> str:
    """Path of nvcc, of CUDA_HOME if set, else of PATH. Raises `BackendUnavailable`, with the fix, without one."""
    home = os.environ.get("CUDA_HOME")
    places = [f"{home}/bin/nvcc", "nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    found = next(filter(None, map(shutil.which, places)), None)
    if found is None:
        raise BackendUnavailable(f"no nvcc on PATH or under CUDA_HOME: {FIX}")
    return found


def compile_command(nvcc: str, source: Path, output: Path, defines: dict[str, int], *extra: str) -> list[str]:
    """The one command line that builds a .cu file for `ARCHITECTURE`."""
    target = f"arch=compute_{ARCHITECTURE},code=sm_{ARCHITECTURE}"
    flags = [f"-D{name}={int(value)}" for name, value in defines.items()]
    return [nvcc, "-std=c++17", "-O3", "-gencode", target, *flags, *extra, "-o", str(output), str(source)]


def _key(source: Path, defines: dict[str, int]) -> str:
    digest = hashlib.sha256()
    for part in (source, *sorted(source.parent.glob("*.cuh"))):
        digest.update(part.read_bytes())
    digest.update(repr((sorted(defines.items()), ARCHITECTURE, torch.__version__, torch.version.cuda)).encode())
    return digest.hexdigest()[:20]


def _cache_directory() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "kv4rl")


@lru_cache
def build(name: str, **defines: int) -> ctypes.CDLL:
    """The library of `kernels/cuda/<name>.cu` for `defines`, from the cache or newly built (a few seconds).

    Raises `BackendUnavailable` without a compiler or a place for what it makes, or with its own words if it fails.
    """
    source = sources() / f"{name}.cu"
    if os.environ.get(CHECKED_VARIABLE) == "1":
        defines["EVERY_LANE_ARRIVES"] = 1
    library = _cache_directory() / f"{name}-{_key(source, defines)}.so"
    try:
        if not library.exists():
            _compile(source, library, defines)
        return ctypes.CDLL(str(library))
    except OSError as error:
        directory = f"set {CACHE_VARIABLE} to a directory that can be written and loaded from"
        raise BackendUnavailable(f"built kernels cannot be kept in {library.parent}: {directory} ({error})") from error


def _compile(source: Path, library: Path, defines: dict[str, int]) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        command = compile_command(compiler(), source, built, defines, "-shared", "-Xcompiler", "-fPIC")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BackendUnavailable(
                f"{command[0]} could not build {source.name} for sm_{ARCHITECTURE}: {FIX}; "
                f"it says: {done.stderr.strip()[-2000:]}"
            )
        built.replace(library)  # atomic: another process may build the same


def check(error: int, what: str) -> None:
    """Raise `RuntimeError` for a CUDA error code other than success."""
    if error != 0:
        raise RuntimeError(f"{what}: CUDA error {error}")
