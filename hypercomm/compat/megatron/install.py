"""Makes `megatron.core` resolve to the modules of this package, and undoes it."""

from __future__ import annotations

import ast
import importlib
import sys
import warnings
from types import ModuleType

from hypercomm.compat.megatron.releases import sources, version
from hypercomm.compat.megatron.state.state import current
from hypercomm.compat.replacement import Replacement
from hypercomm.errors import ConfigurationError

_OURS = "hypercomm.compat.megatron"
_KNOWN = version.text_of(version.NEWEST[:2])
_replacement = Replacement(
    homes={
        "megatron.core.parallel_state": f"{_OURS}.parallel_state",
        "megatron.core.mpu": f"{_OURS}.parallel_state",
        "megatron.core.hyper_comm_grid": f"{_OURS}.hyper_comm_grid",
        "megatron.core.process_groups_config": f"{_OURS}.process_groups_config",
    },
    packages=("megatron", "megatron.core"),
    state="megatron.core.parallel_state",
    is_busy="is_initialized",
    advice="call its destroy_model_parallel()",
    current=current,
    aliases={"megatron.core.mpu": "megatron.core.parallel_state"},
)


def install() -> None:
    """Make `megatron.core`'s parallel_state, mpu, hyper_comm_grid and process_groups_config ours.

    It works with megatron-core installed or not, and is best called before `megatron.core` is
    imported. Where that was imported, every module that holds one of its modules, functions or
    classes under a name of its own gets ours instead; what is inside of classes, dicts, closures
    or default arguments is not looked for. A second call changes nothing.

    A megatron-core that is newer than any that is known here may have names that ours lack: a
    warning lists them, imports of them work (a constant has its value, what cannot be read is
    None), and calling one is an error.

    Raises:
        InstallError: Something holds what cannot be replaced; lists it, and changes nothing.

    Example:
        >>> install()
        >>> from megatron.core import mpu
        >>> mpu.__name__
        'hypercomm.compat.megatron.parallel_state'
        >>> uninstall()
    """
    if _replacement.installed:
        return
    version.forget()  # megatron-core may have come in between
    _fill_gaps()
    try:
        _replacement.install()
    except BaseException:
        _leave_gaps()
        raise


def uninstall() -> None:
    """Undo `install`: Megatron's own modules are back, also where `install` put ours.

    A module outside of `megatron` that imported ours by a name of Megatron's in between keeps it,
    as it may have wanted ours.

    Raises:
        InstallError: The parallel state is initialised, or a state is in use.
    """
    _replacement.uninstall()
    _leave_gaps()
    version.forget()


class MegatronNotReplacedWarning(UserWarning):
    """megatron.core has its own parallel state beside ours, in which its layers find no groups."""


def warn_of_their_own() -> None:
    """Warn where `megatron.core.parallel_state` is loaded, and is not ours."""
    theirs, ours = (
        sys.modules.get(f"{package}.parallel_state") for package in ("megatron.core", _OURS)
    )
    if theirs is not None and theirs is not ours:
        warnings.warn(
            f"megatron.core.parallel_state is loaded, and is not ours: layers and collections of "
            f"megatron.core look for their groups there, and find none. If you use them, call "
            f"{_OURS}.install() before megatron.core is imported; an import of ours is enough for "
            f"layers of your own",
            MegatronNotReplacedWarning,
            stacklevel=3,
        )


def _fill_gaps() -> None:
    """Let names of a newer megatron-core be imported from ours."""
    theirs, folder = version.installed(), version.source_folder()
    if theirs is None or folder is None or theirs[:2] < version.NEWEST[:2]:
        return
    lacks = sources.lacking(folder)
    listed = [f"{module}.{name}" for module, names in lacks.items() for name in names]
    is_newer = theirs[:2] > version.NEWEST[:2]
    if not is_newer and not listed:
        return
    more = f"it has {', '.join(listed)}, which hypercomm lacks" if listed else "no name is missing"
    warnings.warn(
        f"megatron-core {version.text_of(theirs)} is newer than the newest that hypercomm "
        f"knows, {_KNOWN}; {more}",
        stacklevel=3,
    )
    for name in sources.MODULES:
        module = importlib.import_module(f"{_OURS}.{name}")
        for missing, node in sources.bound_in(folder / f"{name}.py").items():
            if not hasattr(module, missing):
                setattr(module, missing, _stand_in(name, missing, node))
                _lent.append((module, missing))


_lent: list[tuple[ModuleType, str]] = []
"""What ours have been given for names that they lack: module and name."""


def _leave_gaps() -> None:
    while _lent:
        delattr(*_lent.pop())


def _stand_in(module: str, name: str, node: ast.stmt) -> object:
    """What can be imported in place of a name that is missing: a constant's own value, or None."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        try:
            return ast.literal_eval(node.value)
        except ValueError:
            return None
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return None

    def refuse(*_: object, **__: object) -> None:
        raise ConfigurationError(
            f"megatron.core.{module}.{name} is newer than what hypercomm knows, megatron-core "
            f"{_KNOWN}; uninstall() gives Megatron's own back"
        )

    if isinstance(node, ast.ClassDef):
        return type(name, (), {"__init__": refuse})
    refuse.__name__ = refuse.__qualname__ = name
    return refuse
