"""Creating, finding and ending process groups as torch's own functions do, under names of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.process_groups.c10d.backends import (
    backend_of,
    default_timeout,
    part_on,
    single_backends,
)
from hypercomm.process_groups.c10d.binding import binding, is_nccl, made_alone, split_backend
from hypercomm.process_groups.c10d.gloo import lazy_init, making
from hypercomm.process_groups.c10d.gloo_store import ENDLESS, Patience
from hypercomm.process_groups.c10d.naming import named
from hypercomm.process_groups.c10d.private_names import (
    ABORT,
    HELPER,
    STORE,
    TORCHCOMMS,
    WORLD_TABLES,
    private,
)
from hypercomm.process_groups.c10d.store import has_store, store

_kept: WeakKeyDictionary[ProcessGroup, object] = WeakKeyDictionary()
"""What lives as long as a group."""


def missing() -> list[str]:
    """Say what the installed torch lacks for creating a group under a name of our own."""
    needed = (WORLD_TABLES, STORE, HELPER)
    return [f"{name} {private.why_not(name)}" for name in needed if private.get(name) is None]


def replaces_new_group() -> str | None:
    """Name what makes this world create groups in a way of its own, if anything does."""
    if TORCHCOMMS.is_due() and private.works(TORCHCOMMS) and private.get(TORCHCOMMS)():
        return "torch creates groups through TorchComms here"
    if callable(getattr(dist.group.WORLD, "new_group", None)):
        return "the default process group has a new_group() of its own"
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
    patience: Patience = ENDLESS,
) -> ProcessGroup:
    """Create the group of the calling rank, under `name`; only its members call this.

    torch's public functions name a group after a count that each rank keeps for itself; this
    one is the same on every member whatever else a rank has created.
    """
    backend = dist.Backend(backend)
    if timeout is None:
        timeout = default_timeout(backend)
    members = list(ranks)
    with (
        connecting(backend, lazily, patience) as kept,
        made_alone(backend, pg_options, timeout, lazily) as (options, device),
    ):
        group, _ = private.get(HELPER)(
            len(members),
            members.index(dist.get_rank()),
            members,
            backend,
            store(),
            group_name=name,
            backend_options=options,
            timeout=timeout,
            device_id=device,
            group_desc=group_desc,
        )
    _kept[group] = kept
    private.get(WORLD_TABLES).pg_group_ranks[group] = Positions(members)
    return group  # type: ignore[no-any-return]


class Positions(Mapping[int, int]):
    """The position of each member in a group, which torch seldom asks for: made when it does."""

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
    """Split a group off WORLD, which every rank of WORLD calls at once, each with its own ranks.

    Args:
        name: What all members know the group by, which the calling rank is one of, or None.
        ranks: Its ranks, or those of any group that the calling rank is not in.
        backend: Its backend, or that part of WORLD's.
        timeout: As for `torch.distributed.split_group`, as are the other two.
        pg_options: Options of the backend.
        group_desc: A description.

    Returns:
        The group; None where the calling rank is not in it.
    """
    filtered = split_backend(backend)
    only: dict[str, Any] = {} if filtered is None else {"backend": filtered}
    with named(name):
        part: Any = dist.split_group(
            split_ranks=[list(ranks)],
            timeout=timeout,
            pg_options=pg_options,
            group_desc=group_desc,
            **only,
        )
    return as_member(part)


def connecting(
    backend: str, lazily: bool | None, patience: Patience
) -> AbstractContextManager[object]:
    """Choose how gloo connects the group that is created within a `with` block.

    Args:
        backend: The group's.
        lazily: Whether each pair of members connects at its first message.
        patience: For how long members are waited for.

    Returns:
        A context manager, which yields what must live as long as the group.
    """
    if "gloo" not in single_backends(backend) or not has_store():
        return contextlib.nullcontext()
    return _connecting(lazily, patience)


@contextlib.contextmanager
def _connecting(lazily: bool | None, patience: Patience) -> Iterator[object]:
    with lazy_init.set_to(lazily), making.met(patience) as meetings:
        yield meetings


# ---- what torch has registered ----------------------------------------------------------------


def kept() -> set[ProcessGroup]:
    """Return the process groups that were created under names of our own."""
    return set(_kept)


def registered_as(name: str) -> set[ProcessGroup]:
    """Return the process group that torch has registered under a name, if there is one."""
    tables = private.get(WORLD_TABLES)
    names = {} if tables is None else tables.pg_names
    return {group for group, known in names.items() if known == name}


def registered() -> set[ProcessGroup]:
    """Return every process group that torch has registered in this process, as far as it tells."""
    tables = private.get(WORLD_TABLES)
    return set() if tables is None else set(tables.pg_map)


def is_registered(group: ProcessGroup) -> bool:
    """Tell whether torch knows a group; it forgets all of them when WORLD is destroyed."""
    tables = private.get(WORLD_TABLES)
    if tables is not None:
        return group in tables.pg_map
    try:
        return bool(dist.is_initialized() and dist.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):
        return False


def as_member(group: ProcessGroup | int | None) -> ProcessGroup | None:
    """Return a group; None in place of torch's number for "not a member"."""
    return None if isinstance(group, int) else group


