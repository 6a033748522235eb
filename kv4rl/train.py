"""The phase loop of §3: collect, learn, sync, log, checkpoint. `python -m kv4rl.train --preset mini --updates 20`

Running the same command again resumes: a run killed anywhere continues from its newest checkpoint, and on a CPU its
weights, metrics and pool are those of the run that was never killed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from kv4rl.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, save_checkpoint, settings
from kv4rl.cli import one_sentence
from kv4rl.config import KVConfig, TrainConfig, require
from kv4rl.device import choose_device
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.request import Request
from kv4rl.engine.sampler import Sampling
from kv4rl.evaluation.evaluate import evaluate
from kv4rl.grpo.batch_metrics import collection_metrics, response_metrics
from kv4rl.grpo.learner import GRPOLearner
from kv4rl.grpo.masters import cast_copy, compute_dtype
from kv4rl.grpo.weight_sync import checksum, sync
from kv4rl.metrics import MetricsWriter, Timers, read_metrics
from kv4rl.model.weights import eos_token_ids, load_decoder, load_tokenizer, save_decoder
from kv4rl.presets import parse_config
from kv4rl.rewards.grader import Grader
from kv4rl.rollout.group import Prompt, PromptGroup, PromptStream
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.sync import SyncCollector
from kv4rl.rollout.trace import Trace
from kv4rl.tasks.stream import JsonlStream, LeftOut, MiniStream, take

Report = Callable[[str], None]
NAMED = 5  # task lines that a report names; a file holds all of them


@dataclass(frozen=True)
class TrainResult:
    """Where a finished run left its things."""

    output_dir: Path
    model_dir: Path  # the trained policy, as transformers and `load_decoder` read it
    updates: int
    metrics: list[dict]  # the lines of metrics.jsonl; line 0 is the evaluation before the first update


class Scoring:
    """The collector's grading hook: hands responses to the workers while others decode, and files the verdicts."""

    def __init__(self, grader: Grader, tokenizer, reading: str):
        self._grader, self._tokenizer, self._reading = grader, tokenizer, reading
        self._waiting: dict[tuple[int, int], PromptGroup] = {}

    def __call__(self, group: PromptGroup, request: Request) -> None:
        key = (group.order, request.sibling)
        self._waiting[key] = group
        self._grader.submit(key, self._tokenizer.decode(request.tokens, skip_special_tokens=True), group.prompt.answer)

    def finish(self) -> None:
        """Wait for every verdict and write it, with its score, into its group."""
        for (order, sibling), verdict in self._grader.results(wait=True).items():
            group = self._waiting.pop((order, sibling))
            group.scores[sibling] = verdict.score(self._reading)
            group.verdicts[sibling] = verdict


