"""One rank of the tensor-parallel tests: `tensor_parallel_worker.py MODE OUT`, started with torchrun's variables."""

import os
import sys
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from kv4rl.config import KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.request import Request
from kv4rl.engine.sampler import NoiseKeys, Sampling, sample
from kv4rl.engine.sharded_sampler import ShardedSampler
from kv4rl.model import communicator as communicators
from kv4rl.model.attend import PackedCausal
from kv4rl.model.communicator import failure_of_any, init_mesh, make_communicator
from kv4rl.model.decoder import Decoder
from kv4rl.model.tensor_parallel import shard_decoder
from kv4rl.model.weights import load_decoder
from kv4rl.tasks.stream import MiniStream

EOS = (1,)
LIMITS = {"max_prompt_tokens": 64, "max_active_requests": 4, "step_tokens": 32, "workspace_tokens": 256}


def rollout(decoder, precision, prompts, temperature, **options):
    """Tokens and log-probabilities of continuous batching with prefill in chunks, through `generate`."""
    limits = RolloutConfig(max_response_tokens=14, cache_pages=40, **LIMITS)
    kv = KVConfig(precision, sink_tokens=4, recent_tokens=8)
    engine = RolloutEngine(decoder, kv, limits, eos_token_ids=EOS, **options)
    responses = engine.generate(prompts, Sampling(temperature=temperature))
    engine.check_drained()
    return engine, [r.tokens for r in responses], [r.sampler_logp for r in responses]


@torch.no_grad()
def logits(decoder, ids):
    return decoder.logits(decoder(ids, torch.arange(len(ids)), PackedCausal([0, len(ids)])))


def compare(communicator):
    """Everything the test looks at, whole model and shard side by side."""
    whole = load_decoder("mini-qwen3", dtype=torch.float32)
    exact = load_decoder("mini-qwen3", dtype=torch.float64)
    stream = MiniStream(7)
    prompts = [stream.next().tokens for _ in range(4)]
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    shard = shard_decoder(whole, communicator)
    found = {"logits": [logits(decoder, ids) for decoder in (whole, shard)], "exact": logits(exact, ids)}
    for precision in ("bf16", "kv4rl"):
        for temperature in (0.0, 1.0):
            for name, decoder in (("whole", whole), ("shard", shard)):
                found[name, precision, temperature] = rollout(decoder, precision, prompts, temperature)[1:]
    lengths = lambda request: 3 + request.sibling + len(request.prompt_tokens) % 5
    found["forced"] = [rollout(d, "bf16", prompts, 1.0, forced_lengths=lengths)[1] for d in (whole, shard)]

    other = Decoder.random(whole.config, seed=5)
    engine, _, _ = rollout(shard, "kv4rl", prompts[:1], 0.0)
    versions = {name: parameter._version for name, parameter in shard.named_parameters()}
    engine.update_weights(other.named_parameters(), 1)
    found["writes"] = {p._version - versions[name] for name, p in shard.named_parameters()}
    found["updated"] = [logits(decoder, ids) for decoder in (other, shard)]
    try:
        engine.update_weights({name: p[:1] for name, p in other.named_parameters()}, 2)
    except ValueError as error:
        found["refused"] = str(error)
    found["samples"] = samples(communicator)
    found["failures"] = failures(communicator)
    return found


def failures(communicator):
    """What every rank is told of attempts that none fails, that the second fails, and that all fail."""

    def fail(ranks):
        if communicator.rank in ranks:
            raise RuntimeError(f"rank {communicator.rank} has no such memory")

    return [failure_of_any(communicator, partial(fail, ranks), torch.device("cpu")) for ranks in ((), (1,), (0, 1))]


def samples(communicator):
    """(tokens, logp) of the whole row's sampler and the sharded one, with ties, banned tokens and truncation."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(400, 64, generator=generator) * 3
    whole[:, 40:] = -torch.inf  # most of the second rank's tokens
    whole[200:, :32] = -torch.inf  # the first rank has no mass at all
    whole[50:60, 7] = whole[50:60, 35] = 20.0  # a tie across the ranks
    keys = NoiseKeys(torch.arange(400) * 7919, torch.arange(400))
    half = whole.chunk(communicator.size, 1)[communicator.rank].contiguous()
    sharded = ShardedSampler(communicator, communicator.rank * half.shape[1])
    cases = [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.6), Sampling(top_p=0.9, top_k=5)]
    return [(sample(whole, keys, case), sharded(half, keys, case)) for case in cases]


def main():
    mode, out = sys.argv[1:]
    if mode == "hang":  # as kv4rl.ranks.connect joins them: the whole group is more patient than a replica
        communicators.TIMEOUT_S = 5
        dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    communicator = make_communicator(init_mesh(2, "cpu"))
    if mode == "compare":
        torch.save(compare(communicator), f"{out}/{communicator.rank}.pt")
        dist.destroy_process_group()
        return
    engine, _, _ = rollout(shard_decoder(load_decoder("mini-qwen3"), communicator), "kv4", [[5, 6]], 1.0)
    engine.add(Request("p", 0, [5] * 10, 24, ()))
    for step in range(20):
        if dist.get_rank() == 1 and step == 5:
            if mode == "die":
                os._exit(3)
            time.sleep(600)
        engine.step()


if __name__ == "__main__":
    main()
