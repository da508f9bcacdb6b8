"""Pickling functions that travel between processes, with the file that their tracebacks name."""

from __future__ import annotations

import io
import types
from typing import Any, ClassVar

import cloudpickle

_DROPPED = "<dynamic-code>"
"""What cloudpickle 3.1.3 and newer put in place of the file of a function."""


def _reduce_code(code: types.CodeType) -> Any:
    make, arguments, *more = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    kept = (code.co_filename if one == _DROPPED else one for one in arguments)
    return make, tuple(kept), *more


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler of cloudpickle that keeps the file of each function."""

    dispatch_table: ClassVar = {**cloudpickle.Pickler.dispatch_table, types.CodeType: _reduce_code}


def dumps(value: object) -> bytes:
    """Pickle a value; functions by their code, if the other process cannot import them."""
    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()
