"""One prompt, answered through each KV cache: what a reader can see of four-bit keys and values without any statistics.

    python -m kv4rl.generate --model smollm2-135m --prompt "Why is the sky blue?" --max-new-tokens 64
    python -m kv4rl.generate --model mini-qwen3 --prompt $'n=08 k=02 r=2 x=12,45,78,03\\n' --temperature 0

All precisions draw with the same noise, so texts differ only where the caches made a probability differ by enough. The
last column needs no noise: the first token at which a precision's greedy text leaves that of the unquantised cache.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from kv4rl.attention.backends import BackendUnavailable, choose_backend
from kv4rl.cache.main_cache import pages_for
from kv4rl.cli import interruptible, one_sentence
from kv4rl.config import (
    PAGE_TOKENS,
    PRECISIONS,
    InputError,
    KVConfig,
    RolloutConfig,
    require,
    require_integer,
    require_protected_fits,
)
from kv4rl.device import choose_device
from kv4rl.engine.engine import Response, RolloutEngine
from kv4rl.engine.memory import PlanTooLarge
from kv4rl.engine.sampler import Sampling
from kv4rl.fidelity.agreement import common_tokens
from kv4rl.model.decoder import Decoder
from kv4rl.model.weights import eos_token_ids, load_decoder, load_tokenizer
from kv4rl.tasks.tokenizer import unknown_characters

BASELINE = "bf16"


@dataclass(frozen=True)
class Sample:
    """What one precision wrote, and what its cache cost."""

    precision: str
    response: Response
    greedy: Response
    seconds: float  # of `response`, its prefill included
    bytes_per_token: float  # of the paged cache, all layers
    side_bytes: int  # INT8 copies of the sink and recent positions: a constant per request, 0 but for kv4rl

    @property
    def tokens_per_s(self) -> float:
        return len(self.response.tokens) / self.seconds

    def leaves(self, baseline: "Sample") -> int | None:
        """First token, counted from 1, at which the greedy text differs from the baseline's; None if it never does."""
        ours, theirs = self.greedy.tokens, baseline.greedy.tokens
        return None if ours == theirs else common_tokens(ours, theirs) + 1


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, *, raw: bool = False) -> list[int]:
    """Token ids of a user's turn in the chat template, or of the plain text with `raw` or without a template.

    Raises InputError on an empty text, bytes that are no UTF-8, and characters for which the tokenizer has no token.
    """
    require(bool(text), "prompt", text, "some text")
    require(not any("\ud800" <= c <= "\udfff" for c in text), "prompt", text, "UTF-8: it holds bytes that are none")
    unknown = unknown_characters(tokenizer, text)
    known = "only characters that the model's tokenizer knows (the mini model's prompts: n=08 k=02 r=2 x=12,45,78,03)"
    require(not unknown, "characters of the prompt", unknown, known)
    if raw or not tokenizer.chat_template:
        return tokenizer.encode(text)
    turn = [{"role": "user", "content": text}]
    templated = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(templated, add_special_tokens=False)


def make_engine(decoder: Decoder, kv: KVConfig, prompt_tokens: int, new_tokens: int, **given) -> RolloutEngine:
    """An engine with room for one request of these lengths; `given`: `eos_token_ids`, and `backend` if not "auto"."""
    limits = RolloutConfig(
        max_prompt_tokens=prompt_tokens, max_response_tokens=new_tokens, max_active_requests=1,
        workspace_tokens=prompt_tokens + new_tokens, cache_pages=pages_for(prompt_tokens + new_tokens),
    )  # fmt: skip
    return RolloutEngine(decoder, kv, limits, **given)


def sample_through(engine: RolloutEngine, prompt: Sequence[int], sampling: Sampling) -> Sample:
    """The response `sampling` asks for and the greedy one, of one prompt through the engine's cache."""
    started = time.perf_counter()
    (response,) = engine.generate([prompt], sampling)
    seconds = time.perf_counter() - started
    greedy = response if sampling.temperature == 0 else engine.generate([prompt], Sampling(temperature=0.0))[0]
    cache = engine.cache
    return Sample(cache.kv.precision, response, greedy, seconds, cache.bytes_per_page / PAGE_TOKENS, cache.side.nbytes)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kv4rl.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a directory, a name under data/models, or a hub id")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", help="text; a user's turn where the model has a chat template")
    text.add_argument("--prompt-file", type=Path, help="a UTF-8 file that holds it")
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--seed", type=int, default=43, help="of the sampling noise")
    parser.add_argument("--sink", type=int, default=KVConfig.sink_tokens, help="s, positions protected at the start")
    parser.add_argument("--recent", type=int, default=KVConfig.recent_tokens, help="w, most recent positions protected")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--backend", default="auto")
    return parser.parse_args(words)


