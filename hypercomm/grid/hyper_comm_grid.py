"""HyperCommGrid: owns a hyperrectangle of ranks, and the process groups created from it."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from hypercomm import device_mesh
from hypercomm.errors import GroupOptionsError, LayoutError
from hypercomm.grid import looks
from hypercomm.grid.arguments import (
    Cover,
    Creation,
    Share,
    as_target,
    as_texts,
    check_choice,
    check_name,
    check_world,
)
from hypercomm.grid.interface import GridInterface, GridState
from hypercomm.grid.view import GridView
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import positive
from hypercomm.layout.views import Views
from hypercomm.process_groups import world
from hypercomm.process_groups.agreement import Agreement
from hypercomm.process_groups.options import (
    as_verified,
    check_known,
    check_lazy_init,
    check_timeout,
)
from hypercomm.process_groups.owner import GroupOwner
from hypercomm.process_groups.reshaping import Reshaped, declining, reshape
from hypercomm.process_groups.strategies import STRATEGIES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self  # typing has it from Python 3.11 on


logger = logging.getLogger(__name__)


class HyperCommGrid(GridInterface):
    """An N-dimensional grid of ranks that creates process groups by dim names.

    The first dim varies fastest, as in Megatron's `order` and opposite to DeviceMesh. The grid
    owns what it creates: `destroy()`, or leaving its `with` block, destroys exactly that.

    Args:
        shape: Size of each dim, in ranks.
        dim_names: Name of each dim, in the order of `shape`.
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
        world_size: Number of ranks of the job; default: that of torch.distributed, else of the
            environment's WORLD_SIZE.
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
        >>> with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
        ...     dp_cp = grid.create_pg(["dp", "cp"])
        ...     print(grid.coords(), grid.group_ranks(["dp", "cp"]), dp_cp.size())
        {'tp': 1, 'cp': 0, 'dp': 1} (1, 3, 5, 7) 4

    Source: names, signatures and behaviour of `create_pg`, `get_pg`, `get_rank_enum`,
    `_gen_rank_enum` and `_order_dims` follow `megatron.core.hyper_comm_grid`.
    """

    def __init__(
        self,
        shape: Iterable[int],
        dim_names: Iterable[str],
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
        layout = RankLayout(shape, dim_names, rank_offset)
        self._setup(
            layout, backend, name, cover, creation, share, share_with, world_size, lazy_init, verify
        )

    @classmethod
    def from_layout(
        cls,
        layout: RankLayout,
        *,
        backend: str | None = None,
        name: str | None = None,
        cover: Cover = "any",
        creation: Creation = "auto",
        share: Share = "never",
        share_with: HyperCommGrid | None = None,
        world_size: int | None = None,
        lazy_init: bool | None = None,
        verify: bool | None = None,
    ) -> Self:
        """Make a grid of a layout, gaps included; the arguments are those of the class.

        Example:
            >>> layout = RankLayout.parse("tp=2,dp=-1", world_size=8)
            >>> HyperCommGrid.from_layout(layout, world_size=8).shape
            [2, 4]
        """
        if not isinstance(layout, RankLayout):
            raise LayoutError(f"from_layout() takes a RankLayout, got {layout!r}")
        grid = cls.__new__(cls)
        grid._setup(
            layout, backend, name, cover, creation, share, share_with, world_size, lazy_init, verify
        )
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
        self,
        layout: RankLayout,
        backend: str | None,
        name: str | None,
        cover: str,
        creation: str,
        share: Share,
        share_with: HyperCommGrid | None,
        world_size: int | None,
        lazy_init: bool | None,
        verify: bool | None,
    ) -> None:
        check_choice("cover", cover, ("any", "exact"))
        check_choice("creation", creation, ("auto", *STRATEGIES))
        check_choice("share", share, ("never", "identical"))
        if backend is not None:
            check_known(backend)
        check_lazy_init(lazy_init, backend)
        check_name(name)
        if share_with is not None and not isinstance(share_with, HyperCommGrid):
            raise GroupOptionsError(f"share_with must be a HyperCommGrid, got {share_with!r}")
        if world_size is not None:
            positive(world_size, "world_size")
        total = world.world_size(world_size)
        check_world(layout, total, cover)
        other = None if share_with is None else share_with._state
        agreement = Agreement(layout, name, backend)
        owner = GroupOwner(layout, creation, other, agreement, as_verified(verify))
        self._state = GridState(Views(layout), owner, backend, name, share, lazy_init, total)
        weakref.finalize(self, _warn_of_live, self._state).atexit = False

    # ---- views --------------------------------------------------------------------------------

    def register_view(
        self,
        name: str,
        shape: Iterable[int],
        dim_names: Iterable[str],
        shared_dims: Iterable[str] | None = None,
    ) -> None:
        """Add another factorisation of the grid's ranks, such as that of a model's expert layers.

        `create_pg`, `get_pg` and the other calls take its dims with `view=name`; `view(name)` is an
        object with all of them. Every rank of the grid must register the same views; they are
        compared when groups are first created in them.

        Args:
            name: What the view is asked for by.
            shape: Size of each dim, in ranks; the first dim varies fastest.
            dim_names: Name of each dim, in the order of `shape`.
            shared_dims: Dims that are the grid's too, with the same groups: these then have one
                process group in both.

        Raises:
            LayoutError: The name is taken, the sizes do not multiply to the ranks of the grid, or
                a shared dim has other groups in the view; shows both.
            UnknownDimError: A shared dim is not one of both.

        Example:
            >>> grid = HyperCommGrid([2, 4, 2], ["tp", "dp", "pp"], world_size=16)
            >>> grid.register_view("expert", [4, 2, 2], ["ep", "expt_dp", "pp"], ["pp"])
            >>> grid.get_rank_enum("ep", view="expert")[0], grid.view("expert").coords(5)
            ([0, 1, 2, 3], {'ep': 1, 'expt_dp': 1, 'pp': 0})

        Source: names and arguments follow newer versions of `megatron.core.hyper_comm_grid`.
        """
        self._owner.check_alive()
        self._state.views.register(name, shape, dim_names, shared_dims)

    def view(self, name: str) -> GridView:
        """Return a view as an object with the interface of a grid; the grid stays the owner.

        Raises:
            UnknownViewError: There is no such view; names those that are.
        """
        return GridView(self._state, name)

    # ---- another shape ------------------------------------------------------------------------

    def reshape(
        self, target: str | RankLayout, *, views: Mapping[str, str] | None = None
    ) -> Reshaped:
        """Give the grid's ranks another layout, in a live job; keys that exist get new groups.

        Every rank of the grid must call this, and with creation "split" or "enumerate" every rank
        of the world; each waits for the others, as long as the timeout of WORLD. Process groups
        whose ranks and options are those of a key of the new layout are kept; what is missing is
        created, and the rest destroyed, in this order, so that whatever fails leaves the grid as
        it was. Keys over dims that are no more are destroyed.

        Args:
            target: Sizes as text, as in "tp=4,dp=2", one of them perhaps open; or a layout of the
                same ranks.
            views: New sizes as text, by name, of the views that change.

        Returns:
            What was kept, created and destroyed on this rank; `print` shows it.

        Raises:
            WorldSizeError: The target has other ranks than the grid.
            LayoutError: The target cannot be read, or a view does not fit it.
            UnknownViewError: `views` names a view that there is not.
            PlanMismatchError: Another rank reshapes to something else, or failed: all raise.
            GroupCreationTimeout: A rank did not call this in time; names it.
            CreationError: Groups are planned that were not created, one could not be, or another
                thread reshapes the grid.
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
        with owner.reshaping():
            with declining(owner):
                layout = as_target(target, self.layout)
                refactored = state.views.refactored(layout, as_texts(views, "views"))
                owner.check_settled()
            fresh = owner.successor(layout, Agreement(layout, state.name, state.backend))
            try:
                result = reshape(owner, fresh, list(owner.requests(refactored)), refactored)
            except BaseException:
                fresh.release()  # what was to be kept is the present owner's alone again
                raise
            self._forget_meshes()
            state.views, state.owner = refactored, fresh
        owner.destroy()
        logger.info("reshaped: %s", result)
        return result

    # ---- life cycle ---------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroy the groups that the grid created, the last one first; may be called twice.

        Groups that the grid did not create stay, WORLD included. Afterwards the grid still
        answers questions about ranks, but has no groups and creates none.
        """
        self._forget_meshes()
        self._owner.destroy()

    def abort(self) -> None:
        """End the groups that the grid created, at once: collectives under way fail.

        For a rank that has found that others are gone; NCCL communicators are aborted, groups of
        other backends destroyed without waiting for anybody. The grid is then as destroyed.

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
        self._owner.abort()

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.destroy()

    # ---- how it looks -------------------------------------------------------------------------

    def __repr__(self) -> str:
        return looks.as_text(self._headline(), self)

    def _repr_html_(self) -> str:
        return looks.as_html(self._headline(), self)

    def _headline(self) -> str:
        layout = self.layout
        ranks = "ranks" if isinstance(layout.ranks, range) else f"{layout.size} of the ranks"
        return (
            f"HyperCommGrid({layout}): {ranks} {layout.rank_offset}..{layout.last_rank} of a "
            f"world of {self._state.world_size}"
        )


def _warn_of_live(state: GridState) -> None:
    """Say that a grid is gone which nobody destroyed; its groups stay, who knows who uses them."""
    live = state.owner.live()
    if live:
        warnings.warn(
            f"a HyperCommGrid ({state.views.base}) was collected while its process groups live: "
            f"{', '.join(map(str, live))}; call its destroy(), or use it in a with block",
            ResourceWarning,
            stacklevel=2,
        )
