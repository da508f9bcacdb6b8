"""Creates, finds, changes and ends process groups, under names that the caller gives."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import GroupOptionsError
from hypercomm.process_groups.torch_internals import capabilities
from hypercomm.process_groups.torch_internals.capabilities import (
    NCCL,
    Patch,
    backend_of,
    default_timeout,
    part_on,
    parts_of,
    parts_of_world,
    since,
    single_backends,
)
from hypercomm.process_groups.torch_internals.gloo import (
    address_key,
    lazy_init as lazy_init_of_gloo,
)
from hypercomm.process_groups.torch_internals.split import (
    bound_device,
    is_nccl,
    uses_torchcomms,
    with_group_name,
    without_split,
)

_torch: Any = dist.distributed_c10d

_defaults_lock = threading.Lock()

_CONNECTS_S = 5.0
"""Time after the creation of a gloo group in which other members may still connect, in seconds."""

_RELEASES_S = 0.5
"""Time that the threads of a gloo group have to release the last tensors, in seconds."""

_kept: WeakKeyDictionary[ProcessGroup, tuple[list[str], str]] = WeakKeyDictionary()
"""Maps each group of `new_group` to a list for stale keys, and the key of this rank's address."""

_timers: WeakSet[threading.Timer] = WeakSet()
"""The timers that end the connections of destroyed groups."""

_created: WeakKeyDictionary[ProcessGroup, float] = WeakKeyDictionary()
"""The time of the creation of each gloo group."""


def note_creation(group: ProcessGroup) -> None:
    """Note when a function of torch has created a group, if it is a gloo group."""
    with contextlib.suppress(RuntimeError):  # the group has no backend for the CPU
        if type(group._get_backend(torch.device("cpu"))).__name__ == "ProcessGroupGloo":
            _created[group] = time.monotonic()


def why_not_members() -> str | None:
    """Return why members cannot create a group without other ranks, or None if they can."""
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
    rank: int,
    backend: str,
    store: Any,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    lazy_init: bool | None = None,
    enable_reconfigure: bool = False,
    is_default: bool = True,
    stale: list[str],
) -> ProcessGroup:
    """Create the group of the calling rank. Only its members call this function.

    torch's public functions derive the name of a group from a count of groups, which can differ
    between ranks. The name here is the same on every member.

    Args:
        name: The name of the group.
        ranks: The members of the group.
        rank: The calling rank, which is one of the members.
        backend: The backend of the group.
        store: A client of the store that the members share.
        timeout: The timeout of the group; None is torch's default.
        pg_options: Options of the backend.
        group_desc: The description of the group.
        lazy_init: Whether members connect at their first message; None is torch's default.
        enable_reconfigure: Whether `reconfigure` gives the group its members afterwards.
        is_default: Whether the ranks are ranks of WORLD. If not, torch creates the group like a
            default process group, but does not register it as the default one.
        stale: Receives the key of this rank's address, once no member needs the key.
    """
    backend = dist.Backend(backend)
    timeout = timeout or default_timeout(backend)
    members = list(ranks)
    position = members.index(rank)
    singles = single_backends(backend)
    more = {"enable_reconfigure": True} if enable_reconfigure else {}
    is_gloo = "gloo" in singles
    nothing = contextlib.nullcontext()
    with (
        lazy_init_of_gloo(lazy_init) if is_gloo and lazy_init is not None else nothing,
        with_one_prefix() if enable_reconfigure else nothing,
        without_split(backend, pg_options, timeout, lazy_init) as (backend_options, device),
    ):
        group, _ = _torch._new_process_group_helper(
            len(members),
            position,
            members if is_default else [],
            backend,
            store,
            group_name=name,
            backend_options=backend_options,
            timeout=timeout,
            device_id=device,
            group_desc=group_desc,
            **more,
        )
    key = address_key(name, position) if is_gloo else ""
    _kept[group] = stale, key
    if key:
        _created[group] = time.monotonic()
    _torch._world.pg_group_ranks[group] = _positions(members)
    return group  # type: ignore[no-any-return]


