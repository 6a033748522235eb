"""The engine on a CUDA device: captured steps against eager ones and against the CPU, through everything that moves."""

import pytest
import torch
from transformers import Qwen3Config

from kv4rl.attention.backends import BackendUnavailable
from kv4rl.config import PRECISIONS, KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.flashinfer import FlashInferBackend
from kv4rl.engine.request import Request
from kv4rl.engine.sampler import Sampling
from kv4rl.model.decoder import Decoder, DecoderConfig

pytestmark = pytest.mark.gpu
VOCABULARY = 512


@pytest.fixture(scope="module")
def config():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    return DecoderConfig.from_hf(Qwen3Config(**sizes, **heads, initializer_range=0.05, max_position_embeddings=1024))


@pytest.fixture
def make_engine(config):
    def make(precision, *, seed=0, pages=200, **options):
        decoder = Decoder.random(config, seed=seed, dtype=torch.bfloat16, device="cpu").to("cuda")
        limits = RolloutConfig(
            max_active_requests=24, step_tokens=256, workspace_tokens=2048, cache_pages=pages,
            max_prompt_tokens=200, max_response_tokens=200,
        )  # fmt: skip
        return RolloutEngine(decoder, KVConfig(precision), limits, eos_token_ids=(), **options)

    return make


def rollout(engine, count=40, temperature=1.0):
    """Requests of mixed lengths, more than there are slots; tokens and log-probabilities in order of request."""
    engine._sampling = Sampling(temperature=temperature)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(VOCABULARY, (1 + 11 * i % 180,), generator=generator).tolist() for i in range(count)]
    requests = [Request(f"p{i}", 0, prompt, 5 + 7 * i % 90, (), (i,)) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    engine.check_drained()
    return [r.tokens for r in requests], [r.sampler_logp for r in requests], sum(r.preemptions for r in requests)


def agreement(a, b):
    """Share of tokens before the first difference: rounding flips a near-tie now and then."""
    same = total = 0
    for ours, theirs in zip(a, b, strict=True):
        common = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y), len(ours))
        same, total = same + common, total + len(ours)
    return same / total


@pytest.mark.parametrize("pages", [400, 40])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_replayed_graphs_give_the_eager_tokens_under_admission_preemption_and_compaction(make_engine, precision, pages):
    eager = make_engine(precision, pages=pages, graphs=False, buckets=(4, 8, 16, 24))
    graphed = make_engine(precision, pages=pages, buckets=(4, 8, 16, 24))
    assert eager._graphs is None and graphed._graphs is not None
    graphed.capture()
    expected, found = rollout(eager), rollout(graphed)
    assert found[0] == expected[0] and found[1] == expected[1], "the same launches on the same shapes: the same bits"
    assert (found[2] > 0) == (pages == 40)
    assert len(graphed._graphs._graphs) == 4


@pytest.mark.parametrize("precision", PRECISIONS)
def test_default_buckets_and_unpadded_steps_agree_up_to_near_ties(make_engine, precision):
    plain, padded = rollout(make_engine(precision, graphs=False)), rollout(make_engine(precision))
    assert agreement(plain[0], padded[0]) > 0.8


def test_graphs_serve_new_weights_and_a_graph_captured_before_them(make_engine, config):
    engine = make_engine("kv4rl", buckets=(8, 24))
    first = rollout(engine)
    other = Decoder.random(config, seed=1, dtype=torch.bfloat16)
    engine.update_weights(other.named_parameters(), 1)
    captured = set(engine._graphs._graphs)
    assert rollout(engine)[:2] == rollout(make_engine("kv4rl", seed=1, buckets=(8, 24)))[:2]
    assert set(engine._graphs._graphs) == captured and first[0] != rollout(engine)[0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_cuda_engine_agrees_with_the_reference_backend(make_engine, precision):
    ours = rollout(make_engine(precision), temperature=0.0)
    reference = rollout(make_engine(precision, backend="reference"), temperature=0.0)
    assert agreement(ours[0], reference[0]) > 0.6


def test_flashinfer_decodes_as_our_own_kernel(make_engine):
    engine = make_engine("bf16", buckets=(4, 8, 16, 24))
    try:
        engine.cache.backend = FlashInferBackend(engine.cache)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    engine.capture()
    assert agreement(rollout(engine)[0], rollout(make_engine("bf16"))[0]) > 0.8


def test_a_step_asks_the_host_to_wait_once(make_engine):
    engine = make_engine("kv4rl", buckets=(24,))
    engine.capture()
    for i in range(24):
        engine.add(Request(f"p{i}", 0, [5] * 20, 60, (), (i,)))
    while engine.last_step is None or engine.last_step.kind != "decode":
        engine.step()
    for _ in range(5):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.step()
        waits = sum(event.count for event in profile.key_averages() if event.key == "cudaStreamSynchronize")
        assert waits <= 2  # the result's copy, and pages that are handed out in this step
