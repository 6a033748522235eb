"""Which gold answers the grader cannot use, found out in a process that can be killed: sympy may never come back."""

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence

MEMORY_BYTES = 2 << 30  # address space of the process: a gold that wants more raises MemoryError there
START_LIMIT_S = 120.0  # importing sympy on a crowded machine


def unusable_golds(golds: Sequence[str], *, limit_s: float = 10.0) -> dict[str, str]:
    """gold -> why `rewards.check_gold` refuses it, for those it refuses or takes more than `limit_s` seconds over."""
    left = list(dict.fromkeys(golds))
    reasons: dict[str, str] = {}
    while left:
        left = _check_until_stuck(left, reasons, limit_s)
    return reasons


def _check_until_stuck(golds: list[str], reasons: dict[str, str], limit_s: float) -> list[str]:
    """Check `golds` in order in a fresh process, filling `reasons`; returns those behind the one it got stuck on."""
    command = [sys.executable, "-m", "kv4rl.tasks.golds"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8") as child:
        try:
            child.stdin.write(json.dumps(golds))
            child.stdin.close()
            if not _line_within(START_LIMIT_S, child):
                raise RuntimeError(f"{' '.join(command)} does not start; its own message stands above")
            for done, gold in enumerate(golds, start=1):
                line = _line_within(limit_s, child)
                if not line:
                    reasons[gold] = f"gold={gold!r}: expected an answer that Math-Verify reads within {limit_s:g} s"
                    return golds[done:]
                if reason := json.loads(line):
                    reasons[gold] = reason
        finally:
            child.kill()
    return []


def _line_within(seconds: float, child: subprocess.Popen) -> str:
    """The child's next line; empty when it had none in time (then it is killed) or has ended."""
    alarm = threading.Timer(seconds, child.kill)
    alarm.start()
    try:
        return child.stdout.readline()
    finally:
        alarm.cancel()


def _serve() -> None:
    """The child: a JSON list of golds in; a line when ready, then one a gold with null or the reason against it."""
    from kv4rl.rewards.readings import check_gold

    golds = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    quiet, answers = os.open(os.devnull, os.O_WRONLY), os.fdopen(os.dup(1), "w")
    os.dup2(quiet, 1)  # the LaTeX parser prints about every malformed answer
    os.dup2(quiet, 2)
    print("ready", file=answers, flush=True)
    for gold in golds:
        try:
            check_gold(gold)
            reason = None
        except Exception as error:  # our own, or whatever sympy raises over somebody's LaTeX: the gold cannot be used
            unnamed = f"gold={gold!r}: expected an answer that Math-Verify can compare ({type(error).__name__})"
            reason = str(error) if isinstance(error, ValueError) and str(error).startswith("gold=") else unnamed
        print(json.dumps(reason), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
