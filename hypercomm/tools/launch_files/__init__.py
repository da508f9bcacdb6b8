"""Launch files of other frameworks: their sizes, layouts and problems."""

from hypercomm.tools.launch_files.config import (
    LaunchConfig as LaunchConfig,
    read_config as read_config,
)
from hypercomm.tools.launch_files.source import Source as Source

__all__ = ["LaunchConfig", "Source", "read_config"]
