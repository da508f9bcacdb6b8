"""Converts the process groups of a grid to a torch DeviceMesh, and a DeviceMesh to a grid.

A DeviceMesh numbers its ranks with the LAST dim varying fastest, a grid with the FIRST.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from weakref import ref

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hypercomm.errors import LayoutError
from hypercomm.grid.dims import GridDims
from hypercomm.grid.state import GridState
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_ordered
from hypercomm.layout.parsing import as_dims
from hypercomm.layout.text import short_repr
from hypercomm.layout.views import Views
from hypercomm.process_groups import torch_internals as torchdist

_IN_ORDER = "_hypercomm_in_order"
"""The attribute that marks meshes whose groups keep the order of the mesh's ranks."""

_made: list[_Made] = []
"""The meshes that the grids of this process have made."""

_lock = threading.Lock()
"""Held while `_made` is changed."""

_SORTED = (
    "; torch sorts the ranks of the groups that it makes for a mesh: give the mesh ascending "
    "ranks, pass preserve_rank_order=True (torch 2.15), or make the mesh with grid.device_mesh() "
    "of a grid whose layout has ranks=, because its groups keep the order"
)


# ---- from a grid to a mesh ----------------------------------------------------------------------


def as_mesh(
    state: GridState,
    view: str | None,
    dims: Sequence[str | Iterable[str]],
    device_type: str | None,
    flatten: Mapping[str, Sequence[str]] | None,
) -> DeviceMesh:
    """Return the mesh for `HyperCommGrid.device_mesh`, which documents the arguments."""
    layout = state.table.views.layout_of(view)
    spans = read_dims(state.table.views, view, dims)
    joint = read_flatten(tuple(spans), flatten)
    here = layout.coords(state.table.rank())  # raises if the rank is not in the layout
    groups = [GridDims(state, view, names).group for names in spans.values()]
    used = [name for names in spans.values() for name in names]
    others = {name: at for name, at in here.items() if name not in used}
    shape = [layout.size_of(names) for names in spans.values()]
    ranks = layout.select(**others).enumerate_ranks(used).reshape(shape)
    device_type = device_type or torchdist.device_type(groups[0])
    mesh = torchdist.mesh_of(groups, device_type, torch.from_numpy(ranks), tuple(spans))
    setattr(mesh, _IN_ORDER, True)
    if not _is_ascending(ranks):
        torchdist.keep_mesh_order(mesh)  # torch would sort the ranks of the mesh's slices
    named = dict(zip(spans, groups, strict=True))
    for name, parts in joint.items():
        names = tuple(dim for part in parts for dim in spans[part])
        named[name] = GridDims(state, view, names).group
        torchdist.flatten_mesh(mesh, parts, name, named[name])
    _check_equal_meshes(mesh, named)
    state.gave_meshes = True
    return mesh


@attrs.frozen
class _Made:
    """A mesh of a grid. This object does not keep the mesh alive.

    Attributes:
        mesh: The mesh.
        flat: The flattened dims of the mesh, by name.
        groups: The group of each dim, by name.
    """

    mesh: ref[DeviceMesh]
    flat: dict[str, ref[DeviceMesh]]
    groups: dict[str, ref[ProcessGroup]]

    def part(self, name: str) -> DeviceMesh | None:
        """Return one dim as a mesh, or None if the dim or the mesh no longer exists."""
        whole, group = self.mesh(), self.groups[name]() if name in self.groups else None
        if whole is None or group is None:
            return None
        return (
            self.flat[name]()
            if name in self.flat
            else torchdist.part_of_mesh(whole, [name], name, group)
        )


def _check_equal_meshes(mesh: DeviceMesh, groups: Mapping[str, ProcessGroup]) -> None:
    """Raise if torch would confuse equal dims with different groups, else register the mesh.

    DTensor caches the result of an operation with the first mesh that used the operation, and
    reuses the result for all equal meshes. Results on a second mesh would then be tensors of the
    first mesh, and would use the groups of the first mesh.
    """
    flat = {name: ref(one) for name, one in torchdist.flattened(mesh).items()}
    new = _Made(ref(mesh), flat, {name: ref(group) for name, group in groups.items()})
    with _lock:
        _made[:] = [one for one in _made if one.mesh() is not None]
        others = [*_made]
        _made.append(new)
    for name, group in groups.items():
        for other in others:
            known = other.groups[name]() if name in other.groups else None
            if known in {None, group} or not torchdist.is_registered(known):
                continue
            if other.part(name) == new.part(name):
                with _lock:
                    _made.remove(new)
                raise LayoutError(
                    f"dim {name!r} of {mesh} equals a dim of another mesh, but has different "
                    f"process groups; DTensor does not distinguish equal dims, so it could use the "
                    f"wrong groups; use another name, let the meshes share groups (through "
                    f"shared_dims= of a view, or share='identical' in one grid or GridSet, where a "
                    f"grid uses the groups of those before it), or destroy the other grid first"
                )


