"""Shared-prefix sampler KL (Eq. 5.2) of KV cache precisions on a local model, by the protocol of §B.5.

    python -m kv4rl.fidelity --model smollm2-135m --precisions kv8 kv4 kv4rl
    python -m kv4rl.fidelity --model smollm2-135m --preset loop

It forces every token through the engine's own cache, on any of its backends, or with `--way batched` through the same
arithmetic in one pass a layer, which takes a CPU a fraction of the time. Prints a table and puts its rows into
data/results/fidelity.csv. The paper's figures, and arms that the engine has no cache for, are
`python -m kv4rl.fidelity.experiments`.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kv4rl.attention.backends import BackendUnavailable, choose_backend
from kv4rl.cache.main_cache import MainCache
from kv4rl.cli import one_sentence
from kv4rl.config import PAGE_TOKENS, InputError, KVConfig, require, require_protected_fits
from kv4rl.device import choose_device
from kv4rl.fidelity.control import repeat_in_new_process
from kv4rl.fidelity.corpus import PROMPTS_FILE, mini_prompts, sample_histories, text_prompts
from kv4rl.fidelity.divergence import sampler_kl
from kv4rl.fidelity.measure import WAYS, Arm, Estimate, geometric_ratio, make_arm, mean_kl, measure_kl, reduction
from kv4rl.model.decoder import Decoder
from kv4rl.model.weights import eos_token_ids, load_decoder, load_tokenizer
from kv4rl.results import result_row, write_rows
from kv4rl.tasks.tokenizer import build_tokenizer

FILE = "fidelity.csv"


@dataclass(frozen=True)
class Preset:
    """Sizes of a run; its name is the rows' `shape`."""

    prompts: int
    shots: int  # solved examples before each question of the prompts file
    max_response_tokens: int
    min_steps: int  # of the mini task's problems, nine tokens each


PRESETS = {
    "short": Preset(prompts=32, shots=0, max_response_tokens=256, min_steps=20),  # 256 states (§B.5), short contexts
    "loop": Preset(prompts=8, shots=3, max_response_tokens=64, min_steps=32),  # contexts of 300 tokens and more
}


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory, a name under data/models, or a hub id")
    parser.add_argument("--precisions", nargs="+", default=["kv8", "kv4rl", "kv4"], help="arms beside the reference")
    parser.add_argument("--preset", choices=PRESETS, default="short")
    parser.add_argument("--sink", type=int, default=KVConfig.sink_tokens, help="s, positions protected at the start")
    parser.add_argument("--recent", type=int, default=KVConfig.recent_tokens, help="w, most recent positions protected")
    parser.add_argument("--prompts-file", type=Path, default=PROMPTS_FILE, help="prompts of models that can chat")
    parser.add_argument("--seed", type=int, default=43, help="of the sampling noise and of the bootstrap")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--way", choices=WAYS, default="engine", help="step by step in the engine's cache, or batched")
    parser.add_argument("--no-control", action="store_true", help="skip the second process that must agree to the bit")
    parser.add_argument("--no-rows", action="store_true", help=f"do not write data/results/{FILE}")
    return parser.parse_args(words)


Prompts = list[tuple[str, list[int]]]


