"""What `hypercomm place` is given: its options, and texts as a model's card or numbers by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypercomm.errors import NotationError
from hypercomm.layout.placing import Card
from hypercomm.layout.placing.traffic import as_amount
from hypercomm.layout.text import shown
from hypercomm.topology.names import Names

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


OPTIONS = Names(
    {
        "on": "--on",
        "traffic": "--traffic",
        "model": "--model",
        "overlapped": "--overlap",
        "weights": "--weights",
        "gpus_per_host": "--gpus-per-node",
    }
)
"""What arguments of `place` are called on the command line."""


def read_card(text: str) -> Card:
    """Read a model's card: a file of JSON, or names and values.

    Raises:
        NotationError: It cannot be read.
        LayoutError: A name is none of a card's, one is missing, or a value makes no sense.

    Example:
        >>> card = read_card("hidden=8,layers=2,sequence=4k,micro_batches=1,parameters=1.5G")
        >>> card.sequence, card.parameters, card.dtype
        (4000, 1500000000, 'bf16')
    """
    if "=" in text:
        return Card.read(_pairs(text, "--model"))
    try:
        fields = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise NotationError(
            f"--model {shown(text)} is no file of JSON ({error}); name one, or write "
            f"hidden=4096,layers=32,sequence=8192,micro_batches=8,parameters=7G"
        ) from error
    return Card.read(fields)


def read_numbers(text: str, option: str) -> dict[str, float]:
    """Read numbers by name.

    Raises:
        NotationError: It cannot be read.

    Example:
        >>> read_numbers("domain=1,leaf=2.5", "--weights")
        {'domain': 1, 'leaf': 2.5}
    """
    pairs = _pairs(text, option)
    for name, value in pairs.items():
        if isinstance(value, str):
            raise NotationError(f"{option} gives {name!r} {value!r}, which is no number")
    return pairs


def _pairs(text: str, option: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not value or name in found:
            raise NotationError(f"{part!r} in {option} {shown(text)} is no name=value of its own")
        amount = as_amount(value, _UNITS)
        if value in ("true", "false", "True", "False"):
            found[name] = value.lower() == "true"
        else:
            found[name] = value if amount is None else amount
    return found
