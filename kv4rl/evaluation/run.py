"""Evaluate one model on several sets and seeds, resumable, through an unquantised cache (§B.2).

Every response is drawn with noise keyed by (seed, problem, sibling), so a run that was killed and continued, or split
into parts, scores as one that was not.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from kv4rl.cache.memory_plan import plan_memory
from kv4rl.config import PAGE_TOKENS, KVConfig, RolloutConfig, require, require_integer
from kv4rl.device import choose_device
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.request import Request
from kv4rl.evaluation.benchmarks import Problem, ProblemSet
from kv4rl.evaluation.evaluate import PAPER_SAMPLING, EvaluationResult
from kv4rl.evaluation.prompts import prompt_tokens
from kv4rl.evaluation.records import Record, RecordFile, result_of
from kv4rl.grpo.weight_sync import checksum
from kv4rl.model.decoder import Decoder
from kv4rl.model.weights import eos_token_ids, load_decoder, load_tokenizer
from kv4rl.paper import EVALUATION_SEEDS
from kv4rl.results import commit
from kv4rl.rewards import Grader, Verdict

OTHER_SAMPLES = 8  # k of a set that is none of the six
CPU_PAGES = 8192
GPU_SHARE = 0.9  # of the memory that is free when the weights are loaded


@dataclass(frozen=True)
class EvaluationSettings:
    """How a model is judged; the defaults are §B.2's."""

    model: str
    seeds: tuple[int, ...] = EVALUATION_SEEDS
    samples: int | None = None  # k; None: Table A2's for each set
    temperature: float = PAPER_SAMPLING.temperature
    top_p: float = PAPER_SAMPLING.top_p
    max_prompt_tokens: int = 2048
    max_response_tokens: int = PAPER_SAMPLING.max_response_tokens
    max_active_requests: int = 256
    cache_pages: int | None = None  # None: what the memory holds
    chat: bool = False  # through the tokenizer's chat template; the paper's prompts are plain
    limit: int | None = None  # the first problems of each set only
    device: str = "auto"

    def __post_init__(self):
        distinct = bool(self.seeds) and len(set(self.seeds)) == len(self.seeds)
        require(distinct, "seeds", self.seeds, "one or more, each once")
        for name in ("samples", "limit", "cache_pages"):
            if getattr(self, name) is not None:
                require_integer(getattr(self, name), name, 1)
        self.rollout(0, 1)

    def rollout(self, seed: int, pages: int) -> RolloutConfig:
        """The engine's configuration for one seed."""
        return RolloutConfig(
            max_prompt_tokens=self.max_prompt_tokens,
            max_response_tokens=self.max_response_tokens,
            max_active_requests=self.max_active_requests,
            workspace_tokens=max(RolloutConfig.workspace_tokens, self.max_prompt_tokens + self.max_response_tokens),
            cache_pages=pages,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=seed,
        )

    def samples_of(self, problems: ProblemSet) -> int:
        """k for one set."""
        if self.samples is not None:
            return self.samples
        return problems.benchmark.samples if problems.benchmark else OTHER_SAMPLES


class Evaluator:
    """A model with everything that judging it needs. Loading raises ValueError for what does not fit together."""

    def __init__(self, settings: EvaluationSettings, grader: Grader):
        self.settings, self.grader = settings, grader
        device = choose_device(settings.device)
        self.tokenizer = load_tokenizer(settings.model)
        self.stops = eos_token_ids(settings.model)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.decoder = load_decoder(settings.model, dtype=dtype, device=device)
        total = sum(checksum(parameter) for parameter in self.decoder.parameters())
        self.model_checksum = f"{total & (2**64 - 1):016x}"
        self.pages = settings.cache_pages or _pages(self.decoder, settings)

    def check(self, sets: Sequence[ProblemSet]) -> None:
        """`InputError`, naming the problem, unless every prompt can be asked; before anything is sampled."""
        most, cap = self.decoder.config.max_positions, self.settings.max_response_tokens
        rows = [row for problems in sets for row in problems.problems[: self.settings.limit]]
        tokens, problem_id = max((len(self.prompt_tokens(row)), row.problem_id) for row in rows)
        room = most - tokens
        fits = f"at most {room} fit" if room > 0 else f"the prompt alone has {tokens}"
        expected = f"at most the model's {most}, prompt and --max-response-tokens {cap} together ({fits})"
        require(tokens + cap <= most, f"positions of {problem_id}", tokens + cap, expected)

    def check_records(self, sets: Sequence[ProblemSet], output: Path) -> None:
        """`InputError` for a file of earlier runs that cannot be continued; before anything is sampled."""
        for seed in self.settings.seeds:
            for problems in sets:
                if (path := record_path(output, problems, seed)).exists():
                    RecordFile(path, self._recorded(problems, seed, self.settings.samples_of(problems))).close()

    def prompt_tokens(self, problem: Problem) -> list[int]:
        """The prompt's ids; `InputError` if they are too many, or the tokenizer lacks a character."""
        text = problem.text
        if self.settings.chat:
            require(bool(self.tokenizer.chat_template), "chat", True, "a tokenizer with a chat template, or no --chat")
            message = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        limit = self.settings.max_prompt_tokens
        return prompt_tokens(text, problem.problem_id, self.tokenizer, limit, special=not self.settings.chat)

    def run(
        self, problems: ProblemSet, seed: int, path: Path, report: Callable[[str], None] = print
    ) -> EvaluationResult:
        """Sample, grade and record what `path` does not hold yet; the whole set's result."""
        rows = problems.problems[: self.settings.limit]
        samples = self.settings.samples_of(problems)
        with RecordFile(path, self._recorded(problems, seed, samples)) as records:
            left = [problem for problem in rows if problem.problem_id not in records.done]
            if len(left) < len(rows):
                there = f"{len(rows) - len(left)} of {len(rows)} problems are in {path}"
                older = "" if records.commit == commit() else f", begun at commit {records.commit}"
                report(f"{problems.name}, seed {seed}: {there}{older}")
            if left:
                self._sample(left, seed, samples, records, f"{problems.title} seed {seed}", len(rows))
            return result_of([records.done[problem.problem_id] for problem in rows])

    def _recorded(self, problems: ProblemSet, seed: int, samples: int) -> dict:
        """What decides the scores: a file begun with anything else is not continued. A limit does not decide them."""
        text = "\0".join(f"{row.problem_id}\0{row.text}\0{row.answer!r}" for row in problems.problems)
        names = ("temperature", "top_p", "max_prompt_tokens", "max_response_tokens", "chat")
        chosen = {name: value for name, value in asdict(self.settings).items() if name in names}
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return {"weights": self.model_checksum, "problems": digest, "seed": seed, "samples": samples, **chosen}

    def _sample(
        self, rows: Sequence[Problem], seed: int, samples: int, records: RecordFile, title: str, total: int
    ) -> None:
        rollout = self.settings.rollout(seed, self.pages)
        engine = RolloutEngine(self.decoder, KVConfig("bf16"), rollout, eos_token_ids=self.stops)
        under_way = _UnderWay(rows, samples, self.grader, self.tokenizer, records)
        for order, row in enumerate(rows):
            tokens, cap = self.prompt_tokens(row), rollout.max_response_tokens
            for sibling in range(samples):
                engine.add(Request(row.problem_id, sibling, tokens, cap, self.stops, priority=(order, sibling)))
        with tqdm(total=total, initial=total - len(rows), desc=title, unit="problem", disable=None) as bar:
            while engine.has_unfinished or under_way.waiting:
                for request in engine.step() if engine.has_unfinished else ():
                    under_way.submit(request)
                bar.update(under_way.collect(wait=not engine.has_unfinished))


