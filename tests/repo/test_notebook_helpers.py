"""What notebooks show through `kv4rl.notebook` renders as meant."""

from kv4rl import notebook


def test_a_bar_in_a_header_or_cell_adds_no_column():
    head, rule, line = notebook.table([{"|p - q|": "a|b", "n": 1}]).data.split("\n")
    assert head == r"| \|p - q\| | n |" and line == r"| a\|b | 1 |" and rule == "|---|---|"


def test_a_table_without_rows_says_which_command_makes_them():
    assert notebook.table([]).data == "*No rows.*"
    assert notebook.table([], made_by="python -m x").data == "*Not measured: `python -m x` makes the rows.*"


def test_the_closing_list_has_an_item_a_sentence():
    assert notebook.saw("a", "b").data == "- a\n- b"
