"""What every table made from rows needs: no column that says nothing."""

from collections.abc import Sequence

ABSENT = ("", "-")


def without_empty_columns(lines: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """`lines` without the columns that are empty or "-" in every one of them: nothing was measured for those."""
    empty = {name for name in (lines[0] if lines else ()) if all(line[name] in ABSENT for line in lines)}
    return [{name: cell for name, cell in line.items() if name not in empty} for line in lines]
