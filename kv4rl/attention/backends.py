"""Choose once which code runs the cache's writes and decodes: `cuda`, `triton` or the `reference`, and say why."""

import os
import warnings
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from kv4rl.attention.reference import block_tokens, decode_attention
from kv4rl.config import require
from kv4rl.formats.hadamard import rotate

ENVIRONMENT = "KV4RL_BACKEND"  # overrides "auto"


class BackendUnavailable(RuntimeError):
    """Raised by a backend's factory; its message says why this device cannot run it, and the fix if there is one."""


class Backend(Protocol):
    """What `KVCache` calls after it has checked the arguments; signatures as its own methods."""

    name: str

    def write(self, cache, layer: int, k: torch.Tensor, v: torch.Tensor, where) -> None: ...

    def decode(self, cache, layer: int, q: torch.Tensor, batch, return_lse: bool = False): ...


@runtime_checkable
class OneLaunch(Protocol):
    """A backend that takes the new token's q, k and v together: a decode step then launches once less a layer.

    One that has `takes_raw(cache) -> bool` may say so of q and k as projected, with `before` (model/pointwise.py:
    NormRotate) a keyword of `write_and_decode`: once less again.
    """

    def write_and_decode(self, cache, layer: int, q, k, v, where, batch, return_lse: bool = False): ...


class ReferenceBackend:
    """Plain torch, any device: `attention/reference.py` and the caches' own writes."""

    name = "reference"

    def write(self, cache, layer, k, v, where):
        written = (where.page_ids >= 0).nonzero()[:, 0]
        for rows in written.split(block_tokens(cache)):
            self._write_rows(cache, layer, k[rows], v[rows], where, rows)

    def _write_rows(self, cache, layer, k, v, where, rows):
        if cache.kv.precision != "bf16":
            k = rotate(k)
        cache.main.write(layer, k, v, where.page_ids[rows], where.offsets[rows])
        protected = (where.side_entries[rows] >= 0).nonzero()[:, 0]
        if len(protected):
            rows = rows[protected]
            cache.side.write(layer, k[protected], v[protected], where.slots[rows], where.side_entries[rows])

    def decode(self, cache, layer, q, batch, return_lse=False):
        out, lse = decode_attention(cache, layer, q, batch)
        out = out.to(q.dtype)
        return (out, lse) if return_lse else out


def _reference(device: torch.device) -> Backend:
    return ReferenceBackend()


def _cuda(device: torch.device) -> Backend:
    from kv4rl.attention.cuda import make_backend

    return make_backend(device)


def _triton(device: torch.device) -> Backend:
    from kv4rl.attention.triton import make_backend

    return make_backend(device)


# name -> factory(device), which returns a Backend or raises BackendUnavailable; imports belong inside the factory.
FACTORIES: dict[str, Callable[[torch.device], Backend]] = {"reference": _reference, "cuda": _cuda, "triton": _triton}
PREFERENCE = ("cuda", "triton", "reference")  # of "auto" on a CUDA device; elsewhere it is the reference
_explained: set[str] = set()


def choose_backend(name: str, device: torch.device | str) -> Backend:
    """The backend called `name`, or the fastest that runs on `device` for "auto" (`KV4RL_BACKEND` overrides "auto").

    Raises `ValueError` for an unknown name and `BackendUnavailable` for a named backend that cannot run here; "auto"
    falls back instead, with one warning per reason.
    """
    device = torch.device(device)
    known = ("auto", *FACTORIES)
    require(name in known, "backend", name, f"one of {', '.join(known)}")
    if name == "auto":
        name = os.environ.get(ENVIRONMENT, "auto")
        require(name in known, ENVIRONMENT, name, f"one of {', '.join(known)}")
    if name != "auto":
        try:
            return FACTORIES[name](device)
        except BackendUnavailable as reason:
            raise BackendUnavailable(f"backend={name!r}: {reason}") from reason
    if device.type != "cuda":
        return FACTORIES["reference"](device)
    for candidate in (c for c in PREFERENCE if c in FACTORIES):
        try:
            return FACTORIES[candidate](device)
        except BackendUnavailable as reason:
            explain(f"KV cache backend {candidate!r} is off: {reason}")
    raise BackendUnavailable(f"no KV cache backend runs on {device}")


def explain(message: str) -> None:
    """Warn once a process why a faster path is off."""
    if message not in _explained:
        _explained.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
