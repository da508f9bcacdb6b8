"""One name of group_facts, for tests/compat."""

from group_facts import tables as registered  # noqa: F401
