"""What a megatron-core has that ours lacks, read from its sources without importing it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

MODULES = ("parallel_state", "process_groups_config", "hyper_comm_grid")
"""The modules that have a counterpart here, under the same names."""

_HERE = "hypercomm.compat.megatron"


def lacking(folder: Path) -> dict[str, list[str]]:
    """List the names and arguments of Megatron's modules that ours do not have.

    Public functions and classes count, their arguments, public methods and fields, and the globals
    of `parallel_state`, which callers read.

    Args:
        folder: The folder `megatron/core`; what is missing in it lacks nothing.

    Returns:
        For each module what it has more, as in "get_x_group", "get_y(with_z=)", "Grid.method".
    """
    return {name: list(_lacking_in(folder / f"{name}.py", name)) for name in MODULES}


def names_in(path: Path) -> dict[str, ast.stmt]:
    """Return what a module defines that callers use, by name; nothing if it cannot be read."""

    def is_used(name: str, node: ast.stmt) -> bool:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return not name.startswith("_")
        return name.startswith("_") and name.isupper()

    return {name: node for name, node in bound_in(path).items() if is_used(name, node)}


def bound_in(path: Path) -> dict[str, ast.stmt]:
    """Return all that a module binds to a name but by imports, within `if` and `try` too."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    return dict(_bound(tree.body))


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((each.id, node) for each in targets if isinstance(each, ast.Name))
        elif isinstance(node, (ast.If, ast.Try)):
            handlers = [] if isinstance(node, ast.If) else node.handlers
            final = [] if isinstance(node, ast.If) else node.finalbody
            for part in (node.body, *(each.body for each in handlers), node.orelse, final):
                yield from _bound(part)


def _lacking_in(path: Path, name: str) -> Iterator[str]:
    ours = importlib.import_module(f"{_HERE}.{name}")
    for theirs, node in names_in(path).items():
        if not _has(ours, theirs):
            yield theirs
        elif isinstance(node, ast.FunctionDef):
            yield from _lacking_arguments(node, [getattr(ours, theirs)], theirs)
        elif isinstance(node, ast.ClassDef):
            yield from _lacking_in_class(node, getattr(ours, theirs), theirs)


def _has(module: ModuleType, name: str) -> bool:
    return name in vars(module) or hasattr(type(module), name)


def _lacking_in_class(node: ast.ClassDef, ours: type, name: str) -> Iterator[str]:
    fields = getattr(ours, "__annotations__", {})
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            is_public = not member.name.startswith("_") or member.name == "__init__"
            if is_public and not hasattr(ours, member.name):
                yield f"{name}.{member.name}"
            elif is_public:
                kinds = [kind for kind in ours.__mro__[:-1] if member.name in vars(kind)]
                known = [getattr(kind, member.name) for kind in kinds]
                yield from _lacking_arguments(member, known, f"{name}.{member.name}")
        elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            field = member.target.id
            if not field.startswith("_") and field not in fields and not hasattr(ours, field):
                yield f"{name}.{field}"


def _lacking_arguments(node: ast.FunctionDef, ours: Sequence[object], name: str) -> Iterator[str]:
    """What none of some functions takes, of which each hands on to the next what it does not."""
    known = {"self", "cls"}
    for function in ours:
        parameters = inspect.signature(function).parameters if callable(function) else {}
        known |= parameters.keys()
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            break
    else:  # the last one takes any
        return
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    yield from (f"{name}({each.arg}=)" for each in every if each.arg not in known)
