"""`python -m kv4rl.bench NAME ...`: each bench prints its card and table, and one JSON object as its last line."""

import importlib
import sys

BENCHES = {  # name -> module with main(arguments)
    "kernels": "kv4rl.bench.kernels",
    "overhead": "kv4rl.bench.overhead",
    "replay": "kv4rl.bench.replay",
    "rollout": "kv4rl.bench.rollout",
    "iteration": "kv4rl.bench.iteration",
    "soak": "kv4rl.bench.soak",
    "today": "kv4rl.bench.today",
}


def main(arguments: list[str] | None = None) -> None:
    """Run the bench named first with the rest of the arguments; SystemExit names the known ones."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] not in BENCHES:
        raise SystemExit(f"usage: python -m kv4rl.bench {{{','.join(BENCHES)}}} ...")
    importlib.import_module(BENCHES[arguments[0]]).main(arguments[1:])


if __name__ == "__main__":
    main()
