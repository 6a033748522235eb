"""Is the BF16 baseline honest: its replayed forward over what its parts take alone, at the same states (§B.4).

The floor of a decode step is what its matrix products take at the batch's size, FlashInfer's decode over the state's
keys and values, and the sums among the ranks, each timed alone in a CUDA graph. A forward far above it would make the
baseline slower than it need be, and every speedup over it too large.

    python -m kv4rl.bench floor --model qwen3-4b --checkpoints 4B-300
    torchrun --nproc-per-node 2 -m kv4rl.bench floor --model qwen3-8b --tp 2 --shapes 368x3461
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.nn.functional as F

from kv4rl.bench.refusals import require_counts, require_flashinfer, require_ranks, require_writable
from kv4rl.bench.replay import fitting, states_of
from kv4rl.bench.replay_arm import Replay
from kv4rl.bench.replay_states import State
from kv4rl.bench.timing import REPLAYS, graph_ms
from kv4rl.cli import one_sentence
from kv4rl.config import LARGEST, require, require_number
from kv4rl.device import choose_device
from kv4rl.model.decoder import Decoder
from kv4rl.model.shapes import SHAPES, random_model
from kv4rl.ranks import tensor_parallel
from kv4rl.results import result_row, write_rows

SAMPLES, WARMUPS = 30, 10
TIMED = {"forward_ms": SAMPLES} | dict.fromkeys(("products_ms", "attention_ms", "sums_ms"), REPLAYS)


@torch.inference_mode()
def products_ms(decoder: Decoder, rows: int) -> float:
    """All matrix products of a step: four a layer, fused as the engine fuses them, and the head."""
    layers, random = decoder.model.layers, {}
    attention, mlp = layers[0].self_attn, layers[0].mlp
    hidden, wide = decoder.config.hidden_size, (attention.o_proj.in_features, mlp.down_proj.in_features)
    for size in {hidden, *wide}:
        random[size] = torch.randn(rows, size, dtype=decoder.dtype, device=decoder.device)

    def launch(i: int) -> None:
        attention, mlp = layers[i].self_attn, layers[i].mlp
        attention.fused(random[hidden])
        F.linear(random[wide[0]], attention.o_proj.weight)
        mlp.fused(random[hidden])
        F.linear(random[wide[1]], mlp.down_proj.weight)

    head = graph_ms(lambda _: decoder.sampling_logits(random[hidden]), 1)
    return graph_ms(launch, len(layers)) * len(layers) + head


@torch.inference_mode()
def attention_ms(replay: Replay, state: State) -> float:
    """FlashInfer's decode of every layer over the state's pages, its division of the work made before."""
    cache, table = replay.cache, replay.page_table(state)
    rows, shape = len(state.contexts), cache.shape
    q = torch.randn(rows, shape.query_heads, shape.head_dim, dtype=shape.dtype, device=cache.device)
    cache.backend.prepare(cache, table.context[:rows], table.ids[:rows])
    return graph_ms(lambda i: cache.backend.decode(cache, i, q, None), shape.num_layers) * shape.num_layers


@torch.inference_mode()
def sums_ms(decoder: Decoder, rows: int) -> float:
    """The sums among the ranks: two a layer and the embedding's; 0 on one GPU."""
    communicator, shape = getattr(decoder, "communicator", None), (rows, decoder.config.hidden_size)
    if communicator is None:
        return 0.0
    count = 2 * len(decoder.model.layers) + 1
    once = lambda _: communicator.all_reduce(communicator.out(shape, decoder.dtype, decoder.device))
    return graph_ms(once, count) * count


def measure(decoder: Decoder, state: State) -> dict[str, float]:
    """Metric -> value at one state."""
    replay, rows = Replay("bf16", decoder, [state]), len(state.contexts)
    forward = statistics.fmean(replay.time(state, SAMPLES, WARMUPS))
    parts = {
        "products_ms": products_ms(decoder, rows),
        "attention_ms": attention_ms(replay, state),
        "sums_ms": sums_ms(decoder, rows),
    }
    return over_floor(forward, parts)


def over_floor(forward: float, parts: dict[str, float]) -> dict[str, float]:
    """The parts with their sum, the forward, and its multiple of the sum."""
    floor = sum(parts.values())
    return parts | {"floor_ms": floor, "forward_ms": forward, "over_floor": forward / floor}


def rows_of(found: dict[State, dict[str, float]], model: str) -> list[dict]:
    """CSV rows, a state's as `group/name`."""
    about = {"experiment": "replay", "arm": "bf16", "model": model}
    unit = lambda metric: "x" if metric == "over_floor" else "ms"
    return [
        result_row(**about, **given, metric=metric, unit=unit(metric), value=value, n=TIMED.get(metric, ""))
        for state, values in found.items()
        for given in ({"shape": f"{state.group}/{state.name}"},)
        for metric, value in values.items()
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kv4rl.bench floor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-4b", help=f"{', '.join(SHAPES)} (random weights), or a shipped one")
    parser.add_argument("--tp", type=int, default=1, help="GPUs a model is split over: start as many with torchrun")
    parser.add_argument("--checkpoints", nargs="+", default=[], help="of Table A3, e.g. 4B-300; default all")
    parser.add_argument("--shapes", nargs="+", default=[], help="batch x context instead, e.g. 640x874")
    parser.add_argument("--hbm-gb", type=float, default=138.0, help="memory of a GPU, GB of 1e9 bytes")
    parser.add_argument("--out", default="replay.csv", help="CSV under data/results, or an absolute path")
    options = parser.parse_args(arguments)
    options.parts = ["table"]
    with one_sentence("kv4rl.bench floor"):
        require_counts(options, tp=1)
        require_ranks(options.tp)
        require_number(options.hbm_gb, "hbm-gb", 0, LARGEST, open_low=True)
        states_of(options)
        choose_device("cuda")
        require_flashinfer(["bf16"], "cuda")
        require_writable(options.out)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with ExitStack() as stack:
        with one_sentence("kv4rl.bench floor"):
            replica = stack.enter_context(tensor_parallel(options.tp, "cuda"))
            decoder = random_model(options.model, device="cuda", communicator=replica.communicator)
            states = fitting(decoder, "bf16", states_of(options), options.hbm_gb * 1e9)
            require(bool(states), "hbm-gb", options.hbm_gb, "room for the model and at least one state")
        report(options, decoder, states, replica.leads)


def report(options: argparse.Namespace, decoder: Decoder, states: Sequence[State], leads: bool) -> None:
    """Measure every state; the first rank writes rows and prints."""
    model, found = options.model if options.tp == 2 else f"{options.model}-tp{options.tp}", {}
    for state in states:
        found[state] = measure(decoder, state)
        if leads:
            path = write_rows(options.out, rows_of(found, model))
            values = "  ".join(f"{metric} {value:.3f}" for metric, value in found[state].items())
            print(f"{state.group:>8} {state.name:>10}  {values}", flush=True)
    if leads:
        worst = max(values["over_floor"] for values in found.values())
        print(json.dumps({"experiment": "floor", "model": model, "file": str(path), "worst_over_floor": worst}))


if __name__ == "__main__":
    main()
