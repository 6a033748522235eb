import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kv4rl.config import KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.fake import FakeEngine
from kv4rl.engine.request import Request
from kv4rl.model.decoder import Decoder, DecoderConfig

VOCABULARY = 61
EOS = (3,)


@pytest.fixture(scope="session")
def hf():
    """A small random Qwen3 whose greedy text does not settle into a loop of one token at once."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = list(EOS)
    return model


@pytest.fixture
def make_decoder(hf):
    """A decoder with the weights of `hf`, or of a random seed."""

    def make(seed: int | None = None) -> Decoder:
        config = DecoderConfig.from_hf(hf.config)
        if seed is not None:
            return Decoder.random(config, seed=seed)
        decoder = Decoder(config)
        decoder.load_state_dict(hf.state_dict())
        return decoder

    return make


@pytest.fixture
def make_engine(make_decoder):
    """An engine on the small model; further keyword arguments go to it or to `RolloutConfig`."""

    def make(precision="bf16", *, decoder=None, eos=EOS, kv=None, **changes) -> RolloutEngine:
        sizes = {
            "max_active_requests": 8,
            "step_tokens": 64,
            "workspace_tokens": 512,
            "cache_pages": 64,
            "max_prompt_tokens": 128,
            "max_response_tokens": 40,
        }
        kv = kv or KVConfig(precision, sink_tokens=4, recent_tokens=8)
        own = {name: changes.pop(name) for name in ("buckets", "overlap", "forced_lengths") if name in changes}
        limits = RolloutConfig(**sizes | changes)
        return RolloutEngine(decoder or make_decoder(), kv, limits, eos_token_ids=eos, **own)

    return make


@pytest.fixture
def prompts():
    """Lengths around page and chunk boundaries."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
        for length in (1, 2, 15, 16, 17, 31, 48, 100)
    ]


@pytest.fixture
def make_request():
    def make(name="p", sibling=0, prompt=20, cap=40, eos=(7,), priority=()) -> Request:
        tokens = list(prompt) if isinstance(prompt, list) else [11] * prompt
        return Request(name, sibling, tokens, cap, eos, priority)

    return make


@pytest.fixture
def make_fake():
    def make(length=30, **changes) -> FakeEngine:
        sizes = {"slots": 4, "pages": 32, "step_tokens": 16}
        return FakeEngine(lambda request: length, **sizes | changes)

    return make


@pytest.fixture
def run():
    """Step an engine until nothing is unfinished; returns what finished, in that order."""

    def drain(engine) -> list[Request]:
        finished = []
        while engine.has_unfinished:
            finished += engine.step()
        return finished

    return drain
