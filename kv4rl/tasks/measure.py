"""What a mini model can do: `python -m kv4rl.tasks.measure data/models/mini-qwen3`.

Samples responses to held-out problems with transformers' own `generate`, and reports reward, lengths and the kind of
each response's first error, at temperature 1 and greedily.
"""

import argparse
import json
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv4rl.tasks.mini import MiniProblem, first_error
from kv4rl.tasks.stream import mini_problems

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


@torch.no_grad()
def sample_responses(
    model, tokenizer, problems: list[MiniProblem], *, seed: int, greedy: bool = False, max_tokens: int = 1024
) -> Measurement:
    """One response to each problem, as one batch (all prompts have the same length)."""
    prompts = torch.tensor([tokenizer.encode(problem.prompt) for problem in problems], device=model.device)
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=max_tokens, **how)
    responses = out[:, prompts.shape[1] :]
    ended = responses == tokenizer.eos_token_id
    truncated = ~ended.any(1)
    tokens = torch.where(truncated, responses.shape[1], ended.int().argmax(1) + 1)
    texts = [tokenizer.decode(row[:n], skip_special_tokens=True) for row, n in zip(responses, tokens, strict=True)]
    return Measurement(problems, texts, tokens.cpu().numpy(), truncated.cpu().numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="+", help="model directories")
    parser.add_argument("--problems", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=1024)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problems = mini_problems(given.seed, "evaluation", given.problems)
    for directory in given.model:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        for name, greedy in (("temperature_1", False), ("greedy", True)):
            settings = {"seed": given.seed, "greedy": greedy, "max_tokens": given.max_tokens}
            summary = sample_responses(model, tokenizer, problems, **settings).summary()
            print(json.dumps({"model": str(directory), "sampling": name} | summary))


if __name__ == "__main__":
    main()
