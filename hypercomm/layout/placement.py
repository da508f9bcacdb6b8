"""Places several layouts in one world: one after the other, or on the same ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, combinations
from typing import Literal, TypeVar

import attrs

from hypercomm.errors import LayoutError, WorldSizeError
from hypercomm.layout.checks import (
    as_world_size,
    check_choice,
    is_utf8,
    world_too_small,
)
from hypercomm.layout.layout import RankLayout
from hypercomm.layout.parsing import (
    UNSPECIFIED,
    check_one_unspecified,
    infer_sizes,
    known_size,
    read_sizes,
)
from hypercomm.layout.text import first_n, format_ranks, pluralize, short_repr

T = TypeVar("T")

Kind = Literal["tiled", "colocated", "disjoint", "overlapping"]
Requirement = Literal["tiled", "disjoint", "colocated", "any"]
REQUIREMENTS: tuple[Requirement, ...] = ("tiled", "disjoint", "colocated", "any")

Layouts = Mapping[str, str | Mapping[str, int] | RankLayout]
"""Maps the name of each grid to sizes as text, sizes by dim name, or a layout without gaps."""


def tile(layouts: Layouts, world_size: int) -> dict[str, RankLayout]:
    """Give layouts consecutive ranges of ranks, in the order given.

    Args:
        layouts: Maps each name to sizes or to a layout without gaps. One size of one layout may be
            unspecified (-1, or a dim name without a size). That layout gets the ranks that the
            other layouts do not need.
        world_size: The number of ranks of the world.

    Returns:
        The layouts with their ranks, by name.

    Raises:
        LayoutError: `layouts` is empty, a name is not a string, a layout has gaps, a text is wrong,
            or several sizes are unspecified.
        WorldSizeError: No ranks are left for the layout with the unspecified size. Or the number of
            ranks left is not a multiple of the product of that layout's other sizes.

    Example:
        >>> places = tile({"encoder": "tp=2,dp=4", "llm": "tp=4,dp,pp=2"}, 24)
        >>> for name, layout in places.items():
        ...     print(name, layout, layout.ranks)
        encoder tp=2,dp=4 range(0, 8)
        llm tp=4,dp=2,pp=2 range(8, 24)
    """
    sizes = {name: _read(name, given) for name, given in check_names(layouts).items()}
    known = [known_size(own) for own in sizes.values() if UNSPECIFIED not in own.values()]
    left = as_world_size(world_size) - sum(known)
    check_one_unspecified(
        [
            f"{dim} of {name}"
            for name, own in sizes.items()
            for dim in own
            if own[dim] == UNSPECIFIED
        ]
    )
    placed: dict[str, RankLayout] = {}
    first = 0
    for name, own in sizes.items():
        room = left if UNSPECIFIED in own.values() else known_size(own)
        placed[name] = _placed(name, own, room, f"{left} are left", first)
        first += placed[name].size
    return placed


def colocate(layouts: Layouts, world_size: int) -> dict[str, RankLayout]:
    """Give layouts the same ranks.

    Args:
        layouts: Maps each name to sizes or to a layout without gaps. One size of each layout may be
            unspecified. The size is inferred from the first layout whose sizes are all given, or
            from the world if there is no such layout.
        world_size: The number of ranks of the world.

    Returns:
        The layouts with their ranks, by name.

    Raises:
        LayoutError: `layouts` is empty, a name is not a string, a layout has gaps, a text is wrong,
            or several sizes of one layout are unspecified.
        WorldSizeError: The layouts have different numbers of ranks.

    Example:
        >>> places = colocate({"training": "tp=2,dp", "inference": "tp=4,dp=2"}, 16)
        >>> [str(layout) for layout in places.values()]
        ['tp=2,dp=4', 'tp=4,dp=2']
    """
    sizes = {name: _read(name, given) for name, given in check_names(layouts).items()}
    room = as_world_size(world_size)
    why = ""
    for name, own in sizes.items():
        if UNSPECIFIED not in own.values():
            room = known_size(own)
            why = f"grid {name!r} has {known_size(own)}"
            break
    return {name: _placed(name, own, room, why) for name, own in sizes.items()}


@attrs.frozen(slots=False)
class Placement:
    """The relation between the ranks of several layouts in one world.

    Args:
        layouts: The layouts, by name.
        world_size: The number of ranks of the world.

    Attributes:
        kind: "tiled" if each rank of the world is in exactly one layout, "disjoint" if each rank is
            in at most one layout, "colocated" if all layouts have the same ranks, and otherwise
            "overlapping".

    Raises:
        WorldSizeError: A layout has ranks outside the world.

    Example:
        >>> encoder, llm = RankLayout("dp=4"), RankLayout("tp=4", rank_offset=6)
        >>> placement = Placement({"encoder": encoder, "llm": llm}, 12)
        >>> placement.kind, placement.overlaps, placement.spare_ranks
        ('disjoint', {}, (4, 5, 10, 11))
    """

    layouts: Mapping[str, RankLayout] = attrs.field(hash=False)
    world_size: int = attrs.field(converter=as_world_size)

    def __attrs_post_init__(self) -> None:
        for name, layout in self.layouts.items():
            if layout.last_rank >= self.world_size:
                what = f"grid {name!r} ({layout} at rank_offset {layout.rank_offset})"
                raise world_too_small(what, layout.last_rank, self.world_size)

    @cached_property
    def overlaps(self) -> dict[tuple[str, str], Sequence[int]]:
        """The ranks that two layouts share, ascending, for each pair of names with shared ranks."""
        pairs = combinations(self.layouts, 2)
        common = {pair: _common(*map(self.layouts.__getitem__, pair)) for pair in pairs}
        return {pair: ranks for pair, ranks in common.items() if ranks}

    @property
    def kind(self) -> Kind:
        """The relation between the layouts; see `Placement`."""
        if self.overlaps:
            return "colocated" if self._are_colocated else "overlapping"
        used = sum(layout.size for layout in self.layouts.values())
        return "tiled" if used == self.world_size else "disjoint"

    @property
    def spare_ranks(self) -> tuple[int, ...]:
        """The ranks of the world that are in no layout, ascending."""
        held = set(chain.from_iterable(layout.ranks for layout in self.layouts.values()))
        return tuple(rank for rank in range(self.world_size) if rank not in held)

    @property
    def _are_colocated(self) -> bool:
        return len({frozenset(layout.ranks) for layout in self.layouts.values()}) == 1

    def require(self, wanted: Requirement) -> None:
        """Raise unless the layouts have the wanted placement.

        Args:
            wanted: "tiled", "disjoint" or "colocated", as in `kind`, or "any". Tiled layouts are
                also disjoint, and a single layout is also colocated.

        Raises:
            LayoutError: `wanted` is none of these values.
            WorldSizeError: The layouts have another placement. The error lists their ranks.

        Example:
            >>> dp = RankLayout("dp=4")
            >>> try:
            ...     Placement({"a": dp, "b": dp}, 4).require("disjoint")
            ... except WorldSizeError as error:
            ...     print(str(error).partition("; ")[2])
            a has ranks 0..3, b has ranks 0..3
        """
        check_choice("requires=", wanted, REQUIREMENTS, LayoutError)
        fits = {
            "any": True,
            "colocated": self._are_colocated,
            "disjoint": not self.overlaps,
            "tiled": self.kind == "tiled",
        }
        if not fits[wanted]:
            held = [
                f"{name} has ranks {format_ranks(sorted(layout.ranks))}"
                for name, layout in self.layouts.items()
            ]
            raise WorldSizeError(
                f"the grids are not {wanted}, as requires={wanted!r} demands: {self}; "
                f"{first_n(held, 16)}"
            )

    def __str__(self) -> str:
        kind = self.kind
        grids = pluralize(len(self.layouts), "grid")
        lines = [f"{grids}, {kind}, in a world of {self.world_size} ranks"]
        if kind == "overlapping":
            for (one, other), ranks in self.overlaps.items():
                lines.append(f"{one} and {other} share ranks {format_ranks(ranks)}")
        if spare := self.spare_ranks:
            lines.append(f"no grid has ranks {format_ranks(spare)}")
        return "; ".join(lines)


@contextlib.contextmanager
def naming(grid: str) -> Iterator[None]:
    """Add the name of a grid to an error about its sizes."""
    try:
        yield
    except (LayoutError, WorldSizeError) as error:
        raise type(error)(f"grid {grid!r}: {error}") from error


def check_names(layouts: Mapping[str, T]) -> Mapping[str, T]:
    """Return grids by name, after checking the names."""
    if not isinstance(layouts, Mapping) or not layouts:
        raise LayoutError(
            f"grids= must map at least one name to a layout, as in encoder='tp=2,dp=4', "
            f"got {short_repr(layouts)}"
        )
    for name in layouts:
        if not isinstance(name, str) or not name or not is_utf8(name):
            raise LayoutError(
                f"the name of a grid must be a non-empty string, got {short_repr(name)}"
            )
        if "." in name:
            hint = f"write {name.replace('.', '_')!r}"
            raise LayoutError(
                f"the name of a grid must not contain '.', got {short_repr(name)}; {hint}"
            )
    return layouts


def _read(name: str, given: str | Mapping[str, int] | RankLayout) -> dict[str, int]:
    """Return the sizes of a layout without gaps. One size may be unspecified."""
    if not isinstance(given, RankLayout):
        with naming(name):
            return read_sizes(given)
    if not isinstance(given.ranks, range):
        raise LayoutError(
            f"grid {name!r} ({given}) cannot be placed on other ranks, because the ranks of its "
            f"layout have gaps or are not in ascending order; to leave the grid on these ranks, "
            f"pass the layout to the constructor: GridSet({{{name!r}: layout, ...}})"
        )
    return given.sizes


def _placed(
    name: str, sizes: Mapping[str, int], room: int, why: str, rank_offset: int = 0
) -> RankLayout:
    """Return a layout of `room` ranks, after inferring its unspecified size."""
    if room < 1:
        raise WorldSizeError(f"grid {name!r}: no ranks are left; make other grids smaller")
    with naming(name):
        return RankLayout(infer_sizes(sizes, room, why), rank_offset=rank_offset)


def _common(one: RankLayout, other: RankLayout) -> Sequence[int]:
    """Return the ranks in both layouts, ascending."""
    here, there = one.ranks, other.ranks
    if isinstance(here, range) and isinstance(there, range):
        return range(max(here.start, there.start), min(here.stop, there.stop))
    return tuple(sorted({*here} & {*there}))