class Trainer:
    """Everything one run holds; `train` drives it. Loading raises ValueError for whatever does not fit together."""

    def __init__(self, config: TrainConfig, grader: Grader):
        group = config.rollout.responses_per_group
        require(group >= 2, "rollout.responses_per_group", group, "at least 2 responses to normalise rewards over")
        self.config = config
        self.device = choose_device(config.device)
        self.checkpoints = Path(config.output_dir) / "checkpoints"
        self.update = 0  # updates made so far: equals the engine's policy_version
        self.tokenizer = load_tokenizer(config.model)
        decoder = load_decoder(config.model, dtype=torch.float32, device=self.device)
        self._model_checksum = _checksum(decoder)
        self.grader = grader
        self.scoring = Scoring(grader, self.tokenizer, config.reading)
        rollout_decoder = cast_copy(decoder, compute_dtype(config.grpo.compute_dtype, self.device))
        decoder.recompute_layers = self.device.type == "cuda"  # "Gradient checkpointing: on", Table A1
        self.learner = GRPOLearner(decoder, config.grpo)
        stops = eos_token_ids(config.model)
        self.engine = RolloutEngine(rollout_decoder, config.kv, config.rollout, eos_token_ids=stops)
        prompts = _prompts(config, self.tokenizer)
        self.left_out = list(prompts.left_out)
        self.evaluation_prompts = _evaluation_prompts(config, self.tokenizer, self.left_out)
        for prompt in (prompts.longest(), *self.evaluation_prompts):
            cap = config.rollout.max_response_tokens
            self.engine.check_fits(Request(prompt.prompt_id, 0, prompt.tokens, cap, stops))
        make = PartialCollector if config.rollout.collector == "partial" else SyncCollector
        self.collector = make(self.engine, prompts, config.rollout, grade=self.scoring, eos_token_ids=stops)

    def resume(self) -> bool:
        """Continue from the newest checkpoint, if there is one. ValueError if it belongs to another run."""
        saved = list_checkpoints(self.checkpoints)
        if not saved:
            return False
        checkpoint = load_checkpoint(saved[-1], self.config)
        require(
            checkpoint.run["model_checksum"] == self._model_checksum, "model", self.config.model,
            f"the weights with which {saved[-1]} was started: the reference policy is made of them",
        )  # fmt: skip
        self.update = checkpoint.update
        learner = {"weights": checkpoint.weights, "optimizer": checkpoint.optimizer, "updates": self.update}
        self.learner.load_state(learner)
        self.collector.load_state(checkpoint.run["collector"])
        sync(self.learner, self.engine, self.update)
        return True

    def iterate(self) -> dict[str, float | list]:
        """One iteration: collect T groups under the current policy, update it, hand it to the engine."""
        timers, trace = Timers(self.device), Trace()
        self.collector.trace = trace
        with timers("step"):
            with timers("gen"):
                collection = self.collector.collect()
                with timers("reward"):
                    self.scoring.finish()
            learnt = self.learner.update(collection.groups, timers)
            with timers("update_weights"):
                sync(self.learner, self.engine, self.update + 1)
        metrics = response_metrics(collection.groups, self.update) | learnt
        metrics |= collection_metrics(collection.stats, trace.columns(), self.config.rollout.cache_pages)
        metrics |= timers.metrics()
        metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / timers.seconds["step"]
        self.update += 1
        self._write_trace(trace)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """avg@k and pass@k of the current policy on held-out prompts, through an unquantised cache (§B.2)."""
        if not self.evaluation_prompts:
            return {}
        timers, config = Timers(self.device), self.config
        with timers("testing"):
            engine = RolloutEngine(
                self.engine.decoder, KVConfig(precision="bf16"), config.rollout,
                eos_token_ids=self.engine.eos_token_ids,
            )  # fmt: skip
            result = evaluate(
                engine, self.tokenizer, self.evaluation_prompts, samples=config.evaluate_samples,
                sampling=evaluation_sampling(config), grader=self.grader,
            )  # fmt: skip
        return result.metrics(config.reading) | timers.metrics()

    def save(self) -> Path:
        """Write a checkpoint of this moment: between two iterations, with nothing resident in the engine."""
        learner = self.learner.state()
        run = {"collector": self.collector.state(), "model_checksum": self._model_checksum}
        checkpoint = Checkpoint(self.update, settings(self.config), learner["weights"], learner["optimizer"], run)
        return save_checkpoint(self.checkpoints, checkpoint, keep=self.config.keep_checkpoints)

    def export(self) -> Path:
        """The policy as a model directory."""
        directory = Path(self.config.output_dir) / "model"
        save_decoder(self.learner.weights.decoder, directory, self.tokenizer)
        GenerationConfig(eos_token_id=list(self.engine.eos_token_ids)).save_pretrained(directory)
        return directory

    def _write_trace(self, trace: Trace) -> None:
        directory = Path(self.config.output_dir) / "trace"
        directory.mkdir(parents=True, exist_ok=True)
        trace.to_csv(directory / f"{self.update:06d}.csv")


def train(
    config: TrainConfig, report: Report | None = None, *, setup: AbstractContextManager | None = None
) -> TrainResult:
    """Train as `config` says, resuming a run that `output_dir` holds; `report` is given a few lines of text.

    Raises InputError (a ValueError) for settings or files that do not fit together, before anything is sampled or
    written; OSError when a checkpoint cannot be written. `setup` is entered for that first part only: a command line
    says there what its user did wrong.
    """
    report = report or (lambda line: None)
    with ExitStack() as stack:
        with setup or nullcontext():
            grader = stack.enter_context(Grader())
            trainer = Trainer(config, grader)
            resumed = trainer.resume()
            writer = stack.enter_context(
                MetricsWriter(config.output_dir, resumed_update=trainer.update if resumed else None)
            )
        report(_opening(trainer, resumed))
        _report_left_out(trainer, report)
        if not resumed:
            writer.write(0, trainer.evaluate())
        _loop(trainer, writer)
        model_dir = trainer.export()
    lines = read_metrics(config.output_dir)
    report(f"trained {trainer.update} updates; policy in {model_dir}")
    return TrainResult(Path(config.output_dir), model_dir, trainer.update, lines)


