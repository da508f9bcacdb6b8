"""How many examples hypothesis tries: few by default, all with --hypothesis-profile=deep."""

from hypothesis import settings

FEWEST = 20


def examples(deep):
    """Of a test that tries `deep` examples in the deep profile, how many in the current one."""
    return max(FEWEST, deep * settings.default.max_examples // 100)
