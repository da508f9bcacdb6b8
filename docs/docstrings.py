"""How the API reference reads docstrings: an extension of griffe, which mkdocs.yml names.

Ours call the section of examples "Example:"; griffe knows "Examples:". An example below a summary,
without a section, becomes a block of code, too.
"""

import re
from typing import Any

import griffe

_LONE_EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)", re.MULTILINE)


class Examples(griffe.Extension):
    """Makes examples blocks of code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that was just read."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        obj.docstring.value = _LONE_EXAMPLE.sub(
            lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text
        )