def _loop(trainer: Trainer, writer: MetricsWriter) -> None:
    config = trainer.config
    bar = tqdm(total=config.updates, initial=trainer.update, desc=config.kv.precision, unit="update", disable=None)
    with bar:
        while trainer.update < config.updates:
            metrics = trainer.iterate()
            last = trainer.update == config.updates
            if last or (config.evaluate_every and trainer.update % config.evaluate_every == 0):
                metrics |= trainer.evaluate()
            writer.write(trainer.update, metrics)  # before the checkpoint: a resume drops lines that it will repeat
            if last or trainer.update % config.checkpoint_every == 0:
                trainer.save()
            bar.set_postfix(
                reward=f"{metrics['critic/score/mean']:.3f}", tokens=f"{metrics['response_length/mean']:.0f}"
            )
            bar.update()


def _opening(trainer: Trainer, resumed: bool) -> str:
    size = sum(parameter.numel() for parameter in trainer.learner.weights.parameters()) / 1e6
    where = f"resuming after update {trainer.update}" if resumed else "starting"
    note = "" if trainer.evaluation_prompts else f"; no evaluation: no {_evaluation_file(trainer.config)}"
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
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    report(f"{len(lines)} task lines are left out, for the grader could not use their answers (all of them in {file}):")
    for line in lines[:NAMED]:
        report(f"  {line}")


def _prompts(config: TrainConfig, tokenizer) -> PromptStream:
    if config.tasks == "mini":
        return MiniStream(config.seed, tokenizer=tokenizer)
    require(Path(config.tasks).is_file(), "tasks", config.tasks, '"mini" or a .jsonl file that exists')
    limit = config.rollout.max_prompt_tokens
    return JsonlStream(config.tasks, tokenizer, max_prompt_tokens=limit, seed=config.seed, check_golds=True)


def _evaluation_prompts(config: TrainConfig, tokenizer, left_out: list[LeftOut]) -> list[Prompt]:
    """Held-out prompts: the mini task's own split, or the lines of `<tasks>.evaluation.jsonl`; none without it.

    Lines whose gold answer cannot be graded are added to `left_out`.
    """
    if config.tasks == "mini":
        stream = MiniStream(config.seed, split="evaluation", tokenizer=tokenizer)
        return take(stream, config.evaluate_prompts)
    if not _evaluation_file(config).is_file():
        return []
    limit = config.rollout.max_prompt_tokens
    stream = JsonlStream(
        _evaluation_file(config), tokenizer, max_prompt_tokens=limit, shuffle=False, epochs=1, check_golds=True
    )
    left_out += stream.left_out
    return take(stream, min(config.evaluate_prompts, len(stream)))


def _evaluation_file(config: TrainConfig) -> Path:
    return Path(config.tasks).with_suffix(".evaluation.jsonl")


def evaluation_sampling(config: TrainConfig) -> Sampling:
    """How a policy is judged; the same noise every time, so that policies compare in pairs."""
    return Sampling(
        temperature=config.evaluate_temperature,
        top_p=config.evaluate_top_p,
        seed=config.seed,
        max_response_tokens=config.rollout.max_response_tokens,
    )


def _checksum(decoder: torch.nn.Module) -> str:
    total = sum(checksum(parameter) for parameter in decoder.parameters())
    return f"{total & (2**64 - 1):016x}"


def main(arguments: list[str] | None = None) -> None:
    """The command line: fields of `TrainConfig` as flags over a preset."""
    result = train(parse_config(arguments), report=print, setup=one_sentence("kv4rl.train"))
    for line in (result.metrics[0], result.metrics[-1]):
        if "val/avg_at_k" in line:
            print(f"update {line['update']}: avg@k {line['val/avg_at_k']:.3f}, pass@k {line['val/pass_at_k']:.3f}")


if __name__ == "__main__":
    main()
