"""One GRPO update: old and reference log-probs, microbatched backward, clipped AdamW step (§3, Table A1)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from kv4rl.config import GRPOConfig, require
from kv4rl.grpo.advantage import group_advantages
from kv4rl.grpo.balance import balanced
from kv4rl.grpo.host_memory import HostMemory
from kv4rl.grpo.logprobs import MAX_LOGITS, token_logprobs
from kv4rl.grpo.loss import LossStats, grpo_loss, unclipped_tis_weights
from kv4rl.grpo.masters import MasterWeights, cast_copy, compute_dtype
from kv4rl.grpo.mismatch import sampler_mismatch
from kv4rl.grpo.offload import Movable
from kv4rl.grpo.packing import TrainBatch, join, microbatches, pack
from kv4rl.grpo.ranks import all_ranks, sum_over_ranks
from kv4rl.grpo.sharded import ShardedWeights, reshard, shard
from kv4rl.metrics import Timers, summary
from kv4rl.model.attend import PackedCausal
from kv4rl.model.pointwise import compiled
from kv4rl.rollout.group import PromptGroup


@dataclass
class Microbatch:
    """A packed part of the minibatch with its frozen log-probs, each FP32 [M].

    `padding`: it only keeps this rank in step with others that have one more; none of its tokens counts.
    """

    batch: TrainBatch
    padding: bool = False
    old_logp: torch.Tensor | None = None
    reference_logp: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


class GRPOLearner:
    """Holds the policy's FP32 masters, the frozen reference and AdamW; `update` makes one step on complete groups.

    decoder: FP32, on the device to train on; it becomes the master copy. reference: the fixed initial policy
    (default: a copy of `decoder` as given); unused when kl_coefficient is 0. `old_log_probs`: "compute" runs the
    separate pass that the paper times; "detach" takes them from the training forward, equal with one minibatch an
    update. `max_logits` bounds the FP32 logits alive at once (see `token_logprobs`).

    `mesh`, one-dimensional: policy and reference are sharded over it (FSDP2), `update` is a collective that every rank
    calls with the same groups, each trains on its share, and all return the same metrics.
    """

    def __init__(
        self,
        decoder: torch.nn.Module,
        config: GRPOConfig,
        reference: torch.nn.Module | None = None,
        *,
        old_log_probs: str = "compute",
        max_logits: int = MAX_LOGITS,
        mesh: DeviceMesh | None = None,
    ):
        require(old_log_probs in ("compute", "detach"), "old_log_probs", old_log_probs, "compute or detach")
        self.config = config
        self.device = next(decoder.parameters()).device
        self.updates = 0  # updates made, skipped steps included: the learning rate follows it
        dtype = compute_dtype(config.compute_dtype, self.device)
        if self.device.type == "cuda":
            decoder.layer_pointwise = compiled("learner")  # copies made of it below too: passes round alike
        self.tis_weights = torch.empty(0)  # of the latest update, before the clip at C, [N_tok] on CPU: for plots
        self.reference = None
        if config.kl_coefficient > 0:
            self.reference = cast_copy(reference if reference is not None else decoder, dtype).requires_grad_(False)
            if mesh is not None:
                shard(self.reference, dtype, mesh)
        self.mesh = mesh
        self.weights = MasterWeights(decoder, dtype) if mesh is None else ShardedWeights(decoder, dtype, mesh)
        self._compute_old = old_log_probs == "compute"
        self._max_logits = max_logits
        self._optimizer = torch.optim.AdamW(
            self.weights.parameters(), lr=config.learning_rate, betas=config.betas,
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip

    def update(self, groups: Sequence[PromptGroup], timers: Timers | None = None) -> dict[str, float]:
        """One optimizer step on all responses of `groups` as one minibatch; returns metrics under verl's names.

        Raises ValueError where a response has no score yet, or no response has a token. A gradient that is not finite
        leaves weights and optimizer as they were (`actor/skipped_steps` = 1).
        """
        timers = timers or Timers(self.device)
        with timers("adv"):
            rewards = _scores(groups)
            advantages = group_advantages(rewards, self.config.advantage_epsilon).float()
            batch = pack(groups, advantages)
            require(batch.num_tokens > 0, "groups", f"{batch.num_tokens} response tokens", "at least one token")
        parts = self._parts(batch)
        if self._compute_old:
            with timers("old_log_prob"):
                self._old_log_probs(parts)
        if self.reference is not None:
            with timers("ref"):
                self._reference_log_probs(parts)
        with timers("update_actor"):
            stats = self._backward(parts, batch.num_tokens)
            step = self._step()
        return self._metrics(parts, stats) | step

    def log_probs(self, batch: TrainBatch, decoder: torch.nn.Module, *, entropy: bool = False):
        """(log-probs, entropy or None) of the response tokens, [M] FP32; differentiable unless under no_grad."""
        hidden = decoder(batch.input_ids, batch.positions, PackedCausal(batch.cu_seqlens))
        predicting = hidden.index_select(0, batch.predicting_rows)
        return token_logprobs(decoder, predicting, batch.targets, entropy=entropy, max_logits=self._max_logits)

    def state(self, host: HostMemory | None = None, *, whole: bool = True) -> dict:
        """Masters (FP32), optimizer state and the number of updates made; the same for any number of ranks.

        A collective. The tensors are copies in `host` (default: memory of their own), overwritten by the next `state`
        into it. A rank that does not want them (`whole` False) takes part and holds none.
        """
        host = (host or HostMemory(pinned=False)) if whole else None
        optimizer = self.weights.optimizer_state(self._optimizer, host)
        weights = self.weights.state(host)
        if host is not None:
            host.wait()
        return {"weights": weights, "optimizer": optimizer, "updates": self.updates}

    def load_state(self, state: dict) -> None:
        """Continue from `state()`."""
        self.weights.load_state(state["weights"])
        self.weights.load_optimizer_state(self._optimizer, state["optimizer"])
        self.updates = state["updates"]

    def movables(self) -> Iterator[Movable]:
        """What may leave the GPU between updates: masters, moments and the frozen reference (§A.2)."""
        yield from self.weights.movables()
        for number, parameter in enumerate(self.weights.parameters()):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    yield Movable(f"{name}.{number}", value)
        if self.reference is not None:
            for name, parameter in self.reference.named_parameters():
                yield Movable(f"reference.{name}", parameter, "frozen")

    @property
    def learning_rate(self) -> float:
        """Of the next update: linear warmup that reaches the full rate with the last warmup update, then constant."""
        return self.config.learning_rate * min(1.0, (self.updates + 1) / max(1, self.config.warmup_updates))

    def _parts(self, batch: TrainBatch) -> list[Microbatch]:
        """This rank's microbatches; as many as every other rank's."""
        budget = self.config.microbatch_tokens
        if self.mesh is None:
            return [Microbatch(part.to(self.device)) for part in microbatches(batch, budget)]
        lengths = batch.cu_seqlens.diff().tolist()
        mine = balanced(lengths, self.mesh.size(), budget)[self.mesh.get_local_rank()]
        shares = [join([batch.sequences(i, i + 1) for i in members or (0,)]) for members in mine]
        return [Microbatch(share.to(self.device), not members) for share, members in zip(shares, mine, strict=True)]

    @torch.no_grad()
    def _old_log_probs(self, parts: list[Microbatch]) -> None:
        for part in parts:  # the same microbatches as the training pass: on policy the ratio is exactly 1
            part.old_logp, part.entropy = self.log_probs(part.batch, self.weights.decoder, entropy=True)

    @torch.no_grad()
    def _reference_log_probs(self, parts: list[Microbatch]) -> None:
        for part in parts:
            part.reference_logp, _ = self.log_probs(part.batch, self.reference)
        reshard(self.reference)

    def _backward(self, parts: list[Microbatch], num_tokens: int) -> LossStats:
        ranks = 1 if self.mesh is None else self.mesh.size()
        total = None
        for part in parts:
            logp, entropy = self.log_probs(part.batch, self.weights.decoder, entropy=not self._compute_old)
            if not self._compute_old:
                part.old_logp, part.entropy = logp.detach(), entropy
            mask = torch.zeros_like(logp, dtype=torch.bool) if part.padding else None
            loss, stats = grpo_loss(
                logp, part.old_logp, part.batch.sampler_logp, part.reference_logp, part.batch.advantages, mask,
                config=self.config, num_tokens=num_tokens,
            )  # fmt: skip
            (loss * ranks).backward()  # FSDP averages gradients over ranks; the loss is a sum over them
            total = stats if total is None else total + stats
        return total if self.mesh is None else sum_over_ranks(total, self.mesh)

    def _step(self) -> dict[str, float]:
        parameters, learning_rate = self.weights.parameters(), self.learning_rate
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        norm = float(norm if self.mesh is None else norm.full_tensor())
        finite = math.isfinite(norm)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self.weights.refresh()
        self._optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return {"actor/grad_norm": norm, "actor/lr": learning_rate, "actor/skipped_steps": float(not finite)}

    def _metrics(self, parts: list[Microbatch], stats: LossStats) -> dict[str, float]:
        parts = [part for part in parts if not part.padding]
        columns = {
            "old": [part.old_logp for part in parts],
            "sampler": [part.batch.sampler_logp for part in parts],
            "lengths": [part.batch.response_lengths for part in parts],
            "entropy": [part.entropy for part in parts],
            "advantages": [part.batch.advantages for part in parts],
        }
        flat = {name: torch.cat([value.cpu() for value in all_ranks(c, self.mesh)]) for name, c in columns.items()}
        mismatch = sampler_mismatch(flat["old"], flat["sampler"], flat["lengths"], self.config.tis_clip)
        self.tis_weights = unclipped_tis_weights(flat["old"], flat["sampler"])
        metrics = {f"actor/{name}": value for name, value in stats.means().items()}
        metrics["actor/entropy"] = float(flat["entropy"].double().mean())
        metrics["actor/kl_coef"] = self.config.kl_coefficient
        metrics["actor/microbatches"] = float(sum(all_ranks([len(parts)], self.mesh)))
        return metrics | summary("critic/advantages", flat["advantages"]) | mismatch


def _scores(groups: Sequence[PromptGroup]) -> torch.Tensor:
    """Rewards [n_groups, G], FP64."""
    require(len(groups) > 0, "groups", len(groups), "at least one complete group")
    for group in groups:
        require(
            all(score is not None for score in group.scores), f"scores of prompt {group.prompt.prompt_id!r}",
            group.scores, "a score for every response",
        )  # fmt: skip
    return torch.tensor([group.scores for group in groups], dtype=torch.float64)
