"""GridSet: several named grids in one job, one after the other or on the same ranks."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import attrs
from torch import Tensor
from torch.distributed import ProcessGroup

from hypercomm.errors import LayoutError, UnknownDimError, WorldSizeError
from hypercomm.grid.arguments import Sizes, takes_one
from hypercomm.grid.grid import HyperCommGrid
from hypercomm.grid.view import position_in, state_of
from hypercomm.layout import RankLayout, read_layout
from hypercomm.layout.checks import as_rank, as_world_size
from hypercomm.layout.parsing import Dims
from hypercomm.layout.placement import (
    Placement,
    Requirement,
    check_names,
    colocate,
    naming,
    tile,
)
from hypercomm.layout.text import aligned, did_you_mean, format_ranks, short_repr
from hypercomm.process_groups.creation import create_all
from hypercomm.process_groups.spec import GridOptions, GroupRequest, Share, StrategyName
from hypercomm.process_groups.table import GroupTable
from hypercomm.process_groups.world import (
    GridIdentity,
    World,
    current,
    rank_in_world,
    size_of_world,
)
from hypercomm.transfers.mapping import RankMapping
from hypercomm.transfers.transfer import transfer

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on


class GridSet(Mapping[str, HyperCommGrid]):
    """Several named grids in one job, such as an encoder and a language model.

    A set is a mapping of names to grids. `GridSet.tile` places grids one after the other, and
    `GridSet.colocated` places grids on the same ranks. The class itself takes layouts, which
    contain their ranks, or sizes, whose ranks begin at 0.
    The set owns its grids and their process groups: `destroy()`, or the end of its `with` block,
    destroys the groups. Every rank of the job must make the same set and the same calls.

    Args:
        grids: Maps each name to a layout, to sizes (as text or by name) whose ranks begin at 0, or
            to a grid. The set becomes the owner of a grid that is given; the grid keeps its own
            arguments. Names may be keywords instead: GridSet(train="tp=4", infer="dp=4").
        requires: The placement to check before anything is created. "tiled": each rank of the
            world is in exactly one grid; "disjoint": each rank is in at most one grid;
            "colocated": all grids have the same ranks; "any": no check. Default: no check, but if
            sizes were given as text or mappings, warn about ranks of the world that are in no grid.
        world_size: The number of ranks of the job. Default: see `HyperCommGrid`.
        world: A world from `join_world`, whose ranks the grids number. A grid that has the name of
            a part of the world is placed on the ranks of that part.
        name: A name that distinguishes this set from others with grids of the same names.
        backend: See `HyperCommGrid`. This and the next five arguments apply to each grid that the
            set makes.
        creation: The strategy that creates groups.
        share: Whether keys may use the same group. With "identical", a grid also uses groups that
            the grids before it in the set have created for the same ranks.
        lazy_init: Whether the members of a group connect only at their first message.
        verify: Whether ranks compare the groups that they create.
        enable_reconfigure: Whether groups stay when a reshape changes their members.
        named: The grids as keywords, if `grids` is not given.

    Raises:
        LayoutError: There is no grid, a name is not a text, or `requires` has an unknown value.
        WorldSizeError: A grid does not fit the world, was made for a world of another size, or
            the grids do not have the required placement. The message names the grids and ranks.
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
        GridSet of 2 grids, tiled, in a world of 8 ranks
          encoder  tp=2,dp=2  ranks 0..3
          llm      tp=4       ranks 4..7  this is rank 5, at tp=1
        4 None ('llm',)
    """

    def __init__(
        self,
        grids: Mapping[str, Sizes | HyperCommGrid] | None = None,
        *,
        requires: Requirement | None = None,
        world_size: int | None = None,
        world: World | None = None,
        name: str | None = None,
        backend: str | None = None,
        creation: StrategyName = "auto",
        share: Share = "never",
        lazy_init: bool | None = None,
        verify: bool | None = None,
        enable_reconfigure: bool = False,
        **named: Any,
    ) -> None:
        if grids is None:
            _check_named("GridSet", named)
        elif named:
            label = next(iter(named))
            hint = did_you_mean(label, _OPTIONS)
            raise TypeError(f"GridSet() got an unexpected keyword argument {label!r}{hint}")
        self._world_size = as_world_size(size_of_world(world_size, world))
        self._world = world
        options = GridOptions(backend, name, creation, share, lazy_init, verify, enable_reconfigure)
        self._grids: dict[str, HyperCommGrid] = {}
        latest: HyperCommGrid | None = None
        is_written = False
        for label, given in check_names(named if grids is None else grids).items():
            is_written |= self._is_written(label, given)
            if isinstance(given, HyperCommGrid):
                latest = self._checked(label, given)
            else:
                with naming(label):
                    layout = self._layout_for(label, given)
                before = latest
                own = attrs.evolve(options, name=f"{name}.{label}" if name else label)
                latest = HyperCommGrid(
                    layout, world_size=self._world_size, world=world, **attrs.asdict(own)
                )
                if before is not None:
                    state_of(latest).borrow_from(state_of(before))
            self._grids[label] = latest
        self.placement.require("any" if requires is None else requires)
        if requires is None and is_written and (spare := self._spare_ranks()):
            warnings.warn(
                f"no grid of the set holds ranks {format_ranks(spare)} of a world of "
                f"{self._world_size}; make a size larger, or -1, or give requires='any': on these "
                f"ranks a group is None, which torch's collectives interpret as WORLD",
                stacklevel=2,
            )
        self._label = f"set {name}" if name else f"set of {', '.join(self._grids)}"

    def _is_written(self, label: str, given: object) -> bool:
        """Return whether a grid is given by sizes that begin at rank 0."""
        is_part = self._world is not None and label in self._world.parts
        return not is_part and (given is None or isinstance(given, (str, Mapping)))

    def _spare_ranks(self) -> Sequence[int]:
        """Return the ranks that are in no grid. If a grid has all ranks, nothing is searched."""
        if any(grid.layout.size == self._world_size for grid in self.values()):
            return ()
        return self.placement.spare_ranks

    def _layout_for(self, label: str, given: Sizes) -> RankLayout:
        """Return the layout of a grid. A grid with the name of a part has the ranks of the part."""
        parts = {} if self._world is None else self._world.parts
        if label not in parts or isinstance(given, RankLayout):
            return read_layout(given, world_size=self._world_size)
        layout = read_layout(given, world_size=parts[label])
        if layout.size != parts[label]:
            raise WorldSizeError(
                f"{layout} has {layout.size} ranks, but part {label!r} of the world has "
                f"{parts[label]}"
            )
        before = [*parts].index(label)
        return RankLayout(layout.shape, layout.dim_names, sum([*parts.values()][:before]))

    def _checked(self, label: str, grid: HyperCommGrid) -> HyperCommGrid:
        """Return a grid that the caller has made. Raise unless it is alive and fits this world."""
        state = state_of(grid)
        state.table.check_alive()
        size = state.world_size
        if size != self._world_size:
            raise WorldSizeError(
                f"grid {label!r} ({grid.layout}) was made for a world of {size} ranks, but the "
                f"world of this set has {self._world_size}; give both the same world_size="
            )
        return grid

    @classmethod
    def tile(
        cls,
        world_size: int | None = None,
        /,
        *,
        requires: Requirement = "tiled",
        name: str | None = None,
        backend: str | None = None,
        creation: StrategyName = "auto",
        share: Share = "never",
        lazy_init: bool | None = None,
        verify: bool | None = None,
        enable_reconfigure: bool = False,
        **grids: Any,
    ) -> Self:
        """Make a set of grids on consecutive ranks, in the order given.

        Args:
            world_size: The number of ranks of the job. Default: see `HyperCommGrid`.
            requires: The required placement. "disjoint" allows ranks that are in no grid.
            name: A name that distinguishes this set from others.
            backend: See `GridSet`, also for the next five arguments.
            creation: The strategy that creates groups.
            share: Whether keys may use the same group.
            lazy_init: Whether the members of a group connect only at their first message.
            verify: Whether ranks compare the groups that they create.
            enable_reconfigure: Whether groups stay when a reshape changes their members.
            grids: Maps the name of each grid to its sizes as text, or to a layout without gaps. One
                size in the set may be unspecified (-1, or a dim name without a size). It is
                inferred from the ranks that the other grids leave. If a grid has the name of an
                argument, call the class instead.

        Raises:
            LayoutError, WorldSizeError: See `GridSet`. Or no size fits.

        Example:
            >>> grids = GridSet.tile(24, encoder="tp=2,dp=4", llm="tp=4,dp,pp=2")
            >>> str(grids["llm"].layout), grids["llm"].rank_offset, grids.placement.kind
            ('tp=4,dp=2,pp=2', 8, 'tiled')
        """
        _check_named("GridSet.tile", grids)
        total = size_of_world(world_size)
        options = GridOptions(backend, name, creation, share, lazy_init, verify, enable_reconfigure)
        placed = tile(grids, total)
        return cls(placed, requires=requires, world_size=total, **attrs.asdict(options))

    @classmethod
    def colocated(
        cls,
        world_size: int | None = None,
        /,
        *,
        name: str | None = None,
        backend: str | None = None,
        creation: StrategyName = "auto",
        share: Share = "never",
        lazy_init: bool | None = None,
        verify: bool | None = None,
        enable_reconfigure: bool = False,
        **grids: Any,
    ) -> Self:
        """Make a set of grids that all have the same ranks.

        Args:
            world_size: The number of ranks of the job. Default: see `HyperCommGrid`.
            name: A name that distinguishes this set from others.
            backend: See `GridSet`, also for the next five arguments.
            creation: The strategy that creates groups.
            share: Whether keys may use the same group.
            lazy_init: Whether the members of a group connect only at their first message.
            verify: Whether ranks compare the groups that they create.
            enable_reconfigure: Whether groups stay when a reshape changes their members.
            grids: The grids by name, as in `tile`. Each grid may have one unspecified size. It is
                inferred from the first grid whose sizes are all given, or from the world if there
                is no such grid. If all sizes are given, some ranks of the world may be in no grid;
                see `placement.spare_ranks`.

        Raises:
            LayoutError, WorldSizeError: See `GridSet`. Or the grids differ in their numbers of
                ranks.

        Example:
            >>> grids = GridSet.colocated(8, training="tp=2,dp=4", inference="tp=4,dp")
            >>> [str(grid.layout) for grid in grids.values()], grids.placement.kind
            (['tp=2,dp=4', 'tp=4,dp=2'], 'colocated')
        """
        _check_named("GridSet.colocated", grids)
        total = size_of_world(world_size)
        options = GridOptions(backend, name, creation, share, lazy_init, verify, enable_reconfigure)
        placed = colocate(grids, total)
        return cls(placed, requires="colocated", world_size=total, **attrs.asdict(options))

    # ---- grids ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> HyperCommGrid:
        if not isinstance(name, str) or name not in self._grids:
            raise UnknownDimError(
                f"there is no grid {short_repr(name)} in this set; it has {list(self)}"
                f"{did_you_mean(name, self)}"
            )
        return self._grids[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._grids)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __len__(self) -> int:
        return len(self._grids)

    __eq__ = object.__eq__  # a set owns groups, so it is not a value like other mappings
    __hash__ = object.__hash__

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
        """Return the names of the grids that contain a rank, by default the calling rank.

        Raises:
            RankOutsideError: `rank` is not an int.
            NotInitializedError: The calling rank is not known.

        Example:
            >>> GridSet.tile(8, encoder="tp=2,dp=2", llm="tp=4").grids_of(3)
            ('encoder',)
        """
        rank = as_rank(rank_in_world(rank, self._world))
        return tuple(name for name, grid in self.items() if rank in grid.layout)

    @property
    def placement(self) -> Placement:
        """The current placement of the grids: its `kind`, `overlaps` and `spare_ranks`."""
        return Placement(self.layouts, self._world_size)

    # ---- transfers between grids ----------------------------------------------------------------

    def mapping(
        self, source: str, target: str, along: str | None = "dp", **roles: Any
    ) -> RankMapping:
        """Return the messages between the ranks of two grids. See `RankMapping`.

        Example:
            >>> grids = GridSet.tile(6, encoder="tp=2,dp=1", llm="tp=1,dp=4")
            >>> grids.mapping("encoder", "llm").kind
            'fan-out'
        """
        return RankMapping(self[source], self[target], along, **roles)

    def transfer(
        self,
        source: str,
        target: str,
        tensor: Tensor | None,
        groups: ProcessGroup | None = None,
        *,
        out: Tensor | None = None,
        rows: Sequence[int] | None = None,
        verify: bool | None = None,
        **roles: Any,
    ) -> Tensor | None:
        """Move a tensor from one grid to another. Every rank of the two grids must call this.

        Args:
            source: The grid that has the tensor.
            target: The grid that receives the tensor.
            tensor: See `hypercomm.transfer`, also for the next four arguments.
            groups: The process group of the transfer.
            out: The tensor to receive into.
            rows: The number of rows on each rank of the source.
            verify: Whether ranks compare their arguments first.
            roles: Arguments of `RankMapping`: `along`, `batch_axis`, `shards`, ...

        Returns:
            The received tensor on a rank of the target, or None on other ranks.

        Raises:
            UnknownDimError: The set has no such grid.
            HyperCommError: See `RankMapping` and `hypercomm.transfer`.

        Example:
            >>> import torch
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(4), GridSet.colocated(train="tp=2,dp=2", infer="dp=4") as grids:
            ...     grids.transfer("train", "infer", torch.tensor([1, 2])).tolist()
            [1]
        """
        mapping = self.mapping(source, target, **roles)
        return transfer(
            mapping, tensor, groups, out=out, rows=rows, verify=verify, world=self._world
        )

    # ---- process groups -------------------------------------------------------------------------

    @takes_one("dict of lists, as in create_pgs({'grid': ['tp', 'dp']})")
    def create_pgs(
        self,
        requests: Mapping[str, Iterable[Dims | Mapping[str, Any] | GroupRequest]],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        share: Share | None = None,
    ) -> dict[str, list[ProcessGroup | None]]:
        """Create process groups of several grids in one call.

        Every rank of these grids must call this with the same requests. If one of the grids has
        creation "split" or "enumerate", every rank of the world must call it. Grids are processed
        in the order of the set, whatever the order of `requests`, and the groups of each grid are
        created in the order given. The ranks of these grids meet once, before any group is created.
        If they differ, or ranks are missing, all ranks raise, and all may retry.

        Args:
            requests: Maps the name of each grid to the requests for its `create_pgs`.
            backend: The backend of requests without a backend.
            timeout: The timeout of requests without a timeout. The longest timeout of all requests
                limits the whole call.
            share: The `share` of requests without `share`.

        Returns:
            A mapping from each name to the process group of each request, which is None on a rank
            that is in none of the groups.

        Raises:
            UnknownDimError: The set has no such grid. This is a KeyError. The message lists the
                grids.
            PlanMismatchError: Another rank has other requests. The message shows the difference.
            GroupCreationTimeout: A rank did not call this in time. The message names it.
            HyperCommError: See `HyperCommGrid.create_pgs`. Nothing was created.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), GridSet.colocated(a="tp=2,dp", b="tp=4,dp") as grids:
            ...     created = grids.create_pgs({"b": ["tp", "dp"], "a": ["tp"]})
            ...     print({name: [pg.size() for pg in pgs] for name, pgs in created.items()})
            {'a': [2], 'b': [4, 2]}
        """
        if not isinstance(requests, Mapping):
            raise LayoutError(
                f"create_pgs of a GridSet takes a dict of lists, as in "
                f"create_pgs({{'grid': ['tp', 'dp']}}), got {short_repr(requests)}"
            )
        for name in requests:
            state_of(self[name]).table.check_alive()  # raises for an unknown grid
        names = [name for name in self if name in requests]
        if not names:
            return {}
        ranks = sorted({rank for name in names for rank in self[name].layout.ranks})
        layout = RankLayout([len(ranks)], ["rank"], ranks=ranks)
        identity = GridIdentity.of(layout, self._label, None)
        scope = identity.scope(self._world or current(), "calls of a set")
        if any(state_of(self[name]).table.needs_all_ranks for name in names):
            scope = scope.of_all_ranks()
        owners: list[str] = []

        def find() -> list[tuple[GroupTable, GroupRequest]]:
            found: list[tuple[GroupTable, GroupRequest]] = []
            for name in names:
                read = state_of(self[name]).read_requests(
                    requests[name], backend=backend, timeout=timeout, share=share
                )
                owners.extend([name] * len(read))  # a grid may have two names
                found += read
            return found

        labels = {state_of(self[name]).table: name for name in names}
        entries = create_all(scope, "GridSet.create_pgs()", find, labels)
        created: dict[str, list[ProcessGroup | None]] = {name: [] for name in names}
        for name, entry in zip(owners, entries, strict=True):
            created[name].append(entry.communicator.pg)
        return created

    # ---- life cycle -----------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroy the groups of all grids, the last grid first. A second call does nothing.

        Raises:
            Exception: The error of the last grid that failed, after all grids have been destroyed.
        """
        self._for_each(HyperCommGrid.destroy)

    def abort(self) -> None:
        """Abort the groups of all grids without waiting. See `HyperCommGrid.abort`."""
        self._for_each(HyperCommGrid.abort)

    def _for_each(self, end: Callable[[HyperCommGrid], None]) -> None:
        with contextlib.ExitStack() as stack:  # calls `end` for all grids, the last one first
            for grid in self.values():
                stack.callback(end, grid)

    def __enter__(self) -> Self:
        for grid in self.values():
            grid.__enter__()  # raises if the grid was destroyed
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    # ---- text -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"GridSet of {self.placement}"

    def __str__(self) -> str:
        rows = []
        for name, layout in self.layouts.items():
            here = position_in(layout, self._world)
            ranks = f"ranks {format_ranks(sorted(layout.ranks))}"
            rows.append((name, str(layout), ranks, here if ", at " in here else ""))
        return "\n  ".join([repr(self), *aligned(rows)])

    def __reduce_ex__(self, _: SupportsIndex, /) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: its grids own live process groups; send "
            f"dict(grids.layouts) instead, and build the set from it there: GridSet(layouts)"
        )


_OPTIONS = list(inspect.signature(GridSet.__init__).parameters)[2:-1]
"""The names of the arguments of a set."""


def _check_named(call: str, grids: Mapping[str, Any]) -> None:
    """Raise for a keyword that is probably an argument, and not the name of a grid.

    Raises:
        TypeError: A keyword that has no sizes is named like an argument, or nearly so.
    """
    for name, value in grids.items():
        if isinstance(value, (RankLayout, Mapping)) or hasattr(value, "layout"):
            continue
        if isinstance(value, str) and "=" in value:
            continue
        hint = did_you_mean(name, _OPTIONS)
        if name == "world_size":
            hint = "; give the world size first, without its name"
        elif name in _OPTIONS:
            hint = "; only GridSet(...) takes it"
        if hint:
            raise TypeError(
                f"{call}() got an unexpected keyword argument {name!r}{hint} (a grid of this name "
                f"needs sizes, as {name}='tp=2,dp=4', not {short_repr(value)})"
            )
