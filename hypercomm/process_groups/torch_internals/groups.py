"""Creating, finding, changing and ending process groups as torch does, under given names."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

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
    ConnectionFailedError,
    GlooStore,
    Wait,
    lazy_init,
    on_that_device,
)
from hypercomm.process_groups.torch_internals.split import (
    bound_device,
    is_nccl,
    made_alone,
    named,
    uses_torchcomms,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hypercomm.process_groups.options import GroupOptions
    from hypercomm.process_groups.world import World

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
    name: str, ranks: Sequence[int], *, options: GroupOptions, world: World, wait: Wait | None
) -> ProcessGroup:
    """Create the group of the calling rank, under `name`; only its members call this.

    torch's public functions derive the name from a count of groups, which can differ between
    ranks; this name is the same on every member, whatever other groups a rank has created.

    Args:
        name: The name of the group.
        ranks: Its members.
        options: Its options; without a timeout it has torch's default.
        world: The world of the ranks. torch takes a group of ranks that are not those of WORLD for
            a default process group, but does not make it that.
        wait: Waits for the addresses of gloo's members; None lets gloo wait.
    """
    backend = dist.Backend(options.backend or world.backend)
    timeout = options.timeout or default_timeout(backend)
    members, lazily, changes = list(ranks), options.lazy_init, options.enable_reconfigure
    place: Any = world.store
    singles = set(single_backends(backend))
    with (
        lazy_init.set_to(lazily) if "gloo" in singles else contextlib.nullcontext() as is_lazy,
        made_alone(backend, options.pg_options, timeout, lazily) as (pg_options, device),
        in_one_place() if changes else contextlib.nullcontext(),
    ):
        if singles == {"gloo"} and not (is_lazy or changes or uses_torchcomms()):
            place = GlooStore(place, len(members), wait, world.stale)
        try:
            with on_that_device() if place is not world.store else contextlib.nullcontext():
                group, _ = _torch._new_process_group_helper(
                    len(members),
                    members.index(world.rank),
                    members if world.is_default else [],
                    backend,
                    place,
                    group_name=name,
                    backend_options=pg_options,
                    timeout=timeout,
                    device_id=device,
                    group_desc=options.group_desc,
                    **({"enable_reconfigure": True} if changes else {}),
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
    _torch._world.pg_group_ranks[group] = _numbers(members)
    return group  # type: ignore[no-any-return]


def _numbers(members: list[int]) -> dict[int, int]:
    """Return the number of each member in a group; a group of all ranks has WORLD's own dict."""
    known: dict[int, int] = _torch._world.pg_group_ranks.get(dist.group.WORLD, {})
    if len(members) == len(known) and members == list(known):
        return known
    return {member: at for at, member in enumerate(members)}


