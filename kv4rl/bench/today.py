"""What people would pick today, and ours, in one process on one GPU: same weights, same prompts, same lengths.

`transformers` `generate` (one static batch) and `generate_batch` (its continuous batching) against this engine with
each cache. Every response has exactly `--new-tokens` tokens, drawn at temperature 1 without cuts; the clock includes
prefill and everything the call does after a short warm-up call. Ours records a log-probability for each token as well.
Weights are random at the true shape: they change no kernel's work.

    python -m kv4rl.bench today --model qwen3-4b
    python -m kv4rl.bench today --model qwen3-4b --new-tokens 2048
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from kv4rl.bench.engines import bench_engine
from kv4rl.bench.refusals import LARGEST_COUNT, require_counts, require_flashinfer, require_writable
from kv4rl.cache.main_cache import pages_for
from kv4rl.cli import one_sentence
from kv4rl.config import PRECISIONS, RolloutConfig, require, require_integer
from kv4rl.device import choose_device, release_memory
from kv4rl.engine.request import Request
from kv4rl.engine.sampler import Sampling
from kv4rl.model.decoder import Decoder
from kv4rl.model.shapes import SHAPES, random_model, shape_config
from kv4rl.results import RESULTS, result_row, write_rows

EOS = 1  # ends responses of forced length; nothing else does
WARMUP_TOKENS = 4
BASE = "transformers_generate"
BASELINES = (BASE, "transformers_generate_batch")
SPEEDUPS = {base: base.replace("transformers", "speedup_vs") for base in BASELINES}  # metrics, within one run
ENOUGH_S, MOST = 6.0, 3  # calls are repeated until they took so long together, and so often at most
STEP_TOKENS = 8192

Generate = Callable[[int], Sequence[Sequence[int]]]  # new tokens of each response -> the responses


class Length:
    """The forced length of every response of an engine; `now` may change between calls."""

    now = 1

    def __call__(self, request: Request) -> int:
        return self.now


def transformers_model(decoder: Decoder) -> PreTrainedModel:
    """The same network in transformers, over the very tensors of `decoder`."""
    with torch.device(decoder.device):
        model = AutoModelForCausalLM.from_config(decoder.config.hf, dtype=decoder.dtype, attn_implementation="sdpa")
    tied = {"lm_head.weight": decoder.head_weight} if decoder.config.tied_head else {}
    model.load_state_dict(dict(decoder.named_parameters()) | tied, assign=True)
    model.tie_weights()
    model.generation_config.eos_token_id = None  # what a call leaves unset is taken from here
    return model.eval().requires_grad_(False)


def _generation(tokens: int) -> GenerationConfig:
    """Temperature 1, no cuts, no end before `tokens` new ones."""
    return GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=0)


def static_batch(model: PreTrainedModel, prompts: list[list[int]]) -> Generate:
    """`generate` over all prompts at once; they are equally long, so nothing is padded."""
    ids = torch.tensor(prompts, device=model.device)

    def generate(tokens: int) -> list[list[int]]:
        config = _generation(tokens)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return out[:, ids.shape[1] :].tolist()

    return generate


def continuous_batching(model: PreTrainedModel, prompts: list[list[int]]) -> Generate:
    """`generate_batch`, its settings left to itself; paged SDPA attention where flash-attn is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        model.set_attn_implementation("paged|sdpa")  # else it may look for kernels on the hub
    # Left to itself it takes the better part of the memory for its cache: wanted on a GPU, hopeless on a CPU.
    few = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256) if model.device.type == "cpu" else None

    def generate(tokens: int) -> list[list[int]]:
        config = _generation(tokens)
        config.eos_token_id = -1  # its word for "none"
        found = model.generate_batch(prompts, generation_config=config, continuous_batching_config=few)
        return [output.generated_tokens for output in found.values()]

    return generate


