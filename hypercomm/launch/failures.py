"""Failures of ranks: which one is the cause, and how an error describes all of them."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import attrs

from hypercomm.errors import GroupCreationTimeout, OutcomeUnknownError, RankFailedError, time_of
from hypercomm.layout.text import format_ranks, summary_of

_PACKAGE = f"{Path(__file__).parents[1]}/"
_LIBRARIES = (f"{Path(os.__file__).parent}/", _PACKAGE, "<frozen ")
"""The beginnings of paths of Python's and hypercomm's files. Other packages may be elsewhere."""

_CALLERS = ("hypercomm.launch.run", "hypercomm.testing.on_ranks", "hypercomm.testing.simulation")
"""Modules that call the function of a user. Tracebacks begin after their frames."""

_WAITS = ("/torch/distributed/", f"{_PACKAGE}process_groups/")
"""Parts of the paths of files whose functions wait for other ranks."""

_WRAPPERS = ("wrapper", "call")
"""Names of the functions that decorators of torch and hypercomm return."""

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*\n", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

_LOST = re.compile(
    r"/gloo/.*(onnection|imed out|imeout|roken pipe)|ncclRemoteError|Dist(Network|Store)Error"
)
"""Matches errors of gloo, NCCL and torch's store of which another rank is the cause."""


@attrs.frozen
class Failure:
    """An error of a rank, or the reason why its process ended.

    Attributes:
        rank: The rank.
        reason: The traceback, or the reason why the process ended.
        summary: The class and the first line of the error, or "".
        origin: The class of the error and where it was raised. Equal errors have equal origins.
        at: The time of the failure, by `time.monotonic`.
        is_consequence: Whether another rank is the cause, as of a lost connection or a timeout.
    """

    rank: int
    reason: str
    summary: str = ""
    origin: str = attrs.field(default=attrs.Factory(lambda self: self.reason, takes_self=True))
    at: float = attrs.field(factory=time.monotonic)
    is_consequence: bool = False


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return the failure of a rank that an error describes.

    The first error of a chain decides when the rank failed and whether another rank is the cause.
    """
    chain = [error]
    while len(chain) < 100 and (earlier := chain[-1].__cause__ or chain[-1].__context__):
        chain.append(earlier)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _CALLERS:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    at = traceback.extract_tb(trace)[-1:]
    return Failure(
        rank,
        text,
        summary_of(error),
        origin=f"{type(error)} at {[(frame.filename, frame.lineno) for frame in at]}",
        at=min(map(time_of, chain)),
        is_consequence=_is_consequence(chain[-1]),
    )


def _is_consequence(error: BaseException) -> bool:
    text = "".join(traceback.format_exception_only(type(error), error))
    kinds = (ConnectionError, GroupCreationTimeout, OutcomeUnknownError)
    return isinstance(error, kinds) or _LOST.search(text) is not None


@attrs.frozen
class Place:
    """What some ranks do. `str()` returns a line.

    Attributes:
        ranks: The ranks.
        what: A description, such as "waited in barrier at program.py:7 in step".
        stack: The frames of the first of these ranks, the innermost first.
        is_waiting: Whether the ranks wait for other ranks.
    """

    ranks: list[int]
    what: str
    stack: str
    is_waiting: bool

    def __str__(self) -> str:
        return f"{_named(self.ranks)} {self.what}"


def places_of(stacks: Mapping[int, str]) -> list[Place]:
    """Return what ranks do, from the stacks that faulthandler has written.

    Ranks that do not wait for others come first, then the places with the fewest ranks.
    """
    found: dict[str, Place] = {}
    for rank, text in stacks.items():
        what, stack, is_waiting = _place(text)
        found.setdefault(what, Place([], what, stack, is_waiting)).ranks.append(rank)
    return sorted(
        found.values(), key=lambda place: (place.is_waiting, len(place.ranks), place.ranks)
    )


def _place(text: str) -> tuple[str, str, bool]:
    """Return the description and the frames of a process, and whether it waits for others."""
    *others, main = _THREAD.split(text)
    if " in _serve" not in main:
        return "did not respond", "", False
    threads = [main, *(other for other in others if " in _listen" not in other)]
    calls = []
    for thread in threads:
        own = next((at for at in _FRAME.finditer(thread) if _is_caller(at)), None)
        frames = thread[: own.start()].rstrip() if own else thread.rstrip()
        call = _call_of(frames)
        if call is not None and (thread is main or call[1]):
            calls.append((frames, *call))
    if not calls:
        return "had not called the function", "", False
    stack = "\nin another thread\n".join(frames for frames, *_ in calls)
    is_waiting = any(waits for *_, waits in calls)
    what = next(what for _, what, _, waits in calls if waits == is_waiting)
    return what, stack, is_waiting


def _call_of(frames: str) -> tuple[str, bool, bool] | None:
    """Return the call of a user's function, whether there is one, and whether it waits."""
    found: list[tuple[str, str, str]] = _FRAME.findall(frames)
    if not found:
        return None
    users = [at for at, (path, _, _) in enumerate(found) if not _is_library(path)]
    at = users[0] if users else len(found) - 1
    inner = [name for _, _, name in found[:at] if name not in _WRAPPERS]
    path, line, name = found[at]
    waits = any(part in one for one, _, _ in found[:at] for part in _WAITS)
    place = f"{path}:{line}"
    if not inner:
        return f"ran {name} at {place}", bool(users), waits
    return (
        f"{'waited in' if waits else 'called'} {inner[-1]} at {place} in {name}",
        bool(users),
        waits,
    )


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or "-packages/" in path


def _is_caller(frame: re.Match[str]) -> bool:
    return frame[3] in ("_serve", "_call") and frame[1].startswith(_PACKAGE)


def explain(
    failures: Sequence[Failure], returned: Collection[int], places: Sequence[Place], late: str
) -> RankFailedError:
    """Return an error that shows the cause first, then other errors, then their consequences.

    Args:
        failures: The failures. An empty sequence stands for ranks that did not return in time.
        returned: The ranks that returned.
        places: What the other ranks do.
        late: The reason if ranks did not return in time.
    """
    failures = sorted(failures, key=lambda one: (one.is_consequence, one.at))
    alike: dict[str, list[Failure]] = {}
    for failure in failures:
        alike.setdefault(failure.origin, []).append(failure)
    status = [f"{_named(sorted(returned))} had returned"] if returned else []
    errors = []
    if not failures or (failures[0].is_consequence and not all(one.is_waiting for one in places)):
        rank, summary = places[0].ranks[0], ""
        late = "it had not returned when other ranks failed" if failures else late
        stacks = [f"{place}\n{place.stack}".rstrip() for place in places]
        reason = "\n".join([late, *status, *stacks])
        status = []
    else:
        first, *same = alike.pop(failures[0].origin)
        rank, summary, reason = first.rank, first.summary, first.reason
        status += map(str, places)
        if first.is_consequence:  # the other ranks are more likely to show the cause
            reason = "\n".join([*status, reason])
            status = []
        if same:
            errors = [f"{_named_of(same)} failed with the same error"]
    lost = []
    for each in alike.values():
        if each[0].is_consequence:
            lost.append(f"{_named_of(each)} failed as a consequence: {each[0].summary}")
        else:
            what = f"{each[0].summary}\n{each[0].reason}".strip()
            errors.append(f"{_named_of(each)} failed later: {what}")
    return RankFailedError(rank, reason, summary, "\n".join(errors + status + lost))


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def _named_of(failures: Sequence[Failure]) -> str:
    return _named(sorted({failure.rank for failure in failures}))
