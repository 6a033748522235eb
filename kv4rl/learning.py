"""What the training runs in data/results/train.csv show: means over seeds, their intervals, and a plain verdict.

    python -m kv4rl.learning          # prints it
    python -m kv4rl.learning --save   # and keeps differences to BF16 as rows, which `compare` shows

Runs are compared within one setting and one machine. Precisions are paired by seed: equal seeds have equal prompts and
sampling noise, so their difference is less noisy than either score. Intervals are Student's t, 95 %, over seeds.
"""

import argparse
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kv4rl.cli import one_sentence
from kv4rl.config import PRECISIONS, require
from kv4rl.evaluation.metrics import t_95
from kv4rl.results import RESULTS, latest, read_rows, result_row, write_rows
from kv4rl.train_rows import CURVES, FILE, START, usual
from kv4rl.viz.names import PRECISION_NAMES

SHAPE = re.compile(r"([^/@]+)(?:/([a-z_0-9.]+=[^@]*))?(?:@(\d+))?")
SCORES = ("reward_last", "accuracy")  # what "falls behind" is judged by, each by itself


@dataclass
class Run:
    """One training run, as its rows tell it."""

    ends: dict[str, float] = field(default_factory=dict)  # metric -> value
    curve: dict[int, dict[str, float]] = field(default_factory=dict)  # update -> metric as in metrics.jsonl -> value
    row: Mapping[str, str] = field(default_factory=dict)  # one of its rows: hardware, date, commit, command

    @property
    def lines(self) -> list[dict[str, float]]:
        """One dict an update, named as in metrics.jsonl, in order."""
        return [self.curve[update] for update in sorted(self.curve)]


Setting = dict[str, dict[str, Run]]  # precision -> seed -> run


@dataclass(frozen=True)
class Band:
    """Mean over seeds and its 95 % interval; of one seed both ends are NaN: it shows no spread."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.3g}" + (f" [{self.low:.3g}, {self.high:.3g}]" if self.seeds > 1 else "")


def band(values: Iterable[float]) -> Band:
    """Student's t interval of the mean over seeds. Raises ValueError without values."""
    values = np.asarray(list(values), dtype=float)
    require(len(values) > 0, "values", len(values), "one or more")
    mean = float(values.mean())
    if len(values) == 1:
        return Band(mean, math.nan, math.nan, 1)
    half = t_95(len(values)) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Band(mean, mean - half, mean + half, len(values))


def read_runs(*, model: str = "mini-qwen3", directory: Path = RESULTS, file: str | Path = FILE) -> dict[str, Setting]:
    """Setting -> precision -> seed -> run, in file order; {} without the file.

    A setting is what a run's `shape` says behind its seed, "" for the model's preset. Of a setting that was run on
    several machines the one with the most runs counts, then the one with the newest, then the later in the file.
    """
    path = directory / file
    rows = read_rows(path.resolve(), model=model) if path.exists() else []
    machines: dict[str, dict[str, Setting]] = {}
    for row in rows:
        if row["experiment"] in ("train", "curve") and row["arm"] in PRECISIONS:
            seed, setting, update = _parts(row)
            found = machines.setdefault(setting, {}).setdefault(row["hardware"], {})
            run = found.setdefault(row["arm"], {}).setdefault(seed, Run())
            run.row = row
            if update is None:
                run.ends[row["metric"]] = _number(row)
            else:
                known = f"one of {', '.join(CURVES)} of an update"
                require(row["metric"] in CURVES, "metric", row["metric"], known)
                run.curve.setdefault(update, {})[CURVES[row["metric"]][0]] = _number(row)
    # max keeps the first of equals, so the later machines go first.
    chosen = {setting: max(reversed(by_machine.values()), key=_weight) for setting, by_machine in machines.items()}
    return {setting: {p: runs[p] for p in PRECISIONS if p in runs} for setting, runs in chosen.items()}


def _parts(row: Mapping[str, str]) -> tuple[str, str, int | None]:
    """Of shape `seed1/updates=30@7`: "seed1", "updates=30", 7."""
    found = SHAPE.fullmatch(row["shape"])
    expected = "as seed1/updates=30@7: a seed, what is not the preset's, an update"
    require(found is not None, "shape", row["shape"], expected)
    seed, setting, update = found.groups()
    return seed, setting or "", int(update) if update else None


def _number(row: Mapping[str, str]) -> float:
    """The value of a row, which a cut file may lack."""
    try:
        value = float(row["value"])
    except (TypeError, ValueError):
        value = math.nan
    where = f"value of {row['arm']} {row['shape']} {row['metric']}"
    require(math.isfinite(value), where, row["value"], "a finite number")
    return value


def _weight(setting: Setting) -> tuple[int, str]:
    runs = [run for by_seed in setting.values() for run in by_seed.values()]
    return len(runs), max(run.row["date"] for run in runs)


