"""Every CUDA file compiles for sm_90a, wherever nvcc is: no device, no torch headers."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from kv4rl.attention import cuda, jit
from kv4rl.attention import cuda_arguments as arguments
from kv4rl.attention.backends import BackendUnavailable, choose_backend
from kv4rl.cache.kv_cache import CacheShape, KVCache
from kv4rl.config import KVConfig

WRITE_BUILDS = [
    {"HEAD_DIM": d, "EACH": each, "PRECISION": precision, "INPUT_TYPE": dtype, "BEFORE": before, "PAGE_EACH": own}
    for d, each, precision, dtype, before, own in [
        *((d, each, 0, 0, 2, 1) for d in (64, 128, 256) for each in (8, 16)),
        *((128, 8, precision, dtype, 0, 0) for precision in (0, 1, 2) for dtype in (0, 1, 2)),
        *((128, 8, precision, dtype, 2 - dtype, own) for precision in (0, 1) for dtype in (0, 1) for own in (0, 1)),
        *((128, 8, 2, dtype, 2 - dtype, 0) for dtype in (0, 1)),
    ]
]
CHECKED = {"EVERY_LANE_ARRIVES": 1}
DECODE_BUILDS = [  # precision, head_dim, group, element type, P, further defines: what a launch of these builds
    *((precision, 128, 4, torch.bfloat16, p, {}) for precision in ("kv4", "kv4rl") for p in ("fp16", "u8")),
    *((precision, 128, 4, torch.bfloat16, "fp16", CHECKED) for precision in ("kv4rl", "kv8")),
    *((precision, 128, 4, torch.float16, "fp16", {}) for precision in ("kv8", "bf16")),
    *(("kv4rl", d, group, torch.bfloat16, "fp16", {}) for d, group in ((64, 4), (256, 8), (128, 16), (256, 16))),
    *((precision, 256, 16, torch.bfloat16, "fp16", {}) for precision in ("kv8", "bf16")),
    ("kv8", 64, 16, torch.bfloat16, "fp16", {}),
]
# Bytes a thread may spill. 9 to 16 heads are two query tiles, whose output alone takes 64 registers at head_dim 128 and
# 128 at 256. What is spilled are parities of barriers, used once an item or a row of side entries: the loop over
# pages has no access to local memory (SASS). One block fewer a multiprocessor would halve the warps that hide latency.
SPILLS = {("kv4rl", 128, 16): 24, ("bf16", 256, 16): 24, ("kv8", 256, 16): 24}


class Built(Exception):
    """In place of a build: its file and defines."""


@pytest.fixture
def launched_build(monkeypatch):
    """(file, defines) that `cuda.decode_kernel` asks for, so that what is tested here is what runs."""

    def build(precision, head_dim, group, dtype, operand, more):
        def give(name, **defines):
            raise Built(name, defines | more)

        entries = 144 if precision == "kv4rl" else 0
        monkeypatch.setattr(jit, "build", give)
        with pytest.raises(Built) as built:
            cuda.decode_kernel(precision, head_dim, group, dtype, entries, torch.device("cuda", 0), operand)
        return built.value.args

    return build


def nvcc() -> str:
    try:
        return jit.compiler()
    except BackendUnavailable as reason:
        pytest.skip(str(reason))


def spilled_bytes(name: str, defines: dict, directory) -> int:
    """Of the build, by ptxas; fails where it does not compile, or warns."""
    command = jit.compile_command(
        nvcc(), jit.sources() / f"{name}.cu", directory / f"{name}.cubin", defines, "-cubin", "-Xptxas", "-v"
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return max(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr)))


def test_every_cuda_file_is_compiled():
    decoded = {cuda.KERNELS[precision] for precision, *_ in DECODE_BUILDS}
    assert {path.stem for path in jit.sources().glob("*.cu")} == {"plan", "write_kv", *decoded}


@pytest.mark.parametrize(("name", "defines"), [("plan", {}), *(("write_kv", defines) for defines in WRITE_BUILDS)])
def test_compiles_without_spills(tmp_path, name, defines):
    assert spilled_bytes(name, defines, tmp_path) == 0


@pytest.mark.parametrize(("precision", "head_dim", "group", "dtype", "operand", "more"), DECODE_BUILDS)
def test_decode_builds_of_a_launch_spill_no_more_than_is_known(
    tmp_path, launched_build, precision, head_dim, group, dtype, operand, more
):
    name, defines = launched_build(precision, head_dim, group, dtype, operand, more)
    assert defines["HEAD_DIM"] == head_dim
    assert defines["QUERY_TILES"] == (1 if group <= 8 else 2)
    assert spilled_bytes(name, defines, tmp_path) <= SPILLS.get((precision, head_dim, group), 0)


def test_bit_width_is_the_caches_tag_not_hard_coded(launched_build):
    int4 = ("decode_int4", 0)
    wanted = {"kv4": int4, "kv4rl": int4, "kv8": ("decode_int8", 1), "bf16": ("decode_bf16", 2)}
    for precision, (name, code) in wanted.items():
        built, defines = launched_build(precision, 128, 4, torch.bfloat16, "fp16", {})
        assert (built, defines.get("PROTECTED", 0)) == (name, precision == "kv4rl")
        cache = KVCache(KVConfig(precision), CacheShape(1, 4, 1, 128, torch.bfloat16), num_pages=1, num_slots=1)
        assert arguments.write_defines(cache)["PRECISION"] == code


def kv4rl_ptx(tmp_path, launched_build) -> str:
    name, defines = launched_build("kv4rl", 128, 4, torch.bfloat16, "fp16", {})
    output = tmp_path / "decode.ptx"
    command = jit.compile_command(nvcc(), jit.sources() / f"{name}.cu", output, defines, "-ptx")
    command[command.index("-gencode") + 1] = f"arch=compute_{jit.ARCHITECTURE},code=compute_{jit.ARCHITECTURE}"
    subprocess.run(command, check=True, capture_output=True)
    return output.read_text()


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


def test_an_items_side_scales_are_all_asked_for_before_one_is_waited_for(tmp_path, launched_build):
    """KV4-RL's streaming warp lost 10 % of the kernel's time when each pair of loads waited for the one before."""
    ptx = kv4rl_ptx(tmp_path, launched_build)
    loads = len(LOAD.findall(ptx))
    assert loads > 0 and loads % 10 == 0  # 5 keys' and 5 values' scales a lane, wherever an item is looked up
    assert loads_that_wait(ptx, together=10) == []


def test_a_load_under_a_branch_or_a_use_between_loads_is_found():
    first, second = "ld.volatile.global.u16 %rs1, [%rd1];", "ld.volatile.global.u16 %rs2, [%rd2];"
    for between in ("@%p1 bra $L1;", "$L1:", "mov.b32 %r1, {%rs1, %rs3};"):
        assert loads_that_wait("\n".join((first, between, second)), together=2) == [between]
    assert loads_that_wait("\n".join((first, "add.s64 %rd2, %rd1, 2;", second, "mov.b32 %r1, {%rs1, %rs2};")), 2) == []


def test_the_streaming_warp_takes_tickets_without_waiting_for_them(tmp_path, launched_build):
    """For atomicAdd the compiler shuffles the answer at once: each item then waited for a round trip to L2."""
    words = [line.strip() for line in kv4rl_ptx(tmp_path, launched_build).splitlines()]
    tickets = [i for i, line in enumerate(words) if line.startswith("@takes atom.relaxed")]
    assert tickets
    for at in tickets:
        answer = re.search(r"%r\d+", words[at])[0]
        follows = "\n".join(words[at + 1 : at + 12])
        assert not re.search(rf"shfl[^\n]*{answer}\b", follows), follows


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


def test_the_compiler_of_cuda_home_goes_before_paths(monkeypatch, tmp_path):
    """The sentence that names CUDA_HOME as the fix must be true."""
    for name in ("home/bin", "path"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "nvcc").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert jit.compiler() == str(tmp_path / "home/bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert jit.compiler() == str(tmp_path / "path/nvcc")


@pytest.mark.parametrize("spoil", ["a file", "no library"])
def test_a_place_that_cannot_keep_what_is_built_is_named(monkeypatch, tmp_path, spoil):
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(tmp_path / "kernels"))
    if spoil == "a file":
        (tmp_path / "kernels").touch()
    else:
        monkeypatch.setattr(jit, "_compile", lambda source, library, defines: None)
    jit.build.cache_clear()
    with pytest.raises(BackendUnavailable, match=f"set {jit.CACHE_VARIABLE} to a directory that can be written"):
        jit.build("plan")


@pytest.mark.parametrize("precision", ["kv4", "kv4rl", "kv8", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_a_ring_fits_in_one_block_of_every_head_shape(precision, head_dim, group):
    entries = 144 if precision == "kv4rl" else 0
    assert cuda.ring_stages(precision, head_dim, group, torch.bfloat16, entries, warps=4, blocks=1) >= 2


def test_a_changed_header_option_architecture_or_torch_is_built_anew(monkeypatch, tmp_path):
    shutil.copytree(jit.sources(), tmp_path / "cuda")
    source, header = tmp_path / "cuda" / "plan.cu", tmp_path / "cuda" / "schedule.cuh"
    keys = [jit._key(source, {"HEAD_DIM": 64})]
    assert keys == [jit._key(source, {"HEAD_DIM": 64})]
    keys.append(jit._key(source, {"HEAD_DIM": 128}))
    header.write_text(header.read_text() + "// one more line\n")
    keys.append(jit._key(source, {"HEAD_DIM": 64}))
    source.write_text(source.read_text() + "// one more line\n")
    keys.append(jit._key(source, {"HEAD_DIM": 64}))
    monkeypatch.setattr(jit, "ARCHITECTURE", "100a")
    keys.append(jit._key(source, {"HEAD_DIM": 64}))
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.append(jit._key(source, {"HEAD_DIM": 64}))
    assert len(set(keys)) == len(keys)
