"""Creating, finding and ending process groups as torch's own functions do, under given names."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.process_groups.torch_internals import capabilities
from hypercomm.process_groups.torch_internals.backends import (
    backend_of,
    default_timeout,
    part_on,
    parts_of,
    parts_of_world,
    single_backends,
)
from hypercomm.process_groups.torch_internals.capabilities import since
from hypercomm.process_groups.torch_internals.gloo import (
    ConnectionFailedError,
    GlooStore,
    Wait,
    lazy_init,
)
from hypercomm.process_groups.torch_internals.reconfigure import in_one_place
from hypercomm.process_groups.torch_internals.split import (
    bound_device,
    is_nccl,
    made_alone,
    named,
    uses_torchcomms,
)

_torch: Any = dist.distributed_c10d

_defaults_lock = threading.Lock()

_kept: WeakKeyDictionary[ProcessGroup, object] = WeakKeyDictionary()
"""Objects that must live as long as their group."""


def why_not_members() -> str | None:
    """Return why members cannot create a group without the other ranks; None if they can."""
    if not capabilities.HAS_HELPER:
        return "this torch lacks the private name _new_process_group_helper, or it has changed"
    if uses_torchcomms() and not since("2.14"):
        return "before torch 2.14, TorchComms creates a group by a split of WORLD"
    if callable(getattr(dist.group.WORLD, "new_group", None)):
        return "the default process group has its own method new_group()"
    return None


def new_group(
    name: str,
    ranks: Sequence[int],
    *,
    backend: str,
    timeout: timedelta | None,
    pg_options: Any,
    group_desc: str,
    lazily: bool | None,
    wait: Wait | None,
    rank: int,
    store: Any,
    stale: list[str],
    is_in_default: bool,
    enable_reconfigure: bool = False,
) -> ProcessGroup:
    """Create the group of the calling rank, under `name`; only its members call this.

    torch's public functions derive the name from a count of groups, which can differ between
    ranks; this name is the same on every member, whatever other groups a rank has created.

    Args:
        name: The name of the group.
        ranks: Its members.
        backend: Its backend.
        timeout: Its timeout; None is torch's default.
        pg_options: Options of the backend.
        group_desc: A description.
        lazily: Whether members connect at their first message; None leaves it to the environment.
        wait: Waits for the addresses of gloo's members; None lets gloo wait.
        rank: The calling rank.
        store: The store that the members meet in.
        stale: Receives the keys that no member needs any more.
        is_in_default: Whether the ranks are those of WORLD. torch takes a group of other ranks for
            a default process group, but does not make it that.
        enable_reconfigure: Whether it is created without members, which `reconfigure` gives it.
    """
    backend = dist.Backend(backend)
    if timeout is None:
        timeout = default_timeout(backend)
    members = list(ranks)
    place: Any = store
    singles = set(single_backends(backend))
    with (
        lazy_init.set_to(lazily) if "gloo" in singles else contextlib.nullcontext() as is_lazy,
        made_alone(backend, pg_options, timeout, lazily) as (options, device),
        in_one_place() if enable_reconfigure else contextlib.nullcontext(),
    ):
        is_gloo = singles == {"gloo"} and not uses_torchcomms()
        if not (is_lazy or enable_reconfigure) and is_gloo:
            place = GlooStore(place, len(members), wait, stale)
        try:
            group, _ = _torch._new_process_group_helper(
                len(members),
                members.index(rank),
                members if is_in_default else [],
                backend,
                place,
                group_name=name,
                backend_options=options,
                timeout=timeout,
                device_id=device,
                group_desc=group_desc,
                **({"enable_reconfigure": True} if enable_reconfigure else {}),
            )
        except Exception as error:
            if not isinstance(place, GlooStore):
                raise
            place.forget()
            if place.error is not None:
                raise place.error from error
            if wait is not None and place.has_all():
                raise ConnectionFailedError(error, members) from error
            raise
        finally:
            if isinstance(place, GlooStore):
                place.close()
    _kept[group] = place
    _torch._world.pg_group_ranks[group] = Positions(members)
    return group  # type: ignore[no-any-return]


class Positions(Mapping[int, int]):
    """The position of each member of a group, computed at the first use: torch seldom needs it."""

    def __init__(self, members: Sequence[int]) -> None:
        self._members = members

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self._members)}

    def __getitem__(self, rank: int) -> int:
        return self._positions[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


def split_group(
    name: str | None,
    ranks: Sequence[int],
    *,
    backend: str,
    timeout: timedelta | None,
    pg_options: Any,
    group_desc: str | None,
) -> ProcessGroup | None:
    """Split a group off WORLD; every rank of WORLD calls this, each with the ranks of its group.

    Args:
        name: The name of the group, the same on all members; None if the rank is not a member.
        ranks: Its ranks, or those of any group that the calling rank is not in.
        backend: Its backend, or that part of WORLD's.
        timeout: As for `torch.distributed.split_group`, as are the other two.
        pg_options: Options of the backend.
        group_desc: A description.

    Returns:
        The group; None if the calling rank is not in it.
    """
    only: dict[str, Any] = {} if parts_of(backend) == parts_of_world() else {"backend": backend}
    with named(name):
        part: Any = dist.split_group(
            split_ranks=[list(ranks)],
            timeout=timeout,
            pg_options=pg_options,
            group_desc=group_desc,
            **only,
        )
    return as_member(part)


def current_device() -> torch.device | None:
    """Return the CUDA device of this thread; None if CUDA is not in use."""
    cuda: Any = torch.cuda
    if not cuda.is_available() or not cuda.is_initialized():
        return None
    return torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def on_device(device: torch.device | None) -> Iterator[None]:
    """Use a CUDA device in this thread within a `with` block; None changes nothing."""
    with contextlib.nullcontext() if device is None else torch.cuda.device(device):
        yield


_defaults: list[ProcessGroup | None] = []
"""torch's own default process group, and those shown in its place by blocks that have not ended."""