def _positions(members: list[int]) -> dict[int, int]:
    """Map each member to its position. If these are all ranks, return the dict of WORLD itself."""
    known: dict[int, int] = _torch._world.pg_group_ranks.get(dist.group.WORLD, {})
    if len(members) == len(known) and members == list(known):
        return known
    return dict(zip(members, range(len(members)), strict=True))


def split_group(
    name: str | None,
    ranks: Sequence[int],
    *,
    backend: str,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> ProcessGroup | None:
    """Split a group off WORLD. Every rank of WORLD calls this function.

    Args:
        name: The name of the group, which is the same on all members. Other ranks pass None.
        ranks: The members. Other ranks pass any group that does not contain them.
        backend: The backend of the group, which is the backend of WORLD or a part of it.
        timeout: The timeout of the group; None is torch's default.
        pg_options: Options of the backend.
        group_desc: The description of the group.

    Returns:
        The group, or None if the calling rank is not a member.
    """
    only: dict[str, Any] = {} if parts_of(backend) == parts_of_world() else {"backend": backend}
    with with_group_name(name):
        part: Any = dist.split_group(
            split_ranks=[list(ranks)],
            timeout=timeout,
            pg_options=pg_options,
            group_desc=group_desc,
            **only,
        )
    return as_member(part)


_defaults: dict[object, ProcessGroup | None] = {}
"""torch's default process group, followed by the groups of open `shown_as_default` blocks."""


@contextlib.contextmanager
def shown_as_default(group: ProcessGroup) -> Iterator[None]:
    """Make a group torch's default process group within a `with` block, in all threads.

    Blocks of several threads may end in any order. The default is the group of the most recently
    entered block that is still open. If the default process group was destroyed or created within a
    block, the end of the block does not change it.
    """
    block = object()
    with _defaults_lock:
        if not _is_shown():
            _defaults.clear()
            _defaults[None] = dist.group.WORLD
        _defaults[block] = group
        _torch._update_default_pg(group)
    try:
        yield
    finally:
        with _defaults_lock:
            is_shown = _is_shown()
            _defaults.pop(block, None)
            if is_shown:  # else the program has changed the default since
                _show_last()
            if len(_defaults) < 2:
                _defaults.clear()  # torch may end no group when Python exits


def _is_shown() -> bool:
    """Return whether the group of the last block is torch's default process group."""
    return bool(_defaults) and [*_defaults.values()][-1] is dist.group.WORLD


def _show_last() -> None:
    """Make the last group that has not ended the default process group."""
    for block, group in list(_defaults.items()):
        if block is not None and not is_registered(group):
            del _defaults[block]
    last = [*_defaults.values()][-1]
    _torch._update_default_pg(last if is_registered(last) else None)


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


def is_registered(group: ProcessGroup | None) -> bool:
    """Return whether torch has registered a group. Destroying WORLD unregisters all groups."""
    return group in _torch._world.pg_map


def as_member(group: ProcessGroup | int | None) -> ProcessGroup | None:
    """Return a group, or None in place of torch's marker for "not a member"."""
    return None if isinstance(group, int) else group


def forget_non_members() -> None:
    """Remove the entry that torch registers under its marker for "not a member"."""
    _torch._world.pg_group_ranks.pop(dist.GroupMember.NON_GROUP_MEMBER, None)


# ---- the end of groups -------------------------------------------------------------------------


def destroy(groups: Iterable[ProcessGroup]) -> None:
    """Destroy groups in the order given, and raise the first error once all are destroyed.

    A gloo group that this rank has never used stays connected for five seconds after its creation,
    because other members may still be connecting to this rank. The other gloo groups stay for half
    a second: their threads need the GIL to release the tensors of the last collective, and torch
    waits for these threads with the GIL held when the last reference to a group ends.
    """
    groups = list(groups)
    connecting = [group for group in groups if _may_connect(group)]
    others = [group for group in groups if group in _created and group not in connecting]
    _hold(connecting, _CONNECTS_S, is_daemon=False)
    _hold(others, _RELEASES_S, is_daemon=True)
    _end_each(groups, _destroy)


def _hold(groups: list[ProcessGroup], seconds: float, *, is_daemon: bool) -> None:
    """Keep references to groups for some time. Python waits for this at exit.

    A process that multiprocessing has started does not wait for a daemon.
    """
    if groups:
        timer = threading.Timer(seconds, groups.clear)
        timer.daemon = is_daemon
        timer.start()
        _timers.add(timer)


@atexit.register
def _wait_for_timers() -> None:
    """Let no timer end a gloo group while Python exits, because torch then aborts the process."""
    for timer in list(_timers):
        timer.join()


def release() -> None:
    """End the connections of destroyed groups that this rank has never used.

    Call it when no other member connects any more. Otherwise, Python waits for them at exit.
    """
    for timer in list(_timers):
        if not timer.daemon:
            timer.cancel()


def _may_connect(group: ProcessGroup) -> bool:
    """Return whether other members of a gloo group may still be connecting to this rank."""
    created = _created.get(group)
    if created is None or time.monotonic() - created > _CONNECTS_S or group.size() < 2:
        return False
    count_calls = getattr(group, "_get_sequence_number_for_group", None)
    return count_calls is None or count_calls() == 0


def _destroy(group: ProcessGroup) -> None:
    """Destroy a group, and delete the empty list that torch keeps for the group's tag."""
    tag = _torch._world.pg_to_tag.get(group)
    tagged = _torch._world.tags_to_pg
    stale, key = _kept.get(group, ([], ""))
    if key:
        stale.append(key)
    dist.destroy_process_group(group)
    if not tagged.get(tag, True):
        del tagged[tag]


def abort(groups: Iterable[ProcessGroup]) -> None:
    """End groups without waiting for other ranks: abort NCCL groups, and destroy the others.

    The NCCL groups are aborted together, as torch does for all groups of a job. If they were
    aborted one after the other, they would wait for each other (pytorch issue 119797).
    """
    pending = [group for group in groups if is_registered(group)]
    nccl = [group for group in pending if is_nccl(backend_of(group))]
    with contextlib.ExitStack() as ends:  # runs all callbacks, the last one first, despite errors
        ends.callback(_end_each, [one for one in pending if one not in nccl], _destroy)
        ends.callback(_end_each, nccl, _torch._abort_process_group)
        if nccl:
            with _nccl_calls_together(nccl[0]):
                for group in nccl:
                    group.abort()


def _end_each(groups: Iterable[ProcessGroup], end: Callable[[ProcessGroup], None]) -> None:
    """End the groups that torch has registered, and raise the first error once all have ended."""
    errors: list[Exception] = []
    for group in groups:
        if not is_registered(group):
            continue  # torch has destroyed it together with WORLD
        try:
            end(group)
        except Exception as error:  # noqa: BLE001 - the other groups must also end
            errors.append(error)
    if errors:
        raise errors[0]


def end_world() -> None:
    """End WORLD and every group of this process, without waiting for other ranks."""
    world = dist.group.WORLD
    nccl = [group for group in registered() if is_nccl(backend_of(group))]
    with contextlib.suppress(Exception):  # `destroy_world` also ends these groups
        abort(sorted(nccl, key=lambda group: group is world))
    destroy_world()


def destroy_world() -> None:
    """Destroy WORLD, if it exists, and every group of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _nccl_calls_together(group: ProcessGroup) -> contextlib.ExitStack:
    """Group the NCCL calls of a `with` block, so that they take effect together."""
    device: Any = bound_device()
    if device is None:
        others = [device for device in group._device_types if device.type != "cpu"]
        device = others[0] if others else None
    part: Any = None if device is None else part_on(device, group)
    end = contextlib.ExitStack()
    if hasattr(part, "_group_start"):
        part._group_start()
        end.callback(part._group_end)
    elif getattr(part, "supports_coalescing", False):
        group._start_coalescing(device)
        end.callback(group._end_coalescing, device)
    return end


# ---- groups that can be reconfigured (torch 2.14) -----------------------------------------------

# torch creates a group that can be reconfigured without members. Each member then publishes its
# handle, reads the handles of the other members, and connects. After ranks are lost, the remaining
# members do the same again. gloo publishes addresses under the name of the group, so members whose
# groups have different names could not connect. All these groups therefore use one prefix, and a
# number distinguishes each set of members.


def why_not_reconfigured(backend: str) -> str | None:
    """Return why groups of a backend cannot be reconfigured, or None if they can."""
    if not since("2.14"):
        return "torch supports it since 2.14"
    if uses_torchcomms():
        return "torch creates groups through TorchComms here"
    others = [name for name in single_backends(backend) if name not in {"gloo", *NCCL}]
    return f"backend {others[0]!r} does not support it" if others else None


_SLICE_S = 5.0
"""The longest time that one request waits for the handles of members, in seconds."""

_ONE_PREFIX = "hypercomm/reconfigure/"
_prefix = Patch("PrefixStore")
_here = threading.local()


@contextlib.contextmanager
def with_one_prefix() -> Iterator[None]:
    """Use one store prefix for the groups that this thread creates in a `with` block."""
    with _prefix.applied(_torch, _prefixed):
        _here.is_set = True
        try:
            yield
        finally:
            _here.is_set = False


def _prefixed(prefix: str, store: Any) -> Any:
    is_ours = getattr(_here, "is_set", False)
    return _prefix.original(_torch)(_ONE_PREFIX if is_ours else prefix, store)


def reconfigure(
    group: ProcessGroup,
    name: str,
    ranks: Sequence[int],
    *,
    rank: int,
    store: Any,
    timeout: timedelta | None = None,
    stale: list[str],
    left_s: float,
) -> None:
    """Give a group new members. Each new member calls this function.

    Args:
        group: The group of the calling rank.
        name: A new name for the group with these members. All members pass the same name.
        ranks: The members, in the order of their positions in the group.
        rank: The calling rank, which is one of the members.
        store: A client of the store that the members share.
        timeout: The limit for the connection; None is torch's default.
        stale: Receives the keys of the store that no member needs any more.
        left_s: The limit for the wait for handles, in seconds.
    """
    if not _any(group).supports_reconfigure:
        raise GroupOptionsError(
            f"backend {backend_of(group)!r} of this torch does not support enable_reconfigure=True"
        )
    keys = [f"{name}/handle/{member}" for member in ranks]
    own = keys[list(ranks).index(rank)]
    store.set(own, _any(group).get_reconfigure_handle())
    try:
        _wait_for(store, keys, left_s)
        handles = [store.get(key).decode() for key in keys]
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        _reconfigure(group, number, handles, timeout)
    finally:
        stale.append(own)  # all members have read the handle, or the creation fails
    _torch._world.pg_group_ranks[group] = _positions([*ranks])


def _wait_for(store: Any, keys: list[str], left_s: float) -> None:
    """Wait for keys in requests of a few seconds, so that other threads can use the client."""
    until = time.monotonic() + left_s
    while True:
        slice_s = min(_SLICE_S, max(0.01, until - time.monotonic()))
        try:
            store.wait(keys, timedelta(seconds=slice_s))
        except dist.DistStoreError:
            if time.monotonic() >= until:
                raise
        else:
            return


def isolate(group: ProcessGroup) -> None:
    """Make the calling rank the only member of its group. Collectives of the other members fail."""
    handle = _any(group).get_reconfigure_handle()
    _reconfigure(group, uuid4().int >> 72, [handle], None)


def _reconfigure(
    group: ProcessGroup, number: int, handles: list[str], timeout: timedelta | None
) -> None:
    options = _torch.ReconfigureOptions()
    options.uuid = number
    options.handles = handles
    if timeout is not None:
        options.timeout = timeout
    _any(group).reconfigure(options).wait()


def _any(group: Any) -> Any:
    """Return a group as Any, because torch before 2.14 has no types for these methods."""
    return group
