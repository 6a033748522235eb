"""The page shows the fidelity panels and what does not hold, and leaves out what has no rows."""

import pytest

from kv4rl import report, results


def test_panels_and_failing_orderings_are_on_the_page():
    section = report.fidelity_section()
    assert all(f"{shape}: smollm2-135m, 256 states" in section for shape in ("A3", "4c", "A4a", "A4b", "A4c"))
    assert "kv4-random144" in section and "the paper's 7x below KV4" in section.replace("\\u0027", "'")
    assert "nvfp4-none &lt; nvfp4-k" in section and "a few uncertain states set the mean" in section


@pytest.mark.parametrize("kept", [0, 12])
def test_without_their_rows_they_are_left_out(tmp_path, monkeypatch, kept):
    source = results.RESULTS / "fidelity.csv"
    if kept:
        (tmp_path / source.name).write_text("".join(source.read_text().splitlines(keepends=True)[: kept + 1]))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    section = report.fidelity_section()
    assert "do not hold" not in section and ("plotly" in section) == bool(kept)
