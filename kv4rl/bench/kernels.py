"""Decode attention alone: every shape of Table A3 and vectors as §B.5's, per precision, beside FlashInfer BF16.

One process, one device, one TP2 or TP1 shard of Qwen3. `ms_per_layer` is the attention launch over prepared queries;
`write_kv` (rotation, quantisation, packing of q, k, v; `write_kv_raw`: with QK-norm and RoPE) has rows of its own.
Speedups are to FlashInfer's fa2 tensor-core decode, the paper's baseline (§A.2). Arms `*_triton` are the same
precisions on the portable kernels: a launch over all parts and one that merges them. §B.5's vectors (`replay_states`)
have one speedup a model, of their summed times, in a row beside theirs.
"""

import argparse
import json
from dataclasses import dataclass

import torch

from kv4rl.attention import triton
from kv4rl.attention.cuda import DecodePlan, write_kv
from kv4rl.bench.refusals import require_flashinfer, require_writable
from kv4rl.bench.replay_states import HETEROGENEOUS, heterogeneous, parse_shapes
from kv4rl.bench.timing import REPLAYS, copy_bytes_per_s, graph_ms, layers_beyond_cache
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.cache.main_cache import pages_for
from kv4rl.cli import one_sentence
from kv4rl.config import KVConfig, require
from kv4rl.formats.packing import chunk_bytes
from kv4rl.model.pointwise import NormRotate, compiled
from kv4rl.paper import REPLAY_SHAPES
from kv4rl.results import result_row, write_rows

SHARDS = {"tp2_16q4kv": (16, 4), "tp1_32q8kv": (32, 8)}  # query heads, KV heads; head_dim 128
HEAD_DIM = 128
BASELINE = "bf16_flashinfer"
ARMS = ("kv8", "kv4", "kv4rl")
TRITON = "_triton"  # after a precision: the arm on the kernels of kernels/triton
OTHER_ARMS = ("bf16", "kv4_p8", "fp8_flashinfer", *(arm + TRITON for arm in ARMS))  # `bf16`: ours
FILE = "kernels.csv"


@dataclass(frozen=True)
class Workload:
    """Requests that decode together: a name for the `shape` column, and their context lengths."""

    name: str
    lengths: tuple[int, ...]
    group: str = ""  # what its time is summed with, if with anything


def uniform(batch: int, context: int) -> Workload:
    return Workload(f"{batch}x{context}", (context,) * batch)


def workloads(which: str) -> list[Workload]:
    """`table`: all of Table A3; `quick`: six of them; `ragged`: §B.5; `small`: 1 to 64 requests at 1k, 8k and 32k.

    `none`: `write_kv` alone is measured.
    """
    table = [uniform(*shape) for shapes in REPLAY_SHAPES.values() for shape in shapes]
    quick = [uniform(*s) for s in ((608, 621), (640, 874), (640, 1463), (200, 2627), (368, 3461), (176, 6972))]
    vectors = [state for size in HETEROGENEOUS for state in heterogeneous(size)]
    mixed = [Workload(f"{state.group}/{state.name}", state.contexts, state.group) for state in vectors]
    small = [uniform(b, n) for n in (1024, 8192, 32768) for b in (1, 4, 16, 64)]
    return {"table": table, "quick": quick, "ragged": mixed, "small": small, "all": table + mixed + small, "none": []}[
        which
    ]


def layout(lengths, generator) -> tuple[DecodeBatch, int]:
    """Requests on shuffled pages, as a used pool has them: (batch, number of pages)."""
    counts = [pages_for(n) for n in lengths]
    device = generator.device
    order = torch.randperm(sum(counts), generator=generator, device=device)
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int64, device=device)
    for row, pages in enumerate(order.split(counts)):
        table[row, : len(pages)] = pages
    slots = torch.arange(len(counts), device=device)
    return DecodeBatch(table, torch.tensor(lengths, device=device), slots), sum(counts)


