"""GridView: one factorisation of a grid's ranks, with methods about its ranks and groups.

`HyperCommGrid` is the view that owns the state. `HyperCommGrid.view` returns other views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import numpy as np
from torch.distributed import ProcessGroup

from hypercomm.errors import HyperCommError, UnknownDimError
from hypercomm.grid.arguments import takes_one
from hypercomm.grid.connect import Connection, connect
from hypercomm.grid.dims import GridDims, PipelineEdges, Size
from hypercomm.grid.state import GridState
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_int
from hypercomm.layout.groups import format_counts
from hypercomm.layout.parsing import Dims
from hypercomm.layout.text import format_coords
from hypercomm.process_groups.creation import create_all, create_one, ensure
from hypercomm.process_groups.meeting import refusing
from hypercomm.process_groups.spec import (
    Derive,
    GroupKey,
    GroupRequest,
    Share,
    StrategyName,
    check_timeout,
)
from hypercomm.process_groups.strategies import Explanation
from hypercomm.process_groups.table import GroupTable
from hypercomm.process_groups.world import World, current, rank_in_world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class GridView:
    """One view of a grid, with methods about its dims, ranks and process groups.

    `HyperCommGrid.view` returns a view. The grid itself is the view of the dims that it was made
    with. The process groups belong to the grid, which destroys them.

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
        return self._state.table.views.layout_of(self._view)

    @property
    def backend(self) -> str | None:
        """The default backend of the groups, or None for the backend of WORLD."""
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
        """The number of ranks in the grid. `size()` works too."""
        return Size(self.layout.size)

    @property
    def views(self) -> Mapping[str, RankLayout]:
        """The layouts of the grid's views, by name; a read-only copy."""
        views = self._state.table.views
        return MappingProxyType({name: view.layout for name, view in views.items()})

    @property
    def is_destroyed(self) -> bool:
        """Whether the grid was destroyed."""
        return self._state.table.is_destroyed

    @property
    def pgs(self) -> Mapping[GroupKey, ProcessGroup | None]:
        """The process groups that exist, by key, in the order of creation; a read-only copy.

        For a view, these are its groups, and the groups over dims that it shares with the grid.
        """
        live = self._state.live(self._view)
        return MappingProxyType({key: entry.communicator.pg for key, entry in live.items()})

    # ---- ranks ----------------------------------------------------------------------------------

    def is_current_rank_in_grid(self) -> bool:
        """Return whether the calling rank is in the grid."""
        return self._state.table.rank() in self.layout

    def coords(self, rank: int | None = None) -> dict[str, int]:
        """Return the coordinates of a rank.

        Args:
            rank: The rank. Default: the calling rank.

        Raises:
            RankOutsideError: The rank is not in the grid; see `is_current_rank_in_grid`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> grid = HyperCommGrid("tp=2,dp=4", world_size=8)
            >>> grid.register_view("expert", [4, 2], ["ep", "expt_dp"])
            >>> grid.coords(5), grid.view("expert").coords(5)
            ({'tp': 1, 'dp': 2}, {'ep': 1, 'expt_dp': 1})
        """
        return self.layout.coords(self._state.table.rank(rank))

    def group_ranks(self, dims: Dims, rank: int | None = None) -> tuple[int, ...]:
        """Return the ranks of a rank's group over some dims.

        The ranks are in the order of the layout, which is ascending unless the layout has `ranks=`
        or strides in another order.

        Args:
            dims: One name, or several in any order.
            rank: The rank. Default: the calling rank.

        Raises:
            RankOutsideError: The rank is not in the grid.
            UnknownDimError, LayoutError: See `RankLayout.order_dims`. The error names a view that
                has the dims, if there is one.
        """
        return self.layout.membership(self._state.table.rank(rank), self._order(dims)).ranks

    def get_rank_enum(self, dims: Dims, *more: Dims, view: str | None = None) -> list[list[int]]:
        """Return all groups over some dims, with their members in the order of the layout.

        Args:
            dims: One name, or several in any order.
            more: Further dims.
            view: The view whose dims these are. Default: the grid's own dims.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"], world_size=8)
            >>> grid.get_rank_enum(["dp", "tp"])
            [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        view = self._named(view)
        views = self._state.table.views
        return views.layout_of(view).groups(views.ordered(joined(dims, more), view)).to_lists()

    def _gen_rank_enum(self, dims: Iterable[str]) -> list[list[int]]:
        """Return all groups, with members in the order of `dims`, the last dim varying fastest.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> grid = HyperCommGrid([2, 2, 2], ["a", "b", "c"], world_size=8)
            >>> grid._gen_rank_enum(["a", "b"])
            [[0, 2, 1, 3], [4, 6, 5, 7]]
        """
        return self.layout.enumerate_ranks(dims).tolist()  # type: ignore[no-any-return]

    def _order_dims(self, dims: Dims) -> tuple[list[str], str]:
        """Return dims in REVERSED grid order, as Megatron does, and the names joined by dashes."""
        ordered = list(reversed(self._order(dims)))
        return ordered, "-".join(ordered)

    def _named(self, view: str | None) -> str | None:
        """Return the view of a call: this one, or for a grid the one that is named."""
        if self._view is None:
            return view
        if view is not None:
            raise TypeError(f"view {self._view!r} takes no view=; call the method of the grid")
        return self._view

    def _order(self, dims: Dims) -> tuple[str, ...]:
        """Return dims in the order of this view. An error names a view that has the dims."""
        return self._state.table.views.ordered(dims, self._view)

    # ---- dims -----------------------------------------------------------------------------------

    def __getitem__(self, dims: Dims) -> GridDims:
        """Return some dims as the calling rank sees them: `grid["tp"]`, `grid["dp", "cp"]`.

        Raises:
            UnknownDimError, LayoutError: See `RankLayout.order_dims`.
        """
        key = dims if isinstance(dims, str) else self._order(dims)
        if key not in self._dims:
            self._dims[key] = GridDims(self._state, self._view, self._order(dims))
        return self._dims[key]

    def __contains__(self, dim: object) -> bool:
        """Return whether the grid has a dim of this name, or contains this rank."""
        return dim in self.layout.dim_names if isinstance(dim, str) else dim in self.layout

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.dim_names)

    def _ipython_key_completions_(self) -> list[str]:
        return self.dim_names

    if not TYPE_CHECKING:  # else type checkers would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            is_dim = not name.startswith("_") and name in self.layout.dim_names
            usual = f"grid[{name!r}]" if is_dim else _USUAL_NAMES.get(name)
            hint = f"; write {usual}" if usual else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    # ---- process groups -------------------------------------------------------------------------

    def create_pg(
        self,
        dims: Dims,
        *more: Dims,
        name: str | None = None,
        view: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        share: Share | None = None,
        derive: Derive | None = None,
        creation: StrategyName | None = None,
        lazy_init: bool | None = None,
    ) -> ProcessGroup | None:
        """Create the process groups over some dims, and return the calling rank's group.

        Call this on every rank of the grid, in the same order. With "split" and "enumerate", every
        rank of the world must call it. With "local" and without `verify`, it is enough that the
        members of a group call it. They may then create groups in different orders, unless ranks
        would wait for each other in a circle.

        Args:
            dims: One name, or several in any order: "dp+cp", ["dp", "cp"], or as further arguments.
            more: Further dims.
            name: The name of a further group over the same dims, such as a duplicate for gloo.
            view: The view whose dims these are. Default: the grid's own dims. Over dims that
                the view shares with the grid, the view uses the groups of the grid.
            backend: The backend of this group. Default: the backend of the grid.
            timeout: The timeout of the collectives of this group, and of the creation. Default: the
                timeout of WORLD.
            pg_options: The options of the backend, such as `ProcessGroupNCCL.Options`.
            group_desc: A description that torch's logs show. Default: the dims.
            share: Overrides the grid's `share`.
            derive: The groups to create instead of the groups over `dims`. Requires `name`. Pass
                disjoint lists of ranks of the grid, which may differ in size and need not lie
                within the groups over `dims`, such as [[0, 4], [1, 2, 3]], or a function that takes
                the groups over `dims` and returns lists or `RankGroups`. For example, the function
                for the ends of each pipeline is
                `lambda groups: groups.pick(lambda ranks: (ranks[0], ranks[-1]))`.
            creation: Overrides the grid's `creation`.
            lazy_init: Overrides the grid's `lazy_init`.

        Returns:
            A plain torch `ProcessGroup`, or None on a rank that is in none of the groups. Note
            that torch's collectives interpret None as WORLD.

        Raises:
            GroupExistsError: A group for this key already exists. This is a KeyError.
            UnknownDimError, LayoutError: See `RankLayout.order_dims`.
            UnknownDimError: The grid has no such view.
            GroupOptionsError: An option is wrong, or would be ignored.
            GroupCreationTimeout: Members did not arrive in time. The message names the members. All
                ranks may retry.
            LateRankError: The other members timed out before this rank arrived.
            PlanMismatchError: Another rank has a different grid, or another member creates a
                different group. With `verify`, all ranks of the grid are compared. The message
                shows the difference.
            CreationError: The grid's creation strategy cannot work here, another rank failed,
                members could not connect, or the job's store is lost.
            NotInitializedError: torch.distributed is not initialised.
            GridDestroyedError: The grid was destroyed, or was made in the parent process before a
                fork.
        """
        return create_one(
            self._state.table,
            GroupRequest(
                joined(dims, more),
                name=name,
                view=self._named(view),
                backend=backend,
                timeout=timeout,
                pg_options=pg_options,
                group_desc=group_desc,
                share=share,
                derive=derive,
                creation=creation,
                lazy_init=lazy_init,
            ),
        )

    def get_pg(
        self, dims: Dims, *more: Dims, name: str | None = None, view: str | None = None
    ) -> ProcessGroup | None:
        """Return a process group that was created before. Never communicates.

        Returns:
            The group, or None on a rank that is in none of the groups.

        Raises:
            GroupMissingError: The group does not exist. This is a KeyError.
            UnknownDimError, LayoutError: See `RankLayout.order_dims`.
            GridDestroyedError: The grid was destroyed.
        """
        table = self._state.table
        key, _ = table.find_key(joined(dims, more), name, self._named(view))
        return table.get(key)

    def ensure_pg(
        self,
        dims: Dims,
        *more: Dims,
        name: str | None = None,
        view: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        share: Share | None = None,
        derive: Derive | None = None,
        creation: StrategyName | None = None,
        lazy_init: bool | None = None,
    ) -> ProcessGroup | None:
        """Create a process group on the first call, and return the same one afterwards.

        Takes the arguments of `create_pg`, and raises its errors except GroupExistsError.

        Raises:
            GroupOptionsError: The options or derived groups are not the same as in the first call.
        """
        return ensure(
            self._state.table,
            GroupRequest(
                joined(dims, more),
                name=name,
                view=self._named(view),
                backend=backend,
                timeout=timeout,
                pg_options=pg_options,
                group_desc=group_desc,
                share=share,
                derive=derive,
                creation=creation,
                lazy_init=lazy_init,
            ),
        )

    @takes_one("list, as in create_pgs(['tp', 'dp'])")
    def create_pgs(
        self,
        requests: Iterable[Dims | Mapping[str, Any] | GroupRequest],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        share: Share | None = None,
    ) -> list[ProcessGroup | None]:
        """Create several process groups in one call, in the order given.

        Every rank of the grid must call this with the same list. Ranks outside the grid may call
        this too. With the strategies "split" and "enumerate", every rank of the world must call
        this. The lists are compared before any group is created. If torch fails to create one of
        the groups, this rank destroys the groups that the call has created, and raises.

        Args:
            requests: For each group, its dims, a `GroupRequest`, or a mapping with the same names:
                `["tp", ["dp", "cp"], GroupRequest("dp", name="gloo", backend="gloo")]`.
            backend: The backend of requests without a backend.
            timeout: The timeout of requests without a timeout. The longest timeout of all requests
                limits the whole call.
            share: The `share` of requests without `share`.

        Returns:
            The process group of each request, or None, as `create_pg` returns it.

        Raises:
            GroupExistsError: A key occurs twice, or already exists. No group was created.
            PlanMismatchError: Another rank's list differs. The message shows the difference.
            LayoutError, GroupOptionsError, CreationError: See `create_pg`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
            ...     tp, dp_cp = grid.create_pgs(["tp", ["dp", "cp"]])
            ...     print(tp.size(), dp_cp.size(), [str(key) for key in grid.pgs])
            2 4 ['tp', 'cp+dp']
        """
        state, view = self._state, self._view
        table = state.table
        table.check_alive()
        scope = table.grid_scope(table.live_world())
        if table.needs_all_ranks:
            scope = scope.of_all_ranks()

        def find() -> list[tuple[GroupTable, GroupRequest]]:
            return state.read_requests(
                requests, view=view, backend=backend, timeout=timeout, share=share
            )

        return [entry.communicator.pg for entry in create_all(scope, "create_pgs()", find)]

    def destroy_pg(
        self, dims: Dims, *more: Dims, name: str | None = None, view: str | None = None
    ) -> None:
        """Destroy one process group that the grid created.

        All members of the group must call this. They may create the group again, and must create
        and destroy it in the same order. `verify`, `connect` and `reshape` compare the groups of
        all ranks, so before these calls, all ranks of the grid must destroy the same keys. A
        process group that several keys share is destroyed together with the last of these keys. A
        group that the grid does not own is not destroyed.

        Raises:
            GroupMissingError: The group does not exist. This is a KeyError.
            UnknownDimError, LayoutError: See `create_pg`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     _ = grid.create_pg("tp"), grid.create_pg("dp")
            ...     grid.destroy_pg("tp")
            ...     print([str(key) for key in grid.pgs])
            ['dp']
        """
        table = self._state.table
        key, _ = table.find_key(joined(dims, more), name, self._named(view))
        self._state.forget_meshes()
        table.remove(key)

    def edges(
        self, dims: Dims = "pp", *more: Dims, wrap: bool = False, view: str | None = None
    ) -> PipelineEdges:
        """Return the edges of a pipeline: a process group from each stage to each neighbour.

        NCCL runs the transfers of a group one after the other, so a stage that waits for a
        gradient cannot send activations over the same group. This call creates no group. The first
        use of an edge creates its group and waits only for the neighbour. With `wrap` or `verify`,
        the first use may wait for further ranks. `create()` creates the groups of all edges.

        Args:
            dims: The dims of the pipeline.
            more: Further dims.
            wrap: Whether the last stage sends to the first stage, as in interleaved schedules.
            view: The view whose dims these are. Default: the grid's own dims.

        Raises:
            UnknownDimError, LayoutError: See `RankLayout.order_dims`.
            UnknownDimError: The grid has no such view.

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
        view = self._named(view)
        views = self._state.table.views
        names = views.layout_of(view).dim_names
        if dims == "pp" and not more and "pp" not in names and not views:
            raise UnknownDimError(
                f"there is no dim 'pp' in {names}; name the pipeline, as in edges({names[-1]!r})"
            )
        ordered = views.ordered(joined(dims, more), view)
        return PipelineEdges(GridDims(self._state, view, ordered), wrap)

    def explain(
        self,
        dims: Dims,
        *more: Dims,
        name: str | None = None,
        view: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        share: Share | None = None,
        derive: Derive | None = None,
        creation: StrategyName | None = None,
        lazy_init: bool | None = None,
    ) -> Explanation:
        """Return how the process groups over some dims were created, or would be, and why.

        The call creates no group and does not communicate. For a key that exists, the result
        describes the creation of its group, and the other arguments are ignored.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     print(grid.explain("dp"))
            dp: 2 groups of 4 ranks, fake
              local: each rank creates only the groups that it is a member of
              not split: WORLD is not bound to a device: init_process_group(device_id=...) binds it
              not enumerate: it would work too: every rank iterates over every group of the world
        """
        return self._state.table.explain(
            GroupRequest(
                joined(dims, more),
                name=name,
                view=self._named(view),
                backend=backend,
                timeout=timeout,
                pg_options=pg_options,
                group_desc=group_desc,
                share=share,
                derive=derive,
                creation=creation,
                lazy_init=lazy_init,
            )
        )

    def key_of(self, dims: Dims, *more: Dims, name: str | None = None) -> GroupKey:
        """Return the key of the process group over some dims, whether it exists or not.

        Args:
            dims: One name, or several in any order.
            more: Further dims.
            name: The name of a further group over the same dims.

        Raises:
            UnknownDimError, LayoutError: See `RankLayout.order_dims`.
            GridDestroyedError: The grid was destroyed.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid("tp=2,dp=4") as grid:
            ...     _ = grid.create_pg("tp")
            ...     print(grid.key_of("tp") in grid.pgs, grid.key_of("dp", "tp"))
            True tp+dp
        """
        return self._state.table.find_key(joined(dims, more), name, self._view)[0]

    def find(self, group: ProcessGroup | None) -> GroupKey | None:
        """Return the key of a process group of the grid, or None for other groups.

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
        """Return a torch DeviceMesh over the grid's process groups; missing groups are created.

        If a group is missing, all ranks that `HyperCommGrid.create_pg` requires must call this.

        In a DeviceMesh, the LAST dim varies fastest. In a grid, the FIRST dim varies fastest, so
        the grid tp=2,dp=4 becomes the mesh (dp, tp). FSDP2, DTensor and `parallelize_module` accept
        the mesh. The grid stays the owner of the groups. torch cannot combine two meshes, so pass
        slices of one mesh, `mesh["dp"]` and `mesh["tp"]`, to libraries that work together. DTensor
        cannot distinguish meshes with equal ranks and dim names, so this call raises for a second
        mesh with other groups. Meshes that `init_device_mesh` made are not compared.

        Args:
            dims: The dims of the mesh, in the mesh's order. Each dim is a name, or several names
                that become one dim: ("dp", "cp") becomes "dp_cp". Default: all dims of the grid,
                the slowest varying dim first.
            device_type: "cpu", "cuda", ... Default: the device type of the first dim's groups.
            flatten: Maps joint names to adjacent dims of the mesh. For example,
                {"dp_shard_cp": ["dp_shard", "cp"]} makes `mesh["dp_shard_cp"]` the group over both.

        Returns:
            The mesh of the ranks that have the calling rank's coordinates along all other dims.

        Raises:
            RankOutsideError: The calling rank is not in the grid.
            LayoutError: The names of a joint dim are not in the order of the mesh, as in
                ("cp", "dp"). Or DTensor would confuse a dim with an equal dim of another mesh that
                has other groups. Use another name, destroy the other grid first, or let the two
                meshes share groups.
            UnknownDimError, LayoutError: See `RankLayout.order_dims`.
            HyperCommError: See `create_pg`.

        Example:
            Rank = tp * 1 + dp * 2: the grid names tp first, the mesh dp.

            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     mesh = grid.device_mesh("dp", "tp")
            ...     print(grid.coords(), tuple(mesh.get_coordinate()), mesh.mesh.tolist())
            {'tp': 1, 'dp': 2} (2, 1) [[0, 1], [2, 3], [4, 5], [6, 7]]
        """
        from hypercomm.grid.device_mesh import as_mesh

        self._state.table.check_alive()
        return as_mesh(self._state, self._view, dims, device_type, flatten)

    # ---- a running job --------------------------------------------------------------------------

    def connect(
        self, *, pipelines: Dims | None = None, timeout: timedelta | None = None
    ) -> list[Connection]:
        """Connect all existing process groups before the first training step needs them.

        NCCL, and gloo with `lazy_init`, connect the members of a group at its first collective,
        which then hangs if a rank is missing. Every rank of the grid must call this while no
        communication is pending in the groups. Ranks outside the grid need not call this. First,
        the ranks wait for each other and compare their groups, in sorted order. Then the members of
        each group all-reduce one element, and neighbours in a pipeline exchange one element,
        including the last stage and the first. A group that several keys share is connected once.

        If ranks are missing at the start, no group has communicated, and all ranks may call this
        again. After a timeout in a group, that group is broken, because torch cannot undo a
        collective: destroy it with `destroy_pg`, and create it again. `destroy_pg` of a gloo group
        may then wait until the group's timeout.

        Args:
            pipelines: The dims along which neighbours are connected. Each dim connects neighbours
                in the groups over this dim alone. () connects no neighbours. Default: "pp", also
                in views.
            timeout: The timeout of the whole call. Default: the timeout of WORLD.

        Returns:
            A row for each group that the calling rank is in, and for each pair of neighbours. The
            row has the duration in seconds, which is 0 for a group of one rank and in a fake world.

        Raises:
            PlanMismatchError: Ranks have different groups. No group has communicated.
            GroupCreationTimeout: Ranks did not arrive in time. The message names the ranks and
                their groups.
            OutcomeUnknownError: The job's store is lost.
            CreationError: Another thread connects or reshapes the grid, or a collective failed or
                did not end in time. `error.group` names its group.
            LateRankError: The other ranks timed out before this rank arrived. Repeat the call on
                all ranks.
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
        table = self._state.table
        table.check_alive()
        check_timeout(timeout)
        scope = table.grid_scope(table.world or current())
        along: tuple[str, ...] = ("pp",)
        with refusing(scope):
            if pipelines is not None:
                along = self._order(pipelines) if pipelines else ()
            table.check_steady()
            entries = list(self._state.live(self._view).values())
        return connect(entries, along, scope, timeout)

    # ---- training -------------------------------------------------------------------------------

    def seed(self, base: int, *dims: Dims) -> int:
        """Return a seed that differs along some dims, and is equal along all other dims.

        Args:
            base: The seed of the run, at least 0.
            dims: The dims along which the seed differs, such as "tp" for dropout in sharded layers
                or "dp" for data. Without dims the seed is equal on all ranks.

        Returns:
            A seed of 63 bits, the same in every run and on every machine.

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
        base = state.table.layout
        ranks = "ranks" if isinstance(base.ranks, range) else f"{base.size} of the ranks"
        name = "" if self.name is None else f", name={self.name!r}"
        grid = f"HyperCommGrid({base}{name})"
        if self.is_destroyed:
            grid += ", destroyed"
        if self._view is not None:
            return f"view {self._view} ({self.layout}) of {grid}"
        return (
            f"{grid}: {ranks} {base.rank_offset}..{base.last_rank} of a world of {state.world_size}"
        )

    def __str__(self) -> str:
        if self.is_destroyed:
            return repr(self)
        specs = [entry.spec for entry in self._state.live(self._view).values()]
        groups = []
        for spec in specs:
            backend = f", {spec.options.backend}" if spec.options.backend else ""
            groups.append(f"group {spec.key}: {format_counts(spec.groups)}{backend}")
        views = [f"view {name}: {view}" for name, view in self.views.items()]
        lines = [
            position_in(self.layout, self._state.table.given_world),
            *views,
            *(groups or ["no process groups yet"]),
        ]
        return "\n  ".join([repr(self), *lines])

    def __reduce_ex__(self, _: SupportsIndex, /) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: it owns live process groups; send "
            f"grid.layout instead, and build the grid from it there: HyperCommGrid(layout)"
        )


_USUAL_NAMES = {
    "get_group": "grid['tp'].group",
    "get_local_rank": "grid['tp'].rank",
    "get_coordinate": "grid.coords()",
    "rank": "grid.coords(), or grid['tp'].rank in a group",
    "ranks": "grid.layout.ranks, or grid['tp'].ranks of a group",
    "world_size": "grid.size, or torch.distributed.get_world_size() for all ranks",
}
"""Maps attributes of DeviceMesh, torch and others to what a grid has in their place."""


def state_of(grid: GridView) -> GridState:
    """Return the state of a grid, for the other modules of this package."""
    return grid._state


def joined(dims: Dims, more: tuple[Dims, ...]) -> Dims:
    """Return the dims of a call as one value. They may be one argument or several."""
    return (dims, *more) if more else dims


def position_in(layout: RankLayout, world: World | None = None) -> str:
    """Return the position of the calling rank in a layout, as text."""
    try:
        rank = rank_in_world(None, world)
    except HyperCommError:
        return "this rank is not known: torch.distributed is not initialised"
    if rank not in layout:
        return f"this is rank {rank}, outside the grid"
    return f"this is rank {rank}, at {format_coords(layout.coords(rank))}"
