"""A grid's process groups as a torch DeviceMesh, and a DeviceMesh's as those of a grid.

A DeviceMesh numbers its ranks with the LAST dim varying fastest, a grid with the FIRST. Neither
direction creates a process group or communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from hypercomm.errors import GroupOptionsError, LayoutError, OrderError, UnknownDimError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_ordered, as_strings, as_tuple
from hypercomm.layout.groups import Axis, are_nested
from hypercomm.layout.parsing import as_dims
from hypercomm.layout.text import did_you_mean, shown
from hypercomm.process_groups import c10d

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_IN_ORDER = "_hypercomm_in_order"
"""The mark of a mesh whose groups have its ranks in its order: on every rank alike."""

MeshDims = tuple[tuple[str, ...], ...]
"""The dims of the grid that each dim of a mesh spans, in the mesh's order."""


def read_dims(layout: RankLayout, dims: Sequence[str | Iterable[str]]) -> MeshDims:
    """Check the dims of a mesh: one name for each, or several that become one; default: all.

    Raises:
        UnknownDimError, LayoutError: As for `RankLayout.order_dims`, or a dim is used twice.
        OrderError: Several dims are in an order in which no process group has its ranks.

    Example:
        >>> layout = RankLayout([2, 2, 2], ["tp", "cp", "dp"])
        >>> read_dims(layout, ["dp+cp", "tp"])
        (('dp', 'cp'), ('tp',))
        >>> read_dims(layout, [])
        (('dp',), ('cp',), ('tp',))
    """
    given = dims or tuple(reversed(layout.dim_names))
    read = tuple(
        as_dims(item if isinstance(item, str) else as_ordered(item, "a dim of a mesh"))
        for item in given
    )
    layout.order_dims([name for names in read for name in names])  # refuses what is used twice
    for names in read:
        ordered = tuple(reversed(layout.order_dims(names)))
        if names != ordered:
            raise OrderError(
                f"in a mesh dim over {names} {names[-1]!r} would vary fastest, but a process group "
                f"has its ranks in the layout's order; write {ordered}"
            )
    labels = [mesh_dim_name(names) for names in read]
    if len(set(labels)) < len(labels):
        raise LayoutError(f"the dims of a mesh must have different names, got {labels}")
    return read


def check_device_type(device_type: object) -> None:
    """Refuse what cannot be the name of a kind of devices."""
    if device_type is not None and not isinstance(device_type, str):
        raise GroupOptionsError(
            f"device_type must be a name such as 'cuda', got {shown(device_type)}"
        )


def read_flatten(
    dims: MeshDims, flatten: Mapping[str, Sequence[str]] | None
) -> dict[str, tuple[str, ...]]:
    """Check which dims of a mesh are to be known together, by the name that they then have.

    Raises:
        LayoutError: It is no mapping of names to dims, a name is taken, or dims are not side by
            side.
        UnknownDimError: A dim is not one of the mesh's.
        OrderError: They are in another order than the mesh's.

    Example:
        >>> dims = (("dp_shard",), ("cp",), ("tp",))
        >>> read_flatten(dims, {"dp_shard_cp": ["dp_shard", "cp"]})
        {'dp_shard_cp': ('dp_shard', 'cp')}
    """
    if flatten is None:
        return {}
    if not isinstance(flatten, Mapping):
        raise LayoutError(
            f"flatten must map names to dims, as in {{'dp_cp': ['dp', 'cp']}}, got {shown(flatten)}"
        )
    labels = [mesh_dim_name(names) for names in dims]
    read: dict[str, tuple[str, ...]] = {}
    for name, given in flatten.items():
        if not isinstance(name, str) or not name:
            raise LayoutError(f"a name in flatten must be a string, got {shown(name)}")
        if name in labels:
            raise LayoutError(f"flatten cannot name {name!r} what is a dim of the mesh, {labels}")
        read[name] = _side_by_side(name, given, labels)
    return read


def _side_by_side(name: str, given: object, labels: Sequence[str]) -> tuple[str, ...]:
    what = f"flatten[{name!r}]"
    parts = as_strings(as_dims(given if isinstance(given, str) else as_tuple(given, what)), what)
    for part in parts:
        if part not in labels:
            raise UnknownDimError(
                f"flatten[{name!r}] names {part!r}, and the mesh has {labels}"
                f"{did_you_mean(part, labels)}"
            )
    places = [labels.index(part) for part in parts]
    if not places or len(set(places)) < len(places):
        raise LayoutError(f"flatten[{name!r}] must name dims, each once, got {shown(given)}")
    if places != sorted(places):
        ordered = [labels[place] for place in sorted(places)]
        raise OrderError(f"flatten[{name!r}] is not in the mesh's order: write {ordered}")
    if places[-1] - places[0] >= len(places):
        raise LayoutError(f"flatten[{name!r}] must name dims side by side in {labels}")
    return parts


def together(dims: MeshDims, parts: Sequence[str]) -> tuple[str, ...]:
    """Return the dims of the grid that some dims of a mesh span."""
    spans = {mesh_dim_name(names): names for names in dims}
    return tuple(name for part in parts for name in spans[part])


