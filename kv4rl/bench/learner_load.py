"""What a timed learner is fed and held against: groups of forced lengths, random rewards, the dense BF16 rate."""

import random
import time

import numpy as np
import torch

from kv4rl.bench.timing import graph_ms
from kv4rl.engine.request import Request
from kv4rl.model.decoder import Decoder
from kv4rl.rollout.forced import RandomPrompts
from kv4rl.rollout.group import PromptGroup
from kv4rl.rollout.workload import Workload

MATMUL = 8192  # rows and columns of the products that the dense rate is measured with


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
    size, dtype = (MATMUL, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    a, b, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
    if device.type == "cuda":
        a.normal_()
        b.normal_()
        seconds = graph_ms(lambda layer: torch.mm(a, b, out=out), 20, replays=5) * 1e-3
    else:
        started = time.perf_counter()
        for _ in range(5):
            torch.mm(a, b, out=out)
        seconds = (time.perf_counter() - started) / 5
    return 2 * size**3 / seconds
