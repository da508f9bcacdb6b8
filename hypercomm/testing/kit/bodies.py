"""What a test's body is on its way to a rank, and what a rank does with it.

A body travels by name, as a test's decorators have replaced it in its module; its arguments travel
by pickle, each by itself, so that the one that cannot is named.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import inspect
import marshal
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import attrs

from hypercomm.errors import LaunchError
from hypercomm.launch.local_rank import report
from hypercomm.layout import RankLayout
from hypercomm.layout.text import shown

_REWRITTEN = "@pytest_ar"
"""What code calls whose asserts pytest has rewritten, to show the values in them."""


@attrs.frozen
class Body:
    """A function of a module, as it travels to a rank.

    Attributes:
        module: The name of its module.
        file: Where that is.
        qualname: Its name in there, through classes.
        inner: Whether it is what hypothesis has wrapped in what is found there.
        code: Its code where pytest has rewritten its asserts, which show their values then.
    """

    module: str
    file: str | None
    qualname: str
    inner: bool
    code: bytes | None

    def load(self) -> Callable[..., Any]:
        """Find the function, on a rank; a method is bound to an object made without arguments.

        Raises:
            LaunchError: Its module does not have it.
        """
        found: Any = _module(self.module, self.file)
        owner: Any = None
        try:
            for name in self.qualname.split("."):
                found, owner = getattr(found, name), found
            if self.inner:
                found = _inner(found)
        except AttributeError as error:
            raise LaunchError(
                f"{self.qualname} is not in {self.module} on a rank: {error}; a body is found by "
                f"its name, at the top of a module or in a class"
            ) from error
        if self.code is not None and isinstance(found, FunctionType) and not found.__closure__:
            found = _with_code(found, self.code)
        if isinstance(owner, type) and not isinstance(
            inspect.getattr_static(owner, self.qualname.rpartition(".")[2]),
            (staticmethod, classmethod),
        ):
            found = found.__get__(owner())
        loaded: Callable[..., Any] = found
        return loaded


def body_of(function: Callable[..., Any], *, inner: bool = False) -> Body:
    """Describe a function for a rank to find.

    Args:
        function: It, or the method of an object.
        inner: Whether it is found inside of what hypothesis makes of it.

    Raises:
        LaunchError: It is in no module by its name.

    Example:
        >>> body_of(shown).load() is shown
        True
    """
    plain = getattr(function, "__func__", function)
    name = getattr(plain, "__qualname__", "")
    if not name or "<" in name:
        raise LaunchError(
            f"what runs on ranks must be defined at the top of a module or in a class, got "
            f"{shown(name or function)}"
        )
    module = sys.modules.get(plain.__module__)
    file = getattr(module, "__file__", None)
    code = None
    if isinstance(plain, FunctionType) and _REWRITTEN in plain.__code__.co_names:
        code = marshal.dumps(plain.__code__)
    return Body(plain.__module__, file, name, inner, code)


def _inner(function: Any) -> Any:
    """What hypothesis has wrapped: not what `given_ranks` has put around it."""
    inner = function.hypothesis.inner_test
    return getattr(inner, "_hypercomm_body", inner)


def _module(name: str, file: str | None) -> ModuleType:
    """Import a module by its name if that is this file, else from the file itself."""
    with contextlib.suppress(ImportError):
        module = importlib.import_module(name)
        if file is None or getattr(module, "__file__", None) == file:
            return module
    spec = importlib.util.spec_from_file_location(name, file) if file else None
    if spec is None or spec.loader is None:
        raise LaunchError(f"the module {name} of a body cannot be imported on a rank")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _with_code(function: FunctionType, code: bytes) -> FunctionType:
    """Return the function with the code that pytest has made of it."""
    try:
        rewriting = importlib.import_module("_pytest.assertion.rewrite")
    except ImportError:
        return function
    names = {"@py_builtins": builtins, _REWRITTEN: rewriting}
    function.__globals__.update(names)
    made = FunctionType(
        marshal.loads(code),  # noqa: S302 - from our own parent
        function.__globals__,
        function.__name__,
        function.__defaults__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# ---- arguments ----------------------------------------------------------------------------------


@attrs.frozen
class _GridForm:
    """A grid that is built on each rank, which owns its groups there."""

    layout: RankLayout
    views: tuple[tuple[str, RankLayout, tuple[str, ...]], ...]
    options: dict[str, Any]

    def build(self) -> Any:
        from hypercomm.grid import HyperCommGrid

        grid = HyperCommGrid(self.layout, **self.options)
        for name, view, shared in self.views:
            grid.register_view(name, view.shape, view.dim_names, shared)
        return grid


def packed(arguments: Mapping[str, Any], test: str, what: str = "argument") -> dict[str, bytes]:
    """Pickle the arguments of a body, each by itself; a grid travels as its arguments and views.

    Args:
        arguments: By name.
        test: Whose they are, for the error.
        what: What an argument is called in it.

    Raises:
        LaunchError: One cannot be pickled; names it.

    Example:
        >>> sorted(packed({"batch": 3, "layout": RankLayout([2], ["tp"])}, "test_layer"))
        ['batch', 'layout']
    """
    made: dict[str, bytes] = {}
    for name, value in arguments.items():
        try:
            made[name] = pickle.dumps(_form_of(value))
        except Exception as error:
            raise LaunchError(
                f"{what} {name!r} of {test} must travel to its ranks by pickle, and cannot: "
                f"{shown(value)}: {error}; make it in the test's body, of what can"
            ) from error
    return made


def _form_of(value: Any) -> Any:
    grids = sys.modules.get("hypercomm.grid.grid")
    if grids is None or type(value) is not grids.HyperCommGrid:
        return value
    state = value._state
    if state.lender is not None:
        raise LaunchError("it has share_with=, a grid which is not on the ranks")
    views = tuple((name, view.layout, view.shared_dims) for name, view in state.views.items())
    options = attrs.asdict(state.options)
    del options["world_size"]  # the ranks have one
    return _GridForm(value.layout, views, options)


def _unpacked(name: str, argument: bytes, stack: contextlib.ExitStack) -> Any:
    try:
        value = pickle.loads(argument)  # noqa: S301 - from our own parent
    except Exception as error:
        raise LaunchError(f"argument {name!r} cannot be unpickled on a rank: {error!r}") from error
    return stack.enter_context(value.build()) if isinstance(value, _GridForm) else value


# ---- on a rank ----------------------------------------------------------------------------------


def on_rank(body: Body, arguments: Mapping[str, bytes], folder: str | None) -> None:
    """Run a body, on a rank; what it prints goes to a file of the rank's own.

    A body that wants to be skipped, or hypothesis to draw anew, tells the parent before it raises.

    Args:
        body: What to run.
        arguments: Its arguments by name, as `packed` has made them.
        folder: Where the file is; None: what is printed goes where the parent's goes.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(own_output(folder))
        values = {name: _unpacked(name, given, stack) for name, given in arguments.items()}
        function = body.load()
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings(
            "ignore", "Using `(assume|reject)` outside"
        )  # the parent hears of it
        try:
            function(**values)
        except BaseException as error:
            if (wish := _wish(error)) is not None:
                report((wish, str(error)))
            raise


def call_on_rank(
    function: Callable[..., Any], arguments: tuple[Any, ...], folder: str | None
) -> Any:
    """Call a function, on a rank, whose output goes to a file of the rank's own."""
    with own_output(folder):
        return function(*arguments)


@contextlib.contextmanager
def own_output(folder: str | None) -> Iterator[None]:
    """Let what this rank prints, also from below Python, go to a file; None: leave it alone."""
    if folder is None:
        yield
        return
    with (Path(folder) / os.environ["RANK"]).open("wb", buffering=0) as file:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(file.fileno(), number)
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(line_buffering=True)  # a rank that is killed flushes nothing
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _wish(error: BaseException) -> str | None:
    """What an exception of pytest's or hypothesis's asks for: no failure."""
    kinds = {
        "skip": ("pytest", "skip", "Exception"),
        "xfail": ("pytest", "xfail", "Exception"),
        "reject": ("hypothesis", "errors", "UnsatisfiedAssumption"),
    }
    for wish, (module, *names) in kinds.items():
        kind: Any = sys.modules.get(module)
        for name in names:
            kind = getattr(kind, name, None)
        if isinstance(kind, type) and isinstance(error, kind):
            return wish
    return None
