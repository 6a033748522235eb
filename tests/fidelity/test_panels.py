"""The table of experiments: complete, comparable, and refused where it has no such line."""

from itertools import product

import pytest

from kv4rl.fidelity.panels import BUDGET, PANELS, RECENTS, SINKS, panel


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PANELS)
def test_a_panel_starts_with_its_baseline_and_names_each_arm_once(name, head_dim):
    arms = PANELS[name].arms(head_dim)
    names = [arm.name for arm in arms]
    assert names[0] == PANELS[name].baseline and len(set(names)) == len(names) >= 2


def test_the_grid_has_every_pair_of_widths():
    arms = {arm.name: arm.representation.protection for arm in PANELS["grid"].arms(64)}
    for s, w in product(SINKS, RECENTS):
        protection = arms[f"kv4rl-s{s}-w{w}"]
        assert (protection.sink, protection.recent) == (s, w)


def test_no_allocation_spends_more_than_the_budget():
    for arm in PANELS["4b"].arms(128):
        assert arm.representation.protection.positions in (0, BUDGET)


def test_one_name_is_one_representation_in_all_panels():
    seen = {}
    for what in PANELS.values():
        for arm in what.arms(64):
            assert seen.setdefault(arm.name, arm.representation) == arm.representation


def test_groups_do_not_exceed_the_head():
    assert [arm.name for arm in PANELS["A4b"].arms(64)] == ["int4-k", "int4_g32-k", "int4_g16-k"]
    assert [arm.name for arm in PANELS["A4b"].arms(128)] == ["int4-k", "int4_g64-k", "int4_g32-k", "int4_g16-k"]


def test_an_unknown_panel_is_refused():
    with pytest.raises(ValueError, match="panel='5'"):
        panel("5")
