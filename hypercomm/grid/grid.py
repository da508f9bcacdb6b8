"""HyperCommGrid: owns a hyperrectangle of ranks, and the process groups created from it.

`GridView` has what a grid and each of its views offer: questions about ranks, and process groups.
`HyperCommGrid` is the view that owns the state: it registers views, reshapes and destroys.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

import attrs
import numpy as np
from torch.distributed import ProcessGroup

from hypercomm.errors import GroupOptionsError, HyperCommError, UnknownDimError
from hypercomm.grid.arguments import (
    OF_ONE_GROUP,
    Cover,
    GivenSizes,
    GridOptions,
    GroupArguments,
    GroupKeywords,
    Share,
    SharedKeywords,
    Sizes,
    StrategyName,
    check_choices,
    check_cover,
    check_dims,
    check_keywords,
    check_name,
    read_target,
)
from hypercomm.grid.connect import Connection, connect
from hypercomm.grid.dims import GridDims, PipelineEdges, Size
from hypercomm.layout import RankLayout, read_layout
from hypercomm.layout.checks import (
    as_int,
    as_ordered,
    as_ranks,
    as_world_size,
    check_duration,
)
from hypercomm.layout.groups import format_sizes_of
from hypercomm.layout.parsing import Dims
from hypercomm.layout.text import format_coords, short_repr
from hypercomm.layout.views import View, Views
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.agreement.driver import limit_of, refusing
from hypercomm.process_groups.agreement.grid import GridAgreement
from hypercomm.process_groups.creation import create, create_all, ensure, verify
from hypercomm.process_groups.explanation import Explanation
from hypercomm.process_groups.options import check_timeout
from hypercomm.process_groups.reshape import Reshaped, reshape, successor
from hypercomm.process_groups.spec import GroupKey, GroupRequest
from hypercomm.process_groups.table import Entry, GroupTable
from hypercomm.process_groups.world import World, current, rank_in_world, size_of_world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self, Unpack  # typing has them from Python 3.11 on

    from hypercomm.tools.blame.watch import Watch

logger = logging.getLogger(__name__)

_WATCH = "hypercomm.tools.blame.watch"
"""The module of the tool that `watch` starts. It is above this one, so it is loaded by name."""


@attrs.define(eq=False)
class GridState:
    """The state that a grid and its views share.

    Attributes:
        views: The layout and its views; `reshape` replaces it.
        table: The process groups; `reshape` replaces it.
        options: The arguments of the grid: the defaults of its calls.
        world_size: Number of ranks of the job.
        lender: The state of `share_with`, kept alive.
        gave_meshes: Whether a DeviceMesh holds groups of the grid.
    """

    views: Views
    table: GroupTable
    options: GridOptions
    world_size: int
    lender: GridState | None = None
    gave_meshes: bool = False

    def warn_of_live(self) -> None:
        """Warn that a grid was collected and not destroyed; its groups stay, as others use them."""
        leaked = ", ".join(map(str, self.table.leaked()))
        if leaked:
            warnings.warn(
                f"a HyperCommGrid ({self.views.base}) was collected while its process groups "
                f"live: {leaked}; call its destroy(), or use it in a with block",
                ResourceWarning,
                stacklevel=2,
            )


class GridView:
    """One view of a grid: questions about ranks and process groups, in the dims of the view.

    `HyperCommGrid.view` returns one, and a grid is itself one, with the dims of its layout. The
    process groups belong to the grid, which destroys them.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8, rank=5), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
        ...     grid.register_view("expert", [4, 2], ["ep", "expt_dp"])
        ...     expert = grid.view("expert")
        ...     print(expert.shape, expert.create_pg("ep").size(), expert.group_ranks("ep"))
        [4, 2] 4 (4, 5, 6, 7)
    """

    def __init__(self, state: GridState, view: str | None) -> None:
        self._state = state
        self._view = view
        self._dims: dict[object, GridDims] = {}
        """The results of `__getitem__`, by text or by dims in order."""

    # ---- attributes -----------------------------------------------------------------------------

    @property
    def layout(self) -> RankLayout:
        """The numbering of the ranks."""
        return self._state.views.layout_of(self._view)

    @property
    def backend(self) -> str | None:
        """The default backend of the groups; None: the backend of WORLD."""
        return self._state.options.backend

    @property
    def name(self) -> str | None:
        """The name that distinguishes the grid from others."""
        return self._state.options.name

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
    def size(self) -> Size:
        """The number of ranks in the grid; `size()` works too."""
        return Size(self.layout.size)

    @property
    def views(self) -> Mapping[str, RankLayout]:
        """The layouts of the grid's views, by name; a read-only copy."""
        views = self._state.views
        return MappingProxyType({name: view.layout for name, view in views.items()})

    @property
    def is_destroyed(self) -> bool:
        """Whether the grid was destroyed."""
        return self._table.is_destroyed

    @property
    def pgs(self) -> Mapping[GroupKey, ProcessGroup | None]:
        """The process groups that exist, by key, in the order of creation; a read-only copy.

        A view has its own groups and those over the dims that it shares with the grid.
        """
        live = self._live()
        return MappingProxyType({key: entry.communicator.pg for key, entry in live.items()})

    # ---- ranks ----------------------------------------------------------------------------------

    def is_current_rank_in_grid(self) -> bool:
        """Return whether the calling rank is in the grid."""
        return self._table.rank() in self.layout

    def coords(self, rank: int | None = None) -> dict[str, int]:
        """Return the coordinates of a rank.

        Args:
            rank: The rank; default: the calling one.

        Raises:
            RankOutsideError: The rank is not in the grid; see `is_current_rank_in_grid`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> grid = HyperCommGrid("tp=2,dp=4", world_size=8)
            >>> grid.register_view("expert", [4, 2], ["ep", "expt_dp"])
            >>> grid.coords(5), grid.view("expert").coords(5)
            ({'tp': 1, 'dp': 2}, {'ep': 1, 'expt_dp': 1})
        """
        return self.layout.coords(self._table.rank(rank))

    def group_ranks(self, dims: Dims, rank: int | None = None) -> tuple[int, ...]:
        """Return the ranks of the group over some dims that a rank is in.

        They are in the order of the layout, which is ascending unless it lists its ranks.

        Args:
            dims: One name, or several in any order.
            rank: The rank; default: the calling one.

        Raises:
            RankOutsideError: The rank is not in the grid.
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`. The error names the view
                that has the dims, if one does.
        """
        return self.layout.membership(self._table.rank(rank), self._order(dims)).ranks

    def get_rank_enum(self, dims: Dims, *more: Dims, view: str | None = None) -> list[list[int]]:
        """Return all groups over some dims, members in the order of the layout.

        Args:
            dims: As for `create_pg`.
            more: Further dims.
            view: The view whose dims these are; default: this one.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"], world_size=8)
            >>> grid.get_rank_enum(["dp", "tp"])
            [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        view, views = self._view if view is None else view, self._state.views
        ordered = views.ordered((dims, *more) if more else dims, view)
        return views.layout_of(view).groups(ordered).to_lists()

    def _gen_rank_enum(self, dims: Iterable[str]) -> list[list[int]]:
        """Return all groups, members in the order of `dims`, the last one varying fastest.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> grid = HyperCommGrid([2, 2, 2], ["a", "b", "c"], world_size=8)
            >>> grid._gen_rank_enum(["a", "b"])
            [[0, 2, 1, 3], [4, 6, 5, 7]]
        """
        return self.layout.enumerate_ranks(dims).tolist()  # type: ignore[no-any-return]

    def _order_dims(self, dims: Dims) -> tuple[list[str], str]:
        """Return dims in REVERSED grid order, as Megatron does, and the same joined by dashes."""
        ordered = list(reversed(self._order(dims)))
        return ordered, "-".join(ordered)

    def _order(self, dims: Dims) -> tuple[str, ...]:
        """Return dims in the order of this view; an error names the view that has them."""
        return self._state.views.ordered(dims, self._view)

    # ---- dims -----------------------------------------------------------------------------------

    def __getitem__(self, dims: Dims) -> GridDims:
        """Return some dims as the calling rank sees them: `grid["tp"]`, `grid["dp", "cp"]`.

        Raises:
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
        """
        key = dims if isinstance(dims, str) else self._order(dims)
        if key not in self._dims:
            # It gets another view object: a reference to this one would make a cycle.
            self._dims[key] = GridDims(GridView(self._state, self._view), self._order(dims))
        return self._dims[key]

    def __contains__(self, dim: object) -> bool:
        """Return whether the grid has a dim of this name, or a rank of this number."""
        return dim in self.layout.dim_names if isinstance(dim, str) else dim in self.layout

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.dim_names)

    def __getattr__(self, name: str) -> NoReturn:
        is_dim = not name.startswith("_") and name in self.layout.dim_names
        hint = f"; write grid[{name!r}]" if is_dim else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    # ---- process groups -------------------------------------------------------------------------

    def create_pg(
        self, dims: Dims, *more: Dims, **keywords: Unpack[GroupKeywords]
    ) -> ProcessGroup | None:
        """Create the process groups over some dims, and return the calling rank's.

        Every rank of the grid must call this, in the same order; ranks outside may.

        Args:
            dims: One name, or several in any order: "dp+cp", ["dp", "cp"], or as further arguments.
            more: Further dims.
            name: Distinguishes a further group over the same dims, such as a duplicate for gloo.
            view: The view whose dims these are; default: the grid's own dims. Dims that the view
                shares with the grid give the grid's own groups.
            backend: Backend of this group; default: the grid's.
            timeout: Default: the timeout of WORLD.
            pg_options: Options of the backend, such as `ProcessGroupNCCL.Options`.
            group_desc: A description that torch's logs show; default: the dims.
            share: Overrides the grid's.
            derive: Other groups than those over `dims`: disjoint lists of ranks, which may differ
                in size, as [[0, 4], [1, 2, 3]]; or a function that returns them, or `RankGroups`,
                for the groups over `dims`, such as the ends of each pipeline:
                `lambda groups: groups.pick(lambda ranks: (ranks[0], ranks[-1]))`. Needs a name.
            creation: Overrides the grid's. Where WORLD is bound to a device, dims that cover the
                world may be split off it, and others created in another way.
            lazy_init: Overrides the grid's.

        Returns:
            A plain torch `ProcessGroup`, or None on a rank that is in none of the groups. Note
            that torch's collectives take None for WORLD.

        Raises:
            GroupExistsError: A group for this key was created before (a KeyError).
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
            UnknownDimError: There is no such view.
            GroupOptionsError: An option is wrong, or would be ignored.
            GroupCreationTimeout: Members did not arrive in time; names them. All may retry.
            LateRankError: The other members timed out before this one arrived.
            PlanMismatchError: Another rank has a different grid, or another member creates a
                different group; with `verify`, another rank of the grid. Names both.
            CreationError: The grid's creation strategy cannot work here, another rank failed,
                members could not connect, or the job's store is gone.
            NotInitializedError: torch.distributed is not initialised.
            GridDestroyedError: The grid was destroyed, or belongs to the process that forked this
                one.
        """
        table = self._state.table
        return create(table, table.resolve(self._request("create_pg", dims, more, keywords)))

    def get_pg(
        self, dims: Dims, *more: Dims, name: str | None = None, view: str | None = None
    ) -> ProcessGroup | None:
        """Return a process group that was created before; never communicates.

        Returns:
            The group, or None on a rank outside of the grid, as `create_pg`.

        Raises:
            GroupMissingError: It was not created (a KeyError).
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
            GridDestroyedError: The grid was destroyed.
        """
        key, _ = self._key((dims, *more) if more else dims, name, view)
        return self._state.table.get(key)

    def ensure_pg(
        self, dims: Dims, *more: Dims, **keywords: Unpack[GroupKeywords]
    ) -> ProcessGroup | None:
        """Create a process group on the first call, and return the same one afterwards.

        Takes the arguments of `create_pg`, and raises its errors, except for a key that exists.

        Raises:
            GroupOptionsError: The options given, or the groups derived, differ from those of the
                first call.
        """
        table = self._state.table
        return ensure(table, table.resolve(self._request("ensure_pg", dims, more, keywords)))

    def create_pgs(
        self, requests: Iterable[Dims | GroupArguments], **keywords: Unpack[SharedKeywords]
    ) -> list[ProcessGroup | None]:
        """Create several process groups in one call, in the order given, all or none.

        Every rank of the grid must call this with the same list; ranks outside may. Lists are
        compared before anything is created. If one group fails, all ranks of the grid destroy
        those that the call has created.

        Args:
            requests: For each group its dims, or a mapping of arguments of `create_pg` by name:
                `["tp", ["dp", "cp"], {"dims": "dp", "name": "gloo", "backend": "gloo"}]`.
            keywords: `backend`, `timeout` and `share` of requests without them, as for `create_pg`.
                The longest timeout is that of the whole call.

        Returns:
            For each request what `create_pg` returns.

        Raises:
            GroupExistsError: A key occurs twice, or was created before; nothing was created.
            PlanMismatchError: Another rank's list differs; shows the difference.
            LayoutError, GroupOptionsError, CreationError: As for `create_pg`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
            ...     tp, dp_cp = grid.create_pgs(["tp", ["dp", "cp"]])
            ...     print(tp.size(), dp_cp.size(), [str(key) for key in grid.pgs])
            2 4 ['tp', 'cp+dp']
        """
        check_keywords("create_pgs", keywords, SharedKeywords.__annotations__)
        table = self._table
        table.check_alive()
        scope = table.grid_scope(table.live_world())
        entries = create_all(scope, "create_pgs()", lambda: self._requests(requests, keywords))
        return [entry.communicator.pg for entry in entries]

    def destroy_pg(
        self, dims: Dims, *more: Dims, name: str | None = None, view: str | None = None
    ) -> None:
        """Destroy one process group that the grid created, before it destroys the others.

        Every rank of the grid must call this, in the same order among creations of the same key,
        which may be created again. A group that other keys use, or that the grid does not own,
        stays until those are gone.

        Raises:
            GroupMissingError: It was not created (a KeyError).
            UnknownDimError, LayoutError: As for `create_pg`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     _ = grid.create_pg("tp"), grid.create_pg("dp")
            ...     grid.destroy_pg("tp")
            ...     print([str(key) for key in grid.pgs])
            ['dp']
        """
        key, _ = self._key((dims, *more) if more else dims, name, view)
        self._forget_meshes()
        self._table.remove(key)

    def edges(
        self, dims: Dims = "pp", *more: Dims, wrap: bool = False, view: str | None = None
    ) -> PipelineEdges:
        """Return the edges of a pipeline: one process group per pair of neighbours and direction.

        NCCL runs the transfers of a group one after the other: a stage that waits for a gradient
        cannot send activations over the same group. This call creates nothing. The first use of an
        edge creates it, together with the neighbour alone; with `wrap` or `verify` it may wait for
        further ranks, so call `create()` first, which creates all edges.

        Args:
            dims: The dims of the pipeline, as for `get_pg`.
            more: Further dims.
            wrap: Whether the last stage sends to the first one, as in interleaved schedules.
            view: The view whose dims these are; default: this one.

        Raises:
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
            UnknownDimError: There is no such view.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=2), HyperCommGrid("tp=2,pp=4") as grid:
            ...     grid.edges("pp").create()
            ...     for key in grid.pgs:
            ...         print(key)
            pp (edge forward even)
            pp (edge backward even)
            pp (edge forward odd)
            pp (edge backward odd)
        """
        here = self if view is None else GridView(self._state, self._state.views[view].name)
        return PipelineEdges(here[(dims, *more) if more else dims], wrap)

    def explain(self, dims: Dims, *more: Dims, **keywords: Unpack[GroupKeywords]) -> Explanation:
        """Return how the process groups over some dims were created, or would be, and why.

        Creates nothing, and does not communicate. For a key that exists the result describes its
        creation, whatever the arguments.

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
        return self._table.explain(self._request("explain", dims, more, keywords))

    def find(self, group: ProcessGroup | None) -> GroupKey | None:
        """Return the key of a process group of the grid; None for other groups.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid("tp=2,dp=4") as grid:
            ...     print(grid.find(grid["dp"].group))
            dp
        """
        keys = (key for key, held in self.pgs.items() if held is group and group is not None)
        return next(keys, None)

    def device_mesh(
        self,
        *dims: str | Iterable[str],
        device_type: str | None = None,
        flatten: Mapping[str, Sequence[str]] | None = None,
    ) -> DeviceMesh:
        """Return a torch DeviceMesh of the grid's process groups; missing ones are created.

        All ranks of the grid must call this if a group is missing.

        A DeviceMesh numbers ranks with its LAST dim varying fastest, a grid with its FIRST: the
        grid tp=2,dp=4 is the mesh (dp, tp). FSDP2, DTensor and `parallelize_module` take it; the
        grid stays the owner of the groups. torch cannot combine two meshes, so pass slices of one
        mesh, `mesh["dp"]` and `mesh["tp"]`, to libraries that work together. DTensor takes meshes
        with equal ranks and dim names for one, so a second one with other groups is an error; the
        meshes of `init_device_mesh` are not compared.

        Args:
            dims: Each dim of the mesh, in the mesh's order: a name, or several whose groups become
                one dim, as ("dp", "cp") becomes "dp_cp". Default: all, the slowest first.
            device_type: "cpu", "cuda", ...; default: that of the backend of the first dim's groups.
            flatten: Adjacent dims of the mesh that get a further name together:
                {"dp_shard_cp": ["dp_shard", "cp"]} gives `mesh["dp_shard_cp"]` the group over both.

        Returns:
            The mesh of the ranks that have the calling rank's coordinates in all other dims.

        Raises:
            RankOutsideError: The calling rank is not in the grid.
            LayoutError: Write ("dp", "cp") rather than ("cp", "dp"): a group's ranks ascend.
            LayoutError: DTensor would take a dim for that of another mesh, with other groups: use
                another name, destroy the other grid first, or let both share their groups.
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
            HyperCommError: As for `create_pg`.

        Example:
            Rank = tp * 1 + dp * 2: the grid names tp first, the mesh dp.

            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     mesh = grid.device_mesh("dp", "tp")
            ...     print(grid.coords(), tuple(mesh.get_coordinate()), mesh.mesh.tolist())
            {'tp': 1, 'dp': 2} (2, 1) [[0, 1], [2, 3], [4, 5], [6, 7]]
        """
        from hypercomm.grid.device_mesh import as_mesh, read_dims

        self._table.check_alive()
        spans = read_dims(self.layout.dim_names, self._order, dims)
        group_over = lambda names: self[names].group  # noqa: E731 - the first use creates it
        mesh = as_mesh(self.layout, self._table, group_over, spans, device_type, flatten)
        self._state.gave_meshes = True
        return mesh

    # ---- internals of process groups ------------------------------------------------------------

    @property
    def _table(self) -> GroupTable:
        return self._state.table

    def _live(self) -> dict[GroupKey, Entry]:
        """Return the groups that exist, of this view and of the dims that it shares."""
        live = self._state.table.live()
        if self._view is None:
            return live
        shared = set(self._state.views[self._view].shared_dims)
        return {
            key: entry
            for key, entry in live.items()
            if key.view == self._view or (key.view is None and set(key.dims) <= shared)
        }

    def _forget_meshes(self) -> None:
        """Make torch forget the meshes of groups that are about to be destroyed."""
        if self._state.gave_meshes and not self._table.is_destroyed:
            torchdist.forget_meshes()

    def _key(self, dims: Dims, name: str | None, view: str | None) -> tuple[GroupKey, View | None]:
        """Return the key, and the view that was asked for, which may share the dims."""
        state = self._state
        state.table.check_usable()
        if name is not None:
            check_name(name)
        view = self._view if view is None else view
        if view is None:
            with contextlib.suppress(UnknownDimError):  # else `find` says which view has the dims
                return GroupKey(state.views.base.order_dims(dims), name), None
        found, ordered = state.views.find(dims, view)
        key = GroupKey(ordered, name, None if found is None else found.name)
        return key, None if view is None else state.views.asked(view)

    def _request(
        self, call: str, dims: Dims, more: tuple[Dims, ...], given: GroupKeywords
    ) -> GroupRequest:
        """Check the arguments of a call, and complete them with the options of the grid."""
        state = self._state
        options = state.options
        wanted = options.of_groups
        if given:
            check_keywords(call, given, GroupKeywords.__annotations__)
            check_choices(given.get("creation"), given.get("share"))
        key, view = self._key((dims, *more) if more else dims, given.get("name"), given.get("view"))
        wanted = options.of_groups
        if given:
            values = cast("Mapping[str, Any]", given)
            replaced = {name: values[name] for name in OF_ONE_GROUP if name in values}
            replaced = {name: value for name, value in replaced.items() if value is not None}
            if replaced:
                wanted = attrs.evolve(wanted, **replaced)
                wanted.check()
        return GroupRequest(
            key,
            state.views.base if key.view is None or view is None else view.layout,
            view,
            given.get("derive"),
            wanted,
            given.get("share") or options.share,
        )

    def _requests(
        self, requests: Iterable[Dims | GroupArguments], defaults: SharedKeywords
    ) -> list[tuple[GroupTable, GroupRequest]]:
        """Return what each request of `create_pgs` asks for."""
        table = self._table
        table.check_alive()
        found = []
        for request in as_ordered(requests, "the list in create_pgs(['tp', ['dp', 'cp']])"):
            given = dict(request) if isinstance(request, Mapping) else {"dims": request}
            if "dims" not in given:
                raise GroupOptionsError(
                    f"the request {short_repr(given)} of create_pgs() needs 'dims'"
                )
            dims = given.pop("dims")
            keywords = cast("GroupKeywords", {**defaults, **given})
            found.append((table, self._request("create_pg", dims, (), keywords)))
        return found

    # ---- a running job --------------------------------------------------------------------------

    def connect(
        self, *, pipelines: Dims | None = None, timeout: timedelta | None = None
    ) -> list[Connection]:
        """Connect all process groups that exist, before the first step needs them.

        NCCL, and gloo with `lazy_init`, connect the members of a group at its first collective,
        which then hangs if a rank is missing. Every rank of the grid must call this while no
        communication is under way in the groups; ranks outside need not. First the ranks wait for
        each other and compare their groups. Then the members of each group all-reduce one element,
        and neighbours in a pipeline send each other one, also from the last stage to the first.
        Keys that share a group count once; groups that are only planned are left out.

        If ranks are missing at the start, nothing has been communicated, and all may call this
        again. After a timeout in a group that group is broken, as torch cannot undo a collective:
        `destroy_pg` it, and create it again. A gloo group may then delay `destroy_pg` until the
        group's own timeout.

        Args:
            pipelines: Dims whose neighbours are connected, in the groups over each of them alone;
                () stands for none. Default: "pp", also in views.
            timeout: For the whole call; default: the timeout of WORLD.

        Returns:
            The seconds for each group that the calling rank is in, and for each edge; zeros for a
            group of one rank and in a fake world.

        Raises:
            PlanMismatchError: Ranks have different groups; none has communicated.
            GroupCreationTimeout: Ranks did not arrive in time; names them and their groups.
            OutcomeUnknownError: The job's store is gone.
            CreationError: Another thread makes such a call, a collective failed, or the others
                timed out just before this rank arrived: call it again.
            UnknownDimError, LayoutError, GroupOptionsError: An argument is wrong.
            GridDestroyedError: The grid was destroyed.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid("tp=2,pp=4", lazy_init=False) as grid:
            ...     _ = grid.create_pgs(["tp", "pp"])
            ...     for row in grid.connect():
            ...         print(row.title, row.ranks, row.seconds)
            tp (4, 5) 0.0
            pp (1, 3, 5, 7) 0.0
            pp edge (5, 7) 0.0
            pp edge (3, 5) 0.0
        """
        self._table.check_alive()
        check_timeout(timeout)
        table = self._table
        scope = table.grid_scope(table.world or current())
        along: tuple[str, ...] = ("pp",)
        with refusing(scope):
            if pipelines is not None:
                along = self._order(pipelines) if pipelines else ()
            table.check_steady()
            entries = list(self._live().values())
        return connect(entries, along, scope, timeout)

    def watch(self, seconds: float, folder: str | os.PathLike[str] = "hypercomm_watch") -> Watch:
        """Write a report for `hypercomm blame` when no collective has moved for a while.

        Call it on every rank, between the same collectives, before or after the groups are
        created. From then on every call that a ProcessGroup of this process gets from Python, of
        any grid, is recorded (4 to 7 microseconds each); the last 500 are kept. When no call has
        started or ended for `seconds`, a thread writes them, with the stacks of all threads, to
        `hypercomm_watch_RANK.json`, in the form of torch's flight recorder. The file is
        removed when calls move again. Leaving the `with` block writes it too, with the exception
        if there is one.

        Not recorded: calls from C++ (DistributedDataParallel's buckets), functional collectives
        (DTensor, compiled code). Do not use it while CUDA graphs are captured.

        Args:
            seconds: Seconds without progress. Choose less than the groups' timeout, such as 60.
            folder: Created if missing; best on a disk that the hosts share.

        Returns:
            A `Watch`: a context manager, which `stop()` ends as well.

        Raises:
            ToolError: The seconds or the folder cannot be used, or this process has a watch.
            NotInitializedError: torch.distributed is not initialised.

        Example:
            >>> import json, tempfile
            >>> import torch.distributed as dist
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as grid:
            ...     with tempfile.TemporaryDirectory() as folder:
            ...         with grid.watch(60, folder) as watch:
            ...             dist.barrier(group=grid.create_pg("dp"))
            ...         record = json.loads(watch.file.read_text())
            >>> entry, = record["entries"]
            >>> entry["profiling_name"], entry["process_group"][1], entry["collective_seq_id"]
            ('fake:barrier', 'dp', 1)
        """
        state = self._state  # a reshape changes what it holds

        def layouts() -> dict[str, RankLayout]:
            views = state.views
            return {"": views.base, **{name: view.layout for name, view in views.items()}}

        def groups() -> list[ProcessGroup | None]:
            return [entry.communicator.pg for entry in state.table.live().values()]

        start: type[Watch] = importlib.import_module(_WATCH).Watch
        return start(seconds, folder, layouts, groups, (state.table.world or current()).rank)

    def survivors(self, timeout: timedelta, *, min_ranks: int = 1) -> tuple[int, ...]:
        """Return the ranks of the grid that are left after a loss: the same on all of them.

        Every rank of the grid that is left calls this after a collective has failed, and then
        `reshape(target, ranks=...)`. First it ends the grid's process groups, so that peers which
        wait in them fail too: those of NCCL immediately, those of gloo once the program holds no
        other reference to them. Called in an `except` block, it clears the local variables of the
        frames that the exception came through, which hold such references. Groups of a grid with
        `enable_reconfigure` stay, and have the calling rank alone until the `reshape`; peers that
        wait in them fail immediately.

        Args:
            timeout: How long to wait for ranks that do not arrive; longer than the timeout of the
                grid's groups, in which other ranks may still wait, unless they stay. The ranks that
                arrived then confirm the result with each other; a rank that dies during the call
                extends the wait by `timeout`.
            min_ranks: The fewest ranks that may continue.

        Returns:
            The ranks that arrived, in the order of the layout. A rank that is alive and waits
            elsewhere is not among them.

        Raises:
            RankOutsideError: The calling rank is not in the grid.
            CreationError: The others continue without this rank, which arrived too late, or fewer
                than `min_ranks` are left.
            OutcomeUnknownError: The job's store is gone; restart the job.
            GroupOptionsError: `timeout` is not a positive timedelta, or not longer than that of
                the grid's groups.

        Example:
            >>> from datetime import timedelta
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as grid:
            ...     print(grid.survivors(timedelta(seconds=30)))  # no rank of a fake world is lost
            (0, 1, 2, 3, 4, 5, 6, 7)
        """
        table = self._table
        table.check_alive()
        check_duration(timeout)
        self.coords()  # raises on a rank outside
        table.check_outlasts(timeout)
        least = as_int(min_ranks, "min_ranks")
        self._forget_meshes()
        error = sys.exc_info()[1]
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        table.end_groups()
        return table.identity.find_survivors(table.world, timeout.total_seconds(), least)

    # ---- training -------------------------------------------------------------------------------

    def seed(self, base: int, *dims: Dims) -> int:
        """Return a seed that differs along some dims, and is equal along all others.

        Args:
            base: The seed of the run, at least 0.
            dims: Along which ranks draw different numbers, such as "tp" for dropout in layers that
                are split, or "dp" for data; none: all ranks draw the same.

        Returns:
            63 bits, the same in every run and on every machine.

        Raises:
            RankOutsideError: The calling rank is not in the grid.
            LayoutError: `base` is not an int of at least 0.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> def seed_of(rank, *dims):
            ...     with fake_world(8, rank=rank), HyperCommGrid("tp=2,dp=4") as grid:
            ...         return grid.seed(1234, *dims)
            >>> seed_of(0, "tp") == seed_of(2, "tp"), seed_of(0, "tp") == seed_of(1, "tp")
            (True, False)
        """
        base = as_int(base, "base", 0)
        coords = self.coords()
        ordered = self.layout.order_dims(dims) if dims else ()
        text = ",".join(f"{dim}={coords[dim]}" for dim in ordered)
        words = np.frombuffer(text.encode(), np.uint8).tolist()
        (state,) = np.random.SeedSequence([base, *words]).generate_state(1, np.uint64)
        return int(state) >> 1

    # ---- text -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = self._state
        base = state.views.base
        ranks = "ranks" if isinstance(base.ranks, range) else f"{base.size} of the ranks"
        name = "" if self.name is None else f", name={self.name!r}"
        grid = f"HyperCommGrid({base}{name})"
        if self._view is not None:
            return f"view {self._view} ({self.layout}) of {grid}"
        return (
            f"{grid}: {ranks} {base.rank_offset}..{base.last_rank} of a world of {state.world_size}"
        )

    def __str__(self) -> str:
        if self.is_destroyed:
            return f"{self!r}\n  destroyed"
        specs = [entry.spec for entry in self._live().values()]
        groups = [
            f"group {one.key}: {len(one.groups)} of {format_sizes_of(one.groups)} ranks"
            + (f", {one.options.backend}" if one.options.backend else "")
            for one in specs
        ]
        views = [f"view {name}: {view}" for name, view in self.views.items()]
        lines = [
            position_in(self.layout, self._table.given_world),
            *views,
            *(groups or ["no process groups yet"]),
        ]
        return "\n  ".join([repr(self), *lines])

    def __reduce_ex__(self, _: SupportsIndex, /) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: it owns live process groups; send its layout, "
            f"grid.layout, which is a value, and build the grid there: HyperCommGrid(layout)"
        )


