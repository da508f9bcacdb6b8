"""Several layouts in one world: one behind the other, or on the same ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, combinations, permutations
from types import MappingProxyType
from typing import Literal

import attrs

from hypercomm.errors import LayoutError, NotationError, WorldSizeError
from hypercomm.layout.rank_layout import RankLayout
from hypercomm.layout.reading.checks import (
    as_offset,
    as_world_size,
    check_choice,
    is_utf8,
    world_too_small,
)
from hypercomm.layout.reading.counting import counted
from hypercomm.layout.reading.notation import OPEN, format_ranks, parse_sizes
from hypercomm.layout.reading.shown import shown
from hypercomm.layout.reading.sizes import check_one_open, close_sizes, known_size

Kind = Literal["tiled", "colocated", "disjoint", "overlapping"]
Requirement = Literal["tiled", "disjoint", "colocated", "any"]
REQUIREMENTS: tuple[Requirement, ...] = ("tiled", "disjoint", "colocated", "any")


def tile(
    layouts: Mapping[str, str | RankLayout], world_size: int, rank_offset: int = 0
) -> dict[str, RankLayout]:
    """Place layouts one behind the other, in the order given.

    Args:
        layouts: Sizes as text, or a layout without gaps, by name. One size of all may be open (-1,
            or a dim alone): it takes what the others leave of the world.
        world_size: The number of ranks of the world.
        rank_offset: The rank that the first layout begins at.

    Returns:
        The layouts in their places, by name.

    Raises:
        LayoutError: There is none, a name is no text, or a layout has gaps.
        NotationError: A text cannot be read, or several sizes are open.
        WorldSizeError: What the others leave is no multiple of the open layout's other sizes.

    Example:
        >>> places = tile({"encoder": "tp=2,dp=4", "llm": "tp=4,dp,pp=2"}, 24)
        >>> for name, layout in places.items():
        ...     print(name, layout, layout.ranks)
        encoder tp=2,dp=4 range(0, 8)
        llm tp=4,dp=2,pp=2 range(8, 24)
    """
    sizes = {name: _read(name, text) for name, text in check_names(layouts).items()}
    world_size, rank_offset = as_world_size(world_size), as_offset(rank_offset)
    check_one_open(
        [f"{dim!r} of {name!r}" for name, own in sizes.items() for dim in own if own[dim] == OPEN]
    )
    left = f"are left for it{_behind(rank_offset)}"
    taken = rank_offset + sum(known_size(own) for own in sizes.values() if OPEN not in own.values())
    placed: dict[str, RankLayout] = {}
    for name, own in sizes.items():
        closed = _close(name, own, world_size - taken, left) if OPEN in own.values() else own
        placed[name] = RankLayout(tuple(closed.values()), tuple(closed), rank_offset)
        rank_offset += placed[name].size
    return placed


def colocate(
    layouts: Mapping[str, str | RankLayout], world_size: int, rank_offset: int = 0
) -> dict[str, RankLayout]:
    """Place layouts on the same ranks.

    Args:
        layouts: Sizes as text, or a layout without gaps, by name. Each may have one open size: it
            follows from those that have none, or where all have one, from the world.
        world_size: The number of ranks of the world.
        rank_offset: The rank that all of them begin at.

    Returns:
        The layouts in their places, by name.

    Raises:
        LayoutError: There is none, a name is no text, or a layout has gaps.
        NotationError: A text cannot be read, or several of its sizes are open.
        WorldSizeError: The layouts have different numbers of ranks.

    Example:
        >>> places = colocate({"training": "tp=2,dp", "inference": "tp=4,dp=2"}, 16)
        >>> [str(layout) for layout in places.values()]
        ['tp=2,dp=4', 'tp=4,dp=2']
    """
    sizes = {name: _read(name, text) for name, text in check_names(layouts).items()}
    rank_offset = as_offset(rank_offset)
    room = as_world_size(world_size) - rank_offset
    reason = f"are there for it{_behind(rank_offset)}"
    for name, own in sizes.items():
        if OPEN not in own.values():
            room, reason = known_size(own), f"are those of grid {name!r}"
            break
    closed = {name: _close(name, own, room, reason) for name, own in sizes.items()}
    return {
        name: RankLayout(tuple(own.values()), tuple(own), rank_offset)
        for name, own in closed.items()
    }


def _as_layouts(value: Mapping[str, RankLayout]) -> dict[str, RankLayout]:
    for name, layout in check_names(value).items():
        if not isinstance(layout, RankLayout):
            raise LayoutError(f"grid {name!r} needs a RankLayout, got {shown(layout)}")
    return dict(value)


@attrs.frozen
class Placement:
    """Where several layouts lie in a world; everything but ranks in full is arithmetic.

    Args:
        layouts: The layouts, by name.
        world_size: The number of ranks of the world.

    Attributes:
        kind: "tiled": each rank of the world is in exactly one layout; "disjoint": in one at most;
            "colocated": several layouts hold the same ranks; "overlapping": none of these.

    Raises:
        LayoutError: There is no layout, or a name is no text.
        WorldSizeError: A layout reaches beyond the world.

    Example:
        >>> encoder, llm = RankLayout.parse("dp=4"), RankLayout.parse("tp=4", rank_offset=6)
        >>> placement = Placement({"encoder": encoder, "llm": llm}, 12)
        >>> placement.kind, dict(placement.overlaps), placement.spare_ranks
        ('disjoint', {}, (4, 5, 10, 11))
    """

    layouts: Mapping[str, RankLayout] = attrs.field(converter=_as_layouts, hash=False)
    world_size: int = attrs.field(converter=as_world_size)
    _overlaps: Mapping[tuple[str, str], Sequence[int]] = attrs.field(
        init=False, eq=False, repr=False
    )

    def __attrs_post_init__(self) -> None:
        for name, layout in self.layouts.items():
            if layout.last_rank >= self.world_size:
                what = f"grid {name!r} ({layout} at rank_offset {layout.rank_offset})"
                raise world_too_small(what, layout.last_rank, self.world_size)
        pairs = combinations(self.layouts, 2)
        common = {pair: _common(*(self.layouts[name] for name in pair)) for pair in pairs}
        overlaps = {pair: ranks for pair, ranks in common.items() if ranks}
        object.__setattr__(self, "_overlaps", MappingProxyType(overlaps))

    @property
    def kind(self) -> Kind:
        """How the layouts lie."""
        if self._overlaps:
            return "colocated" if self._are_colocated else "overlapping"
        used = sum(layout.size for layout in self.layouts.values())
        return "tiled" if used == self.world_size else "disjoint"

    @property
    def overlaps(self) -> Mapping[tuple[str, str], Sequence[int]]:
        """The ranks that two layouts both hold, ascending, by their names; no pair without."""
        return self._overlaps

    @property
    def spare_ranks(self) -> tuple[int, ...]:
        """The ranks of the world that no layout holds, ascending."""
        held = set(chain.from_iterable(layout.ranks for layout in self.layouts.values()))
        return tuple(rank for rank in range(self.world_size) if rank not in held)

    def require(self, wanted: Requirement) -> None:
        """Refuse a placement that is not as wanted.

        Args:
            wanted: "tiled", "disjoint" or "colocated", as in `kind`, where what is tiled is
                disjoint too, and a layout alone is colocated; or "any".

        Raises:
            LayoutError: There is no such choice.
            WorldSizeError: The layouts lie otherwise; names them, and the ranks.

        Example:
            >>> dp = RankLayout.parse("dp=4")
            >>> try:
            ...     Placement({"a": dp, "b": dp}, 4).require("disjoint")
            ... except WorldSizeError as error:
            ...     print(error)
            requires='disjoint', but grids 'a' and 'b' both hold ranks 0..3
        """
        check_choice("requires", wanted, REQUIREMENTS, LayoutError)
        problem = None
        if wanted == "colocated" and not self._are_colocated:
            problem = self._apart()
        elif wanted in ("tiled", "disjoint") and self._overlaps:
            (one, other), ranks = next(iter(self.overlaps.items()))
            problem = f"grids {one!r} and {other!r} both hold ranks {format_ranks(ranks)}"
        elif wanted == "tiled" and self.kind != "tiled":
            problem = (
                f"no grid holds ranks {format_ranks(self.spare_ranks)} of the world of "
                f"{self.world_size}"
            )
        if problem is not None:
            raise WorldSizeError(f"requires={wanted!r}, but {problem}")

    def __str__(self) -> str:
        count = counted(len(self.layouts), "grid")
        if self.kind == "tiled":
            return f"{count}, tiling the world of {self.world_size} ranks"
        if self.kind == "overlapping":
            shared = [
                f"{one} and {other} share ranks {format_ranks(ranks)}"
                for (one, other), ranks in self.overlaps.items()
            ]
            how = "; ".join(["overlapping", *shared])
        else:
            how = {"colocated": "on the same ranks", "disjoint": "disjoint"}[self.kind]
        spare = self.spare_ranks
        rest = f"; no grid holds ranks {format_ranks(spare)}" if spare else ""
        return f"{count} in a world of {self.world_size} ranks, {how}{rest}"

    @property
    def _are_colocated(self) -> bool:
        first, *others = self.layouts
        sizes = {layout.size for layout in self.layouts.values()}
        shared = (self._overlaps.get((first, other), ()) for other in others)
        return len(sizes) == 1 and all({len(ranks)} == sizes for ranks in shared)

    def _apart(self) -> str:
        """Say which ranks only one of two layouts holds."""
        for (here, one), (there, other) in permutations(self.layouts.items(), 2):
            if lone := {*one.ranks} - {*other.ranks}:
                ranks = format_ranks(sorted(lone))
                return f"grid {here!r} holds ranks {ranks}, which grid {there!r} does not"
        return "the grids hold different ranks"


def check_names(layouts: Mapping[str, object]) -> Mapping[str, object]:
    """Check that what several grids are given as maps names to something."""
    if not isinstance(layouts, Mapping) or not layouts:
        raise LayoutError(
            f"layouts must map names of grids, one at least, as in encoder='tp=2,dp=4', "
            f"got {shown(layouts)}"
        )
    for name in layouts:
        if not isinstance(name, str) or not name or not is_utf8(name):
            raise LayoutError(f"the name of a grid must be a non-empty text, got {shown(name)}")
        if "." in name:
            raise LayoutError(
                f"the name of a grid must hold no '.', which stands between the name of its set "
                f"and its own, got {shown(name)}; write {name.replace('.', '_')!r}"
            )
    return layouts


def _read(name: str, layout: object) -> dict[str, int]:
    """The sizes of a layout, or of its text."""
    if isinstance(layout, str):
        return parse_sizes(layout)
    if not isinstance(layout, RankLayout):
        raise LayoutError(
            f"grid {name!r} needs sizes such as 'tp=2,dp=4', or a RankLayout, got {shown(layout)}"
        )
    if not isinstance(layout.ranks, range):
        raise LayoutError(
            f"grid {name!r} ({layout}) has ranks with gaps, or in their own order, and cannot "
            f"be moved; give its place too: GridSet({{{name!r}: layout, ...}})"
        )
    return layout.sizes


def _behind(rank_offset: int) -> str:
    return f" behind rank_offset {rank_offset}" if rank_offset else ""


def _close(name: str, sizes: Mapping[str, int], room: int, reason: str) -> dict[str, int]:
    """Infer the open size, if any, so that a layout has `room` ranks."""
    if room < 1:
        raise WorldSizeError(
            f"grid {name!r}: no ranks {reason}; make another size or the rank_offset smaller, or "
            f"start more ranks"
        )
    try:
        return close_sizes(sizes, room, f"{room} {reason}")
    except (NotationError, WorldSizeError) as error:
        raise type(error)(f"grid {name!r}: {error}") from error


def _common(one: RankLayout, other: RankLayout) -> Sequence[int]:
    """The ranks that both hold, ascending."""
    here, there = one.ranks, other.ranks
    if isinstance(here, range) and isinstance(there, range):
        return range(max(here.start, there.start), min(here.stop, there.stop))
    return tuple(sorted({*here} & {*there}))
