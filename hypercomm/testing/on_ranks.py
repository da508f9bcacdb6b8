"""Runs functions of tests on real ranks: they travel by value, with their arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import pickle
import re
import sys
import tempfile
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import attrs
import cloudpickle

from hypercomm.errors import LaunchError, RankFailedError
from hypercomm.launch import run_ranks
from hypercomm.launch.run import preloads
from hypercomm.layout import RankLayout
from hypercomm.layout.text import shown

preloads += ["pytest", __name__, "torch.distributed.tensor"]  # the last by assert_close

_OWN_FRAMES = re.compile(rf'  File "{re.escape(__file__)}", line \d+,? in .*(?:\n    .*)*(?:\n|$)')
"""The frames of this file in a traceback, between the start of a rank and the test's function."""

_OUTCOME = re.compile(
    r"^(?:[\w.]+\.)?(Skipped|XFailed|UnsatisfiedAssumption)(?:: (.*))?\Z", re.MULTILINE | re.DOTALL
)
"""The end of the traceback of a body that calls pytest.skip(), pytest.xfail() or assume(False)."""

_LONGEST_OUTPUT = 100_000
"""The most bytes shown of a rank's output, the last ones."""


class BodyFailedError(RankFailedError):
    """A test's body failed on a rank; pytest shows the traceback of the rank alone."""


def most_ranks() -> int:
    """Return the number of ranks that a test should start on this machine at most.

    Example:
        >>> most_ranks() >= 8
        True
    """
    if hasattr(os, "sched_getaffinity"):
        return max(8, 4 * len(os.sched_getaffinity(0)))
    return max(8, 4 * (os.cpu_count() or 1))


