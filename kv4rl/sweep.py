"""Many small training runs at once: precisions x collectors x seeds, each a process of its own, on one GPU or on cores.

    python -m kv4rl.sweep --seeds 1 2 3 --jobs 12 --updates 30 --grpo.learning_rate 3e-4

Every other flag is one of `python -m kv4rl.train_rows`, which each run is; its folder, `DIR/MODEL/SETTING/ARM-seedN`,
holds its log, its checkpoints and, when it is finished, its rows. The same command again skips finished runs and
resumes the rest. A run that fails is named with its last words, and the others go on. When all have ended the rows go
into data/results/train.csv, and `kv4rl.learning` says what the seeds show.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from kv4rl.cli import one_sentence
from kv4rl.config import PRECISIONS, require, require_integer
from kv4rl.learning import report
from kv4rl.presets import parse_config
from kv4rl.results import RESULTS, read_rows, write_rows
from kv4rl.train_rows import FILE, START, require_recordable, run_shape

PROGRAM = "kv4rl.sweep"
# A sweep judges its policies at the end; what a run evaluates on the way would double its time.
BRIEF = {"--evaluate_prompts": "4", "--evaluate_samples": "1"}
LAST_WORDS = 3  # lines of a failed run's log
# What the sweep sets itself, and the flag of its own that says to what.
OWN = {
    "--kv.precision": "--precisions", "--rollout.collector": "--collectors", "--seed": "--seeds",
    "--rollout.seed": "--seeds",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One process: `words` for `kv4rl.train_rows`, and the folder it works in."""

    name: str  # what it is called on the screen
    folder: Path
    words: tuple[str, ...]

    @property
    def rows(self) -> Path:
        """Written at its end, in one move: a run is finished if it is there."""
        return self.folder / "rows.csv"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


def plan(options: argparse.Namespace, flags: Sequence[str]) -> list[Run]:
    """Every run, seed by seed, so that a sweep cut short leaves whole seeds. SystemExit names a wrong flag."""
    brief = [word for flag, value in BRIEF.items() if flag not in flags for word in (flag, value)]
    runs = []
    for seed in options.seeds:
        for_seed = [*flags, *brief, "--seed", str(seed), "--rollout.seed", str(seed)]
        runs.append(_run(options, START, "start", for_seed))
        for collector in options.collectors:
            for precision in options.precisions:
                words = [*for_seed, "--rollout.collector", collector, "--kv.precision", precision]
                runs.append(_run(options, precision, collector, words))
    return runs


def _run(options: argparse.Namespace, arm: str, kind: str, words: list[str]) -> Run:
    config = parse_config(words, program=PROGRAM)
    require_recordable(config)
    seed, _, setting = run_shape(config).partition("/")
    folder = Path(options.output_dir) / Path(config.model).name / (setting or "preset") / f"{arm}-{seed}"
    first = [START] if arm == START else []
    end = [] if arm == START else ["--without-start"]
    out = ["--output_dir", str(folder), "--out", str((folder / "rows.csv").resolve())]
    return Run(f"{arm} {seed} {kind}", folder, (*first, *words, *out, *end))


def launch(run: Run, threads: int) -> int:
    """Run it to its end and return its status; what it says goes into its log."""
    run.folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else every process starts as many compilers as there are cores
    }  # fmt: skip
    with run.log.open("w") as log:
        command = [sys.executable, "-m", "kv4rl.train_rows", *run.words]
        return subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False).returncode


def run_all(runs: Sequence[Run], jobs: int) -> list[str]:
    """Run what is not finished, `jobs` at a time; a sentence for each that failed."""
    waiting = [run for run in runs if not run.rows.exists()]
    print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished before, {jobs} at a time", flush=True)
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    failures, started = [], time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(launch, run, threads): run for run in waiting}
        for done, future in enumerate(as_completed(running), start=1):
            run, status = running[future], future.result()
            if status or not run.rows.exists():
                failures.append(_failure(run, status))
                said = failures[-1]
            else:
                said = result_line(run)
            print(f"{done}/{len(waiting)} after {time.perf_counter() - started:.0f} s: {said}", flush=True)
    return failures


def result_line(run: Run) -> str:
    """A finished run in one line."""
    cells = {row["metric"]: float(row["value"]) for row in read_rows(run.rows.resolve(), experiment="train")}
    ends = f"reward {cells['reward_first']:.3f} to {cells['reward_last']:.3f}, " if "reward_first" in cells else ""
    return f"{run.name}: {ends}accuracy {cells['accuracy']:.3f}"


def _failure(run: Run, status: int) -> str:
    how = f"with status {status}" if status else "without its rows, though with status 0"
    log = run.log.read_text(errors="replace") if run.log.exists() else "no log"
    last = " / ".join(log.strip().splitlines()[-LAST_WORDS:])
    return f"{run.name} failed {how}: {last} (all of it in {run.log})"


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--collectors", nargs="+", default=["partial"], choices=("partial", "sync"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of tasks and sampling noise")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; as many as cores on one GPU is fine")
    parser.add_argument("--output_dir", default="runs/sweep", help="a folder a run below it")
    parser.add_argument("--out", default=FILE, help="CSV under data/results, or an absolute path")
    options, flags = parser.parse_known_args(arguments)
    with one_sentence(PROGRAM):
        require_integer(options.jobs, "jobs", 1)
        for name in ("precisions", "collectors", "seeds"):
            given = getattr(options, name)
            require(len(set(given)) == len(given), name, given, "each once")
        for flag in (word.partition("=")[0] for word in flags):
            require(flag not in OWN, "flag", flag, f"{OWN.get(flag)}: the sweep sets it run by run")
    return options, flags


def main(arguments: Sequence[str] | None = None) -> None:
    options, flags = parse(sys.argv[1:] if arguments is None else arguments)
    with one_sentence(PROGRAM):
        runs = plan(options, flags)
        for folder in (Path(options.output_dir), (RESULTS / options.out).parent):
            folder.mkdir(parents=True, exist_ok=True)  # not after hours that it cannot be
    failures = run_all(runs, options.jobs)
    rows = [row for run in runs if run.rows.exists() for row in read_rows(run.rows.resolve())]
    if rows:
        path = write_rows(options.out, rows)
        print("\n".join([*report(path), f"{len(rows)} rows in {path}"]))
    if failures:
        raise SystemExit("\n".join([f"{PROGRAM}: error: {len(failures)} of {len(runs)} runs failed", *failures]))


if __name__ == "__main__":
    main()
