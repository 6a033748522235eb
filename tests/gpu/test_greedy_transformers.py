"""Greedy text of the BF16 engine on a GPU beside transformers', on the same random weights."""

import copy

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kv4rl.config import KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.sampler import Sampling
from kv4rl.model.decoder import Decoder, DecoderConfig

pytestmark = pytest.mark.gpu
PROMPTS, NEW_TOKENS, VOCABULARY = 16, 64, 512


@pytest.fixture(scope="module")
def hf():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": False}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, **heads, initializer_range=0.1, max_position_embeddings=1024)
    return Qwen3ForCausalLM(config).eval().to("cuda", torch.bfloat16)


def greedy(hf, prompts):
    """The engine's greedy tokens through the unquantised cache, all prompts in one batch."""
    decoder = Decoder(DecoderConfig.from_hf(hf.config))
    decoder.load_state_dict({name: tensor.cpu() for name, tensor in hf.state_dict().items()})
    limits = RolloutConfig(
        max_active_requests=PROMPTS, step_tokens=256, workspace_tokens=2048, cache_pages=400, max_prompt_tokens=200,
        max_response_tokens=NEW_TOKENS,
    )  # fmt: skip
    engine = RolloutEngine(decoder.to("cuda", torch.bfloat16), KVConfig("bf16"), limits, eos_token_ids=())
    return [response.tokens for response in engine.generate(prompts, Sampling(temperature=0.0))]


def test_greedy_tokens_are_transformers_own_up_to_the_first_near_tie(hf):
    """Where the two part, transformers' best two logits are nearer than BF16 rounding can tell apart.

    Rounding: how far its BF16 logits are from the same network's in FP32, at most; two computations that each err by
    so much can swap tokens that are four times as far apart.
    """
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCABULARY, (5 + 9 * i,), generator=generator).tolist() for i in range(PROMPTS)]
    exact, agreed = copy.deepcopy(hf).float(), 0
    for prompt, tokens in zip(prompts, greedy(hf, prompts), strict=True):
        ids = torch.tensor([prompt + tokens], device="cuda")
        with torch.inference_mode():
            theirs, fp32 = (model(ids).logits[0, len(prompt) - 1 : -1].float() for model in (hf, exact))
        differs = (theirs.argmax(-1) != ids[0, len(prompt) :]).nonzero()[:, 0]
        agreed += int(differs[0]) if len(differs) else NEW_TOKENS
        if len(differs):
            best, second = theirs[differs[0]].topk(2).values.tolist()
            bound = 4 * float((theirs - fp32).abs().max())
            assert best - second <= bound, f"margin {best - second:.4f} at token {int(differs[0])}, bound {bound:.4f}"
    assert agreed >= 8 * PROMPTS, f"only {agreed} tokens before the first differences"
