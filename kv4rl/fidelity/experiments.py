"""The panels of Fig. 4b, 4c, A3 and A4, and ours beyond them, on a local model (`fidelity/panels.py` lists them).

    python -m kv4rl.fidelity.experiments --model mini-qwen3 --panels 4b
    python -m kv4rl.fidelity.experiments --model smollm2-135m --panels all --prompts 16

All panels share one set of histories, one prefill and every arm that they have in common, so several in one command
cost less than one by one; each row names the command of its own panel. Rows go to data/results/fidelity.csv, arm by
arm.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from kv4rl.cli import one_sentence
from kv4rl.config import require, require_integer
from kv4rl.device import choose_device
from kv4rl.fidelity.control import repeat_in_new_process
from kv4rl.fidelity.corpus import PROMPTS_FILE, History, mini_prompts, mixed_prompts, sample_histories
from kv4rl.fidelity.divergence import sampler_kl
from kv4rl.fidelity.measure import Arm, Estimate, Probe, geometric_ratio, mean_kl, reduction
from kv4rl.fidelity.panels import CORPUS, PANELS, Panel, panel
from kv4rl.model.decoder import Decoder
from kv4rl.model.weights import eos_token_ids, load_decoder, load_tokenizer
from kv4rl.results import result_row, write_rows
from kv4rl.tasks.tokenizer import build_tokenizer

FILE = "fidelity.csv"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kv4rl.fidelity.experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a directory, a name under data/models, or a hub id")
    parser.add_argument("--panels", nargs="+", required=True, choices=[*PANELS, "all"], help="which experiments")
    parser.add_argument("--prompts", type=int, default=CORPUS.prompts, help="responses, eight states each")
    parser.add_argument("--prompts-file", type=Path, default=PROMPTS_FILE, help="prompts of models that can chat")
    parser.add_argument("--seed", type=int, default=43, help="of the sampling noise, the controls and the bootstrap")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--no-control", action="store_true", help="skip the second process that must agree to the bit")
    parser.add_argument("--no-rows", action="store_true", help=f"do not write data/results/{FILE}")
    return parser.parse_args(words)


Prompts = list[tuple[str, list[int]]]


def set_up(given: argparse.Namespace) -> tuple[Decoder, Prompts, int]:
    """(model, shared prompts, response cap) as the arguments say; ValueError for those that do not fit together."""
    require_integer(given.prompts, "prompts", 1)
    require_integer(given.seed, "seed", 0)
    device = choose_device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = load_decoder(given.model, dtype=dtype, device=device).requires_grad_(False)
    prompts, cap = load_prompts(given, decoder.config.max_positions)
    longest, most = cap + max(len(tokens) for _, tokens in prompts), decoder.config.max_positions
    require(longest <= most, "prompt and response tokens", longest, f"at most the model's {most} positions")
    return decoder, prompts, cap


def load_prompts(given: argparse.Namespace, positions: int) -> tuple[Prompts, int]:
    """The shared prompts for this model, and the cap on a response to them."""
    tokenizer = load_tokenizer(given.model)
    if tokenizer.get_vocab() == build_tokenizer().get_vocab():
        prompts = mini_prompts(tokenizer, given.prompts, min_steps=CORPUS.min_steps)
        return prompts, positions - max(len(tokens) for _, tokens in prompts)
    prompts = mixed_prompts(tokenizer, given.prompts, shots=CORPUS.shots, path=given.prompts_file)
    return prompts, CORPUS.max_response_tokens


def bytes_per_position(arm: Arm, decoder: Decoder, histories: Sequence[History]) -> float:
    """Stored bytes of a position over all layers and heads, second copies of protected ones included, at full length.

    Averaged over the histories' positions; the second copies weigh more the shorter the contexts are.
    """
    shape = decoder.cache_shape()
    lengths = [len(h.prompt) + len(h.response) for h in histories]
    share = sum(min(n, arm.representation.protection.positions) for n in lengths) / sum(lengths)
    vector = arm.representation.position_bytes(shape.head_dim)
    return shape.num_layers * shape.kv_heads * (vector + share * arm.representation.protected_bytes(shape.head_dim))


class Rows:
    """Makes the rows of one panel's arms: KL, ratios to the panel's baseline, and what the arm stores."""

    def __init__(self, given: argparse.Namespace, name: str, what: Panel, probe: Probe):
        self.given, self.name, self.baseline, self.probe = given, name, what.baseline, probe
        self.reference: np.ndarray | None = None  # the baseline's KL

    def of(self, arm: Arm) -> list[dict]:
        """Measure `arm` and return its rows; the baseline comes first, what follows is compared with it."""
        kl, seed = self.probe.kl(arm), self.given.seed
        rows = [self._row(arm.name, "sampler_kl", "nats", mean_kl(kl, seed=seed))]
        if arm.name == self.baseline:
            self.reference = kl
        elif self.reference is not None:
            ratios = {"kl_reduction": (reduction, "x"), "kl_geometric_ratio": (geometric_ratio, "ratio")}
            for metric, (statistic, unit) in ratios.items():
                estimate = statistic(kl, self.reference, seed=seed)
                rows.append(self._row(arm.name, f"{metric}_vs_{self.baseline}", unit, estimate))
        decoder, histories = self.probe.decoder, self.probe.histories
        bits = arm.representation.bits_per_element(decoder.config.head_dim)
        rows.append(self._row(arm.name, "bits_per_element", "bits", Estimate(bits, bits, bits)))
        size = bytes_per_position(arm, decoder, histories)
        return [*rows, self._row(arm.name, "bytes_per_position", "bytes", Estimate(size, size, size))]

    def control(self, largest: float, states: int) -> dict:
        """The row of the control: the largest KL of a state between two processes' references."""
        return self._row("bf16", "control_kl", "nats", Estimate(largest, "", "")) | {"n": states}

    def _row(self, arm: str, metric: str, unit: str, estimate: Estimate) -> dict:
        given, histories = self.given, self.probe.histories
        command = f"python -m kv4rl.fidelity.experiments --model {given.model} --panels {self.name}"
        for flag, default in (("prompts", CORPUS.prompts), ("seed", 43)):
            if getattr(given, flag) != default:
                command += f" --{flag} {getattr(given, flag)}"
        return result_row(
            experiment="fidelity", arm=arm, model=Path(given.model).name, shape=self.name, metric=metric, unit=unit,
            value=estimate.value, low=estimate.low, high=estimate.high, n=8 * len(histories), command=command,
        )  # fmt: skip


