"""The FlashInfer backend against a stand-in for the library that does, slowly, what its decode wrapper documents."""

import os
import shutil
import sys
import types

import pytest
import torch

from kv4rl.attention.backends import BackendUnavailable, ReferenceBackend
from kv4rl.config import KVConfig
from kv4rl.engine import flashinfer as module
from kv4rl.engine.decode_step import PlannedOnHost
from kv4rl.engine.flashinfer import FlashInferBackend
from kv4rl.engine.sampler import Sampling


class Wrapper:
    """`BatchDecodeWithPagedKVCacheWrapper` of FlashInfer 0.6, layout HND."""

    def __init__(self, workspace, layout, *, use_tensor_cores, backend, use_cuda_graph=False, **buffers):
        assert layout == "HND" and use_tensor_cores and backend == "fa2"
        self.rows = len(buffers["paged_kv_last_page_len_buffer"]) if use_cuda_graph else None
        if use_cuda_graph:
            assert len(buffers["paged_kv_indptr_buffer"]) == self.rows + 1
            self.room = len(buffers["paged_kv_indices_buffer"])

    def plan(self, indptr, indices, last, query_heads, kv_heads, head_dim, page, *, q_data_type, kv_data_type):
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32 and page == 16
        assert self.rows in (None, len(last)) and (self.rows is None or len(indices) <= self.room)
        assert (indptr.diff() >= 1).all() and indptr[-1] == len(indices) and ((last >= 1) & (last <= 16)).all()
        self.planned = (indptr.tolist(), indices.long(), last.tolist())

    def run(self, q, pages, return_lse=False):
        assert pages[0].stride() == pages[1].stride() and pages[0].stride(-1) == 1
        starts, ids, last = self.planned
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        for row, end in enumerate(last):
            held = ids[starts[row] : starts[row + 1]]
            k, v = (x[held].transpose(1, 2).flatten(0, 1)[: (len(held) - 1) * 16 + end].float() for x in pages)
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (k, v))
            scores = (k @ q[row].float()[:, :, None])[..., 0] * q.shape[-1] ** -0.5
            out[row] = (scores.softmax(-1)[:, None] @ v)[:, 0].to(q.dtype)
            lse[row] = scores.logsumexp(-1) / torch.log(torch.tensor(2.0))
        return (out, lse) if return_lse else out


@pytest.fixture
def library(monkeypatch, tmp_path):
    (tmp_path / "ninja").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    stand_in = types.ModuleType("flashinfer")
    stand_in.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setattr(module, "make_backend", lambda device: ReferenceBackend())
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 16)


@pytest.mark.parametrize("buckets", [None, (3, 5, 8)])
def test_rollouts_through_flashinfer_are_the_references(library, make_engine, make_decoder, prompts, buckets):
    """Padded and unpadded steps, mixed steps, preemption: the pages planned on the host are the pages written."""
    made = lambda: make_engine(decoder=make_decoder().bfloat16(), cache_pages=14, eos=(), buckets=buckets)
    expected = made().generate(prompts, Sampling(max_response_tokens=20))
    engine = made()
    engine.cache.backend = FlashInferBackend(engine.cache)
    assert isinstance(engine.cache.backend, PlannedOnHost) and not isinstance(ReferenceBackend(), PlannedOnHost)
    found = engine.generate(prompts, Sampling(max_response_tokens=20))
    same = total = 0
    for ours, theirs in zip(found, expected, strict=True):
        common = next((i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if a != b), 20)
        same, total = same + common, total + 20
    assert same / total > 0.8, "BF16 outputs flip a near-tie now and then; wrong pages would change every response"


def test_fp8_keys_and_values_live_in_int8_pages(library, make_engine, make_decoder, prompts):
    decoder = make_decoder().bfloat16()
    engine = make_engine(kv=KVConfig("kv8"), decoder=decoder, cache_pages=100, eos=())
    engine.cache.backend = FlashInferBackend(engine.cache, fp8=True)
    exact = make_engine(decoder=decoder, cache_pages=100, eos=()).generate(prompts[4:], Sampling(temperature=0.0))
    found = engine.generate(prompts[4:], Sampling(temperature=0.0))
    assert sum(a.tokens[:3] == b.tokens[:3] for a, b in zip(found, exact, strict=True)) >= 2


def test_what_flashinfer_cannot_read_is_refused(library, make_engine, make_decoder, monkeypatch):
    with pytest.raises(ValueError, match="precision='kv4': expected bf16 for FlashInfer"):
        FlashInferBackend(make_engine("kv4", decoder=make_decoder().bfloat16()).cache)
    with pytest.raises(ValueError, match=r"dtype=torch\.float32: expected bfloat16 or float16"):
        FlashInferBackend(make_engine().cache)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(BackendUnavailable, match="FlashInfer is not installed: pip install"):
        FlashInferBackend(make_engine(decoder=make_decoder().bfloat16()).cache)


def test_ninja_beside_the_python_is_found_by_the_librarys_builds(monkeypatch, tmp_path):
    """FlashInfer starts it by name, and nobody activated the environment."""
    for name in ("python", "ninja"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    module.import_flashinfer()
    assert shutil.which("ninja") == str(tmp_path / "ninja")


def test_without_ninja_the_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    with pytest.raises(BackendUnavailable, match="pip install ninja"):
        module.import_flashinfer()
