"""GridSet: several named grids in one job, one after the other or on the same ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypedDict, cast

from torch import Tensor
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    GridDestroyedError,
    GroupOptionsError,
    HyperCommError,
    LayoutError,
    UnknownDimError,
    WorldSizeError,
)
from hypercomm.grid.arguments import (
    GridArguments,
    GroupArguments,
    Share,
    SharedKeywords,
    Sizes,
    check_keywords,
    check_name,
)
from hypercomm.grid.grid import HyperCommGrid
from hypercomm.layout import RankLayout, RankMapping, read_layout
from hypercomm.layout.checks import as_offset, as_rank, as_world_size
from hypercomm.layout.parsing import Dims
from hypercomm.layout.placement import (
    Kind,
    Placement,
    Requirement,
    check_names,
    colocate,
    tile,
)
from hypercomm.layout.text import aligned, did_you_mean, format_coords, format_ranks, shown
from hypercomm.process_groups import world
from hypercomm.process_groups.agreement.calls import Scope, limit_of, refusing
from hypercomm.process_groups.agreement.grid import GridAgreement
from hypercomm.process_groups.options import check_timeout
from hypercomm.process_groups.owner import Batch, create_batches
from hypercomm.process_groups.spec import GroupSpec, check_once
from hypercomm.process_groups.world import current
from hypercomm.transfers.transfer import transfer

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # typing has them from Python 3.11 on

    from hypercomm.grid.connect import Connections

logger = logging.getLogger(__name__)

CREATE = "GridSet.create_pgs()"


class SetArguments(GridArguments, total=False):
    """The keyword arguments of each constructor of `GridSet`, which documents them."""

    name: str | None
    overrides: Mapping[str, GridArguments] | None


class DimRoles(TypedDict, total=False):
    """The arguments of `RankMapping` in addition to its layouts and `along`."""

    batch_axis: int
    shards: Mapping[str, int] | None
    pipeline: str | None
    leaders: bool
    backward: bool


class GridSet(Mapping[str, HyperCommGrid]):
    """Several named grids in one job: an encoder next to a language model, training and inference.

    A mapping of names to grids. `GridSet.tile` places grids one after the other,
    `GridSet.colocated` on the same ranks; the class itself takes layouts that have their places,
    and places sizes from rank 0 on.
    The set owns its grids and their process groups: `destroy()`, or the end of its `with` block,
    destroys them. Every rank of the job makes the same set, and makes the same calls.

    Args:
        grids: For each name a layout in its place, sizes as text or by name, which begin at rank 0,
            or a grid. The set becomes the owner of a grid that is given; the grid keeps its own
            arguments. Names may be keywords instead: GridSet(train="tp=4", infer="dp=4").
        requires: The placement to check before anything is created. "tiled": each rank of the
            world is in exactly one grid; "disjoint": in at most one; "colocated": all grids hold
            the same ranks; "any": no check.
        world_size: Number of ranks of the job; default: as for `HyperCommGrid`.
        arguments: `name` distinguishes this set from others with grids of the same names;
            `backend`, `creation`, `share`, `lazy_init` and `verify` are those of each grid (with
            share="identical", grids on the same ranks share groups too); `overrides` has the
            arguments of single grids that differ: `{"llm": {"backend": "nccl"}}`.

    Raises:
        LayoutError: There is no grid, a name is not a text, or `requires` is not such a choice.
        WorldSizeError: A grid does not fit the world, was made for one of another size, or
            the placement is not the required one; names the grids and their ranks.
        GridDestroyedError: A grid that is given was destroyed.
        GroupOptionsError: An argument is wrong.
        NotInitializedError: The world size is not known.

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
        grids: Mapping[str, Sizes | HyperCommGrid] | None = None,
        *,
        requires: Requirement = "any",
        world_size: int | None = None,
        **keywords: Any,
    ) -> None:
        arguments, named = _split(keywords)
        if grids is not None:
            check_keywords("GridSet", named, SetArguments.__annotations__)
        name, overrides = arguments.pop("name", None), arguments.pop("overrides", None) or {}
        check_name(name)
        self._world_size = as_world_size(world.world_size(world_size))
        placed = _placed(named if grids is None else grids, self._world_size)
        layouts = {
            label: given if isinstance(given, RankLayout) else given.layout
            for label, given in placed.items()
        }
        Placement(layouts, self._world_size).require(requires)
        _check_overrides(overrides, placed)
        self._label = f"set {name}" if name else f"set of {', '.join(placed)}"
        self._agreements: dict[tuple[int, ...], GridAgreement] = {}
        self._grids: dict[str, HyperCommGrid] = {}
        latest: HyperCommGrid | None = None
        for label, given in placed.items():
            if isinstance(given, RankLayout):
                own = cast("GridArguments", {**arguments, **overrides.get(label, {})})
                title = f"{name}.{label}" if name else label
                latest = HyperCommGrid(
                    given, name=title, world_size=self._world_size, share_with=latest, **own
                )
            else:
                latest = given
            self._grids[label] = latest

    @classmethod
    def tile(
        cls,
        world_size: int | None = None,
        /,
        *,
        rank_offset: int = 0,
        requires: Requirement | None = None,
        **grids: Any,
    ) -> Self:
        """Make a set of grids that lie one after the other, in the order given.

        Args:
            world_size: Number of ranks of the job; default: as for `HyperCommGrid`.
            rank_offset: The first rank of the first grid.
            requires: Default: "tiled", or "disjoint" with an offset.
            grids: For the name of each grid its sizes as text, or a layout without gaps. One size
                of all may be unspecified (-1, or a dim alone): it takes what the others leave.
                The arguments of the class, such as `name` and `backend`, are keywords here too;
                use the class for grids of such names.

        Raises:
            LayoutError, WorldSizeError: As for the class; or no size fits.

        Example:
            >>> grids = GridSet.tile(24, encoder="tp=2,dp=4", llm="tp=4,dp,pp=2")
            >>> str(grids["llm"].layout), grids["llm"].rank_offset, grids.placement
            ('tp=4,dp=2,pp=2', 8, 'tiled')
        """
        arguments, layouts = _split(grids)
        world_size, rank_offset = world.world_size(world_size), as_offset(rank_offset)
        requires = requires or ("disjoint" if rank_offset else "tiled")
        placed = tile(layouts, world_size, rank_offset)
        return cls(placed, requires=requires, world_size=world_size, **arguments)

    @classmethod
    def colocated(
        cls, world_size: int | None = None, /, *, rank_offset: int = 0, **grids: Any
    ) -> Self:
        """Make a set of grids that all hold the same ranks.

        Args:
            world_size: Number of ranks of the job; default: as for `HyperCommGrid`.
            rank_offset: The first rank of all grids.
            grids: As for `tile`. Each grid may have one unspecified size: it is inferred from the
                first grid without one, or from the world if there is none. If all sizes are given,
                ranks of the world may be left over: see `spare_ranks`.

        Raises:
            LayoutError, WorldSizeError: As for the class, or sizes differ.

        Example:
            >>> grids = GridSet.colocated(8, training="tp=2,dp=4", inference="tp=4,dp")
            >>> [str(grid.layout) for grid in grids.values()], grids.placement
            (['tp=2,dp=4', 'tp=4,dp=2'], 'colocated')
        """
        arguments, layouts = _split(grids)
        world_size = world.world_size(world_size)
        placed = colocate(layouts, world_size, rank_offset)
        return cls(placed, requires="colocated", world_size=world_size, **arguments)

    # ---- grids ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> HyperCommGrid:
        if not isinstance(name, str) or name not in self._grids:
            raise _unknown(name, self._grids)
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
    def layouts(self) -> Mapping[str, RankLayout]:
        """The layout of each grid, by name; a read-only copy.

        Example:
            >>> grids = GridSet.tile(24, encoder="tp=2,dp=4", llm="tp=4,dp=2,pp=2")
            >>> sum(layout.size_of("pp", default=1) for layout in grids.layouts.values())
            3
        """
        return MappingProxyType({name: grid.layout for name, grid in self.items()})

    def grids_of(self, rank: int | None = None) -> tuple[str, ...]:
        """Return the names of the grids that a rank, by default the calling one, is in.

        Raises:
            RankOutsideError: `rank` is not an int.
            NotInitializedError: The calling rank is not known.

        Example:
            >>> GridSet.tile(8, encoder="tp=2,dp=2", llm="tp=4").grids_of(3)
            ('encoder',)
        """
        rank = as_rank(world.rank(rank))
        return tuple(name for name, grid in self.items() if rank in grid.layout)

    @property
    def _placement(self) -> Placement:
        """How the grids lie now: each may have been reshaped to other ranks."""
        return Placement(self.layouts, self._world_size)

    @property
    def placement(self) -> Kind:
        """How the grids lie.

        "tiled": each rank of the world is in exactly one; "disjoint": in at most one;
        "colocated": several grids hold the same ranks; "overlapping": none of these.
        """
        return self._placement.kind

    @property
    def overlaps(self) -> Mapping[tuple[str, str], Sequence[int]]:
        """The ranks that two grids share, ascending, by their names; only pairs that share any."""
        return self._placement.overlaps

    @property
    def spare_ranks(self) -> tuple[int, ...]:
        """The ranks of the world that no grid holds, ascending."""
        return self._placement.spare_ranks

    # ---- transfers between grids ----------------------------------------------------------------

    def mapping(
        self,
        source: str,
        target: str,
        along: str | None = "dp",
        **roles: Unpack[DimRoles],
    ) -> RankMapping:
        """Return the messages between the ranks of two grids; arguments as for `RankMapping`.

        Example:
            >>> grids = GridSet.tile(6, encoder="tp=2,dp=1", llm="tp=1,dp=4")
            >>> grids.mapping("encoder", "llm").kind
            'fan-out'
        """
        return RankMapping(self[source].layout, self[target].layout, along, **roles)

    def transfer(
        self,
        source: str,
        target: str,
        tensor: Tensor | None,
        groups: ProcessGroup | None = None,
        *,
        out: Tensor | None = None,
        verify: bool | None = None,
        along: str | None = "dp",
        **roles: Unpack[DimRoles],
    ) -> Tensor | None:
        """Move a tensor from one grid to another; every rank of both stages calls it.

        Args:
            source: The grid that has the tensor.
            target: The grid that receives it.
            tensor: As for `hypercomm.transfer`, as are the next three.
            groups: See there.
            out: See there.
            verify: See there.
            along: As for `mapping`.
            roles: Further arguments of `mapping`: `batch_axis`, `shards`, ...

        Returns:
            The received tensor on a rank of the target, else None.

        Raises:
            UnknownDimError: The set has no such grid.
            HyperCommError: See `mapping` and `hypercomm.transfer`.

        Example:
            >>> import torch
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(4), GridSet.colocated(train="tp=2,dp=2", infer="dp=4") as grids:
            ...     grids.transfer("train", "infer", torch.tensor([1, 2])).tolist()
            [1]
        """
        mapping = self.mapping(source, target, along, **roles)
        return transfer(mapping, tensor, groups, out=out, verify=verify)

    # ---- process groups -------------------------------------------------------------------------

    def create_pgs(
        self,
        requests: Mapping[str, Iterable[Dims | GroupArguments]],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        share: Share | None = None,
    ) -> dict[str, list[ProcessGroup | None]]:
        """Create process groups of several grids, all or none.

        Every rank of the job must call this with the same requests. Groups are created in the
        order of the set, whatever the order of `requests`; those of each grid in the order given.
        The ranks of these grids agree once at the end: if one fails, all destroy what the call has
        created, and all raise; all may then retry.

        Args:
            requests: For the name of each grid what its `create_pgs` takes.
            backend: As for `HyperCommGrid.create_pgs`, as are the other two.
            timeout: Of each group, and for the whole call.
            share: Whether keys may have one group.

        Returns:
            For each name what `HyperCommGrid.create_pgs` returns: a group for each request, None
            on a rank that is in none of them.

        Raises:
            UnknownDimError: The set has no such grid (a KeyError); names those that it has.
            PlanMismatchError: Another rank has other requests; shows how they differ.
            GroupCreationTimeout: A rank did not call this in time; names it.
            HyperCommError: As for `HyperCommGrid.create_pgs`; an argument is wrong, and nothing
                was created.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), GridSet.colocated(a="tp=2,dp", b="tp=4,dp") as grids:
            ...     created = grids.create_pgs({"b": ["tp", "dp"], "a": ["tp"]})
            ...     print({name: [pg.size() for pg in pgs] for name, pgs in created.items()})
            {'a': [2], 'b': [4, 2]}
        """
        if not isinstance(requests, Mapping):
            raise LayoutError(
                f"requests must map names of grids to lists of dims, as in "
                f"{{{next(iter(self))!r}: ['tp', ['dp', 'cp']]}}, got {shown(requests)}"
            )
        for name in requests:
            self[name]._owner.check_alive()  # raises for an unknown one
        names = [name for name in self if name in requests]
        if not names:
            return {}
        defaults: SharedKeywords = {"backend": backend, "timeout": timeout, "share": share}
        scope, batches = self._scope(names), dict[str, Batch]()
        try:
            with refusing(scope):
                for name in names:
                    batch = Batch(self[name]._owner, self._specs(name, requests[name], defaults))
                    batch.reserve()
                    batches[name] = batch
        except BaseException:
            for batch in batches.values():
                batch.release()
            raise
        return create_batches(scope, CREATE, batches, limit_of(timeout, current()))

    def _specs(
        self, name: str, wanted: Iterable[Dims | GroupArguments], defaults: SharedKeywords
    ) -> list[GroupSpec]:
        try:
            specs = self[name]._specs(wanted, defaults)
            check_once(specs)
        except HyperCommError as error:
            raise type(error)(f"requests of grid {name!r}: {error}") from error
        return specs

    def _scope(self, names: Iterable[str]) -> Scope:
        """Return the scope of the calls that the ranks of some grids make together."""
        ranks = tuple(sorted({rank for name in names for rank in self[name].layout.ranks}))
        if ranks not in self._agreements:
            layout = RankLayout([len(ranks)], ["rank"], ranks=ranks)
            self._agreements[ranks] = GridAgreement(layout, self._label, None)
        agreement = self._agreements[ranks]
        return agreement.scope(current(), "calls of a set")

    def connect(
        self, *, pipelines: str | Iterable[str] = ("pp",), timeout: timedelta | None = None
    ) -> Connections:
        """Connect all process groups that the grids have, before the first step needs them.

        Every rank of the grids must call this. They wait for each other once, and then connect
        the groups of each grid as `HyperCommGrid.connect` does, which documents the arguments and
        the state after a failure. A group that several grids share counts once.

        Raises:
            PlanMismatchError, GroupCreationTimeout, HyperCommError: As for `HyperCommGrid.connect`.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), GridSet.tile(encoder="tp=2", llm="tp=2,dp=3") as grids:
            ...     _ = grids.create_pgs({"encoder": ["tp"], "llm": ["tp", "dp"]})
            ...     print([(row.title, row.ranks) for row in grids.connect()])
            [('encoder: tp', (0, 1))]
        """
        from hypercomm.grid.connect import connect

        return connect(self._grids, self._scope(self), pipelines, timeout)

    def verify(self, timeout: timedelta | None = None) -> None:
        """Check, grid by grid, that all its ranks have planned the same process groups.

        Every rank of the grids must call this; each waits for the others.

        Args:
            timeout: How long to wait for each grid; default: the timeout of WORLD.

        Raises:
            PlanMismatchError, GroupCreationTimeout: As for `HyperCommGrid.verify`.
        """
        check_timeout(timeout)
        for name in self.grids_of():
            self[name].verify(timeout)

    # ---- life cycle -----------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroy the groups of all grids, the last grid first; may be called twice.

        Raises:
            Exception: The error of the first grid that failed, after all have been destroyed.
        """
        self._for_each(HyperCommGrid.destroy)

    def abort(self) -> None:
        """Abort the groups of all grids without waiting, as `HyperCommGrid.abort`."""
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
            grid.__enter__()  # raises for a destroyed one
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    # ---- text -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"GridSet of {self._placement}"

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"  {line}" for line in aligned(self._rows()))])

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """Return name, sizes and ranks of each grid, and the position of the calling rank."""
        try:
            rank = world.rank()
        except HyperCommError:
            rank = -1
        rows = []
        for name, layout in self.layouts.items():
            at = format_coords(layout.coords(rank)) if rank in layout else ""
            here = f"this is rank {rank}, at {at}" if at else ""
            rows.append((name, str(layout), f"ranks {format_ranks(sorted(layout.ranks))}", here))
        return rows

    def __reduce_ex__(self, _: SupportsIndex, /) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: its grids own live process groups; send "
            f"dict(grids.layouts), which are values, and build the set there: GridSet(layouts)"
        )


def _split(given: Mapping[str, Any]) -> tuple[SetArguments, dict[str, str | RankLayout]]:
    """Split the keywords of a call into the arguments of the set and the sizes of the grids."""
    known = SetArguments.__annotations__
    arguments = {name: value for name, value in given.items() if name in known}
    sizes = {name: value for name, value in given.items() if name not in known}
    return cast("SetArguments", arguments), sizes


def _placed(
    grids: Mapping[str, Sizes | HyperCommGrid], world_size: int
) -> dict[str, RankLayout | HyperCommGrid]:
    """Return a layout or a grid for each name; a grid must be alive and of this world."""
    placed: dict[str, RankLayout | HyperCommGrid] = {}
    for name, given in check_names(grids).items():
        if not isinstance(given, HyperCommGrid):
            try:
                placed[name] = read_layout(given, world_size=world_size)
            except (LayoutError, WorldSizeError) as error:
                raise type(error)(f"grid {name!r}: {error}") from error
            continue
        title, size = f"grid {name!r} ({given.layout})", given._state.world_size
        if given.is_destroyed:
            raise GridDestroyedError(f"{title} was destroyed; build a new one")
        if size != world_size:
            raise WorldSizeError(
                f"{title} was made for a world of {size} ranks, but that of this set has "
                f"{world_size}; give both the same world_size"
            )
        placed[name] = given
    return placed


def _check_overrides(
    overrides: Mapping[str, GridArguments], grids: Mapping[str, RankLayout | HyperCommGrid]
) -> None:
    """Raise unless `overrides` has arguments of grids that the set makes."""
    if not isinstance(overrides, Mapping):
        raise GroupOptionsError(f"overrides must map names to arguments, got {shown(overrides)}")
    for name, own in overrides.items():
        if name not in grids:
            raise UnknownDimError(f"overrides: {_unknown(name, grids).args[0]}")
        if isinstance(grids[name], HyperCommGrid):
            raise GroupOptionsError(
                f"overrides names grid {name!r}, which exists and keeps its own arguments"
            )
        check_keywords(f"overrides of grid {name!r}", own, GridArguments.__annotations__)


def _unknown(name: object, grids: Iterable[str]) -> UnknownDimError:
    return UnknownDimError(
        f"there is no grid {shown(name)} in this set; it has {list(grids)}"
        f"{did_you_mean(name, grids)}"
    )
