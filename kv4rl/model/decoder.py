"""One decoder for the Qwen3, Qwen2 and Llama families, over packed tokens and with attention passed in.

Tokens of all sequences lie in one row dimension N. What the rows may look at is the business of `attend`: the engine
passes one that reads the quantised cache, the learner `PackedCausal`. Parameter names are transformers' own.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kv4rl.model.config import DecoderConfig
from kv4rl.model.fused import FusedLinear, project
from kv4rl.model.pointwise import NormRotate, Pointwise, compiled

if TYPE_CHECKING:
    from kv4rl.cache.kv_cache import CacheShape

# (layer, q [N, query_heads, head_dim], k [N, kv_heads, head_dim], v) -> [N, query_heads, head_dim]. One that has a
# method `raw(layer, q, k, v, before: NormRotate)`, not None, takes q and k as projected where no gradient is wanted.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
PLAIN = Pointwise()


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary:
    """Cosines and sines of RoPE. No module: a cast of the model must not round its float32 frequencies."""

    def __init__(self, config: DecoderConfig):
        self.frequencies, self.factor = config.rope_frequencies()

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each [N, 1, head_dim] in `dtype`, for positions [N]; the angles are float32."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions.float()[:, None, None] * self.frequencies
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


class SelfAttention(nn.Module):
    """Projections, QK-norm and RoPE around `attend`."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        hidden, self.head_dim, self.eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        query_size, kv_size = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, hidden, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.fused: FusedLinear | None = None

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        return self.q_proj, self.k_proj, self.v_proj

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], layer: int, attend: Attend, pointwise: Pointwise = PLAIN
    ) -> Tensor:
        rows = x.shape[0]
        q, k, v = (part.view(rows, -1, self.head_dim) for part in project(x, self.projections, self.fused))
        weights = (None, None) if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight)
        raw = None if torch.is_grad_enabled() else getattr(attend, "raw", None)
        if raw is not None:
            out = raw(layer, q, k, v, NormRotate(*weights, self.eps, *tables))
        else:
            q, k = pointwise.norm_rotate(q, k, *weights, self.eps, *tables)
            out = attend(layer, q, k, v)
        return self.o_proj(out.reshape(rows, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.fused: FusedLinear | None = None

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        return self.gate_proj, self.up_proj

    def forward(self, x: Tensor, pointwise: Pointwise = PLAIN) -> Tensor:
        return self.down_proj(pointwise.swiglu(*project(x, self.projections, self.fused)))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, index: int):
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], attend: Attend, pointwise: Pointwise = PLAIN) -> Tensor:
        delta = self.self_attn(self.input_layernorm(x), tables, self.index, attend, pointwise)
        norm = self.post_attention_layernorm
        x, normed = pointwise.add_norm(x, delta, norm.weight, norm.eps)
        return x + self.mlp(normed, pointwise)


class Decoder(nn.Module):
    """A decoder-only language model over packed tokens; differentiable when `attend` is.

    `recompute_layers = True` keeps only layer inputs for the backward pass (the rest is computed again). `pointwise`,
    if set, is what inference puts between the matrix products (`model/pointwise.py`), `layer_pointwise` what a pass
    through whole layers does: training, and the log-probs that are compared with it.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.recompute_layers = False
        self.pointwise: Pointwise | None = None
        self.layer_pointwise = PLAIN
        self.rotary = Rotary(config)
        self.model = nn.Module()  # only a namespace: transformers' parameter names start with "model."
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tied_head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def random(cls, config: DecoderConfig, *, seed: int, dtype=torch.float32, device="cpu") -> "Decoder":
        """A fresh model: weights normal(0, initializer_range), norms one, biases zero.

        Drawn on the device, so the same for one seed on one kind of device.
        """
        with torch.device("meta"):
            decoder = cls(config).to(dtype)
        fill_random(decoder.to_empty(device=device), seed)
        return decoder

    def prepare_inference(self) -> None:
        """Fuse the projections and, on CUDA, compile what stands between the products. Training is as before."""
        self.fuse_projections()
        if self.device.type == "cuda":
            self.pointwise = compiled()

    def fuse_projections(self) -> None:
        """Compute QKV, and gate with up, by one product each where no gradient is wanted; parameters stay the same."""
        for layer in self.model.layers:
            for block in (layer.self_attn, layer.mlp):
                if block.fused is None or not block.fused.current:
                    block.fused = FusedLinear(block.projections)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def head_weight(self) -> Tensor:
        """The LM head's weight [vocab, hidden]; the embedding itself when the head is tied."""
        return self.model.embed_tokens.weight if self.config.tied_head else self.lm_head.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, hidden] after the final norm, for int64 input_ids [N] at positions [N]."""
        x = self.model.embed_tokens(input_ids)
        tables = self.rotary.tables(positions, x.dtype)
        if self.pointwise is not None and not torch.is_grad_enabled():
            return self._infer(x, tables, attend, self.pointwise)
        for layer in self.model.layers:
            if self.recompute_layers and torch.is_grad_enabled():
                x = checkpoint(layer, x, tables, attend, self.layer_pointwise, use_reentrant=False)
            else:
                x = layer(x, tables, attend, self.layer_pointwise)
        return self.model.norm(x)

    def _infer(self, x: Tensor, tables: tuple[Tensor, Tensor], attend: Attend, pointwise: Pointwise) -> Tensor:
        """As the layers do it one after another, but each residual sum together with the norm that follows it."""
        layers = self.model.layers
        followers = [*(layer.input_layernorm for layer in layers[1:]), self.model.norm]
        normed = layers[0].input_layernorm(x)
        for layer, follower in zip(layers, followers, strict=True):
            delta = layer.self_attn(normed, tables, layer.index, attend, pointwise)
            norm = layer.post_attention_layernorm
            x, normed = pointwise.add_norm(x, delta, norm.weight, norm.eps)
            x, normed = pointwise.add_norm(x, layer.mlp(normed, pointwise), follower.weight, follower.eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [N, vocab] of hidden [N, hidden].

        The head's weight enters in hidden's dtype, as in every other layer, so that a learner with float32 masters and
        BF16 compute and a BF16 engine multiply the same numbers; products are summed and returned in float32 (float64
        for a float64 model).
        """
        weight = self.head_weight.to(hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            if hidden.is_cuda and hidden.itemsize == 2 and not torch.is_grad_enabled():
                return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
            accumulate = torch.promote_types(hidden.dtype, torch.float32)
            return F.linear(hidden.to(accumulate), weight.to(accumulate))

    def sampling_logits(self, hidden: Tensor) -> Tensor:
        """The logits that this process samples from: all of them, or its part of a vocabulary shared with others."""
        return self.logits(hidden)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter in the whole model, of which a decoder may be one tensor-parallel shard."""
        return tuple(self.get_parameter(name).shape)

    def shard_of(self, name: str, tensor: Tensor) -> Tensor:
        """This decoder's part of the whole parameter `name`: a view."""
        return tensor

    def cache_shape(self) -> "CacheShape":
        """What a KV cache of this model holds."""
        from kv4rl.cache.kv_cache import CacheShape  # the cache is needed by engines only

        c = self.config
        return CacheShape(c.num_layers, c.query_heads, c.kv_heads, c.head_dim, self.dtype)


def fill_random(decoder: Decoder, seed: int) -> None:
    """Weights normal(0, initializer_range), norms one, biases zero, in place."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=decoder.config.hf.initializer_range, generator=generator)
