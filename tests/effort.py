"""How many examples hypothesis tries: few by default, all with --hypothesis-profile=deep."""

from hypothesis import settings

FEWEST, MOST = 20, 120
"""What the default profile tries of any test: another hundred finds little in a minute's loop."""


def examples(deep):
    """Of a test that tries `deep` examples in the deep profile, how many in the current one."""
    few = max(FEWEST, deep * settings.default.max_examples // 100)
    return few if settings.default.max_examples >= 100 else min(few, MOST)
