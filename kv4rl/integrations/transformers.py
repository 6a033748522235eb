"""A drop-in cache for `transformers`: keys and values stored as KV4-RL stores them, attention by the model itself.

    from kv4rl.integrations.transformers import KV4RLCache
    model.generate(**inputs, past_key_values=KV4RLCache(model.config, precision="kv4rl", sink=16, recent=128))

What attention gets are dequantised keys and values in the model's dtype: the *storage* probe of §D.4, and a check of
the engine that shares none of its attention code. It saves memory between steps, not time: each step dequantises.
"""

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from kv4rl.config import HEAD_DIMS, KVConfig, require, require_protected_fits
from kv4rl.integrations.layer_store import LayerStore


class KV4RLCache(Cache):
    """`past_key_values` of a decoder-only transformers model whose layers all attend fully.

    model_config: the model's; precision: one of `bf16`, `kv8`, `kv4`, `kv4rl`; sink, recent: INT8-protected positions
    of `kv4rl` (§5.2). attention_mask: [batch, prompt columns], needed for left-padded batches: positions, and so the
    protected sink, count from each row's first token, and a cache is not told the mask by the model. Beams and returned
    sequences repeat a row of the mask; a larger batch whose prompts are not such repeats is refused.

    The first call attends to its own unquantised keys and values, as the engine's prefill does, and a call of one
    token reads everything, itself included, from the cache, as the engine's decode does. A later call of several
    tokens (assisted decoding, a further turn, `prefill_chunk_size`) reads what was there from the cache, protected as
    it was before the call, and its own tokens unquantised; so assisted decoding can choose other tokens than plain
    decoding does where those differ. Beam search reorders the codes themselves.

    Raises `ValueError` for encoder-decoder models, sliding-window, linear or other layers, a head_dim outside 64, 128,
    256, a mask that is not left-padded, prompts with two or more columns of padding beyond what the mask (or none)
    says, and keys of a model with more layers, or with other heads, than `model_config` has.
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
        given = model_config if isinstance(model_config, str) else type(model_config).__name__
        require(isinstance(model_config, PreTrainedConfig), "model_config", given, "a model's config")
        require(not model_config.is_encoder_decoder, "is_encoder_decoder", True, "a decoder-only model")
        config = model_config.get_text_config(decoder=True)
        types, _ = get_layer_types_and_kwargs(config)
        other = sorted(set(types) - {"full_attention"})
        require(not other, "layer_types", other, "full_attention in every layer: nothing else is paged (§5.3)")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        require(head_dim in HEAD_DIMS, "head_dim", head_dim, f"one of {', '.join(map(str, HEAD_DIMS))}")
        self.kv = KVConfig(precision, sink_tokens=sink, recent_tokens=recent)
        require_protected_fits(self.kv, config.max_position_embeddings)
        mask = None if attention_mask is None else PromptMask(attention_mask)
        heads = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads, head_dim)
        super().__init__(layers=[KV4RLLayer(self.kv, mask, heads, is_first=i == 0) for i in range(len(types))])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """`KV4RLLayer.update` of one layer."""
        expected = f"at most model_config's {len(self.layers)} layers, as the model that the cache was made for has"
        require(layer_idx < len(self.layers), "layers of the model", layer_idx + 1, expected)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes held now: pages and side buffers of all layers, and what a rollback would need."""
        return sum(layer.nbytes for layer in self.layers)


class PromptMask:
    """A left-padded attention mask [batch, columns]: `padding` int64 [batch], zeros before each row's first 1."""

    def __init__(self, mask: torch.Tensor):
        require(isinstance(mask, torch.Tensor), "attention_mask", type(mask).__name__, "a tensor [batch, columns]")
        self.shape = tuple(mask.shape)
        require(len(self.shape) == 2 and min(self.shape) > 0, "attention_mask.shape", self.shape, "[batch, columns]")
        real = mask.bool()
        self.padding = (~real).sum(-1)
        expected = torch.arange(self.shape[1], device=real.device) >= self.padding[:, None]
        is_left = bool((real == expected).all() and real.any(-1).all())
        named = f"attention_mask of shape {self.shape}, zeros a row"
        require(is_left, named, self.padding.tolist(), "left padding: zeros only before a row's first token")

    def repeats(self, rows: int) -> int:
        """How often each row is repeated in a batch of `rows`."""
        repeats, rest = divmod(rows, self.shape[0])
        require(rest == 0 and repeats > 0, "attention_mask rows", self.shape[0], f"a divisor of the batch of {rows}")
        return repeats

    def require_repeated(self, key_states: torch.Tensor) -> None:
        """`InputError` unless a batch larger than the mask repeats each prompt, as beams do before they differ.

        Keys of the first layer follow from token and position alone; two roundings of one key differ by far less.
        """
        keys = key_states.unflatten(0, (self.shape[0], -1)).float().nan_to_num()
        apart, size = (keys - keys[:, :1]).abs().amax((-3, -1)), keys.abs().amax((-3, -1))
        repeated = bool((apart <= size[:, :1] / 16).all())
        rows = f"the batch's {len(key_states)} (fewer only where beams or returned sequences repeat each prompt)"
        require(repeated, "attention_mask rows", self.shape[0], rows)


