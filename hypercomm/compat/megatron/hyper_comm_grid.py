"""Implements Megatron's `hyper_comm_grid`: a `HyperCommGrid` with Megatron's private names.

Source: names, signatures and behaviour follow `megatron.core.hyper_comm_grid`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from numbers import Integral
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm import grid
from hypercomm.errors import GroupExistsError, LayoutError, UnknownDimError, WorldSizeError
from hypercomm.grid.arguments import GivenSizes
from hypercomm.layout.parsing import Dims
from hypercomm.process_groups.spec import GroupKey

Key: TypeAlias = "str | tuple[str, tuple[str, ...]]"
"""The dims of a group in reversed grid order, joined by dashes.

The key of a view's group is a pair: the name of the view, and a tuple of the dims in reversed
order.
"""

_BASE_VIEW_NAME = "base"

_new_subgroups: Any = dist.new_subgroups_by_enumeration


class HyperCommGrid(grid.HyperCommGrid):
    """A `hypercomm.HyperCommGrid` whose groups also have Megatron's names, such as "dp-cp".

    Like Megatron's class, this class prefers the environment's WORLD_SIZE to torch.distributed's
    world size. If a unit test has replaced `torch.distributed.new_subgroups_by_enumeration`, the
    replacement creates the groups.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
        ...     group = grid.create_pg(["cp", "dp"])
        ...     list(grid._pgs)
        ['dp-cp']
    """

    def __init__(
        self,
        shape: Iterable[int],
        dim_names: Iterable[str] | None = None,
        rank_offset: int = 0,
        backend: str | None = None,
        **options: Any,
    ) -> None:
        self._given: dict[Key, ProcessGroup | None] = {}
        text = os.environ.get("WORLD_SIZE", "").strip()
        if options.get("world_size") is None and text.isdecimal() and int(text) > 0:
            options["world_size"] = int(text)
        try:
            super().__init__(shape, dim_names, rank_offset, backend, **options)
        except WorldSizeError as error:  # programs search for Megatron's phrase
            raise WorldSizeError(f"Grid shape {shape} is over sized: {error}") from error

    @property
    def _pgs(self) -> Mapping[Key, ProcessGroup | None]:
        """A read-only mapping of the groups without names, by dims in reversed grid order.

        If a mapping is assigned, its groups are added to the groups of the grid, except for groups
        that the grid created.
        """
        own = {_joined(key): group for key, group in self.pgs.items() if key.name is None}
        return MappingProxyType(own | self._given)

    @_pgs.setter
    def _pgs(self, groups: Mapping[Key, ProcessGroup | None]) -> None:
        own = self.pgs.values()
        self._given = {key: group for key, group in groups.items() if group not in own}

    @property
    def _views(self) -> Mapping[str, SimpleNamespace]:
        """The name, shape, dim_names and shared_dims of each view, read-only."""
        return {
            name: SimpleNamespace(
                name=name,
                shape=list(view.layout.shape),
                dim_names=list(view.layout.dim_names),
                shared_dims=list(view.shared_dims),
            )
            for name, view in self._state.table.views.items()
        }

    @staticmethod
    def _order_dims_for(
        dim_names: Iterable[str], dims: str | Iterable[str]
    ) -> tuple[list[str], str]:
        """Return some of the dims in reversed order, as a list and joined by dashes."""
        wanted = [dims] if isinstance(dims, str) else dims
        ordered = [name for name in reversed(list(dim_names)) if name in wanted]
        return ordered, "-".join(ordered)

    def register_view(
        self,
        name: str,
        shape: GivenSizes,
        dim_names: Iterable[str] | None = None,
        shared_dims: Iterable[str] | None = None,
    ) -> None:
        """Add another factorisation of the ranks, like `hypercomm.HyperCommGrid.register_view`.

        Raises:
            LayoutError, UnknownDimError: The arguments are wrong. The messages contain the same
                phrases as Megatron's messages, because programs search for these phrases.
        """
        names = list(dim_names or ())
        shared = list(shared_dims or ())
        called = f"view {name!r}"
        if len(set(shared)) < len(shared):
            raise LayoutError(f"{called} has duplicate shared_dims: {shared}")
        for dim in shared:
            if dim not in self.dim_names:
                known = f"which has {list(self.dim_names)}"
                raise UnknownDimError(
                    f"Shared dim {dim!r} of {called} is not in the base view, {known}"
                )
            if names and dim not in names:
                raise UnknownDimError(
                    f"Shared dim {dim!r} of {called} is not in the view's dim_names, {names}"
                )
        if isinstance(shape, list | tuple) and len(shape) == len(names):
            if any(not isinstance(size, Integral) or size < 1 for size in shape):
                raise LayoutError(f"{called}: shape must be positive ints, got {shape}")
            if math.prod(shape) != self.size:
                needed = f"{called}: shape {shape} needs {math.prod(shape)} ranks"
                raise LayoutError(f"{needed}, but the grid size is {self.size}")
        super().register_view(name, shape, names or None, shared or None)

    def create_pg(
        self, dims: Dims, *more: Dims, view: str | None = None, **options: Any
    ) -> ProcessGroup | None:
        """Create the process groups over some dims, like `hypercomm.HyperCommGrid.create_pg`."""
        new_subgroups: Any = dist.new_subgroups_by_enumeration
        if new_subgroups is _new_subgroups:
            return super().create_pg(dims, *more, view=view, **options)
        found = self._key_in(view, dims, *more)
        key = _joined(found)
        if key in self._given:
            raise GroupExistsError(f"Process group {key!r} has already been created")
        layout = self.layout if found.view is None else self.views[found.view]
        ranks = layout.enumerate_ranks(found.dims[::-1]).tolist()
        self._given[key], _ = new_subgroups(ranks, backend=self.backend, **options)
        return self._given[key]

    def get_pg(
        self, dims: Dims, *more: Dims, name: str | None = None, view: str | None = None
    ) -> ProcessGroup | None:
        """Return an existing process group, like `hypercomm.HyperCommGrid.get_pg`."""
        if self._given and name is None:
            key = _joined(self._key_in(view, dims, *more))
            if key in self._given:
                return self._given[key]
        return super().get_pg(dims, *more, name=name, view=view)

    def _key_in(self, view: str | None, *dims: Dims) -> GroupKey:
        return self.key_of(*dims) if view is None else self.view(view).key_of(*dims)

    def destroy(self) -> None:
        """Destroy the groups that the grid created, and groups that were assigned to `_pgs`."""
        given = self._given
        self._given = {}
        for group in dict.fromkeys(given.values()):
            if isinstance(group, ProcessGroup):
                dist.destroy_process_group(group)
        super().destroy()


def _is_process_group_member(pg: ProcessGroup | int | None) -> bool:
    """Return whether the calling rank is a member of a group that torch returned."""
    return pg is not None and pg is not dist.GroupMember.NON_GROUP_MEMBER


def _joined(key: GroupKey) -> Key:
    ordered = key.dims[::-1]
    return "-".join(ordered) if key.view is None else (key.view, ordered)
