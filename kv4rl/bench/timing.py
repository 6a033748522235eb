"""Timing on a CUDA device: graphs of many launches over rotating buffers, medians of their replays (METHOD: §B.4)."""

import statistics
from collections.abc import Callable

import torch

L2_BYTES = 60 << 20
REPLAYS = 15  # that a median is of


def layers_beyond_cache(bytes_per_layer: int, most: int = 36) -> int:
    """How many layers' buffers to rotate over, so that no launch finds its data in L2."""
    return max(2, min(most, -(-6 * L2_BYTES // max(bytes_per_layer, 1))))


def graph_ms(launch: Callable[[int], None], layers: int, replays: int = REPLAYS) -> float:
    """Median milliseconds of one `launch(layer)`, over graph replays that launch every layer once.

    Nothing is synchronised inside a replay; the clock is the device's own events.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what the launch reads may still be under way
    with torch.cuda.stream(stream):
        for _ in range(2):
            launch(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog may ask for events meanwhile
        for layer in range(layers):
            launch(layer)
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / layers)
    return statistics.median(times)


def copy_bytes_per_s(size: int = 4 << 30) -> float:
    """Bytes read plus written per second by a large device-to-device copy: the ceiling that rates are shares of.

    Not in a graph, whose copy nodes go to a slower engine; after half a second of copies, as an idle card's clocks
    are slow at first.
    """
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_(0, 256)
    for _ in range(200):
        target.copy_(source)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        target.copy_(source)
    stop.record()
    stop.synchronize()
    return 20 * 2 * size / (start.elapsed_time(stop) * 1e-3)
