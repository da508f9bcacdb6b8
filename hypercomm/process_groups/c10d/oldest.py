"""The oldest torch that hypercomm works with: an older one is refused before anything is used."""

from __future__ import annotations

import re

import torch

from hypercomm.errors import TorchVersionError

OLDEST = "2.6"


def release_of(version: str) -> tuple[int, ...]:
    """Return the release that a version is of, which one made before it counts as.

    Example:
        >>> release_of("2.6.0a0+ecf3bae40a.nv25.01"), release_of("2.15")
        ((2, 6), (2, 15))
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check(installed: str) -> None:
    """Refuse a torch that is too old.

    Args:
        installed: Its version.

    Raises:
        TorchVersionError: With what to do.

    Example:
        >>> check("2.6.0+cu124")
        >>> check("2.5.1")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        hypercomm.errors.TorchVersionError: torch 2.5.1 is installed, and hypercomm needs 2.6 or ...
    """
    if release_of(installed) < release_of(OLDEST):
        raise TorchVersionError(
            f"torch {installed} is installed, and hypercomm needs {OLDEST} or newer: "
            f"pip install 'torch>={OLDEST}'; hypercomm.layout, and hypercomm.RankLayout, need none"
        )


check(torch.__version__)
