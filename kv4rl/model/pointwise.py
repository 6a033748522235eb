"""What stands between a layer's matrix products, for inference: three functions, compiled into one kernel each on CUDA.

"Compiled model execution reduces dispatch overhead and intermediate tensor allocations around attention" (§A.2). The
functions are plain torch and mean the same uncompiled; `Decoder.forward` without them is the specification.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream x + delta, and its RMS norm."""
    x = x + delta
    return x, F.rms_norm(x, weight.shape, weight, eps)


@dataclass(frozen=True)
class NormRotate:
    """QK-norm and RoPE of a step, for an `attend` that does them itself (`Attend.raw` of model/decoder.py).

    Weights [head_dim], None without QK-norm; tables [N, 1, head_dim], sines negative in the first half.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor


def norm_rotate(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """QK-norm, where the model has it, and RoPE: q and k [N, heads, head_dim], tables [N, 1, head_dim]."""
    if q_weight is not None:
        q, k = F.rms_norm(q, q_weight.shape, q_weight, eps), F.rms_norm(k, k_weight.shape, k_weight, eps)
    return rotate(q, (cos, sin)), rotate(k, (cos, sin))


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE to x [N, heads, head_dim]: channel i turns with channel i + head_dim / 2."""
    cos, sin = tables
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


@dataclass(frozen=True)
class Pointwise:
    """The three functions, compiled or as they are."""

    add_norm: Callable = add_norm
    norm_rotate: Callable = norm_rotate
    swiglu: Callable = swiglu


@cache
def compiled(user: str = "engine") -> Pointwise:
    """Compiled for any number of rows; the compiler runs on the first call (a step's warm-up), once a process and user.

    Engine and learner call them in different gradient modes, each a compilation of its own, and a function may be
    compiled a few times only before it runs uncompiled: so each `user` has functions of its own.
    """
    own = lambda f: FunctionType(f.__code__.replace(co_name=f"{f.__name__}_{user}"), f.__globals__)
    normed = (torch.compile(own(function), dynamic=True) for function in (add_norm, norm_rotate))
    return Pointwise(*normed, _of_one_width(own(swiglu)))


def _of_one_width(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Compiled for any number of rows of the width it meets first (a second width makes it general).

    The norms learn their width from parameters. Of unknown width, gate and up, which are halves of one product's rows,
    are read at about half the speed on an H200.
    """
    run = torch.compile(function)

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        for tensor in (gate, up):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return run(gate, up)

    return swiglu
