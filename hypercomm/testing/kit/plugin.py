"""The pytest plugin: the marker `ranks`, its options, and fixtures.

    @pytest.mark.ranks(2, 4)
    def test_sum(ranks):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == ranks

runs on 2 real ranks, and on 4. Every pytest of an environment with hypercomm loads this file, so it
imports nothing but pytest; its neighbours do the work, when a test asks for it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hypercomm.testing.kit.bound import Bound
    from hypercomm.testing.kit.running import Output

_TIMEOUT_S = 60.0
_MOST_RANKS = 4096
_KEYWORDS = ("timeout", "backend")
_RUNNING = "hypercomm.testing.kit.running"
_MARKER = (
    "ranks(*sizes, timeout=60, backend='gloo'): run the test's body on so many real ranks, once "
    "for each size. Its fixtures are made in pytest's process, and travel to the ranks by pickle."
)
_BEFORE = pytest.StashKey[frozenset[int]]()
_BOUND = pytest.StashKey["Bound"]()
_BOUNDS = "hypercomm.testing.kit.bound"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what bounds the ranks."""
    group = parser.getgroup("hypercomm", "tests on real ranks")
    group.addoption(
        "--ranks-max",
        type=int,
        metavar="N",
        help="skip tests marked ranks(...) at sizes above N, and leave out such examples of "
        "given_ranks; default: 4 for each processor, and at least 8",
    )
    group.addoption(
        "--ranks-timeout",
        type=float,
        metavar="SECONDS",
        default=_TIMEOUT_S,
        help="after how long ranks that have not returned are ended, and say where they hang; "
        "default: %(default)s",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and refuse options that cannot be."""
    config.addinivalue_line("markers", _MARKER)
    most, seconds = config.getoption("--ranks-max"), config.getoption("--ranks-timeout")
    if most is not None and not 1 <= most <= _MOST_RANKS:
        raise pytest.UsageError(f"--ranks-max must be in 1..{_MOST_RANKS}, got {most}")
    if not seconds > 0:
        raise pytest.UsageError(f"--ranks-timeout must be larger than 0, got {seconds:g}")


# ---- the marker ---------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each size; those that are too large are skipped, with the reason."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    sizes = _sizes(marker, metafunc.function.__name__)
    if "ranks" not in metafunc.fixturenames:
        metafunc.fixturenames.append("ranks")
    limit = _most(metafunc.config)
    metafunc.parametrize(
        "ranks",
        [
            pytest.param(size, marks=[pytest.mark.skip(_too_many(size, metafunc.config))])
            if size > limit
            else size
            for size in sizes
        ],
        ids=[f"ranks={size}" for size in sizes],
        indirect=True,
        scope="function",  # else tests would be sorted by size
    )


def _sizes(marker: pytest.Mark, test: str) -> tuple[int, ...]:
    """Check a marker."""
    sizes: tuple[Any, ...] = marker.args
    example = "as in @pytest.mark.ranks(2, 4)"
    wrong = ""
    unknown = [name for name in marker.kwargs if name not in _KEYWORDS]
    bad = [size for size in sizes if isinstance(size, bool) or not isinstance(size, int)]
    seconds = marker.kwargs.get("timeout", 1)
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if unknown:
        wrong = f"it has no {unknown[0]}=; it takes sizes, {' and '.join(_KEYWORDS)}"
    elif not sizes:
        wrong = f"it names no size; give one at least, {example}"
    elif bad:
        wrong = f"a size must be an int, got {bad[0]!r}, {example}"
    elif not all(1 <= size <= _MOST_RANKS for size in sizes):
        wrong = f"sizes must be in 1..{_MOST_RANKS}, got {sizes}"
    elif len(set(sizes)) < len(sizes):
        wrong = f"it names a size twice: {sizes}"
    elif not is_number or not seconds > 0:
        wrong = f"timeout must be a number of seconds larger than 0, got {seconds!r}"
    if wrong:
        pytest.fail(f"the marker ranks of {test} cannot work: {wrong}", pytrace=False)
    return sizes


def _most(config: pytest.Config) -> int:
    asked: int | None = config.getoption("--ranks-max")
    if asked is not None:
        return asked
    from hypercomm.testing.kit import running

    return running.most_ranks()


def _too_many(size: int, config: pytest.Config) -> str:
    limit = _most(config)
    if config.getoption("--ranks-max") is not None:
        return f"{size} ranks are more than --ranks-max={limit}"
    from hypercomm.layout.text import counted
    from hypercomm.testing.kit import running

    processors = counted(running.cores(), "processor")
    return (
        f"{size} ranks are more than the {limit} that this machine with {processors} should "
        f"start; --ranks-max={size} starts them"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a marked test on ranks."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    __tracebackhide__ = True
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        pytest.fail(
            f"{pyfuncitem.name} is async, and ranks have no event loop: call asyncio.run() in a "
            f"body that is not",
            pytrace=False,
        )
    from hypercomm.errors import LaunchError
    from hypercomm.testing.kit.marked import call

    params: Any = pyfuncitem.callspec.params
    timeout = marker.kwargs.get("timeout", pyfuncitem.config.getoption("--ranks-timeout"))
    try:
        with _shown(pyfuncitem) as output:
            call(
                pyfuncitem.obj,
                {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames},
                params["ranks"],
                timeout=timeout,
                backend=marker.kwargs.get("backend", "gloo"),
                output=output,
            )
    except LaunchError as error:
        wrong = str(error)
    else:
        return True
    pytest.fail(wrong, pytrace=False)


_NO_FUNCTION = (
    "{} is marked ranks, and is no function of pytest's, which alone can be run once for each "
    "size: make a method of unittest.TestCase one of another class"
)


@contextlib.contextmanager
def _shown(item: pytest.Item) -> Iterator[Output | None]:
    """Have what ranks print in the report of a test; with `-s` it goes to the terminal."""
    from hypercomm.testing.kit.running import Output

    if item.config.getoption("capture") == "no":
        yield None
        return
    output = Output()
    try:
        yield output
    finally:
        for rank, text in sorted(output.printed.items()):
            item.add_report_section("call", f"output of rank {rank}", text)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],
) -> Generator[None, Any, None]:
    """Show a rank's traceback, without that of the process which waited for it."""
    outcome = yield
    report = outcome.get_result()
    bound = item.stash.get(_BOUND, None)
    if bound is not None and call.when == "call" and bound.left_out:
        _tell_left_out(item, bound, report, passed=call.excinfo is None)
    running = sys.modules.get(_RUNNING)
    error = None if call.excinfo is None else call.excinfo.value
    if running is None or not isinstance(error, running.RanksFailedError):
        return
    if report.failed:
        notes = "\n".join(getattr(error, "__notes__", ()))  # what hypothesis has to say
        drawn, _, _ = notes.partition("\nExplanation:")  # of lines that ran here, none of a body
        report.longrepr = f"{error}\n{drawn}".rstrip()


def _tell_left_out(
    item: pytest.Item, bound: Bound, report: pytest.TestReport, *, passed: bool
) -> None:
    """Say which examples of `given_ranks` did not start; without any other, the test is skipped."""
    if bound.ran or not passed:
        report.sections.append(("given_ranks", bound.told()))
        return
    reason = f"{_too_many(min(bound.left_out), item.config)}, and no example had fewer"
    report.outcome = "skipped"
    vars(report).pop("wasxfail", None)  # what did not run has not passed, unexpectedly or not
    where: Any = (str(item.path), None, f"Skipped: {reason}")  # a line would be one of ours
    report.longrepr = where


# ---- ranks that are left behind -----------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Refuse what the marker cannot be for, and remember the ranks that fixtures have started.

    Before that, bound the examples of `given_ranks`.
    """
    limit = item.config.getoption("--ranks-max")
    if limit is not None:
        from hypercomm.testing.kit.bound import Bound, current

        item.stash[_BOUND] = Bound(limit)
        current.set(item.stash[_BOUND])
    elif _BOUNDS in sys.modules:  # that of a pytest which ran within this one
        sys.modules[_BOUNDS].current.set(None)
    sizes = getattr(getattr(item, "callspec", None), "params", {})
    if "ranks" not in sizes and item.get_closest_marker("ranks") is not None:
        pytest.fail(_NO_FUNCTION.format(item.name), pytrace=False)
    item.stash[_BEFORE] = frozenset(_living())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End ranks that a test's body has started and left behind, and say which they were."""
    before = item.stash.get(_BEFORE, None)
    if before is None or not (left := {p: n for p, n in _living().items() if p not in before}):
        return
    from hypercomm.testing.kit import running

    running.end(left)
    names = sorted(left.items(), key=lambda one: (len(one[1]), one[1]))
    told = ", ".join(f"{name} (pid {pid})" for pid, name in names)
    pytest.fail(
        f"{item.name} left ranks behind, which were ended: {told}; wait for whatever runs them, "
        f"such as the thread that called run_ranks()",
        pytrace=False,
    )


def _living() -> dict[int, str]:
    if "hypercomm.launch.run" not in sys.modules:  # which starts them
        return {}
    from hypercomm.testing.kit import running

    return running.living_ranks()


# ---- fixtures -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")  # hypothesis wants no other in its tests
def ranks(request: pytest.FixtureRequest) -> int:
    """The number of ranks of a test marked `@pytest.mark.ranks(2, 4)`."""
    size: int | None = getattr(request, "param", None)
    if size is None:
        pytest.fail(
            "the fixture 'ranks' is the number of ranks of a test that is marked, as in "
            "@pytest.mark.ranks(2, 4), and this one is not: mark it, or take the fixture "
            "'run_ranks' to start ranks in the test",
            pytrace=False,
        )
    return size


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`hypercomm.run_ranks` within `--ranks-max`, with each rank's output in the report."""

    def run(function: Callable[..., Any], nprocs: int, **options: Any) -> list[Any]:
        __tracebackhide__ = True
        from hypercomm.testing.kit.running import run_function

        config = request.config
        if isinstance(nprocs, int) and nprocs > _most(config):
            pytest.skip(_too_many(nprocs, config))
        options = {"timeout": config.getoption("--ranks-timeout"), **options}
        with _shown(request.node) as output:
            return run_function(function, nprocs, output=output, **options)

    return run


@pytest.fixture
def fake_world() -> Iterator[Callable[..., contextlib.ExitStack]]:
    """`hypercomm.testing.fake_world`, left at the end of the test, or of a `with` block.

    `fake_world(4096, rank=7)` makes this process one rank of a large job; another call makes it
    one of another job.
    """
    with contextlib.ExitStack() as stack:

        def enter(world_size: int, rank: int = 0, **options: Any) -> contextlib.ExitStack:
            from hypercomm.testing import fake_world as world

            stack.close()
            stack.enter_context(world(world_size, rank, **options))
            return stack

        yield enter
