"""What an arm of the fidelity probe stores and how it computes with it: storage formats, protection, arithmetic.

The decode path knows four of these (`Representation.of` a `KVConfig`); the batched probe runs any.
"""

from dataclasses import dataclass

import torch

from kv4rl.config import KVConfig, require
from kv4rl.formats.probe import StorageFormat, storage_format
from kv4rl.formats.storage import stored_bytes

SELECTIONS = ("regions", "random", "attention")
ARITHMETIC = ("deployed", "storage")
UNQUANTISED_BITS = 16  # of BF16, which is what an unquantised cache is on an accelerator


@dataclass(frozen=True)
class Protection:
    """Which positions are read from a better copy (§5.2).

    `regions`: the first `sink` and the most recent `recent`. Two controls spend `count` positions otherwise: `random`
    takes positions by a fixed random order, `attention` those of the largest attention mass accumulated so far.
    """

    select: str = "regions"
    sink: int = 0
    recent: int = 0
    count: int = 0  # of the two controls
    form: str = "int8"  # of the better copy: a storage format, or "bf16"

    def __post_init__(self):
        require(self.select in SELECTIONS, "select", self.select, f"one of {', '.join(SELECTIONS)}")
        for name in ("sink", "recent", "count"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "an integer >= 0")
        unused = self.count if self.select == "regions" else self.sink + self.recent
        require(unused == 0, "widths of the other selection", unused, f"0 for {self.select}")
        require(self.form in ("int8", "bf16"), "form", self.form, "int8 or bf16")

    @property
    def positions(self) -> int:
        """Positions protected in a context that is long enough."""
        return self.sink + self.recent + self.count


@dataclass(frozen=True)
class Representation:
    """One arm. `keys` and `values` name storage formats (`formats/probe.py`); "" is the model's own dtype.

    `rotated` holds a subset of "kv": what is stored in the Hadamard basis (Eq. 3.4). `arithmetic`: "deployed" is the
    decode path's (INT8 query, rounded P; BF16 P and V on protected positions, §A.3); "storage" reconstructs the
    stored vectors and computes at full precision (§D.4).
    """

    keys: str = "int4"
    values: str = "int4"
    rotated: str = "k"
    protection: Protection = Protection()
    arithmetic: str = "deployed"
    probability_operand: str = "fp16"

    def __post_init__(self):
        for name in ("keys", "values"):
            if getattr(self, name):
                storage_format(getattr(self, name))
        require(self.rotated in ("", "k", "v", "kv"), "rotated", self.rotated, "'', 'k', 'v' or 'kv'")
        require(self.arithmetic in ARITHMETIC, "arithmetic", self.arithmetic, f"one of {', '.join(ARITHMETIC)}")
        operand = self.probability_operand
        require(operand in ("fp16", "u8"), "probability_operand", operand, "fp16 or u8")
        require(
            bool(self.keys) == bool(self.values), "keys, values", (self.keys, self.values), "both or neither stored"
        )
        if self.arithmetic == "deployed" and self.keys:
            require("v" not in self.rotated, "rotated", self.rotated, "no V: the decode path does not rotate values")

    @classmethod
    def of(cls, kv: KVConfig) -> "Representation":
        """What the engine's cache does under `kv` (§5.3)."""
        if kv.precision == "bf16":
            return cls(keys="", values="", rotated="", arithmetic="storage")
        if kv.precision == "kv8":
            return cls(keys="int8", values="int8")
        regions = Protection(sink=kv.sink_tokens, recent=kv.recent_tokens) if kv.protected_tokens else Protection()
        return cls(protection=regions, probability_operand=kv.probability_operand)

    @property
    def formats(self) -> tuple[StorageFormat | None, StorageFormat | None]:
        """Of keys and values; None for unquantised ones."""
        return tuple(storage_format(name) if name else None for name in (self.keys, self.values))

    def position_bytes(self, head_dim: int) -> float:
        """Bytes of one position's key and value in one KV head of the main cache, counted from stored bytes."""
        return sum(_vector_bytes(name, head_dim) for name in (self.keys, self.values))

    def protected_bytes(self, head_dim: int) -> float:
        """Bytes of one protected position's second copy, key and value, in one KV head."""
        return 2 * _vector_bytes("" if self.protection.form == "bf16" else self.protection.form, head_dim)

    def bits_per_element(self, head_dim: int) -> float:
        """Stored bits per key or value element of the main cache, as the paper counts them (protection excluded)."""
        return 8 * self.position_bytes(head_dim) / (2 * head_dim)


def _vector_bytes(name: str, head_dim: int) -> float:
    if not name:
        return head_dim * UNQUANTISED_BITS / 8
    form = storage_format(name)
    return stored_bytes(form.quantize(torch.zeros(1, head_dim)), form.bits)