def run_control(given: argparse.Namespace, probe: Probe, say: Callable[[str], None]) -> tuple[float, int]:
    """(largest KL of a state, states) of a second process that repeats the reference; 0 if the control holds."""
    again = repeat_in_new_process(given.model, probe.histories, probe.decoder, backend="auto", way=probe.way)
    kl = sampler_kl(probe.reference, again)
    same = "bit-identical" if torch.equal(probe.reference, again) else "NOT bit-identical"
    say(f"control: a second process gives {same} reference logits; KL at most {kl.max():.2g} over {kl.numel()} states")
    return float(kl.max()), kl.numel()


def run_panel(rows: Rows, arms: Sequence[Arm], say: Callable[[str], None], save: Callable[[list], None]) -> list[dict]:
    """Measure a panel's arms one by one, each saved at once; returns all rows."""
    made = []
    for arm in arms:
        new = rows.of(arm)
        kl = new[0]
        say(f"{rows.name:8}{arm.name:22}{kl['value']:.3e} [{kl['low']:.3e}, {kl['high']:.3e}] nats")
        save(new)
        made += new
    return made


def main(words: Sequence[str] | None = None) -> list[dict]:
    """Run the command; returns the rows."""
    given = parse_arguments(words)
    with one_sentence("kv4rl.fidelity.experiments"):
        decoder, prompts, cap = set_up(given)
        stops = eos_token_ids(given.model)
    start = time.perf_counter()

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - start:7.1f} s] {what}", flush=True)

    def save(rows: list[dict]) -> None:
        if not given.no_rows:
            write_rows(FILE, rows)

    say("sampling one unquantised response per prompt")
    histories = sample_histories(decoder, prompts, eos_token_ids=stops, max_response_tokens=cap, seed=given.seed)
    contexts = sorted(len(h.prompt) + len(h.response) for h in histories)
    say(f"{len(histories)} responses; contexts end at {contexts[0]} … {contexts[-1]} tokens")
    chosen = {name: panel(name) for name in (PANELS if "all" in given.panels else given.panels)}
    arms = {name: what.arms(decoder.config.head_dim) for name, what in chosen.items()}
    by_attention = any(arm.representation.protection.select == "attention" for each in arms.values() for arm in each)
    probe = Probe(decoder, histories, with_attention=by_attention, seed=given.seed)
    say("prefilled; reference at hand")
    writers = {name: Rows(given, name, what, probe) for name, what in chosen.items()}
    made = [row for name in chosen for row in run_panel(writers[name], arms[name], say, save)]
    if not given.no_control:
        largest, states = run_control(given, probe, say)
        controls = [writer.control(largest, states) for writer in writers.values()]
        save(controls)
        made += controls
    say("done")
    return made


if __name__ == "__main__":
    main()