def main_setting(settings: Mapping[str, Setting]) -> str:
    """The preset's own setting if it was run, else the one with the most runs, the newest of several.

    Raises ValueError without any.
    """
    require(bool(settings), "settings", list(settings), "at least one; `python -m kv4rl.sweep` makes them")
    return "" if "" in settings else max(settings, key=lambda name: _weight(settings[name]))


def describe(setting: str, *, model: str = "mini-qwen3") -> str:
    """A model's setting in words: collector, learning rate, updates, and whatever else is not its preset's."""
    preset = usual(model)
    values = {
        "rollout.collector": preset.rollout.collector, "grpo.learning_rate": preset.grpo.learning_rate,
        "updates": preset.updates,
    }  # fmt: skip
    values |= dict(part.split("=", 1) for part in re.split(r",(?=[a-z_.]+=)", setting) if part)
    collector, rate, updates = (values.pop(name) for name in ("rollout.collector", "grpo.learning_rate", "updates"))
    rest = "".join(f", {name}={value}" for name, value in values.items())
    return f"{collector} collection, learning rate {float(rate):g}, {updates} updates{rest}"


def summary(setting: Setting) -> list[dict[str, str]]:
    """One dict a precision: seeds, and mean with interval of each end, from runs that have it."""
    lines = []
    for precision, runs in setting.items():
        metrics = dict.fromkeys(metric for run in runs.values() for metric in run.ends)
        cells = {m: str(band(run.ends[m] for run in runs.values() if m in run.ends)) for m in metrics}
        lines.append({"precision": precision, "seeds": str(len(runs))} | cells)
    return lines


def paired(setting: Setting, metric: str, precision: str, base: str = "bf16") -> Band | None:
    """Difference `precision` - `base` over the seeds that both have; None without any."""
    mine, theirs = setting.get(precision, {}), setting.get(base, {})
    both = [seed for seed in mine if metric in mine[seed].ends and metric in theirs.get(seed, Run()).ends]
    return band(mine[seed].ends[metric] - theirs[seed].ends[metric] for seed in both) if both else None


def differences(setting: Setting) -> list[dict[str, str]]:
    """Paired differences to BF16 by precision and score, and KV4-RL's to KV4, each with what it shows."""
    pairs = [(precision, "bf16") for precision in setting if precision != "bf16"] + [("kv4rl", "kv4")]
    lines = []
    for precision, base in pairs:
        for metric in SCORES:
            difference = paired(setting, metric, precision, base)
            if difference is not None:
                pair = f"{PRECISION_NAMES[precision]} - {PRECISION_NAMES[base]}"
                lines.append({"pair": pair, "score": metric, "difference": str(difference), "shows": shows(difference)})
    return lines


def shows(difference: Band) -> str:
    """What the interval of a paired difference says, and no more than that."""
    if difference.seeds < 2:
        return "nothing: one seed"
    if difference.high < 0:
        return "behind"
    return "ahead" if difference.low > 0 else "no difference"


PHRASES = {"behind": "falls behind", "ahead": "ends ahead of", "no difference": "is not shown to differ from"}


def verdict(setting: Setting) -> str:
    """One sentence: whether KV4 falls behind BF16 and whether KV4-RL does, by score, from the paired intervals."""
    said = []
    for metric in SCORES:
        found = {precision: paired(setting, metric, precision) for precision in ("kv4", "kv4rl")}
        if any(difference is None or difference.seeds < 2 for difference in found.values()):
            return "not shown: it takes two seeds or more of BF16, KV4 and KV4-RL"
        parts = [
            f"{PRECISION_NAMES[name]} {PHRASES[shows(difference)]} BF16 ({difference.mean:+.3f} "
            f"[{difference.low:+.3f}, {difference.high:+.3f}])"
            for name, difference in found.items()
        ]
        said.append(f"{metric}, {found['kv4'].seeds} seeds: {', '.join(parts)}")
    return "; ".join(said)


def deficit_rows(path: Path) -> list[dict[str, str]]:
    """Rows of every model's main setting: by how much each precision's runs end below BF16's, paired, in `SCORES`.

    Experiment `learning`, metric `deficit_accuracy` or `deficit_reward_last`, shape the setting; low and high are the
    95 % interval over n seeds. They carry the machine and the commit of the runs. Empty where there is one seed.
    """
    rows = []
    for model in models(path):
        settings = read_runs(model=model, file=path)
        name = main_setting(settings)
        for precision in settings[name].keys() - {"bf16"}:
            rows += _deficits(settings[name], precision, name or "preset")
    return sorted(rows, key=lambda row: (row["model"], row["arm"], row["metric"]))


