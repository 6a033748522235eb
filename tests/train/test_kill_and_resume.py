"""SIGKILL at random moments of a whole run in its own process; then it must end as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kv4rl.checkpoint import list_checkpoints, load_checkpoint
from kv4rl.metrics import read_metrics, without_wall_clock
from kv4rl.presets import parse_config

# Grading at no cost, and every other part as the command line has it.
DRIVER = """
import sys
import torch
torch.set_num_threads(1)
import kv4rl.train
from kv4rl.rewards.grader import Verdict

class Parity:
    def __init__(self): self.done = {}
    def __enter__(self): return self
    def __exit__(self, *exc): pass
    def submit(self, key, text, gold): self.done[key] = Verdict(float(text.count("7") % 2 == 0), 0.0, False)
    def results(self, wait=True):
        done, self.done = self.done, {}
        return done
    def grade_many(self, items):
        for index, item in enumerate(items): self.submit(index, *item)
        return list(self.results().values())

kv4rl.train.Grader = Parity
"""
MAIN = DRIVER + "kv4rl.train.main(sys.argv[1:])\n"
KILLS, UPDATES = 20, 20
# Every life is a fork, which has torch already; it ends by SIGKILL at a random moment between start and finish.
LIVES = (
    DRIVER
    + """
import os
import random
import signal
import time
from kv4rl.metrics import read_metrics

run, kills, flags, rng = sys.argv[1], int(sys.argv[2]), sys.argv[3:], random.Random(7)
lines = [0, 0, 0, 1, 2] * (kills // 5)  # a checkpoint comes every two updates: few lives get on
rng.shuffle(lines)
for more in lines:
    child = os.fork()
    if child == 0:
        kv4rl.train.main(flags)
        os._exit(0)
    wanted, deadline = len(read_metrics(run)) + more, time.monotonic() + 60
    while len(read_metrics(run)) < wanted and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.25))
    os.kill(child, signal.SIGKILL)
    if os.waitpid(child, 0)[1] != signal.SIGKILL:
        sys.exit("a life ended by itself")
"""
)


# Rank 1's rollout fails within the second update, the others' are as they were.
FAULTY = """
import os
from kv4rl.engine.engine import RolloutEngine

if os.environ["RANK"] == "1":
    step, steps = RolloutEngine.step, []

    def failing(self):
        steps.append(None)
        if len(steps) == 60:
            raise RuntimeError("this rollout failed")
        return step(self)

    RolloutEngine.step = failing
"""

FLAGS = {
    "--preset": "smoke", "--device": "cpu", "--rollout.max_response_tokens": 40, "--rollout.age_limit": 2,
    "--rollout.cache_pages": 48, "--rollout.max_active_requests": 12, "--evaluate_prompts": 2, "--checkpoint_every": 2,
    "--grpo.learning_rate": 1e-3, "--kv.sink_tokens": 2, "--kv.recent_tokens": 4,
}  # fmt: skip
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def flags(model: str, output_dir: Path, updates: int) -> list[str]:
    given = FLAGS | {"--model": model, "--output_dir": output_dir, "--updates": updates}
    return [str(part) for flag in given.items() for part in flag]


def command(model: str, output_dir: Path, updates: int = UPDATES) -> list[str]:
    return [sys.executable, "-c", MAIN, *flags(model, output_dir, updates)]


@dataclass(frozen=True)
class Layout:
    """Rollout replicas of `tensor_parallel` ranks each, two unless said, over a learner sharded among all of them."""

    tensor_parallel: int
    model: str | None = None  # None: the tiny one, whose single KV head nothing divides
    updates: int = 6
    more: tuple[str, ...] = ()  # flags
    replicas: int = 2

    @property
    def ranks(self) -> int:
        return self.replicas * self.tensor_parallel

    def flags(self, model: str, output_dir: Path) -> list[str]:
        split = ["--tensor_parallel", str(self.tensor_parallel)]
        return [*flags(self.model or model, output_dir, self.updates), *split, *self.more]

    def command(self, model: str, output_dir: Path, main: str = MAIN) -> list[str]:
        """The same under torchrun, which wants a file."""
        driver = output_dir.parent / "driver.py"
        driver.write_text(main)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        return [*torchrun, str(driver), *self.flags(model, output_dir)]


ONE = Layout(1, updates=UPDATES, replicas=1)
TWO = Layout(1)
TWO_LONGER = Layout(1, updates=12)
FOUR = Layout(2, "mini-qwen3", updates=4)  # DP2 x TP2 over FSDP2 x 4: the paper's own on four GPUs (Table A1)
ON_GPUS = ("--device", "auto", "--memory", "phased", "--kv.sink_tokens", "16", "--kv.recent_tokens", "128")


def run_to_end(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory) -> Path:
    """A run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("whole")
    run_to_end(command(tiny_model, directory))
    return directory


