"""Train the mini model from scratch: `python -m kv4rl.tasks.pretrain` (two minutes on one H200).

A Qwen3 of 2.4M parameters (head_dim 128, 4 query and 2 KV heads) learns from worked mini tasks in which a step goes
wrong with probability `slip_rate`. It ends up skilled and careless: its greedy answers are right, its temperature-1
samples slip as its texts did, and that is what RL can mend. `stop_reward` stops earlier, with less skill as well.

The reward it logs needs no sampling: the probability that a temperature-1 response to a held-out problem is the
correct worked solution is the product of that solution's token probabilities, one forward pass.
"""

import argparse
import csv
import math
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from kv4rl.cli import one_sentence
from kv4rl.config import require, require_integer, require_number
from kv4rl.device import choose_device
from kv4rl.tasks.mini import write_solution
from kv4rl.tasks.pretrain_data import (
    EOS_ID,
    IGNORED,
    PAD_ID,
    encode_worked,
    labels_of,
    length_batches,
    training_batches,
)
from kv4rl.tasks.stream import mini_problems
from kv4rl.tasks.tokenizer import TOKENS, save_tokenizer


@dataclass(frozen=True)
class PretrainConfig:
    """One pretraining run. The defaults make the shipped model on one H200."""

    output: str = "data/models/mini-qwen3"
    stop_reward: float = 1.0  # stop when the expected temperature-1 reward on held-out problems reaches it
    stages: tuple[float, ...] = field(default=())  # expected rewards at which a copy is kept as well
    slip_rate: float = 0.07  # probability that a step of a training text goes wrong
    steps: int = 3200  # length of the cosine schedule, and a bound
    batch_tokens: int = 65536
    learning_rate: float = 1e-3
    warmup: int = 200
    seed: int = 43
    evaluate_every: int = 50
    evaluate_problems: int = 1024
    workers: int = 8  # processes that generate problems; their number is part of what makes a run the same
    hidden: int = 256
    intermediate: int = 512
    layers: int = 3
    device: str = "auto"
    max_seconds: float = math.inf

    def __post_init__(self):
        sizes = ("steps", "batch_tokens", "evaluate_every", "evaluate_problems", "hidden", "intermediate", "layers")
        for name in sizes:
            require_integer(getattr(self, name), name, 1)
        for name in ("warmup", "seed", "workers"):
            require_integer(getattr(self, name), name, 0)
        require_number(self.slip_rate, "slip_rate", 0, 1)
        require_number(self.learning_rate, "learning_rate", 0, 1, open_low=True)
        expected = f"at most steps={self.steps}, or nothing is measured"
        require(self.evaluate_every <= self.steps, "evaluate_every", self.evaluate_every, expected)


def build_model(config: PretrainConfig) -> Qwen3ForCausalLM:
    """A fresh FP32 model on the CPU, the same for the same seed."""
    shape = Qwen3Config(
        vocab_size=len(TOKENS), hidden_size=config.hidden, intermediate_size=config.intermediate,
        num_hidden_layers=config.layers, num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        max_position_embeddings=2048, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=EOS_ID, pad_token_id=PAD_ID, use_cache=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Qwen3ForCausalLM(shape)


def token_logits(model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """FP32 logits [rows, length - 1, vocab] that predict ids[:, 1:]; right padding needs no mask under causality."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
        return model(input_ids=ids[:, :-1].long(), use_cache=False).logits.float()


def held_out_batches(config: PretrainConfig, device: torch.device) -> list[torch.Tensor]:
    """Correct worked solutions of the evaluation split, padded by length."""
    problems = mini_problems(config.seed, "evaluation", config.evaluate_problems)
    rows = [encode_worked(problem, write_solution(problem)) for problem in problems]
    return [batch.to(device) for batch in length_batches(rows, config.batch_tokens)]


@torch.no_grad()
def expected_reward(model: Qwen3ForCausalLM, batches: list[torch.Tensor]) -> dict[str, float]:
    """Expected temperature-1 and greedy reward of the correct solutions in `batches`, and their loss per token.

    A response is counted when it is the worked solution token for token: a lower bound on the reward, tight but for
    the one in a hundred wrong chains that end on the right answer.
    """
    sampled, greedy, loss, tokens = [], [], 0.0, 0
    for ids in batches:
        logits, labels = token_logits(model, ids), labels_of(ids)
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        losses = losses.view_as(labels)
        sampled.append(losses.sum(1).neg().exp())
        greedy.append(((logits.argmax(-1) == labels) | (labels == IGNORED)).all(1).float())
        loss, tokens = loss + losses.sum().item(), tokens + int((labels != IGNORED).sum())
    return {
        "reward": torch.cat(sampled).mean().item(),
        "greedy": torch.cat(greedy).mean().item(),
        "held_out_loss": loss / tokens,
    }


def save_model(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write BF16 weights, config, generation config (plain temperature 1) and tokenizer; `model` is left as it is."""
    copy = Qwen3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    copy.to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory)


def learning_rate_at(step: int, config: PretrainConfig) -> float:
    """Linear warmup, then a cosine down to a tenth over `config.steps`."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train_step(model, optimizer, ids: torch.Tensor, learning_rate: float) -> torch.Tensor:
    """One AdamW step on the token mean of one batch; returns its loss without waiting for it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    loss = cross_entropy(token_logits(model, ids).flatten(0, 1), labels_of(ids).flatten(), ignore_index=IGNORED)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def pretrain(config: PretrainConfig) -> list[dict]:
    """Train until the wanted reward (or `steps`, or `max_seconds`); returns the loss curve, also in `loss.csv`."""
    device = choose_device(config.device)
    model = build_model(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    batches = training_batches(config.seed, config.slip_rate, config.batch_tokens, config.workers)
    held_out, curve, stages, tokens = held_out_batches(config, device), [], sorted(config.stages), 0
    start = time.monotonic()
    for step in tqdm(range(config.steps), desc="pretrain", mininterval=10):
        ids = next(batches).to(device, non_blocking=True)
        loss = train_step(model, optimizer, ids, learning_rate_at(step, config))
        tokens += ids.numel()
        if (step + 1) % config.evaluate_every:
            continue
        seconds = time.monotonic() - start
        row = {"step": step + 1, "tokens": tokens, "seconds": round(seconds, 1), "loss": loss.item()}
        curve.append(row | expected_reward(model, held_out))
        tqdm.write(" ".join(f"{k}={v:.4g}" for k, v in curve[-1].items()))
        while stages and curve[-1]["reward"] >= stages[0]:
            save_model(model, Path(f"{config.output}-{stages.pop(0):.2f}"))
        if curve[-1]["reward"] >= config.stop_reward or seconds > config.max_seconds:
            break
    save_model(model, Path(config.output))
    write_curve(curve, Path(config.output) / "loss.csv")
    return curve


def write_curve(curve: list[dict], path: Path) -> None:
    """One line an evaluation: step, padded tokens, seconds, loss, and `expected_reward`'s columns."""
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, fieldnames=list(curve[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in curve)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for item in fields(PretrainConfig):
        flag = "--" + item.name.replace("_", "-")
        if item.name == "stages":
            parser.add_argument(flag, type=float, nargs="*", default=())
        else:
            parser.add_argument(flag, type=type(item.default), default=item.default, help=f"default {item.default}")
    given = vars(parser.parse_args(arguments))
    with one_sentence("kv4rl.tasks.pretrain"):
        config = PretrainConfig(**given | {"stages": tuple(given["stages"])})
        choose_device(config.device)
    pretrain(config)


if __name__ == "__main__":
    main()
