# The names that `__init__.py` imports on first access.

from hypercomm.tools.launch_files.config import (
    LaunchConfig as LaunchConfig,
    read_config as read_config,
)
from hypercomm.tools.launch_files.source import Source as Source

__all__ = ["LaunchConfig", "Source", "read_config"]
