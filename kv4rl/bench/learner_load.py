"""What a timed learner is fed and held against: groups of forced lengths, random rewards, the dense BF16 rate."""

import random

import numpy as np
import torch

from kv4rl.engine.request import Request
from kv4rl.metrics import Timers
from kv4rl.model.decoder import Decoder
from kv4rl.rollout.forced import RandomPrompts
from kv4rl.rollout.group import PromptGroup
from kv4rl.rollout.workload import Workload


def synthetic_groups(workload: Workload, vocabulary: int, tokens: int, *, eos: int, seed: int = 0) -> list[PromptGroup]:
    """Finished groups as a collection would return them, at least `tokens` prompt and response tokens in all.

    Response tokens are random and recorded as if sampled from a uniform policy, which a random model nearly is.
    """
    rng, prompts, groups, held = np.random.default_rng(seed), RandomPrompts(workload, vocabulary), [], 0
    uniform = -float(np.log(vocabulary))
    while held < tokens:
        order, prompt, requests = len(groups), prompts.next(), []
        for sibling, length in enumerate(workload.group(order)[1]):
            request = Request(prompt.prompt_id, sibling, list(prompt.tokens), workload.lengths.cap, (eos,))
            request.tokens = [*rng.integers(vocabulary, size=length - 1).tolist(), eos]
            request.sampler_logp, request.versions = [uniform] * length, [0] * length
            request.finish("eos")
            requests.append(request)
            held += request.context_tokens
        groups.append(PromptGroup(prompt, requests, order))
    return reward(groups)


def reward(groups: list[PromptGroup]) -> list[PromptGroup]:
    """Random rewards, the same for a prompt in every arm and on every rank."""
    for group in groups:
        rng = random.Random(group.prompt.prompt_id)
        group.scores = [float(rng.random() < 0.5) for _ in group.requests]
    return groups


def input_tokens(groups: list[PromptGroup]) -> int:
    """Rows of the learner's packed batch: prompt and response of each sequence, less its last token."""
    return sum(request.context_tokens - 1 for group in groups for request in group.requests if request.tokens)


def multiplied_parameters(decoder: Decoder) -> int:
    """N of the 6 N FLOPs a token: every weight but the embedding, unless it is the head as well."""
    total = sum(parameter.numel() for parameter in decoder.parameters())
    return total if decoder.config.tied_head else total - decoder.model.embed_tokens.weight.numel()


def dense_flops_per_s(device: torch.device) -> float:
    """FLOP/s of large square products: BF16 on CUDA, smaller ones in FP32 on a CPU."""
    size, dtype, times = (8192, torch.bfloat16, 20) if device.type == "cuda" else (256, torch.float32, 5)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    out, timers = a @ b, Timers(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with timers("products"):
        for _ in range(times):
            torch.mm(a, b, out=out)
    return 2 * size**3 * times / timers.seconds["products"]
