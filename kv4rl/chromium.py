"""The browser that draws figures as PNG and shows notebooks: where it is, under whichever name."""

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    """Path of Chromium or Chrome; None where neither is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)
