"""Decode replay (§B.4, Table A3, Figs. 3b, A2, A3b,d): one model's decode step at fixed states, format by format.

Timed: the captured forward with tensor-parallel sums and argmax, conversions included; not timed: prefill, scheduling,
stochastic sampling. Weights are random at the true shape, no file is read: their values change no kernel's work. Every
arm runs the same states: samples in blocks within one process after warm-up, aggregated by Eq. A2 (means), or over
heterogeneous vectors by summed medians (§B.5). A card that decodes for some seconds runs at its power limit, and some
per cent slower than one that was idle: `--heat` steps come first, so that each arm is timed on a card as warm as the
others found it. The BF16 arm runs FlashInfer's fa2 tensor-core decode; `bf16_repeat`
runs it once more at the end, and the card shows how far the two differ.

    python -m kv4rl.bench replay --model qwen3-4b --tp 1
    torchrun --nproc-per-node 2 -m kv4rl.bench replay --model qwen3-8b --tp 2
"""

import argparse
import contextlib
import json
import statistics
from collections.abc import Iterable, Sequence

import torch

from kv4rl.bench.refusals import require_counts, require_flashinfer, require_ranks, require_writable
from kv4rl.bench.replay_arm import ARMS, NEED_CUDA, WINDOWS, Replay, arm_side_bytes, baseline
from kv4rl.bench.replay_states import State, aggregate, heterogeneous, parse_shapes, ragged_aggregate, table_a3, uniform
from kv4rl.bench.weight_arms import KERNELS, PRODUCTS, quantised_weights
from kv4rl.cache.main_cache import pages_for
from kv4rl.cache.memory_plan import page_bytes
from kv4rl.cli import one_sentence
from kv4rl.config import LARGEST, require, require_number
from kv4rl.device import choose_device, release_memory
from kv4rl.model.decoder import Decoder
from kv4rl.model.shapes import SHAPES, random_model, shape_config
from kv4rl.ranks import tensor_parallel
from kv4rl.results import result_row, write_rows

REPEAT = "bf16_repeat"  # the baseline once more, at the end
TABLE_ARMS = ("bf16", "kv8", "kv4", "kv4rl", "fp8_kv", "w8a8", "w4a16", REPEAT)
RAGGED_ARMS = ("bf16", "kv8", "kv4", *(f"kv4rl_w{window}" for window in WINDOWS), "kv4rl", "kv4rl_bf16", REPEAT)
CPU_ARMS = ("bf16", "kv8", "kv4", "kv4rl")
WORKSPACE_BYTES = 6e9  # logits, activations, FlashInfer's workspace, graphs

Times = dict[str, dict[State, list[float]]]  # arm -> state -> samples in ms


def fitting(decoder: Decoder, arm: str, states: Iterable[State], hbm_bytes: float) -> list[State]:
    """The states whose pages fit beside the model in `hbm_bytes`; TP1 leaves the largest out."""
    kv, shape = ARMS[arm], decoder.cache_shape()
    left = hbm_bytes - WORKSPACE_BYTES - sum(parameter.nbytes for parameter in decoder.parameters())
    fits = []
    for state in states:
        pages = sum(map(pages_for, state.contexts))
        side = arm_side_bytes(arm, shape, len(state.contexts))
        if pages * page_bytes(kv, shape) + side <= left:
            fits.append(state)
    return fits


