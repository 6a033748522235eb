"""What every engine step held: the columns behind Figs. 2 and A1, measured or simulated."""

import csv
from pathlib import Path

import numpy as np

from kv4rl.config import require

# One row per engine step. A simulated trace has the same columns as a measured one.
INTEGER_COLUMNS = (
    "collection",  # index of the collection interval, from 0
    "policy_version",
    "replica",
    "active_requests",  # B_t, rows that decoded in this step
    "context_tokens",  # sum of l_i(t) over those rows
    "carried_context_tokens",  # the part of it that belongs to requests resumed from an earlier collection (§B.3)
    "fresh_context_tokens",  # the rest
    "resident_kv_bytes",  # V_t = kappa * context_tokens
    "prefill_tokens",
    "decode_tokens",
    "used_pages",
    "preemptions",
)
COLUMNS = ("kind", *INTEGER_COLUMNS, "step_ms")


class Trace:
    """Rows of engine steps, appended one at a time or in blocks; read back as one numpy array per column."""

    def __init__(self):
        self._blocks: list[dict[str, np.ndarray]] = []
        self._rows: list[tuple] = []

    def __len__(self) -> int:
        return len(self._rows) + sum(len(block["kind"]) for block in self._blocks)

    def record(
        self, stats, *, collection: int, policy_version: int, carried_context_tokens: int, replica: int = 0
    ) -> None:
        """Append the row of one step. `stats`: the engine's `StepStats`."""
        given = {
            "collection": collection,
            "policy_version": policy_version,
            "replica": replica,
            "carried_context_tokens": carried_context_tokens,
            "fresh_context_tokens": stats.context_tokens - carried_context_tokens,
        }
        self._rows.append(tuple(given[name] if name in given else getattr(stats, name) for name in COLUMNS))

    def extend(self, columns: dict[str, np.ndarray]) -> None:
        """Append many rows: one equally long array for each of `COLUMNS`."""
        require(set(columns) == set(COLUMNS), "columns", sorted(columns), f"exactly {', '.join(COLUMNS)}")
        lengths = {name: len(values) for name, values in columns.items()}
        require(len(set(lengths.values())) == 1, "columns", lengths, "arrays of one length")
        self._flush()
        self._blocks.append(dict(columns))

    def column(self, name: str) -> np.ndarray:
        """All rows of one column: int64, float64 for `step_ms`, str for `kind`."""
        require(name in COLUMNS, "column", name, f"one of {', '.join(COLUMNS)}")
        self._flush()
        if not self._blocks:
            return np.empty(0, dtype=_dtype(name))
        return np.concatenate([block[name] for block in self._blocks])

    def columns(self) -> dict[str, np.ndarray]:
        """Every column, in the order of `COLUMNS`."""
        return {name: self.column(name) for name in COLUMNS}

    def pure_decode(self) -> dict[str, np.ndarray]:
        """The rows that only decode: the population of Fig. 2 and of all its means (§B.3)."""
        keep = self.column("kind") == "decode"
        return {name: values[keep] for name, values in self.columns().items()}

    def to_csv(self, path: str | Path) -> None:
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(zip(*(values.tolist() for values in self.columns().values()), strict=True))

    @classmethod
    def from_csv(cls, path: str | Path) -> "Trace":
        """Read what `to_csv` wrote. Raises `ValueError` where the header is another."""
        with Path(path).open(newline="") as file:
            reader = csv.reader(file)
            header = tuple(next(reader, ()))
            require(header == COLUMNS, f"header of {path}", header, f"{COLUMNS}")
            rows = list(reader)
        trace = cls()
        if rows:
            values = zip(*rows, strict=True)
            trace.extend({n: np.asarray(v).astype(_dtype(n)) for n, v in zip(COLUMNS, values, strict=True)})
        return trace

    def _flush(self) -> None:
        if self._rows:
            values = zip(*self._rows, strict=True)
            self._blocks.append({n: np.asarray(v, dtype=_dtype(n)) for n, v in zip(COLUMNS, values, strict=True)})
            self._rows = []


def _dtype(name: str) -> type:
    return {"kind": np.str_, "step_ms": np.float64}.get(name, np.int64)