class _UnderWay:
    """Problems whose responses are being sampled or graded; each is recorded as its last one is graded."""

    def __init__(self, rows: Sequence[Problem], samples: int, grader: Grader, tokenizer, records: RecordFile):
        self._golds = {row.problem_id: row.answer for row in rows}
        self._samples, self._grader, self._tokenizer, self._records = samples, grader, tokenizer, records
        self._requests: dict[str, dict[int, Request]] = {row.problem_id: {} for row in rows}
        self._verdicts: dict[str, dict[int, Verdict]] = {row.problem_id: {} for row in rows}

    @property
    def waiting(self) -> bool:
        return bool(self._requests)

    def submit(self, request: Request) -> None:
        """Have a finished response graded."""
        self._requests[request.prompt_id][request.sibling] = request
        text = self._tokenizer.decode(request.tokens, skip_special_tokens=True)
        self._grader.submit((request.prompt_id, request.sibling), text, self._golds[request.prompt_id])

    def collect(self, *, wait: bool) -> int:
        """File the verdicts there are, with `wait` all of them; how many problems they completed."""
        completed = 0
        for (problem_id, sibling), verdict in self._grader.results(wait=wait).items():
            verdicts = self._verdicts[problem_id]
            verdicts[sibling] = verdict
            if len(verdicts) == self._samples:
                requests = self._requests.pop(problem_id)
                self._records.append(_record(problem_id, requests, self._verdicts.pop(problem_id)))
                completed += 1
        return completed


def record_path(output: Path, problems: ProblemSet, seed: int) -> Path:
    """Where the finished problems of one set and seed are kept."""
    return output / problems.name / f"seed{seed}.jsonl"


def _record(problem_id: str, requests: dict[int, Request], verdicts: dict[int, Verdict]) -> Record:
    ordered = [verdicts[sibling] for sibling in sorted(verdicts)]
    finished = [requests[sibling] for sibling in sorted(requests)]
    return Record(
        problem_id=problem_id,
        verl=[verdict.verl for verdict in ordered],
        last_box=[verdict.last_box for verdict in ordered],
        has_box=[verdict.has_box for verdict in ordered],
        truncated=[request.finish_reason == "length" for request in finished],
        response_tokens=[len(request.tokens) for request in finished],
        grading_failures=sum(verdict.timed_out or verdict.worker_died for verdict in ordered),
    )


def _pages(decoder: Decoder, settings: EvaluationSettings) -> int:
    """Pages for all active requests at full length, as far as the memory goes."""
    longest = settings.max_prompt_tokens + settings.max_response_tokens
    wanted = settings.max_active_requests * -(-longest // PAGE_TOKENS)
    if decoder.device.type != "cuda":
        return min(wanted, max(CPU_PAGES, -(-longest // PAGE_TOKENS)))
    free, _ = torch.cuda.mem_get_info(decoder.device)
    budget, slots = int(free * GPU_SHARE), settings.max_active_requests
    plan = plan_memory(KVConfig("bf16"), decoder.cache_shape(), budget_bytes=budget, num_slots=slots)
    return min(wanted, plan.pages)
