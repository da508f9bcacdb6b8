"""How many examples hypothesis tries: few by default, more with --hypothesis-profile=deep."""

from hypothesis import settings

FEWEST, MOST = 20, 120
"""Bounds of the default profile: a hundred examples more rarely find a mistake."""


def examples(deep):
    """Return the number of examples for this profile, where the deep profile tries `deep`."""
    few = max(FEWEST, deep * settings.default.max_examples // 100)
    return few if settings.default.max_examples >= 100 else min(few, MOST)
