"""The right answer where one string is not enough: several answers, and how near a number must come (§B.2)."""

from dataclasses import asdict, dataclass

from kv4rl.config import require, require_number


@dataclass(frozen=True)
class Gold:
    """Every answer of a question, all of them required, in any order, and nothing beside them.

    A numeric answer is right within `absolute` (OlympiadBench: the row's own, or 1e-8) or within `relative` times its
    size (MinervaMath: 1e-4); with neither, only if it is exactly equal. Everything else Math-Verify compares.
    """

    answers: tuple[str, ...]
    absolute: float | None = None
    relative: float | None = None

    def __post_init__(self):
        object.__setattr__(self, "answers", tuple(self.answers))  # a list when it comes out of JSON
        whole = all(isinstance(answer, str) and answer.strip() for answer in self.answers)
        require(bool(self.answers) and whole, "answers", self.answers, "at least one, and none of them empty")
        require(self.absolute is None or self.relative is None, "relative", self.relative, "one tolerance, not two")
        for name in ("absolute", "relative"):
            if getattr(self, name) is not None:
                require_number(getattr(self, name), name, 0)

    def __str__(self) -> str:
        return ", ".join(self.answers)


def to_plain(gold: str | Gold) -> str | dict:
    """`gold` as JSON can hold it."""
    return gold if isinstance(gold, str) else asdict(gold)


def from_plain(plain: str | dict) -> str | Gold:
    """What `to_plain` was given."""
    return plain if isinstance(plain, str) else Gold(**plain)
