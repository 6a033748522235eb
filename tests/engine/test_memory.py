"""The memory plan of an engine: what it says of model and cache is what is allocated, and each format gets its own."""

from types import SimpleNamespace

import pytest
import torch

from kv4rl.config import PRECISIONS, KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.flashinfer import WORKSPACE_BYTES
from kv4rl.engine.memory import PlanTooLarge, max_pages, naming_items, plan_engine, reserved_bytes, within
from kv4rl.engine.sampler import Sampling
from kv4rl.generate import main as generate
from kv4rl.model.communicator import SymmetricCommunicator
from kv4rl.model.decoder import Decoder
from kv4rl.model.shapes import random_model, shape_config

ROLLOUT = RolloutConfig(max_active_requests=8, step_tokens=64, workspace_tokens=256, max_prompt_tokens=100)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_model_and_cache_of_the_plan_are_what_an_engine_holds(precision):
    decoder, kv = random_model("mini-qwen3"), KVConfig(precision)
    plan = plan_engine(decoder, kv, ROLLOUT, 60_000_000)
    engine = RolloutEngine(decoder, kv, within(plan, ROLLOUT), eos_token_ids=())
    assert plan.items["model"] == sum(tensor.nbytes for tensor in engine.decoder.state_dict().values())
    assert plan.items["side buffer"] + plan.items["pages"] == engine.cache.nbytes
    assert engine.cache.allocator.num_pages == plan.cache.pages
    assert plan.items["workspace"] > plan.items["metadata"] > 0


def test_one_budget_buys_each_format_its_own_pages():
    with torch.device("meta"):
        decoder = Decoder(shape_config("qwen3-4b")).to(torch.bfloat16)
    pages = {p: plan_engine(decoder, KVConfig(p), RolloutConfig(), 130 * 10**9).cache.pages for p in PRECISIONS}
    assert pages["kv4"] / pages["bf16"] == pytest.approx(16 / 4.25, rel=1e-3)
    assert pages["kv8"] < pages["kv4rl"] < pages["kv4"]


@pytest.mark.parametrize(("name", "parameters"), [("qwen3-4b", 4_022_468_096), ("qwen3-8b", 8_190_735_360)])
def test_shapes_have_the_published_parameter_counts(name, parameters):
    with torch.device("meta"):
        decoder = Decoder(shape_config(name))
    assert sum(parameter.numel() for parameter in decoder.parameters()) == parameters


def test_unknown_shapes_and_budgets_too_small_say_what_would_do():
    with pytest.raises(ValueError, match="model='qwen9': expected one of qwen3-4b, qwen3-8b, or a name under"):
        shape_config("qwen9")
    decoder = random_model("mini-qwen3")
    with pytest.raises(ValueError, match=r"for kv4rl: model .* MB, workspace .* \(short by .*one page"):
        plan_engine(decoder, KVConfig(), ROLLOUT, sum(reserved_bytes(decoder, KVConfig(), ROLLOUT).values()) - 10**6)


def test_the_longest_request_is_bounded_by_limits_and_by_the_model():
    decoder = random_model("mini-qwen3")
    assert max_pages(decoder, RolloutConfig(max_prompt_tokens=100, max_response_tokens=101)) == 13
    assert max_pages(decoder, RolloutConfig()) == 2048 // 16


def test_what_only_the_baseline_and_only_shards_hold_is_planned():
    decoder, kv = random_model("mini-qwen3"), KVConfig("bf16")
    plain, flashinfer = (plan_engine(decoder, kv, ROLLOUT, 2 * 10**9, flashinfer=on) for on in (False, True))
    assert flashinfer.items["baseline workspace"] == WORKSPACE_BYTES and "baseline workspace" not in plain.items
    lost = plain.cache.pages - flashinfer.cache.pages
    assert lost == pytest.approx(WORKSPACE_BYTES / plain.cache.page_bytes, abs=1)
    decoder.communicator = object.__new__(SymmetricCommunicator)
    decoder.communicator._buffers = [torch.empty(1000, dtype=torch.uint8)] * 2
    assert reserved_bytes(decoder, kv, ROLLOUT)["ranks' sums"] == 2000


@pytest.mark.parametrize("when", ["weights", "cache", "buffers", "capture", "workspace", "step", "download"])
def test_running_out_of_memory_names_the_plan(monkeypatch, when):
    def exhaust(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 90 GiB.")

    decoder, kv = random_model("mini-qwen3"), KVConfig()
    places = {
        "weights": "engine.Decoder.prepare_inference", "cache": "engine.KVCache", "buffers": "engine.DecodeStep",
        "workspace": "engine.FlashInferBackend.__init__", "download": "engine.Download",
    }  # fmt: skip
    if when in places:
        monkeypatch.setattr(f"kv4rl.engine.{places[when]}", exhaust)
    message = r"the kv4rl engine's plan is model .*GB, workspace .*, 4096 pages .*lower cache_pages"
    with pytest.raises(PlanTooLarge, match=message) as error:
        engine = RolloutEngine(decoder, kv, ROLLOUT, eos_token_ids=())
        if when == "capture":
            engine._graphs = SimpleNamespace(capture_all=exhaust)
            engine.capture()
        if when == "workspace":
            engine.use_flashinfer()
        decoder.forward = exhaust
        engine.generate([[1, 2]], Sampling(max_response_tokens=3))
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    if when == "step":
        engine.check_drained()


@pytest.mark.parametrize(
    "message", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", "a bug"]
)
def test_memory_that_torch_does_not_hand_out_runs_out_with_the_plan_too_and_nothing_else_does(message):
    """Graphs, products and sums among ranks take theirs past torch's allocator."""
    expected = RuntimeError if message == "a bug" else PlanTooLarge
    block = lambda name, size: naming_items(name, lambda: {"pages": size}, torch.device("cpu"), "take less")
    with pytest.raises(RuntimeError) as error, block("a block", 2 * 10**9), block("one within it", 10**9):
        raise RuntimeError(message)
    assert type(error.value) is expected
    assert message == "a bug" or "one within it's plan is pages 1 GB" in str(error.value)


def test_generate_ends_with_the_plan_that_was_too_large(monkeypatch, capsys):
    def exhaust(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 90 GiB.")

    monkeypatch.setattr("kv4rl.engine.engine.KVCache", exhaust)
    with pytest.raises(SystemExit) as ended:
        generate(["--model", "mini-qwen3", "--prompt", "n=08 k=02 r=2 x=12,45,78,03\n", "--max-new-tokens", "4"])
    assert "kv4rl.generate: error: out of memory on cpu" in capsys.readouterr().err and ended.value.code == 1


@pytest.mark.parametrize("temperature", ["inf", "1e-40", "-1"])
def test_generate_refuses_a_temperature_that_gives_noise_or_no_numbers(temperature, capsys):
    with pytest.raises(SystemExit) as ended:
        generate(["--model", "mini-qwen3", "--prompt", "n=08", "--temperature", temperature])
    assert f"temperature={float(temperature)!r}: expected" in capsys.readouterr().err and ended.value.code == 2
