"""Property tests draw the same cases on every run; `pytest --hypothesis-profile explore` draws new ones."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import settings

from kv4rl.model.pointwise import NormRotate

settings.register_profile("explore", deadline=None)
settings.register_profile("repeat", deadline=None, derandomize=True)
settings.load_profile("repeat")


@pytest.fixture
def passes_interpreted(request):
    """Run the test's own file once more, in a process where Triton interprets its kernels; all of it must pass."""

    def run() -> None:
        pytest.importorskip("triton")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(request.path)]
        done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:]

    return run


@pytest.fixture
def raw_step():
    """q, k, v [n, heads, d] of a step as projected, with the `NormRotate` still to be done.

    Elements are eighths whose squares add up exactly in FP32, so that no order of summation shows.
    """

    def make(n: int, heads: tuple[int, int], d: int, dtype: torch.dtype, *, normed: bool, device="cpu"):
        generator = torch.Generator().manual_seed(4)
        q, k, v = (torch.randint(-31, 32, (n, h, d), generator=generator).to(dtype) / 8 for h in (*heads, heads[1]))
        weights = [torch.randn(d, generator=generator).to(device, dtype) if normed else None for _ in range(2)]
        angles = 100 * torch.rand(n, 1, d // 2, generator=generator)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
        before = NormRotate(*weights, 1e-6, cos.to(device, dtype), sin.to(device, dtype))
        return *(x.to(device) for x in (q, k, v)), before

    return make


@pytest.fixture
def zero_constant_and_huge():
    """An edit of five requests' vectors: whole ones that are zero, constant, far below zero or huge, and one mixed."""

    def edit(row, q, k, v):
        if row < 3:
            size = (0.0, 2.5, -1e6)[row]
            k[:], v[:] = size, size
        elif row == 3:
            k[:], v[:] = 1e4 * k, 1e6 * v
        else:
            v[3], v[5], k[7], v[11], k[13] = 0.0, 2.5, 2.5, 1e3 * v[11], 0.0

    return edit