def split_group(
    name: str | None, ranks: Sequence[int], options: GroupOptions, backend: str
) -> ProcessGroup | None:
    """Split a group off WORLD; every rank of WORLD calls this, each with the ranks of its group.

    Args:
        name: The name of the group, the same on all members; None if the rank is not a member.
        ranks: Its ranks, or those of any group that the calling rank is not in.
        options: Its options.
        backend: Its backend, or that part of WORLD's.

    Returns:
        The group; None if the calling rank is not in it.
    """
    only: dict[str, Any] = {} if parts_of(backend) == parts_of_world() else {"backend": backend}
    with named(name):
        part: Any = dist.split_group(
            split_ranks=[list(ranks)],
            timeout=options.timeout,
            pg_options=options.pg_options,
            group_desc=options.group_desc,
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

    Blocks of several threads may end in any order: torch has the group of the last that goes on. A
    default process group that was destroyed or created within a block stays as it is.
    """
    with _defaults_lock:
        if not _defaults or _defaults[-1] is not dist.group.WORLD:
            _defaults[:] = [dist.group.WORLD]
        _defaults.append(group)
        _torch._update_default_pg(group)
    try:
        yield
    finally:
        with _defaults_lock:
            _end_block(group)


def _end_block(group: ProcessGroup) -> None:
    """Show the group of the last block that goes on, if torch has not been given another one."""
    is_ours = bool(_defaults) and _defaults[-1] is dist.group.WORLD
    if group in _defaults:
        del _defaults[len(_defaults) - 1 - _defaults[::-1].index(group)]
    if not is_ours:
        return
    while len(_defaults) > 1 and not is_registered(_defaults[-1]):
        del _defaults[-1]
    _torch._update_default_pg(_defaults[-1] if is_registered(_defaults[-1]) else None)
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


def is_registered(group: ProcessGroup | None) -> bool:
    """Return whether torch knows a group; it forgets all of them when WORLD is destroyed."""
    return group in _torch._world.pg_map


def as_member(group: ProcessGroup | int | None) -> ProcessGroup | None:
    """Return a group; None in place of torch's marker for "not a member"."""
    return None if isinstance(group, int) else group


def forget_non_members() -> None:
    """Remove the entry that torch registers under its marker for "not a member"."""
    _torch._world.pg_group_ranks.pop(dist.GroupMember.NON_GROUP_MEMBER, None)


# ---- the end of groups -------------------------------------------------------------------------


def destroy(groups: Iterable[ProcessGroup]) -> None:
    """Destroy groups in the order given, and raise the first error once all are destroyed."""
    _end_each(groups, _destroy)


def _destroy(group: ProcessGroup) -> None:
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
    pending = [group for group in groups if is_registered(group)]
    nccl = [group for group in pending if is_nccl(backend_of(group))]
    with contextlib.ExitStack() as ends:  # the last one first, and each also after an error
        ends.callback(_end_each, [one for one in pending if one not in nccl], _destroy)
        ends.callback(_end_each, nccl, _torch._abort_process_group)
        if nccl:
            with _at_once(nccl[0]):
                for group in nccl:
                    group.abort()


def _end_each(groups: Iterable[ProcessGroup], end: Callable[[ProcessGroup], None]) -> None:
    """End groups that torch still has, and raise the first error once all have ended."""
    errors: list[Exception] = []
    for group in groups:
        if not is_registered(group):
            continue  # torch destroyed it together with WORLD
        try:
            end(group)
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


# ---- groups whose members change while the object stays (torch 2.14) ----------------------------

# Such a group is created without members. Each member publishes its handle, reads those of the
# others, and connects: at the creation, and again with other members after a loss. gloo publishes
# addresses below the name of the group, so that members of several groups could not meet: all
# groups that may be reconfigured have one prefix there, and each set of members a number.


def why_not_reconfigured(backend: str) -> str | None:
    """Return why groups of a backend cannot get other members; None if they can."""
    if not since("2.14"):
        return "torch has it since 2.14"
    if uses_torchcomms():
        return "torch creates groups through TorchComms here"
    others = [name for name in single_backends(backend) if name not in {"gloo", *NCCL}]
    return f"backend {others[0]!r} cannot do it" if others else None


_PLACE = "hypercomm/reconfigure/"
_prefix = Patch("PrefixStore")
_here = threading.local()


@contextlib.contextmanager
def in_one_place() -> Iterator[None]:
    """Let members of groups that this thread creates in a `with` block meet in one place."""
    with _prefix.applied(_torch, _prefixed):
        _here.is_set = True
        try:
            yield
        finally:
            _here.is_set = False


def _prefixed(prefix: str, store: Any) -> Any:
    is_ours = getattr(_here, "is_set", False)
    return _prefix.original(_torch)(_PLACE if is_ours else prefix, store)


def reconfigure(
    group: ProcessGroup,
    name: str,
    ranks: Sequence[int],
    *,
    timeout: timedelta | None,
    world: World,
    wait: Wait | None,
) -> None:
    """Give a group these members; each of them calls this.

    Args:
        group: The group of the calling rank.
        name: A new name for the group with these members, the same on all of them.
        ranks: The members, in the order of their numbers in the group.
        timeout: How long they may take to connect; None is torch's default.
        world: The world of the ranks.
        wait: Waits for the handles of the others; None if there are none.
    """
    if not _any(group).supports_reconfigure:
        raise GroupOptionsError(
            f"backend {backend_of(group)!r} of this torch does not support enable_reconfigure=True"
        )
    keys = [f"{name}/handle/{member}" for member in ranks]
    own, store = keys[list(ranks).index(world.rank)], world.store
    store.set(own, _any(group).get_reconfigure_handle())
    world.stale.append(own)
    if wait is not None:
        wait(lambda: store.check(keys) or None)
    handles = [store.get(key).decode() for key in keys]
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    _reconfigure(group, number, handles, timeout)
    _torch._world.pg_group_ranks[group] = _numbers([*ranks])


def isolate(group: ProcessGroup) -> None:
    """Leave the calling rank alone in its group; collectives of the others in it fail."""
    handle = _any(group).get_reconfigure_handle()
    _reconfigure(group, uuid4().int >> 72, [handle], None)


def _reconfigure(
    group: ProcessGroup, number: int, handles: list[str], timeout: timedelta | None
) -> None:
    options = _torch.ReconfigureOptions()
    options.uuid, options.handles = number, handles
    if timeout is not None:
        options.timeout = timeout
    _any(group).reconfigure(options).wait()


def _any(thing: Any) -> Any:
    return thing  # torch before 2.14 has no types for it


# ---- meshes, and the methods of groups that communicate -----------------------------------------


def forget_meshes() -> None:
    """Clear what DTensor remembers of the meshes that it has seen.

    It caches the results of operations with the mesh of their first use, and takes meshes with
    equal ranks and names for the same: once the groups of that mesh are destroyed, its results are
    useless. Each thread has a cache; this clears that of the calling thread.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    remembered: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    remembered.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def keeps_mesh_order(mesh: Any) -> bool:
    """Return whether the groups of a DeviceMesh have its ranks in its order (torch 2.15)."""
    return bool(getattr(mesh, "_preserve_rank_order", False))


def keep_mesh_order(mesh: Any) -> None:
    """Mark a DeviceMesh, before it is compared, as one whose groups have its order."""
    if "_preserve_rank_order" in type(mesh).__annotations__:
        mesh._preserve_rank_order = True


def mesh_of(
    groups: Sequence[ProcessGroup], device_type: str, ranks: torch.Tensor, names: tuple[str, ...]
) -> DeviceMesh:
    """Return a DeviceMesh over existing groups, as `DeviceMesh.from_group` does.

    That method asks the default process group for the rank. A mesh may have the ranks of
    another world, so this function reads the rank from the first group.

    Args:
        groups: The calling rank's group over each dim.
        device_type: The type of the devices.
        ranks: The ranks, in the shape of the mesh.
        names: The name of each dim.
    """
    from torch.distributed import device_mesh

    rank = dist.get_process_group_ranks(groups[0])[groups[0].rank()]
    mesh = device_mesh.DeviceMesh(
        device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank
    )
    mesh._dim_group_names = [group.group_name for group in groups]
    _register_in_mesh(mesh, groups)
    return mesh


def flatten_mesh(mesh: DeviceMesh, dims: Sequence[str], name: str, group: ProcessGroup) -> None:
    """Use an existing group for several dims of a mesh, as `mesh[dims]._flatten(name)` would.

    Args:
        mesh: A mesh that is not part of another.
        dims: Adjacent dims of the mesh, in its order.
        name: Their common name.
        group: Their group.
    """
    mesh._flatten_mapping[name] = part_of_mesh(mesh, dims, name, group)
    _register_in_mesh(mesh, [group])


def part_of_mesh(
    mesh: DeviceMesh, dims: Sequence[str], name: str, group: ProcessGroup
) -> DeviceMesh:
    """Return adjacent dims of a mesh as a mesh of one dim; arguments as for `flatten_mesh`.

    It equals `mesh[dims]._flatten(name)`, which asks the default process group for the rank.
    """
    ranks = torch.tensor(dist.get_process_group_ranks(group))
    part: Any = mesh_of([group], mesh.device_type, ranks, (name,))
    if keeps_mesh_order(mesh):
        keep_mesh_order(part)
    part._layout = _as_one_dim(mesh._get_slice_mesh_layout(tuple(dims)))
    part._root_mesh = mesh
    part._rank_map = mesh._rank_map
    part._flatten_rank_map = mesh._flatten_rank_map
    return part  # type: ignore[no-any-return]


def _register_in_mesh(mesh: Any, groups: Iterable[ProcessGroup]) -> None:
    registry = getattr(mesh, "_pg_registry", {})  # torch 2.11
    registry.update({group.group_name: group for group in groups})


def flattened(mesh: Any) -> dict[str, Any]:
    """Return the flattened dims of a mesh, by name."""
    return dict(mesh._flatten_mapping)


def _as_one_dim(layout: Any) -> Any:
    """Return the layout of a mesh with all of its dims as one, as `DeviceMesh._flatten` does."""
    if hasattr(layout, "collapse"):
        return type(layout)([layout.collapse()])
    joint = layout.coalesce()  # torch 2.10
    return joint.nest() if len(joint) > 1 else joint


_CALLS = {
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "reduce_scatter")},
    **{name: name for name in ("barrier", "monitored_barrier", "send", "recv", "recv_anysource")},
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "gather_single": "gather",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
}


def calls_of_groups() -> dict[str, str]:
    """Return the methods of a ProcessGroup that communicate, and torch.distributed's names."""
    return {method: op for method, op in _CALLS.items() if hasattr(ProcessGroup, method)}
