"""The map from known public bugs to tests in kernels/README.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
HEADING = "## Known public bugs and their tests"


def test_every_row_names_tests_that_exist():
    section = (TESTS.parent / "kernels" / "README.md").read_text().split(f"{HEADING}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| \d+ \|.*$", section, flags=re.MULTILINE)
    assert len(rows) == 25
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (TESTS / file).read_text(), (file, test)
