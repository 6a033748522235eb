"""Mistakes put into the Triton sources one at a time: the comparison that the sound source passes must notice each.

In the interpreter, which must be on before Triton is imported: so they run in a process of their own.
"""

import importlib
import os
from pathlib import Path

import pytest
from cuda_emulator.harness import check, filled

from kv4rl.attention import triton as host
from kv4rl.config import KVConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")
PACKAGE = "kv4rl.kernels.triton"
MUTATIONS = {
    "nibble order of K": ("kv4rl", "q_low, q_high = load_codes", "q_high, q_low = load_codes"),
    "nibble order of V": ("kv4rl", "tl.join(even, odd)", "tl.join(odd, even)"),
    "window off by one": ("kv4rl", "context - recent)", "context - recent + 1)"),
    "sink counted twice": ("kv4rl", "begin = tl.minimum(context, sink)", "begin = context * 0"),
    "tail not masked": ("kv4", "(position >= first) & (position < stop)", "position >= first"),
    "metadata of masked tokens kept": ("kv4", "tl.int32)), mask=valid, other=0)", "tl.int32)))"),
    "tokens of a value word exchanged, INT8": ("kv8", "first_of_two, second = tl", "second, first_of_two = tl"),
    "elements beyond the tail kept, BF16": ("bf16", "+ 16 * D, mask=valid[:, None], other=0.0)", "+ 16 * D)"),
    "sum not rescaled in the merge": ("kv4rl", "total * kept + its_total * added", "total + its_total"),
}  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="it is on")
def test_in_the_interpreter(passes_interpreted):
    passes_interpreted()


@pytest.fixture
def decode_with(tmp_path, monkeypatch):
    """Decode and compare on a copy of the kernels in which one piece of text is replaced by another."""

    def run(precision: str, text: str = "", by: str = "") -> None:
        package = f"mutated_{tmp_path.name}"
        (tmp_path / package).mkdir()
        found = text == ""
        for path in Path(importlib.import_module(PACKAGE).__file__).parent.glob("*.py"):
            source = path.read_text().replace(PACKAGE, package)
            found = found or text in source
            (tmp_path / package / path.name).write_text(source.replace(text, by) if text else source)
        if not found:
            raise LookupError(f"{text!r} is no longer in the sources")
        monkeypatch.syspath_prepend(tmp_path)
        names = "write_kv", "decode_int4", "decode_int8", "decode_bf16", "merge"
        modules = [importlib.import_module(f"{package}.{name}") for name in names]
        monkeypatch.setattr(host, "_kernels", lambda: modules)
        kv = KVConfig(precision, sink_tokens=4, recent_tokens=20)
        check(host.TritonBackend(), *filled(kv, [17, 25, 90], d=64, group=2))

    return run


@interpreted
@pytest.mark.parametrize("precision", ["bf16", "kv8", "kv4", "kv4rl"])
def test_the_unchanged_kernels_pass(decode_with, precision):
    decode_with(precision)


@interpreted
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_kernel_is_caught(decode_with, name):
    with pytest.raises(AssertionError):
        decode_with(*MUTATIONS[name])
