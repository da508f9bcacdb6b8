"""Launch files of other frameworks: their sizes, layouts and problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypercomm.lazy import attributes

if TYPE_CHECKING:
    from hypercomm.tools.launch_files.config import (
        LaunchConfig as LaunchConfig,
        read_config as read_config,
    )
    from hypercomm.tools.launch_files.source import Source as Source

_HOMES = {
    "LaunchConfig": "hypercomm.tools.launch_files.config",
    "Source": "hypercomm.tools.launch_files.source",
    "read_config": "hypercomm.tools.launch_files.config",
}

__all__ = [*_HOMES]  # noqa: PLE0604 - names of a table

__getattr__ = attributes(__name__, _HOMES)
