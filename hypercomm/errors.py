"""The exceptions of hypercomm, grouped by remedy. Unknown arguments raise Python's TypeError.

Each class also derives from the builtin that legacy code catches (Megatron's callers catch
`KeyError`, `ValueError` and `RuntimeError`), so ported code needs no new `except` clause.
"""

from __future__ import annotations

import time
from datetime import timedelta


class HyperCommError(Exception):
    """The base class of all errors of this library: catch it to catch any of them."""

    # KeyError prints the repr of its message; ours are sentences.
    __str__ = Exception.__str__


class LayoutError(HyperCommError, ValueError):
    """A size, rank, machine, text or file in a call is invalid: correct the call."""


class UnknownDimError(LayoutError, KeyError):
    """A dim, a view or a grid of a set does not exist: use a name that the message lists."""


class RankOutsideError(LayoutError):
    """A rank is not in the layout, the groups or the grid: use a rank that is in it."""


class WorldSizeError(HyperCommError, RuntimeError, ValueError):
    """The grid and the world have different sizes: change the sizes or the launch."""


class NotInitializedError(HyperCommError, RuntimeError, ValueError):
    """torch.distributed is needed, but is not initialised: initialise it first."""


class GroupExistsError(HyperCommError, KeyError):
    """A process group for this key already exists: look it up instead of creating it."""


class GroupMissingError(HyperCommError, KeyError):
    """No process group exists for this key: create it first."""


class GroupOptionsError(HyperCommError, ValueError):
    """A group option is unknown, unavailable or ignored by torch: change or omit the option."""


class CreationError(HyperCommError, RuntimeError):
    """Process groups could not be created, or ranks did not agree: see the message for the cause.

    Attributes:
        data: The data that the failed rank published for the other ranks.
        group: The group that `connect()` could not connect, and that is now broken, or "".
    """

    data: str = ""
    group: str = ""


class PlanMismatchError(CreationError):
    """Ranks make different calls or have different grids: make the same call on all ranks."""


class GroupCreationTimeout(CreationError, TimeoutError):  # noqa: N818 - as torch's own
    """Ranks did not join a call in time: find the cause, and repeat the call on all ranks.

    Attributes:
        missing: The ranks that caused the timeout.
        absent: All ranks that did not join: the ranks in `missing`, and ranks that wait for the
            missing ranks in another call.
        waited: How long this rank waited.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[int, ...] = (),
        absent: tuple[int, ...] | None = None,
        waited: timedelta = timedelta(0),
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.absent = missing if absent is None else absent
        self.waited = waited


class LateRankError(CreationError):
    """The other ranks timed out before this rank arrived: repeat the call on all ranks."""


class WorldRestartedError(CreationError):
    """A rank has rejoined the world: call `world.rejoin()` on every other rank."""


class OutcomeUnknownError(CreationError):
    """The job's store was lost before the outcome of a call was known: restart the job."""


class StateTransferError(HyperCommError, RuntimeError):
    """Some parameters of a model did not arrive: continue from the bucket that the error names.

    Attributes:
        bucket: The first bucket that did not arrive. All earlier buckets arrived.
    """

    def __init__(self, message: str, *, bucket: int = 0) -> None:
        super().__init__(message)
        self.bucket = bucket


class GridDestroyedError(HyperCommError, RuntimeError):
    """The grid was destroyed, or was made before a fork of the process: build a new one."""


class StateError(HyperCommError, AssertionError):
    """Legacy state is missing, is initialised twice or too late: initialise it once, before use."""


class ConfigurationError(HyperCommError, RuntimeError, AssertionError, ValueError):
    """A legacy configuration is contradictory, or names something that is missing: correct it.

    In such a case, Megatron raises RuntimeError, AssertionError or ValueError.
    """


class UnknownFieldError(HyperCommError, AttributeError, ValueError):
    """A process group collection has no such field: use a field that the message lists."""


class MissingPackageError(HyperCommError, ImportError):
    """A package that a call needs is not installed, or is too old: install or upgrade it."""


class LaunchError(HyperCommError, RuntimeError, ValueError):
    """A job cannot be started or joined: correct the call or the launch, or start all ranks."""


class ToolError(HyperCommError, ValueError, RuntimeError):
    """A tool cannot watch a job or read a file: correct the argument, or name another file."""


class SimulationError(HyperCommError, RuntimeError, AssertionError):
    """Simulated ranks would hang or differ, or cannot communicate: change their calls."""


class RankFailedError(HyperCommError, RuntimeError):
    """A local rank raised an error, died or did not finish: see its traceback or its stack.

    Attributes:
        rank: The first rank that failed.
        reason: The traceback of that rank as text, or the reason why the rank ended.
        summary: The class and the first line of the error that the rank raised, or "". The message
            begins with it, and the traceback follows.
        others: The errors of other ranks, and what the remaining ranks did, as text.
    """

    def __init__(self, rank: int, reason: str, summary: str = "", others: str = "") -> None:
        text = "\n".join(filter(None, [summary, reason, others]))
        super().__init__(f"rank {rank} failed: {text}")
        self.rank = rank
        self.reason = reason
        self.summary = summary
        self.others = others

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[int, str, str, str]]:
        return type(self), (self.rank, self.reason, self.summary, self.others)


def time_of(error: BaseException) -> float:
    """Return the time of an error by `time.monotonic`, which is the time of the first call.

    A program that has work to do after an error calls this before that work.
    """
    found: float = vars(error).setdefault("hypercomm_time", time.monotonic())
    return found


__all__ = sorted(  # noqa: PLE0605 - the classes of this module
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, HyperCommError)
)
