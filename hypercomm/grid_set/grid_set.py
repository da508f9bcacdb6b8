"""GridSet: several named grids in one job, one behind the other or on the same ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

from torch.distributed import ProcessGroup

from hypercomm.draw.drawing import MOST_DRAWN
from hypercomm.errors import NotPicklableError, UnknownGridError
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.arguments import Creation, GridArguments, GroupKeywords, Share, check_name
from hypercomm.grid_set.arguments import (
    Requests,
    Wanted,
    arguments_of,
    check_requests,
    layouts_of,
    set_arguments,
)
from hypercomm.grid_set.connecting import ConnectedGrids
from hypercomm.grid_set.joint_creation import create_jointly, steps_of
from hypercomm.grid_set.modules import as_rows, as_table
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_offset, as_world_size
from hypercomm.layout.placement import Kind, Placement, Requirement, colocate, tile
from hypercomm.layout.text import as_html, did_you_mean, shown
from hypercomm.process_groups import world
from hypercomm.process_groups.agreement.steps import Steps
from hypercomm.process_groups.batches import Batch, only_call
from hypercomm.process_groups.options import check_timeout

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on


class GridSet(ConnectedGrids):
    """Several named grids in one job: an encoder beside a language model, training with inference.

    It maps names to grids. `GridSet.tile` places grids one behind the other, `GridSet.colocated`
    on the same ranks; the class itself takes layouts that have their places. The set owns its
    grids, and so what they create: `destroy()`, or leaving its `with` block, destroys exactly
    that. Every rank of the job makes the same set, and calls it alike.

    Args:
        grids: A layout in its place, or a grid, for each name. A grid that is given is the set's
            from then on, and keeps its own arguments.
        requires: What must be so, else nothing is made: "tiled", each rank of the world is in
            exactly one grid; "disjoint", in one at most; "colocated", all grids hold the same
            ranks; "any".
        name: Tells this set apart from others with grids of the same names.
        world_size: Number of ranks of the job; default: as for `HyperCommGrid`.
        backend: For each grid, as for `HyperCommGrid`; so are the four that follow.
        creation: How groups are created.
        share: With "identical", also grids that hold the same ranks share groups.
        lazy_init: Whether gloo connects ranks at their first message.
        verify: Whether each creation is compared with those of the other ranks.
        overrides: Arguments of single grids that differ from these:
            `{"llm": {"backend": "nccl"}}`.

    Raises:
        LayoutError: There is no grid, a name is no text, or `requires` no such choice.
        WorldSizeError: A grid reaches beyond the world, was made for one of another size, or
            grids lie otherwise than required; names them, and the ranks.
        GridDestroyedError: A grid that is given was destroyed.
        GroupOptionsError: An argument is unknown or wrong.
        NotInitializedError: Nothing tells the world size.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8, rank=5):
        ...     with GridSet.tile(encoder="tp=2,dp", llm="tp=4") as grids:
        ...         print(grids)
        ...         created = grids.create_pgs({"encoder": ["dp"], "llm": ["tp"]})
        ...         print(created["llm"][0].size(), created["encoder"][0], grids.grids_of())
        GridSet of 2 grids, tiling the world of 8 ranks
          encoder  tp=2,dp=2  ranks 0..3
          llm      tp=4       ranks 4..7  this is rank 5, at tp=1
        4 None ('llm',)
    """

    def __init__(
        self,
        grids: Mapping[str, RankLayout | HyperCommGrid],
        *,
        requires: Requirement = "any",
        name: str | None = None,
        world_size: int | None = None,
        backend: str | None = None,
        creation: Creation = "auto",
        share: Share = "never",
        lazy_init: bool | None = None,
        verify: bool | None = None,
        overrides: Mapping[str, GridArguments] | None = None,
    ) -> None:
        world_size = _world_size(world_size)
        layouts = layouts_of(grids, world_size)
        Placement(layouts, world_size).require(requires)
        check_name(name)
        common: GridArguments = {"backend": backend, "creation": creation, "share": share}
        common |= {"lazy_init": lazy_init, "verify": verify}
        every = arguments_of(grids, common, overrides)
        self._world_size = world_size
        self._label = f"set {name}" if name else f"set of {', '.join(grids)}"
        self._steps: dict[tuple[int, ...], Steps] = {}
        self._grids: dict[str, HyperCommGrid] = {}
        latest: HyperCommGrid | None = None
        for label, given in grids.items():
            if isinstance(given, RankLayout):
                own = f"{name}.{label}" if name else label
                given = HyperCommGrid.from_layout(  # noqa: PLW2901 - the layout's grid
                    given, name=own, world_size=world_size, share_with=latest, **every[label]
                )
            self._grids[label] = latest = given

    @classmethod
    def tile(
        cls,
        world_size: int | None = None,
        /,
        *,
        rank_offset: int = 0,
        requires: Requirement | None = None,
        name: str | None = None,
        backend: str | None = None,
        creation: Creation = "auto",
        share: Share = "never",
        lazy_init: bool | None = None,
        verify: bool | None = None,
        overrides: Mapping[str, GridArguments] | None = None,
        **layouts: str | RankLayout,
    ) -> Self:
        """Make a set of grids that lie one behind the other, in the order given.

        The first one begins at `rank_offset`. `layouts` are sizes as text, or layouts without gaps,
        by the names of the grids. One size of all may be open (-1, or a dim alone): it takes what
        the others leave. `requires` is "tiled", or "disjoint" behind an offset. The other
        arguments are those of the class, which takes names too that an argument has here.

        Raises:
            LayoutError, NotationError, WorldSizeError: As for the class; or none fits.

        Example:
            >>> grids = GridSet.tile(24, encoder="tp=2,dp=4", llm="tp=4,dp,pp=2")
            >>> str(grids["llm"].layout), grids["llm"].rank_offset, grids.placement
            ('tp=4,dp=2,pp=2', 8, 'tiled')
        """
        arguments = set_arguments(locals())
        world_size, rank_offset = _world_size(world_size), as_offset(rank_offset)
        if requires is None:
            requires = "disjoint" if rank_offset else "tiled"
        return cls(
            tile(layouts, world_size, rank_offset),
            requires=requires,
            world_size=world_size,
            **arguments,
        )

    @classmethod
    def colocated(
        cls,
        world_size: int | None = None,
        /,
        *,
        rank_offset: int = 0,
        name: str | None = None,
        backend: str | None = None,
        creation: Creation = "auto",
        share: Share = "never",
        lazy_init: bool | None = None,
        verify: bool | None = None,
        overrides: Mapping[str, GridArguments] | None = None,
        **layouts: str | RankLayout,
    ) -> Self:
        """Make a set of grids that all hold the same ranks.

        They begin at `rank_offset`. `layouts` are sizes as text, or layouts without gaps, by the
        names of the grids. Each may have one open size: it follows from those without, or else
        from the world. Where all sizes are given, the grids may leave ranks of the world over:
        `spare_ranks` tells. The other arguments are those of the class, which takes names too
        that an argument has here.

        Raises:
            LayoutError, NotationError, WorldSizeError: As for the class, or sizes differ.

        Example:
            >>> grids = GridSet.colocated(8, training="tp=2,dp=4", inference="tp=4,dp")
            >>> [str(grid.layout) for grid in grids.values()], grids.placement
            (['tp=2,dp=4', 'tp=4,dp=2'], 'colocated')
        """
        arguments = set_arguments(locals())
        world_size = _world_size(world_size)
        return cls(
            colocate(layouts, world_size, rank_offset),
            requires="colocated",
            world_size=world_size,
            **arguments,
        )

    # ---- which grids there are ----------------------------------------------------------------

    def __getitem__(self, name: str) -> HyperCommGrid:
        if not isinstance(name, str) or name not in self._grids:
            raise UnknownGridError(
                f"there is no grid {shown(name)} in this set; it has {shown(list(self._grids))}"
                f"{did_you_mean(name, self._grids)}"
            )
        return self._grids[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._grids)

    def __len__(self) -> int:
        return len(self._grids)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other  # an owner, not a value

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return self._world_size

    @property
    def _placement(self) -> Placement:
        """How the grids lie now: each may have been reshaped to other ranks."""
        layouts = {name: grid.layout for name, grid in self._grids.items()}
        return Placement(layouts, self._world_size)

    @property
    def placement(self) -> Kind:
        """How the grids lie.

        "tiled": each rank of the world is in exactly one; "disjoint": in one at most;
        "colocated": several grids hold the same ranks; "overlapping": none of these.
        """
        return self._placement.kind

    @property
    def overlaps(self) -> Mapping[tuple[str, str], Sequence[int]]:
        """The ranks that two grids both hold, ascending, by their names; no pair without."""
        return self._placement.overlaps

    @property
    def spare_ranks(self) -> tuple[int, ...]:
        """The ranks of the world that no grid holds, ascending."""
        return self._placement.spare_ranks

    # ---- process groups -----------------------------------------------------------------------

    def create_pgs(
        self,
        requests: Requests,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        share: Share | None = None,
    ) -> dict[str, list[ProcessGroup | None]]:
        """Create process groups of several grids, all or none.

        Every rank of the job must call this with the same requests. Grids come in the order of
        the set, whatever that of `requests`, and the groups of each in the order given. The ranks
        of these grids meet once at the end: if one fails, all destroy what the call has created,
        whether they are in its grid or not, and all raise; all may then try again.

        Args:
            requests: For the name of each grid what its `create_pgs` takes.
            backend: As for `HyperCommGrid.create_pgs`; so are the other two.
            timeout: Of each group, and for the whole call.
            share: Whether keys may hold one group.

        Returns:
            For each name what `HyperCommGrid.create_pgs` returns: a group for each request, None
            on a rank that is in none of them.

        Raises:
            UnknownGridError: The set has no such grid (a KeyError); names those that it has.
            PlanMismatchError: Another rank asks for something else, or failed; says how.
            GroupCreationTimeout: A rank did not call this in time; names it.
            HyperCommError: As for `HyperCommGrid.create_pgs`; nothing was created if it is about
                the arguments, which are checked for all grids beforehand.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), GridSet.colocated(a="tp=2,dp", b="tp=4,dp") as grids:
            ...     created = grids.create_pgs({"b": ["tp", "dp"], "a": ["tp"]})
            ...     print({name: [pg.size() for pg in pgs] for name, pgs in created.items()})
            {'a': [2], 'b': [4, 2]}
        """
        defaults: GroupKeywords = {"backend": backend, "timeout": timeout, "share": share}
        wanted = check_requests(self, requests, defaults)
        grids = {name: self[name] for name in wanted}
        if not grids:
            return {}
        steps = steps_of(self._steps, [grid.layout for grid in grids.values()], self._label)
        with contextlib.ExitStack() as stack:
            for grid in grids.values():
                stack.enter_context(only_call(grid._owner))
            return create_jointly(steps, lambda: _batches(grids, wanted), timeout)

    def verify(self, timeout: timedelta | None = None) -> None:
        """Check, grid by grid, that all its ranks have planned the same process groups.

        Every rank of the grids must call this; each waits for the others.

        Args:
            timeout: How long to wait for each grid; default: the timeout of WORLD.

        Raises:
            PlanMismatchError, GroupCreationTimeout, GridMismatchError: As for
                `HyperCommGrid.verify`.
        """
        check_timeout(timeout)
        for name in self.grids_of():
            self[name].verify(timeout)

    # ---- life cycle ---------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroy what the grids created, the last grid first, whatever fails; may be called twice.

        Raises:
            Exception: What the first grid that failed raised, after all have been destroyed.
        """
        self._for_each(HyperCommGrid.destroy)
        for steps in self._steps.values():
            with contextlib.suppress(RuntimeError):  # the store is gone
                steps.agreement.leave()

    def abort(self) -> None:
        """End what the grids created, at once and without waiting, as `HyperCommGrid.abort`."""
        self._for_each(HyperCommGrid.abort)

    def _for_each(self, end: Callable[[HyperCommGrid], None]) -> None:
        errors: list[BaseException] = []
        for grid in reversed(self._grids.values()):
            try:
                end(grid)
            except BaseException as error:  # noqa: BLE001 - the others must go too
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> Self:
        for grid in self.values():
            grid.__enter__()  # refuses one that was destroyed
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"GridSet of {self._placement}"

    def _repr_html_(self) -> str:
        table = as_html(repr(self), ("grid", "sizes", "ranks", "this rank"), as_rows(self))
        is_small = sum(grid.size for grid in self.layouts.values()) <= MOST_DRAWN
        return table + (self.draw()._repr_html_() if is_small else "")

    def __str__(self) -> str:
        return "\n".join([repr(self), *as_table(self)])

    def __reduce_ex__(self, _: SupportsIndex, /) -> NoReturn:
        raise NotPicklableError(
            f"{self!r} cannot be pickled or copied: its grids own live process groups; send "
            f"dict(grids.layouts), which are values, and build the set there: GridSet(layouts)"
        )


def _world_size(explicit: int | None) -> int:
    return as_world_size(world.world_size(explicit))


def _batches(grids: Mapping[str, HyperCommGrid], wanted: Mapping[str, Wanted]) -> dict[str, Batch]:
    return {
        name: Batch(grid._owner, [grid._spec(dims, given) for dims, given in wanted[name]])
        for name, grid in grids.items()
    }