@dataclass(frozen=True)
class Job:
    """What the arguments ask for, loaded and checked."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    prompt: list[int]
    sampling: Sampling
    caches: list[KVConfig]  # the unquantised one first: the others' greedy texts are compared with its
    eos_token_ids: tuple[int, ...]
    new_tokens: int
    backend: str

    def run(self) -> Iterator[Sample]:
        """One precision after the other."""
        for kv in self.caches:
            sizes = (len(self.prompt), self.new_tokens)
            engine = make_engine(
                self.decoder, kv, *sizes, eos_token_ids=self.eos_token_ids, backend=self.backend
            )  # fmt: skip
            yield sample_through(engine, self.prompt, self.sampling)


def set_up(given: argparse.Namespace) -> Job:
    """Load what the arguments name. Raises ValueError, before anything is sampled, for what does not fit together."""
    names = list(dict.fromkeys([BASELINE, *given.precisions]))
    caches = [KVConfig(name, given.sink, given.recent) for name in names]
    require_integer(given.max_new_tokens, "max-new-tokens", 1)
    sampling = Sampling(temperature=given.temperature, seed=given.seed)
    device = choose_device(given.device)
    choose_backend(given.backend, device)
    tokenizer, stops = load_tokenizer(given.model), eos_token_ids(given.model)
    text = given.prompt if given.prompt_file is None else _read(given.prompt_file)
    prompt = encode_prompt(tokenizer, text, raw=given.raw)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = load_decoder(given.model, dtype=dtype, device=device).requires_grad_(False)
    longest, positions = len(prompt) + given.max_new_tokens, decoder.config.max_positions
    expected = f"at most the model's {positions} positions; the prompt has {len(prompt)} tokens"
    require(longest <= positions, "prompt and new tokens", longest, expected)
    for kv in caches:
        require_protected_fits(kv, positions)
    return Job(decoder, tokenizer, prompt, sampling, caches, stops, given.max_new_tokens, given.backend)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"prompt-file={str(path)!r}: expected UTF-8 ({error})") from error


def table(samples: Sequence[Sample], baseline: Sample) -> str:
    """One line a precision: tokens, speed, bytes, and where its greedy text leaves the baseline's."""
    lines = [f"{'precision':>9}  tokens  tokens/s  cache bytes/token  + side buffer  leaves bf16's greedy text at"]
    for sample in samples:
        at = sample.leaves(baseline)
        never = "-" if sample is baseline else f"no token of {len(sample.greedy.tokens)}"
        lines.append(
            f"{sample.precision:>9}  {len(sample.response.tokens):6d}  {sample.tokens_per_s:8.1f}"
            f"  {sample.bytes_per_token:17.0f}  {sample.side_bytes:13d}  {never if at is None else f'token {at}'}"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> list[Sample]:
    """Run the command; returns one sample a precision asked for, in `PRECISIONS`' order with bf16 first."""
    given = parse_arguments(words)
    with one_sentence("kv4rl.generate", kinds=(InputError, OSError, BackendUnavailable)):
        job = set_up(given)
    print(f"{given.model}, prompt of {len(job.prompt)} tokens, temperature {given.temperature:g}, seed {given.seed}")
    samples = []
    with interruptible("kv4rl.generate"), one_sentence("kv4rl.generate", kinds=(PlanTooLarge,), status=1):
        for sample in job.run():
            samples.append(sample)
            if sample.precision in given.precisions:
                text = job.tokenizer.decode(sample.response.tokens, skip_special_tokens=True)
                print(f"\n--- {sample.precision} ({sample.response.finish_reason})\n{text}", flush=True)
    baseline = samples[0]
    samples = [sample for sample in samples if sample.precision in given.precisions]
    print(f"\n{table(samples, baseline)}")
    return samples


if __name__ == "__main__":
    main()