def _deficits(setting: Setting, precision: str, shape: str) -> list[dict[str, str]]:
    rows, run = [], next(iter(setting[precision].values())).row
    for metric in SCORES:
        found = paired(setting, metric, precision)
        if found is None or found.seeds < 2:
            continue
        row = result_row(
            experiment="learning", arm=precision, model=run["model"], shape=shape, unit="fraction",
            metric=f"deficit_{metric}", value=-found.mean, low=-found.high, high=-found.low, n=found.seeds,
        )  # fmt: skip
        rows.append(row | {column: run[column] for column in ("hardware", "torch", "commit", "date")})
    return rows


def models(path: Path) -> list[str]:
    """The models that a file has training runs of, in file order."""
    rows = read_rows(path.resolve(), experiment="train")
    return list(dict.fromkeys(row["model"] for row in rows if row["arm"] in PRECISIONS))


def start_accuracy(*, model: str = "mini-qwen3", directory: Path = RESULTS, file: str | Path = FILE) -> Band | None:
    """Accuracy of the model before training, over seeds on the main setting's machine; None without its rows.

    Where that machine has none, the newest machine's count.
    """
    path = directory / file
    rows = read_rows(path.resolve(), arm=START, model=model) if path.exists() else []
    if not rows:
        return None
    settings = read_runs(model=model, directory=directory, file=file)
    main_runs = settings[main_setting(settings)] if settings else {}
    used = {run.row["hardware"] for by_seed in main_runs.values() for run in by_seed.values()}
    known = [row for row in rows if row["hardware"] in used]
    machine = latest(known or rows)["hardware"]
    return band(_number(row) for row in rows if row["hardware"] == machine)


def lost_ground(
    setting: Setting, *, model: str = "mini-qwen3", directory: Path = RESULTS, file: str | Path = FILE
) -> dict[str, list[str]]:
    """Precision -> seeds whose last policy judges below the model that it started from, on the same problems.

    A sign of an unstable setting, whatever the precision; runs whose machine has no row of the start are left out.
    """
    path = directory / file
    rows = read_rows(path.resolve(), arm=START, model=model) if path.exists() else []
    before = {(row["hardware"], row["shape"]): _number(row) for row in rows}
    found = {}
    for precision, runs in setting.items():
        start = {seed: before.get((run.row["hardware"], seed)) for seed, run in runs.items()}
        below = [seed for seed, run in runs.items() if start[seed] and run.ends.get("accuracy", 1.0) < start[seed]]
        if below:
            found[precision] = below
    return found


def curves(setting: Setting) -> dict[str, list[list[dict[str, float]]]]:
    """Precision -> the metric lines of its runs, as `viz.training.learning_curves` draws them."""
    return {precision: [run.lines for run in runs.values() if run.curve] for precision, runs in setting.items()}


def report(path: Path) -> list[str]:
    """Every model's every setting of a file in lines of text: table, paired differences, verdict, lost ground."""
    lines = []
    for model in models(path):
        for name, setting in read_runs(model=model, file=path).items():
            lines += ["", f"{model}, {describe(name, model=model)}:"]
            lines += [_line(row) for row in (*summary(setting), *differences(setting))]
            lines += [verdict(setting), *unstable(setting, model=model, file=path)]
        before = start_accuracy(model=model, file=path)
        lines += [f"accuracy before training: {before}"] if before else []
    return lines


def unstable(
    setting: Setting, *, model: str = "mini-qwen3", directory: Path = RESULTS, file: str | Path = FILE
) -> list[str]:
    """A sentence if runs of a setting end below their start, else nothing."""
    below = lost_ground(setting, model=model, directory=directory, file=file)
    if not below:
        return []
    runs, total = sum(map(len, below.values())), sum(map(len, setting.values()))
    named = ", ".join(f"{PRECISION_NAMES[name]} {' and '.join(seeds)}" for name, seeds in below.items())
    return [f"unstable: {runs} of {total} runs end below the model they started from ({named})"]


def _line(row: Mapping[str, str]) -> str:
    return "  " + "  ".join(f"{name} {value}" for name, value in row.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kv4rl.learning", description=__doc__.split("\n")[0])
    parser.add_argument("--file", type=Path, default=RESULTS / FILE, help="of rows, default data/results/train.csv")
    parser.add_argument(
        "--save", action="store_true", help="write the main setting's differences into the file as well"
    )
    options = parser.parse_args(arguments)
    path = options.file.resolve()
    with one_sentence("kv4rl.learning", kinds=(ValueError, OSError)):
        found = report(path)
        require(bool(found), "file", str(path), "rows of experiment `train`: `python -m kv4rl.sweep` makes them")
    print("\n".join(found))
    if options.save:
        rows = deficit_rows(path)
        write_rows(path, rows, drop=lambda row: row["experiment"] == "learning")
        print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main()
