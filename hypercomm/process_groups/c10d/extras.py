"""What else of torch's is private: DTensor's memory, backward threads, symmetric memory, local
tensors.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, SimulationError
from hypercomm.process_groups.c10d.private_names import (
    BASES,
    CLEAR_CACHE,
    DISPATCHER,
    IS_STASHED,
    LOCAL_TENSORS,
    MESH_FLATTENED,
    MESH_ORDER,
    OF_THREADS,
    STASH,
    SYMMETRIC,
    UNSTASH,
    private,
)
from hypercomm.process_groups.c10d.self_checks import Replaced

GroupsLike = Callable[[dist.ProcessGroup], Iterable[Sequence[int]]]


def forget_meshes() -> None:
    """Let DTensor forget the meshes that it has seen.

    It remembers what operations give, with the mesh of their first time, and takes meshes with
    equal ranks and names for one: after the groups of that mesh are gone, none works. It remembers
    for each thread apart, so that threads other than the calling one do not forget.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    if private.works(DISPATCHER):
        remembered = private.get(DISPATCHER).sharding_propagator.propagate_op_sharding
        getattr(remembered, "cache", remembered).cache_clear()
    private.call(CLEAR_CACHE)


def keeps_mesh_order(mesh: Any) -> bool:
    """Tell whether the groups of a DeviceMesh have its ranks in its order (torch 2.15)."""
    return private.works(MESH_ORDER) and bool(mesh._preserve_rank_order)


def keep_mesh_order(mesh: Any) -> None:
    """Say of a DeviceMesh, before anybody compares it, that its groups have its order."""
    if private.works(MESH_ORDER):
        mesh._preserve_rank_order = True


def flatten_mesh(mesh: Any, dims: Sequence[str], name: str, group: ProcessGroup) -> None:
    """Make a group that exists the one of several dims of a mesh, as `mesh[dims]._flatten(name)`.

    Args:
        mesh: A mesh that is no part of another.
        dims: Some of its dims that are side by side, in its order.
        name: What they are called together.
        group: Their group.

    Raises:
        CreationError: This torch has other meshes than those known.
    """
    from torch.distributed import device_mesh

    if not private.works(MESH_FLATTENED):
        raise CreationError(
            "flatten= is not for this torch, whose DeviceMesh has changed; name dims together, as "
            "in grid.device_mesh(('dp', 'cp')), whose dim is 'dp_cp'"
        )
    meshes: Any = device_mesh
    part = mesh[tuple(dims)]
    of_one = meshes.DeviceMesh.from_group(
        group, mesh.device_type, mesh=part.mesh.flatten(), mesh_dim_names=(name,)
    )
    if hasattr(mesh, "_flatten_mapping"):
        more = {"preserve_rank_order": True} if keeps_mesh_order(mesh) else {}
        flat = meshes.DeviceMesh(
            mesh.device_type,
            _layout=meshes._MeshLayout([part._layout.collapse()]),
            _rank_map=mesh._rank_map,
            mesh_dim_names=(name,),
            _root_mesh=mesh,
            _init_backend=False,
            **more,
        )
        flat._dim_group_names = of_one._dim_group_names
        mesh._flatten_mapping[name] = flat
        return
    known = meshes._mesh_resources
    known.child_to_root_mapping[of_one] = mesh
    known.root_to_flatten_mapping.setdefault(mesh, {})[name] = of_one
    places = tuple(mesh.mesh_dim_names.index(dim) for dim in dims)
    known.flatten_name_to_root_dims.setdefault(mesh, {})[name] = places


def tell_backward(key: str) -> None:
    """Let the threads of the backward passes that this thread starts from now on know a key."""
    if _can_tell_backward():
        private.get(STASH)(key, None)


def stop_telling_backward(key: str) -> None:
    """End what `tell_backward` began, if that was in this thread."""
    if was_told_backward(key):
        private.get(UNSTASH)(key)


def was_told_backward(key: str) -> bool:
    """Tell whether this thread, or the one that started its backward pass, knows a key."""
    return _can_tell_backward() and bool(private.get(IS_STASHED)(key))


def _can_tell_backward() -> bool:
    return all(map(private.works, OF_THREADS))


