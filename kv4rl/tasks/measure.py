"""What a mini model can do: `python -m kv4rl.tasks.measure data/models/mini-qwen3 --save`.

Samples responses to held-out problems with transformers' own `generate`, and reports reward, lengths and the kind of
each response's first error, at temperature 1 and greedily. `--save` writes the rows of data/results/mini_model.csv.
"""

import argparse
import json
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv4rl.cli import one_sentence
from kv4rl.config import require_integer
from kv4rl.device import choose_device
from kv4rl.model.weights import load_tokenizer, resolve
from kv4rl.results import result_row, write_rows
from kv4rl.tasks.mini import MiniProblem, first_error
from kv4rl.tasks.stream import mini_problems

BATCH = 128
_BOX = re.compile(r"\\boxed\{(\d+)\}")


@dataclass(frozen=True)
class Measurement:
    """Responses to `problems`, one each: texts without end of sequence, token counts with it, cut off or not."""

    problems: list[MiniProblem]
    texts: list[str]
    tokens: np.ndarray
    truncated: np.ndarray

    @property
    def rewards(self) -> np.ndarray:
        """1.0 where the boxed integer is the answer."""
        boxes = [_BOX.findall(text) for text in self.texts]
        right = [bool(b) and int(b[-1]) == int(p.answer) for b, p in zip(boxes, self.problems, strict=True)]
        return np.array(right, dtype=float)

    def summary(self) -> dict:
        """Reward, length quantiles in response tokens, share of cut-off responses, and first errors by kind."""
        kinds = Counter(first_error(p, t) for p, t in zip(self.problems, self.texts, strict=True))
        quantiles = {f"tokens_p{q}": float(np.percentile(self.tokens, q)) for q in (50, 90, 99)}
        return {
            "n": len(self.texts),
            "reward": float(self.rewards.mean()),
            "tokens_mean": float(self.tokens.mean()),
            **quantiles,
            "p99_over_median": quantiles["tokens_p99"] / quantiles["tokens_p50"],
            "truncated": float(self.truncated.mean()),
            "first_error": {kind: count / len(self.texts) for kind, count in kinds.most_common()},
        }


def sample_responses(
    model, tokenizer, problems: list[MiniProblem], *, seed: int, greedy: bool = False, max_tokens: int = 1024
) -> Measurement:
    """One response to each problem, in batches of problems with about as many steps."""
    ordered = sorted(problems, key=lambda problem: problem.steps)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = [
            _sample_batch(model, tokenizer, ordered[i : i + BATCH], greedy, max_tokens)
            for i in range(0, len(ordered), BATCH)
        ]
    texts = [text for part in parts for text in part[0]]
    return Measurement(ordered, texts, np.concatenate([p[1] for p in parts]), np.concatenate([p[2] for p in parts]))


@torch.no_grad()
def _sample_batch(model, tokenizer, problems: list[MiniProblem], greedy: bool, max_tokens: int):
    """(texts, token counts, cut off) of one batch; every prompt has the same length."""
    prompts = torch.tensor([tokenizer.encode(problem.prompt) for problem in problems], device=model.device)
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=max_tokens, **how)
    responses = out[:, prompts.shape[1] :]
    ended = responses == tokenizer.eos_token_id
    truncated = ~ended.any(1)
    tokens = torch.where(truncated, responses.shape[1], ended.int().argmax(1) + 1)
    texts = [tokenizer.decode(row[:n], skip_special_tokens=True) for row, n in zip(responses, tokens, strict=True)]
    return texts, tokens.cpu().numpy(), truncated.cpu().numpy()


def summary_rows(model: str, sampling: str, summary: dict) -> list[dict]:
    """Rows of data/results/mini_model.csv: one a metric, `first_error` flattened to one a kind."""
    flat = {name: value for name, value in summary.items() if name not in ("n", "first_error")}
    flat |= {f"first_error_{kind}": share for kind, share in summary["first_error"].items()}
    shared = {"experiment": "mini_model", "arm": sampling, "model": model, "shape": "held-out", "n": summary["n"]}
    unit = lambda name: "tokens" if name.startswith("tokens") else "fraction"
    return [result_row(**shared, metric=name, unit=unit(name), value=value) for name, value in flat.items()]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="+", help="directories, or names under data/models")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--save", action="store_true", help="write the rows of data/results/mini_model.csv")
    given = parser.parse_args(arguments)
    with one_sentence("kv4rl.tasks.measure"):
        require_integer(given.problems, "problems", 1)
        require_integer(given.max_tokens, "max-tokens", 1)
        models = [resolve(name) for name in given.model]
        for directory in models:
            load_tokenizer(directory)
    device = choose_device("auto")
    problems = mini_problems(given.seed, "evaluation", given.problems)
    for directory in models:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        for sampling, greedy in (("temperature_1", False), ("greedy", True)):
            settings = {"seed": given.seed, "greedy": greedy, "max_tokens": given.max_tokens}
            summary = sample_responses(model, tokenizer, problems, **settings).summary()
            print(json.dumps({"model": directory.name, "sampling": sampling} | summary))
            if given.save:
                write_rows("mini_model.csv", summary_rows(directory.name, sampling, summary))


if __name__ == "__main__":
    main()
