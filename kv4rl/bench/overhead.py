"""What the engine adds to its decode step: wall-clock per step, steps launched ahead or one by one, against the replay.

All requests of a shape are prefilled by the engine, twice, the second time on the clock; then pure-decode steps are
timed by the host's clock, scheduling, sampling, page hand-out and bookkeeping included, over `--steps` steps in which
nobody ends; `device_step_ms` is the device's part of them. The replay (§B.4: captured forward and argmax alone) is
timed at the very contexts in the middle of them. Weights are random.

    python -m kv4rl.bench overhead --model qwen3-4b --shapes 640x874 200x2627
    torchrun --nproc-per-node 2 -m kv4rl.bench overhead --model qwen3-4b --tp 2
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from time import perf_counter

import torch

from kv4rl.bench.engines import bench_engine
from kv4rl.bench.refusals import require_counts, require_flashinfer, require_ranks, require_writable
from kv4rl.bench.replay_arm import Replay
from kv4rl.bench.replay_states import State, parse_shapes
from kv4rl.cache.main_cache import pages_for
from kv4rl.cli import one_sentence
from kv4rl.config import PRECISIONS, RolloutConfig, require
from kv4rl.device import choose_device, release_memory
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.request import Request
from kv4rl.model.decoder import Decoder
from kv4rl.model.shapes import SHAPES, random_model, shape_config
from kv4rl.ranks import tensor_parallel
from kv4rl.results import result_row, write_rows

WARMUPS = 8  # decode steps before those timed


def limits(batch: int, context: int, options: argparse.Namespace) -> RolloutConfig:
    """Room for `batch` requests of `context` prompt tokens and all that they decode meanwhile."""
    budget = max(options.step_tokens, 2 * batch)
    prefill_steps = -(-batch * context // (budget - batch)) + 2  # the first request decodes in nearly all of them
    cap = prefill_steps + 2 * (options.steps + WARMUPS) + 2
    return RolloutConfig(
        max_active_requests=batch, step_tokens=budget, workspace_tokens=max(4 * budget, context + cap),
        cache_pages=batch * (pages_for(context + cap) + 1), max_prompt_tokens=context, max_response_tokens=cap,
    )  # fmt: skip


def require_positions(options: argparse.Namespace) -> None:
    """Raise `InputError` where a shape's requests are longer than the model's positions allow."""
    positions = shape_config(options.model).max_positions
    for shape, (batch, context) in zip(options.shapes, options.pairs, strict=True):
        longest = context + limits(batch, context, options).max_response_tokens
        expected = f"at most {positions} positions, the model's; with what is decoded it needs {longest}"
        require(longest <= positions, "shapes", shape, expected)


def make_engine(decoder: Decoder, precision: str, batch: int, context: int, options: argparse.Namespace):
    """An engine with all requests of a shape queued."""
    rollout = limits(batch, context, options)
    engine = bench_engine(decoder, precision, rollout, eos_token_ids=())
    vocabulary, cap = decoder.config.vocab_size, rollout.max_response_tokens
    for i in range(batch):
        engine.add(Request(f"p{i}", 0, [(7 * i + j) % vocabulary for j in range(context)], cap, (), (i,)))
    return engine


def prefill(engine: RolloutEngine, batch: int) -> float:
    """Run until all requests decode; prefill tokens a second of the steps that had any."""
    ms = tokens = 0
    while engine.last_step is None or engine.last_step.active_requests < batch:
        engine.step()
        if engine.last_step.prefill_tokens:
            tokens, ms = tokens + engine.last_step.prefill_tokens, ms + engine.last_step.step_ms
    return tokens / ms * 1e3


def engine_ms(engine: RolloutEngine, overlap: bool, steps: int) -> tuple[float, float]:
    """Milliseconds of a decode step: on the host's clock, and of the device alone."""
    engine.overlap = overlap
    for _ in range(WARMUPS):
        engine.step()
    wall, device = [], []
    for _ in range(steps):
        begin = perf_counter()
        finished = engine.step()
        wall.append((perf_counter() - begin) * 1e3)
        device.append(engine.last_step.device_ms)
        require(not finished and engine.last_step.kind == "decode", "step", engine.last_step, "a pure decode step")
    return statistics.fmean(wall), statistics.fmean(device)


