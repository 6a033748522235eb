"""compute-sanitizer over one write, plan and decode of each precision, at the lengths where regions and pages end.

racecheck needs builds in which every lane arrives at a barrier that gives memory back: it does not carry __syncwarp
over to lane 0's arrival, and reports reads that were over (kernels/README.md). The rest of the code is the same.
"""

import os
import shutil
import subprocess
import sys

import pytest

from kv4rl.attention.jit import CHECKED_VARIABLE

SANITIZER = shutil.which("compute-sanitizer")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer on PATH")]

LAUNCHES = """
import torch
from kv4rl.attention.cuda import write_kv
from kv4rl.bench.kernels import OurDecode, Step, Workload

edges = Workload("edges", (1, 15, 16, 17, 143, 144, 145, 160, 300, 4200))
for precision in ("kv4", "kv4rl", "kv8"):
    decode = OurDecode(precision, edges, (16, 4))
    decode.launch(0)
    assert decode.out.isfinite().all()
    step = Step(20, (16, 4), precision)
    for before in (None, step.before):
        write_kv(step.cache, 0, *step.qkv(0), step.where, before)
torch.cuda.synchronize()
print("launched all")
"""


def sanitize(tool: str, **environment: str) -> str:
    """What `tool` prints of the launches; fails if they did not come to their end."""
    command = [SANITIZER, "--tool", tool, sys.executable, "-c", LAUNCHES]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=540)
    report = done.stdout + done.stderr
    assert "launched all" in report, report[-3000:]
    return report


def test_memcheck_finds_no_access_out_of_bounds():
    report = sanitize("memcheck", PYTORCH_NO_CUDA_MEMORY_CACHING="1")  # each tensor ends where its memory does
    assert "ERROR SUMMARY: 0 errors" in report, report[-3000:]


def test_racecheck_finds_no_hazard_between_copies_and_reads_of_shared_memory():
    report = sanitize("racecheck", **{CHECKED_VARIABLE: "1"})
    assert "RACECHECK SUMMARY: 0 hazards" in report, report[-3000:]