class OurDecode:
    """One precision of ours over `layers` layers of random content, on the CUDA kernels."""

    backend = "cuda"

    def __init__(
        self, precision: str, workload: Workload, heads: tuple[int, int], operand: str = "fp16", seed: int = 0,
        device: str = "cuda",
    ):  # fmt: skip
        self.generator = torch.Generator(device).manual_seed(seed)
        self.batch, pages = layout(workload.lengths, self.generator)
        rows = len(workload.lengths)
        kv = KVConfig(precision, probability_operand=operand)
        chunk = chunk_bytes(precision, HEAD_DIM, torch.bfloat16)
        self.layers = layers_beyond_cache(pages * heads[1] * chunk)
        shape = CacheShape(self.layers, *heads, HEAD_DIM, torch.bfloat16)
        self.cache = KVCache(kv, shape, num_pages=pages, num_slots=rows, device=device, backend=self.backend)
        self._fill(workload)
        self.q = self._random(rows, heads[0])
        self.kv_bytes = self._bytes_read(workload)
        self._prepare()

    def _prepare(self) -> None:
        """All that comes before the launches that are timed."""
        self.prepared = write_kv(self.cache, 0, self.q, None, None, None)
        self.plan = DecodePlan(self.cache, len(self.q), self.batch.page_table.shape[1])
        self.plan.plan(self.batch)
        self.out = torch.empty_like(self.q)

    def launch(self, layer: int) -> None:
        """Decode one layer into `out`."""
        self.plan.run(layer, self.prepared, self.out)

    def _random(self, n: int, heads: int) -> torch.Tensor:
        size = (n, heads, HEAD_DIM)
        return torch.randn(size, generator=self.generator, device=self.generator.device).bfloat16()

    def _fill(self, workload: Workload) -> None:
        """Write layer 0 from random keys and values, some requests at a time, and copy it to the others."""
        cache, heads = self.cache, self.cache.shape.kv_heads
        for row, n in enumerate(workload.lengths):
            where = TokenSlots.for_chunk(self.batch.page_table[row], row, 0, n, cache.kv)
            where.trust()
            cache.write(0, self._random(n, heads), self._random(n, heads), where)
        for tensor in cache.tensors:
            tensor[1:] = tensor[:1]

    def _bytes_read(self, workload: Workload) -> int:
        """KV bytes a launch must read: main region in INT4 (or INT8), protected positions in INT8."""
        kv, heads = self.cache.kv, self.cache.shape.kv_heads
        per_token = self.cache.main.chunk_bytes // 16
        total = 0
        for n in workload.lengths:
            protected = min(n, kv.protected_tokens)
            total += heads * ((n - protected) * per_token + protected * (2 * HEAD_DIM + 4))
        return total

    def ms(self) -> float:
        return graph_ms(self.launch, self.layers)


class TritonDecode(OurDecode):
    """The same content on the kernels of kernels/triton."""

    backend = "triton"

    def _prepare(self) -> None:
        self.prepared = triton.prepare(self.cache, 0, self.q)
        for layer in range(self.layers):  # whatever Triton compiles for a layer's pointers, it does before the capture
            self.launch(layer)

    def launch(self, layer: int) -> None:
        self.out, _ = triton.attend(self.cache, layer, self.prepared, self.batch)


class FlashInferDecode:
    """The baseline: FlashInfer's fa2 tensor-core decode over BF16 pages of 16 tokens."""

    def __init__(self, workload: Workload, heads: tuple[int, int], dtype=torch.bfloat16, seed: int = 0):
        import flashinfer

        generator = torch.Generator("cuda").manual_seed(seed)
        batch, pages = layout(workload.lengths, generator)
        self.kv_bytes = sum(workload.lengths) * heads[1] * 2 * HEAD_DIM * dtype.itemsize
        self.layers = layers_beyond_cache(self.kv_bytes)
        shape = (self.layers, pages, heads[1], 16, HEAD_DIM)
        self.k, self.v = (
            torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2)
        )
        self.q = torch.randn(len(workload.lengths), heads[0], HEAD_DIM, generator=generator, device="cuda").bfloat16()
        counts = torch.tensor([pages_for(n) for n in workload.lengths])
        indptr = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0))).int().cuda()
        indices = batch.page_table[batch.page_table >= 0].int()
        last = ((batch.context_tokens - 1) % 16 + 1).int()
        workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True, backend="fa2"
        )
        self.wrapper.plan(
            indptr, indices, last, *heads, HEAD_DIM, 16, q_data_type=torch.bfloat16, kv_data_type=dtype
        )  # fmt: skip
        self.out = torch.empty_like(self.q)

    def ms(self) -> float:
        return graph_ms(
            lambda layer: self.wrapper.run(self.q, (self.k[layer], self.v[layer]), out=self.out), self.layers
        )


