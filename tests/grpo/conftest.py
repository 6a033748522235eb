import random

import pytest
import torch
from transformers import Qwen3Config

from kv4rl.engine.request import Request
from kv4rl.model.config import DecoderConfig
from kv4rl.model.decoder import Decoder
from kv4rl.rollout.group import Prompt, PromptGroup

VOCABULARY, EOS = 48, 1


def random_qwen3(seed: int, *, head_dim: int) -> Decoder:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.2,
    )  # fmt: skip
    return Decoder.random(DecoderConfig.from_hf(config), seed=seed)


@pytest.fixture(scope="session")
def tiny_decoder():
    """A function of a seed: a random 2-layer Qwen3 in FP32 with a vocabulary of 48."""

    return lambda seed=0: random_qwen3(seed, head_dim=16)


@pytest.fixture
def wide_decoder():
    """The same with head_dim 64, the least a KV cache takes."""
    return lambda seed=0: random_qwen3(seed, head_dim=64)


@pytest.fixture(scope="session")
def make_request():
    """A function: a finished response with random tokens and log-probs."""

    def make(rng: random.Random, *, length: int, prompt: int = 4, eos: bool = True, sibling: int = 0, name="p"):
        request = Request(name, sibling, [rng.randrange(2, VOCABULARY) for _ in range(prompt)], max(length, 1), (EOS,))
        for position in range(length):
            last = position == length - 1
            token = EOS if eos and last else rng.randrange(2, VOCABULARY)
            request.append(token, -rng.uniform(1.0, 4.0), version=0)
        if not request.finished:
            request.finish("abort")
        return request

    return make


@pytest.fixture(scope="session")
def make_groups(make_request):
    """A function: groups of G scored responses of random lengths."""

    def make(seed: int, *, groups: int = 3, siblings: int = 4, longest: int = 20) -> list[PromptGroup]:
        rng = random.Random(seed)
        result = []
        for order in range(groups):
            requests = [
                make_request(rng, length=rng.randrange(1, longest), eos=rng.random() < 0.7, sibling=i, name=f"p{order}")
                for i in range(siblings)
            ]
            prompt = Prompt(f"p{order}", requests[0].prompt_tokens, "1")
            for request in requests:
                request.prompt_tokens = list(prompt.tokens)
            scores = [float(i % 2) for i in range(siblings)]
            result.append(PromptGroup(prompt, requests, order, scores=scores))
        return result

    return make


@pytest.fixture
def sampled_on_policy(make_groups):
    """A function: groups whose sampler_logp are the decoder's own log-probs (the sampler equals the policy)."""
    from kv4rl.config import GRPOConfig
    from kv4rl.grpo.learner import GRPOLearner
    from kv4rl.grpo.packing import pack

    def make(decoder, seed: int, **sizes):
        groups = make_groups(seed, **sizes)
        batch = pack(groups, torch.zeros(len(groups), len(groups[0].requests)))
        with torch.no_grad():
            logp, _ = GRPOLearner(decoder, GRPOConfig(kl_coefficient=0)).log_probs(batch, decoder)
        values = iter(logp.tolist())
        for request in (request for group in groups for request in group.requests):
            request.sampler_logp = [next(values) for _ in request.tokens]
        return groups

    return make