def read_dims(
    views: Views, view: str | None, dims: Sequence[str | Iterable[str]]
) -> dict[str, tuple[str, ...]]:
    """Return the names of the dims of a mesh, and the dims of the layout that each one spans.

    Args:
        views: The base layout and its views.
        view: The view whose dims these are, or None for the base layout.
        dims: The dims of the mesh, as for `HyperCommGrid.device_mesh`.

    Raises:
        UnknownDimError, LayoutError: See `RankLayout.order_dims`.
        LayoutError: A dim is used twice, or the dims that form one mesh dim are not in the reverse
            order of the layout.

    Example:
        >>> views = Views(RankLayout([2, 2, 2], ["tp", "cp", "dp"]))
        >>> read_dims(views, None, ["dp+cp", "tp"])
        {'dp_cp': ('dp', 'cp'), 'tp': ('tp',)}
        >>> read_dims(views, None, [])
        {'dp': ('dp',), 'cp': ('cp',), 'tp': ('tp',)}
    """
    dim_names = views.layout_of(view).dim_names
    read = [
        as_dims(item if isinstance(item, str) else as_ordered(item, "a dim of a mesh"))
        for item in dims or tuple(reversed(dim_names))
    ]
    views.ordered(read, view)  # raises if a dim is unknown or is used twice
    if len(read) == 1 and len(read[0]) == len(dim_names) > 1 and not isinstance(dims[0], str):
        raise LayoutError(
            f"{dims[0]} is one dim of the mesh, over all dims of the grid; write "
            f"device_mesh{read[0]} for a mesh of {len(dim_names)} dims, or "
            f"device_mesh({'+'.join(reversed(dim_names))!r}) for a mesh of one dim"
        )
    for names in read:
        ordered = tuple(reversed(views.ordered(names, view)))
        if names != ordered:
            raise LayoutError(
                f"the ranks of a mesh dim over {names} would have {names[-1]!r} as the fastest "
                f"dim, but the ranks of a process group have the order of the layout; write "
                f"{ordered}"
            )
    labels = ["_".join(names) for names in read]
    if len(set(labels)) < len(labels):
        raise LayoutError(f"the dims of a mesh must have different names, got {labels}")
    return dict(zip(labels, read, strict=True))


def read_flatten(
    labels: tuple[str, ...], flatten: Mapping[str, Sequence[str]] | None
) -> dict[str, tuple[str, ...]]:
    """Return the dims of a mesh that each name in `flatten` joins.

    Raises:
        LayoutError: `flatten` does not map new names to adjacent dims of the mesh.

    Example:
        >>> read_flatten(("dp_shard", "cp", "tp"), {"dp_shard_cp": ["dp_shard", "cp"]})
        {'dp_shard_cp': ('dp_shard', 'cp')}
    """
    read = {name: as_dims(given) for name, given in (flatten or {}).items()}
    for name, parts in read.items():
        first = labels.index(parts[0]) if parts and parts[0] in labels else 0
        if not parts or name in labels or parts != labels[first : first + len(parts)]:
            raise LayoutError(
                f"flatten= must map new names to adjacent dims of the mesh {labels}, in this "
                f"order, got {name!r}: {parts}"
            )
    return read


# ---- from a mesh to a grid ----------------------------------------------------------------------


def read_mesh(mesh: DeviceMesh) -> tuple[RankLayout, dict[str, ProcessGroup] | None]:
    """Return a mesh's layout, and the calling rank's group over each dim.

    The groups are None if the calling rank is not in the mesh.

    Raises:
        LayoutError: The mesh has no dim names, or torch has sorted the ranks of its groups.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise LayoutError(
            f"{mesh} has no dim names; make it with init_device_mesh(..., mesh_dim_names=(...))"
        )
    ranks = mesh.mesh.numpy()
    in_order = getattr(mesh, _IN_ORDER, False) or torchdist.keeps_mesh_order(mesh)
    if not (in_order or _is_ascending(ranks)):
        raise LayoutError(
            f"the ranks of the mesh are permuted: {short_repr(ranks.tolist())}{_SORTED}"
        )
    layout = RankLayout(ranks.shape[::-1], names[::-1], ranks=ranks.ravel().tolist())
    if mesh.get_coordinate() is None:
        return layout, None
    return layout, {name: mesh.get_group(name) for name in names}


def _is_ascending(ranks: NDArray[np.int64]) -> bool:
    """Return whether the ranks ascend along each dim, as in the groups that torch sorts."""
    return all((np.diff(ranks, axis=axis) > 0).all() for axis in range(ranks.ndim))
