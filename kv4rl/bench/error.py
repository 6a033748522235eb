"""How far decode is from float64, beside FlashInfer BF16 over the same dequantised keys and values (§5.1, §A.3).

Both are compared with float64 attention over what the cache holds and the INT8 query that the integer path uses, so
that neither is charged with the format's own error. Requests of 1 to 5,000 tokens with outlier channels, as keys have.
Arms `*_p8`: eight-bit probabilities (§A.3), a coarser grid than FP16's. Those with FP16 probabilities are held to 1.5
times FlashInfer's error by `tests/gpu/test_flashinfer_error.py`.

    python -m kv4rl.bench error
"""

import argparse
import json

import torch

from kv4rl.attention.float64 import dequantised_context, oracle, stored_basis_query
from kv4rl.bench.kernels import FILE, HEAD_DIM, SHARDS, layout
from kv4rl.bench.refusals import require_flashinfer, require_writable
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.cli import one_sentence
from kv4rl.config import KVConfig
from kv4rl.device import choose_device
from kv4rl.engine.flashinfer import FlashInferBackend
from kv4rl.results import result_row, write_rows

LENGTHS = (1, 17, 150, 1000, 5000)
SHAPE = "5 requests of 1 to 5000"
ARMS = {
    "kv8": KVConfig("kv8"), "kv4": KVConfig("kv4"), "kv4rl": KVConfig("kv4rl"),
    "kv4_p8": KVConfig("kv4", probability_operand="u8"), "kv4rl_p8": KVConfig("kv4rl", probability_operand="u8"),
}  # fmt: skip


def random_like_model(
    n: int, heads: int, d: int, generator: torch.Generator, dtype: torch.dtype, spread: float = 1.0
) -> torch.Tensor:
    """Vectors [n, heads, d] with a few outlier channels, as keys have, on the generator's device."""
    x = torch.randn(n, heads, d, generator=generator, device=generator.device) * spread
    x[..., 3] += 6.0
    x[..., d // 2] -= 4.0
    return x.to(dtype)


def requests(kv: KVConfig, heads: tuple[int, int], device: str) -> tuple[KVCache, DecodeBatch, torch.Tensor]:
    """A layer of `LENGTHS` on shuffled pages: (cache, batch, queries BF16 [5, query_heads, d])."""
    generator = torch.Generator(device).manual_seed(0)
    vectors = lambda n, count: random_like_model(n, count, HEAD_DIM, generator, torch.bfloat16)
    batch, pages = layout(LENGTHS, generator)
    backend = "cuda" if device == "cuda" else "reference"
    shape = CacheShape(1, *heads, HEAD_DIM, torch.bfloat16)
    cache = KVCache(kv, shape, num_pages=pages, num_slots=len(LENGTHS), device=device, backend=backend)
    for row, n in enumerate(LENGTHS):
        where = TokenSlots.for_chunk(batch.page_table[row], row, 0, n, kv)
        cache.write(0, vectors(n, heads[1]), vectors(n, heads[1]), where)
    return cache, batch, vectors(len(LENGTHS), heads[0])


def flashinfer_decode(cache: KVCache, batch: DecodeBatch, q: torch.Tensor) -> torch.Tensor:
    """The baseline's output [B, query_heads, d] over the dequantised cache in BF16, with the integer path's query."""
    sizes = {"num_pages": cache.allocator.num_pages, "num_slots": cache.num_slots, "device": cache.device}
    plain = KVCache(KVConfig("bf16"), cache.shape, **sizes)
    plain.backend = FlashInferBackend(plain)
    for row, n in enumerate(batch.context_tokens.tolist()):
        k, v = (vectors.bfloat16() for vectors in dequantised_context(cache, 0, batch, row))
        plain.write(0, k, v, TokenSlots.for_chunk(batch.page_table[row], row, 0, n, plain.kv))
    plain.backend.prepare(plain, batch.context_tokens.cpu().numpy(), batch.page_table.cpu().numpy(), static=False)
    return plain.decode(0, stored_basis_query(cache, q, "int8").flatten(1, 2).bfloat16(), batch)


def errors(kv: KVConfig, heads: tuple[int, int], device: str = "cuda") -> tuple[float, float]:
    """Errors of (our output, FlashInfer's) against float64, as shares of its Euclidean norm."""
    cache, batch, q = requests(kv, heads, device)
    exact, _ = oracle(cache, 0, q, batch, query="int8")
    outputs = cache.decode(0, q, batch), flashinfer_decode(cache, batch, q)
    ours, theirs = (float((out.double() - exact).norm() / exact.norm()) for out in outputs)
    return ours, theirs


def rows_of(arm: str, shard: str, ours: float, theirs: float) -> list[dict]:
    about = {"experiment": "kernels", "arm": arm, "model": shard, "shape": SHAPE, "n": len(LENGTHS)}
    values = {"error_vs_float64": ours, "flashinfer_error_vs_float64": theirs, "error_vs_flashinfer": ours / theirs}
    unit = lambda metric: "x" if metric == "error_vs_flashinfer" else "share"
    return [result_row(**about, metric=metric, unit=unit(metric), value=value) for metric, value in values.items()]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kv4rl.bench error", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", nargs="+", default=list(SHARDS), choices=tuple(SHARDS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=tuple(ARMS))
    parser.add_argument("--out", default=FILE, help="CSV under data/results, or an absolute path")
    options = parser.parse_args(arguments)
    with one_sentence("kv4rl.bench error"):
        choose_device("cuda")
        require_flashinfer(options.arms, "cuda")
        require_writable(options.out)
    rows, worst = [], {}
    for shard in options.shards:
        for arm in options.arms:
            ours, theirs = errors(ARMS[arm], SHARDS[shard])
            rows += rows_of(arm, shard, ours, theirs)
            worst[arm] = max(worst.get(arm, 0.0), ours / theirs)
            print(f"{shard:>10} {arm:>8}  {ours:.2e}, FlashInfer BF16 {theirs:.2e}: {ours / theirs:.2f}x", flush=True)
    path = write_rows(options.out, rows)
    print(json.dumps({"experiment": "kernels", "file": str(path), "worst_error_vs_flashinfer": worst}))


if __name__ == "__main__":
    main()