def run_test(
    test: Callable[..., Any], fixtures: Mapping[str, Any], nprocs: int, **options: Any
) -> None:
    """Run a test on real ranks; hypothesis draws in this process and runs each example there.

    Args:
        test: The test, as pytest has found it.
        fixtures: The values of its fixtures, by name.
        nprocs: The number of ranks.
        options: As for `run_body`.
    """
    __tracebackhide__ = True
    handle = getattr(test, "hypothesis", None)
    if handle is None:
        run_body(test, fixtures, nprocs, **options)
        return
    inner = handle.inner_test
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def on_ranks(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        run_body(inner, signature.bind(*args, **kwargs).arguments, nprocs, **options)

    handle.inner_test = on_ranks  # documented by hypothesis for plugins like this one
    try:
        test(**fixtures)
    finally:
        handle.inner_test = inner


def run_body(
    body: Callable[..., Any], arguments: Mapping[str, Any], nprocs: int, **options: Any
) -> None:
    """Run the body of a test on real ranks; pytest.skip(), xfail() and assume() work in it.

    Args:
        body: The function.
        arguments: Its arguments by name.
        nprocs: The number of ranks.
        options: As for `run_function`, but for `module`.

    Raises:
        BodyFailedError: A rank failed.
        LaunchError: The body or an argument cannot travel, or an option cannot work.
    """
    __tracebackhide__ = True
    call = functools.partial(body, **arguments)
    try:
        run_function(call, nprocs, module=body.__module__, **options)
    except RankFailedError as error:
        outcome = _OUTCOME.search(error.reason)
        if outcome is None:
            raise
    else:
        return
    kind, reason = outcome.groups(default="")
    if kind == "UnsatisfiedAssumption":
        import hypothesis

        hypothesis.reject()
    import pytest

    (pytest.skip if kind == "Skipped" else pytest.xfail)(reason)


def run_function(
    function: Callable[..., Any],
    nprocs: int,
    *,
    module: str,
    args: tuple[Any, ...] = (),
    output: dict[int, str] | None = None,
    **options: Any,
) -> list[Any]:
    """Run a function on real ranks and return what each returned, by rank.

    Args:
        function: The function.
        nprocs: The number of ranks.
        module: The module of the test: its functions and classes travel by value, so that ranks
            do not import it.
        args: The arguments of the function.
        output: Receives what each rank prints; None: it goes to this process's output.
        options: As for `run_ranks`.

    Raises:
        BodyFailedError: A rank failed.
        LaunchError: The function or an argument cannot travel, or an option cannot work.
    """
    __tracebackhide__ = True
    call = _dumped(functools.partial(function, *args), module)
    with tempfile.TemporaryDirectory() as folder:
        try:
            given = (call, folder if output is not None else None)
            return run_ranks(_call, nprocs, args=given, **options)
        except RankFailedError as error:
            reason = _OWN_FRAMES.sub("", error.reason).rstrip()
            raise BodyFailedError(error.rank, reason) from None
        finally:
            if output is not None:
                output.clear()
                for path in Path(folder).iterdir():
                    text = path.read_bytes()[-_LONGEST_OUTPUT:].decode(errors="replace")
                    output.update({int(path.name): text} if text else {})


# ---- how a function travels ---------------------------------------------------------------------


def _dumped(call: functools.partial[Any], module: str) -> bytes:
    found = sys.modules.get(module)
    with contextlib.ExitStack() as stack:
        if found is not None and module not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(found)
            stack.callback(cloudpickle.unregister_pickle_by_value, found)
        try:
            return _pickled(call)
        except Exception as error:
            name = getattr(call.func, "__qualname__", shown(call.func))
            for argument, value in (*enumerate(call.args), *call.keywords.items()):
                try:
                    _pickled(value)
                except Exception as inner:
                    raise LaunchError(
                        f"argument {argument!r} of {name} cannot be pickled for its ranks: "
                        f"{shown(value)}: {inner}; make it in the function"
                    ) from inner
            raise LaunchError(
                f"{name} cannot be pickled for its ranks: {error}; it uses a global variable or a "
                f"variable around it that cannot: make that in the function"
            ) from error


def _pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a grid as its arguments; tests of hypothesis and unittest cases hold what cannot."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and getattr(obj, "is_hypothesis_test", False):
            return str, (obj.__qualname__,)
        if isinstance(obj, unittest.TestCase):
            return type(obj), ()
        grids = sys.modules.get("hypercomm.grid.grid")
        if grids is not None and type(obj) is grids.HyperCommGrid:
            state = obj._state
            if state.lender is not None:
                raise LaunchError("it has share_with=, a grid which is not on the ranks")
            options = attrs.asdict(state.options)
            del options["world_size"]  # the ranks have one
            views = [(name, view.layout, view.shared_dims) for name, view in state.views.items()]
            return _make_grid, (obj.layout, options, views)
        return super().reducer_override(obj)


def _make_grid(
    layout: RankLayout,
    options: dict[str, Any],
    views: list[tuple[str, RankLayout, tuple[str, ...]]],
) -> Any:
    from hypercomm.grid import HyperCommGrid

    grid = HyperCommGrid(layout, **options)
    for name, view, shared in views:
        grid.register_view(name, view.shape, view.dim_names, shared)
    return grid


# ---- on a rank ----------------------------------------------------------------------------------


def _call(dumped: bytes, folder: str | None) -> Any:
    """Call a function that has travelled; grids among its arguments are destroyed afterwards."""
    warnings.filterwarnings("ignore", "Using `(assume|reject)` outside")  # the parent rejects
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.enter_context(_own_output(Path(folder) / os.environ["RANK"]))
        call = pickle.loads(dumped)  # noqa: S301 - from our own parent
        grids = sys.modules.get("hypercomm.grid.grid")
        for value in (*call.args, *call.keywords.values()):
            if grids is not None and isinstance(value, grids.HyperCommGrid):
                stack.enter_context(value)
        return call()


@contextlib.contextmanager
def _own_output(path: Path) -> Iterator[None]:
    """Write the output of this rank to a file, also output from below Python."""
    with path.open("wb", buffering=0) as file:
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
