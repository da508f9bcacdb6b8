"""torch's debug server, a web page over all ranks: what pages for it are made of.

Importing this fails where `start_debug_server` takes no `handlers=`, as in torch 2.10.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import _register_handler
from torch.distributed.debug._frontend import DebugHandler, NavLink, Route, fetch_all

__all__ = ["DebugHandler", "NavLink", "Route", "fetch_all", "register_handler"]


def register_handler(name: str, handler: Callable[[Any, Any], None]) -> None:
    """Let this process answer a request of the debug server."""
    _register_handler(name, handler)
    # torch releases it when Python has ended; if nothing else held it, that would abort the process
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
