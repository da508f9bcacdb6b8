"""Signatures: methods of a public class say its name, also those that a base class defines."""

from __future__ import annotations

import types
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def with_own_names(cls: Class) -> Class:
    """Let Python's errors about a call name the class that users know, and not a base of it.

    Public methods that other classes of this library define are copied, under the class's name.

    >>> class Base:
    ...     def ask(self): ...
    >>> Base.__module__ = "hypercomm.base"
    >>> @with_own_names
    ... class Grid(Base): ...
    >>> Grid().ask(1)
    Traceback (most recent call last):
    TypeError: Grid.ask() takes 1 positional argument but 2 were given
    """
    for base in cls.__mro__[1:]:
        if base.__module__.partition(".")[0] != "hypercomm":
            continue
        for name, member in vars(base).items():
            if not name.startswith("_") and name not in vars(cls):
                own = _renamed(member, f"{cls.__qualname__}.{name}")
                if own is not None:
                    setattr(cls, name, own)
    return cls


def _renamed(member: Any, qualname: str) -> Any:
    """Return a copy of a method under another name; None where it is no method."""
    if isinstance(member, (classmethod, staticmethod)):
        return type(member)(_renamed(member.__func__, qualname))
    if not isinstance(member, types.FunctionType):
        return None
    code, scope, closure = member.__code__, member.__globals__, member.__closure__
    copy = types.FunctionType(code, scope, member.__name__, member.__defaults__, closure)
    copy.__kwdefaults__ = member.__kwdefaults__
    copy.__dict__.update(member.__dict__)
    for name in ("__annotations__", "__doc__", "__module__", "__type_params__"):
        if hasattr(member, name):  # the last one is of Python 3.12
            setattr(copy, name, getattr(member, name))
    copy.__qualname__ = qualname
    return copy