def wait_for_lines(process: subprocess.Popen, output_dir: Path, count: int) -> None:
    while len(read_metrics(output_dir)) < count:
        assert process.poll() is None, "the run ended before it could be disturbed"
        time.sleep(0.01)


def rank_processes(torchrun: subprocess.Popen) -> list[int]:
    """Process ids of the ranks that torchrun started, rank 0 first."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    environment = lambda pid: Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    ranks = {word: pid for pid in children for word in environment(pid) if word.startswith("RANK=")}
    return [int(ranks[name]) for name in sorted(ranks)]


def newest(run: Path, words: list[str]):
    return load_checkpoint(list_checkpoints(run / "checkpoints")[-1], parse_config(words))


def assert_equal_runs(one: Path, other: Path, words: list[str]) -> None:
    """Every figure that does not depend on the clock, and all that the last checkpoint holds."""
    updates = parse_config(words).updates
    lines = [[without_wall_clock(line) for line in read_metrics(run)] for run in (one, other)]
    assert len(lines[0]) == updates + 1 and lines[0] == lines[1]
    first, second = (newest(run, words) for run in (one, other))
    assert first.update == second.update == updates and first.run == second.run
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, second.weights[name]), name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_at_twenty_random_moments_ends_like_one_that_was_not(whole, tiny_model, tmp_path):
    """Bug rows 18 and 19: counters that restart, a cursor ahead of what was trained, lost in-flight prompts."""
    lives = [sys.executable, "-c", LIVES, tmp_path, KILLS, *flags(tiny_model, tmp_path, UPDATES)]
    run_to_end([str(word) for word in lives])
    assert newest(tmp_path, flags(tiny_model, tmp_path, UPDATES)).update < UPDATES
    run_to_end(command(tiny_model, tmp_path))
    assert_equal_runs(whole, tmp_path, flags(tiny_model, tmp_path, UPDATES))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("under_torchrun", [False, True])
def test_a_run_asked_to_stop_saves_after_the_iteration_and_the_same_command_goes_on(
    whole, tiny_model, tmp_path, under_torchrun
):
    """By SIGTERM; under torchrun, whose agent kills soon after that, by the file."""
    run = tmp_path / "run"
    words = ONE.command(tiny_model, run) if under_torchrun else command(tiny_model, run)
    process = subprocess.Popen(words, **QUIET)
    wait_for_lines(process, run, 4)
    (run / "stop").touch() if under_torchrun else process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0 and not (run / "stop").exists()
    done = read_metrics(run)[-1]["update"]
    assert done < UPDATES and newest(run, flags(tiny_model, run, UPDATES)).update == done
    (run / "stop").touch()  # left by one who asked when the run had ended: it is no request to the next
    run_to_end(words)
    assert_equal_runs(whole, run, flags(tiny_model, run, UPDATES))


@pytest.fixture(scope="module")
def undisturbed(tiny_model, tmp_path_factory):
    """The run of a layout that nothing disturbed; each is made once."""
    made: dict[Layout, Path] = {}

    def make(layout: Layout) -> Path:
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp("ranks") / "run"
            run_to_end(layout.command(tiny_model, made[layout]))
        return made[layout]

    return make


def assert_goes_on_to_the_same_end(layout: Layout, model: str, run: Path, whole: Path) -> None:
    """The same command goes on with a broken run, and ends as the one that nothing disturbed."""
    run_to_end(layout.command(model, run))
    assert_equal_runs(whole, run, layout.flags(model, run))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "rank"), [(TWO, 0), (TWO, 1), (FOUR, 3)])
def test_ranks_end_alike_though_one_of_them_was_killed(undisturbed, tiny_model, tmp_path, layout, rank):
    """Whichever rank dies, all end; the same command continues with every replica's unfinished responses."""
    broken = tmp_path / "run"
    process = subprocess.Popen(layout.command(tiny_model, broken), **QUIET)
    wait_for_lines(process, broken, 4 - rank if layout is TWO else 3)
    os.kill(rank_processes(process)[rank], signal.SIGKILL)
    assert process.wait(60) != 0
    assert_goes_on_to_the_same_end(layout, tiny_model, broken, undisturbed(layout))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_killed_at_random_moments_end_like_two_that_were_not(undisturbed, tiny_model, tmp_path):
    """As of one process above, but any one rank dies: in collection, update, evaluation or while it saves."""
    run, rng = tmp_path / "run", random.Random(7)
    for more in (0, 1, 0, 1, 1):
        process = subprocess.Popen(TWO_LONGER.command(tiny_model, run), **QUIET)
        wait_for_lines(process, run, len(read_metrics(run)) + more)
        while len(ranks := rank_processes(process)) < TWO_LONGER.ranks:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 2.0 if not more else 0.25))  # without a line to wait for it may be starting still
        os.kill(rng.choice(ranks), signal.SIGKILL)
        assert process.wait(60) != 0
    assert_goes_on_to_the_same_end(TWO_LONGER, tiny_model, run, undisturbed(TWO_LONGER))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rollout_that_fails_on_one_rank_ends_all_with_its_error_and_no_success(undisturbed, tiny_model, tmp_path):
    """Bug row 17: a crash of the rollout that was reported as finished training."""
    run = tmp_path / "run"
    words = TWO.command(tiny_model, run, FAULTY + MAIN)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "this rollout failed" in done.stderr
    assert 0 < len(read_metrics(run)) < TWO.updates + 1
    assert_goes_on_to_the_same_end(TWO, tiny_model, run, undisturbed(TWO))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TWO, FOUR])
