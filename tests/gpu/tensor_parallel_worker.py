"""One rank of `test_tensor_parallel.py`: `tensor_parallel_worker.py OUT`, started with torchrun on two GPUs."""

import sys

import torch
import torch.distributed as dist
from transformers import Qwen3Config

from kv4rl.config import PRECISIONS, KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.sampler import Sampling
from kv4rl.model.attend import PackedCausal
from kv4rl.model.communicator import SymmetricCommunicator, init_mesh, make_communicator
from kv4rl.model.decoder import Decoder, DecoderConfig
from kv4rl.model.tensor_parallel import shard_decoder

VOCABULARY = 512


def random_decoder(dtype):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    config = Qwen3Config(**sizes, **heads, initializer_range=0.1, max_position_embeddings=1024)
    made = Decoder.random(DecoderConfig.from_hf(config), seed=0, dtype=torch.bfloat16, device="cpu")
    return made.to("cuda", dtype)


def greedy(decoder, precision, prompts):
    """Tokens and log-probabilities of a captured engine."""
    limits = RolloutConfig(
        max_active_requests=16, step_tokens=256, workspace_tokens=2048, cache_pages=200, max_prompt_tokens=200,
        max_response_tokens=40,
    )  # fmt: skip
    engine = RolloutEngine(decoder, KVConfig(precision), limits, eos_token_ids=(), buckets=(8, 16))
    engine.capture()
    responses = engine.generate(prompts, Sampling(temperature=0.0))
    engine.check_drained()
    return [response.tokens for response in responses], [response.sampler_logp for response in responses]


@torch.inference_mode()
def logits(decoder, ids):
    positions = torch.arange(len(ids), device="cuda")
    return decoder.logits(decoder(ids, positions, PackedCausal([0, len(ids)]))).double().cpu()


def sums(communicator):
    """The same addends through symmetric memory and through NCCL."""
    generator = torch.Generator(device="cuda").manual_seed(10 + communicator.rank)
    x = torch.randn(64, 256, generator=generator, device="cuda").bfloat16()
    shared = communicator.out(x.shape, x.dtype, x.device).copy_(x)
    two_shot, nccl = communicator.all_reduce(shared).clone(), x.clone()
    dist.all_reduce(nccl, group=communicator.group)
    return two_shot.cpu(), nccl.cpu()


def main():
    communicator = make_communicator(init_mesh(2, "cuda"))
    exact, whole = random_decoder(torch.float32), random_decoder(torch.bfloat16)
    shard = shard_decoder(whole, communicator)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (150,), generator=generator).cuda()
    prompts = [torch.randint(VOCABULARY, (5 + 9 * i,), generator=generator).tolist() for i in range(16)]
    found = {"symmetric": isinstance(communicator, SymmetricCommunicator), "sums": sums(communicator)}
    found["logits"] = [logits(decoder, ids) for decoder in (exact, whole, shard)]
    for precision in PRECISIONS:
        found[precision] = [greedy(decoder, precision, prompts) for decoder in (whole, shard)]
    torch.save(found, f"{sys.argv[1]}/{communicator.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
