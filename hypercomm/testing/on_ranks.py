"""Runs the bodies of tests on real ranks. Each body and its arguments are sent as pickles."""

from __future__ import annotations

import contextlib
import functools
import inspect
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
import hypothesis
import pytest
from hypothesis.strategies import SearchStrategy

from hypercomm.errors import LaunchError, RankFailedError
from hypercomm.launch import run_ranks
from hypercomm.launch.run import dumps, most_ranks, preloads
from hypercomm.layout import RankLayout
from hypercomm.layout.text import short_repr
from hypercomm.testing import ranks_bound
from hypercomm.transfers.mapping import RankMapping

preloads += ["hypothesis.strategies", __name__, "torch.distributed.tensor"]  # for assert_close

# Matches the end of the traceback if a body calls pytest.skip(), pytest.xfail() or assume(False).
_OUTCOME = re.compile(
    r"^(?:[\w.]+\.)?(Skipped|XFailed|UnsatisfiedAssumption)(?:: (.*))?\Z", re.MULTILINE | re.DOTALL
)

# The report shows at most this number of bytes, from the end of the output of a rank.
_LONGEST_OUTPUT = 100_000


class BodyFailedError(RankFailedError):
    """The body of a test failed on a rank. pytest shows only the traceback of the rank."""


def given_ranks(
    *strategies: SearchStrategy[Any],
    ranks: int | None = None,
    max_ranks: int | None = None,
    max_examples: int = 20,
    timeout: float = 60.0,
    **named: SearchStrategy[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a hypothesis test whose body runs on real ranks, in a new job for each example.

    Hypothesis draws and shrinks in this process. For each example, the body runs on every rank of
    a new job with the same arguments. The job has as many ranks as the layouts among the arguments
    need. `layouts()`, `grids()` and `mappings()` draw such arguments. If an argument is a
    grid, each rank builds it before the body and destroys it afterwards. The test fails with the
    traceback of the first rank that fails, or with the stacks of ranks that hang. The test has no
    deadline and does not accept `@settings`.

    The body may be a closure or a method. It is sent to the ranks with its arguments by
    cloudpickle. It may call `assume`, but cannot draw with `data()`. A script must call such a test
    under `if __name__ == "__main__":`.

    Args:
        strategies: Strategies for the last arguments of the body, as `hypothesis.given` takes them.
        ranks: The number of ranks. Default: as many as the layouts of an example need.
        max_ranks: The largest number of ranks of an example. A larger example fails the test.
            Default: pytest's `--max-ranks` if it is given, and otherwise 4 for each processor, but
            at least 8. With `--max-ranks`, larger examples are skipped. If all examples are larger,
            the test is skipped.
        max_examples: The number of examples.
        timeout: The limit for one example, in seconds.
        named: Strategies by the name of the argument, in place of `strategies`.

    Returns:
        A decorator for the body.

    Raises:
        LaunchError: When the test runs, if an example needs too many ranks or cannot be pickled.
        RankFailedError: When the test runs, if a rank fails.

    Example:
        >>> from hypothesis import strategies as st
        >>> from hypercomm.testing import grids
        >>> @given_ranks(grids(max_ranks=4), st.integers(1, 9), max_examples=5)
        ... def test_mean(grid, number):
        ...     assert grid[grid.dim_names].mean(number) == number
    """

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__qualname__
        signature = inspect.signature(function)

        @functools.wraps(function)
        def on_ranks(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            drawn = signature.bind(*args, **kwargs).arguments
            needed = _ranks_of(drawn, name) if ranks is None else ranks
            option = ranks_bound.most
            if option is not None and needed > option:
                ranks_bound.left_out = min(needed, ranks_bound.left_out or needed)
                hypothesis.event(f"skipped: more than --max-ranks={option} ranks")
                hypothesis.reject()
            most = max_ranks or option or most_ranks()
            if needed > most:
                raise LaunchError(
                    f"an example of {name} has {needed} ranks, more than {most}; draw smaller "
                    f"examples, as in layouts(max_ranks={most}, max_offset=0), or pass "
                    f"max_ranks={needed}"
                )
            run_body(function, drawn, needed, timeout=timeout)

        test = hypothesis.given(*strategies, **named)(on_ranks)
        made: Callable[..., None] = hypothesis.settings(
            max_examples=max_examples,
            deadline=None,
            # Phase.explain traces lines in this process, where the body does not run.
            phases=[phase for phase in hypothesis.Phase if phase != hypothesis.Phase.explain],
            suppress_health_check=list(hypothesis.HealthCheck),
        )(test)
        return made

    return decorated


def _ranks_of(drawn: Mapping[str, Any], test: str) -> int:
    """Return how many ranks, counted from rank 0, the layouts among the arguments need."""
    layouts: list[RankLayout] = []
    for value in drawn.values():
        ends = (value.source, value.target) if isinstance(value, RankMapping) else (value,)
        found = [getattr(end, "layout", end) for end in ends]
        layouts += [each for each in found if isinstance(each, RankLayout)]
    if not layouts:
        raise LaunchError(
            f"no argument of {test} ({', '.join(drawn)}) determines the number of ranks; draw a "
            f"layout, as in layouts(max_ranks=4, max_offset=0), or pass ranks="
        )
    return max(max(layout.ranks) for layout in layouts) + 1


def run_body(
    body: Callable[..., Any], arguments: Mapping[str, Any], nprocs: int, **options: Any
) -> None:
    """Run the body of a test on real ranks. The body may call pytest.skip(), xfail() and assume().

    Args:
        body: The function.
        arguments: The arguments of the function, by name.
        nprocs: The number of ranks.
        options: Options of `run_function` except `module`.

    Raises:
        BodyFailedError: A rank failed.
        LaunchError: The body or an argument cannot be pickled, or an option is wrong.
    """
    __tracebackhide__ = True
    try:
        run_function(body, nprocs, arguments, module=body.__module__, **options)
    except RankFailedError as error:
        outcome = _OUTCOME.search(error.reason)
        if outcome is None:
            raise
    else:
        return
    kind, reason = outcome.groups(default="")
    if kind == "UnsatisfiedAssumption":
        hypothesis.reject()
    (pytest.skip if kind == "Skipped" else pytest.xfail)(reason)


def run_function(
    function: Callable[..., Any],
    nprocs: int,
    arguments: Mapping[str, Any] | None = None,
    *,
    module: str,
    output: dict[int, str] | None = None,
    **options: Any,
) -> list[Any]:
    """Run a function on real ranks, and return their return values in rank order.

    Args:
        function: The function.
        nprocs: The number of ranks.
        arguments: The arguments of the function, by name.
        module: The module of the test. Its functions and classes are pickled by value, so ranks do
            not import the module.
        output: A dict that receives the output of each rank. Default: ranks write to the output of
            this process.
        options: Further arguments of `run_ranks`.

    Raises:
        BodyFailedError: A rank failed.
        LaunchError: The function or an argument cannot be pickled, or an option is wrong.
    """
    __tracebackhide__ = True
    call = _pickled(function, arguments or {}, module)
    with tempfile.TemporaryDirectory() as folder:
        try:
            given = (*call, folder if output is not None else None)
            return run_ranks(_call, nprocs, args=given, max_ranks=nprocs, **options)
        except RankFailedError as error:
            raise BodyFailedError(*error.__reduce__()[1]) from None
        finally:
            if output is not None:
                output.clear()
                for path in Path(folder).iterdir():
                    text = path.read_bytes()[-_LONGEST_OUTPUT:].decode(errors="replace")
                    if text:
                        output[int(path.name)] = text


# ---- pickles ------------------------------------------------------------------------------------


def _pickled(
    function: Callable[..., Any], arguments: Mapping[str, Any], module: str
) -> tuple[bytes, dict[str, bytes]]:
    """Pickle a function and its arguments.

    Classes and functions of the module are pickled by value.
    """
    found = sys.modules.get(module)
    with contextlib.ExitStack() as stack:
        if found is not None and module not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(found)
            stack.callback(cloudpickle.unregister_pickle_by_value, found)
        name = getattr(function, "__qualname__", short_repr(function))
        values = {f"argument {argument!r} of {name}": arguments[argument] for argument in arguments}
        pickles = []
        for what, value in {name: function, **values}.items():
            try:
                pickles.append(dumps(value, _Pickler))
            except Exception as error:
                raise LaunchError(
                    f"{what} cannot be pickled for its ranks: {short_repr(value)}: {error}; create "
                    f"such objects in the function"
                ) from error
        return pickles[0], dict(zip(arguments, pickles[1:], strict=True))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a grid as the arguments that create it.

    The contents of hypothesis tests and of unittest cases are omitted.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and getattr(obj, "is_hypothesis_test", False):
            return str, (obj.__qualname__,)
        if isinstance(obj, unittest.TestCase):
            return type(obj), ()
        grids = sys.modules.get("hypercomm.grid.grid")
        if grids is not None and type(obj) is grids.HyperCommGrid:
            state = sys.modules["hypercomm.grid.view"].state_of(obj)
            if state.lender is not None:
                raise LaunchError(
                    "a grid of a GridSet cannot be sent to ranks, because it may use groups of the "
                    "other grids; make the set on the ranks"
                )
            options = attrs.asdict(state.options)
            views = []
            for name, view in state.table.views.items():
                views.append((name, view.layout, view.shared_dims))
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


def _call(function: bytes, arguments: dict[str, bytes], folder: str | None) -> Any:
    """Call a pickled function, and destroy the grids among its arguments afterwards."""
    # hypothesis runs only in the parent process, which handles assume() and reject().
    warnings.filterwarnings("ignore", "Using `(assume|reject)` outside")
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.enter_context(_own_output(Path(folder) / os.environ["RANK"]))
        values = {name: pickle.loads(own) for name, own in arguments.items()}  # noqa: S301
        grids = sys.modules.get("hypercomm.grid.grid")
        for value in values.values():
            if grids is not None and isinstance(value, grids.HyperCommGrid):
                stack.enter_context(value)
        return pickle.loads(function)(**values)  # noqa: S301 - from our own parent


@contextlib.contextmanager
def _own_output(path: Path) -> Iterator[None]:
    """Write the output of this rank to a file, including output of C and C++ code."""
    with path.open("wb", buffering=0) as file:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(file.fileno(), number)
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(line_buffering=True)  # a killed rank does not flush its buffers
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