def measure(decoder: Decoder, precision: str, batch: int, context: int, options: argparse.Namespace) -> dict:
    """Metric -> value of one precision at one shape."""
    prefill(make_engine(decoder, precision, batch, context, options), batch)  # builds kernels for all kinds of steps
    release_memory(decoder.device)
    engine = make_engine(decoder, precision, batch, context, options)
    found = {"prefill_tokens_per_s": prefill(engine, batch)}
    found["engine_step_ms"], found["device_step_ms"] = engine_ms(engine, True, options.steps)
    contexts = engine.scheduler.table.context[:batch] - options.steps // 2
    found["serial_step_ms"], _ = engine_ms(engine, False, options.steps)
    engine.pause()
    del engine
    release_memory(decoder.device)
    state = State("overhead", tuple(contexts.tolist()))
    replay = Replay(precision, decoder, [state])
    replay.time(state, options.heat, 1)  # on a card as warm as the engine's steps found it
    found["decode_replay_ms"] = statistics.fmean(replay.time(state, 2 * options.steps, WARMUPS))
    del replay
    release_memory(decoder.device)
    found["share_of_replay"] = found["decode_replay_ms"] / found["engine_step_ms"]
    found["serial_share_of_replay"] = found["decode_replay_ms"] / found["serial_step_ms"]
    return found


def _unit(metric: str) -> str:
    return "ms" if metric.endswith("_ms") else "tokens/s" if metric.endswith("_per_s") else "x"


def _timed(metric: str, steps: int) -> int | str:
    """How many steps a mean is over; empty for what is made of means, and for prefill, of as many as it takes."""
    return {"decode_replay_ms": 2 * steps}.get(metric, steps if metric.endswith("step_ms") else "")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kv4rl.bench overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", default="mini-qwen3", help=f"{', '.join(SHAPES)} or a shipped one; weights random")
    parser.add_argument("--shapes", nargs="+", default=["640x874", "200x2627"] if cuda else ["8x40"])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "kv4rl"], choices=PRECISIONS)
    parser.add_argument("--steps", type=int, default=40, help="timed, of each kind")
    parser.add_argument("--step-tokens", type=int, default=8192)
    heat = {"default": 150 if cuda else 0, "help": "steps of the replay before it is timed; 150 on CUDA, 0 on a CPU"}
    parser.add_argument("--heat", type=int, **heat)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", default="rollout.csv", help="CSV under data/results, or an absolute path")
    options = parser.parse_args(arguments)
    with one_sentence("kv4rl.bench overhead"):
        require_counts(options, tp=1, steps=2, step_tokens=1, heat=0)
        require_ranks(options.tp)
        choose_device(options.device)
        options.pairs = parse_shapes(options.shapes)
        require_flashinfer({"bf16"} & set(options.precisions), options.device)
        require_writable(options.out)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with ExitStack() as stack:
        with one_sentence("kv4rl.bench overhead"):
            require_positions(options)
            replica = stack.enter_context(tensor_parallel(options.tp, options.device))
            decoder = random_model(options.model, device=options.device, communicator=replica.communicator)
        report(options, decoder, replica.leads)


def report(options: argparse.Namespace, decoder: Decoder, leads: bool) -> None:
    """Measure every precision at every shape; the first rank writes rows and prints."""
    model = options.model if options.tp == 1 else f"{options.model}-tp{options.tp}"
    made, shares = [], {}
    for precision in options.precisions:
        for batch, context in options.pairs:
            found, shape = measure(decoder, precision, batch, context, options), f"{batch}x{context}"
            about = {"experiment": "rollout", "arm": precision, "model": model, "shape": shape}
            for m, v in found.items():
                made.append(result_row(**about, metric=m, unit=_unit(m), value=v, n=_timed(m, options.steps)))
            shares[f"{precision} {shape}"] = round(found["share_of_replay"], 4)
            if leads:
                print(f"{precision:>6} {shape:>10} " + "  ".join(f"{m} {v:.3f}" for m, v in found.items()), flush=True)
    if leads:
        path = write_rows(options.out, made)
        print(json.dumps({"experiment": "overhead", "model": model, "file": str(path), "share_of_replay": shares}))


if __name__ == "__main__":
    main()