def forget_non_members() -> None:
    """Remove what torch files under its marker for "not a member", as if it were a group."""
    tables = private.get(WORLD_TABLES)
    if tables is not None:
        tables.pg_group_ranks.pop(dist.GroupMember.NON_GROUP_MEMBER, None)


# ---- the end of groups ------------------------------------------------------------------------


def destroy(group: ProcessGroup) -> None:
    """Destroy a group, and what torch forgets to clean up."""
    tables = private.get(WORLD_TABLES)
    tag = None if tables is None else tables.pg_to_tag.get(group)
    dist.destroy_process_group(group)
    if tables is not None and not tables.tags_to_pg.get(tag, True):
        del tables.tags_to_pg[tag]  # torch leaves an empty list for every group that ever was


def abort(groups: Iterable[ProcessGroup]) -> None:
    """End groups without waiting for anybody: abort those whose backend can, destroy the rest.

    NCCL's are aborted at once, as torch does it for all groups of a job: one after the other they
    wait for each other (pytorch issue 119797).
    """
    errors: list[Exception] = []
    pending = [group for group in groups if is_registered(group)]
    nccl = [group for group in pending if is_nccl(backend_of(group))]
    if nccl:
        try:
            with _at_once(nccl[0]):
                for group in nccl:
                    if hasattr(group, "abort"):  # not in torch 2.6
                        group.abort()
        except Exception as error:  # noqa: BLE001 - the groups must go all the same
            errors.append(error)
    for group in pending:
        try:
            if group not in nccl or not _end_aborted(group):
                destroy(group)
        except Exception as error:  # noqa: BLE001 - the other groups must go too
            errors.append(error)
    if errors:
        raise errors[0]


def _end_aborted(group: ProcessGroup) -> bool:
    """Let torch forget a group that is aborted, or abort it; tell whether that could be done."""
    end = private.get(ABORT)
    if end is None:
        return False
    try:
        end(group)
    except Exception as error:  # noqa: BLE001 - there is a way without it
        private.lost(ABORT, f"raises {error!r}")
        return False
    return True


@contextlib.contextmanager
def _at_once(group: ProcessGroup) -> Iterator[None]:
    """Let NCCL do within a `with` block what it is told of all groups, in one go."""
    device: Any = binding.device() or next(
        (device for device in group._device_types if device.type != "cpu"), None
    )
    part: Any = None if device is None else part_on(device, group)
    if hasattr(part, "_group_start"):
        part._group_start()
        try:
            yield
        finally:
            part._group_end()
    elif getattr(part, "supports_coalescing", False):
        group._start_coalescing(device)
        try:
            yield
        finally:
            group._end_coalescing(device)
    else:
        yield