class Step:
    """A decode step of `tokens` requests over `layers` layers: q, k, v of one fused projection, and where they go."""

    layers = 8

    def __init__(self, tokens: int, heads: tuple[int, int], precision: str = "kv4rl"):
        kv = KVConfig(precision)
        shape = CacheShape(self.layers, *heads, HEAD_DIM, torch.bfloat16)
        self.cache = KVCache(kv, shape, num_pages=tokens, num_slots=tokens, device="cuda", backend="cuda")
        rows = torch.arange(tokens, device="cuda")
        batch = DecodeBatch(rows[:, None], torch.randint(1, 17, (tokens,), device="cuda"), rows)
        self.where = TokenSlots.for_decode(batch, kv)
        normal = lambda *size: torch.randn(*size, device="cuda").bfloat16()
        self._fused = normal(self.layers, tokens, (heads[0] + 2 * heads[1]) * HEAD_DIM)
        self._sizes = [h * HEAD_DIM for h in (heads[0], heads[1], heads[1])]
        self.before = NormRotate(
            normal(HEAD_DIM), normal(HEAD_DIM), 1e-6, normal(tokens, 1, HEAD_DIM), normal(tokens, 1, HEAD_DIM)
        )

    def qkv(self, layer: int) -> list[torch.Tensor]:
        return [x.unflatten(1, (-1, HEAD_DIM)) for x in self._fused[layer].split(self._sizes, dim=1)]

    def us(self) -> dict[str, float]:
        """Microseconds of a layer's launch by metric: `write_kv`, the same with QK-norm and RoPE, these alone."""
        norm_rotate, b = compiled().norm_rotate, self.before
        launches = {
            "write_kv_us": lambda layer: write_kv(self.cache, layer, *self.qkv(layer), self.where),
            "write_kv_raw_us": lambda layer: write_kv(self.cache, layer, *self.qkv(layer), self.where, b),
            "norm_rotate_us": lambda layer: norm_rotate(
                *self.qkv(layer)[:2], b.q_weight, b.k_weight, b.eps, b.cos, b.sin
            ),
        }
        with torch.no_grad():
            return {metric: graph_ms(launch, self.layers) * 1e3 for metric, launch in launches.items()}


def measure(workload: Workload, shard: str, arms) -> dict[str, tuple[float, int]]:
    """{arm: (ms per layer, KV bytes)}; memory of one arm is freed before the next is made."""
    heads = SHARDS[shard]
    found = {}
    for arm in arms:
        decode = _make(arm, workload, heads)
        found[arm] = (decode.ms(), decode.kv_bytes)
        del decode
        torch.cuda.empty_cache()
    return found


def _make(arm: str, workload: Workload, heads: tuple[int, int]):
    if arm == BASELINE:
        return FlashInferDecode(workload, heads)
    if arm == "fp8_flashinfer":
        return FlashInferDecode(workload, heads, torch.float8_e4m3fn)
    if arm == "kv4_p8":
        return OurDecode("kv4", workload, heads, operand="u8")
    if arm.endswith(TRITON):
        return TritonDecode(arm.removesuffix(TRITON), workload, heads)
    return OurDecode(arm, workload, heads)


def rows_of(workload: Workload, shard: str, found: dict, copy_rate: float) -> list[dict]:
    """CSV rows of one workload; the speedups of a vector of a group are in the group's rows alone (`grouped`).

    Beside `OTHER_ARMS` alone the baseline leaves none: its stored time is the one that `ARMS`' speedups are to.
    """
    rows = []
    base = found.get(BASELINE)
    others = found.keys() - {BASELINE}
    for arm, (ms, size) in found.items():
        if arm == BASELINE and others and others <= set(OTHER_ARMS):
            continue
        about = {"experiment": "kernels", "arm": arm, "model": shard, "shape": workload.name, "n": REPLAYS}
        rate = size / ms * 1e3
        rows.append(result_row(**about, metric="ms_per_layer", unit="ms", value=ms))
        rows.append(result_row(**about, metric="kv_bytes_per_s", unit="B/s", value=rate))
        rows.append(result_row(**about, metric="share_of_copy_rate", unit="share", value=rate / copy_rate))
        if base and not workload.group:
            rows.append(result_row(**about, metric="speedup_vs_bf16", unit="x", value=base[0] / ms))
    return rows


