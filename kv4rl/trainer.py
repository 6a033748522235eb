"""One iteration of §3 and what it takes: collect, learn, sync; evaluate, save, resume."""

import os
from dataclasses import replace
from pathlib import Path

import torch
from transformers import GenerationConfig

from kv4rl.checkpoint import BackgroundSave, Checkpoint, list_checkpoints, load_checkpoint, settings
from kv4rl.config import KVConfig, RolloutConfig, TrainConfig, require
from kv4rl.device import choose_device
from kv4rl.disk import writing
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.release import gives_back
from kv4rl.engine.request import Request
from kv4rl.engine.sampler import Sampling
from kv4rl.evaluation.evaluate import EvaluationResult, evaluate
from kv4rl.evaluation.periodic import QuestionSet, question_sets
from kv4rl.grpo.batch_metrics import collection_metrics, max_over_ranks, over_replicas, response_metrics
from kv4rl.grpo.host_limit import MEMINFO, available_bytes
from kv4rl.grpo.host_memory import HostMemory
from kv4rl.grpo.learner import GRPOLearner
from kv4rl.grpo.masters import cast_copy, compute_dtype
from kv4rl.grpo.memory import Machine, check_without_gpu, plan_run, pool_pages
from kv4rl.grpo.weight_sync import checksum, sync
from kv4rl.metrics import Timers
from kv4rl.model.decoder import Decoder
from kv4rl.model.tensor_parallel import shard_decoder
from kv4rl.model.weights import eos_token_ids, load_config, load_decoder, load_tokenizer, save_decoder
from kv4rl.phases import PhaseController
from kv4rl.ranks import Ranks
from kv4rl.rewards.grader import Grader
from kv4rl.rollout.group import PromptGroup, PromptStream
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.share import SharedStream
from kv4rl.rollout.sync import SyncCollector
from kv4rl.rollout.trace import Trace
from kv4rl.tasks.datasets import open_stream


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
    """Everything one rank of a run holds; `train` drives it. ValueError for whatever does not fit together.

    Every `tensor_parallel` ranks are a rollout replica with its share of the prompts and of the quota, and every rank
    holds a shard of the learner; engine and learner take turns on the GPU (`phases.py`). `iterate`, `evaluate`, `save`
    and `export` are collectives.
    """

    def __init__(self, config: TrainConfig, grader: Grader, ranks: Ranks | None = None):
        group = config.rollout.responses_per_group
        require(group >= 2, "rollout.responses_per_group", group, "at least 2 responses to normalise rewards over")
        self.config = config
        self.ranks = ranks or Ranks(choose_device(config.device))
        self.device = self.ranks.device
        self.replica = self.ranks.replica(config.tensor_parallel)
        rollout = _share_of_quota(config.rollout, self.replica.count)
        self.checkpoints = Path(config.output_dir) / "checkpoints"
        self.saver = BackgroundSave()
        self._host = HostMemory(pinned=self.device.type == "cuda")  # what is being saved
        self._saving: dict[str, float] = {}  # seconds that the latest checkpoint took from the run
        self.update = 0  # updates made so far: equals the engine's policy_version
        self.tokenizer = load_tokenizer(config.model)
        rollout = self._within_memory(rollout)
        limit = config.rollout.max_prompt_tokens
        # Tasks before weights: what is wrong with them shows at once.
        prompts = open_stream(config.tasks, self.tokenizer, seed=config.seed, max_prompt_tokens=limit)
        self.question_sets, held_back = question_sets(config, self.tokenizer)
        self.left_out = [*prompts.left_out, *held_back]
        decoder = load_decoder(config.model, dtype=torch.float32, device=self.device)
        self._model_checksum = _checksum(decoder)
        self.grader = grader
        self.scoring = Scoring(grader, self.tokenizer, config.reading)
        rollout_decoder = self._rollout_decoder(decoder)
        decoder.recompute_layers = self.device.type == "cuda"  # "Gradient checkpointing: on", Table A1
        self.learner = GRPOLearner(decoder, config.grpo, mesh=self.ranks.mesh)
        self.phases = PhaseController(self.learner, self.device, take_turns=config.memory == "phased")
        self._make_engine(rollout_decoder, rollout, prompts)

    def _within_memory(self, rollout: RolloutConfig) -> RolloutConfig:
        """The rollout's settings with the pages that memory leaves, where it says 0; a collective.

        Before anything is loaded: ValueError, item by item, where a phase needs more than this GPU or node has.
        """
        config, elastic = self.config, self.config.memory == "phased" and gives_back(self.device)
        machine = Machine(self.ranks.size, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), elastic)
        if self.device.type != "cuda":
            if MEMINFO.exists():  # on Linux
                left = min(self.ranks.gather(available_bytes()))  # before any of them loads
                check_without_gpu(config, load_config(config.model), machine, left)
            require(rollout.cache_pages > 0, "rollout.cache_pages", 0, "a number of pages >= 1 without a GPU to fill")
            return rollout
        model = load_config(config.model)
        # In phase "evaluate" a second cache needs the room that a resident one does not leave.
        given = rollout.cache_pages > 0 or config.memory == "phased"
        require(given, "rollout.cache_pages", 0, "a number of pages >= 1 with --memory resident")
        total = min(self.ranks.gather(torch.cuda.get_device_properties(self.device).total_memory))
        if rollout.cache_pages == 0:
            rollout = replace(rollout, cache_pages=pool_pages(config, model, rollout, machine, total))
        plan_run(config, model, rollout, machine).check(total, available_bytes())
        return rollout

    def _make_engine(self, decoder: Decoder, rollout: RolloutConfig, prompts: PromptStream) -> None:
        """The engine, its cache sized for what the learner leaves, and the collector of this replica's prompts."""
        config, stops = self.config, eos_token_ids(self.config.model)
        self.phases.enter("collect")
        memory = self.phases.memory()
        self.engine = RolloutEngine(decoder, config.kv, rollout, eos_token_ids=stops, memory=memory)
        self.phases.attach(self.engine)
        for prompt in (prompts.longest(), *(prompt for part in self.question_sets for prompt in part.prompts)):
            cap = config.rollout.max_response_tokens
            self.engine.check_fits(Request(prompt.prompt_id, 0, prompt.tokens, cap, stops))
        make = PartialCollector if config.rollout.collector == "partial" else SyncCollector
        if self.replica.count > 1:
            prompts = SharedStream(prompts, self.replica.number, self.replica.count)
        grade = self.scoring if self.replica.leads else None
        self.collector = make(self.engine, prompts, rollout, grade=grade, eos_token_ids=stops)

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
        collectors = checkpoint.run["collectors"]
        require(
            len(collectors) == self.replica.count, "replicas", self.replica.count,
            f"{len(collectors)}, which made {saved[-1]}: each holds unfinished responses of its own. "
            + self._layouts(len(collectors)),
        )  # fmt: skip
        self.update = checkpoint.update
        self.phases.enter("learn")
        learner = {"weights": checkpoint.weights, "optimizer": checkpoint.optimizer, "updates": self.update}
        self.learner.load_state(learner)
        self.collector.load_state(collectors[self.replica.number])
        sync(self.learner, self.engine, self.update)
        return True

    def _layouts(self, replicas: int) -> str:
        """How to start as many replicas: with as large ones, or with as many processes."""
        split = {self.config.tensor_parallel} | ({self.ranks.size // replicas} - {0})
        pairs = [f"--nproc-per-node {replicas * parts} with --tensor_parallel {parts}" for parts in sorted(split)]
        return f"On one node torchrun starts as many by {', or '.join(pairs)}"

    def iterate(self) -> dict[str, float | list]:
        """One iteration: collect T groups under the current policy, update it, hand it to the engine."""
        timers, trace = Timers(self.device), Trace()
        self.collector.trace = trace
        with timers("step"):
            self.phases.enter("collect", timers)
            with timers("gen"):
                collection = self.collector.collect()
                with timers("reward"):  # what grading takes beyond the collection, during which it runs
                    self.scoring.finish()
            self.phases.enter("learn", timers)
            groups = self._of_replicas(collection.groups)
            learnt = self.learner.update(groups, timers)
            with timers("update_weights"):
                learnt |= sync(self.learner, self.engine, self.update + 1)
        metrics = response_metrics(groups, self.update) | learnt
        collected = collection_metrics(collection.stats, trace.columns(), self.engine.rollout.cache_pages)
        metrics |= over_replicas(self._of_replicas([collected]))
        metrics |= max_over_ranks(self.ranks.gather(timers.metrics() | self.phases.metrics()))
        metrics |= self._saving  # of the checkpoint before this update
        self._saving = {}
        metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / timers.seconds["step"]
        self.update += 1
        self._write_trace(trace)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """avg@k and pass@k of the current policy on every question set, through an unquantised cache (§B.2)."""
        if not self.question_sets:
            return {}
        timers, metrics = Timers(self.device), {}
        self.phases.enter("evaluate", timers)
        with timers("testing"):
            bf16, decoder = KVConfig("bf16"), self.engine.decoder
            rollout = self.phases.within_free(self.engine.rollout, bf16, decoder.cache_shape())
            engine = RolloutEngine(decoder, bf16, rollout, eos_token_ids=self.engine.eos_token_ids)
            for questions in self.question_sets:
                metrics |= questions.named(self._evaluate(engine, questions).metrics(self.config.reading))
        return metrics | timers.metrics()

    def _evaluate(self, engine: RolloutEngine, questions: QuestionSet) -> EvaluationResult:
        """One set, divided among the replicas."""
        mine, sampling = self.replica.share(questions.prompts), evaluation_sampling(self.config)
        given = {"samples": questions.samples, "sampling": sampling, "grader": self.grader}
        result = evaluate(engine, self.tokenizer, mine, **given) if mine else None
        results = self.ranks.gather(result if self.replica.leads else None)
        return EvaluationResult.join([part for part in results if part is not None])

    def start_save(self) -> None:
        """Take a checkpoint of this moment, between two iterations; it is written while the run goes on (`saver`).

        One for all ranks, by the first of them. Raises CheckpointNotWritten where the one before could not be written.
        """
        timers = Timers(self.device)
        with timers("save_checkpoint"):
            self.saver.finish()
            self.phases.enter("learn")
            learner = self.learner.state(self._host, whole=self.ranks.leads)
            collectors = self._of_replicas([self.collector.state()])
            if self.ranks.leads:
                run = {"collectors": collectors, "model_checksum": self._model_checksum}
                saved = Checkpoint(self.update, settings(self.config), learner["weights"], learner["optimizer"], run)
                self.saver.start(self.checkpoints, saved, keep=self.config.keep_checkpoints)
        self._saving = timers.metrics()

    def save(self) -> Path | None:
        """`start_save`, and wait until the checkpoint is written: its directory, on the first rank."""
        self.start_save()
        return self.saver.finish()

    def export(self) -> Path:
        """The policy as a model directory, as the engine holds it after the last sync."""
        directory = Path(self.config.output_dir) / "model"
        decoder = self.engine.decoder if self.replica.communicator is None else self._joined_decoder()
        if self.ranks.leads:
            with writing(directory):
                save_decoder(decoder, directory, self.tokenizer)
                GenerationConfig(eos_token_id=list(self.engine.eos_token_ids)).save_pretrained(directory)
        return directory

    def _rollout_decoder(self, decoder: Decoder) -> Decoder:
        """A copy of the policy for the engine, in the compute dtype; of several ranks this one's part."""
        copy = cast_copy(decoder, compute_dtype(self.config.grpo.compute_dtype, self.device))
        return copy if self.replica.communicator is None else shard_decoder(copy, self.replica.communicator)

    def _joined_decoder(self) -> Decoder:
        """The policy as sent to the engine's shards, whole and on the CPU of the first rank; empty on the others."""
        self.phases.enter("learn")
        with torch.device("meta"):
            decoder = Decoder(self.learner.weights.decoder.config).to(self.engine.decoder.dtype)
        if self.ranks.leads:
            decoder.to_empty(device="cpu")
        for name, tensor in self.learner.weights.named_compute_weights():
            if self.ranks.leads:
                decoder.get_parameter(name).data.copy_(tensor)
        return decoder

    def _of_replicas(self, items: list) -> list:
        """The items of every replica, told by its leading rank, on all ranks."""
        return [item for share in self.ranks.gather(items if self.replica.leads else []) for item in share]

    def _write_trace(self, trace: Trace) -> None:
        if not self.replica.leads:
            return
        rank = "" if self.ranks.leads else f"-rank{self.ranks.rank}"
        path = Path(self.config.output_dir) / "trace" / f"{self.update:06d}{rank}.csv"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.to_csv(path)


def _share_of_quota(rollout: RolloutConfig, replicas: int) -> RolloutConfig:
    """What one of several replicas collects: its part of T; slots and pages are per replica already (Table A1)."""
    groups, expected = rollout.groups_per_update, f"a multiple of {replicas}, the number of replicas"
    require(groups % replicas == 0, "rollout.groups_per_update", groups, expected)
    return replace(rollout, groups_per_update=groups // replicas)


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
