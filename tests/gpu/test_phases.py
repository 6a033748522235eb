"""Engine and learner taking turns on a CUDA device: memory that goes and comes back under captured graphs."""

import copy

import pytest
import torch
from transformers import Qwen3Config

from kv4rl.config import GRPOConfig, KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.request import Request
from kv4rl.grpo.learner import GRPOLearner
from kv4rl.grpo.masters import cast_copy
from kv4rl.grpo.weight_sync import sync
from kv4rl.model.config import DecoderConfig
from kv4rl.model.decoder import Decoder
from kv4rl.phases import PhaseController

pytestmark = pytest.mark.gpu
VOCABULARY = 512


@pytest.fixture
def decoder():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    config = Qwen3Config(**sizes, **heads, initializer_range=0.05, max_position_embeddings=1024)
    return Decoder.random(DecoderConfig.from_hf(config), seed=0, device="cpu").cuda()


@pytest.fixture
def engine_of():
    """A function of a decoder and of the memory its cache is made in: an engine with 8 slots and 4,000 pages."""
    limits = RolloutConfig(
        max_active_requests=8, step_tokens=256, workspace_tokens=2048, cache_pages=4000, max_prompt_tokens=100,
        max_response_tokens=100,
    )  # fmt: skip

    def make(decoder, memory=None):
        twin = cast_copy(decoder, torch.bfloat16)
        return RolloutEngine(twin, KVConfig("kv4rl"), limits, eos_token_ids=(), memory=memory)

    return make


def collected(engine, prompt_id="p"):
    """Tokens of some requests of mixed lengths."""
    requests = [Request(f"{prompt_id}{i}", 0, [1 + i] * (3 + 9 * i), 10 + 6 * i, (), (i,)) for i in range(10)]
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return [request.tokens for request in requests]


def test_an_engine_whose_memory_went_twice_collects_what_one_that_kept_it_does(decoder, engine_of):
    """Bug row 10 (sglang #27140): graphs replay freed addresses after a wake; first rollout fine, second garbage."""
    pytest.importorskip("torch_memory_saver")
    learner = GRPOLearner(copy.deepcopy(decoder), GRPOConfig(kl_coefficient=0))
    phases = PhaseController(learner, torch.device("cuda"), take_turns=True)
    phases.enter("collect")
    moved, stayed = engine_of(decoder, phases.memory()), engine_of(decoder)
    phases.attach(moved)
    for cycle in range(3):
        assert collected(moved, f"{cycle}.") == collected(stayed, f"{cycle}.")
        free = torch.cuda.mem_get_info()[0]
        phases.enter("learn")
        assert torch.cuda.mem_get_info()[0] > free + moved.cache.nbytes // 2
        full = torch.full((moved.cache.nbytes,), 255, dtype=torch.uint8, device="cuda")  # NaN for whoever reads it
        del full
        with pytest.raises(RuntimeError, match="memory is given back"):
            collected(moved, "asleep")
        moved.pause()
        phases.enter("collect")


def test_a_learner_that_was_away_holds_the_same_bits_in_pinned_memory_only(decoder):
    learner = GRPOLearner(decoder, GRPOConfig())
    before = learner.state()["weights"]
    phases = PhaseController(learner, torch.device("cuda"), take_turns=True)
    own = sum(movable.tensor.nbytes for movable in learner.movables())
    held = torch.cuda.memory_allocated()
    phases.enter("collect")
    assert held - torch.cuda.memory_allocated() >= own  # whatever other tests left allocated
    phases.enter("learn")
    after = learner.state()["weights"]
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    computing = dict(learner.weights.named_compute_weights())
    assert all(torch.equal(tensor.bfloat16(), computing[name].cpu()) for name, tensor in after.items())


def test_a_sync_between_turns_passes_its_checks(decoder, engine_of):
    learner = GRPOLearner(copy.deepcopy(decoder), GRPOConfig(kl_coefficient=0))
    phases = PhaseController(learner, torch.device("cuda"), take_turns=True)
    phases.enter("collect")
    engine = engine_of(decoder, phases.memory())
    phases.attach(engine)
    for version in (1, 2):
        collected(engine, f"{version}.")
        phases.enter("learn")
        assert sync(learner, engine, version)["sync/canary_difference"] < 1
        assert phases.metrics()["perf/peak_memory_gb/learn"] > 0
        phases.enter("collect")


def test_graphs_of_all_buckets_keep_no_more_memory_than_the_largest_ones_and_it_is_logged():
    """Blocks of a pool serve the stream they were allocated on: with a stream a capture nothing would be shared."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 1 << 17}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    config = DecoderConfig.from_hf(Qwen3Config(**sizes, **heads, max_position_embeddings=256))
    decoder = Decoder.random(config, seed=0, device="cpu").cuda()
    limits = RolloutConfig(
        max_active_requests=64, step_tokens=256, workspace_tokens=2048, cache_pages=200, max_prompt_tokens=100,
        max_response_tokens=100,
    )  # fmt: skip
    pools = []
    for buckets in ((64,), (16, 32, 48, 64)):  # logits of a step: 33.6 MB at 64 rows, 84 MB at all four
        twin = cast_copy(decoder, torch.bfloat16)
        engine = RolloutEngine(twin, KVConfig("kv4rl"), limits, eos_token_ids=(), buckets=buckets)
        assert engine.graph_pool_bytes == 0
        engine.capture()
        pools.append(engine.graph_pool_bytes)
    assert 64 * 4 * (1 << 17) <= pools[0] <= pools[1] <= 1.5 * pools[0]
    phases = PhaseController(GRPOLearner(decoder, GRPOConfig(kl_coefficient=0)), torch.device("cuda"), take_turns=False)
    phases.attach(engine)
    assert phases.metrics()["perf/graph_pool_gb"] == pools[1] / 1e9
