"""The README's tables are made from rows and notebooks: what is committed is what `python -m kv4rl.readme` writes."""

import re
import subprocess

import pytest

from kv4rl import readme
from kv4rl.results import REPOSITORY, read_rows, write_rows

TEXT = readme.README.read_text()


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.parent.name)
def test_tables_are_what_the_committed_rows_say(page, tmp_path):
    """The index's rows, not the working tree's: `make replicate` adds those of this machine."""
    command = ["git", "-C", str(REPOSITORY), "checkout-index", "--all", f"--prefix={tmp_path}/"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("not a git checkout: nothing says which rows were committed")
    assert readme.rewrite(page.read_text(), tmp_path / "data" / "results") == page.read_text()


def test_a_block_without_its_end_is_refused():
    with pytest.raises(ValueError, match="'results'"):
        readme.rewrite("<!-- results -->\n")


def test_triton_rows_make_a_table_of_their_own_and_change_no_other(tmp_path):
    stored = [row for row in read_rows("kernels.csv") if not row["arm"].endswith(readme.TRITON)]
    write_rows(tmp_path / "kernels.csv", stored)
    before, summary = readme.decode(tmp_path), readme.kernels(tmp_path)
    assert "Triton" not in before
    speedups = [row for row in stored if row["metric"] == "speedup_vs_bf16" and row["shape"] == "640x874"]
    theirs = [row | {"arm": row["arm"] + "_triton", "value": "1.234"} for row in speedups if row["arm"] == "kv4"]
    write_rows(tmp_path / "kernels.csv", [row | {"date": "2999-01-01", "commit": "abc1234"} for row in theirs])
    after = readme.decode(tmp_path)
    assert after.startswith(before) and readme.kernels(tmp_path) == summary
    added = after.removeprefix(before)
    assert added.count("| batch x context | KV8 | KV4 | KV4-RL |") == len(theirs) == 2
    assert added.count("| 640x874 | - | 1.23x | - |") == 2
    assert added.count("2999-01-01, abc1234") == 2


def test_relative_links_and_pictures_exist():
    targets = re.findall(r"\]\(((?!https?:|#)[^)\s]+)\)", TEXT) + re.findall(r'src="((?!http)[^"]+)"', TEXT)
    assert targets and [target for target in targets if not (REPOSITORY / target).exists()] == []


def test_it_stays_within_200_lines():
    assert len(TEXT.splitlines()) <= 200


def test_the_python_example_runs_and_solves_its_task(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "\\boxed{52}" in capsys.readouterr().out
