"""compute-sanitizer over one write, plan and decode of each precision, at the lengths where regions and pages end.

BF16 pages, 8-bit P and a group of 5 among them; memcheck also sees the Triton kernels.

racecheck needs builds in which every lane arrives at a barrier that gives memory back: it does not carry __syncwarp
over to lane 0's arrival, and reports reads that were over (kernels/README.md). The rest of the code is the same.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kv4rl.attention.jit import CHECKED_VARIABLE

SANITIZER = shutil.which("compute-sanitizer")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer on PATH")]

LAUNCHES = """
import sys

import torch

sys.path.insert(0, sys.argv[1])
from conftest import build_case

from kv4rl.attention.cuda import write_kv
from kv4rl.bench.kernels import Step
from kv4rl.config import KVConfig

EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 143, 144, 145, 160, 300, 4200]
ARMS = [("bf16", 4, "fp16"), ("kv8", 4, "fp16"), ("kv4", 5, "fp16"), ("kv4rl", 4, "fp16"), ("kv4rl", 5, "u8")]
for backend in sys.argv[2:]:
    for precision, group, operand in ARMS:
        case = build_case(KVConfig(precision, probability_operand=operand), EDGES, group=group, backend=backend)
        assert case.decode()[0].isfinite().all(), (backend, precision)
for precision in ("bf16", "kv4", "kv4rl", "kv8"):
    step = Step(20, (16, 4), precision)
    for before in (None, step.before):
        write_kv(step.cache, 0, *step.qkv(0), step.where, before)
torch.cuda.synchronize()
print("launched all")
"""


def sanitize(tool: str, *backends: str, **environment: str) -> str:
    """What `tool` prints of the launches of `backends`; fails if they did not come to their end."""
    command = [SANITIZER, "--tool", tool, sys.executable, "-c", LAUNCHES, str(Path(__file__).parent), *backends]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=540)
    report = done.stdout + done.stderr
    assert "launched all" in report, report[-3000:]
    return report


def test_memcheck_finds_no_access_out_of_bounds():
    report = sanitize(
        "memcheck", "cuda", "triton", PYTORCH_NO_CUDA_MEMORY_CACHING="1"
    )  # each tensor ends where its memory does
    assert "ERROR SUMMARY: 0 errors" in report, report[-3000:]


def test_racecheck_finds_no_hazard_between_copies_and_reads_of_shared_memory():
    report = sanitize("racecheck", "cuda", **{CHECKED_VARIABLE: "1"})
    assert "RACECHECK SUMMARY: 0 hazards" in report, report[-3000:]
