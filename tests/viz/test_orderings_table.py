from kv4rl.fidelity.orderings import NOT_EQUAL, NOT_HELD
from kv4rl.results import read_rows
from kv4rl.viz.orderings import UNLISTED, not_held

ROWS = read_rows("fidelity.csv", experiment="fidelity")


def test_the_table_is_the_exception_lists_with_a_reason_each():
    lines, reasons = not_held(ROWS)
    listed = {(model, lower, higher) for model, _, lower, higher, _ in NOT_HELD}
    shown = {(line["model"], *line["paper"].split(" < ")) for line in lines if line["fails in"] != "interval"}
    equal = {(line["model"], *line["paper"].split(" = ")) for line in lines if line["fails in"] == "interval"}
    assert shown == listed and equal == {(model, arm, other) for model, _, arm, other in NOT_EQUAL}
    assert {line["why"] for line in lines} == {str(i) for i in range(1, len(reasons) + 1)} and UNLISTED not in reasons


def test_a_line_has_both_statistics():
    lines, _ = not_held(ROWS)
    line = next(line for line in lines if line["paper"] == "kv4rl < kv4-random144")
    assert (line["fails in"], line["mean KL, nats"], line["geometric ratio"]) == (
        "mean", "3.6e-5 and 2.4e-5", "0.17 and 0.48"
    )  # fmt: skip


def test_a_failure_that_the_lists_lack_is_shown_as_such():
    better = {"kv8": "1", "kv4-random144": "1"}  # on SmolLM2, where nothing of Fig. 4b fails
    rows = [
        row | {"value": better.get(row["arm"], row["value"])}
        if (row["model"], row["shape"], row["metric"]) == ("smollm2-135m", "4b", "sampler_kl")
        else row
        for row in ROWS
    ]
    lines, reasons = not_held(rows)
    assert reasons[int(next(line for line in lines if line["paper"] == "kv8 < kv4rl")["why"]) - 1] == UNLISTED
