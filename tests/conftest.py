"""Property tests draw the same cases on every run; `pytest --hypothesis-profile explore` draws new ones."""

from hypothesis import settings

settings.register_profile("explore", deadline=None)
settings.register_profile("repeat", deadline=None, derandomize=True)
settings.load_profile("repeat")
