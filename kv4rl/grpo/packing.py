"""Responses laid end to end: no padding, so no pad id that a mask could mistake for a token (Table A1).

One sequence is prompt + response without its last token, which predicts nothing. The rows that predict the response are
then the last R of the sequence, for every response length R: masks come from lengths, EOS is a target like any other,
and a truncated response has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from kv4rl.config import require
from kv4rl.engine.request import Request
from kv4rl.rollout.group import PromptGroup


@dataclass(frozen=True)
class TrainBatch:
    """S packed sequences of N input tokens that predict M response tokens.

    A response without tokens is no sequence: it counts in its group's advantages and nowhere else.
    """

    input_ids: torch.Tensor  # int64 [N]
    positions: torch.Tensor  # int64 [N], from 0 in every sequence
    cu_seqlens: torch.Tensor  # int32 [S + 1]: sequence i is input_ids[cu_seqlens[i] : cu_seqlens[i + 1]]
    response_lengths: torch.Tensor  # int64 [S], sum M
    targets: torch.Tensor  # int64 [M]: the sampled tokens, sequence after sequence
    predicting_rows: torch.Tensor  # int64 [M]: which input row's hidden state predicts targets[j]
    sampler_logp: torch.Tensor  # float32 [M], as recorded at sampling
    advantages: torch.Tensor  # float32 [M]: the response's advantage, for each of its tokens

    @property
    def num_tokens(self) -> int:
        """M: response tokens. Of the whole minibatch this is N_tok of Eq. 3.5."""
        return len(self.targets)

    def to(self, device: torch.device | str) -> "TrainBatch":
        return TrainBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def sequences(self, start: int, stop: int) -> "TrainBatch":
        """Sequences [start, stop) as a batch of their own."""
        first, last = int(self.cu_seqlens[start]), int(self.cu_seqlens[stop])
        ends = [int(self.response_lengths[:i].sum()) for i in (start, stop)]
        rows, tokens = slice(first, last), slice(*ends)
        return TrainBatch(
            input_ids=self.input_ids[rows],
            positions=self.positions[rows],
            cu_seqlens=self.cu_seqlens[start : stop + 1] - first,
            response_lengths=self.response_lengths[start:stop],
            targets=self.targets[tokens],
            predicting_rows=self.predicting_rows[tokens] - first,
            sampler_logp=self.sampler_logp[tokens],
            advantages=self.advantages[tokens],
        )


def join(parts: Sequence[TrainBatch]) -> TrainBatch:
    """Batches laid end to end as one. Raises ValueError without any."""
    require(len(parts) > 0, "parts", len(parts), "at least one batch")
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part.input_ids))
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(TrainBatch)}
    shifted = zip(parts, starts, strict=False)
    columns["predicting_rows"] = [part.predicting_rows + start for part, start in shifted]
    ends = [part.cu_seqlens[1:] + start for part, start in zip(parts, starts, strict=False)]
    columns["cu_seqlens"] = [parts[0].cu_seqlens[:1], *ends]
    return TrainBatch(**{name: torch.cat(values) for name, values in columns.items()})


def pack(groups: Sequence[PromptGroup], advantages: torch.Tensor) -> TrainBatch:
    """Pack every response of `groups`; advantages: [len(groups), G].

    Raises ValueError for a shape that does not fit, an empty prompt, arrays of unequal length and log-probs that are no
    log-probabilities (NaN, infinite, positive), naming the response.
    """
    given = tuple(advantages.shape)
    for group in groups:
        require(given == (len(groups), len(group.requests)), "advantages.shape", given, "[groups, responses per group]")
    requests = [request for group in groups for request in group.requests]
    return pack_requests(requests, advantages.flatten().tolist())


def pack_requests(requests: Sequence[Request], advantages: Sequence[float]) -> TrainBatch:
    """Pack responses, one advantage each; see `pack`."""
    kept = [(request, advantage) for request, advantage in zip(requests, advantages, strict=True) if request.tokens]
    for request, _ in kept:
        _check(request)
    responses = torch.tensor([len(request.tokens) for request, _ in kept], dtype=torch.int64)
    inputs = torch.tensor([len(r.prompt_tokens) + len(r.tokens) - 1 for r, _ in kept], dtype=torch.int64)
    ends = torch.cumsum(inputs, dim=0)
    return TrainBatch(
        input_ids=_flat([r.prompt_tokens + r.tokens[:-1] for r, _ in kept], torch.int64),
        positions=_flat([range(length) for length in inputs.tolist()], torch.int64),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
        response_lengths=responses,
        targets=_flat([r.tokens for r, _ in kept], torch.int64),
        predicting_rows=_flat(
            [range(e - n, e) for e, n in zip(ends.tolist(), responses.tolist(), strict=True)], torch.int64
        ),
        sampler_logp=_flat([r.sampler_logp for r, _ in kept], torch.float32),
        advantages=torch.repeat_interleave(torch.tensor([a for _, a in kept], dtype=torch.float32), responses),
    )


def microbatches(batch: TrainBatch, max_tokens: int) -> list[TrainBatch]:
    """Split at sequence boundaries, in order, into parts of at most `max_tokens` input tokens.

    A sequence longer than the budget is a part of its own. An empty batch has no parts.
    """
    require(max_tokens >= 1, "microbatch_tokens", max_tokens, "an integer >= 1")
    ends = batch.cu_seqlens.tolist()
    parts, start = [], 0
    for i in range(1, len(ends)):
        if ends[i] - ends[start] > max_tokens and i - 1 > start:
            parts.append(batch.sequences(start, i - 1))
            start = i - 1
    if len(ends) > 1:
        parts.append(batch.sequences(start, len(ends) - 1))
    return parts


def _check(request: Request) -> None:
    name = f"response {request.sibling} to prompt {request.prompt_id!r}"
    require(len(request.prompt_tokens) > 0, f"prompt of {name}", request.prompt_tokens, "at least one token")
    lengths = len(request.tokens), len(request.sampler_logp)
    require(lengths[0] == lengths[1], f"tokens and sampler_logp of {name}", lengths, "equal lengths")
    logp = torch.tensor(request.sampler_logp)
    wrong = logp[~(torch.isfinite(logp) & (logp <= 0))]
    require(len(wrong) == 0, f"sampler_logp of {name}", wrong[:3].tolist(), "finite log-probabilities <= 0")


def _flat(rows: list, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)
