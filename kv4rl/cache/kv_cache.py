"""The KV cache of one model (or one shard of it): what the engine writes to and decodes from (§5.3, Fig. 5b)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kv4rl.attention.backends import choose_backend
from kv4rl.cache.batch import DecodeBatch, Limits, TokenSlots, protected_widths
from kv4rl.cache.main_cache import MainCache
from kv4rl.cache.page_allocator import OutOfPages, PageAllocator
from kv4rl.cache.side_buffer import SideBuffer
from kv4rl.config import HEAD_DIMS, MAX_GROUP, InputError, KVConfig, require, require_integer

if TYPE_CHECKING:
    from kv4rl.model.pointwise import NormRotate

__all__ = ["CacheShape", "DecodeBatch", "KVCache", "OutOfPages", "PageAllocator", "TokenSlots"]

INT4 = {"kv4", "kv4rl"}  # precisions of one page format
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class CacheShape:
    """The attention of a model, or of one tensor-parallel shard of it."""

    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of q, k and v, and what `bf16` stores

    def __post_init__(self):
        for name in ("num_layers", "query_heads", "kv_heads", "head_dim"):
            require_integer(getattr(self, name), name, 1)
        require(self.head_dim in HEAD_DIMS, "head_dim", self.head_dim, f"one of {', '.join(map(str, HEAD_DIMS))}")
        heads = (self.query_heads, self.kv_heads)
        require(self.query_heads % self.kv_heads == 0, "query_heads, kv_heads", heads, "a multiple of kv_heads")
        require(self.group <= MAX_GROUP, "query heads per KV head", self.group, f"1 … {MAX_GROUP}")
        require(self.dtype in DTYPES, "dtype", self.dtype, "bfloat16, float16 or float32")

    @property
    def group(self) -> int:
        """Query heads that share one KV head; query head h reads KV head h // group."""
        return self.query_heads // self.kv_heads


