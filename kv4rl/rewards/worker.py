"""One grading process: reads batches from a socket, answers one message per response, stays inside its limits.

Started by `grader.py` as `python -m kv4rl.rewards.worker FD MEMORY_BYTES TIMEOUT_S`: a fresh interpreter, so it holds
neither torch nor the trainer's memory, and its main thread can take alarms (Math-Verify needs one; off the main thread
its alarms raise and every score becomes 0).

Three fences stand around each response: an alarm per reading; RLIMIT_AS; and RLIMIT_CPU moved ahead of each response,
so that a worker stuck in C code ends even when the trainer was killed and nobody is left to stop it.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from math_verify.errors import TimeoutException

from kv4rl.rewards.boxes import last_box
from kv4rl.rewards.gold import Gold, from_plain
from kv4rl.rewards.readings import box_reading, verl_reading
from kv4rl.rewards.rules import box_rules, verl_rules

READING_SHARE = 0.45  # of the response's deadline, for each of the two readings: the alarm comes before the kill
REPEAT_S = 0.25  # the alarm rings again in case a destructor swallowed the first


def _ring(signum, frame):
    raise TimeoutException("the reading's alarm rang")


def read_within(seconds: float, reading: Callable[..., bool], *args: str | Gold) -> tuple[bool, str | None]:
    """(equal, reason): `reading(*args)` under an alarm; a failed reading is not equal and carries its reason.

    Only the type of an error is kept: printing sympy's messages can take as long as the failure did.
    """
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
        try:
            return reading(*args), None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TimeoutException:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return False, "timeout"
    except Exception as error:
        return False, type(error).__name__


def grade(text: str, gold: str | Gold, seconds: float) -> dict:
    """Both readings of one response, as the fields of `grader.Verdict`; a `Gold` is compared by its rules."""
    box = last_box(text)
    rules = isinstance(gold, Gold)
    boxed, box_error = False, None
    if box is not None:
        reading = (box_rules, text) if rules else (box_reading, box)
        boxed, box_error = read_within(seconds, *reading, gold)
    anywhere, verl_error = read_within(seconds, verl_rules if rules else verl_reading, text, gold)
    reasons = {"last_box": box_error, "verl": verl_error}
    return {
        "verl": float(anywhere),
        "last_box": float(boxed),
        "has_box": box is not None,
        "timed_out": "timeout" in reasons.values(),
        "error": "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason) or None,
    }


def _limit(what: int, soft: int) -> None:
    """Set the soft limit, or keep the hard one where the machine's is lower."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _renew_cpu_limit(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds) + 2)


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def serve(connection: Connection, memory_bytes: int, timeout_s: float) -> None:
    """Answer batches `[[text, gold], ...]` with one verdict message per response until the other end closes.

    A worker that holds half its memory asks to be retired: what sympy has cached would fail innocent answers.
    """
    while True:
        try:
            batch = json.loads(connection.recv_bytes())
        except EOFError:
            return
        for text, gold in batch:
            _renew_cpu_limit(timeout_s)
            verdict = grade(text, from_plain(gold), READING_SHARE * timeout_s)
            verdict["retire"] = _address_space_bytes() > memory_bytes // 2
            connection.send_bytes(json.dumps(verdict).encode())


def main(fd: int, memory_bytes: int, timeout_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle; it closes the socket
    signal.signal(signal.SIGALRM, _ring)
    _limit(resource.RLIMIT_AS, memory_bytes)
    connection = Connection(fd)
    warm = grade("2 + 3 = 5, so \\boxed{5}", "5", 60.0)  # compiles the patterns, and proves that grading works here
    if (warm["verl"], warm["last_box"]) != (1.0, 1.0):
        raise RuntimeError(f"the grading worker cannot grade: {warm}")
    quiet = os.open(os.devnull, os.O_WRONLY)  # the LaTeX parser prints about every malformed answer
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        connection.send_bytes(b"ready")
        serve(connection, memory_bytes, timeout_s)
    except (BrokenPipeError, ConnectionResetError):
        return  # the trainer is gone


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