def symmetric_memory(size: int, group: ProcessGroup) -> tuple[torch.Tensor | None, Any]:
    """Allocate `size` bytes that every rank of a group can read, with the handle of their meeting.

    (None, None) where this torch or this device cannot do it.
    """
    symmetric = private.get(SYMMETRIC) if torch.cuda.is_available() else None
    if symmetric is None:
        return None, None
    try:
        enable = getattr(symmetric, "enable_symm_mem_for_group", None)
        if enable is not None and not hasattr(enable, "__deprecated__"):  # newer ones need it not
            enable(group.group_name)
        buffer = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda"))
        return buffer, symmetric.rendezvous(buffer, group)
    except RuntimeError:  # the ranks do not share NVLink
        return None, None


# ---- all ranks in one process -------------------------------------------------------------------


_COLLECTIVES = {
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "scatter_", "alltoall_"),
    *("alltoall_base_", "_allgather_base_", "allgather_into_tensor_coalesced_"),
    *("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "barrier"),
    "monitored_barrier_",
}
"""Those of torch's own that are right once they know the groups; ours are in `LocalTensors`."""

_finding_groups = Replaced("_prepare_collective_groups")


@contextlib.contextmanager
def local_tensors(world_size: int, groups_like: GroupsLike) -> Iterator[LocalTensors]:
    """Give each tensor of a `with` block a shard for each rank of the fake world that is there.

    Args:
        world_size: The number of ranks.
        groups_like: Returns the ranks of every group of the kind that a process group is of.

    Raises:
        CreationError: This torch cannot do it.
        SimulationError: Some other code does it already.
    """
    torch_s = private.get(LOCAL_TENSORS)
    if torch_s is None:
        due = LOCAL_TENSORS.is_due()
        why = private.why_not(LOCAL_TENSORS) if due else "is there from torch 2.10 on"
        raise CreationError(
            f"torch {torch.__version__} has no local ranks: {LOCAL_TENSORS} {why}; use "
            f"hypercomm.testing.run_ranks, whose ranks are processes, or another release of torch"
        )
    if torch_s.local_tensor_mode() is not None:
        raise SimulationError(
            "torch's LocalTensorMode is entered already; leave it before local_ranks(), which "
            "enters one of its own"
        )
    local = LocalTensors(torch_s, world_size, groups_like)
    with _finding_groups.by(torch_s._c10d, local.find_groups), local.mode:
        yield local


