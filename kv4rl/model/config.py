"""What the decoder needs to know of a model, read once from a transformers configuration."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kv4rl.config import require, require_integer

FAMILIES = ("qwen3", "qwen2", "llama")
# Those whose frequencies do not depend on the length of the sequence: a cached key stays right as its request grows.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of one decoder-only model of the families in `FAMILIES`."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tied_head: bool
    qk_norm: bool  # RMS norm over head_dim of queries and keys, before RoPE (Qwen3)
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    hf: Any = field(compare=False, repr=False)  # the transformers configuration, for RoPE and for saving

    @classmethod
    def from_hf(cls, hf: Any) -> "DecoderConfig":
        """Read a `transformers` configuration object.

        Raises ValueError, naming the field, for an unknown family and for every feature the decoder would otherwise
        silently compute wrongly (sliding windows, length-dependent RoPE, other activations, quantised weights).
        """
        family = getattr(hf, "model_type", None)
        require(family in FAMILIES, "model_type", family, f"a supported model family: {', '.join(FAMILIES)}")
        _require_supported(hf)
        attention_bias = bool(getattr(hf, "attention_bias", False))
        return cls(
            family=family,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            query_heads=hf.num_attention_heads,
            kv_heads=hf.num_key_value_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            rms_norm_eps=hf.rms_norm_eps,
            max_positions=hf.max_position_embeddings,
            tied_head=bool(hf.tie_word_embeddings),
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and bool(getattr(hf, "mlp_bias", False)),
            hf=hf,
        )

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "query_heads", "kv_heads"):
            require_integer(getattr(self, name), name, 1)
        require_integer(self.max_positions, "max_position_embeddings", 1)
        require(self.head_dim >= 2 and self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number (RoPE)")
        heads = (self.query_heads, self.kv_heads)
        require(self.query_heads % self.kv_heads == 0, "query_heads, kv_heads", heads, "a whole group per KV head")

    def rope_frequencies(self) -> tuple[torch.Tensor, float]:
        """Inverse frequencies, float32 [head_dim / 2], and the factor on cos and sin, as transformers computes them."""
        rope = self.hf.rope_parameters
        with torch.device("cpu"):  # real numbers even while the model itself is built on the meta device
            if rope["rope_type"] != "default":
                return ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.hf, torch.device("cpu"))
            exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
            return 1.0 / (rope["rope_theta"] ** exponent), 1.0


def _require_supported(hf: Any) -> None:
    rope_type = (hf.rope_parameters or {}).get("rope_type")
    require(rope_type in ROPE_TYPES, "rope_parameters.rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}")
    partial = hf.rope_parameters.get("partial_rotary_factor", 1.0)
    require(partial == 1.0, "rope_parameters.partial_rotary_factor", partial, "1.0 (the whole head is rotated)")
    layers = set(getattr(hf, "layer_types", None) or ["full_attention"])
    require(layers == {"full_attention"}, "layer_types", sorted(layers), "full_attention only (no sliding window)")
    require(hf.hidden_act == "silu", "hidden_act", hf.hidden_act, "silu")
    quantised = getattr(hf, "quantization_config", None)
    require(quantised is None, "quantization_config", quantised, "none: the unquantised checkpoint of this model")
