"""HyperCommGrid: owns a hyperrectangle of ranks, and the process groups created from it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from hypercomm.errors import GroupOptionsError, LayoutError
from hypercomm.grid import device_mesh
from hypercomm.grid.arguments import (
    Cover,
    Creation,
    GivenSizes,
    GridKeywords,
    GridOptions,
    Share,
    Sizes,
    as_factors_of,
    as_layout,
    as_target,
    as_texts,
    check_keywords,
    check_world,
)
from hypercomm.grid.looks import GridLooks
from hypercomm.grid.questions import GridState, owner_of
from hypercomm.grid.view import GridView
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_ranks
from hypercomm.layout.parsing import parse_sizes
from hypercomm.layout.views import Views
from hypercomm.process_groups import reshaping, world
from hypercomm.process_groups.agreement.steps import limit_of
from hypercomm.process_groups.agreement.together import refusing
from hypercomm.process_groups.creation.creation import abort, destroy
from hypercomm.process_groups.job import current_or_none
from hypercomm.process_groups.options import check_timeout
from hypercomm.process_groups.owner import GroupOwner
from hypercomm.process_groups.planned import Pool
from hypercomm.process_groups.reshaping import Reshaped, alone, check_settled, steps_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self, Unpack  # typing has them from Python 3.11 on

logger = logging.getLogger(__name__)


class HyperCommGrid(GridLooks):
    """An N-dimensional grid of ranks that creates process groups by dim names.

    The first dim varies fastest, as in Megatron's `order` and opposite to DeviceMesh. The grid
    owns what it creates: `destroy()`, or leaving its `with` block, destroys exactly that.

    Args:
        shape: Size of each dim, in ranks: as text, "tp=2,dp=-1"; by name, {"tp": 2, "dp": -1}; as
            ints, beside `dim_names`; or a `RankLayout`. One may be -1: it fills the world from
            `rank_offset` on. Default: what the environment's HYPERCOMM_LAYOUT says.
        dim_names: Name of each dim, in the order of `shape`, where that does not say.
        rank_offset: The smallest rank, where the grid does not begin at rank 0.
        backend: Backend of the groups; default: that of WORLD.
        name: Tells this grid apart from others; every rank must give the same one. Ranks come to
            grids of one name that overlap in the same order; grids that they come to in different
            orders, in threads for example, need different names.
        cover: "exact" refuses a grid that leaves ranks of the world out.
        creation: How groups are created. "local": each rank creates only its own; "split": every
            rank of the world splits WORLD once, where WORLD is bound to a device; "enumerate":
            every rank walks every group, as torch does; "auto" takes the first of split (if the
            grid has all ranks of the world), local, split, enumerate that works.
        share: "identical" lets keys with the same ranks, backend and options hold one group.
        share_with: Another grid whose groups may serve this one's keys too, under
            `share="identical"`. The grid that has such a group last destroys it.
        world_size: Number of ranks of the job; default: that of torch.distributed, else of what
            a launcher left in the environment, such as WORLD_SIZE.
        lazy_init: True lets the grid's gloo and NCCL groups connect each pair of ranks at their
            first message, not at the creation, which then waits for nobody; False connects them at
            the creation; default: gloo as the environment's TORCH_GLOO_LAZY_INIT says, NCCL as
            torch does: at the first message before 2.15, unless WORLD is bound to a device. gloo of
            torch 2.6 cannot.
        verify: True compares each creation, with its position, with those of the other ranks, for
            one question to the store each; default: as the environment's HYPERCOMM_VERIFY says.

    Raises:
        LayoutError: As for `RankLayout`.
        WorldSizeError: The grid reaches beyond the world, or leaves ranks out with
            `cover="exact"`.
        NotInitializedError: Nothing tells the world size.
        GroupOptionsError: The backend is unknown, or one of the choices is.

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
        cover: Cover = "any",
        creation: Creation = "auto",
        share: Share = "never",
        share_with: HyperCommGrid | None = None,
        world_size: int | None = None,
        lazy_init: bool | None = None,
        verify: bool | None = None,
    ) -> None:
        keywords: GridKeywords = {"backend": backend, "name": name, "cover": cover}
        keywords |= {"creation": creation, "share": share, "world_size": world_size}
        keywords |= {"lazy_init": lazy_init, "verify": verify}
        layout = as_layout(shape, dim_names, rank_offset, world_size)
        self._setup(layout, share_with, keywords)

    @classmethod
    def parse(cls, text: str, rank_offset: int = 0, **keywords: Unpack[GridKeywords]) -> Self:
        """Make a grid of sizes as text; the arguments are those of the class.

        Example:
            >>> HyperCommGrid.parse("tp=2,dp=-1", world_size=8).shape
            [2, 4]
        """
        check_keywords("parse", keywords, GridKeywords.__annotations__)
        return cls(parse_sizes(text), rank_offset=rank_offset, **keywords)

    @classmethod
    def from_layout(
        cls,
        layout: RankLayout,
        *,
        share_with: HyperCommGrid | None = None,
        **keywords: Unpack[GridKeywords],
    ) -> Self:
        """Make a grid of a layout, gaps included; the arguments are those of the class.

        Example:
            >>> HyperCommGrid.from_layout(RankLayout.parse("tp=2,dp=4"), world_size=8).shape
            [2, 4]
        """
        if not isinstance(layout, RankLayout):
            raise LayoutError(f"from_layout() takes a RankLayout, got {layout!r}")
        check_keywords("from_layout", keywords, GridKeywords.__annotations__)
        grid = cls.__new__(cls)
        grid._setup(layout, share_with, keywords)
        return grid

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, *, name: str | None = None) -> Self:
        """Make a grid of a torch DeviceMesh, which stays the owner of its process groups.

        The grid has the mesh's dims in reverse, so that the first varies fastest, and finds the
        mesh's groups under them. What it creates itself it owns; `destroy` leaves the mesh's
        groups alone, and WORLD; they serve no other keys, whatever `share` says. No process group
        is created, and nobody is asked.

        Args:
            mesh: A mesh with dim names, or a slice of one such as `mesh["dp"]`.
            name: As for the class.

        Raises:
            LayoutError: The mesh has no dim names or one that a grid cannot have, or its ranks are
                permuted and its groups are not: torch sorts them, `grid.device_mesh()` does not.

        Example:
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5):
            ...     mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
            ...     grid = HyperCommGrid.from_device_mesh(mesh)
            ...     print(grid.layout, grid.group_ranks("dp"), grid.get_pg("dp").size())
            tp=2,dp=4 (1, 3, 5, 7) 4
        """
        layout, groups = device_mesh.read_mesh(mesh)
        grid = cls.from_layout(layout, name=name)
        grid._state.device_type = mesh.device_type
        for dim in layout.dim_names:
            grid._owner.adopt(dim, groups[dim] if groups is not None else None)
        return grid

    def _setup(
        self, layout: RankLayout, share_with: HyperCommGrid | None, keywords: GridKeywords
    ) -> None:
        options = GridOptions(**keywords)
        if share_with is not None and not isinstance(share_with, HyperCommGrid):
            raise GroupOptionsError(f"share_with must be a HyperCommGrid, got {share_with!r}")
        total = world.world_size(options.world_size)
        check_world(layout, total, options.cover)
        lender = None if share_with is None else share_with._state
        pool = Pool(None if lender is None else lender.owner.pool)
        owner = owner_of(layout, options, pool)
        job = current_or_none()
        known = job if job is not None and job.size == total else None
        self._state = GridState(Views(layout), owner, options, total, lender, job=known)
        weakref.finalize(self, self._state.warn_of_live).atexit = False

    # ---- views --------------------------------------------------------------------------------

    def register_view(
        self,
        name: str,
        shape: GivenSizes,
        dim_names: Iterable[str] | None = None,
        shared_dims: Iterable[str] | None = None,
    ) -> None:
        """Add another factorisation of the grid's ranks, such as that of a model's expert layers.

        `create_pg`, `get_pg` and the other calls take its dims with `view=name`; `view(name)` is an
        object with all of them. Every rank of the grid must register the same views; they are
        compared when groups are first created in them.

        Args:
            name: What the view is asked for by.
            shape: Size of each dim, in ranks, as for the class; one may be -1.
            dim_names: Name of each dim, in the order of `shape`, where that does not say.
            shared_dims: Dims that are the grid's too, with the same groups: these then have one
                process group in both.

        Raises:
            LayoutError: The name is taken, the sizes do not multiply to the ranks of the grid, or
                a shared dim has other groups in the view; shows both.
            UnknownDimError: A shared dim is not one of both.

        Example:
            >>> grid = HyperCommGrid([2, 4, 2], ["tp", "dp", "pp"], world_size=16)
            >>> grid.register_view("expert", "ep=4,expt_dp=-1,pp=2", shared_dims=["pp"])
            >>> grid.get_rank_enum("ep", view="expert")[0], grid.view("expert").coords(5)
            ([0, 1, 2, 3], {'ep': 1, 'expt_dp': 1, 'pp': 0})

        Source: names and arguments follow newer versions of `megatron.core.hyper_comm_grid`.
        """
        self._owner.check_alive()
        sizes, names = as_factors_of(shape, dim_names, self.layout.size)
        self._state.views.register(name, sizes, names, shared_dims)

    def view(self, name: str) -> GridView:
        """Return a view as an object with the interface of a grid; the grid stays the owner.

        Raises:
            UnknownViewError: There is no such view; names those that are.
        """
        return GridView(self._state, name)

    # ---- another shape ------------------------------------------------------------------------

    def reshape(
        self,
        target: str | RankLayout,
        *,
        views: Mapping[str, str] | None = None,
        ranks: Iterable[int] | None = None,
        timeout: timedelta | None = None,
    ) -> Reshaped:
        """Give the grid's ranks another layout, in a live job; keys that exist get new groups.

        Every rank of the grid must call this, and with creation "split" or "enumerate" every rank
        of the world; each waits for the others, as long as the timeout of WORLD. Process groups
        whose ranks and options are those of a key of the new layout are kept; what is missing is
        created, and the rest destroyed, in this order, so that whatever fails leaves the grid as
        it was. Keys over dims that are no more are destroyed.

        With `ranks` the grid goes on with these ranks of WORLD: those that are left of a job that
        has lost some, or more that came. They alone must call this, and wait for each other; a
        spare rank may, and is then outside the grid. No group is kept, as a loss may have broken
        it, and the old ones are ended without waiting. The ranks meet in the job's store: where
        the process that serves it is lost, rank 0 as a rule, the job must be restarted.

        Args:
            target: Sizes as text, as in "tp=4,dp=2", one of them perhaps open; or a layout of the
                same ranks.
            views: New sizes as text, by name, of the views that change.
            ranks: Those that the grid goes on with, in the order of the target's numbering.
            timeout: How long to wait for the others; default: the timeout of WORLD.

        Returns:
            What was kept, created and destroyed on this rank; `print` shows it.

        Raises:
            WorldSizeError: The target has other ranks than the grid, or than `ranks`.
            LayoutError: The target or the ranks cannot be read, or a view does not fit.
            UnknownViewError: `views` names a view that there is not.
            PlanMismatchError: Another rank reshapes to something else, or failed: all raise.
            GroupCreationTimeout: A rank did not call this in time; names it (`error.missing`).
            CreationError: Groups are planned that were not created, one could not be, another
                thread reshapes the grid, or the others gave up on this rank: call it again.
            GridMismatchError, GridDestroyedError, ForkedError: As for `create_pg`.

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
        owner, state = self._owner, self._state
        owner.check_alive()
        check_timeout(timeout)
        is_live = ranks is not None and current_or_none() is not None
        total = world.world_size(None if is_live else state.world_size)
        left = None if ranks is None else as_ranks(ranks, "ranks", total)
        with alone(owner), steps_of(owner, left) as steps:
            with refusing(steps, reshaping.CALL):
                layout = as_target(target, self.layout, left)
                refactored = state.views.refactored(layout, as_texts(views, "views"))
                check_settled(owner)

            def make(shape: str) -> GroupOwner:
                pool = owner.pool if left is None else Pool()
                return owner_of(layout, state.options, pool, steps, shape=shape)

            limit_s = limit_of(timeout)
            fresh, result, pending = reshaping.reshape(owner, make, refactored, steps, limit_s)
            with self._changing():
                state.views, state.owner, state.world_size = refactored, fresh, total
        owner.end(destroy if left is None else abort)
        if pending is not None:
            raise pending
        logger.info("reshaped: %s", result)
        return result

    # ---- life cycle ---------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroy the groups that the grid created, the last one first; may be called twice.

        Groups that the grid did not create stay, WORLD included. Afterwards the grid still
        answers questions about ranks, but has no groups and creates none.
        """
        with self._changing():
            self._owner.end(destroy)
        self._owner.leave()

    def abort(self) -> None:
        """End the groups that the grid created, at once: collectives under way fail.

        For a rank whose peers are gone: NCCL communicators are aborted, other groups destroyed
        without waiting. The grid is then as destroyed.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8):
            ...     grid = HyperCommGrid([2, 4], ["tp", "dp"])
            ...     tp = grid.create_pg("tp")
            ...     grid.abort()
            ...     print(len(grid.pgs))
            0
        """
        with self._changing():
            self._owner.end(abort)

    def verify(self, timeout: timedelta | None = None) -> None:
        """Check that all ranks of the grid have planned the same process groups so far, in order.

        Every rank of the grid must call this; each waits for the others. It costs a rank three
        questions to the store, however many groups there are.

        Args:
            timeout: How long to wait; default: the timeout of WORLD.

        Raises:
            PlanMismatchError: Another rank's groups differ; names the first one that does.
            GroupCreationTimeout: A rank did not call this in time; names it.
            GridMismatchError: Another rank means another grid.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     _ = grid.create_pg("tp")
            ...     grid.verify()  # a fake world has nobody to ask
        """
        check_timeout(timeout)
        self._owner.verify(timeout)

    def __enter__(self) -> Self:
        self._owner.check_alive()
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()
