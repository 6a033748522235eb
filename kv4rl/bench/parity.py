"""`python -m kv4rl.bench.parity`: greedy outputs of the engine beside transformers' own, on the same FP32 weights.

The unquantised cache must give transformers' tokens exactly; the quantised ones are counted for comparison. One row a
precision in data/results/fidelity.csv, experiment `parity`, metric `equal_outputs`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from kv4rl.cache.main_cache import pages_for
from kv4rl.cli import one_sentence
from kv4rl.config import PRECISIONS, KVConfig, RolloutConfig, require, require_integer
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.sampler import Sampling
from kv4rl.fidelity.agreement import common_tokens
from kv4rl.model.weights import load_config, load_decoder, load_tokenizer, resolve
from kv4rl.results import result_row, write_rows
from kv4rl.tasks.stream import MiniStream, take


def transformers_greedy(
    directory: Path, prompts: Sequence[Sequence[int]], new_tokens: int, eos: int
) -> list[list[int]]:
    """Greedy tokens of transformers' `generate`, one prompt at a time (no padding), EOS included."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    outputs = []
    for prompt in tqdm(prompts, desc="transformers", disable=None):
        ids = torch.tensor([list(prompt)])
        mask = torch.ones_like(ids)
        done = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, eos_token_id=eos, pad_token_id=eos
        )
        outputs.append(done[0, len(prompt) :].tolist())
    return outputs


def engine_greedy(
    directory: Path, prompts: Sequence[Sequence[int]], new_tokens: int, eos: int, kv: KVConfig
) -> list[list[int]]:
    """Greedy tokens of our engine through the cache `kv`, all prompts in one continuous batch."""
    decoder = load_decoder(directory, dtype=torch.float32, device="cpu")
    longest = max(len(prompt) for prompt in prompts)
    pages = len(prompts) * pages_for(longest + new_tokens)
    limits = RolloutConfig(
        max_prompt_tokens=longest, max_response_tokens=new_tokens, max_active_requests=len(prompts),
        step_tokens=max(1024, len(prompts)), workspace_tokens=max(8192, longest + new_tokens), cache_pages=pages,
    )  # fmt: skip
    engine = RolloutEngine(decoder, kv, limits, eos_token_ids=(eos,))
    responses = engine.generate([list(prompt) for prompt in prompts], Sampling(temperature=0.0))
    return [response.tokens for response in responses]


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[int, float]:
    """(outputs equal to the last token, mean share of tokens before the first difference)."""
    shares = []
    for a, b in zip(ours, theirs, strict=True):
        shares.append(1.0 if list(a) == list(b) else common_tokens(a, b) / max(len(a), len(b)))
    return sum(share == 1.0 for share in shares), sum(shares) / len(shares)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: compare, print, write rows; status 1 if the unquantised cache differs from transformers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="mini-qwen3", help="a directory, a name under data/models, or a hub id")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=43)
    words = parser.parse_args(arguments)
    with one_sentence("kv4rl.bench.parity"):
        require_integer(words.prompts, "prompts", 1)
        require_integer(words.new_tokens, "new-tokens", 1)
        require_integer(words.seed, "seed", 0)
        directory = resolve(words.model)
        tokenizer, positions = load_tokenizer(directory), load_config(directory).max_positions
        eos = tokenizer.eos_token_id
        stream = MiniStream(words.seed, split="evaluation", tokenizer=tokenizer)
        prompts = [prompt.tokens for prompt in take(stream, words.prompts)]
        longest = max(map(len, prompts)) + words.new_tokens
        require(longest <= positions, "prompt and new-tokens", longest, f"at most the model's {positions} positions")
    theirs = transformers_greedy(directory, prompts, words.new_tokens, eos)
    rows = []
    print(f"{'precision':>9}  equal outputs  tokens before the first difference")
    for precision in PRECISIONS:
        ours = engine_greedy(directory, prompts, words.new_tokens, eos, KVConfig(precision))
        equal, share = agreement(ours, theirs)
        print(f"{precision:>9}  {equal:6d} of {len(prompts):<4d}  {share:.1%}")
        rows.append(
            result_row(
                experiment="parity", arm=precision, model=Path(words.model).name, shape="loop",
                metric="equal_outputs", unit="outputs", value=equal, n=len(prompts),
            )
        )  # fmt: skip
    write_rows("fidelity.csv", rows)
    unequal = len(prompts) - rows[0]["value"]
    if unequal:
        raise SystemExit(f"{unequal} of {len(prompts)} outputs differ from transformers' with the unquantised cache")


if __name__ == "__main__":
    main()
