"""The experiments, one table: every panel of Fig. 4b, 4c, A3, A4 and ours beyond them, as arms over one corpus.

A panel's name is the rows' `shape` and the command's `--panels`; its arms are named after what they store. Adding an
experiment is adding a line to `PANELS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kv4rl.config import require
from kv4rl.fidelity.measure import Arm, make_arm
from kv4rl.fidelity.representation import Protection, Representation

SINKS = (0, 1, 4, 16, 32, 64)  # s of the grid and of the sweep at w = 128
RECENTS = (0, 16, 32, 64, 128, 256, 512)  # w of the grid and of Fig. 4c at s = 16
BUDGET = 144  # protected positions of Fig. 4b and A3a,c
GROUPS = (128, 64, 32, 16)  # channels that share a scale (Fig. A4b)


@dataclass(frozen=True)
class Corpus:
    """The histories that all panels share: how many prompts, how long."""

    prompts: int
    shots: tuple[int, ...]  # solved examples before each question of the prompts file, going round
    max_response_tokens: int
    min_steps: int  # of the mini task's problems, nine tokens each


# Three quarters of the contexts pass 512 + 64 tokens, so that every width up to 512 leaves a main region.
CORPUS = Corpus(prompts=32, shots=tuple(range(3, 11)), max_response_tokens=128, min_steps=64)


@dataclass(frozen=True)
class Panel:
    """One experiment: `arms(head_dim)`, forced along the same histories and compared with the arm `baseline`."""

    what: str
    arms: Callable[[int], Sequence[Arm]]
    baseline: str = "kv4"


KV8, KV4, KV4RL = (make_arm(precision) for precision in ("kv8", "kv4", "kv4rl"))
DEFAULT = KV4RL.representation.protection
WITH_U8 = replace(KV4.kv, probability_operand="u8"), replace(KV4RL.kv, probability_operand="u8")


def regions(sink: int, recent: int) -> Arm:
    """`kv4rl` at widths s and w."""
    return make_arm("kv4rl", sink_tokens=sink, recent_tokens=recent)


def grid_arm(sink: int, recent: int) -> Arm:
    """As `regions`, with the widths in the name at 16/128 too: a reader of the grid looks one name up."""
    return replace(regions(sink, recent), name=f"kv4rl-s{sink}-w{recent}")


def stored(keys: str, rotated: str, values: str | None = None) -> Arm:
    """A storage probe (§D.4): formats and what is rotated, e.g. `int4_g32-k`, `nvfp4-none`."""
    values = keys if values is None else values
    representation = Representation(keys, values, rotated, arithmetic="storage")
    return Arm(f"{keys}-{rotated or 'none'}", representation)


def deployed(name: str, **changes) -> Arm:
    """KV4's decode path with something else stored."""
    return Arm(name, replace(KV4.representation, **changes))


def with_protection(name: str, **how) -> Arm:
    """KV4 protected in a way the engine does not offer."""
    return deployed(name, protection=Protection(**how))


def storage_of(arm: Arm) -> Arm:
    """The same representation under full-precision arithmetic."""
    return Arm(f"{arm.name}-storage", replace(arm.representation, arithmetic="storage"))


RANDOM = with_protection("kv4-random144", select="random", count=BUDGET)
BY_ATTENTION = with_protection("kv4-attention144", select="attention", count=BUDGET)
BF16_PROTECTED = with_protection("kv4rl-bf16", sink=DEFAULT.sink, recent=DEFAULT.recent, form="bf16")
ALLOCATIONS = (KV4, regions(BUDGET, 0), regions(0, BUDGET), KV4RL, RANDOM, BY_ATTENTION)
MORE_KEY_BITS = {5: "int5", 6: "int6", 8: "int8_affine"}


def _groups(head_dim: int) -> list[Arm]:
    names = ["int4" if group == head_dim else f"int4_g{group}" for group in GROUPS if group <= head_dim]
    return [stored(name, "k") for name in names]


def _fixed(*arms: Arm) -> Callable[[int], Sequence[Arm]]:
    return lambda head_dim: arms


PANELS = {
    "4b": Panel("precisions, and 144 protected positions elsewhere", _fixed(*ALLOCATIONS, KV8)),
    "4c": Panel(
        "recent width at s = 16 and sink width at w = 128",
        _fixed(KV4, *dict.fromkeys([*(regions(16, w) for w in RECENTS), *(regions(s, 128) for s in SINKS)])),
    ),
    "A3": Panel(
        "where and how protection is spent",
        _fixed(*ALLOCATIONS, KV8, regions(16, 16), regions(16, 512), BF16_PROTECTED),
    ),
    "A4a": Panel("rotations", _fixed(*(stored("int4", rotated) for rotated in ("k", "", "v", "kv"))), "int4-k"),
    "A4b": Panel("group sizes", _groups, "int4-k"),
    "A4c": Panel(
        "formats",
        _fixed(*(stored(form, rotated) for form in ("int4", "nvfp4", "mxfp4") for rotated in ("k", ""))), "int4-k",
    ),
    "probes": Panel(
        "deployed and storage arithmetic", _fixed(*(a for arm in (KV4, KV8, KV4RL) for a in (arm, storage_of(arm))))
    ),
    "operand": Panel(
        "8-bit against FP16 P",
        _fixed(KV4, KV4RL, *(Arm(f"{kv.precision}-p8", Representation.of(kv), kv) for kv in WITH_U8)),
    ),
    "bits": Panel(
        "more bits for keys, and for values as the control",
        _fixed(
            KV4, KV8, *(deployed(f"kv4-k{bits}", keys=form) for bits, form in MORE_KEY_BITS.items()),
            *(deployed(f"kv4-v{bits}", values=form) for bits, form in MORE_KEY_BITS.items()),
            *(deployed(f"kv4rl-k{bits}", keys=form, protection=DEFAULT) for bits, form in MORE_KEY_BITS.items()), KV4RL,
        ),
    ),
    "range": Panel(
        "range by least squared error, chosen at write time",
        _fixed(
            KV4, KV4RL, deployed("kv4-mse", keys="int4_mse", values="int4_mse"), deployed("kv4-mse-k", keys="int4_mse"),
            deployed("kv4-mse-v", values="int4_mse"),
            deployed("kv4rl-mse", keys="int4_mse", values="int4_mse", protection=DEFAULT),
        ),
    ),
    "grid": Panel("every s and w", _fixed(KV4, *(grid_arm(s, w) for s, w in product(SINKS, RECENTS)))),
}  # fmt: skip


def panel(name: str) -> Panel:
    """The panel of that name. Raises ValueError for an unknown one."""
    require(name in PANELS, "panel", name, f"one of {', '.join(PANELS)}")
    return PANELS[name]
