"""Every CUDA file compiles for sm_90a, wherever nvcc is: no device, no torch headers."""

import ctypes
import re
import subprocess

import pytest
import torch

from kv4rl.attention import cuda, jit
from kv4rl.attention import cuda_arguments as arguments
from kv4rl.attention.backends import BackendUnavailable, choose_backend

SMALL = {"HEAD_DIM": 128, "QUERY_TILES": 1, "WARPS": 4, "BLOCKS": 3, "STAGES": 7, "TILES": 2}
BUILDS = {
    "plan": [{}],
    "write_kv": [
        {"HEAD_DIM": d, "EACH": each, "PRECISION": precision, "INPUT_TYPE": dtype, "BEFORE": before, "PAGE_EACH": own}
        for d, each, precision, dtype, before, own in [
            *((d, each, 0, 0, 2, 1) for d in (64, 128, 256) for each in (8, 16)),
            *((128, 8, precision, dtype, 0, 0) for precision in (0, 1, 2) for dtype in (0, 1, 2)),
            *((128, 8, precision, dtype, 2 - dtype, own) for precision in (0, 1) for dtype in (0, 1) for own in (0, 1)),
            *((128, 8, 2, dtype, 2 - dtype, 0) for dtype in (0, 1)),
        ]
    ],
    "decode_int4": [
        *(SMALL | {"PROTECTED": p, "BYTES": b, "BLOCKS": 3 - b} for p in (0, 1) for b in (0, 1)),
        SMALL | {"PROTECTED": 1, "BYTES": 0, "EVERY_LANE_ARRIVES": 1},
    ],
    "decode_int8": [SMALL | {"BLOCKS": 2, "STAGES": 6, "TILES": 1} | each for each in ({}, {"EVERY_LANE_ARRIVES": 1})],
    "decode_bf16": [SMALL | {"BLOCKS": 2, "STAGES": 3, "TILES": 1, "BF16": b} for b in (0, 1)],
}


def nvcc() -> str:
    try:
        return jit.compiler()
    except BackendUnavailable as reason:
        pytest.skip(str(reason))


def test_every_cuda_file_is_in_the_list():
    assert {path.stem for path in jit.sources().glob("*.cu")} == set(BUILDS)


@pytest.mark.parametrize(("name", "defines"), [(name, d) for name, builds in BUILDS.items() for d in builds])
def test_compiles_without_spills(tmp_path, name, defines):
    source, output = jit.sources() / f"{name}.cu", tmp_path / f"{name}.cubin"
    command = jit.compile_command(nvcc(), source, output, defines, "-cubin", "-Xptxas", "-v")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert set(re.findall(r"(\d+) bytes spill stores", done.stderr)) == {"0"}


LOAD = re.compile(r"ld\.volatile\.global\.u16\s+(%rs\d+)")


def loads_that_wait(ptx: str, together: int) -> list[str]:
    """Lines within a run of `together` side-scale loads that branch, or use what an earlier one of the run loads."""
    found, loaded = [], []
    for line in map(str.strip, ptx.splitlines()):
        load = LOAD.search(line)
        if load:
            loaded = [*loaded, load[1]] if 0 < len(loaded) < together else [load[1]]
        elif 0 < len(loaded) < together:
            used = set(re.findall(r"%rs\d+", line)) & set(loaded)
            if used or line.startswith(("@", "bra", "$L")):
                found.append(line)
    return found


def test_an_items_side_scales_are_all_asked_for_before_one_is_waited_for(tmp_path):
    """KV4-RL's streaming warp lost 10 % of the kernel's time when each pair of loads waited for the one before."""
    source, output = jit.sources() / "decode_int4.cu", tmp_path / "decode_int4.ptx"
    command = jit.compile_command(nvcc(), source, output, SMALL | {"PROTECTED": 1, "BYTES": 0}, "-ptx")
    command[command.index("-gencode") + 1] = f"arch=compute_{jit.ARCHITECTURE},code=compute_{jit.ARCHITECTURE}"
    subprocess.run(command, check=True, capture_output=True)
    ptx = output.read_text()
    loads = len(LOAD.findall(ptx))
    assert loads > 0 and loads % 10 == 0  # 5 keys' and 5 values' scales a lane, wherever an item is looked up
    assert loads_that_wait(ptx, together=10) == []


def test_a_load_under_a_branch_or_a_use_between_loads_is_found():
    first, second = "ld.volatile.global.u16 %rs1, [%rd1];", "ld.volatile.global.u16 %rs2, [%rd2];"
    for between in ("@%p1 bra $L1;", "$L1:", "mov.b32 %r1, {%rs1, %rs3};"):
        assert loads_that_wait("\n".join((first, between, second)), together=2) == [between]
    assert loads_that_wait("\n".join((first, "add.s64 %rd2, %rd1, 2;", second, "mov.b32 %r1, {%rs1, %rs2};")), 2) == []


def test_device_code_includes_no_torch_header():
    for path in jit.sources().iterdir():
        assert "torch/" not in path.read_text()
        assert "ATen" not in path.read_text()


def test_argument_structures_have_the_sizes_of_the_device_structs(tmp_path):
    """A host program prints sizeof() of each argument struct: ctypes must agree."""
    source = tmp_path / "sizes.cu"
    source.write_text(
        '#include <cstdio>\n#include "launch.cuh"\n#define HEAD_DIM 128\n'
        "#define EACH 8\n#define PRECISION 0\n#define INPUT_TYPE 0\n#define BEFORE 0\n#define PAGE_EACH 0\n"
        '#include "plan.cu"\n#include "write_kv.cu"\n'
        'int main() { using namespace kv4rl; printf("%zu %zu %zu %zu", sizeof(WriteArguments), sizeof(PlanArguments),'
        " sizeof(DecodeArguments), sizeof(Unit)); }\n"
    )
    program = tmp_path / "sizes"
    command = jit.compile_command(nvcc(), source, program, {}, f"-I{jit.sources()}")
    subprocess.run(command, check=True, capture_output=True)
    sizes = [int(x) for x in subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()]
    structures = (arguments.WriteArguments, arguments.PlanArguments, arguments.DecodeArguments)
    assert sizes == [*(ctypes.sizeof(s) for s in structures), arguments.UNIT_BYTES]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_cuda_device_the_backend_says_so():
    with pytest.raises(BackendUnavailable, match="needs a CUDA device"):
        choose_backend("cuda", "cpu")


def test_a_missing_compiler_is_named_with_the_fix(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="CUDA_HOME"):
        jit.compiler()


@pytest.mark.parametrize("precision", ["kv4", "kv4rl", "kv8", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_a_ring_fits_in_one_block_of_every_head_shape(precision, head_dim, group):
    entries = 144 if precision == "kv4rl" else 0
    assert cuda.ring_stages(precision, head_dim, group, torch.bfloat16, entries, warps=4, blocks=1) >= 2
