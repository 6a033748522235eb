"""The token histories every arm is forced along: fixed prompts, one unquantised response each (§B.5)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kv4rl.config import PAGE_TOKENS, KVConfig, RolloutConfig, require
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.sampler import Sampling
from kv4rl.model.decoder import Decoder
from kv4rl.results import REPOSITORY
from kv4rl.tasks.jsonl import read_jsonl
from kv4rl.tasks.stream import mini_problem

POSITIONS = 8  # states per response (§B.5)
PROMPTS_FILE = REPOSITORY / "data" / "tasks" / "fidelity_prompts.jsonl"


def state_positions(length: int) -> tuple[int, ...]:
    """Generated-prefix indices round(j (L - 1) / 7), j = 0 … 7, of a response of L tokens (§B.5).

    Index i is the state after i generated tokens, whose logits give token i; they are distinct because L >= 8.
    Raises ValueError below 8 tokens.
    """
    require(length >= POSITIONS, "response tokens", length, f"at least {POSITIONS}, one per state")
    return tuple(round(j * (length - 1) / (POSITIONS - 1)) for j in range(POSITIONS))


@dataclass(frozen=True)
class History:
    """One prompt and the response sampled for it, as token ids."""

    prompt_id: str
    prompt: list[int]
    response: list[int]

    def __post_init__(self):
        require(len(self.prompt) >= 1, f"prompt of {self.prompt_id}", self.prompt, "at least one token")
        require(
            len(self.response) >= POSITIONS, f"response tokens of {self.prompt_id}", len(self.response),
            f"at least {POSITIONS}, one per state (§B.5)",
        )  # fmt: skip

    @property
    def positions(self) -> tuple[int, ...]:
        """Generated-prefix indices of its eight states."""
        return state_positions(len(self.response))


def save_histories(path: Path, histories: Sequence[History]) -> None:
    """Write the histories as JSON, for another process to be forced along."""
    path.write_text(json.dumps([asdict(history) for history in histories]))


def load_histories(path: Path) -> list[History]:
    """Read what `save_histories` wrote."""
    return [History(**fields) for fields in json.loads(path.read_text())]


def text_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, *, shots: int = 0, path: Path = PROMPTS_FILE
) -> list[tuple[str, list[int]]]:
    """The first `count` (prompt_id, tokens) of a .jsonl file with `prompt_id`, `question` and `solution`.

    With `shots`, the questions and solutions of the next `shots` lines (going round) stand before each question as
    earlier turns: longer contexts, still fixed. Uses the tokenizer's chat template. Raises ValueError if the file has
    too few lines, a line lacks a field, or the tokenizer has no chat template.
    """
    records = read_jsonl(path)
    lines = [record for _, record in records]
    require(1 <= count <= len(lines), "prompts", count, f"1 … {len(lines)}, the lines of {path}")
    require(0 <= shots < len(lines), "shots", shots, f"0 … {len(lines) - 1}")
    require(bool(tokenizer.chat_template), "tokenizer", "no chat template", "a chat model for prompts from a file")
    for where, line in records:
        missing = [name for name in ("prompt_id", "question", "solution") if not line.get(name)]
        require(not missing, f"{where} lacks", missing, "prompt_id, question and solution")
    prompts = []
    for index in range(count):
        turns = []
        for shot in range(1, shots + 1):
            example = lines[(index + shot) % len(lines)]
            turns.append({"role": "user", "content": example["question"]})
            turns.append({"role": "assistant", "content": example["solution"]})
        turns.append({"role": "user", "content": lines[index]["question"]})
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        prompts.append((lines[index]["prompt_id"], tokenizer.encode(text, add_special_tokens=False)))
    return prompts


def mixed_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, *, shots: Sequence[int], path: Path = PROMPTS_FILE
) -> list[tuple[str, list[int]]]:
    """`text_prompts` whose number of solved examples goes round through `shots`: contexts of many lengths."""
    tables = [text_prompts(tokenizer, count, shots=number, path=path) for number in shots]
    return [tables[index % len(tables)][index] for index in range(count)]


def mini_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, *, min_steps: int, seed: int = 0
) -> list[tuple[str, list[int]]]:
    """`count` evaluation problems of the mini task with at least `min_steps` steps (nine tokens each)."""
    require(count >= 1, "prompts", count, "an integer >= 1")
    prompts, index = [], 0
    while len(prompts) < count:
        problem = mini_problem(seed, "evaluation", index)
        if problem.steps >= min_steps:
            prompts.append((f"mini-evaluation-{seed}-{index}", tokenizer.encode(problem.prompt)))
        index += 1
    return prompts


def sample_histories(
    decoder: Decoder,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    eos_token_ids: Sequence[int],
    max_response_tokens: int,
    seed: int,
    backend: str = "auto",
) -> list[History]:
    """One response per (prompt_id, tokens), at temperature one, through the engine's unquantised cache (§B.5).

    Raises ValueError on an empty prompt list and on a response of fewer than eight tokens, naming its prompt.
    """
    require(len(prompts) > 0, "prompts", list(prompts), "at least one prompt")
    longest = max(len(tokens) for _, tokens in prompts)
    pages = sum(-(-(len(tokens) + max_response_tokens) // PAGE_TOKENS) for _, tokens in prompts)
    limits = RolloutConfig(
        max_prompt_tokens=longest,
        max_response_tokens=max_response_tokens,
        max_active_requests=len(prompts),
        workspace_tokens=max(longest, 32768),
        cache_pages=pages,
    )
    engine = RolloutEngine(decoder, KVConfig("bf16"), limits, eos_token_ids=eos_token_ids, backend=backend)
    ids = [prompt_id for prompt_id, _ in prompts]
    sampling = Sampling(temperature=1.0, seed=seed, max_response_tokens=max_response_tokens)
    responses = engine.generate([tokens for _, tokens in prompts], sampling, prompt_ids=ids)
    return [History(r.prompt_id, list(r.prompt_tokens), r.tokens) for r in responses]
