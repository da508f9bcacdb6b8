"""How many examples hypothesis tries: few by default, more with --hypothesis-profile=deep."""

from hypothesis import settings

FEWEST, MOST = 20, 120
"""Bounds of the default profile: a hundred examples more rarely find a mistake."""


def examples(deep):
    """Return how many examples to try. `deep` is the number for the deep profile."""
    few = max(FEWEST, deep * settings.default.max_examples // 100)
    return few if settings.default.max_examples >= 100 else min(few, MOST)