def ours(decoder: Decoder, precision: str, prompts: list[list[int]], most_tokens: int) -> Generate:
    """This engine: pages for every response to its end, all of them active, graphs captured."""
    count, longest = len(prompts), len(prompts[0]) + most_tokens
    rollout = RolloutConfig(
        max_prompt_tokens=len(prompts[0]), max_response_tokens=most_tokens, max_active_requests=count,
        step_tokens=max(STEP_TOKENS, count), workspace_tokens=max(4 * STEP_TOKENS, longest),
        cache_pages=count * (pages_for(longest) + 1),  # one more: who is admitted leaves each resident room to grow
    )  # fmt: skip
    # Prompts enter, and so end, STEP_TOKENS at a time: these are the batches there are.
    wave = max(1, STEP_TOKENS // len(prompts[0]))
    buckets = sorted({min(count, size) for size in range(wave, count + wave, wave)})
    length = Length()
    engine = bench_engine(decoder, precision, rollout, eos_token_ids=(EOS,), forced_lengths=length, buckets=buckets)
    engine.capture()

    def generate(tokens: int) -> list[list[int]]:
        length.now = tokens
        return [response.tokens for response in engine.generate(prompts, Sampling())]

    return generate


def seconds(generate: Generate, tokens: int, count: int, device: torch.device) -> list[float]:
    """Seconds of whole calls, after a short one. Raises RuntimeError unless every response is `tokens` long."""
    generate(min(WARMUP_TOKENS, tokens))
    taken: list[float] = []
    while len(taken) < MOST and sum(taken) < ENOUGH_S:
        _wait(device)
        begin = time.perf_counter()
        responses = generate(tokens)
        _wait(device)
        taken.append(time.perf_counter() - begin)
        lengths = sorted({len(response) for response in responses})
        if lengths != [tokens] or len(responses) != count:
            raise RuntimeError(f"{len(responses)} responses of {lengths} tokens: expected {count} of {tokens}")
    return taken


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    options: argparse.Namespace, decoder: Decoder, say: Callable[[str], None], keep: Callable[[dict], None]
) -> dict[str, list[float]]:
    """Arm -> seconds of its calls, one arm after the other, each with the memory of the one before given back.

    After each arm `keep(found)`: a run cut short has what it measured.
    """
    vocabulary, drawn = decoder.config.vocab_size, np.random.default_rng(options.seed)
    prompts = drawn.integers(2, vocabulary, size=(options.prompts, options.prompt_tokens)).tolist()
    found = {}
    for arm in options.arms:
        if arm in BASELINES:
            make = static_batch if arm == BASE else continuous_batching
            generate = make(transformers_model(decoder), prompts)
        else:
            generate = ours(decoder, arm, prompts, options.new_tokens)
        found[arm] = seconds(generate, options.new_tokens, options.prompts, decoder.device)
        keep(found)
        del generate
        release_memory(decoder.device)
        rate = options.prompts * options.new_tokens / statistics.median(found[arm])
        over = statistics.median(found[BASE]) / statistics.median(found[arm]) if BASE in found else None
        say(f"{arm:>28} {rate:10.0f} tokens/s" + ("" if over is None else f"  {over:6.2f}x of generate"))
    return found


def rows(found: dict[str, list[float]], options: argparse.Namespace) -> list[dict]:
    """Tokens a second of each arm (low and high: its slowest and fastest call), and its speedup over each baseline."""
    total = options.prompts * options.new_tokens
    shape = f"{options.prompts}x{options.prompt_tokens}+{options.new_tokens}"
    about, made = {"experiment": "today", "model": options.model, "shape": shape}, []
    for arm, taken in found.items():
        rate = {"metric": "tokens_per_s", "unit": "tokens/s", "value": total / statistics.median(taken)}
        spread = {"low": total / max(taken), "high": total / min(taken), "n": len(taken)}
        made.append(result_row(**about, arm=arm, **rate, **spread))
        for base in filter(found.__contains__, BASELINES):
            value = statistics.median(found[base]) / statistics.median(taken)
            made.append(result_row(**about, arm=arm, metric=SPEEDUPS[base], unit="x", value=value))
    return made


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kv4rl.bench today", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arms = (*BASELINES, *PRECISIONS)
    model = "qwen3-4b" if torch.cuda.is_available() else "mini-qwen3"  # billions of weights take a CPU hours
    parser.add_argument("--model", default=model, help=f"{', '.join(SHAPES)} (random weights), or a shipped one")
    parser.add_argument("--arms", nargs="+", default=list(arms), choices=arms)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", default="today.csv", help="CSV under data/results, or an absolute path")
    options = parser.parse_args(arguments)
    with one_sentence("kv4rl.bench today"):
        require_counts(options, prompts=1, prompt_tokens=1, new_tokens=1)
        tokens = options.prompts * (options.prompt_tokens + options.new_tokens)
        require(tokens <= LARGEST_COUNT, "prompts x tokens", tokens, f"at most {LARGEST_COUNT}")
        require_integer(options.seed, "seed", 0)
        choose_device(options.device)
        require_flashinfer({"bf16"} & set(options.arms), options.device)
        require_writable(options.out)
        require(len(set(options.arms)) == len(options.arms), "arms", options.arms, "each once")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with one_sentence("kv4rl.bench today"):
        longest, most = options.prompt_tokens + options.new_tokens, shape_config(options.model).max_positions
        require(longest <= most, "prompt-tokens and new-tokens", longest, f"at most the model's {most} positions")
        decoder = random_model(options.model, device=options.device)
    lengths = f"{options.prompts} prompts of {options.prompt_tokens} tokens, {options.new_tokens} new ones each"
    print(f"card: {options.model}, random weights at the true shape, {decoder.dtype}, {lengths}", flush=True)
    keep = lambda found: write_rows(options.out, rows(found, options))
    found = measure(options, decoder, lambda text: print(text, flush=True), keep)
    rates = {row["arm"]: round(row["value"]) for row in rows(found, options) if row["metric"] == "tokens_per_s"}
    path = RESULTS / options.out  # an absolute path stays itself
    print(json.dumps({"experiment": "today", "model": options.model, "file": str(path), "tokens_per_s": rates}))


if __name__ == "__main__":
    main()
