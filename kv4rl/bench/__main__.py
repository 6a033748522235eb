"""`python -m kv4rl.bench NAME ...`: each bench prints what it measures, and one JSON object as its last line."""

import argparse
import importlib
import sys

from torch import OutOfMemoryError

from kv4rl.cli import interruptible, one_sentence
from kv4rl.config import InputError
from kv4rl.engine.memory import PlanTooLarge
from kv4rl.ranks import leaving_lost_peers

BENCHES = {  # name -> module with main(arguments)
    "error": "kv4rl.bench.error",
    "floor": "kv4rl.bench.floor",
    "grading": "kv4rl.bench.grading",
    "kernels": "kv4rl.bench.kernels",
    "overhead": "kv4rl.bench.overhead",
    "replay": "kv4rl.bench.replay",
    "rollout": "kv4rl.bench.rollout",
    "iteration": "kv4rl.bench.iteration",
    "soak": "kv4rl.bench.soak",
    "today": "kv4rl.bench.today",
}


def main(arguments: list[str] | None = None) -> None:
    """Run the bench named first with the rest of the arguments; status 2, and the known ones, for another name."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m kv4rl.bench", description=__doc__)
    parser.add_argument("bench", choices=tuple(BENCHES))
    name = parser.parse_args(arguments[:1]).bench
    program = f"kv4rl.bench {name}"
    with (
        leaving_lost_peers(),
        interruptible(program),
        one_sentence(program, kinds=(PlanTooLarge, InputError, OutOfMemoryError), status=1),
    ):
        importlib.import_module(BENCHES[name]).main(arguments[1:])


if __name__ == "__main__":
    main()
