"""The engine on a CUDA device: captured steps against eager ones and against the CPU, through everything that moves."""

import gc

import pytest
import torch
from transformers import Qwen3Config

from kv4rl.attention.backends import BackendUnavailable
from kv4rl.config import PRECISIONS, KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.flashinfer import FlashInferBackend
from kv4rl.engine.noise import uniforms
from kv4rl.engine.request import Request
from kv4rl.model.decoder import Decoder, DecoderConfig

pytestmark = pytest.mark.gpu
VOCABULARY = 512
SCARCE = 40  # pages: too few for those that are active, so that some are preempted


@pytest.fixture(scope="module")
def config():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    return DecoderConfig.from_hf(Qwen3Config(**sizes, **heads, initializer_range=0.05, max_position_embeddings=1024))


@pytest.fixture
def make_engine(config):
    def make(precision, *, seed=0, pages=200, dtype=torch.bfloat16, **options):
        decoder = Decoder.random(config, seed=seed, dtype=torch.bfloat16, device="cpu").to("cuda", dtype)
        limits = RolloutConfig(
            max_active_requests=24, step_tokens=256, workspace_tokens=2048, cache_pages=pages,
            max_prompt_tokens=200, max_response_tokens=200,
        )  # fmt: skip
        return RolloutEngine(decoder, KVConfig(precision), limits, eos_token_ids=(), **options)

    return make


def taught(logits, noise, sampling):
    """A sampler that takes keyed tokens whatever the logits say, so that engines can be compared token by token."""
    tokens = (uniforms(noise.keys, noise.positions) * logits.shape[1]).long()
    return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


@pytest.fixture
def error_of(make_engine, monkeypatch):
    """Error of an engine's teacher-forced log-probabilities, relative to the reference backend's in BF16.

    Both errors are root mean squares against the same weights and cache format in FP32 arithmetic. Pages are few: each
    of the three preempts, and so prefills again.
    """
    monkeypatch.setattr("kv4rl.engine.engine.sampler_of", lambda decoder: taught)

    def measure(engine):
        def reference(dtype):
            return make_engine(engine.cache.kv.precision, pages=SCARCE, backend="reference", dtype=dtype)

        found, peer, exact = (rollout(e) for e in (engine, reference(torch.bfloat16), reference(torch.float32)))
        assert found[0] == peer[0] == exact[0]
        assert min(found[2], peer[2], exact[2]) > 0, "nobody was prefilled again"
        own, peers, exactly = (torch.tensor([x for logps in run[1] for x in logps]) for run in (found, peer, exact))
        return float((own - exactly).norm() / (peers - exactly).norm())

    return measure


def rollout(engine, count=40):
    """Requests of mixed lengths, more than there are slots: tokens, log-probabilities, preemptions."""
    requests = mixed_requests(count)
    finish(engine, requests)
    return [r.tokens for r in requests], [r.sampler_logp for r in requests], sum(r.preemptions for r in requests)


def mixed_requests(count, seed=4):
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(VOCABULARY, (1 + 11 * i % 180,), generator=generator).tolist() for i in range(count)]
    return [Request(f"p{i}", 0, prompt, 5 + 7 * i % 90, (), (i,)) for i, prompt in enumerate(prompts)]


def finish(engine, requests):
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    engine.check_drained()


@pytest.mark.parametrize("pages", [400, SCARCE])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_replayed_graphs_give_the_eager_tokens_under_admission_preemption_and_compaction(make_engine, precision, pages):
    eager = make_engine(precision, pages=pages, graphs=False, buckets=(4, 8, 16, 24))
    graphed = make_engine(precision, pages=pages, buckets=(4, 8, 16, 24))
    assert eager._graphs is None and graphed._graphs is not None
    graphed.capture()
    expected, found = rollout(eager), rollout(graphed)
    assert found[0] == expected[0] and found[1] == expected[1], "the same launches on the same shapes: the same bits"
    assert (found[2] > 0) == (pages == SCARCE)
    assert len(graphed._graphs._graphs) == 4


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_teacher_forced_logits_are_as_near_fp32_as_the_reference_backends(make_engine, error_of, precision, graphs):
    """Prefill, re-prefill after preemption and decode, in unpadded steps and in captured ones of the default buckets.

    Two BF16 computations that round independently have errors of one size; their quotient is 1 up to a few percent.
    """
    assert error_of(make_engine(precision, pages=SCARCE, graphs=graphs)) <= 1.5


