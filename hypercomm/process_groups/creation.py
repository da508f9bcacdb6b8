"""Creating and destroying the calling rank's process group of some dims, and nothing else.

gloo connects every pair of members while a group is created, and a member may be done before its
peer is: closing the group then breaks the peer's creation ("Connection closed by peer"). So each
member says in the store that it is connected, and `destroy` first looks that all have.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from functools import partial

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    CreationError,
    GroupCreationTimeout,
    HyperCommError,
    NotInitializedError,
)
from hypercomm.layout.text import format_coords
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.cards import this_host
from hypercomm.process_groups.agreement.driver import hold
from hypercomm.process_groups.agreement.whereabouts import name_late
from hypercomm.process_groups.job import current
from hypercomm.process_groups.strategies import STRATEGIES, Attempt, OwnGroup
from hypercomm.process_groups.torch_internals.gloo import (
    FAILED_KEY,
    GAVE_UP,
    GAVE_UP_KEY,
    AttemptGivenUpError,
    MemberFailedError,
    MembersMissingError,
    address_key,
    making,
    wait_until,
)
from hypercomm.process_groups.torch_internals.store import LateError, answer

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long the destruction of groups may wait for members that are still connecting."""

BATCH_PATIENCE_S = 0.5
"""The same where a creation failed, and members may be gone."""

_POLL_S = 0.002
_LONGEST_WORD = 500

_GRACE_S = 1.0
"""After a connection failed, how long to wait for the others to say that theirs did."""

_EXPLAINING_S = _GRACE_S + 1.5
_TELLING_S = 0.5
"""How long the store may take to answer when something has failed."""

_to_tell: ContextVar[list[str] | None] = ContextVar("to tell", default=None)


@attrs.frozen(eq=False)
class CreatedGroup:
    """The result of an attempt on the calling rank: no group where it is no member."""

    group: ProcessGroup | None
    connecting: OwnGroup | None = None
    """The group whose members say in the store that they are connected, if they must be."""
    owned: bool = True
    """Whether a grid created it; the last key that has it destroys it."""


# ---- creating ------------------------------------------------------------------------------------


def create(attempt: Attempt, strategy: str) -> CreatedGroup:
    """Create the group of the calling rank, and leave torch as it was if that fails.

    Raises:
        GroupCreationTimeout: Members did not come, or did not connect.
        AttemptGivenUpError: They gave up before this rank came; try under another name, as there
            is time.
        CreationError: It failed otherwise, for a reason that is known.
    """
    before = c10d.registered()
    begin = time.monotonic()
    try:
        group = STRATEGIES[strategy].create(attempt)
        _tell_connected(attempt)
        return CreatedGroup(group, attempt.connecting)
    except BaseException as error:
        for leftover in _left_by(attempt, strategy, before):
            with contextlib.suppress(Exception):  # the error at hand tells more
                c10d.destroy(leftover)
        c10d.forget_non_members()
        waited_s = time.monotonic() - begin
        try:
            why = answer(partial(_give_up_for, attempt, error), _TELLING_S)
            if isinstance(error, (RuntimeError, ValueError)):
                answer(partial(_explain, attempt, error, waited_s, why), _EXPLAINING_S)
        except dist.DistNetworkError as gone:
            if attempt.connecting is None:
                raise error from gone
            raise CreationError(
                f"{_what(attempt, attempt.connecting)} was not created: {_without_store(gone)}"
            ) from error
        raise


def _without_store(gone: BaseException) -> str:
    """Say why nobody can tell what became of a creation, and what to do."""
    if isinstance(gone.__cause__, LateError):
        return (
            "the job's store does not answer in time, and who was missing is not known; once it "
            "answers, all may try again; where it never does, rank 0, whose process serves it as a "
            "rule, is cut off: restart the job"
        )
    return (
        f"the job's store is gone, and with it, as a rule, rank 0, whose process serves it "
        f"({str(gone).splitlines()[0]}); restart the job"
    )


def _give_up_for(attempt: Attempt, error: BaseException) -> str:
    """Wait no more, and tell the others why, where that is known; one question, if it is late."""
    why = _why_alone(attempt, error)
    give_up([attempt], "" if attempt.is_met else why)
    return why