def test_two_replicas_hold_prompts_of_their_own_and_one_rank_cannot_take_them_over(undisturbed, tiny_model, layout):
    run = undisturbed(layout)
    first, second = (
        {group["prompt"]["prompt_id"] for group in collector["groups"]}
        for collector in newest(run, layout.flags(tiny_model, run)).run["collectors"]
    )
    assert first and second and not first & second
    words = flags(layout.model or tiny_model, run, layout.updates)
    done = subprocess.run([sys.executable, "-c", MAIN, *words], capture_output=True, text=True)
    assert done.returncode == 2 and "replicas=1: expected 2" in done.stderr
    assert "torchrun starts as many by --nproc-per-node 2 with --tensor_parallel 1" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.timeout(300)
def test_two_gpus_end_within_a_minute_of_a_kill_and_the_same_command_goes_on(tmp_path):
    """DP2 x TP1: NCCL in place of gloo, graphs, and memory that engine and learner take turns with."""
    layout, run = Layout(1, "mini-qwen3", updates=12, more=ON_GPUS), tmp_path / "run"
    words = layout.command("", run)
    process = subprocess.Popen(words, **QUIET)
    wait_for_lines(process, run, 4)
    os.kill(rank_processes(process)[1], signal.SIGKILL)
    assert process.wait(60) != 0
    run_to_end(words)
    assert [line["update"] for line in read_metrics(run)] == list(range(layout.updates + 1))
    first, second = (
        {group["prompt"]["prompt_id"] for group in collector["groups"]}
        for collector in newest(run, layout.flags("", run)).run["collectors"]
    )
    assert first and second and not first & second