def test_graphs_serve_new_weights_and_a_graph_captured_before_them(make_engine, config):
    engine = make_engine("kv4rl", buckets=(8, 24))
    first = rollout(engine)
    other = Decoder.random(config, seed=1, dtype=torch.bfloat16)
    engine.update_weights(other.named_parameters(), 1)
    captured = set(engine._graphs._graphs)
    assert rollout(engine)[:2] == rollout(make_engine("kv4rl", seed=1, buckets=(8, 24)))[:2]
    assert set(engine._graphs._graphs) == captured and first[0] != rollout(engine)[0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_collect_update_cycles_leave_no_kv_of_older_weights_and_no_byte(make_engine, config, precision):
    """Each cycle takes up what the last left unfinished: as an engine born with the new weights does, to the bit."""
    engine = make_engine(precision, buckets=(8, 24))
    engine.capture()
    unfinished = mixed_requests(24)
    for version in range(3):
        twins, before = [Request.from_state(request.to_state()) for request in unfinished], allocated()
        if version:
            weights = Decoder.random(config, seed=version, dtype=torch.bfloat16)
            engine.update_weights(weights.named_parameters(), version)
            del weights
        paused = cycle(engine, unfinished)
        assert version == 0 or allocated() <= before, "a cycle gives back what it took, to the byte"
        twice = cycle(make_engine(precision, seed=version, buckets=(8, 24)), twins)
        assert [r.tokens for r in unfinished] == [r.tokens for r in twins]
        assert [r.sampler_logp for r in unfinished] == [r.sampler_logp for r in twins]
        assert 3 <= len(paused) == len(twice) < len(unfinished)
        unfinished = paused


def allocated():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def cycle(engine, requests, steps=20):
    """Some steps of `requests`; all that they held given back, and those unfinished."""
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        engine.step()
    paused = engine.pause()
    engine.check_drained()
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_pages
    return paused


def test_flashinfer_decodes_as_the_reference_backend(make_engine, error_of):
    engine = make_engine("bf16", pages=SCARCE, buckets=(4, 8, 16, 24))
    try:
        engine.cache.backend = FlashInferBackend(engine.cache)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    engine.capture()
    assert error_of(engine) <= 1.5


@pytest.mark.parametrize("pages", [400, SCARCE])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_launched_ahead_give_the_same_bits(make_engine, precision, pages):
    """Tokens that never leave the device, and pages handed out while the step before still runs."""
    ahead, plain = (make_engine(precision, pages=pages, buckets=(8, 24), overlap=overlap) for overlap in (True, False))
    for engine in (ahead, plain):
        engine.capture()
    assert rollout(ahead) == rollout(plain)


def test_decode_steps_wait_for_nothing_but_the_tokens_before(make_engine):
    """Pages handed out, rows compacted, results fetched: nothing makes the host wait for the step it has launched."""
    engine = make_engine("kv4rl", buckets=(8, 24))
    engine.capture()
    for i in range(24):
        engine.add(Request(f"p{i}", 0, [5] * 20, 30 + i, (), (i,)))
    while engine._flight is None:
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            engine.step()
            assert engine._flight is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")


def interrupted(engine):
    """Every third request aborted and all others paused and taken up again while steps are under way."""
    requests = mixed_requests(24)
    for request in requests:
        engine.add(request)
    for _ in range(30):
        engine.step()
    for request in requests[::3]:
        engine.abort(request)
    for _ in range(5):
        engine.step()
    paused = engine.pause()
    engine.check_drained()
    finish(engine, paused)
    cut = [request for request in requests[::3] if len(request.tokens) < request.max_response_tokens]
    assert len(cut) >= 3 and len(paused) >= 3
    assert all(len(r.tokens) == r.max_response_tokens for i, r in enumerate(requests) if i % 3)
    return [r.tokens for r in requests], [r.sampler_logp for r in requests]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_aborts_and_pauses_give_the_bits_of_eager_steps_taken_one_by_one(make_engine, precision):
    eager = make_engine(precision, graphs=False, overlap=False, buckets=(8, 24))
    graphed = make_engine(precision, buckets=(8, 24))
    graphed.capture()
    assert interrupted(graphed) == interrupted(eager)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_keyed_response_does_not_depend_on_what_its_companions_say(make_engine, precision):
    """Others in their place, of the same lengths: the same launches on the same shapes, so the same bits."""
    found = []
    for seed in (4, 5):
        requests = mixed_requests(24, seed)
        ours = requests[7] = mixed_requests(24)[7]
        finish(make_engine(precision, buckets=(8, 24)), requests)
        found.append((ours.tokens, ours.sampler_logp, requests[8].tokens))
    assert found[0][:2] == found[1][:2] and found[0][2] != found[1][2]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_keyed_responses_are_the_same_alone_and_in_a_crowd_up_to_rounding(make_engine, precision):
    """Products of other sizes round otherwise, and a draw near a boundary flips then, after which all is different.

    Most short responses meet no such draw; of responses with other noise not one would be the same.
    """
    crowd, alone = ([r for r in mixed_requests(24) if r.max_response_tokens >= 12] for _ in range(2))
    for request in (*crowd, *alone):
        request.max_response_tokens = 12
    engine = make_engine(precision, buckets=(24,))
    finish(engine, crowd)
    for request in alone:
        finish(engine, [request])
    same = sum(a.tokens == b.tokens for a, b in zip(crowd, alone, strict=True))
    assert same > len(crowd) / 2, (same, len(crowd))
