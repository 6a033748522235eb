"""Every Triton kernel compiles for Hopper, without a device: the interpreter accepts what the compiler refuses."""

import os

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels do not compile")

POINTERS = {
    "*bf16": "q k v out",
    "*u8": "query pages",
    "*i8": "side_k side_v",
    "*fp16": "side_k_scale side_v_scale",
    "*i64": "page_ids offsets slots side_entries page_table context_tokens",
    "*fp32": "partial lse",
    "i64": "q_stride k_stride v_stride table_stride",
    "fp32": "score_scale",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
CASES = [
    ("write_kv", {"QUERIES": True, "KEYS": True, "INT8": False, "D": 128}, {}),
    ("write_kv", {"QUERIES": False, "KEYS": True, "INT8": True, "D": 64}, {}),
    ("decode_int4", {"PROTECTED": True, "CHUNK": 1024, "U8": False, "D": 128}, {}),
    ("decode_int4", {"PROTECTED": False, "CHUNK": 1024, "U8": True, "D": 256}, {}),
    ("decode_int8", {"CHUNK": 1024, "D": 128}, {}),
    ("decode_bf16", {"CHUNK": 1024, "D": 128, "PRECISION": "tf32"}, {"query": "*bf16", "pages": "*bf16"}),
    ("merge", {"D": 128}, {}),
]


@pytest.mark.parametrize(("name", "constants", "types"), CASES)
def test_compiles_for_sm_90(name, constants, types):
    import importlib

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"kv4rl.kernels.triton.{name}"), f"{name}_kernel")
    known = TYPES | types | dict.fromkeys(constants, "constexpr")
    signature = {argument: known.get(argument, "i32") for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert f"{name}_kernel" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
