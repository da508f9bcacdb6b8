"""The oldest torch that hypercomm works with: an older one is refused before anything is used."""

from __future__ import annotations

import torch

from hypercomm.errors import TorchVersionError

OLDEST = "2.6"


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
    if torch.torch_version.TorchVersion(installed) < OLDEST:
        raise TorchVersionError(
            f"torch {installed} is installed, and hypercomm needs {OLDEST} or newer: "
            f"pip install 'torch>={OLDEST}'; hypercomm.layout, and hypercomm.RankLayout, need none"
        )


check(torch.__version__)
