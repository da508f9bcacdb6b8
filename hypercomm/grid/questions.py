"""GridQuestions: what a grid and its views say of their ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from hypercomm.grid.arguments import GridOptions
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_rank
from hypercomm.layout.parsing import Dims
from hypercomm.layout.views import View, Views
from hypercomm.process_groups import world
from hypercomm.process_groups.agreement.agreement import Agreement
from hypercomm.process_groups.agreement.steps import Steps
from hypercomm.process_groups.job import Job
from hypercomm.process_groups.owner import GroupOwner
from hypercomm.process_groups.planned import Pool


@attrs.define(eq=False)
class GridState:
    """What a grid consists of; its views act on the same.

    Attributes:
        views: The layout and its views.
        owner: The process groups.
        options: What the grid was given, where a call does not say.
        world_size: Number of ranks of the job.
        lender: The grid whose groups may serve keys of this one; it lives as long.
        device_type: That of the DeviceMesh that the grid was made of.
        gave_meshes: Whether a DeviceMesh holds groups of the grid.
        job: The job that is known to have all its ranks.
        changes: How often groups may have been destroyed.
    """

    views: Views
    owner: GroupOwner
    options: GridOptions
    world_size: int
    lender: GridState | None = None
    device_type: str | None = None
    gave_meshes: bool = False
    job: Job | None = None
    changes: int = 0

    def warn_of_live(self) -> None:
        """Say that a grid is gone which nobody destroyed; its groups stay: others may use them."""
        live = self.owner.live()
        if live:
            warnings.warn(
                f"a HyperCommGrid ({self.views.base}) was collected while its process groups "
                f"live: {', '.join(map(str, live))}; call its destroy(), or use it in a with block",
                ResourceWarning,
                stacklevel=2,
            )


def owner_of(
    layout: RankLayout,
    options: GridOptions,
    pool: Pool,
    steps: Steps | None = None,
    shape: str = "",
) -> GroupOwner:
    """Make the owner of a grid's groups, at first or, with the steps of its ranks, of a shape."""
    if steps is None:
        agreement = Agreement(layout, options.name, options.backend)
        steps = Steps(agreement, are_all=options.verify)
    creation, is_verified = options.creation, options.verify
    return GroupOwner(layout, creation, pool, steps, is_verified=is_verified, shape=shape)


class GridQuestions:
    """Questions about the ranks of a grid, or of one of its views; none of them communicates."""

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
        return self._state.options.backend

    @property
    def name(self) -> str | None:
        """What tells the grid apart from others."""
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
    def size(self) -> int:
        """The number of ranks in the grid."""
        return self.layout.size

    @property
    def views(self) -> Mapping[str, RankLayout]:
        """The layouts of the grid's views, by name; a read-only copy."""
        views = self._state.views
        return MappingProxyType({name: view.layout for name, view in views.items()})

    def is_current_rank_in_grid(self) -> bool:
        """Tell whether the calling rank is in the grid."""
        return world.rank() in self.layout

    def coords(self, rank: int | None = None, *, view: str | None = None) -> dict[str, int]:
        """Return the coordinates of a rank, of the calling one by default.

        Args:
            rank: The rank.
            view: The view in whose dims they are; default: this one's.

        Raises:
            RankOutsideError: The rank is not in the grid; `is_current_rank_in_grid()` tells.
            UnknownViewError: There is no such view.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> grid = HyperCommGrid("tp=2,dp=4", world_size=8)
            >>> grid.register_view("expert", [4, 2], ["ep", "expt_dp"])
            >>> grid.coords(5), grid.coords(5, view="expert")
            ({'tp': 1, 'dp': 2}, {'ep': 1, 'expt_dp': 1})
        """
        return self._layout_in(view).coords(world.rank(rank))

    def group_ranks(
        self, dims: Dims, rank: int | None = None, *, view: str | None = None
    ) -> tuple[int, ...]:
        """Return the ranks that share a group with a rank, by default the calling one.

        They are in the order of the layout: ascending, unless it lists its ranks in another.

        Args:
            dims: One name, or several in any order.
            rank: The rank.
            view: The view whose dims they are; default: this one's.

        Raises:
            RankOutsideError: The rank is not in the grid.
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`; names the view that has
                the dims, if one does.
            UnknownViewError: There is no such view.
        """
        layout = self._layout_in(view)
        groups = layout.groups(*self._own_dims(dims, view))
        rank = as_rank(world.rank(rank))
        layout.coords(rank)  # its error speaks of the grid, not of the groups
        return groups.of(rank)

    def get_rank_enum(self, dims: Dims, *more: Dims, view: str | None = None) -> list[list[int]]:
        """Enumerate the groups over some dims, members in the order of the layout.

        Args:
            dims: As for `create_pg`.
            more: Further dims.
            view: The view whose dims they are; default: this one's.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"], world_size=8)
            >>> grid.get_rank_enum(["dp", "tp"])
            [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        found, ordered = self._find((dims, *more) if more else dims, view)
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

    def _order_dims(self, dims: Dims) -> tuple[list[str], str]:
        """Return dims in REVERSED grid order, as Megatron does, and the same joined by dashes."""
        ordered = list(reversed(self._own_dims(dims)))
        return ordered, "-".join(ordered)

    def _own_dims(self, dims: Dims, view: str | None = None) -> tuple[str, ...]:
        """Order dims that must be those of one view; an error says where others are."""
        return self._state.views.ordered(dims, self._view if view is None else view)

    def _layout_in(self, view: str | None) -> RankLayout:
        return self.layout if view is None else self._state.views.layout_of(view)

    def _find(self, dims: Dims, view: str | None) -> tuple[View | None, tuple[str, ...]]:
        """The view that dims belong to (None: the grid's own dims), and the dims in its order."""
        return self._state.views.find(dims, self._view if view is None else view)
