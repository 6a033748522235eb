"""Following a training process yields its updates as they come, and says when it failed."""

import subprocess
import sys

import pytest

from kv4rl import follow as module
from kv4rl.follow import follow

WRITER = """
import json, pathlib, sys, time
file = pathlib.Path(sys.argv[1]) / "metrics.jsonl"
for update in range(4):
    with file.open("a") as out:
        out.write(json.dumps({"update": update}) + chr(10))
    time.sleep(0.3)
sys.exit(int(sys.argv[2]))
"""


def start(directory, status):
    return subprocess.Popen([sys.executable, "-c", WRITER, str(directory), str(status)])


def test_every_update_is_seen_and_the_evaluation_before_them_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.02)
    seen = list(follow(start(tmp_path, 0), tmp_path))
    assert [line["update"] for line in seen[-1]] == [1, 2, 3]
    assert [len(lines) for lines in seen] == sorted({len(lines) for lines in seen})


def test_a_failed_process_raises_after_its_last_line(tmp_path):
    seen = []
    with pytest.raises(RuntimeError, match="status 3"):
        seen.extend(follow(start(tmp_path, 3), tmp_path))