class KV4RLLayer(CacheLayerMixin):
    """One layer in transformers' cache protocol, over a `LayerStore`."""

    is_sliding = False
    is_croppable = True

    def __init__(self, kv: KVConfig, mask: PromptMask | None, heads: tuple[int, int], *, is_first: bool):
        super().__init__()
        self.kv = kv
        self.mask = mask
        self.heads = heads  # (KV heads, head_dim)
        self.is_first = is_first
        self.reset()

    def reset(self) -> None:
        """Forget everything stored."""
        self.store: LayerStore | None = None
        self.record_past = False
        self.latest_call: tuple | None = None  # (columns and side buffer before it, its keys and values)
        self.is_initialized = False
        self.prefilled = 0  # columns of the first call

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, kv_heads, _, head_dim = key_states.shape
        padding = self._padding_of(rows).to(key_states.device)
        sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "dtype": key_states.dtype}
        self.store = LayerStore(self.kv, padding=padding, **sizes)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Store k, v [batch, kv_heads, new, d]; what attention reads now, [batch, kv_heads, all columns, d] each."""
        named = "(KV heads, head_dim) of the keys"
        require(_heads(key_states) == self.heads, named, _heads(key_states), f"model_config's {self.heads}")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        expected = f"the {self.store.rows} that the cache holds"
        require(key_states.shape[0] == self.store.rows, "rows of the batch", key_states.shape[0], expected)
        new = (key_states, value_states)
        is_first_call, is_decode = self.store.columns == 0, key_states.shape[-2] == 1
        if is_first_call:
            self.prefilled = key_states.shape[-2]
        if self.is_first:
            self._require_the_mask(key_states)
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
        if self.mask is None:
            return torch.zeros(rows, dtype=torch.int64)
        return self.mask.padding.repeat_interleave(self.mask.repeats(rows))

    def _require_the_mask(self, key_states: torch.Tensor) -> None:
        """`InputError` if these keys, of the first layer, show that the mask is not the prompts'.

        A call of one column after a longer one generates, unless it is the last chunk of a `prefill_chunk_size`.
        """
        columns = self.store.columns
        if columns == 0:
            _require_no_more_padding(key_states, self.store.padding, None if self.mask is None else self.mask.shape)
        if self.mask is None:
            return
        left = self.mask.shape[1] - columns  # of the prompts
        generates = key_states.shape[-2] == 1 and self.prefilled > 1
        if left > 0 and not generates and len(key_states) > self.mask.shape[0]:
            self.mask.require_repeated(key_states[:, :, :left])
        if left > 1 and generates:
            begun = bool((self.store.tokens > 0).all())
            expected = f"[batch, {columns}], as many columns as the prompts have"
            require(begun, "attention_mask.shape", self.mask.shape, expected)


def _heads(states: torch.Tensor) -> tuple[int, int]:
    return states.shape[1], states.shape[-1]


def _require_no_more_padding(key_states: torch.Tensor, padding: torch.Tensor, mask: tuple | None) -> None:
    """Two equal keys where a row is said to begin are padding: RoPE gives no two positions the same key.

    So two columns more than `padding` [rows] are noticed, not one; fewer cannot be told from padding of other tokens.
    """
    first = padding.clamp(max=max(0, key_states.shape[-2] - 2))
    if key_states.shape[-2] > 1:
        rows = torch.arange(len(padding), device=padding.device)
        more = (key_states[rows, :, first] == key_states[rows, :, first + 1]).flatten(1).all(-1) & (first == padding)
        require(
            not bool(more.any()), "attention_mask", mask and f"of shape {mask}",
            f"the prompts' mask given to the cache too, KV4RLCache(..., attention_mask=mask): rows "
            f"{more.nonzero()[:, 0].tolist()} look left-padded" + (" further" if mask else ""),
        )  # fmt: skip