class HyperCommGrid(GridView):
    """An N-dimensional grid of ranks that creates process groups by dim names.

    The first dim varies fastest, as in Megatron's `order` and opposite to DeviceMesh. The grid
    owns the groups that it creates: `destroy()`, or the end of its `with` block, destroys exactly
    these.

    Args:
        shape: The sizes in any form: text "tp=2,dp=-1", a mapping {"tp": 2, "dp": -1}, sizes [2, 4]
            with `dim_names`, keywords tp=2, dp=4, a `RankLayout`, or another grid. One may be -1:
            it fills the world from `rank_offset` on. Default: the environment's HYPERCOMM_LAYOUT.
        dim_names: Name of each dim, in the order of `shape`, if `shape` has no names.
        rank_offset: The smallest rank, if the grid does not start at rank 0.
        backend: Backend of the groups; default: that of WORLD.
        name: Distinguishes this grid from others; every rank must give the same one. Ranks must
            make overlapping grids of one name in the same order; give different names to grids
            that ranks make in different orders, in threads for example.
        cover: "exact" rejects a grid that leaves ranks of the world out, "any" allows it. Default:
            a grid of text, a mapping or keywords without `rank_offset` warns if it leaves some out.
        creation: How groups are created. "local": each rank creates only its own; "split": every
            rank of the world splits WORLD once, where WORLD is bound to a device; "enumerate":
            every rank creates every group, as torch does; "auto" takes the first of split (if the
            grid has all ranks of the world), local, split, enumerate that works.
        share: "identical" lets keys with the same ranks, backend and options have one group.
        share_with: Another grid whose groups may serve this one's keys too, under
            `share="identical"`. The last grid that has such a group destroys it.
        world_size: Number of ranks of the job; default: that of torch.distributed, else that of
            the launcher's environment, such as WORLD_SIZE.
        lazy_init: True connects each pair of ranks of gloo and NCCL groups at their first message,
            so that the creation waits for no rank; False connects them at the creation. Default:
            gloo as the environment's TORCH_GLOO_LAZY_INIT says, NCCL as torch does.
        verify: True compares each creation, with its position, with those of the other ranks, for
            one store operation each; default: as the environment's HYPERCOMM_VERIFY says.
        enable_reconfigure: True creates groups that stay when `reshape(ranks=)` gives the grid
            other ranks: modules that hold them, such as DistributedDataParallel, go on. For gloo
            and NCCL, where torch has it (2.14; experimental there).
        world: The world whose ranks the grid numbers, from `join_world`; default: that of WORLD.
        dims: Sizes by name, in place of `shape` and `dim_names`.

    Raises:
        LayoutError: As for `RankLayout`.
        WorldSizeError: The grid does not fit the world, or leaves ranks out with `cover="exact"`.
        NotInitializedError: The world size is not known.
        GroupOptionsError: The backend is unknown, or another option is wrong.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8, rank=5), HyperCommGrid("tp=2,cp=2,dp=-1") as grid:
        ...     dp_cp = grid.create_pg(["dp", "cp"])
        ...     print(grid.coords(), grid.group_ranks(["dp", "cp"]), dp_cp.size())
        {'tp': 1, 'cp': 0, 'dp': 1} (1, 3, 5, 7) 4

    Source: names, signatures and behaviour of `create_pg`, `get_pg`, `get_rank_enum`,
    `_gen_rank_enum` and `_order_dims` follow `megatron.core.hyper_comm_grid`.
    """

    def __init__(
        self,
        shape: Sizes = None,
        dim_names: Iterable[str] | None = None,
        rank_offset: int = 0,
        backend: str | None = None,
        *,
        name: str | None = None,
        cover: Cover | None = None,
        creation: StrategyName = "auto",
        share: Share = "never",
        share_with: HyperCommGrid | None = None,
        world_size: int | None = None,
        lazy_init: bool | None = None,
        verify: bool | None = None,
        enable_reconfigure: bool = False,
        world: World | None = None,
        **dims: int,
    ) -> None:
        if dims:
            check_dims("HyperCommGrid", dims, HyperCommGrid.__init__.__annotations__)
        total = as_world_size(size_of_world(world_size, world))
        layout = read_layout(shape, dim_names, rank_offset, total, **dims)
        if cover is not None or layout.size < total:
            is_written = dim_names is None and isinstance(shape, (str, Mapping, type(None)))
            check_cover(layout, total, cover, is_written=is_written and not rank_offset)
        options = GridOptions(backend, name, creation, share, lazy_init, verify, enable_reconfigure)
        if share_with is not None and not isinstance(share_with, HyperCommGrid):
            raise GroupOptionsError(f"share_with must be a HyperCommGrid, got {share_with!r}")
        lender = None if share_with is None else share_with._state
        table = GroupTable(
            GridAgreement(layout, name, backend),
            creation,
            is_verified=options.verify,
            world=world,
            lender=None if lender is None else lambda: lender.table,
        )
        super().__init__(GridState(Views(layout), table, options, total, lender), None)
        weakref.finalize(self, self._state.warn_of_live).atexit = False

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, *, name: str | None = None) -> Self:
        """Make a grid from a torch DeviceMesh, which stays the owner of its process groups.

        The grid has the mesh's dims in reverse, so that the first varies fastest, and has the
        mesh's groups under their names. `destroy` destroys the groups that the grid created, and
        neither the mesh's groups nor WORLD. The mesh's groups serve no other keys, whatever
        `share` is. This call creates no process group and does not communicate.

        Args:
            mesh: A mesh with dim names, or a slice of one such as `mesh["dp"]`.
            name: As for the class.

        Raises:
            LayoutError: The mesh has no dim names, or a name that a grid cannot have; or its ranks
                do not ascend, and torch has sorted those of its groups.

        Example:
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5):
            ...     mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
            ...     grid = HyperCommGrid.from_device_mesh(mesh)
            ...     print(grid.layout, grid.group_ranks("dp"), grid.get_pg("dp").size())
            tp=2,dp=4 (1, 3, 5, 7) 4
        """
        from hypercomm.grid.device_mesh import read_mesh

        layout, groups = read_mesh(mesh)
        grid = cls(layout, name=name)
        for dim in layout.dim_names:
            grid._table.adopt(dim, groups[dim] if groups is not None else None)
        return grid

    # ---- views ----------------------------------------------------------------------------------

    def register_view(
        self,
        name: str,
        shape: GivenSizes,
        dim_names: Iterable[str] | None = None,
        shared_dims: Iterable[str] | None = None,
    ) -> None:
        """Add another factorisation of the grid's ranks, such as that of a model's expert layers.

        `create_pg`, `get_pg` and the other calls take its dims with `view=name`; `view(name)`
        returns an object with all of them. Every rank of the grid must register the same views;
        they are compared when groups are first created in them.

        Args:
            name: The name of the view.
            shape: Size of each dim, in ranks, as for the class; one may be -1.
            dim_names: Name of each dim, in the order of `shape`, if `shape` has no names.
            shared_dims: Dims that the grid has too, with the same groups: these then have one
                process group in both.

        Raises:
            LayoutError: The name is taken, the sizes do not multiply to the ranks of the grid, or
                a shared dim has other groups in the view; shows both.
            UnknownDimError: A shared dim is missing in the grid or in the view.

        Example:
            >>> grid = HyperCommGrid([2, 4, 2], ["tp", "dp", "pp"], world_size=16)
            >>> grid.register_view("expert", "ep=4,expt_dp=-1,pp=2", shared_dims=["pp"])
            >>> grid.get_rank_enum("ep", view="expert")[0], grid.view("expert").coords(5)
            ([0, 1, 2, 3], {'ep': 1, 'expt_dp': 1, 'pp': 0})

        Source: names and arguments follow newer versions of `megatron.core.hyper_comm_grid`.
        """
        self._table.check_alive()
        self._state.views.register(name, shape, dim_names, shared_dims)

    def view(self, name: str) -> GridView:
        """Return a view as an object with the interface of a grid; the grid stays the owner.

        Raises:
            UnknownDimError: There is no such view; names those that exist.
        """
        return GridView(self._state, self._state.views[name].name)

    # ---- another shape --------------------------------------------------------------------------

    def reshape(
        self,
        target: str | Mapping[str, int] | RankLayout,
        *,
        views: Mapping[str, str] | None = None,
        ranks: Iterable[int] | None = None,
        timeout: timedelta | None = None,
    ) -> Reshaped:
        """Give the grid's ranks another layout, in a live job; keys that exist get new groups.

        Every rank of the grid must call this, and with creation "split" or "enumerate" every rank
        of the world. Process groups whose ranks and options match a key of the new layout are
        kept; then missing ones are created, and then the others destroyed, so that a failure
        leaves the grid as it was. Keys over dims that no longer exist are destroyed.

        With `ranks` the grid continues with these ranks of WORLD: those that are left of a job
        that has lost some, or more than before. Only they call this. A spare rank may, and is then
        outside of the grid. No group is kept, as a loss may have broken it, and the old ones are
        aborted; with `enable_reconfigure` the groups stay, and have other members. The ranks agree
        through the job's store: if the process that serves it is lost, usually rank 0, the job must
        be restarted.

        Args:
            target: Sizes as text, as in "tp=4,dp=2", or by name, one of them may be -1; or a layout
                of the same ranks.
            views: New sizes as text, by name, of the views that change.
            ranks: The ranks to continue with, in the order of the target's numbering.
            timeout: How long to wait for the others; default: the timeout of WORLD.

        Returns:
            The keys that were kept, created and destroyed on this rank; `print` shows them.

        Raises:
            WorldSizeError: The target has other ranks than the grid, or than `ranks`.
            LayoutError: The target or the ranks cannot be read, or a view does not fit.
            UnknownDimError: `views` has a name that is not a view.
            PlanMismatchError: Another rank has a different target, or grid: all raise.
            GroupCreationTimeout: A rank did not call this in time; names it (`error.missing`).
            CreationError: Groups are planned that were not created, one could not be created,
                another thread reshapes the grid, or the others timed out just before this rank
                arrived: call it again.
            GridDestroyedError: As for `create_pg`.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
            ...     groups = grid.create_pgs(["tp", "dp", ["tp", "cp"]])
            ...     print(grid.reshape("tp=4,dp=2"))
            ...     print(grid.get_pg("tp") is groups[2])  # it was tp+cp
            tp=2,cp=2,dp=2 -> tp=4,dp=2
              kept: tp (was tp+cp), dp
              created: none
              destroyed: tp
            True
        """
        state = self._state
        table = state.table
        table.check_alive()
        check_timeout(timeout)
        world = table.world
        total = state.world_size if world is None or ranks is None else world.size
        left = None if ranks is None else as_ranks(ranks, "ranks", total)
        pending: BaseException | None = None
        with table.reshaping():
            scope = None if world is None else table.reshape_scope(world, left)
            with refusing(scope):
                layout = read_target(target, self.layout, left)
                refactored = state.views.refactored(layout, views or {})
                table.check_settled()
                identity = GridAgreement(layout, self.name, self.backend)
                fresh = successor(table, identity, keeps=left is None)
            if scope is None:  # before there is a world there are no groups
                result = Reshaped(table.layout, layout)
            else:
                limit_s = limit_of(timeout, world)
                keeps = left is None
                result, pending = reshape(table, fresh, refactored, scope, limit_s, keeps=keeps)
            self._forget_meshes()
            state.views, state.table, state.world_size = refactored, fresh, total
            self._dims = {}
        table.end(torchdist.destroy if left is None else torchdist.abort)
        if pending is not None:
            raise pending
        logger.info("reshaped: %s", result)
        return result

    # ---- life cycle -----------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroy the groups that the grid created, the last one first; may be called twice.

        Groups that the grid did not create stay, WORLD included. Afterwards the grid still
        answers questions about ranks, but has no groups and creates none.
        """
        self._forget_meshes()
        self._table.end(torchdist.destroy)

    def abort(self) -> None:
        """Abort the groups that the grid created: collectives under way fail.

        For a rank whose peers are lost: NCCL communicators are aborted, other groups destroyed
        without waiting. The grid is destroyed afterwards.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8):
            ...     grid = HyperCommGrid([2, 4], ["tp", "dp"])
            ...     tp = grid.create_pg("tp")
            ...     grid.abort()
            ...     print(len(grid.pgs))
            0
        """
        self._forget_meshes()
        self._table.end(torchdist.abort)

    def verify(self, timeout: timedelta | None = None) -> None:
        """Check that all ranks of the grid have the same process groups.

        Every rank of the grid must call this; each waits for the others. It takes a rank about five
        store operations, however many groups there are.

        Args:
            timeout: How long to wait; default: the timeout of WORLD.

        Raises:
            PlanMismatchError: Another rank's groups or grid differ; names what differs.
            GroupCreationTimeout: A rank did not call this in time; names it.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     _ = grid.create_pg("tp")
            ...     grid.verify()
        """
        check_timeout(timeout)
        verify(self._table, timeout)

    def __enter__(self) -> Self:
        self._table.check_alive()
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()


def position_in(layout: RankLayout, world: World | None = None) -> str:
    """Return where in a layout the calling rank of a world is, as text."""
    try:
        rank = rank_in_world(None, world)
    except HyperCommError:
        return "this rank is not known: torch.distributed is not initialised"
    if rank not in layout:
        return f"this is rank {rank}, outside the grid"
    return f"this is rank {rank}, at {format_coords(layout.coords(rank))}"