def give_up(attempts: Iterable[Attempt], why: str = "") -> None:
    """Say in the store that this rank waits no more for the members of its groups.

    Whoever comes later finds that in place of this rank's address, and does not connect to it.
    Where gloo reads addresses without us, it stands elsewhere: gloo would take it for an address.

    Args:
        attempts: To create the groups.
        why: Why this rank failed, for the others; "" where they are told otherwise.

    Raises:
        DistNetworkError: The store is gone, or does not answer.
    """
    every = [attempt.connecting for attempt in attempts if dist.is_initialized()]
    connecting = [own for own in every if own is not None]

    def tell() -> None:
        for own in connecting:
            if making.knows_torch():
                place = address_key(own.name, own.position)
            else:
                place = own.key("gave up", own.rank)
            texts: dict[str, str | bytes] = {
                place: GAVE_UP,
                address_key(own.name, GAVE_UP_KEY): "1",
            }
            if why:
                texts = {address_key(own.name, FAILED_KEY): why, **texts}
            c10d.set_all(texts)

    if connecting:
        answer(tell, _TELLING_S)


def _why_alone(attempt: Attempt, error: BaseException) -> str:
    """Say why this rank failed, where it has no address yet: later it is for want of others."""
    waited = (AttemptGivenUpError, MembersMissingError, MemberFailedError, LateError)
    own = attempt.connecting
    if own is None or isinstance(error, (*waited, HyperCommError)):
        return ""
    if not isinstance(error, Exception) or not dist.is_initialized():
        return ""
    if c10d.read_bytes(address_key(own.name, own.position)) is not None:
        return ""
    rank, said = own.rank, (str(error).splitlines() or [""])[0][:_LONGEST_WORD]
    where = f"{format_coords(attempt.layout.coords(rank))}; host {this_host()}"
    return f"rank {rank} ({where}) failed: {type(error).__name__}: {said}"


def _left_by(attempt: Attempt, strategy: str, before: set[ProcessGroup]) -> set[ProcessGroup]:
    """What a creation that failed has registered; other threads may have registered theirs."""
    if strategy == "local" or (strategy == "split" and c10d.names_splits()):
        named = c10d.registered_as(attempt.own.name) if attempt.own and c10d.is_live() else set()
        return named - before
    new = c10d.registered() - before - c10d.kept()  # torch has named it
    if not c10d.is_live() or attempt.own is None:
        return new
    return {one for one in new if tuple(dist.get_process_group_ranks(one)) == attempt.own.ranks}


def _explain(attempt: Attempt, error: Exception, waited_s: float, why: str) -> None:
    """Raise an error of ours where we know better than torch what went wrong."""
    if isinstance(error, AttemptGivenUpError):
        if not attempt.is_met and time.monotonic() >= attempt.patience.deadline:
            # Another attempt would have no time, and blame those who are not at it yet.
            raise CreationError(
                f"the process group over {attempt.title} was not created: its members gave up as "
                f"the last of them came; all may try again"
            ) from error
        return
    if isinstance(error, HyperCommError):
        return
    if not dist.is_initialized():
        raise NotInitializedError(
            f"torch.distributed is not initialised, so the groups over {attempt.name} cannot be "
            f"created; call hypercomm.join() or torch.distributed.init_process_group() first"
        ) from error
    if attempt.connecting is None:
        return
    own = attempt.connecting
    if isinstance(error, MembersMissingError):
        missing = [own.ranks[position] for position in error.positions]
        how = ", until others gave up" if error.others_gave_up else ""
        raise _timed_out(attempt, own, missing, f"come{how}", waited_s) from error
    if why or isinstance(error, MemberFailedError):
        raise CreationError(
            f"{_what(attempt, own)} was not created: {why or error}; once it can, all may try again"
        ) from error
    absent, what = _silent(own)
    if absent:
        raise _timed_out(attempt, own, absent, what, waited_s) from error
    raise CreationError(
        f"{_what(attempt, own)} was not created, as its members could not connect; all of them "
        f"know, and may try again ({str(error).splitlines()[0]})"
    ) from error


def _timed_out(
    attempt: Attempt, own: OwnGroup, missing: Sequence[int], what: str, waited_s: float
) -> GroupCreationTimeout:
    late, named = hold(name_late(current(), missing, own.ranks, attempt.layout), _GRACE_S)
    return GroupCreationTimeout(
        f"{_what(attempt, own)} was not created: {named} did not {what}; rank {own.rank} waited "
        f"{waited_s:.1f} s (timeout {attempt.options.timeout}); every rank of the grid must "
        f"create it, in the same order; once they can, all may try again",
        missing=late,
        waited=timedelta(seconds=waited_s),
    )


