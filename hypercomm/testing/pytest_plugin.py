"""The pytest plugin with the marker `ranks`, its options, and fixtures.

The following test runs on 2 real ranks, and then on 4 real ranks:

    @pytest.mark.ranks(2, 4)
    def test_sum(ranks):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == ranks

Every pytest run in an environment with hypercomm loads this file, so the file imports only pytest.
It imports `on_ranks` when a test needs ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import pytest

from hypercomm.testing import ranks_bound


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("hypercomm", "tests on real ranks")
    group.addoption(
        "--max-ranks",
        type=int,
        help="skip tests marked ranks(...) and examples of given_ranks with more ranks than this; "
        "default: 4 for each processor, and at least 8",
    )
    group.addoption(
        "--ranks-timeout",
        type=float,
        default=60.0,
        help="end ranks that have not returned after this number of seconds, and show where they "
        "hang; default: %(default)s",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, timeout=60, backend='gloo'): run the test's body on real ranks, once for "
        "each number of ranks. Fixtures are made in pytest's process and pickled for the ranks.",
    )


# ---- the marker ---------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each number of ranks, and skip the tests with too many ranks."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    sizes: tuple[Any, ...] = marker.args
    are_sizes = sizes and all(type(size) is int and size > 0 for size in sizes)
    has_others = marker.kwargs.keys() - {"timeout", "backend"}
    if not are_sizes or len(set(sizes)) < len(sizes) or has_others:
        pytest.fail(
            f"the marker ranks of {metafunc.function.__name__} accepts distinct numbers of ranks, "
            f"timeout= and backend=, as in @pytest.mark.ranks(2, 4, timeout=30); got {sizes} and "
            f"{dict(marker.kwargs)}",
            pytrace=False,
        )
    if "ranks" not in metafunc.fixturenames:
        metafunc.fixturenames.append("ranks")
    limit = _most(metafunc.config)
    skips = {size: [pytest.mark.skip(_too_many(size, limit))] for size in sizes if size > limit}
    metafunc.parametrize(
        "ranks",
        [pytest.param(size, marks=skips.get(size, [])) for size in sizes],
        ids=[f"ranks={size}" for size in sizes],
        indirect=True,
        scope="function",  # otherwise pytest would sort tests by size
    )


def _most(config: pytest.Config) -> int:
    from hypercomm.launch.run import most_ranks

    asked: int | None = config.getoption("--max-ranks")
    return asked or most_ranks()


def _too_many(size: int, limit: int) -> str:
    return f"{size} ranks are more than {limit}; pass --max-ranks={size} to run the test"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a marked test on ranks."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    __tracebackhide__ = True
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        wrong = "is async, but ranks have no event loop; call asyncio.run() in a plain function"
        pytest.fail(f"{pyfuncitem.name} {wrong}", pytrace=False)
    if hasattr(pyfuncitem.obj, "hypothesis"):
        wrong = "uses hypothesis; write @given_ranks(..., ranks=2) in place of this marker"
        pytest.fail(f"{pyfuncitem.name} {wrong}", pytrace=False)
    from hypercomm.errors import LaunchError
    from hypercomm.testing.on_ranks import run_body

    fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    options = {"timeout": pyfuncitem.config.getoption("--ranks-timeout"), **marker.kwargs}
    try:
        with _output_shown(pyfuncitem) as output:
            size: Any = pyfuncitem.callspec.params["ranks"]
            run_body(pyfuncitem.obj, fixtures, size, output=output, **options)
    except LaunchError as error:
        wrong = str(error)
    else:
        return True
    pytest.fail(wrong, pytrace=False)


@contextlib.contextmanager
def _output_shown(item: pytest.Item) -> Iterator[dict[int, str] | None]:
    """Add the output of each rank to the report of a test, or print it with `-s`."""
    output: dict[int, str] = {}
    try:
        yield None if item.config.getoption("capture") == "no" else output
    finally:
        for rank, text in sorted(output.items()):
            item.add_report_section("call", f"output of rank {rank}", text)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Apply --max-ranks to `given_ranks`. Skip a test if all examples have too many ranks."""
    ranks_bound.most = item.config.getoption("--max-ranks")
    ranks_bound.left_out = 0
    try:
        return (yield)
    except Exception as error:
        if ranks_bound.left_out and type(error).__name__ == "Unsatisfiable":
            pytest.skip(
                f"{_too_many(ranks_bound.left_out, ranks_bound.most)}; no example has fewer"
            )
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Show the traceback of a rank without the traceback of the process that waited for it."""
    report = yield
    error = None if call.excinfo is None else call.excinfo.value
    if report.failed and type(error).__name__ == "BodyFailedError":  # avoids an import
        report.longrepr = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return report


# ---- fixtures -----------------------------------------------------------------------------------


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks of a test that is marked `@pytest.mark.ranks(2, 4)`."""
    size: int | None = getattr(request, "param", None)
    if size is None:
        pytest.fail(
            "the fixture 'ranks' needs a marked test; add @pytest.mark.ranks(2, 4), or use the "
            "fixture 'run_ranks' to start ranks in the test",
            pytrace=False,
        )
    return size


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return `run_ranks` with the limit `--max-ranks`. The report shows each rank's output."""

    def run(
        function: Callable[..., Any], nprocs: int, args: Sequence[Any] = (), **options: Any
    ) -> list[Any]:
        __tracebackhide__ = True
        from hypercomm.launch.run import as_args
        from hypercomm.testing.on_ranks import run_function

        limit = _most(request.config)
        if nprocs > limit:
            pytest.skip(_too_many(nprocs, limit))
        options = {"timeout": request.config.getoption("--ranks-timeout"), **options}
        with _output_shown(request.node) as output:
            call = functools.partial(function, *as_args(args))
            module = request.module.__name__
            return run_function(call, nprocs, module=module, output=output, **options)

    return run
