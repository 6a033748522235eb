"""Batches of worked mini tasks for pretraining: generated as they are needed, grouped by length, padded."""

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from kv4rl.tasks.mini import MiniProblem, draw_problem, write_solution
from kv4rl.tasks.tokenizer import BOX, EOS, PAD, TOKENS

PAD_ID, EOS_ID, BOX_ID = (TOKENS.index(token) for token in (PAD, EOS, BOX))
PROMPT_TOKENS = len("n=08 k=02 r=2 x=12,45,78,03\n")  # every prompt has as many
IGNORED = -100  # cross_entropy's label for positions without a loss
_POOL = 4096  # problems drawn together and sorted by length, so that padding is rare
_ID_OF_BYTE = np.full(256, PAD_ID, dtype=np.uint8)
for _index, _token in enumerate(TOKENS):
    if len(_token) == 1:
        _ID_OF_BYTE[ord(_token)] = _index
_ID_OF_BYTE[ord("B")] = BOX_ID
_ID_OF_BYTE[ord("E")] = EOS_ID


def encode_worked(problem: MiniProblem, solution: str) -> np.ndarray:
    """Ids of prompt, solution and end of sequence; the tokenizer's own ids, at the speed of a table look-up."""
    text = problem.prompt + solution.replace(BOX, "B") + "E"
    return _ID_OF_BYTE[np.frombuffer(text.encode("ascii"), dtype=np.uint8)]


def pad_batch(rows: list[np.ndarray]) -> torch.Tensor:
    """Rows of ids, right-padded: uint8 [len(rows), longest]."""
    padded = np.full((len(rows), max(map(len, rows))), PAD_ID, dtype=np.uint8)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(padded)


def length_batches(rows: list[np.ndarray], batch_tokens: int) -> list[torch.Tensor]:
    """Cut rows, sorted by length, into padded batches of at most `batch_tokens` ids (or one row)."""
    batches, pending = [], []
    for row in sorted(rows, key=len):
        if pending and (len(pending) + 1) * len(row) > batch_tokens:
            batches.append(pad_batch(pending))
            pending = []
        pending.append(row)
    return batches + [pad_batch(pending)]


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    """Next-token labels [rows, length - 1] of padded ids: the response's tokens and its end, nothing else."""
    labels = ids[:, 1:].long()
    labels = labels.masked_fill(labels == PAD_ID, IGNORED)
    labels[:, : PROMPT_TOKENS - 1] = IGNORED
    return labels


class WorkedProblems(IterableDataset):
    """An endless stream of padded batches of training problems, different in every worker and for every seed."""

    def __init__(self, seed: int, slip_rate: float, batch_tokens: int):
        self.seed, self.slip_rate, self.batch_tokens = seed, slip_rate, batch_tokens

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        rng = random.Random(f"pretrain {self.seed} {worker.id if worker else 0}")
        while True:
            problems = [draw_problem(rng) for _ in range(_POOL)]
            rows = [encode_worked(p, write_solution(p, self.slip_rate, rng)) for p in problems]
            batches = length_batches(rows, self.batch_tokens)
            rng.shuffle(batches)
            yield from batches


def training_batches(seed: int, slip_rate: float, batch_tokens: int, workers: int) -> Iterator[torch.Tensor]:
    """Batches from `workers` processes (0: this one), in an order that depends on the arguments alone."""
    stream = WorkedProblems(seed, slip_rate, batch_tokens)
    return iter(DataLoader(stream, batch_size=None, num_workers=workers, prefetch_factor=8 if workers else None))
