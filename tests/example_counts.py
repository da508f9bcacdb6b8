"""Sets how many examples hypothesis tries: few by default, and more with the profile "deep"."""

from hypothesis import settings

FEWEST, MOST = 20, 120
"""The bounds of the default profile. More than 120 examples rarely find another mistake."""


def examples(deep):
    """Return how many examples to try. `deep` is the number for the deep profile."""
    few = max(FEWEST, deep * settings.default.max_examples // 100)
    return few if settings.default.max_examples >= 100 else min(few, MOST)