def set_up(given: argparse.Namespace) -> tuple[list[Arm], Decoder, Prompts, int]:
    """(arms, model, prompts, response cap) as the arguments say; ValueError for those that do not fit together."""
    arms = [make_arm(name, sink_tokens=given.sink, recent_tokens=given.recent) for name in given.precisions]
    require("bf16" not in given.precisions, "precisions", given.precisions, "no bf16: the reference")
    require(len({arm.name for arm in arms}) == len(arms), "precisions", given.precisions, "each once")
    device = choose_device(given.device)
    choose_backend(given.backend, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = load_decoder(given.model, dtype=dtype, device=device).requires_grad_(False)
    positions = decoder.config.max_positions
    for arm in arms:
        require_protected_fits(arm.kv, positions)
    prompts, cap = load_prompts(given, positions)
    longest = cap + max(len(tokens) for _, tokens in prompts)
    require(longest <= positions, "prompt and response tokens", longest, f"at most the model's {positions} positions")
    return arms, decoder, prompts, cap


def load_prompts(given: argparse.Namespace, positions: int) -> tuple[Prompts, int]:
    """The preset's prompts for this model, and the cap on a response to them."""
    preset, tokenizer = PRESETS[given.preset], load_tokenizer(given.model)
    if tokenizer.get_vocab() == build_tokenizer().get_vocab():
        prompts = mini_prompts(tokenizer, preset.prompts, min_steps=preset.min_steps)
        return prompts, positions - max(len(tokens) for _, tokens in prompts)
    prompts = text_prompts(tokenizer, preset.prompts, shots=preset.shots, path=given.prompts_file)
    return prompts, preset.max_response_tokens


def bits_per_element(kv: KVConfig, decoder: Decoder) -> float:
    """Stored bits per key or value element, counted from the main cache's bytes."""
    shape = decoder.cache_shape()
    sizes = {"num_layers": 1, "num_pages": 1, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    page = MainCache(kv, **sizes, dtype=shape.dtype, device="cpu")
    return page.nbytes * 8 / (2 * PAGE_TOKENS * shape.kv_heads * shape.head_dim)


def make_rows(
    kl: dict[str, np.ndarray], arms: Sequence[Arm], decoder: Decoder, *, model: str, shape: str, seed: int
) -> list[dict]:
    """Rows of fidelity.csv: mean KL and stored bits of each arm, and how much smaller than kv4's its KL is."""
    rows = []

    def add(arm: str, metric: str, unit: str, estimate: Estimate) -> None:
        bounds = {"low": estimate.low, "high": estimate.high, "n": next(iter(kl.values())).size}
        common = {"experiment": "fidelity", "model": model, "shape": shape}
        rows.append(result_row(arm=arm, metric=metric, unit=unit, value=estimate.value, **bounds, **common))

    for arm in arms:
        add(arm.name, "sampler_kl", "nats", mean_kl(kl[arm.name], seed=seed))
        if "kv4" in kl and arm.name != "kv4":
            add(arm.name, "kl_reduction_vs_kv4", "x", reduction(kl[arm.name], kl["kv4"], seed=seed))
            add(arm.name, "kl_geometric_ratio_vs_kv4", "ratio", geometric_ratio(kl[arm.name], kl["kv4"], seed=seed))
        bits = bits_per_element(arm.kv, decoder)
        add(arm.name, "bits_per_element", "bits", Estimate(bits, bits, bits))
    return rows


def control_row(given: argparse.Namespace, histories, decoder: Decoder, reference: torch.Tensor) -> dict:
    """Run the control, say what came of it, and return its row: the largest KL of a state, 0 if the control holds."""
    again = repeat_in_new_process(given.model, histories, decoder, backend=given.backend, way=given.way)
    kl = sampler_kl(reference, again)
    same = "bit-identical" if torch.equal(reference, again) else "NOT bit-identical"
    print(
        f"control: a second process gives {same} reference logits; KL at most {kl.max():.2g} over {kl.numel()} states"
    )
    common = {"experiment": "fidelity", "model": Path(given.model).name, "shape": given.preset}
    return result_row(arm="bf16", metric="control_kl", unit="nats", value=float(kl.max()), n=kl.numel(), **common)


def print_table(rows: Sequence[dict]) -> None:
    print(f"\n{'arm':12}{'metric':28}{'value':>12}{'low':>12}{'high':>12}  unit")
    for row in rows:
        low, high = (f"{row[name]:12.4g}" if row[name] != "" else " " * 12 for name in ("low", "high"))
        print(f"{row['arm']:12}{row['metric']:28}{row['value']:12.4g}{low}{high}  {row['unit']}")


def main(words: Sequence[str] | None = None) -> list[dict]:
    """Run the command; returns the rows."""
    given = parse_arguments(words)
    with one_sentence("kv4rl.fidelity", kinds=(InputError, OSError, BackendUnavailable)):
        arms, decoder, prompts, cap = set_up(given)
        stops = eos_token_ids(given.model)
    start = time.perf_counter()

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {what}", flush=True)

    say("sampling one unquantised response per prompt")
    histories = sample_histories(
        decoder, prompts, eos_token_ids=stops, max_response_tokens=cap, seed=given.seed, backend=given.backend
    )
    contexts = [(len(h.prompt), len(h.prompt) + len(h.response)) for h in histories]
    say(f"{len(histories)} responses; contexts {min(a for a, _ in contexts)} … {max(b for _, b in contexts)} tokens")
    kl, reference = measure_kl(
        decoder, histories, arms, way=given.way, backend=given.backend, report=lambda arm: say(f"forcing {arm}")
    )
    rows = make_rows(kl, arms, decoder, model=Path(given.model).name, shape=given.preset, seed=given.seed)
    if not given.no_control:
        say("control")
        rows.append(control_row(given, histories, decoder, reference))
    print_table(rows)
    say("done" if given.no_rows else f"rows in {write_rows(FILE, rows)}")
    return rows


if __name__ == "__main__":
    main()
