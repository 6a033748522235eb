"""`DecodeStep.run` as CUDA graphs: one a batch bucket and sampling, captured at first use, then replayed (§A.2)."""

from dataclasses import replace

import torch

from kv4rl.cache.kv_cache import KVCache
from kv4rl.engine.decode_step import DecodeStep, StepSize
from kv4rl.engine.sampler import Sampling

WARM_UPS = 2  # builds kernels and makes workspaces, which a capture may not


class StepGraphs:
    """Runs a `DecodeStep` by graph replay. All graphs share one memory pool: they never run at the same time.

    Weights, cache and buffers are read at the addresses they had at capture: weight syncs write in place, so a graph
    serves every policy version.

    The pool stays while the learner works (`pool_bytes`, logged by `kv4rl.phases`): it is one step's logits and
    activations. torch-memory-saver gives a graph's memory back only where it was loaded with LD_PRELOAD, and NCCL may
    have registered the buffers of captured gathers with the peers, who would go on reading the memory they had.
    """

    def __init__(self, step: DecodeStep):
        self._step = step
        self._graphs: dict[tuple[StepSize, Sampling], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = None
        self._stream: torch.cuda.Stream | None = None  # of all captures: a pool's blocks serve the stream they are of
        self._measured = (0, 0)  # graphs when the pool was last looked at, its bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes that the graphs' intermediates keep of the device's memory."""
        if self._measured[0] != len(self._graphs):
            segments = torch.cuda.memory_snapshot()
            mine = [part["total_size"] for part in segments if tuple(part["segment_pool_id"]) == tuple(self._pool)]
            self._measured = (len(self._graphs), sum(mine))
        return self._measured[1]

    def run(self, size: StepSize, sampling: Sampling) -> torch.Tensor:
        """As `DecodeStep.run`, on what `load` put into the buffers."""
        key = (size, _captured(sampling))
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, results = self._graphs[key]
        graph.replay()
        return results

    def capture_all(self, sampling: Sampling) -> None:
        """Capture every bucket now, the largest first, so that none falls into a timed step.

        The warm-ups run on padding, which touches no request.
        """
        for rows in reversed(self._step.buckets):
            key = (self._step.load_padding(rows), _captured(sampling))
            if key not in self._graphs:
                self._graphs[key] = self._capture(*key)

    def _capture(self, size: StepSize, sampling: Sampling) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Warm up on a side stream, then record. A step may run twice: it writes and draws the same again."""
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._step.run(size, sampling)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread may ask for events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            results = self._step.run(size, sampling)
        self._pool = self._pool or graph.pool()
        return graph, results


def capturable(cache: KVCache) -> bool:
    """Whether a step over this cache only launches: our CUDA kernels do, the reference looks at values."""
    unquantised_fp32 = cache.kv.precision == "bf16" and cache.shape.dtype == torch.float32
    return cache.device.type == "cuda" and cache.backend.name in ("cuda", "flashinfer") and not unquantised_fp32


def _captured(sampling: Sampling) -> Sampling:
    """The part of a sampling that a captured graph contains: seeds and caps are data."""
    return replace(sampling, seed=0, max_response_tokens=None)
