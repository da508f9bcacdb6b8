"""The classes and functions of torch's debug server that a web page needs.

The import fails if `start_debug_server` of the installed torch has no `handlers=`, as in torch
2.10.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import _register_handler
from torch.distributed.debug._frontend import DebugHandler, NavLink, Route, fetch_all

__all__ = ["DebugHandler", "NavLink", "Route", "fetch_all", "register_handler"]


def register_handler(name: str, handler: Callable[[Any, Any], None]) -> None:
    """Register a handler of this process for a request of the debug server."""
    _register_handler(name, handler)
    # torch releases the handler after Python has ended. Freeing the Python object at that time
    # would abort the process, so its reference count stays above zero.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