def _what(attempt: Attempt, own: OwnGroup) -> str:
    return f"the process group over {attempt.title} of ranks {own.ranks}"


def _silent(own: OwnGroup) -> tuple[list[int], str]:
    """Name the members that neither connected nor gave up, and say what they did not do.

    Those that left no address did not come, and keep the others from connecting: where there are
    such, only they are named. gloo may end before our own wait for them does, on a busy machine.
    """
    address: dict[int, bytes | None] = {}

    def answered(position: int) -> bool:
        said = (own.key(what, own.ranks[position]) for what in ("connected", "gave up"))
        address[position] = c10d.read_bytes(address_key(own.name, position))
        return address[position] == GAVE_UP or any(c10d.is_set([key]) for key in said)

    silent = list(range(len(own.ranks)))

    def all_answered() -> bool:
        silent[:] = [position for position in silent if not answered(position)]
        return not silent

    wait_until(all_answered, _GRACE_S, lambda: None)
    absent = [position for position in silent if address[position] is None]
    return [own.ranks[position] for position in absent or silent], "come" if absent else "connect"


def destroy(created: Iterable[CreatedGroup], patience_s: float = PATIENCE_S) -> None:
    """Destroy groups, in the order given, once all of their members are connected.

    A member that died while it connected never says so, and is waited for a few seconds.
    """
    deadline = time.monotonic() + patience_s
    groups = [(item.group, item.connecting) for item in created if item.group is not None]
    errors: list[Exception] = []
    answers = True
    for group, own in groups:
        if not c10d.is_registered(group):
            continue  # torch destroyed it together with WORLD
        connected = False
        if own is not None and answers:
            try:
                connected = answer(
                    partial(_await_connected, own, deadline),
                    patience_s + _TELLING_S,
                    is_needed=False,
                )
            except RuntimeError as error:
                answers = False
                logger.warning("destroying groups that may not be connected: %s", error)
        try:
            c10d.destroy(group)
        except Exception as error:  # noqa: BLE001 - the other groups must go too
            errors.append(error)
        if own is not None and connected:
            with contextlib.suppress(RuntimeError):  # the store is gone, and nothing to forget
                answer(partial(_forget, own), patience_s)
    if errors:
        raise errors[0]


def abort(created: Iterable[CreatedGroup]) -> None:
    """Abort groups, in the order given, or destroy those whose backend cannot be aborted.

    Nobody is waited for.
    """
    c10d.abort([item.group for item in created if item.group is not None])


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Create several groups within a `with` block for less than one by one.

    The store is told of all creations at the end, in one message.
    """
    keys: list[str] = []
    token = _to_tell.set(keys)
    try:
        yield
    finally:
        _to_tell.reset(token)
        try:
            if keys:
                answer(lambda: c10d.set_all(dict.fromkeys(keys, "1")), PATIENCE_S)
        except RuntimeError as error:  # the store is gone
            logger.warning("cannot tell that groups are connected: %s", error)


def _tell_connected(attempt: Attempt) -> None:
    # One key for each member: setting it does not wait for an answer, as adding to a count does.
    if attempt.connecting is None:
        return
    keys, key = _to_tell.get(), attempt.connecting.key("connected", attempt.connecting.rank)
    if keys is None:
        c10d.set_all({key: "1"})
    else:
        keys.append(key)


def _await_connected(own: OwnGroup, deadline: float) -> bool:
    """Wait until all members are connected; False if they never are."""
    keys = own.keys("connected")
    while not c10d.is_set(keys):
        if c10d.is_set([address_key(own.name, GAVE_UP_KEY)]):
            return False  # some never will be
        if time.monotonic() > deadline:
            logger.warning("destroying a group whose members are not all connected")
            return False
        time.sleep(_POLL_S)
    return True


def _forget(own: OwnGroup) -> None:
    """Leave a group that is destroyed; the last member removes what it has left in the store."""
    left = own.keys("left")
    c10d.set_all({own.key("left", own.rank): "1"})
    if c10d.is_set(left):
        addresses = [address_key(own.name, at) for at in range(len(own.ranks))]
        c10d.forget([*addresses, *own.keys("connected"), *left])
