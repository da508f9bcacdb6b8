"""The names of group_facts, for tests/compat until it moves."""

from group_facts import *  # noqa: F403
