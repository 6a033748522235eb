"""The phase loop of §3: collect, learn, sync, log, checkpoint. `python -m kv4rl.train --preset mini --updates 20`

Running the same command again resumes: a run killed anywhere continues from its newest checkpoint, and on a CPU its
weights, metrics and pool are those of the run that was never killed. A file `stop` in the run's folder, or SIGTERM,
ends it after the iteration in progress, saved (`kv4rl.stop` says which under torchrun).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from kv4rl.checkpoint import only_run
from kv4rl.cli import interruptible, one_sentence
from kv4rl.config import TrainConfig
from kv4rl.disk import NotWritten, writing
from kv4rl.metrics import MetricsWriter, read_metrics
from kv4rl.presets import parse_config
from kv4rl.ranks import connect
from kv4rl.rewards.grader import Grader
from kv4rl.stop import FILE as STOP
from kv4rl.stop import StopRequest
from kv4rl.tasks.datasets import evaluation_file
from kv4rl.trainer import Trainer

Report = Callable[[str], None]
Write = Callable[[int, dict], None]  # the metrics of an update
NAMED = 5  # task lines that a report names; a file holds all of them


@dataclass(frozen=True)
class TrainResult:
    """Where a finished run left its things."""

    output_dir: Path
    model_dir: Path  # the trained policy, as transformers and `load_decoder` read it
    updates: int  # made so far; fewer than asked for if it was stopped
    metrics: list[dict]  # the lines of metrics.jsonl; line 0 is the evaluation before the first update
    leads: bool = True  # of several ranks the one that reports


def train(
    config: TrainConfig, report: Report | None = None, *, setup: AbstractContextManager | None = None
) -> TrainResult:
    """Train as `config` says, resuming a run that `output_dir` holds; `report` is given a few lines of text.

    Raises InputError (a ValueError) for settings or files that do not fit together, before anything is sampled or
    written; NotWritten, an OSError, for a file that cannot be written. `setup` is entered for that first part only: a
    command line says there what its user did wrong.
    """
    with ExitStack() as stack:
        with setup or nullcontext():
            ranks = stack.enter_context(connect(config.device))
            report = report if report and ranks.leads else (lambda line: None)
            grader = stack.enter_context(Grader())
            trainer = Trainer(config, grader, ranks)
            if ranks.leads:
                stack.enter_context(only_run(config.output_dir))
                _stop_file(config).unlink(missing_ok=True)  # meant for a process that is gone
            resumed = trainer.resume()
            write = _writer(trainer, resumed, stack)
        report(_opening(trainer, resumed))
        if ranks.leads:
            _report_left_out(trainer, report)
        if not resumed:
            write(0, trainer.evaluate())
        with trainer.saver:
            _loop(trainer, write)
        model_dir = trainer.export()
        ranks.gather(None)  # nobody reads below before the first rank has written
    lines = read_metrics(config.output_dir)
    rest = config.updates - trainer.update
    report(f"trained {trainer.update} updates; policy in {model_dir}" + (f"; stopped {rest} early" if rest > 0 else ""))
    return TrainResult(Path(config.output_dir), model_dir, trainer.update, lines, ranks.leads)


def _writer(trainer: Trainer, resumed: bool, stack: ExitStack) -> Write:
    """Where the metrics of an update go: from the first rank to the run's files, from the others nowhere."""
    if not trainer.ranks.leads:
        return lambda update, metrics: None
    after = trainer.update if resumed else None
    return stack.enter_context(MetricsWriter(trainer.config.output_dir, resumed_update=after)).write


def _stop_file(config: TrainConfig) -> Path:
    return Path(config.output_dir) / STOP


def _loop(trainer: Trainer, write: Write) -> None:
    """Iterate until the last update, or until the run is asked to stop (`kv4rl.stop`): then it is saved and resumes."""
    config, silent = trainer.config, None if trainer.ranks.leads else True
    bar = tqdm(total=config.updates, initial=trainer.update, desc=config.kv.precision, unit="update", disable=silent)
    with bar, StopRequest(_stop_file(config) if trainer.ranks.leads else None) as stop:
        while trainer.update < config.updates:
            metrics = trainer.iterate()
            stopped = any(trainer.ranks.gather(stop.asked))
            last = trainer.update == config.updates
            if last or (config.evaluate_every and trainer.update % config.evaluate_every == 0):
                metrics |= trainer.evaluate()
            write(trainer.update, metrics)  # before the checkpoint: a resume drops lines that it will repeat
            if last or stopped or trainer.update % config.checkpoint_every == 0:
                trainer.start_save()
            if stopped:
                stop.obeyed()
                break
            bar.set_postfix(
                reward=f"{metrics['critic/score/mean']:.3f}", tokens=f"{metrics['response_length/mean']:.0f}"
            )
            bar.update()


def _opening(trainer: Trainer, resumed: bool) -> str:
    size = sum(parameter.numel() for parameter in trainer.learner.weights.parameters()) / 1e6
    where = f"resuming after update {trainer.update}" if resumed else "starting"
    nothing = f"; no evaluation: no --evaluate_sets, no {evaluation_file(trainer.config.tasks)}"
    note = "" if trainer.question_sets else nothing
    config = trainer.config
    return (
        f"{config.model} ({size:.1f}M parameters) on {trainer.device}, {config.kv.precision} rollout, "
        f"{config.updates} updates in {config.output_dir}: {where}{note}"
    )


def _report_left_out(trainer: Trainer, report: Report) -> None:
    """Count and name the task lines that are not used; the whole list goes into the run's folder."""
    lines = [f"{line.where}: {line.reason}" for line in trainer.left_out]
    if not lines:
        return
    file = Path(trainer.config.output_dir) / "left_out.txt"
    with writing(file):
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    report(f"{len(lines)} task lines are left out, for the grader could not use their answers (all of them in {file}):")
    for line in lines[:NAMED]:
        report(f"  {line}")


def main(arguments: list[str] | None = None) -> None:
    """The command line: fields of `TrainConfig` as flags over a preset."""
    program, config = "kv4rl.train", parse_config(arguments)
    goes_on = "; the same command goes on from the newest checkpoint"
    with interruptible(program, goes_on), one_sentence(program, kinds=(NotWritten,), status=1):
        result = train(config, report=print, setup=one_sentence(program))
    for line in (result.metrics[0], result.metrics[-1]) if result.leads else ():
        for name in [name for name in line if name.endswith("/avg_at_k")]:
            questions = name.removeprefix("val/").removesuffix("avg_at_k").replace("/", " ")
            passed = line[name.replace("avg_at_k", "pass_at_k")]
            print(f"update {line['update']}: {questions}avg@k {line[name]:.3f}, pass@k {passed:.3f}")


if __name__ == "__main__":
    main()