@contextlib.contextmanager
def shown_as_default(group: ProcessGroup) -> Iterator[None]:
    """Show a group to torch as its default process group within a `with` block, to all threads.

    Blocks of several threads may end in any order: torch has the group of the last that goes on.
    """
    with _defaults_lock:
        if not _defaults:
            _defaults.append(dist.group.WORLD)
        _defaults.append(group)
        _torch._update_default_pg(group)
    try:
        yield
    finally:
        with _defaults_lock:
            del _defaults[len(_defaults) - 1 - _defaults[::-1].index(group)]
            _torch._update_default_pg(_defaults[-1])
            if len(_defaults) == 1:
                _defaults.clear()


# ---- what torch has registered -----------------------------------------------------------------


def kept() -> set[ProcessGroup]:
    """Return the process groups that were created by `new_group`."""
    return set(_kept)


def registered_as(name: str) -> set[ProcessGroup]:
    """Return the process group that torch has registered under a name, if there is one."""
    return {group for group, known in _torch._world.pg_names.items() if known == name}


def registered() -> set[ProcessGroup]:
    """Return every process group that torch has registered."""
    return set(_torch._world.pg_map)


def is_registered(group: ProcessGroup) -> bool:
    """Return whether torch knows a group; it forgets all of them when WORLD is destroyed."""
    return group in _torch._world.pg_map


def as_member(group: ProcessGroup | int | None) -> ProcessGroup | None:
    """Return a group; None in place of torch's marker for "not a member"."""
    return None if isinstance(group, int) else group


def forget_non_members() -> None:
    """Remove the entry that torch registers under its marker for "not a member"."""
    _torch._world.pg_group_ranks.pop(dist.GroupMember.NON_GROUP_MEMBER, None)


# ---- the end of groups -------------------------------------------------------------------------


def destroy(group: ProcessGroup) -> None:
    """Destroy a group, and the empty tag that torch leaves for it."""
    tag, tagged = _torch._world.pg_to_tag.get(group), _torch._world.tags_to_pg
    place = _kept.get(group)
    if isinstance(place, GlooStore):
        place.forget()
    dist.destroy_process_group(group)
    if not tagged.get(tag, True):
        del tagged[tag]  # torch leaves an empty list for every group that ever was


def abort(groups: Iterable[ProcessGroup]) -> None:
    """End groups without waiting for other ranks: abort those of NCCL, destroy the rest.

    The groups of NCCL are aborted together, as torch does for a whole job: one by one they would
    wait for each other (pytorch issue 119797).
    """
    errors: list[Exception] = []
    pending = [group for group in groups if is_registered(group)]
    nccl = [group for group in pending if is_nccl(backend_of(group))]
    if nccl:
        try:
            with _at_once(nccl[0]):
                for group in nccl:
                    group.abort()
        except Exception as error:  # noqa: BLE001 - the groups must go all the same
            errors.append(error)
    for group in pending:
        try:
            if group in nccl:
                _torch._abort_process_group(group)
            else:
                destroy(group)
        except Exception as error:  # noqa: BLE001 - the other groups must go too
            errors.append(error)
    if errors:
        raise errors[0]


def end_world() -> None:
    """End WORLD and every group of this process, without waiting for other ranks."""
    world = dist.group.WORLD
    nccl = [group for group in registered() if is_nccl(backend_of(group))]
    with contextlib.suppress(Exception):  # they go all the same
        abort(sorted(nccl, key=lambda group: group is world))
    destroy_world()


def destroy_world() -> None:
    """Destroy WORLD, if it exists, and every group of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _at_once(group: ProcessGroup) -> contextlib.ExitStack:
    """Group the NCCL calls of a `with` block, so that they take effect together."""
    device: Any = bound_device() or next(
        (device for device in group._device_types if device.type != "cpu"), None
    )
    part: Any = None if device is None else part_on(device, group)
    end = contextlib.ExitStack()
    if hasattr(part, "_group_start"):
        part._group_start()
        end.callback(part._group_end)
    elif getattr(part, "supports_coalescing", False):
        group._start_coalescing(device)
        end.callback(group._end_coalescing, device)
    return end
