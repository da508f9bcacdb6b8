"""Message: the part of a tensor that one rank sends to another, and its slices on both ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_int
from hypercomm.layout.layout import RankLayout
from hypercomm.layout.parsing import nearest_multiples

Cell = tuple[int, ...]
"""A part of a tensor: the index of its shard along each axis that is cut."""


@attrs.frozen
class Cut:
    """A tensor axis that the source cuts into some shards and the target into others.

    Both are counted in units, the largest pieces of the axis that no border of a shard cuts:
    there are as many as the least common multiple of both numbers of shards.

    Attributes:
        axis: The tensor axis; -1 is the last.
        source: The number of shards on the source.
        target: The number of shards on the target.

    Example:
        >>> cut = Cut(axis=0, source=2, target=3)
        >>> cut.units, list(cut.targets_of(0)), list(cut.sources_of(1))
        (6, [0, 1], [0, 1])
        >>> cut.part(1, 1)
        Part(axis=0, start=3, stop=4, units=6, source_units=3, target_units=2)
    """

    axis: int
    source: int
    target: int

    @property
    def units(self) -> int:
        """The number of units of the whole axis."""
        return math.lcm(self.source, self.target)

    def targets_of(self, shard: int) -> range:
        """Return the target's shards that overlap a shard of the source."""
        return _overlapping(shard, self.source, self.target)

    def sources_of(self, shard: int) -> range:
        """Return the source's shards that overlap a shard of the target."""
        return _overlapping(shard, self.target, self.source)

    def part(self, source: int, target: int) -> Part:
        """Return what a shard of the source and one of the target have in common."""
        wide, narrow = self.units // self.source, self.units // self.target
        start = max(source * wide, target * narrow)
        stop = min((source + 1) * wide, (target + 1) * narrow)
        return Part(self.axis, start, stop, self.units, wide, narrow)


