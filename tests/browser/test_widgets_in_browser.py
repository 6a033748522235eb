"""The widgets of notebooks 01 and 07 in a real browser: every cell runs, the sliders move, the figures follow."""

import pytest

from kv4rl.browser import drawing, first_widget, run_all, wait

MOVE_S = 30
SLIDERS = {
    "01_prove_and_simulate_kv_concentration": ("mean length", "slots B"),
    "07_choose_sink_and_recent": ("sink s", "recent w"),
}


def press_right(driver, output, name):
    """As a reader without a mouse would: the right arrow on the slider of that name; waits until the figure differs."""
    label = output.find_element("xpath", f".//*[contains(@class, 'widget-label') and normalize-space()='{name}']")
    slider = label.find_element("xpath", "./..")
    value, before = slider.find_element("css selector", ".widget-readout"), drawing(driver, output)
    shown = value.text
    slider.find_element("css selector", ".noUi-handle").send_keys("\ue014")  # W3C WebDriver's code of the right arrow
    wait(driver, MOVE_S, lambda: value.text != shown, f"{name}: the slider stayed at {shown}")
    wait(driver, MOVE_S, lambda: drawing(driver, output) != before, f"{name}: the figure did not follow the slider")


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", SLIDERS)
def test_sliders_move_the_figure(browser, lab, name):
    run_all(browser, lab(name))
    output = first_widget(browser)
    for slider in SLIDERS[name]:
        press_right(browser, output, slider)
