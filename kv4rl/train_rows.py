"""A training run as rows of `data/results/train.csv`; `kv4rl.learning` reads them back.

`python -m kv4rl.train_rows --preset mini --kv.precision kv4rl` trains (or resumes, or finds finished) the run those
flags describe, judges the starting model and the last policy with the common unquantised evaluator and writes the
rows. `python -m kv4rl.train_rows start --preset mini` judges the starting model alone; its row, arm `start`, is the
same for every precision. `--out FILE` writes elsewhere.

Rewards at the ends of a run are means over `FIRST` and `LAST` updates: one update has 64 responses at the mini preset,
so a single one moves by a few hundredths from sampling alone.
"""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch

from kv4rl.cli import one_sentence
from kv4rl.config import KVConfig, TrainConfig, require
from kv4rl.device import choose_device
from kv4rl.disk import NotWritten
from kv4rl.engine.engine import RolloutEngine
from kv4rl.evaluation.evaluate import evaluate
from kv4rl.model.weights import eos_token_ids, load_decoder, load_tokenizer, resolve
from kv4rl.presets import parse_config, preset
from kv4rl.results import hardware, read_rows, result_row, write_rows
from kv4rl.rewards.grader import Grader
from kv4rl.tasks.datasets import MADE, held_out_stream
from kv4rl.tasks.stream import take
from kv4rl.train import train
from kv4rl.trainer import evaluation_sampling

FIRST, LAST = 3, 5
FILE = "train.csv"
START = "start"  # the arm of the model before any update
UNNAMED = (  # fields that do not name a run: the arm and the model stand in columns, the rest decides no update
    "model", "output_dir", "seed", "device", "evaluate_", "checkpoint_every", "keep_checkpoints", "memory",
    "tensor_parallel",
    "kv.precision", "rollout.seed",
)  # fmt: skip

# metric of the rows -> (name in metrics.jsonl, unit)
CURVES = {
    "reward": ("critic/score/mean", "fraction"),
    "response_tokens": ("response_length/mean", "tokens"),
    "reference_kl": ("actor/kl_loss", "nats"),
    "sampler_mismatch": ("rollout_corr/k3_kl", "nats"),
}


def record_run(
    config: TrainConfig, lines: Sequence[Mapping], accuracy: Mapping, *, before: Mapping | None = None,
    command: str | None = None, file: str | Path = FILE,
) -> Path:  # fmt: skip
    """Write one finished run into `file`: a row per end and mean, and one per update and curve.

    Args: lines: its metrics, one mapping an update, in order; accuracy: of the last policy under the common BF16
    evaluator: `value`, `low`, `high`, `n`; before: of the model it started from, likewise.

    Raises ValueError if the run is shorter than `FIRST + LAST` updates.
    """
    require(len(lines) >= FIRST + LAST, "updates", len(lines), f"at least {FIRST + LAST} for rows of a run")
    seed = run_shape(config)
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
    return write_rows(file, rows, drop=lambda row: same(row) and row["shape"].startswith(f"{seed}@"))


def start_row(config: TrainConfig, accuracy: Mapping, *, command: str | None = None) -> dict:
    """The row of the model that a run starts from: `accuracy` of arm `start`, of no precision and no setting."""
    shape = run_shape(config).split("/")[0]
    return result_row(
        experiment="train", arm=START, model=Path(config.model).name, shape=shape, metric="accuracy",
        unit="fraction", command=command, **accuracy,
    )  # fmt: skip


def run_shape(config: TrainConfig) -> str:
    """A run as the rows name it: its seeds, and what it sets otherwise than its model's preset (`usual`).

    `seed43` is that preset; `seed1/updates=30,grpo.learning_rate=0.0003` differs in two settings. Where its files go,
    its precision (the arm) and how it is evaluated on the way are no part of it.
    """
    seeds = f"seed{config.seed}" + ("" if config.rollout.seed == config.seed else f"-{config.rollout.seed}")
    usually = dict(_fields(usual(config.model)))
    differing = [f"{name}={value}" for name, value in _fields(config) if value != usually[name]]
    return "/".join([seeds, ",".join(differing)]) if differing else seeds


def usual(model: str) -> TrainConfig:
    """The preset that rows of a model are told apart from."""
    return preset("smollm2" if Path(model).name == preset("smollm2").model else "mini")


def _fields(config, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted name and value of every field that decides what a run learns."""
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{name}.")
        elif not name.startswith(UNNAMED):
            yield name, value


def require_recordable(config: TrainConfig) -> None:
    """ValueError, before anything is trained, for a run whose rows are not defined."""
    require(config.tasks in MADE, "tasks", config.tasks, f"one of {', '.join(MADE)}: rows of others are not defined")
    require(config.updates >= FIRST + LAST, "updates", config.updates, f"at least {FIRST + LAST} for rows of a run")


def judge(model_dir: Path, config: TrainConfig, *, prompts: int = 128, samples: int = 4) -> dict[str, float]:
    """Accuracy (avg@k) of a policy on held-out problems of its tasks through the unquantised cache (§B.2).

    The same problems and the same noise for every policy, so that precisions compare in pairs. Returns `value`, its
    95 % interval over problems and `n` samples.
    """
    device = choose_device(config.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer = load_tokenizer(model_dir)
    limit = config.rollout.max_prompt_tokens
    stream = held_out_stream(config.tasks, tokenizer, seed=config.seed, max_prompt_tokens=limit)
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
    options, flags = _split(arguments[only_start:])
    config = parse_config(flags, program=program)
    with one_sentence(program):
        require_recordable(config)
        model = resolve(config.model)
    words = [START, *flags] if only_start else flags
    command = shlex.join(["python", "-m", program, *words])  # writes to data/results, wherever this one does
    shape = run_shape(config).split("/")[0] if only_start else run_shape(config)
    if only_start:
        path = write_rows(options.out, [start_row(config, judge(model, config), command=command)])
    else:
        with one_sentence(program, kinds=(NotWritten,), status=1):
            result = train(config, report=print, setup=one_sentence(program))
        lines = [line for line in result.metrics if line["update"] > 0]
        before = None if options.without_start else judge(model, config)
        given = {"before": before, "command": command, "file": options.out}
        path = record_run(config, lines, judge(result.model_dir, config), **given)
    arm = START if only_start else config.kv.precision
    for row in read_rows(path, experiment="train", arm=arm, shape=shape):
        print(f"{row['arm']} {row['shape']} {row['metric']} {row['value']} {row['unit']}")
    print(f"rows in {path}")


def _split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What says where rows go, and the flags of the run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", default=FILE)  # CSV under data/results, or an absolute path
    parser.add_argument("--without-start", action="store_true")  # the starting model has its row already
    return parser.parse_known_args(arguments)


if __name__ == "__main__":
    main()