def _overlapping(shard: int, own: int, others: int) -> range:
    """Return the other shards that overlap one."""
    return range(shard * others // own, -(-(shard + 1) * others // own))


@attrs.frozen
class Part:
    """Units start .. stop - 1 of a tensor axis: from one shard of the source to one of the target.

    Attributes:
        axis: The tensor axis.
        start: The first unit.
        stop: The unit after the last.
        units: The number of units of the whole axis.
        source_units: The number of units of each shard of the source.
        target_units: The number of units of each shard of the target.
    """

    axis: int
    start: int
    stop: int
    units: int
    source_units: int
    target_units: int


@attrs.frozen
class Message:
    """A part of a tensor that one rank sends to another: a box, whole along every axis not cut.

    Attributes:
        source: The rank that sends.
        target: The rank that receives; perhaps the same.
        parts: The units of each axis that is cut, the axis of the batch first.

    Example:
        The source cuts 12 rows in two, the target in three: 3 of the source's 6, and 2 of them
        are the last half of the middle shard.

        >>> message = Message(5, 8, (Cut(axis=0, source=2, target=3).part(1, 1),))
        >>> message.global_slices([12, 7])
        (slice(6, 8, None), slice(None, None, None))
        >>> message.source_slices([6, 7])[0], message.target_slices([4, 7])[0]
        (slice(0, 2, None), slice(2, 4, None))
    """

    source: int
    target: int
    parts: tuple[Part, ...]

    def global_slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return its slices of the whole tensor.

        Args:
            shape: The whole tensor's, in elements.

        Returns:
            A slice for each axis: `tensor[message.global_slices(tensor.shape)]`.

        Raises:
            LayoutError: A length is not a multiple of the units of its axis, or an axis that is
                cut is not there.
        """
        return self._slices(shape, [part.units for part in self.parts])

    def source_slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return its slices of the sender's tensor, of this shape; as `global_slices`."""
        return self._slices(shape, [part.source_units for part in self.parts])

    def target_slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return its slices of the receiver's tensor, of this shape; as `global_slices`."""
        return self._slices(shape, [part.target_units for part in self.parts])

    def _slices(self, shape: Sequence[int], units: Sequence[int]) -> tuple[slice, ...]:
        """Return slices of a tensor that has so many units of each axis that is cut."""
        lengths = [as_int(one, "every length in shape", 0) for one in shape]
        slices = [slice(None)] * len(lengths)
        axes = resolve_axes(self.parts, len(lengths))
        for part, axis, count in zip(self.parts, axes, units, strict=True):
            step = length_of_unit(part.axis, lengths[axis], count)
            first = part.start % count
            slices[axis] = slice(first * step, (first + part.stop - part.start) * step)
        return tuple(slices)


def length_of_unit(axis: int, length: int, units: int) -> int:
    """Return the number of elements of each unit of a tensor axis.

    Raises:
        LayoutError: The length is not a multiple of the number of units.

    Example:
        >>> length_of_unit(0, 12, 6)
        2
    """
    if length % units:
        raise LayoutError(
            f"tensor axis {axis} has length {length}, and must be a multiple of {units} to be cut; "
            f"the nearest lengths that work are {nearest_multiples(length, units)}"
        )
    return length // units


def resolve_axes(cuts: Iterable[Cut | Part], ndim: int) -> list[int]:
    """Return the axes that are cut of a tensor of `ndim` axes, counted from the front.

    Raises:
        LayoutError: The tensor has no such axis, or one axis is cut twice.

    Example:
        >>> resolve_axes([Cut(0, 2, 2), Cut(-1, 2, 2)], ndim=3)
        [0, 2]
    """
    axes: list[int] = []
    for cut in cuts:
        if not -ndim <= cut.axis < ndim:
            raise LayoutError(
                f"the mapping cuts tensor axis {cut.axis}, but the tensor has {ndim} axes"
            )
        axis = cut.axis % ndim
        if axis in axes:
            raise LayoutError(
                f"the mapping cuts axes {axis} and {axis - ndim}, which are one axis of a tensor "
                f"of {ndim} axes; give both dims the same number"
            )
        axes.append(axis)
    return axes


# ---- which ranks hold which part ----------------------------------------------------------------


def number_at(digits: Iterable[int], sizes: Iterable[int]) -> int:
    """Return the number with these digits, the last one varying fastest.

    >>> number_at([1, 2], [2, 3]), digits_of(5, [2, 3])
    (5, (1, 2))
    """
    number = 0
    for digit, size in zip(digits, sizes, strict=True):
        number = number * size + digit
    return number


def digits_of(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the digits of a number, as `number_at` reads them."""
    digits = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        digits.append(digit)
    return tuple(digits[::-1])


class Sharding:
    """How the ranks of one pipeline stage of a layout hold a tensor.

    A dim that cuts the tensor gives each of its coordinates another shard of an axis; every other
    dim replicates. Ranks that hold the same cell are its replicas, in the order of the layout.

    Args:
        layout: The ranks.
        cuts: For each tensor axis that is cut, the dims that cut it, outermost first. Dims that
            the layout lacks count as dims of size 1.
        stage: The coordinate of the stage along the dim of the pipeline; none: all ranks.
        leaders: Whether only the first replica of a cell sends or receives.

    Attributes:
        counts: The number of shards of each axis that is cut.
        active: The number of replicas of a cell that send or receive.

    Example:
        >>> sharding = Sharding(RankLayout.parse("tp=2,dp=2,pp=2"), [("dp",)], {"pp": 1})
        >>> sharding.active, sharding.ranks, sharding.replicas_of(7)
        (2, (4, 5, 6, 7), (6, 7))
        >>> sharding.cell_of(7), sharding.cell_of(3), sharding.rank_at((1,), 1)
        ((1,), None, 7)
    """

    def __init__(
        self,
        layout: RankLayout,
        cuts: Iterable[Sequence[str]],
        stage: Mapping[str, int],
        *,
        leaders: bool = False,
    ) -> None:
        self.layout, self.stage = layout, stage
        self._axes = [tuple(filter(layout.dim_names.__contains__, dims)) for dims in cuts]
        taken = {*stage, *[dim for dims in self._axes for dim in dims]}
        self._copying = tuple([dim for dim in reversed(layout.dim_names) if dim not in taken])
        self._sizes = layout.sizes
        self.counts = [math.prod(map(self._sizes.__getitem__, dims)) for dims in self._axes]
        copies = math.prod(map(self._sizes.__getitem__, self._copying))
        self.active = 1 if leaders else copies

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the stage, in the order of the layout."""
        return self.layout.ranks_where(**self.stage)

    def replica_of(self, rank: int) -> int:
        """Return the number of a rank among the replicas of its cell."""
        return self._number(self._copying, self.layout.coords(rank))

    def cell_of(self, rank: int) -> Cell | None:
        """Return the cell that a rank of the layout sends or receives.

        None off the stage, and for a replica that only the leader acts for.
        """
        coords = self.layout.coords(rank)
        is_idle = self._number(self._copying, coords) >= self.active
        if is_idle or not self.stage.items() <= coords.items():
            return None
        return tuple([self._number(dims, coords) for dims in self._axes])

    def rank_at(self, cell: Cell, replica: int) -> int:
        """Return the rank that holds a cell as one of its replicas."""
        coords = dict(self.stage)
        for dims, number in zip((*self._axes, self._copying), (*cell, replica), strict=True):
            sizes = [self._sizes[dim] for dim in dims]
            coords.update(zip(dims, digits_of(number, sizes), strict=True))
        return self.layout.rank(**coords)

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold what `rank` holds, itself included; () off the stage."""
        coords = self.layout.coords(rank)
        if not self.stage.items() <= coords.items():
            return ()
        others = {dim: at for dim, at in coords.items() if dim not in self._copying}
        return self.layout.ranks_where(**others)

    def _number(self, dims: tuple[str, ...], coords: Mapping[str, int]) -> int:
        """Return the position of coordinates along dims, the last one varying fastest."""
        return number_at([coords[dim] for dim in dims], [self._sizes[dim] for dim in dims])
