"""The table of what the paper orders or calls equal and our rows do not, each line with its numbers and its reason."""

from collections.abc import Mapping, Sequence

from kv4rl.fidelity.orderings import (
    EQUAL,
    MODELS,
    NOT_EQUAL,
    NOT_HELD,
    ORDERINGS,
    failures,
    interval,
    intervals_overlap,
    value,
)
from kv4rl.viz.protection import number

UNLISTED = "not looked into: rows of another machine than the ones that the reasons are of"


def not_held(rows: Sequence[Mapping[str, str]]) -> tuple[list[dict[str, str]], list[str]]:
    """(one dict a statement that fails, the reasons that their `why` counts from 1).

    Args: rows of `fidelity.csv` of any models. A statement is one of `orderings.ORDERINGS` or `EQUAL`; it is asked of
    the rows anew, so a row measured again changes the table.
    """
    lines, reasons = [], []
    for model in MODELS:
        mine = [row for row in rows if row["model"] == model]
        for line, reason in [*_orderings(mine, model), *_equal(mine, model)]:
            if reason not in reasons:
                reasons.append(reason)
            lines.append({"model": model} | line | {"why": str(1 + reasons.index(reason))})
    return lines, reasons


def _orderings(rows: list, model: str):
    """One line an ordering, whichever statistics fail: the ratios say whether few states decide the means."""
    failed = failures(rows)
    for ordering in ORDERINGS:
        statistics = [statistic for other, statistic in failed if other == ordering]
        if statistics:
            shape, *arms = (ordering.shape, ordering.lower, ordering.higher)
            means, ratios = ([value(rows, shape, arm, name) for arm in arms] for name in ("mean", "geometric"))
            yield {
                "paper": f"{ordering.lower} < {ordering.higher}", "place": ordering.place,
                "mean KL, nats": " and ".join(map(number, means)),
                "geometric ratio": " and ".join(f"{ratio:.2f}" for ratio in ratios),
                "fails in": ", ".join(statistics),
            }, NOT_HELD.get((model, shape, *arms, statistics[0]), UNLISTED)  # fmt: skip


def _equal(rows: list, model: str):
    for place, shape, *arms in EQUAL:
        if not intervals_overlap(rows, shape, *arms):
            spans = ["[" + ", ".join(map(number, interval(rows, shape, arm))) + "]" for arm in arms]
            ratios = [value(rows, shape, arm, "geometric") for arm in arms]
            yield {
                "paper": " = ".join(arms), "place": place, "mean KL, nats": " and ".join(spans),
                "geometric ratio": " and ".join(f"{ratio:.2f}" for ratio in ratios), "fails in": "interval",
            }, NOT_EQUAL.get((model, shape, *arms), UNLISTED)  # fmt: skip
