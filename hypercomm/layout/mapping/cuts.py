"""Message: the part of a tensor that one rank sends to another, and where it lies on both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.reading.checks import as_few, as_int
from hypercomm.layout.reading.shown import shown
from hypercomm.layout.reading.sizes import nearest_multiples

Index = TypeVar("Index", int, NDArray[np.int64])


@attrs.frozen
class Cut:
    """A tensor axis that the source cuts into some shards and the target into others.

    Both are counted in units, the largest pieces of the axis that no border of a shard cuts:
    there are as many as the least common multiple of both numbers of shards.

    Where a dim cuts in zigzag, a rank holds several chunks of the axis, and they count as shards.

    Attributes:
        axis: The tensor axis; -1 is the last.
        source: The number of shards on the source.
        target: The number of shards on the target.
        source_held: How many of them each rank of the source holds.
        target_held: How many of them each rank of the target holds.

    Example:
        >>> cut = Cut(axis=0, source=2, target=3)
        >>> cut.units, list(cut.targets_of(0)), list(cut.sources_of(1))
        (6, [0, 1], [0, 1])
        >>> cut.part(0, 1)
        Part(cut=Cut(axis=0, source=2, target=3), start=2, stop=3)
    """

    axis: int
    source: int
    target: int
    source_held: int = attrs.field(default=1, repr=False)
    target_held: int = attrs.field(default=1, repr=False)

    @property
    def sources(self) -> int:
        """By how much the axis is shorter on a rank of the source than as a whole."""
        return self.source // self.source_held

    @property
    def targets(self) -> int:
        """By how much the axis is shorter on a rank of the target than as a whole."""
        return self.target // self.target_held

    @property
    def units(self) -> int:
        """The number of units of the whole axis."""
        return math.lcm(self.source, self.target)

    @property
    def overlaps(self) -> int:
        """The number of pairs of a shard of the source and one of the target that overlap."""
        return self.source + self.target - math.gcd(self.source, self.target)

    def targets_of(self, shard: int) -> range:
        """Return the target's shards that overlap a shard of the source."""
        return range(*overlapping(shard, self.source, self.target))

    def sources_of(self, shard: int) -> range:
        """Return the source's shards that overlap a shard of the target."""
        return range(*overlapping(shard, self.target, self.source))

    def part(self, source: int, target: int, slots: tuple[int, int] = (0, 0)) -> Part:
        """Return what a shard of the source and one of the target have in common.

        `slots` says behind how many others of its rank each of both lies.
        """
        wide, narrow = self.units // self.source, self.units // self.target
        start = max(source * wide, target * narrow)
        return Part(self, start, min((source + 1) * wide, (target + 1) * narrow), slots)

    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Enumerate all overlapping shards of source and target, as two arrays of one length.

        Example:
            >>> [shards.tolist() for shards in Cut(axis=0, source=2, target=3).pairs()]
            [[0, 0, 1, 1], [0, 1, 1, 2]]
        """
        every = np.arange(self.source, dtype=np.int64)
        first, stop = overlapping(every, self.source, self.target)
        counts = stop - first
        sources = np.repeat(every, counts)
        begins = np.cumsum(counts) - counts
        return sources, np.arange(len(sources)) - begins[sources] + first[sources]


def overlapping(shard: Index, own: int, others: int) -> tuple[Index, Index]:
    """Return the first of the other shards that overlap one, and the first behind them.

    Example:
        >>> overlapping(1, own=2, others=3)
        (1, 3)
    """
    return shard * others // own, -(-(shard + 1) * others // own)


@attrs.frozen
class Part:
    """Units start .. stop - 1 of a tensor axis: from one shard of the source to one of the target.

    Example:
        >>> part = Cut(axis=0, source=2, target=3).part(1, 1)
        >>> (part.start, part.stop), part.slice_of(6, 1), part.slice_of(3, 2), part.slice_of(2, 3)
        ((3, 4), slice(3, 4, None), slice(0, 1, None), slice(1, 2, None))
    """

    cut: Cut
    start: int
    stop: int
    slots: tuple[int, int] = attrs.field(default=(0, 0), repr=False)

    def slice_of(self, length: int, shards: int, slot: int = 0, held: int = 1) -> slice:
        """Return where the part lies on a rank, where the axis is cut into `shards`.

        Args:
            length: Elements of the axis on one rank.
            shards: `cut.source`, `cut.target`, or 1 for the whole axis.
            slot: Behind how many other shards of the rank its shard lies.
            held: How many shards the rank has.

        Raises:
            LayoutError: The length is no multiple of the units that a shard has.
        """
        units = self.cut.units // shards
        if length % (units * held):
            is_zigzag = max(self.cut.source_held, self.cut.target_held) > 1
            raise LayoutError(
                f"tensor axis {self.cut.axis} has length {length}, and must be a multiple of "
                f"{units * held}, as {self.cut.source} {'chunks' if is_zigzag else 'shards'} "
                f"become {self.cut.target}; the nearest lengths that work are "
                f"{nearest_multiples(length, units * held)}"
            )
        step, first = length // (units * held), slot * units + self.start % units
        return slice(first * step, (first + self.stop - self.start) * step)


@attrs.frozen
class Message:
    """What one rank sends to another: a box of the tensor, which spans every axis that is not cut.

    Attributes:
        source: The rank that sends.
        target: The rank that receives; perhaps the same.
        parts: The units of each axis that is cut, the batch's first.

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
        """Return where it lies in the whole tensor.

        Args:
            shape: The whole tensor's, in elements.

        Returns:
            A slice for each axis: `tensor[message.global_slices(tensor.shape)]`.

        Raises:
            LayoutError: A length is not a multiple of the units of its axis, or an axis that is
                cut is not there.
        """
        return self._slices(shape, [(1, 0, 1)] * len(self.parts))

    def source_slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return where it lies in the sender's tensor, of this shape; as `global_slices`."""
        held = [(one.cut.source, one.slots[0], one.cut.source_held) for one in self.parts]
        return self._slices(shape, held)

    def target_slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return where it lies in the receiver's tensor, of this shape; as `global_slices`."""
        held = [(one.cut.target, one.slots[1], one.cut.target_held) for one in self.parts]
        return self._slices(shape, held)

    def _slices(
        self, shape: Sequence[int], places: Sequence[tuple[int, int, int]]
    ) -> tuple[slice, ...]:
        lengths = as_lengths(shape)
        slices = [slice(None)] * len(lengths)
        axes = resolve_axes((part.cut for part in self.parts), len(lengths))
        for part, axis, place in zip(self.parts, axes, places, strict=True):
            slices[axis] = part.slice_of(lengths[axis], *place)
        return tuple(slices)


def as_lengths(shape: Sequence[int]) -> tuple[int, ...]:
    """Read the shape of a tensor.

    Raises:
        LayoutError: It is no sequence of non-negative ints.

    Example:
        >>> as_lengths([8, 3])
        (8, 3)
    """
    lengths = tuple(as_int(length, "every length in shape") for length in as_few(shape, "shape"))
    if min(lengths, default=0) < 0:
        raise LayoutError(f"every length in shape must be non-negative, got {shown(lengths)}")
    return lengths


def resolve_axes(cuts: Iterable[Cut], ndim: int) -> list[int]:
    """Return the axes that are cut of a tensor of `ndim` axes, counted from the front.

    Raises:
        LayoutError: The tensor has no such axis, or two names are of one axis.

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