def mesh_dim_name(names: Sequence[str]) -> str:
    """Name a dim of a mesh after the dims of the grid that it spans: "dp_cp"."""
    return "_".join(names)


def as_mesh(
    layout: RankLayout,
    dims: MeshDims,
    rank: int,
    groups: Sequence[ProcessGroup],
    device_type: str,
) -> DeviceMesh:
    """Make a mesh of the groups of `rank`, one for each of its dims."""
    from torch.distributed.device_mesh import DeviceMesh

    flat = [name for names in dims for name in names]
    here = {name: at for name, at in layout.coords(rank).items() if name not in flat}
    shape = [int(np.prod([layout.size_of(name) for name in names])) for names in dims]
    ranks = layout.select(**here).enumerate_ranks(flat).reshape(shape)
    mesh = DeviceMesh.from_group(
        list(groups),
        device_type,
        mesh=torch.from_numpy(ranks),
        mesh_dim_names=tuple(map(mesh_dim_name, dims)),
    )
    setattr(mesh, _IN_ORDER, True)
    if not _is_ascending(ranks):
        c10d.keep_mesh_order(mesh)  # its slices have the order, too
    return mesh


def _is_ascending(ranks: NDArray[np.int64]) -> bool:
    """Whether the ranks of a mesh ascend along each dim, as torch sorts them."""
    return all((np.diff(ranks, axis=axis) > 0).all() for axis in range(ranks.ndim))


def read_mesh(mesh: DeviceMesh) -> tuple[RankLayout, dict[str, ProcessGroup] | None]:
    """Read a mesh as a layout and the calling rank's group over each dim; None on a rank outside.

    Raises:
        LayoutError: The mesh has no dim names, or its process groups are not its lines.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(f"from_device_mesh() takes a DeviceMesh, got {mesh!r}")
    names = mesh.mesh_dim_names
    if not names:
        raise LayoutError(
            f"{mesh} has no dim names; make it with init_device_mesh(..., mesh_dim_names=(...))"
        )
    ranks = mesh.mesh.numpy()
    in_order = getattr(mesh, _IN_ORDER, False) or c10d.keeps_mesh_order(mesh)
    if ranks.ndim > 1 and not in_order:
        _check_ascending(ranks, names)
    layout = _layout_of(ranks, names)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return layout, None
    groups = {name: mesh.get_group(name) for name in names}
    for name, group in groups.items():
        found, wanted = dist.get_process_group_ranks(group), layout.groups(name).of(dist.get_rank())
        if tuple(found) != wanted:
            raise LayoutError(
                f"the process group of mesh dim {name!r} has ranks {found}, but the mesh has "
                f"{list(wanted)} there{_SORTED if found == sorted(wanted) else ''}"
            )
    return layout, groups


_SORTED = (
    "; torch sorts the ranks of the groups that it makes for a mesh: give it ascending ranks, or "
    "preserve_rank_order=True (torch 2.15), or make it as grid.device_mesh() of a grid over a "
    "layout with ranks=, whose groups keep the order"
)


def _check_ascending(ranks: NDArray[np.int64], names: Sequence[str]) -> None:
    """Refuse a mesh whose groups cannot be its lines: on every rank, whichever lines it sees.

    A mesh of one dim is one line, which all of its ranks see.
    """
    for axis, name in enumerate(names):
        if not (np.diff(ranks, axis=axis) > 0).all():
            lines = np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis])
            line = lines[(np.diff(lines, axis=1) < 0).any(axis=1)][0]
            raise LayoutError(
                f"the ranks of the mesh are permuted: {shown(ranks.tolist())}, so that dim "
                f"{name!r} has {shown(line.tolist())} somewhere{_SORTED}"
            )


def _layout_of(ranks: NDArray[np.int64], names: Sequence[str]) -> RankLayout:
    """Find the numbering of a mesh: a stride for each dim, or the list of its ranks."""
    first = int(ranks.flat[0])
    strides = [
        int(ranks.take(1, axis=axis).flat[0]) - first if size > 1 else 0
        for axis, size in enumerate(ranks.shape)
    ]
    axes = list(reversed(range(ranks.ndim)))  # the last one is the fastest, unless another is
    axes.sort(key=lambda axis: _step(strides, axis))
    made = first + sum(
        stride * index for stride, index in zip(strides, np.indices(ranks.shape), strict=True)
    )
    nested = are_nested(Axis(ranks.shape[axis], strides[axis]) for axis in axes)
    if not nested or not np.array_equal(made, ranks):
        shape = list(reversed(ranks.shape))
        return RankLayout(shape, list(reversed(names)), ranks=ranks.ravel().tolist())
    return RankLayout(
        [ranks.shape[axis] for axis in axes],
        [names[axis] for axis in axes],
        rank_offset=first,
        strides=[max(strides[axis], 1) for axis in axes],
    )


def _step(strides: Sequence[int], axis: int) -> int:
    """The stride of an axis; one of size 1 counts like the next one inside of it."""
    inner = [stride for stride in strides[axis:] if stride]
    return inner[0] if inner else 0
