"""Megatron's `hyper_comm_grid`: the core class, under the private names that its callers use.

Source: names, signatures and behaviour follow `megatron.core.hyper_comm_grid`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm import grid
from hypercomm.compat import public_groups
from hypercomm.errors import CreationError, GroupExistsError, GroupOptionsError
from hypercomm.layout import RankLayout
from hypercomm.layout.parsing import Dims, as_dims
from hypercomm.layout.views import BASE as _BASE_VIEW_NAME
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.reshape import Reshaped
from hypercomm.process_groups.spec import GroupKey

Key: TypeAlias = "str | tuple[str, tuple[str, ...]]"
"""Dims in reversed grid order, joined by dashes; of a view, its name and the dims."""


@attrs.define
class _RankViewSpec:
    """A view as Megatron has it; lists of its own, so that a caller may change them."""

    name: str
    shape: list[int]
    dim_names: list[str]
    shared_dims: list[str]


def _is_process_group_member(pg: ProcessGroup | None) -> bool:
    """Tell whether the calling rank is in a group that was created."""
    return c10d.as_member(pg) is not None


class HyperCommGrid(grid.HyperCommGrid):
    """`hypercomm.HyperCommGrid`, whose groups can also be looked up under Megatron's joined names.

    As in Megatron, the environment's WORLD_SIZE wins over torch.distributed. Where torch has no
    default group, or somebody has put another function in its place, groups are created by
    `torch.distributed.new_subgroups_by_enumeration`.

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
        self._others: dict[Key, ProcessGroup | None] = {}
        if options.get("world_size") is None and "WORLD_SIZE" in os.environ:
            options["world_size"] = _world_size_of_the_environment()
        super().__init__(shape, dim_names, rank_offset, backend, **options)

    # ---- views --------------------------------------------------------------------------------

    @property
    def _views(self) -> dict[str, _RankViewSpec]:
        """The grid's own factorisation, under "base", and its views; a copy."""
        base = _RankViewSpec(_BASE_VIEW_NAME, list(self.shape), list(self.dim_names), [])
        views = {
            name: _RankViewSpec(
                name, list(view.layout.shape), list(view.layout.dim_names), list(view.shared_dims)
            )
            for name, view in self._state.views.items()
        }
        return {_BASE_VIEW_NAME: base, **views}

    def _resolve_view(self, view: str | None) -> _RankViewSpec:
        """Return a view, or the grid's own factorisation."""
        name = _BASE_VIEW_NAME if view is None else view
        self._state.views.layout_of(name)  # which says what is wrong with it
        return self._views[name]

    # ---- enumerations -------------------------------------------------------------------------

    def _gen_rank_enum_for(
        self, shape: list[int], dim_names: list[str], dims: Iterable[str]
    ) -> list[list[int]]:
        """Enumerate groups of another factorisation, the last of `dims` varying fastest."""
        layout = RankLayout(shape, dim_names, self.rank_offset)
        return layout.enumerate_ranks(dims).tolist()  # type: ignore[no-any-return]

    def _order_dims_for(
        self, dim_names: list[str], dims: str | Iterable[str]
    ) -> tuple[list[str], str]:
        """Return dims in the reversed order of `dim_names`, and the same joined by dashes."""
        return _backwards(RankLayout([1] * len(dim_names), dim_names), dims)

    def _order_dims_for_view(
        self, view: _RankViewSpec, dims: str | Iterable[str]
    ) -> tuple[list[str], str]:
        """Return dims in the reversed order of a view, and the same joined by dashes."""
        return _backwards(self._state.views.layout_of(view.name), dims)

    def _canonical_pg_key_and_enum_view(
        self, view: _RankViewSpec, ordered_dims: list[str]
    ) -> tuple[Key, _RankViewSpec, list[str]]:
        """Return the key of a group, the view that enumerates it, and its dims in that order."""
        if view.name == _BASE_VIEW_NAME or not set(ordered_dims) <= set(view.shared_dims):
            return self._key_in(view, ordered_dims), view, ordered_dims
        base = self._views[_BASE_VIEW_NAME]
        ordered, key = self._order_dims_for(base.dim_names, ordered_dims)
        return key, base, ordered

    @staticmethod
    def _key_in(view: _RankViewSpec, ordered_dims: list[str]) -> Key:
        if view.name == _BASE_VIEW_NAME:
            return "-".join(ordered_dims)
        return view.name, tuple(ordered_dims)

    @staticmethod
    def _is_base_pg_key(key: Key) -> bool:
        """Tell whether a key is one of the grid's own dims."""
        return isinstance(key, str)

    # ---- process groups -----------------------------------------------------------------------

    def create_pg(
        self, dims: Dims, *more: Dims, view: str | None = None, **options: Any
    ) -> ProcessGroup | None:
        """Create the process groups over some dims, as `hypercomm.HyperCommGrid` does."""
        dims = _as_dims(dims, more)
        key, spec, ordered = self._asked(dims, view)
        name = options.get("name")
        if key in self._others and name is None:
            raise GroupExistsError(
                f"Process group {dims!r} has already been created, or set; get it with get_pg()"
            )
        mocked = public_groups.is_mocked()
        if not mocked and not (public_groups.is_all_there_is() and dist.is_initialized()):
            return super().create_pg(dims, view=view, **options)
        if name is not None:
            raise GroupOptionsError(
                f"name={name!r} is for groups of a job, and torch.distributed is mocked here; "
                f"create the group over {dims!r} without a name"
            )
        ranks = self._gen_rank_enum_for(spec.shape, spec.dim_names, ordered)
        new_subgroups: Any = dist.new_subgroups_by_enumeration
        self._others[key], _ = new_subgroups(ranks, backend=self.backend, **options)
        return self._others[key]

    def ensure_pg(
        self, dims: Dims, *more: Dims, view: str | None = None, **options: Any
    ) -> ProcessGroup | None:
        """Create a process group on the first call, as `hypercomm.HyperCommGrid` does."""
        dims = _as_dims(dims, more)
        if self._others and options.get("name") is None:
            key, _, _ = self._asked(dims, view)
            if key in self._others:
                return self._others[key]
        return super().ensure_pg(dims, view=view, **options)

    def get_pg(
        self, dims: Dims, *more: Dims, name: str | None = None, view: str | None = None
    ) -> ProcessGroup | None:
        """Look up a process group that was created before, as `hypercomm.HyperCommGrid` does."""
        dims = _as_dims(dims, more)
        if self._others and name is None:
            key, _, _ = self._asked(dims, view)
            if key in self._others:
                return self._others[key]
        return super().get_pg(dims, name=name, view=view)

    def reshape(
        self,
        target: str | RankLayout,
        *,
        views: Mapping[str, str] | None = None,
        ranks: Iterable[int] | None = None,
        timeout: timedelta | None = None,
    ) -> Reshaped:
        """Give the grid's ranks another layout, as `hypercomm.HyperCommGrid` does.

        Raises:
            CreationError: Groups were set from outside, whose ranks nobody here knows.
        """
        if self._others:
            raise CreationError(
                f"the groups {list(self._others)} were set from outside, and a reshape cannot tell "
                f"what becomes of them; set _pgs without them first"
            )
        return super().reshape(target, views=views, ranks=ranks, timeout=timeout)

    def abort(self) -> None:
        """End the groups that the grid created, at once, and forget those that were set."""
        self._others = {}
        super().abort()

    def destroy(self) -> None:
        """Destroy the groups that the grid created, and those that were set."""
        others, self._others = self._others, {}
        try:
            for group in {id(each): each for each in others.values()}.values():
                is_over = type(group) is ProcessGroup and not c10d.is_registered(group)
                if _is_process_group_member(group) and not is_over:
                    dist.destroy_process_group(group)
        finally:
            super().destroy()

    @property
    def _pgs(self) -> Mapping[Key, ProcessGroup | None]:
        """The groups over dims alone, by dims in reversed grid order; a read-only copy.

        It can be set: groups that the grid does not have are then found under their keys, and
        destroyed with the grid.
        """
        plain = {key: group for key, group in self.pgs.items() if key.name is None}
        own = {self._joined(key): group for key, group in plain.items()}
        return MappingProxyType({**own, **self._others})

    @_pgs.setter
    def _pgs(self, groups: Mapping[Key, ProcessGroup | None]) -> None:
        if not isinstance(groups, Mapping):
            raise GroupOptionsError(f"_pgs must map keys to groups, got {groups!r}")
        self._others = {}
        own = self._pgs
        missing = object()
        self._others = {key: pg for key, pg in groups.items() if own.get(key, missing) is not pg}

    def _joined(self, key: GroupKey) -> Key:
        view = self._views[key.view or _BASE_VIEW_NAME]
        return self._key_in(view, list(reversed(key.dims)))

    def _asked(
        self, dims: str | Iterable[str], view: str | None
    ) -> tuple[Key, _RankViewSpec, list[str]]:
        """The key of what a call asks for, the view that enumerates it, and its dims in order."""
        spec = self._resolve_view(view)
        ordered, _ = self._order_dims_for_view(spec, dims)
        return self._canonical_pg_key_and_enum_view(spec, ordered)


def _backwards(layout: RankLayout, dims: str | Iterable[str]) -> tuple[list[str], str]:
    ordered = list(reversed(layout.order_dims(dims)))
    return ordered, "-".join(ordered)


def _as_dims(dims: Dims, more: tuple[Dims, ...]) -> str | tuple[str, ...]:
    if more:
        return as_dims((dims, *more))
    return dims if isinstance(dims, str) else as_dims(dims)


def _world_size_of_the_environment() -> int | None:
    text = os.environ["WORLD_SIZE"]
    return int(text) if text.strip().isdecimal() and int(text) > 0 else None
