"""Fake engines and prompt streams, small enough to enumerate."""

import random

import pytest
from transformers import Qwen3Config

from kv4rl.config import RolloutConfig
from kv4rl.engine.fake import FakeEngine
from kv4rl.model.decoder import Decoder, DecoderConfig
from kv4rl.rollout.group import ListStream, Prompt

EOS = 7


def settings(**changes) -> RolloutConfig:
    fields = {"groups_per_update": 2, "responses_per_group": 2, "oversubscription": 1.0, "age_limit": 2}
    fields |= {"max_prompt_tokens": 12, "max_response_tokens": 24, "max_active_requests": 4}
    fields |= {"step_tokens": 16, "workspace_tokens": 64, "cache_pages": 12}
    return RolloutConfig(**(fields | changes))


def prompts(count: int, *, seed: int = 0, longest: int = 12) -> ListStream:
    rng = random.Random(seed)
    return ListStream([Prompt(f"p{i}", [1] * rng.randint(1, longest), answer=str(i)) for i in range(count)])


def length_of(prompt_id: str, sibling: int, *, seed: int = 0, longest: int = 24) -> int:
    """A length of its own for every response, whatever the order they run in."""
    return random.Random(f"{seed}/{prompt_id}/{sibling}").randint(1, longest)


def fake(config: RolloutConfig, lengths=None, *, seed: int = 0) -> FakeEngine:
    rule = lengths or (lambda r: length_of(r.prompt_id, r.sibling, seed=seed, longest=config.max_response_tokens + 4))
    return FakeEngine(
        rule,
        slots=config.max_active_requests,
        pages=config.cache_pages,
        step_tokens=config.step_tokens,
        workspace_tokens=config.workspace_tokens,
        max_prompt_tokens=config.max_prompt_tokens,
    )


@pytest.fixture
def make():
    """`make.settings`, `make.prompts`, `make.fake`, `make.length_of`, `make.EOS`."""

    class Make:
        pass

    Make.settings, Make.prompts, Make.fake = staticmethod(settings), staticmethod(prompts), staticmethod(fake)
    Make.length_of, Make.EOS = staticmethod(length_of), EOS
    return Make


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    """One layer and twelve tokens: a random policy that ends a response at about every twelfth."""
    config = Qwen3Config(
        vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    return Decoder.random(DecoderConfig.from_hf(config), seed=0)
