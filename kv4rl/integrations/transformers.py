"""A drop-in cache for `transformers`: keys and values stored as KV4-RL stores them, attention by the model itself.

    from kv4rl.integrations.transformers import KV4RLCache
    model.generate(**inputs, past_key_values=KV4RLCache(model.config, precision="kv4rl", sink=16, recent=128))

What attention gets are dequantised keys and values in the model's dtype: the *storage* probe of §D.4, and a check of
the engine that shares none of its attention code. It saves memory between steps, not time: each step dequantises.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from kv4rl.config import HEAD_DIMS, KVConfig, require, require_protected_fits
from kv4rl.integrations.layer_store import LayerStore


class KV4RLCache(Cache):
    """`past_key_values` of a decoder-only transformers model whose layers all attend fully.

    model_config: the model's; precision: one of `bf16`, `kv8`, `kv4`, `kv4rl`; sink, recent: INT8-protected positions
    of `kv4rl` (§5.2). attention_mask: [batch, prompt columns], needed for left-padded batches: positions, and so the
    protected sink, count from each row's first token, and a cache is not told the mask by the model.

    The first call attends to its own unquantised keys and values, as the engine's prefill does, and a call of one
    token reads everything, itself included, from the cache, as the engine's decode does. A later call of several
    tokens (assisted decoding, a further turn, `prefill_chunk_size`) reads what was there from the cache, protected as
    it was before the call, and its own tokens unquantised; so assisted decoding can choose other tokens than plain
    decoding does where those differ. Beam search reorders the codes themselves.

    Raises `ValueError` for encoder-decoder models, sliding-window, linear or other layers, a head_dim outside 64, 128,
    256, a mask that is not left-padded, and padding in the keys without a mask.
    """

    def __init__(
        self,
        model_config,
        precision: str = "kv4rl",
        sink: int = 16,
        recent: int = 128,
        *,
        attention_mask: torch.Tensor | None = None,
    ):
        require(not model_config.is_encoder_decoder, "is_encoder_decoder", True, "a decoder-only model")
        config = model_config.get_text_config(decoder=True)
        types, _ = get_layer_types_and_kwargs(config)
        other = sorted(set(types) - {"full_attention"})
        require(not other, "layer_types", other, "full_attention in every layer: nothing else is paged (§5.3)")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        require(head_dim in HEAD_DIMS, "head_dim", head_dim, f"one of {', '.join(map(str, HEAD_DIMS))}")
        self.kv = KVConfig(precision, sink_tokens=sink, recent_tokens=recent)
        require_protected_fits(self.kv, config.max_position_embeddings)
        padding = None if attention_mask is None else left_padding(attention_mask)
        super().__init__(layers=[KV4RLLayer(self.kv, padding, is_first=i == 0) for i in range(len(types))])

    @property
    def nbytes(self) -> int:
        """Bytes held now: pages and side buffers of all layers, and what a rollback would need."""
        return sum(layer.nbytes for layer in self.layers)


class KV4RLLayer(CacheLayerMixin):
    """One layer in transformers' cache protocol, over a `LayerStore`."""

    is_sliding = False
    is_croppable = True

    def __init__(self, kv: KVConfig, padding: torch.Tensor | None, *, is_first: bool):
        super().__init__()
        self.kv = kv
        self.initial_padding = padding
        self.is_first = is_first
        self.reset()

    def reset(self) -> None:
        """Forget everything stored."""
        self.store: LayerStore | None = None
        self.record_past = False
        self.latest_call: tuple | None = None  # (columns and side buffer before it, its keys and values)
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, kv_heads, _, head_dim = key_states.shape
        padding = self._padding_of(rows).to(key_states.device)
        sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "dtype": key_states.dtype}
        self.store = LayerStore(self.kv, padding=padding, **sizes)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Store k, v [batch, kv_heads, new, d]; what attention reads now, [batch, kv_heads, all columns, d] each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = (key_states, value_states)
        is_first_call, is_decode = self.store.columns == 0, key_states.shape[-2] == 1
        if is_first_call and self.is_first and self.initial_padding is None:
            _require_no_padding(key_states)
        if self.record_past:
            self.latest_call = (self.store.columns, self.store.copy_side(), new)
        past = () if is_first_call or is_decode else self._read(key_states.dtype)
        self.store.append(*new)
        if is_first_call:
            return new
        if is_decode:
            return self._read(key_states.dtype)
        return tuple(torch.cat(both, dim=-2) for both in zip(past, new, strict=True))

    def get_seq_length(self) -> int:
        return self.store.columns if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    @property
    def nbytes(self) -> int:
        if not self.is_initialized:
            return 0
        if self.latest_call is None:
            return self.store.nbytes
        _, side, new = self.latest_call
        return self.store.nbytes + sum(tensor.nbytes for tensor in (*side.values(), *new))

    def activate_past_recording(self) -> None:
        """Keep, per call, what `crop` needs to undo it: a ring entry that was overwritten is gone otherwise."""
        self.record_past = self.kv.protected_tokens > 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest -`tokens_to_remove` columns (assisted decoding's rejected candidates), leaving no trace.

        Raises `ValueError` for a positive number, or where overwritten recent positions would be needed again.
        """
        require(tokens_to_remove <= 0, "tokens_to_remove", tokens_to_remove, "0 or minus the tokens to remove")
        latest, self.latest_call = self.latest_call, None
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        columns = self.store.columns + tokens_to_remove
        require(columns >= 0, "tokens_to_remove", tokens_to_remove, f"at least {-self.store.columns}")
        if latest is None or columns < latest[0]:
            self.store.rewind(columns)
            return
        before, side, new = latest
        self.store.rewind(before, side)
        if columns > before:
            self.store.append(*(states[:, :, : columns - before] for states in new))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row b becomes what row beam_idx[b] was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            rows = torch.arange(self.store.rows, device=self.store.padding.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep rows `indices` of the batch; a call before this cannot be undone any more."""
        if self.is_initialized:
            self.store.select(indices)
            self.latest_call = None

    def _read(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.store.read()
        return k.to(dtype), v.to(dtype)

    def _padding_of(self, rows: int) -> torch.Tensor:
        """Padding of `rows` rows; beams and returned sequences repeat each row of the mask."""
        if self.initial_padding is None:
            return torch.zeros(rows, dtype=torch.int64)
        repeats, rest = divmod(rows, len(self.initial_padding))
        require(rest == 0, "attention_mask rows", len(self.initial_padding), f"a divisor of the batch of {rows}")
        return self.initial_padding.repeat_interleave(repeats)


def left_padding(attention_mask: torch.Tensor) -> torch.Tensor:
    """Zeros before each row's first 1, int64 [batch], of a mask [batch, columns] that has no other zeros."""
    require(attention_mask.dim() == 2, "attention_mask.shape", tuple(attention_mask.shape), "[batch, columns]")
    real = attention_mask.bool()
    padding = (~real).sum(-1)
    expected = torch.arange(real.shape[-1], device=real.device) >= padding[:, None]
    is_left = bool((real == expected).all() and real.any(-1).all())
    require(is_left, "attention_mask", attention_mask.tolist(), "left padding: zeros only before a row's first token")
    return padding


def _require_no_padding(key_states: torch.Tensor) -> None:
    """Two equal keys at the front are padding: RoPE never gives two positions the same key, padding shares one."""
    if key_states.shape[-2] > 1:
        padded = (key_states[:, :, 0] == key_states[:, :, 1]).flatten(1).all(-1)
        require(
            not bool(padded.any()), "attention_mask", None,
            f"the prompts' mask given to the cache too, KV4RLCache(..., attention_mask=mask): rows "
            f"{padded.nonzero()[:, 0].tolist()} look left-padded",
        )  # fmt: skip
