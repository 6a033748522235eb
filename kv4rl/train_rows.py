"""A training run as rows of `data/results/train.csv`, and the curves read back from them.

`python -m kv4rl.train_rows --preset mini --kv.precision kv4rl` trains (or resumes, or finds finished) the run those
flags describe, judges the starting model and the last policy with the common unquantised evaluator and writes the
rows. `python -m kv4rl.train_rows start --preset mini` judges the starting model alone; its row, arm `start`, is the
same for every precision.

Rewards at the ends of a run are means over `FIRST` and `LAST` updates: one update has 64 responses at the mini preset,
so a single one moves by a few hundredths from sampling alone.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch

from kv4rl.cli import one_sentence
from kv4rl.config import PRECISIONS, KVConfig, TrainConfig, require
from kv4rl.device import choose_device
from kv4rl.engine.engine import RolloutEngine
from kv4rl.evaluation.evaluate import evaluate
from kv4rl.model.weights import eos_token_ids, load_decoder, load_tokenizer, resolve
from kv4rl.presets import parse_config
from kv4rl.results import RESULTS, hardware, latest, read_rows, result_row, write_rows
from kv4rl.rewards.grader import Grader
from kv4rl.tasks.stream import MiniStream, take
from kv4rl.train import train
from kv4rl.trainer import evaluation_sampling

FIRST, LAST = 3, 5
FILE = "train.csv"
START = "start"  # the arm of the model before any update

# metric of the rows -> (name in metrics.jsonl, unit)
CURVES = {
    "reward": ("critic/score/mean", "fraction"),
    "response_tokens": ("response_length/mean", "tokens"),
    "reference_kl": ("actor/kl_loss", "nats"),
    "sampler_mismatch": ("rollout_corr/k3_kl", "nats"),
}


def record_run(
    config: TrainConfig, lines: Sequence[Mapping], accuracy: Mapping, *, before: Mapping | None = None,
    command: str | None = None,
) -> Path:  # fmt: skip
    """Write one finished run: a row per end and mean, and one per update and curve.

    Args: lines: its metrics, one mapping an update, in order; accuracy: of the last policy under the common BF16
    evaluator: `value`, `low`, `high`, `n`; before: of the model it started from, likewise.

    Raises ValueError if the run is shorter than `FIRST + LAST` updates.
    """
    require(len(lines) >= FIRST + LAST, "updates", len(lines), f"at least {FIRST + LAST} for rows of a run")
    seed = _shape(config)
    common = {"arm": config.kv.precision, "model": Path(config.model).name, "command": command}
    series = {metric: [line[name] for line in lines] for metric, (name, _) in CURVES.items()}
    ends = {
        "reward_first": (fmean(series["reward"][:FIRST]), "fraction", FIRST),
        "reward_last": (fmean(series["reward"][-LAST:]), "fraction", LAST),
        "response_tokens": (fmean(series["response_tokens"]), "tokens", len(lines)),
        "reference_kl": (fmean(series["reference_kl"][-LAST:]), "nats", LAST),
        "sampler_mismatch": (fmean(series["sampler_mismatch"]), "nats", len(lines)),
    }
    rows = [
        result_row(experiment="train", shape=seed, metric=metric, unit=unit, value=value, n=n, **common)
        for metric, (value, unit, n) in ends.items()
    ]
    rows.append(result_row(experiment="train", shape=seed, metric="accuracy", unit="fraction", **accuracy, **common))
    for metric, values in series.items():
        for update, value in enumerate(values, start=1):
            shape, unit = f"{seed}@{update}", CURVES[metric][1]
            rows.append(
                result_row(experiment="curve", shape=shape, metric=metric, unit=unit, value=float(value), **common)
            )
    if before is not None:
        rows.append(start_row(config, before, command=command))
    mine = ("curve", config.kv.precision, Path(config.model).name, hardware())
    same = lambda row: (row["experiment"], row["arm"], row["model"], row["hardware"]) == mine
    return write_rows(FILE, rows, drop=lambda row: same(row) and row["shape"].startswith(f"{seed}@"))


def start_row(config: TrainConfig, accuracy: Mapping, *, command: str | None = None) -> dict:
    """The row of the model that a run starts from: `accuracy` of arm `start`, of no precision."""
    return result_row(
        experiment="train", arm=START, model=Path(config.model).name, shape=_shape(config), metric="accuracy",
        unit="fraction", command=command, **accuracy,
    )  # fmt: skip


def _shape(config: TrainConfig) -> str:
    """The seeds of a run, as the rows name it."""
    return f"seed{config.seed}" + ("" if config.rollout.seed == config.seed else f"-{config.rollout.seed}")


def read_curves(*, model: str = "mini-qwen3", directory: Path = RESULTS) -> dict[str, list[dict[str, float]]]:
    """precision -> one dict an update, named as in metrics.jsonl, of its newest run; {} without the file."""
    if not (directory / FILE).exists():
        return {}
    rows = read_rows(directory / FILE, experiment="curve", model=model)
    runs = {}
    for precision in PRECISIONS:
        mine = [row for row in rows if row["arm"] == precision]
        if not mine:
            continue
        newest = latest(mine)
        same = ("hardware", "date")
        seed = newest["shape"].split("@")[0]
        mine = [r for r in mine if r["shape"].startswith(f"{seed}@") and all(r[name] == newest[name] for name in same)]
        lines: dict[int, dict[str, float]] = {}
        for row in mine:
            update = int(re.search(r"@(\d+)$", row["shape"]).group(1))
            lines.setdefault(update, {})[CURVES[row["metric"]][0]] = float(row["value"])
        runs[precision] = [lines[update] for update in sorted(lines)]
    return runs


def summary(*, model: str = "mini-qwen3", directory: Path = RESULTS) -> list[dict[str, str]]:
    """One dict a precision, from the newest rows: rewards at both ends, accuracy, length, k3, mismatch, hardware.

    `accuracy_before` is the starting model's on the same problems, "-" without its row.
    """
    if not (directory / FILE).exists():
        return []
    rows = read_rows(directory / FILE, experiment="train", model=model)
    starts = [row for row in rows if row["arm"] == START]
    before = f"{float(latest(starts)['value']):.3g}" if starts else "-"
    ends, names = ("reward_first", "reward_last"), ("accuracy", "response_tokens", "reference_kl", "sampler_mismatch")
    lines = []
    for precision in PRECISIONS:
        mine = [row for row in rows if row["arm"] == precision]
        if not mine:
            continue
        cells = {name: latest(row for row in mine if row["metric"] == name) for name in (*ends, *names)}
        values = {name: f"{float(row['value']):.3g}" for name, row in cells.items()}
        first = {name: values[name] for name in ends}
        rest = {name: values[name] for name in names}
        hardware_of = cells["reward_last"]["hardware"]
        lines.append({"precision": precision, **first, "accuracy_before": before, **rest, "hardware": hardware_of})
    return lines


def require_recordable(config: TrainConfig) -> None:
    """ValueError, before anything is trained, for a run whose rows are not defined."""
    require(config.tasks == "mini", "tasks", config.tasks, '"mini": rows of other tasks are not defined')
    require(config.updates >= FIRST + LAST, "updates", config.updates, f"at least {FIRST + LAST} for rows of a run")


def judge(model_dir: Path, config: TrainConfig, *, prompts: int = 128, samples: int = 4) -> dict[str, float]:
    """Accuracy (avg@k) of a mini-task policy on held-out problems through the unquantised cache (§B.2).

    The same problems and the same noise for every policy, so that precisions compare in pairs. Returns `value`, its
    95 % interval over problems and `n` samples.
    """
    device = choose_device(config.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer = load_tokenizer(model_dir)
    stream = MiniStream(config.seed, split="evaluation", tokenizer=tokenizer)
    decoder = load_decoder(model_dir, dtype=dtype, device=device)
    engine = RolloutEngine(decoder, KVConfig("bf16"), config.rollout, eos_token_ids=eos_token_ids(model_dir))
    with Grader() as grader:
        result = evaluate(
            engine, tokenizer, take(stream, prompts), samples=samples, sampling=evaluation_sampling(config),
            grader=grader,
        )  # fmt: skip
    return result.accuracy(config.reading)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the flags say, judge, write rows, print them; with `start` in front, judge the starting model alone."""
    program, arguments = "kv4rl.train_rows", list(sys.argv[1:] if arguments is None else arguments)
    only_start = arguments[:1] == [START]
    config = parse_config(arguments[only_start:], program=program)
    with one_sentence(program):
        require_recordable(config)
        model = resolve(config.model)
    if only_start:
        path = write_rows(FILE, [start_row(config, judge(model, config))])
    else:
        result = train(config, report=print, setup=one_sentence(program))
        lines = [line for line in result.metrics if line["update"] > 0]
        path = record_run(config, lines, judge(result.model_dir, config), before=judge(model, config))
    for line in summary(model=Path(config.model).name):
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    print(f"rows in {path}")


if __name__ == "__main__":
    main()
