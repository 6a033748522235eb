import warnings

import pytest
import torch

from kv4rl.attention import backends, jit
from kv4rl.attention.backends import BackendUnavailable, ReferenceBackend, choose_backend


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv(backends.ENVIRONMENT, raising=False)
    monkeypatch.setattr(backends, "_explained", set())


def refuse(device):
    raise BackendUnavailable("no nvcc found; install the CUDA toolkit")


def test_auto_is_the_reference_on_a_cpu():
    assert isinstance(choose_backend("auto", "cpu"), ReferenceBackend)


def test_auto_on_cuda_falls_back_and_says_why_once(monkeypatch):
    monkeypatch.setattr(backends, "FACTORIES", {"reference": backends.FACTORIES["reference"], "cuda": refuse})
    with pytest.warns(RuntimeWarning, match="'cuda' is off: no nvcc found; install the CUDA toolkit"):
        assert choose_backend("auto", "cuda").name == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend("auto", "cuda").name == "reference"


@pytest.fixture
def nvcc_that_fails(monkeypatch, tmp_path):
    """A Hopper device, and a compiler too old for it."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho \"nvcc fatal: Unsupported gpu architecture 'compute_90a'\" >&2\nexit 1\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    jit.build.cache_clear()
    yield nvcc
    jit.build.cache_clear()


def test_a_compiler_that_cannot_build_for_the_device_is_a_reason_to_fall_back(monkeypatch, nvcc_that_fails):
    factories = {name: backends.FACTORIES[name] for name in ("reference", "cuda")}
    monkeypatch.setattr(backends, "FACTORIES", factories)
    said = rf"'cuda' is off: {nvcc_that_fails} could not build plan.cu for sm_90a: install the CUDA 13 toolkit, or set"
    with pytest.warns(RuntimeWarning, match=f"{said} CUDA_HOME; it says: nvcc fatal: Unsupported gpu architecture"):
        assert choose_backend("auto", "cuda").name == "reference"
    with pytest.raises(BackendUnavailable, match=r"backend='cuda': .* could not build plan.cu"):
        choose_backend("cuda", "cuda")


def test_another_architecture_is_a_reason_to_fall_back(monkeypatch):
    factories = {name: backends.FACTORIES[name] for name in ("reference", "cuda")}
    monkeypatch.setattr(backends, "FACTORIES", factories)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    said = r"built for Hopper \(sm_90\), this device is sm_80: use backend='triton'"
    with pytest.warns(RuntimeWarning, match=f"'cuda' is off: it is {said}"):
        assert choose_backend("auto", "cuda").name == "reference"
    with pytest.raises(BackendUnavailable, match=f"^backend='cuda': it is {said}"):
        choose_backend("cuda", "cuda")


def test_auto_on_cuda_prefers_the_first_that_runs(monkeypatch):
    class Fast:
        name = "cuda"

    factories = {"reference": backends.FACTORIES["reference"], "cuda": lambda device: Fast()}
    monkeypatch.setattr(backends, "FACTORIES", factories)
    assert choose_backend("auto", "cuda").name == "cuda"
    assert choose_backend("auto", "cpu").name == "reference"


def test_a_named_backend_that_cannot_run_raises_instead_of_falling_back(monkeypatch):
    monkeypatch.setitem(backends.FACTORIES, "cuda", refuse)
    with pytest.raises(BackendUnavailable, match="no nvcc"):
        choose_backend("cuda", "cpu")


def test_the_environment_overrides_auto_only(monkeypatch):
    monkeypatch.setitem(backends.FACTORIES, "cuda", refuse)
    monkeypatch.setenv(backends.ENVIRONMENT, "cuda")
    with pytest.raises(BackendUnavailable):
        choose_backend("auto", "cpu")
    assert choose_backend("reference", torch.device("cpu")).name == "reference"


def test_unknown_names_are_refused_with_the_known_ones(monkeypatch):
    with pytest.raises(ValueError, match=r"backend='tpu': expected one of auto, reference"):
        choose_backend("tpu", "cpu")
    monkeypatch.setenv(backends.ENVIRONMENT, "fast")
    with pytest.raises(ValueError, match="KV4RL_BACKEND='fast': expected one of auto, reference"):
        choose_backend("auto", "cpu")