class KVCache:
    """Paged main cache, side buffer and free list, with one backend for all layers.

    Raises `ValueError` for sizes that are not positive and for a probability operand that the precision has no use
    for. `backend` as in `attention.backends.choose_backend`.
    """

    def __init__(
        self, kv: KVConfig, shape: CacheShape, *, num_pages: int, num_slots: int, device="cpu", backend: str = "auto"
    ):
        require(isinstance(kv, KVConfig), "kv", type(kv).__name__, "a KVConfig")
        require(isinstance(shape, CacheShape), "shape", type(shape).__name__, "a CacheShape")
        require_integer(num_pages, "num_pages", 1)
        require_integer(num_slots, "num_slots", 1)
        device = _device(device)
        if kv.probability_operand != "fp16":
            require(
                kv.precision in INT4, "probability_operand", kv.probability_operand,
                f"fp16 for precision {kv.precision}; u8 belongs to the INT4 path (§A.3)",
            )  # fmt: skip
        self.kv = kv
        self.shape = shape
        self.num_slots = num_slots
        self.policy_version = 0  # of the weights that computed what is stored; set by whoever syncs weights
        sizes = {"num_layers": shape.num_layers, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        self.main = MainCache(kv, num_pages=num_pages, dtype=shape.dtype, device=device, **sizes)
        self.device = self.main.storage.device  # with its index: "cuda" is the device that is current now
        self.side = SideBuffer(kv, num_slots=num_slots, device=self.device, **sizes)
        self.allocator = PageAllocator(num_pages)
        self.backend = choose_backend(backend, self.device)

    @property
    def nbytes(self) -> int:
        """All that is allocated: main cache and side buffer."""
        return self.main.nbytes + self.side.nbytes

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that holds content, each with a leading dimension of layers: main cache, then side buffer."""
        side = self.side
        return self.main.storage, side.k_codes, side.v_codes, side.k_scale, side.v_scale

    @property
    def bytes_per_page(self) -> int:
        """Main-cache bytes of one 16-token page over all layers (b_q of §A.2)."""
        return self.main.bytes_per_page

    @torch.no_grad()
    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, where: TokenSlots) -> None:
        """Store N new tokens of one layer, in the main cache and, where they are protected, in the side buffer.

        k, v: [N, kv_heads, d] in the model's dtype, k after RoPE (and QK-norm), not rotated: that happens here.
        Both representations are quantised from these vectors (§5.3). Raises `ValueError` for a wrong layer, shape,
        dtype, device or stride, or a place that does not exist.
        """
        self.check_write(layer, k, v, where)
        if len(k):
            self.backend.write(self, layer, k, v, where)

    @torch.no_grad()
    def decode(self, layer: int, q: torch.Tensor, batch: DecodeBatch, return_lse: bool = False):
        """Attention of one query token per request over its cached context, the newest token included.

        q: [B, query_heads, d] in the model's dtype, after RoPE (and QK-norm), not rotated. Returns out
        [B, query_heads, d] in q's dtype and, with `return_lse`, the log-normaliser FP32 [B, query_heads], natural
        log. A context of 0 gives (0, -inf). Raises `ValueError` as `write` does.
        """
        self._check_decode(layer, q, batch)
        if len(q) == 0:
            lse = q.new_empty((0, self.shape.query_heads), dtype=torch.float32)
            return (torch.empty_like(q), lse) if return_lse else torch.empty_like(q)
        return self.backend.decode(self, layer, q, batch, return_lse)

    @property
    def takes_raw(self) -> bool:
        """Whether `write_and_decode` takes q and k `before` QK-norm and RoPE."""
        takes = getattr(self.backend, "takes_raw", None)
        return takes is not None and takes(self)

    @torch.no_grad()
    def write_and_decode(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        where: TokenSlots,
        batch: DecodeBatch,
        before: "NormRotate | None" = None,
    ) -> torch.Tensor:
        """A pure decode step's `write` of one new token a request, then its `decode`; row i of q, k, v is one token.

        With `before`, only where `takes_raw`, q and k are as projected: the backend does norm and RoPE in its write.
        Raises `ValueError` as `write` and `decode` do, before either has begun.
        """
        self.check_write(layer, k, v, where)
        self._check_decode(layer, q, batch)
        require(len(q) == len(k), "q.shape", tuple(q.shape), f"as many tokens as k has, {len(k)}")
        if before is not None:  # what is not asked for here would be left undone
            require(self.takes_raw, "before", type(before).__name__, "None, and q and k after QK-norm and RoPE")
        together = hasattr(self.backend, "write_and_decode")  # `OneLaunch`, without 40 us of isinstance a layer
        if not together or not len(q):
            self.write(layer, k, v, where)
            return self.decode(layer, q, batch)
        if before is None:
            return self.backend.write_and_decode(self, layer, q, k, v, where, batch)
        return self.backend.write_and_decode(self, layer, q, k, v, where, batch, before=before)

    @property
    def limits(self) -> Limits:
        """What `TokenSlots` and `DecodeBatch` are checked against."""
        pages, entries = self.allocator.num_pages, self.side.entries
        return Limits(pages, self.num_slots, entries, protected_widths(self.kv), self.device)

    def check_write(self, layer: int, k: torch.Tensor, v: torch.Tensor, where: TokenSlots) -> None:
        """Raise `ValueError` for what `write` refuses."""
        self.check_layer(layer)
        self.check_stores()
        self.check_heads("k", k, self.shape.kv_heads)
        self.check_heads("v", v, self.shape.kv_heads)
        if k.shape != v.shape:
            require(False, "v.shape", tuple(v.shape), f"k's, {tuple(k.shape)}")
        require(isinstance(where, TokenSlots), "where", type(where).__name__, "a TokenSlots")
        where.check(len(k), self.limits)

    def _check_decode(self, layer: int, q: torch.Tensor, batch: DecodeBatch) -> None:
        self.check_layer(layer)
        self.check_stores()
        self.check_heads("q", q, self.shape.query_heads)
        require(isinstance(batch, DecodeBatch), "batch", type(batch).__name__, "a DecodeBatch")
        batch.check(len(q), self.limits)

    def check_stores(self) -> None:
        """Raise `ValueError` if `kv`, `main` or `side` was replaced by one that the others were not made for."""
        if self.side.entries != self.kv.protected_tokens:
            expected = f"the side buffer's {self.side.entries} entries"
            require(False, "sink_tokens + recent_tokens", self.kv.protected_tokens, expected)
        if self.main.precision != self.kv.precision and not {self.main.precision, self.kv.precision} <= INT4:
            require(False, "precision", self.kv.precision, f"the main cache's, {self.main.precision}")

    def check_layer(self, layer: int) -> None:
        """Raise `ValueError` unless the cache has this layer."""
        exists = isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < self.shape.num_layers
        require(exists, "layer", layer, f"0 … {self.shape.num_layers - 1}")

    def check_heads(self, name: str, x: torch.Tensor, heads: int) -> None:
        """Raise `ValueError` unless x is [N, heads, d] in the model's dtype, on the cache's device, tokens dense.

        Every layer of a step comes here: words are made only for what is wrong.
        """
        shape, d = self.shape, self.shape.head_dim
        dense = isinstance(x, torch.Tensor) and x.layout is torch.strided
        fits = dense and x.shape[1:] == (heads, d) and x.dtype == shape.dtype and x.device == self.device
        if fits and _dense_tokens(x):
            return
        require(dense, name, type(x).__name__, f"a strided tensor [N, {heads}, {d}]")
        require(x.dim() == 3 and x.shape[1:] == (heads, d), f"{name}.shape", tuple(x.shape), f"[N, {heads}, {d}]")
        require(x.dtype == shape.dtype, f"{name}.dtype", x.dtype, f"the model's, {shape.dtype}")
        require(x.device == self.device, f"{name}.device", str(x.device), f"the cache's, {self.device}")
        require(x.data_ptr() % 16 == 0, f"{name}.data_ptr()", x.data_ptr(), "a multiple of 16")
        expected = "heads and channels dense, (any, head_dim, 1), tokens at multiples of 16 bytes"
        require(False, f"{name}.stride", x.stride(), expected)


def _device(device: object) -> torch.device:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device={device!r}: expected a torch device, such as cpu or cuda ({error})") from error
    missing = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    require(not missing, "device", str(device), f"one of the {torch.cuda.device_count()} CUDA devices here, or cpu")
    return device


def _dense_tokens(x: torch.Tensor) -> bool:
    """Whether each token's heads [N, heads, d] are one dense run, as kernels read them, that begins at 16 bytes."""
    if x.data_ptr() % 16:
        return False
    if x.is_contiguous():
        return True
    dense = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return dense and (len(x) == 1 or x.stride(0) * x.itemsize % 16 == 0)
