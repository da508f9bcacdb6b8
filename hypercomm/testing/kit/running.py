"""Bodies on real ranks, seen from the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import attrs

from hypercomm.errors import LaunchError, RankFailedError
from hypercomm.launch import run
from hypercomm.launch.local_rank import pickled
from hypercomm.testing.kit import bodies
from hypercomm.testing.kit.bodies import Body, on_rank

run.preloads += ["pytest", "hypercomm.testing.kit.bodies", "torch.distributed.tensor"]

_OWN_FRAMES = re.compile(
    rf'  File "{re.escape(str(Path(bodies.__file__)))}", line \d+,? in .*(?:\n    .*)*(?:\n|$)'
)
"""Frames of ours in a traceback: those between a rank's start and the body."""

_NAME = re.compile(r"rank \d+")

_LONGEST_OUTPUT = 100_000
"""Bytes of what a rank has printed that are shown, the last ones."""


class RanksFailedError(RankFailedError):
    """A body failed on a rank.

    Attributes:
        nprocs: The number of ranks.
        rank: The first rank that failed.
        reason: Its traceback from the body on, or what ended it.
    """

    def __init__(self, rank: int, reason: str, nprocs: int) -> None:
        super().__init__(rank, reason)
        self.args = (f"rank {rank} of {nprocs} failed: {reason}",)
        self.nprocs = nprocs

    def __reduce__(self) -> tuple[type[RanksFailedError], tuple[int, str, int]]:  # type: ignore[override]
        return type(self), (self.rank, self.reason, self.nprocs)


class WishError(Exception):
    """A body wants to be skipped, or to be given other arguments: no failure.

    Attributes:
        wish: "skip", "xfail" or "reject".
        reason: Why.
    """

    def __init__(self, wish: str, reason: str) -> None:
        super().__init__(reason)
        self.wish, self.reason = wish, reason


def cores() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def most_ranks() -> int:
    """Return how many ranks this machine should start unless somebody asks for more.

    Example:
        >>> most_ranks() >= 8
        True
    """
    return max(8, 4 * cores())


@attrs.define
class Output:
    """What ranks have printed, by rank; of several runs, the last one's."""

    printed: dict[int, str] = attrs.field(factory=dict)

    def read(self, folder: str, nprocs: int) -> None:
        """Take in the files of a folder."""
        self.printed.clear()
        for rank in range(nprocs):
            with suppress(FileNotFoundError):
                with (Path(folder) / str(rank)).open("rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_OUTPUT))
                    data = file.read()
                if data:
                    self.printed[rank] = data.decode(errors="replace")


def run_body(
    body: Body,
    arguments: Mapping[str, bytes],
    nprocs: int,
    *,
    timeout: float,
    backend: str = "gloo",
    output: Output | None = None,
) -> None:
    """Run a body on real ranks.

    Args:
        body: What to run.
        arguments: Its arguments, as `packed` has made them.
        nprocs: The number of ranks.
        timeout: Seconds until ranks that have not returned are ended.
        backend: As for `run_ranks`.
        output: Takes what ranks print; None: it goes where this process's goes.

    Raises:
        RanksFailedError: A rank failed.
        WishError: One wants no failure.
        LaunchError: An argument cannot work.
    """
    __tracebackhide__ = True
    wishes: dict[int, tuple[str, str]] = {}

    def take(rank: int, message: tuple[str, str]) -> None:
        wishes.setdefault(rank, message)

    with tempfile.TemporaryDirectory() as folder:
        try:
            run.run_ranks(
                on_rank,
                nprocs,
                args=(body, dict(arguments), None if output is None else folder),
                backend=backend,
                timeout=timeout,
                on_message=take,
            )
        except RankFailedError as error:
            if error.rank in wishes:
                raise WishError(*wishes[error.rank]) from None
            raise RanksFailedError(error.rank, without_own(error.reason), nprocs) from None
        finally:
            if output is not None:
                output.read(folder, nprocs)


def run_function(
    function: Callable[..., Any],
    nprocs: int,
    *,
    args: Sequence[Any] = (),
    output: Output | None,
    **options: Any,
) -> list[Any]:
    """Do as `run_ranks`, and take what each rank prints."""
    __tracebackhide__ = True
    run.check_call(function, args)
    pickled(function, "function")  # named, where it cannot be
    with tempfile.TemporaryDirectory() as folder:
        try:
            given = (function, tuple(args), None if output is None else folder)
            return run.run_ranks(bodies.call_on_rank, nprocs, args=given, **options)
        except RankFailedError as error:
            raise RanksFailedError(error.rank, without_own(error.reason), nprocs) from None
        finally:
            if output is not None and isinstance(nprocs, int):
                output.read(folder, nprocs)


def without_own(traceback: str) -> str:
    """Leave the frames of the test kit out of a rank's traceback."""
    return _OWN_FRAMES.sub("", traceback).rstrip()


def living_ranks() -> dict[int, str]:
    """Return the ranks of this process's `run_ranks` calls that live: their names by pid."""
    return {
        child.pid: child.name
        for child in multiprocessing.active_children()
        if child.pid is not None
        and isinstance(child, ForkServerProcess)
        and _NAME.fullmatch(child.name)
    }


def end(pids: Iterable[int]) -> None:
    """End local ranks, and what they have started."""
    for pid in pids:
        for kill in (os.killpg, os.kill):  # a rank leads a group of its own
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)


def check_size(nprocs: int, most: int, what: str, instead: str) -> None:
    """Refuse more ranks than a machine should start.

    Raises:
        LaunchError: With both numbers.

    Example:
        >>> check_size(512, 8, "an example", "draw smaller ones")
        Traceback (most recent call last):
        hypercomm.errors.LaunchError: an example has 512 ranks, more than 8; draw smaller ones
    """
    if nprocs > most:
        raise LaunchError(f"{what} has {nprocs} ranks, more than {most}; {instead}")


def grant(wished: WishError) -> None:
    """Do here what a body has wished for on its rank."""
    __tracebackhide__ = True
    if wished.wish == "reject":
        import hypothesis

        hypothesis.reject()
    import pytest

    (pytest.skip if wished.wish == "skip" else pytest.xfail)(wished.reason)
