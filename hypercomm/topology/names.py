"""What errors call arguments: as Python does, or as the options of a command."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from hypercomm.layout.text import shown


@attrs.frozen
class Names:
    """The names of arguments, for errors.

    Args:
        options: The option that gives an argument, by its name; others are called by their own.

    Example:
        >>> names = Names({"on": "--on"})
        >>> names["on"], names["traffic"]
        ('--on', 'traffic')
    """

    options: Mapping[str, str] = attrs.field(factory=dict)

    def __getitem__(self, argument: str) -> str:
        """Return what an argument is called."""
        return self.options.get(argument, argument)

    def given(self, argument: str, value: object) -> str:
        """Write an argument as it is given.

        Example:
            >>> ARGUMENTS.given("on", "8,72"), Names({"on": "--on"}).given("on", "8,72")
            ("on='8,72'", "--on '8,72'")
        """
        between = " " if argument in self.options else "="
        return f"{self[argument]}{between}{shown(value)}"


ARGUMENTS = Names()
"""As Python calls them."""
