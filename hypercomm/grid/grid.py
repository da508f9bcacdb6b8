"""HyperCommGrid: owns a hyperrectangle of ranks, and the process groups created from it.

It is the view of its own dims (`GridView`), and owns the state: it registers other views, reshapes
and destroys.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

from hypercomm.blame.watch import Watch
from hypercomm.errors import GroupOptionsError
from hypercomm.grid.arguments import (
    Cover,
    GivenSizes,
    GridOptions,
    Sizes,
    check_cover,
    check_dims,
    read_target,
)
from hypercomm.grid.dims import PipelineEdges
from hypercomm.grid.view import GridState, GridView, joined, state_of
from hypercomm.layout import RankLayout, read_layout
from hypercomm.layout.checks import as_int, as_ranks, as_world_size, check_duration
from hypercomm.layout.parsing import Dims
from hypercomm.layout.views import Views
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.agreement.driver import limit_of, refusing
from hypercomm.process_groups.agreement.grid import GridAgreement
from hypercomm.process_groups.creation import verify
from hypercomm.process_groups.explanation import Explanation
from hypercomm.process_groups.options import check_timeout
from hypercomm.process_groups.reshape import Reshaped, reshape, successor
from hypercomm.process_groups.spec import Derive, GroupRequest, Share, StrategyName
from hypercomm.process_groups.table import GroupTable
from hypercomm.process_groups.world import World, current, size_of_world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self  # typing has it from Python 3.11 on

logger = logging.getLogger(__name__)


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
        lender = None if share_with is None else state_of(share_with)
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
            state_of(grid).table.adopt(dim, groups[dim] if groups is not None else None)
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
        self._state.table.check_alive()
        self._state.views.register(name, shape, dim_names, shared_dims)

    def view(self, name: str) -> GridView:
        """Return a view as an object with the interface of a grid; the grid stays the owner.

        Raises:
            UnknownDimError: There is no such view; names those that exist.
        """
        return GridView(self._state, self._state.views[name].name)

    # ---- process groups, also of a view named by `view=` ----------------------------------------

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
        return self._state.views.groups(joined(dims, more), view).to_lists()

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
        return self._state.create(
            GroupRequest(
                joined(dims, more),
                name=name,
                view=view,
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
        return self._state.get(joined(dims, more), name, view)

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

        Takes the arguments of `create_pg`, and raises its errors, except for a key that exists.

        Raises:
            GroupOptionsError: The options given, or the groups derived, differ from those of the
                first call.
        """
        return self._state.ensure(
            GroupRequest(
                joined(dims, more),
                name=name,
                view=view,
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
        self._state.remove(joined(dims, more), name, view)

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
        if view is not None:
            return self.view(view).edges(dims, *more, wrap=wrap)
        return super().edges(dims, *more, wrap=wrap)

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
        return self._state.explain(
            GroupRequest(
                joined(dims, more),
                name=name,
                view=view,
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
            self._state.forget_meshes()
            state.views, state.table, state.world_size = refactored, fresh, total
            self._dims = {}
        table.end(torchdist.destroy if left is None else torchdist.abort)
        if pending is not None:
            raise pending
        logger.info("reshaped: %s", result)
        return result

    # ---- a running job --------------------------------------------------------------------------

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

        return Watch(seconds, folder, layouts, groups, (state.table.world or current()).rank)

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
        table = self._state.table
        table.check_alive()
        check_duration(timeout)
        self.coords()  # raises on a rank outside
        table.check_outlasts(timeout)
        least = as_int(min_ranks, "min_ranks")
        self._state.forget_meshes()
        error = sys.exc_info()[1]
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        table.end_groups()
        return table.identity.find_survivors(table.world, timeout.total_seconds(), least)

    # ---- life cycle -----------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroy the groups that the grid created, the last one first; may be called twice.

        Groups that the grid did not create stay, WORLD included. Afterwards the grid still
        answers questions about ranks, but has no groups and creates none.
        """
        self._state.forget_meshes()
        self._state.table.end(torchdist.destroy)

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
        self._state.forget_meshes()
        self._state.table.end(torchdist.abort)

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
        verify(self._state.table, timeout)

    def __enter__(self) -> Self:
        self._state.table.check_alive()
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()
