"""HyperCommGrid: a grid of ranks that owns its process groups.

The class extends `GridView`, which answers questions about ranks and creates groups. It adds the
methods of an owner, for example to register views, to reshape and to destroy.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

from hypercomm.blame.watch import Watch
from hypercomm.errors import CreationError, time_of
from hypercomm.grid.arguments import (
    Cover,
    GivenSizes,
    Sizes,
    check_cover,
    check_dims,
    read_target,
)
from hypercomm.grid.state import GridState
from hypercomm.grid.view import GridView, state_of
from hypercomm.layout import RankLayout, read_layout
from hypercomm.layout.checks import as_int, as_ranks, as_world_size, check_duration
from hypercomm.layout.views import BASE, Views
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.creation import verify
from hypercomm.process_groups.meeting import refusing
from hypercomm.process_groups.reshape import Reshaped, find_survivors, reshape, successor
from hypercomm.process_groups.spec import GridOptions, Share, StrategyName, check_timeout
from hypercomm.process_groups.table import GroupTable
from hypercomm.process_groups.world import GridIdentity, World, current, size_of_world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self  # typing has it from Python 3.11 on

logger = logging.getLogger(__name__)


class HyperCommGrid(GridView):
    """An N-dimensional grid of ranks that creates process groups by dim names.

    The first dim varies fastest, as in Megatron's `order` and opposite to DeviceMesh. The grid
    owns the groups that it creates: `destroy()`, or the end of its `with` block, destroys exactly
    these groups.

    Args:
        shape: The sizes in any form: text "tp=2,dp=-1", a mapping {"tp": 2, "dp": -1}, sizes [2, 4]
            with `dim_names`, keywords tp=2, dp=4, a `RankLayout`, or another grid. One size may be
            -1. It is inferred so that the grid fills the world from `rank_offset` on. Default: the
            environment variable HYPERCOMM_LAYOUT.
        dim_names: The name of each dim, in the order of `shape`, if `shape` has no names.
        rank_offset: The smallest rank, if the grid does not start at rank 0.
        backend: The backend of the groups. Default: the backend of WORLD.
        name: A name that distinguishes this grid from others. It must be the same on every rank.
            Ranks must make overlapping grids with equal names in the same order. Give different
            names to grids that ranks make in different orders, for example in threads.
        cover: "exact" rejects a grid that leaves out ranks of the world, and "any" accepts it.
            Default: warn about ranks that are left out if the sizes are given as text, as a
            mapping or as keywords, without `rank_offset`.
        creation: The strategy that creates groups. "local": each rank creates only its own groups.
            "split": every rank of the world splits WORLD once, which needs a WORLD that is bound to
            a device. "enumerate": every rank creates every group, as `torch.distributed` does.
            "auto": the first of these strategies that works, but if the grid has all ranks of the
            world, "split" is tried first.
        share: "identical" lets keys with the same ranks, backend and options use the same group.
        world_size: The number of ranks of the job. Default: the world size of torch.distributed, or
            else the world size in the launcher's environment, such as WORLD_SIZE.
        lazy_init: True connects each pair of ranks of a gloo or NCCL group at their first message.
            False connects all pairs at the creation. In both cases, the creation waits for all
            group members. Default: the environment variable TORCH_GLOO_LAZY_INIT for gloo, and
            torch's default for NCCL.
        verify: True compares on all ranks which groups they create, and in which order, at the cost
            of one store operation per creation. Default: the environment variable HYPERCOMM_VERIFY.
        enable_reconfigure: True creates groups that stay when `reshape(ranks=)` gives the grid
            other ranks, so modules that hold these groups, such as DistributedDataParallel,
            continue to work. Only gloo and NCCL support this option. It is experimental in torch
            2.14, and missing in earlier releases.
        world: A world from `join_world`, whose ranks the grid numbers. Default: WORLD.
        dims: Sizes by name, in place of `shape` and `dim_names`.

    Raises:
        LayoutError: See `RankLayout`.
        WorldSizeError: The grid does not fit the world, or leaves out ranks with `cover="exact"`.
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
        identity = GridIdentity.of(layout, name, backend)
        table = GroupTable(identity, Views(layout), options, world=world)
        super().__init__(GridState(table, options, total), None)
        weakref.finalize(self, self._state.warn_of_live).atexit = False

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, *, name: str | None = None) -> Self:
        """Make a grid from a torch DeviceMesh, which stays the owner of its process groups.

        The grid has the mesh's dims in reverse order, so that the first dim varies fastest. It has
        the mesh's groups under the names of the dims. `destroy` destroys the groups that the grid
        created, but neither the mesh's groups nor WORLD. The mesh's groups serve no other keys,
        even with `share="identical"`. This call creates no process group and does not communicate.

        Args:
            mesh: A mesh with dim names, or a slice of one such as `mesh["dp"]`.
            name: See the class.

        Raises:
            LayoutError: The mesh has no dim names, or has a name that a grid cannot have. Or the
                ranks of the mesh do not ascend, and torch has sorted the ranks of its groups.

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
        """Add another factorisation of the grid's ranks, such as the dims of expert layers.

        `create_pg`, `get_pg`, `ensure_pg`, `destroy_pg`, `edges`, `explain` and `get_rank_enum`
        accept the view's dims with `view=name`. `view(name)` returns a `GridView`. Every rank of
        the grid must register the same views. The views are compared when groups are created in
        them: if two ranks of a group differ, all ranks of the group raise PlanMismatchError.

        Args:
            name: The name of the view.
            shape: The size of each dim, in any form that the class accepts. One size may be -1.
            dim_names: The name of each dim, in the order of `shape`, if `shape` has no names.
            shared_dims: Dims that the grid also has, with the same groups. Such a dim has one
                process group, which the grid and the view share.

        Raises:
            LayoutError: The name is taken, the sizes do not multiply to the size of the grid, or a
                shared dim has other groups in the view than in the grid.
            UnknownDimError: A shared dim is missing in the grid or in the view.

        Example:
            >>> grid = HyperCommGrid([2, 4, 2], ["tp", "dp", "pp"], world_size=16)
            >>> grid.register_view("expert", "ep=4,expt_dp=-1,pp=2", shared_dims=["pp"])
            >>> grid.get_rank_enum("ep", view="expert")[0], grid.view("expert").coords(5)
            ([0, 1, 2, 3], {'ep': 1, 'expt_dp': 1, 'pp': 0})

        Source: names and arguments follow newer versions of `megatron.core.hyper_comm_grid`.
        """
        self._state.table.check_alive()
        self._state.table.views.register(name, shape, dim_names, shared_dims)

    def view(self, name: str) -> GridView:
        """Return a view as an object with the interface of a grid, which still owns all groups.

        Args:
            name: The name of the view, or "base" for the grid's own dims.

        Raises:
            UnknownDimError: The grid has no such view. The message lists its views.
        """
        is_base = isinstance(name, str) and name == BASE
        return GridView(self._state, None if is_base else self._state.table.views[name].name)

    # ---- another shape --------------------------------------------------------------------------

    def reshape(
        self,
        target: str | Mapping[str, int] | RankLayout,
        *,
        views: Mapping[str, str] | None = None,
        ranks: Iterable[int] | None = None,
        timeout: timedelta | None = None,
    ) -> Reshaped:
        """Change the layout of a grid in a running job; existing keys get new groups.

        Every rank of the grid must call this. With creation "split" or "enumerate", the grid must
        have all ranks of the world. Process groups whose ranks and options match a key of the new
        layout are kept, missing groups are created, and then the old groups that were not kept
        are destroyed. A failure therefore leaves the grid as it was. Keys over dims that no longer
        exist are destroyed.

        With `ranks`, the grid continues with the given ranks of WORLD, which may be the survivors
        of a loss, or more ranks than before. Only these ranks must call this. A spare rank may call
        this too, and is then outside the grid. No group is kept, because a loss may have broken
        any group, and the old groups are aborted. With `enable_reconfigure`, however, the groups
        stay and get other members. The ranks meet through the job's store. If the process that
        serves the store is lost, usually rank 0, the job must be restarted.

        Args:
            target: The new sizes, as text ("tp=4,dp=2") or by name, or a layout of the same ranks.
                One size may be -1.
            views: Maps the name of each view that changes to its new sizes, as text.
            ranks: The ranks to continue with, in the order of the target's numbering.
            timeout: How long to wait for the other ranks. Default: the timeout of WORLD.

        Returns:
            The keys that were kept, created and destroyed on this rank. `str()` lists these keys.

        Raises:
            WorldSizeError: The target does not have the ranks of the grid, or the given `ranks`.
            LayoutError: The target or the ranks cannot be read, or a view does not fit.
            UnknownDimError: `views` has a name that is not a view.
            PlanMismatchError: Another rank has a different target or grid. All ranks raise.
            GroupCreationTimeout: A rank did not call this in time. See `error.missing`.
            CreationError: Another thread creates groups or reshapes the grid, a group could not be
                created, or the other ranks timed out just before this rank arrived. In the last
                case, repeat the call on all ranks.
            GridDestroyedError: See `create_pg`.

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
        left = None if ranks is None else as_ranks(ranks, "ranks=", total)
        has_switched = False

        def switch() -> None:
            nonlocal has_switched
            has_switched = True
            state.table, state.world_size = fresh, total
            self._dims = {}

        try:
            with table.reshaping():
                if state.table is not table:
                    raise CreationError(
                        "another thread has just reshaped this grid; call reshape() again"
                    )
                scope = None if world is None else table.reshape_scope(world, left)
                with refusing(scope):
                    layout = read_target(target, self.layout, left)
                    refactored = table.views.refactored(layout, views or {})
                    table.check_settled()
                    identity = GridIdentity.of(layout, self.name, self.backend)
                    keeps = left is None
                    fresh = successor(table, identity, refactored, keeps=keeps)
                if scope is None or world is None:  # without a world there are no groups
                    result = Reshaped(table.layout, layout)
                    switch()
                else:
                    limit_s = world.limit_s(timeout)
                    result = reshape(table, fresh, scope, limit_s, keeps=keeps, switch=switch)
        finally:
            if has_switched:
                state.forget_meshes()  # of the calling thread
                table.end(torchdist.destroy if left is None else torchdist.abort)
        logger.info("reshaped: %s", result)
        return result

    # ---- a running job --------------------------------------------------------------------------

    def watch(self, seconds: float, folder: str | os.PathLike[str] = "hypercomm_watch") -> Watch:
        """Write a report for `hypercomm blame` if no collective makes progress for a while.

        Call this on every rank, between the same collectives, before or after the groups are
        created. The watch records every Python call of a communicating method of any ProcessGroup
        in this process, and keeps the last 500 calls. Recording takes 4 to 7 microseconds a call.
        If no call has started or ended for `seconds`, a thread writes the calls and the stack of
        the main thread to `hypercomm_watch_RANK.json`, in the format of torch's flight recorder.
        The file is written again if the stack changes, and removed when calls make progress again.
        It is also written at the end of the `with` block, with the exception that ended the block,
        if any.

        Calls from C++ (DistributedDataParallel's buckets) and functional collectives (DTensor,
        compiled code) are not recorded. Do not use a watch while CUDA graphs are captured.

        Args:
            seconds: Seconds without progress, less than the groups' timeout; for example 60.
            folder: The folder of the file. It is created if it is missing, but its parent is not.
                Prefer a disk that all hosts share.

        Returns:
            A `Watch`, which is a context manager. `stop()` ends it too.

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
        state = self._state  # a reshape replaces its views and its table

        def layouts() -> dict[str, RankLayout]:
            views = state.table.views
            return {"": views.base, **{name: view.layout for name, view in views.items()}}

        def groups() -> list[ProcessGroup | None]:
            return [entry.communicator.pg for entry in state.table.live().values()]

        return Watch(seconds, folder, layouts, groups, (state.table.world or current()).rank)

    def survivors(self, timeout: timedelta, *, min_ranks: int = 1) -> tuple[int, ...]:
        """Return the ranks of the grid that are alive after a loss, equal on all of these ranks.

        Every rank that is alive calls this after a collective has failed, and then
        `reshape(target, ranks=...)`. First, the call ends the grid's process groups, so that peers
        that wait in these groups fail too. NCCL groups end immediately. gloo groups end when the
        program holds no other reference to them. In an `except` block, the call clears the local
        variables of the frames that the exception passed through, because the variables may hold
        such references. Groups of a grid with `enable_reconfigure` stay, with the calling rank as
        their only member until the `reshape`. Peers that wait in such groups fail immediately.

        Args:
            timeout: How long to wait for ranks that do not arrive. It must be longer than the
                timeout of the grid's groups, because other ranks may still wait in these groups.
                Groups that can be reconfigured have no such limit. The ranks that arrived then
                confirm the result with each other. A rank that dies during the call extends the
                wait by `timeout`.
            min_ranks: The smallest number of ranks that may continue.

        Returns:
            The ranks that arrived, in the order of the layout. A rank that is alive but waits
            elsewhere is not included.

        Raises:
            RankOutsideError: The calling rank is not in the grid.
            CreationError: This rank arrived too late and the other ranks continue without it, or
                fewer than `min_ranks` ranks arrived.
            OutcomeUnknownError: The job's store is lost; restart the job.
            GroupOptionsError: `timeout` is not a positive timedelta, or not longer than the
                timeout of the grid's groups.

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
        self.coords()  # raises on a rank outside the grid
        table.check_outlasts(timeout)
        least = as_int(min_ranks, "min_ranks")
        self._state.forget_meshes()
        error = sys.exc_info()[1]
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        table.end_groups()
        return find_survivors(table.identity, table.world, timeout.total_seconds(), least)

    # ---- life cycle -----------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroy the groups that the grid created, the last group first.

        Each rank calls this after its last collective. The call does not wait for other ranks.
        Groups that the grid did not create stay, including WORLD. Afterwards, the grid still
        answers questions about ranks, but has no groups and creates none. A second call does
        nothing.
        """
        self._state.forget_meshes()
        self._state.table.end(torchdist.destroy)

    def abort(self) -> None:
        """Abort the groups that the grid created, so that pending collectives fail.

        Use it on a rank whose peers are lost. NCCL communicators are aborted, and other groups are
        destroyed without waiting. The grid is destroyed afterwards.

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

        Every rank of the grid must call this, and waits for all other ranks. Groups are compared in
        sorted order, so ranks may have created them in different orders. A rank performs about
        five store operations, whatever the number of groups.

        Args:
            timeout: How long to wait. Default: the timeout of WORLD.

        Raises:
            PlanMismatchError: Groups or grids differ. The message shows the difference.
            GroupCreationTimeout: A rank did not call this in time. The message names it.

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

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            time_of(error)  # before the other ranks lose their connections
        self.destroy()
