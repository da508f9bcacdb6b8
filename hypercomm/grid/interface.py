"""GridInterface: what a grid and its views have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm import device_mesh
from hypercomm.errors import GroupOptionsError
from hypercomm.grid.arguments import (
    Creation,
    GroupArguments,
    Share,
    as_arguments,
    check_choice,
    check_name,
    check_world,
)
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_rank
from hypercomm.layout.messages import shown
from hypercomm.layout.views import View, Views
from hypercomm.process_groups import c10d, world
from hypercomm.process_groups.keys import Derive, Explanation, GroupKey, GroupRequest
from hypercomm.process_groups.options import GroupOptions
from hypercomm.process_groups.owner import GroupOwner
from hypercomm.process_groups.planned import PlannedGroup
from hypercomm.process_groups.strategies import STRATEGIES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@attrs.define(eq=False)
class GridState:
    """What a grid consists of; its views act on the same.

    Attributes:
        views: The layout and its views.
        owner: The process groups.
        backend: That of the groups, where a call does not say.
        name: What tells the grid apart.
        share: Whether keys may hold one group, where a call does not say.
        lazy_init: Whether gloo groups connect at their first message.
        world_size: Number of ranks of the job.
        device_type: That of the DeviceMesh that the grid was made of.
        gave_meshes: Whether a DeviceMesh holds groups of the grid.
    """

    views: Views
    owner: GroupOwner
    backend: str | None
    name: str | None
    share: Share
    lazy_init: bool | None
    world_size: int
    device_type: str | None = None
    gave_meshes: bool = False


class GridInterface:
    """Questions about the ranks of a layout, and the process groups over its dims."""

    _state: GridState
    _view: str | None = None

    # ---- what the grid is ---------------------------------------------------------------------

    @property
    def layout(self) -> RankLayout:
        """The numbering of the ranks."""
        return self._state.views.layout_of(self._view)

    @property
    def backend(self) -> str | None:
        """The backend of the groups, where a call does not say; None for that of WORLD."""
        return self._state.backend

    @property
    def name(self) -> str | None:
        """What tells the grid apart from others."""
        return self._state.name

    @property
    def shape(self) -> list[int]:
        """The size of each dim; the first dim varies fastest."""
        return list(self.layout.shape)

    @property
    def dim_names(self) -> list[str]:
        """The name of each dim, in the order of `shape`."""
        return list(self.layout.dim_names)

    @property
    def rank_offset(self) -> int:
        """The smallest rank."""
        return self.layout.rank_offset

    @property
    def size(self) -> int:
        """The number of ranks in the grid."""
        return self.layout.size

    @property
    def views(self) -> Mapping[str, RankLayout]:
        """The layouts of the grid's views, by name; a read-only copy."""
        views = self._state.views
        return MappingProxyType({name: view.layout for name, view in views.items()})

    @property
    def is_destroyed(self) -> bool:
        """Whether the grid was destroyed."""
        return self._owner.is_destroyed

    @property
    def pgs(self) -> Mapping[GroupKey, ProcessGroup | None]:
        """The process groups that exist, by key, in the order of creation; a read-only copy.

        Those of a view are its own, and those over dims that it shares.
        """
        return MappingProxyType(
            {key: created.group for key, created in self._owner.created.items() if self._has(key)}
        )

    def is_current_rank_in_grid(self) -> bool:
        """Tell whether the calling rank is in the grid."""
        return world.rank() in self.layout

    def coords(self, rank: int | None = None) -> dict[str, int]:
        """Return the coordinates of a rank, of the calling one by default.

        Raises:
            RankOutsideError: The rank is not in the grid; `is_current_rank_in_grid()` tells.
        """
        return self.layout.coords(world.rank(rank))

    def group_ranks(self, dims: str | Iterable[str], rank: int | None = None) -> tuple[int, ...]:
        """Return the ranks that share a group with a rank, by default the calling one.

        They are in the order of the layout: ascending, unless it lists its ranks in another.

        Raises:
            RankOutsideError: The rank is not in the grid.
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
        """
        groups = self.layout.groups(*self.layout.order_dims(dims))
        rank = as_rank(world.rank(rank))
        self.layout.coords(rank)  # its error speaks of the grid, not of the groups
        return groups.of(rank)

    def get_rank_enum(
        self, dims: str | Iterable[str], *, view: str | None = None
    ) -> list[list[int]]:
        """Enumerate the groups over some dims, members in the order of the layout.

        Args:
            dims: One name, or any iterable of names, in any order.
            view: The view whose dims they are; default: this one's.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"], world_size=8)
            >>> grid.get_rank_enum(["dp", "tp"])
            [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        found, ordered = self._find(dims, view)
        layout = self._state.views.base if found is None else found.layout
        return layout.enumerate_ranks(reversed(ordered)).tolist()  # type: ignore[no-any-return]

    def _gen_rank_enum(self, dims: Iterable[str]) -> list[list[int]]:
        """Enumerate groups with members in the order of `dims`, the last one varying fastest.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> grid = HyperCommGrid([2, 2, 2], ["a", "b", "c"], world_size=8)
            >>> grid._gen_rank_enum(["a", "b"])
            [[0, 2, 1, 3], [4, 6, 5, 7]]
        """
        return self.layout.enumerate_ranks(dims).tolist()  # type: ignore[no-any-return]

    def _order_dims(self, dims: str | Iterable[str]) -> tuple[list[str], str]:
        """Return dims in REVERSED grid order, as Megatron does, and the same joined by dashes."""
        ordered = list(reversed(self.layout.order_dims(dims)))
        return ordered, "-".join(ordered)

    # ---- process groups -----------------------------------------------------------------------

    def create_pg(
        self,
        dims: str | Iterable[str],
        *,
        name: str | None = None,
        view: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        share: Share | None = None,
        derive: Derive | None = None,
        creation: Creation | None = None,
        lazy_init: bool | None = None,
    ) -> ProcessGroup | None:
        """Create the process groups over some dims, and return the calling rank's.

        Every rank of the grid must call this, in the same order; ranks outside may.

        Args:
            dims: One name, or any iterable of names, in any order.
            name: Files a further group over the same dims, such as a gloo twin.
            view: The view whose dims they are, as registered; default: the grid's own dims. Dims
                that the view shares give the grid's own groups.
            backend: Backend of this group; default: the grid's.
            timeout: Default: the timeout of WORLD.
            pg_options: Options of the backend, such as `ProcessGroupNCCL.Options`.
            group_desc: A description that torch's logs show; default: the dims.
            share: Overrides the grid's.
            derive: Makes other groups of those over `dims`, such as the ends of each pipeline:
                `lambda groups: groups.pick(lambda ranks: (ranks[0], ranks[-1]))`. Needs a name.
            creation: Overrides the grid's, as does `lazy_init`: where WORLD is bound to a device,
                dims that cover the world may be split off it, and "pp" created lazily.
            lazy_init: Whether members connect at their first message.

        Returns:
            A plain torch `ProcessGroup`, or None on a rank that is in none of the groups. Mind
            that torch's collectives take None for WORLD.

        Raises:
            GroupExistsError: A group for this key was created before (a KeyError).
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
            UnknownViewError: There is no such view.
            GroupOptionsError: An option is wrong, or would be dropped.
            GroupCreationTimeout: Members did not come in time; names them. All may try again.
            GridMismatchError: Another rank means another grid; names both.
            PlanMismatchError: With `verify`, another rank creates something else here.
            CreationError: The grid's way of creating groups cannot work here, members could not
                connect, or the job's store is gone.
            NotInitializedError: torch.distributed is not initialised.
            GridDestroyedError: The grid was destroyed.
            ForkedError: The grid belongs to the process that forked this one.
        """
        return self._owner.create(
            self._request(
                *(dims, name, view, backend, timeout, pg_options, group_desc, share, derive),
                *(creation, lazy_init),
            )
        )

    def plan_pg(
        self,
        dims: str | Iterable[str],
        *,
        name: str | None = None,
        view: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        share: Share | None = None,
        derive: Derive | None = None,
        creation: Creation | None = None,
        lazy_init: bool | None = None,
    ) -> PlannedGroup:
        """Check everything about some process groups now, to create them later.

        Every rank of the grid must call this, in the same order. Takes what `create_pg` takes,
        and raises what it raises before it creates anything.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     planned = grid.plan_pg("dp")
            ...     print(planned.size(), planned.rank(), len(grid.pgs), planned.create().size())
            4 2 0 4
        """
        return self._owner.plan(
            self._request(
                *(dims, name, view, backend, timeout, pg_options, group_desc, share, derive),
                *(creation, lazy_init),
            )
        )

    def get_pg(
        self, dims: str | Iterable[str], *, name: str | None = None, view: str | None = None
    ) -> ProcessGroup | None:
        """Look up a process group that was created before; never communicates.

        Returns:
            The group, or None on a rank outside the grid, as `create_pg`.

        Raises:
            GroupMissingError: It was not created (a KeyError).
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
            GridDestroyedError: The grid was destroyed.
        """
        return self._owner.get(self._key(dims, name, view)[0])

    def ensure_pg(
        self,
        dims: str | Iterable[str],
        *,
        name: str | None = None,
        view: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        share: Share | None = None,
        derive: Derive | None = None,
        creation: Creation | None = None,
        lazy_init: bool | None = None,
    ) -> ProcessGroup | None:
        """Create a process group on the first call, and return the same one afterwards.

        Takes what `create_pg` takes, and raises what it raises, but for a key that exists.

        Raises:
            GroupOptionsError: The options given, or the groups derived, differ from those of the
                first call.
        """
        return self._owner.ensure(
            self._request(
                *(dims, name, view, backend, timeout, pg_options, group_desc, share, derive),
                *(creation, lazy_init),
            )
        )

    def create_pgs(
        self,
        requests: Iterable[str | Iterable[str] | GroupArguments],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        share: Share | None = None,
    ) -> list[ProcessGroup | None]:
        """Create several process groups in one call, in the order given, all or none.

        Every rank of the grid must call this with the same list; ranks outside may. A rank whose
        list differs from that of the rank that came first learns so before it creates anything.
        If one group fails on a rank, that rank destroys those of the call that it has.

        Args:
            requests: For each group its dims, or a mapping of arguments of `create_pg` by name:
                `["tp", ["dp", "cp"], {"dims": "dp", "name": "gloo", "backend": "gloo"}]`.
            backend: As for `create_pg`, where a request does not say; so are the other two.
            timeout: For each group apart.
            share: Groups of the same call may share too.

        Returns:
            For each request what `create_pg` returns.

        Raises:
            GroupExistsError: A key is there twice, or was created before; nothing was created.
            PlanMismatchError: Another rank's list differs; says where.
            LayoutError, GroupOptionsError, CreationError: As for `create_pg`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
            ...     tp, dp_cp = grid.create_pgs(["tp", ["dp", "cp"]])
            ...     print(tp.size(), dp_cp.size(), [str(key) for key in grid.pgs])
            2 4 ['tp', 'cp+dp']
        """
        self._owner.check_alive()
        defaults = {"backend": backend, "timeout": timeout, "share": share}
        arguments = [{**defaults, **given} for given in as_arguments(requests)]
        return self._owner.create_all([self._request(**each) for each in arguments])

    def explain(
        self,
        dims: str | Iterable[str],
        *,
        name: str | None = None,
        view: str | None = None,
        backend: str | None = None,
        creation: Creation | None = None,
        lazy_init: bool | None = None,
    ) -> Explanation:
        """Say how the process groups over some dims were created, or would be, and why.

        Creates nothing, and asks nobody. What is said of a key that exists is how it was created,
        whatever is asked for.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     print(grid.explain("dp"))
            dp: 2 of 4 ranks, fake
              local: each rank creates only the groups that it is a member of
              not split: WORLD is not bound to a device: init_process_group(device_id=...) binds it
              not enumerate: it would work too: every rank walks every group of the world
        """
        request = self._request(dims, name, view, backend, creation=creation, lazy_init=lazy_init)
        return self._owner.explain(request)

    def device_mesh(self, *dims: str | Iterable[str], device_type: str | None = None) -> DeviceMesh:
        """Hand process groups that exist to a torch DeviceMesh; creates none, and asks nobody.

        A DeviceMesh numbers ranks with its LAST dim varying fastest, a grid with its FIRST: the
        grid tp=2,dp=4 is, in DeviceMesh's order, the mesh (dp, tp). FSDP2, DTensor and
        `parallelize_module` take it; the grid stays the owner of the groups. Clients that are to
        work together take slices of one mesh, `mesh["dp"]` and `mesh["tp"]`, as torch cannot
        combine two. torch takes meshes with equal ranks and dim names for one: let grids that
        live at the same time and hand out meshes of the same ranks differ in their dim names.

        Args:
            dims: Each dim of the mesh, in the mesh's order: a name, or several whose groups become
                one dim, as ("dp", "cp") becomes "dp_cp". Default: all, the slowest first.
            device_type: "cpu", "cuda", ...; default: that of the mesh that the grid was made of,
                else what the backend of the first dim's groups is for.

        Returns:
            The mesh of the ranks that have the calling rank's coordinates in all other dims.

        Raises:
            GroupMissingError: A group was not created; says how (a KeyError).
            RankOutsideError: The calling rank is not in the grid.
            OrderError: Write ("dp", "cp") rather than ("cp", "dp"): a group's ranks ascend.
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
            GroupOptionsError: `device_type` is no string.

        Example:
            Rank = tp * 1 + dp * 2: the grid names tp first, the mesh dp.

            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     _ = grid.create_pg("tp"), grid.create_pg("dp")
            ...     mesh = grid.device_mesh("dp", "tp")
            ...     print(grid.coords(), tuple(mesh.get_coordinate()), mesh.mesh.tolist())
            {'tp': 1, 'dp': 2} (2, 1) [[0, 1], [2, 3], [4, 5], [6, 7]]
        """
        self._owner.check_alive()
        if device_type is not None and not isinstance(device_type, str):
            raise GroupOptionsError(
                f"device_type must be a name such as 'cuda', got {shown(device_type)}"
            )
        spans = device_mesh.read_dims(self.layout, dims)
        rank = world.rank()
        self.layout.coords(rank)  # refuses a rank outside
        groups = [self.get_pg(names) for names in spans]
        own = [group for group in groups if group is not None]
        device_type = device_type or self._state.device_type or c10d.device_type(own[0])
        mesh = device_mesh.as_mesh(self.layout, spans, rank, own, device_type)
        self._state.gave_meshes = True
        return mesh

    def destroy_pg(
        self, dims: str | Iterable[str], *, name: str | None = None, view: str | None = None
    ) -> None:
        """Destroy one process group that the grid created, before it destroys the others.

        Every rank of the grid must call this, in the same order among creations of the same key,
        which may be created again. A group that serves other keys too, or belongs to somebody
        else, stays until those go.

        Raises:
            GroupMissingError: It was not created (a KeyError).
            UnknownDimError, LayoutError, UnknownViewError: As for `create_pg`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     _ = grid.create_pg("tp"), grid.create_pg("dp")
            ...     grid.destroy_pg("tp")
            ...     print([str(key) for key in grid.pgs])
            ['dp']
        """
        key, _ = self._key(dims, name, view)
        self._forget_meshes()
        self._owner.remove(key)

    @property
    def _plans(self) -> Mapping[GroupKey, PlannedGroup]:
        """What was created, with what was planned for it."""
        owner = self._owner
        return {key: owner.planned[key] for key in owner.created if self._has(key)}

    def _has(self, key: GroupKey) -> bool:
        """Tell whether a key is one of this view's, or of dims that it shares."""
        view = self._view
        if view is None or key.view == view:
            return True
        return key.view is None and set(key.dims) <= set(self._state.views[view].shared_dims)

    def _forget_meshes(self) -> None:
        if self._state.gave_meshes and not self._owner.is_destroyed:
            c10d.forget_meshes()

    @property
    def _owner(self) -> GroupOwner:
        return self._state.owner

    def _find(
        self, dims: str | Iterable[str], view: str | None
    ) -> tuple[View | None, tuple[str, ...]]:
        """The view that dims belong to (None: the grid's own dims), and the dims in its order."""
        return self._state.views.find(dims, self._view if view is None else view)

    def _key(
        self, dims: str | Iterable[str], name: str | None, view: str | None
    ) -> tuple[GroupKey, View | None]:
        """The key, and the view that was asked for, which may share the dims with the grid."""
        self._owner.check_alive()
        check_name(name)
        found, ordered = self._find(dims, view)
        asked = self._state.views.asked(self._view if view is None else view)
        key = GroupKey(ordered, name, None if found is None else found.name)
        return key, asked

    def _request(
        self,
        dims: str | Iterable[str],
        name: str | None = None,
        view: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        share: Share | None = None,
        derive: Derive | None = None,
        creation: Creation | None = None,
        lazy_init: bool | None = None,
    ) -> GroupRequest:
        """A call, with what the grid says where the call does not."""
        key, asked = self._key(dims, name, view)
        state = self._state
        backend = state.backend if backend is None else backend
        sharing = state.share if share is None else share
        check_choice("share", sharing, ("never", "identical"))
        if creation is not None:
            check_choice("creation", creation, ("auto", *STRATEGIES))
        lazily = state.lazy_init if lazy_init is None else lazy_init
        given = GroupOptions(backend, timeout, pg_options, group_desc, lazily, creation)
        if c10d.is_live():
            check_world(state.views.base, dist.get_world_size(), "any")
        return GroupRequest(key, asked, given, sharing, derive)