def measure(decoder: Decoder, arm: str, states: Sequence[State], options: argparse.Namespace) -> dict:
    """State -> samples of one arm: `blocks` rounds over the states, so that a drift reaches all of them."""
    samples: dict[State, list[float]] = {state: [] for state in states}
    with quantised_weights(decoder, arm) if arm in PRODUCTS else contextlib.nullcontext():
        replay = Replay(arm, decoder, states)
        replay.time(states[0], options.heat, 1)
        for _ in range(options.blocks):
            for state in states:
                samples[state] += replay.time(state, options.samples // options.blocks, options.warmups)
        del replay
    release_memory(decoder.device)
    return samples


def state_ms(state: State, samples: Sequence[float]) -> float:
    """What a state counts with: the mean in Eq. A2, the median among heterogeneous vectors (§B.4, §B.5)."""
    return statistics.median(samples) if state.group.startswith("ragged") else statistics.fmean(samples)


def aggregates(times: Times, base: str = "bf16") -> dict[tuple[str, str], float]:
    """(arm, group) -> speedup over `base`, over the states that both have, all or none of the group's."""
    made = {}
    for arm, samples in times.items():
        for group in dict.fromkeys(state.group for state in samples):
            states = [state for state in samples if state.group == group]
            if all(state in times.get(base, {}) for state in states):
                own = [state_ms(state, samples[state]) for state in states]
                reference = [state_ms(state, times[base][state]) for state in states]
                made[arm, group] = (ragged_aggregate if group.startswith("ragged") else aggregate)(reference, own)
    return made


def rows(times: Times, whole: set[str], model: str) -> list[dict]:
    """CSV rows: each state's time; speedup, and share of KV4's throughput, of each group that was run whole."""
    made, about = [], {"experiment": "replay", "model": model}
    for arm, samples in times.items():
        for state, taken in samples.items():
            low, *_, high = statistics.quantiles(taken, n=20) if len(taken) > 1 else (taken[0], taken[0])
            given = {"metric": "decode_replay_ms", "unit": "ms", "value": state_ms(state, taken)}
            shape = f"{state.group}/{state.name}"
            made.append(result_row(**about, arm=arm, shape=shape, **given, low=low, high=high, n=len(taken)))
    for base, metric in (("bf16", "speedup_vs_bf16"), ("kv4", "retention_vs_kv4")):
        for (arm, group), value in aggregates(times, base).items():
            if group in whole and (base == "bf16" or arm.startswith("kv4rl")):
                made.append(result_row(**about, arm=arm, shape=group, metric=metric, unit="x", value=value))
            if group in whole and (arm, base) == (REPEAT, "bf16"):
                spread = 100 * abs(value - 1)
                made.append(result_row(**about, arm=arm, shape=group, metric="repeat_spread", unit="%", value=spread))
    return made


def states_of(options: argparse.Namespace) -> list[State]:
    """What the options ask for: states given by hand, or the model's part of Table A3 and of §B.5."""
    if options.shapes:
        pairs, positions = list(dict.fromkeys(parse_shapes(options.shapes))), shape_config(options.model).max_positions
        longest = max(context for _, context in pairs)
        require(longest <= positions, "shapes", options.shapes, f"at most {positions} positions, the model's")
        return [uniform("+".join(f"{batch}x{context}" for batch, context in pairs), *pair) for pair in pairs]
    require(options.model in SHAPES, "model", options.model, f"one of {', '.join(SHAPES)}, or --shapes of its own")
    size = options.model.removeprefix("qwen3-")
    known = list(dict.fromkeys(state.group for state in table_a3(size)))
    expected = f"some of {', '.join(known)}"
    require(set(options.checkpoints) <= set(known), "checkpoints", options.checkpoints, expected)
    chosen = options.checkpoints or known
    states = [state for state in table_a3(size) if state.group in chosen] if "table" in options.parts else []
    return states + (heterogeneous(size) if "ragged" in options.parts else [])


def arms_of(options: argparse.Namespace, state: State) -> Sequence[str]:
    if options.arms:
        return options.arms
    if options.device == "cpu":
        return CPU_ARMS
    return RAGGED_ARMS if state.group.startswith("ragged") else TABLE_ARMS


def require_arms(options: argparse.Namespace) -> None:
    """Raise `InputError` for an arm that this machine cannot run: nothing is measured in its place."""
    arms = list(dict.fromkeys(arm for state in states_of(options) for arm in arms_of(options, state)))
    impossible = [arm for arm in arms if arm in NEED_CUDA and options.device != "cuda"]
    require(not impossible, "arms", impossible, f"some of {', '.join(a for a in ARMS if a not in NEED_CUDA)} on a CPU")
    require_flashinfer((arm for arm in arms if baseline(arm, options.device)), options.device)


def runs_on(arm: str, device: str) -> str:
    """What decodes an arm's cache, and what multiplies where that is not the model's own product."""
    cache = "FlashInfer fa2" if baseline(arm, device) else "our kernels" if device == "cuda" else "the reference"
    return f"{arm}: {cache}" + (f", {KERNELS[arm]}" if arm in KERNELS else "")


def require_one_fits(options: argparse.Namespace, decoder: Decoder) -> None:
    """Raise `InputError` if no arm could run any state."""
    states, size = states_of(options), sum(parameter.nbytes for parameter in decoder.parameters())
    runs = ((arm, state) for state in states for arm in arms_of(options, state))
    fits = any(fitting(decoder, arm, [state], options.hbm_gb * 1e9) for arm, state in runs)
    needed = f"room for the model ({size / 1e9:.3g} GB), {WORKSPACE_BYTES / 1e9:g} GB besides and at least one state"
    require(fits, "hbm-gb", options.hbm_gb, needed)


def run(options: argparse.Namespace, decoder: Decoder, say, keep) -> Times:
    """Every arm over its states. After each arm `keep(times, whole)`: a run cut short has what it measured; `whole`:
    the groups whose states all fitted in every arm so far."""
    states, times, partial = states_of(options), {}, set()
    arms = dict.fromkeys(arm for state in states for arm in arms_of(options, state))
    say("card: " + "; ".join(runs_on(arm, options.device) for arm in arms))
    for arm in arms:
        asked = [state for state in states if arm in arms_of(options, state)]
        chosen = fitting(decoder, arm, asked, options.hbm_gb * 1e9)
        partial |= {state.group for state in set(asked) - set(chosen)}
        if not chosen:
            say(f"{arm:>12} none of {len(asked)} states fits in {options.hbm_gb:g} GB")
            continue
        times[arm] = measure(decoder, arm, chosen, options)
        speedups, shares = aggregates(times), aggregates(times, "kv4")
        for group in dict.fromkeys(state.group for state in chosen):
            taken = [state_ms(state, samples) for state, samples in times[arm].items() if state.group == group]
            against = f"{speedups[arm, group]:6.3f}x of bf16" if (arm, group) in speedups else ""
            if arm.startswith("kv4rl") and (arm, group) in shares:
                against += f"  {shares[arm, group]:6.1%} of kv4's throughput"
            say(f"{arm:>12} {group:>10} {len(taken):>3} states {sum(taken):9.3f} ms  {against}".rstrip())
        keep(times, {state.group for state in states} - partial)
    return times


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kv4rl.bench replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", default="qwen3-4b", help=f"{', '.join(SHAPES)} (random weights), or a shipped one")
    parser.add_argument("--tp", type=int, default=1, help="GPUs a model is split over: start as many with torchrun")
    parser.add_argument("--parts", nargs="+", default=["table", "ragged"], choices=("table", "ragged"))
    parser.add_argument("--checkpoints", nargs="+", default=[], help="of Table A3, e.g. 4B-300; default all")
    parser.add_argument("--arms", nargs="+", default=[], choices=tuple(ARMS), help="default: the paper's of each part")
    parser.add_argument("--shapes", nargs="+", default=[], help="batch x context instead, e.g. 640x874")
    parser.add_argument("--samples", type=int, default=90, help="a state (§B.4)")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--warmups", type=int, default=10, help="before each block of a state (§B.5)")
    heat = {"default": 150 if cuda else 0, "help": "steps of an arm before its first block; 150 on CUDA, 0 on a CPU"}
    parser.add_argument("--heat", type=int, **heat)
    parser.add_argument("--hbm-gb", type=float, default=138.0, help="memory of a GPU, GB of 1e9 bytes")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", default="replay.csv", help="CSV under data/results, or an absolute path")
    options = parser.parse_args(arguments)
    with one_sentence("kv4rl.bench replay"):
        require_counts(options, tp=1, blocks=1, warmups=0, samples=1, heat=0)
        require_ranks(options.tp)
        require_number(options.hbm_gb, "hbm-gb", 0, LARGEST, open_low=True)
        choose_device(options.device)
        whole = options.samples % options.blocks == 0
        require(whole, "samples", options.samples, f"at least one a block ({options.blocks}), as many in each")
        require_writable(options.out)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with contextlib.ExitStack() as stack:
        with one_sentence("kv4rl.bench replay"):
            require_arms(options)
            replica = stack.enter_context(tensor_parallel(options.tp, options.device))
            decoder = random_model(options.model, device=options.device, communicator=replica.communicator)
            require_one_fits(options, decoder)
        report(options, decoder, replica.leads)


def report(options: argparse.Namespace, decoder: Decoder, leads: bool) -> None:
    """Run every arm; the first rank writes rows and prints."""
    say = (lambda text: print(text, flush=True)) if leads else (lambda text: None)
    say(f"card: {options.model} tp{options.tp}, random weights at the true shape, {options.samples} samples a state")
    model = options.model if options.tp == 2 else f"{options.model}-tp{options.tp}"
    path = options.out

    def keep(times: Times, whole: set[str]) -> None:
        nonlocal path
        if leads:
            path = write_rows(options.out, rows(times, whole, model))

    times = run(options, decoder, say, keep)
    if leads:
        found = {f"{arm} {group}": round(value, 4) for (arm, group), value in aggregates(times).items()}
        say(json.dumps({"experiment": "replay", "model": model, "file": str(path), "speedup_vs_bf16": found}))


if __name__ == "__main__":
    main()