def grouped(measured: list[tuple[Workload, dict]]) -> list[tuple[Workload, dict]]:
    """A workload for each group of vectors: per arm their mean milliseconds and bytes, whose ratios are the sums'."""
    groups: dict[str, list[dict]] = {}
    for workload, found in measured:
        if workload.group:
            groups.setdefault(workload.group, []).append(found)
    means = lambda each: tuple(sum(values) / len(each) for values in zip(*each, strict=True))
    return [
        (Workload(group, ()), {arm: means([found[arm] for found in parts]) for arm in parts[0]})
        for group, parts in groups.items()
    ]


def line_of(workload: Workload, shard: str, found: dict, copy_rate: float) -> str:
    cells = []
    base = found.get(BASELINE)
    for arm, (ms, size) in found.items():
        rate = size / ms * 1e3
        over = f" {base[0] / ms:5.2f}x" if base else ""
        cells.append(f"{arm} {ms * 1e3:7.1f} us {rate / 1e12:.2f} TB/s {rate / copy_rate:4.0%}{over}")
    return f"{shard:>10} {workload.name:>18} | " + " | ".join(cells)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kv4rl.bench kernels", description=__doc__)
    parser.add_argument("--workloads", default="all", choices=("all", "table", "ragged", "small", "quick", "none"))
    parser.add_argument("--shapes", nargs="+", default=[], help="batch x context instead, e.g. 640x874")
    parser.add_argument("--shards", nargs="+", default=["tp2_16q4kv"], choices=tuple(SHARDS))
    arms = [BASELINE, *ARMS]
    parser.add_argument("--arms", nargs="+", default=arms, choices=(*arms, *OTHER_ARMS))
    parser.add_argument("--out", default=FILE, help="CSV under data/results, or an absolute path")
    options = parser.parse_args(arguments)
    with one_sentence("kv4rl.bench kernels"):
        options.pairs = parse_shapes(options.shapes)
        require_writable(options.out)
        require(torch.cuda.is_available(), "torch.cuda.is_available()", False, "a CUDA device: kernels are timed on it")
        require_flashinfer([arm for arm in options.arms if arm.endswith("_flashinfer")], "cuda")
    return options


def measure_shard(shard: str, options: argparse.Namespace, copy_rate: float, rows: list[dict]) -> dict[str, float]:
    """Add a shard's rows to `rows` and to the file, at once: a run cut short keeps what it measured.

    Returns the worst speedup of each arm.
    """
    measured, worst = [], {}

    def keep(workload: Workload, found: dict) -> None:
        print(line_of(workload, shard, found, copy_rate), flush=True)
        rows.extend(rows_of(workload, shard, found, copy_rate))
        write_rows(options.out, rows)

    for workload in [uniform(*pair) for pair in options.pairs] or workloads(options.workloads):
        found = measure(workload, shard, options.arms)
        measured.append((workload, found))
        keep(workload, found)
        for arm, (ms, _) in found.items() if BASELINE in found else ():
            speedup = found[BASELINE][0] / ms
            worst[arm] = min(worst.get(arm, speedup), speedup)
    for workload, found in grouped(measured):
        keep(workload, found)
    return worst


def step_rows(shard: str, precision: str) -> list[dict]:
    """`write_kv` for 64 and 640 tokens, printed and as rows."""
    rows = []
    for tokens in (64, 640):
        for metric, us in Step(tokens, SHARDS[shard], precision).us().items():
            print(f"{shard:>10} {precision} {metric.removesuffix('_us')} {tokens} tokens {us:.2f} us")
            about = {"arm": precision, "model": shard, "shape": f"{tokens}", "metric": metric}
            rows.append(result_row(experiment="kernels", unit="us", value=us, n=REPLAYS, **about))
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    copy_rate = copy_bytes_per_s()
    print(f"card: {torch.cuda.get_device_name()}, copy {copy_rate / 1e12:.2f} TB/s read plus written = 100%")
    rows, worst = [], {}
    for shard in options.shards:
        for arm, speedup in measure_shard(shard, options, copy_rate, rows).items():
            worst[arm] = min(worst.get(arm, speedup), speedup)
        for precision in (arm for arm in ARMS if arm in options.arms):
            rows += step_rows(shard, precision)
    path = write_rows(options.out, rows)
    summary = {"experiment": "kernels", "rows": len(rows), "file": str(path), "worst_speedup": worst}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