class _Group:
    """Stands where torch's arithmetic has the first rank of a group: adding a position to it
    looks the member up, so that groups need not look like the lines of a mesh.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    def __add__(self, position: int) -> int:
        return self._ranks[position]


class LocalTensors:
    """torch's LocalTensorMode, told the groups, and mended where its numbers are not right.

    It takes all groups for lines of one mesh, and from one that it sees infers the others. Before
    2.15 a broadcast mistakes positions for ranks, and in all releases the list form of all-gather
    gives every rank the tensors of the last group.

    Args:
        torch_s: Its module.
        world_size: The number of ranks.
        groups_like: As for `local_tensors`.

    Attributes:
        mode: What is entered.
    """

    def __init__(self, torch_s: Any, world_size: int, groups_like: GroupsLike) -> None:
        self._torch_s = torch_s
        self._groups_like = groups_like
        self._answers = len(torch_s._c10d._prepare_collective_groups(dist.group.WORLD))
        base = torch_s.LocalTensorMode
        self._dispatch: Callable[..., Any] = base.__torch_dispatch__

        def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "c10d" in func.namespace:  # functional ones have others
                return self._communicate(func, types, args, kwargs or {})
            return self._dispatch(mode, func, types, args, kwargs)

        ours = {
            "__torch_dispatch__": dispatch,
            "_patch_dist": _do_nothing,  # from 2.14 on, get_rank() would be no int in the block
            "_unpatch_dist": _do_nothing,
        }
        self.mode = type("LocalRanksMode", (base,), ours)(world_size)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Make ordinary tensors within a `with` block."""
        pause: contextlib.AbstractContextManager[None] = self.mode.disable()
        return pause

    def join(self, shards: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Make a tensor of a shard for each rank."""
        tensor: torch.Tensor = self._torch_s.LocalTensor(dict(shards))
        return tensor

    def shards_of(self, tensor: Any) -> Mapping[int, torch.Tensor] | None:
        """Return the shards of a tensor, by rank; None for one that has none."""
        if not isinstance(tensor, self._torch_s.LocalTensor):
            return None
        return dict(sorted(tensor._local_tensors.items()))

    def find_groups(self, boxed: Any) -> tuple[Any, ...]:
        """Answer in place of torch's own guess: the positions in a group, and all groups."""
        groups = self._groups_of(boxed)
        found = range(len(groups[0])), [_Group(ranks) for ranks in groups], 0
        return found[: self._answers]  # the smallest rank is not asked for since 2.15

    def _groups_of(self, boxed: Any) -> list[Sequence[int]]:
        group = boxed if isinstance(boxed, dist.ProcessGroup) else dist.ProcessGroup.unbox(boxed)
        return list(self._groups_like(group))

    def _communicate(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        for tensor in _tensors_in([*args, *kwargs.values()]):
            if type(tensor) in {torch.Tensor, torch.nn.Parameter}:
                raise SimulationError(
                    f"{func} is given a tensor that all ranks have in common, of shape "
                    f"{tuple(tensor.shape)}: it was made outside of the local_ranks() block, or "
                    f"within each(), or holds objects; make tensors in the block, or with each()"
                )
        ours: dict[str, Callable[..., Any]] = {
            "allgather_": self._all_gather,
            "reduce_": self._reduce,
            "reduce_scatter_": self._reduce_scatter,
        }
        if func.namespace == "c10d" and name in ours:
            return ours[name](*args, **kwargs)
        if func.namespace != "_c10d_functional" and name not in _COLLECTIVES:
            raise SimulationError(
                f"{func} does not work on local ranks: not all ranks do the same in it; use a "
                f"collective in which all do, or hypercomm.testing.run_ranks, whose ranks are "
                f"processes"
            )
        if name == "alltoall_base_" and any(len(set(sizes)) > 1 for sizes in args[3:5]):
            raise SimulationError(
                f"all_to_all_single with split sizes {args[4]} does not work on local ranks, "
                f"where all ranks give the same sizes; give equal ones, or none"
            )
        return self._dispatch(self.mode, func, types, args, kwargs)

    def _all_gather(
        self, outputs: Any, inputs: Any, boxed: Any, *_: object, **__: object
    ) -> tuple[Any, Any]:
        shards = {rank: shard.clone() for rank, shard in inputs[0]._local_tensors.items()}
        for ranks in self._groups_of(boxed):
            for member, output in zip(ranks, outputs[0], strict=True):
                for rank in ranks:
                    output._local_tensors[rank].copy_(shards[member])
        return outputs, self._done(inputs[0], boxed)

    def _reduce(
        self, tensors: Any, boxed: Any, op: Any, root: int, *_: object, **__: object
    ) -> Any:
        shards = self._reduced(tensors[0], boxed, op)
        for ranks in self._groups_of(boxed):
            tensors[0]._local_tensors[ranks[root]].copy_(shards[ranks[root]])
        return self._done(tensors[0], boxed)

    def _reduce_scatter(
        self, outputs: Any, inputs: Any, boxed: Any, op: Any, *_: object, **__: object
    ) -> tuple[Any, Any]:
        reduced = [self._reduced(tensor, boxed, op) for tensor in inputs[0]]
        for ranks in self._groups_of(boxed):
            for rank, shards in zip(ranks, reduced, strict=True):
                outputs[0]._local_tensors[rank].copy_(shards[rank])
        return outputs, self._done(outputs[0], boxed)

    def _reduced(self, tensor: Any, boxed: Any, op: Any) -> Mapping[int, torch.Tensor]:
        """All-reduce a copy of a tensor; return its shards."""
        copy = self.join({rank: shard.clone() for rank, shard in tensor._local_tensors.items()})
        self._torch_s._c10d._local_all_reduce_([copy], boxed, op)
        shards: Mapping[int, torch.Tensor] = copy._local_tensors  # type: ignore[attr-defined]
        return shards

    def _done(self, tensor: Any, boxed: Any) -> Any:
        """What a collective returns to be waited for."""
        return self._torch_s._c10d._local_barrier(tensor, boxed, [])


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _do_nothing(*_: object, **__: object) -> None:
    pass


_CALLS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "gather": "gather",
    "gather_single": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv_anysource",
}


def calls_of_groups() -> dict[str, str]:
    """Return the methods of a ProcessGroup that communicate, and torch.distributed's names."""
    found = {method: op for method, op in _CALLS.items() if hasattr(ProcessGroup, method)}
    if private.works(BASES):
        found["_allgather_base"] = "all_gather_into_tensor"
        found["_reduce_scatter_base"] = "reduce_scatter_tensor"
    return found
