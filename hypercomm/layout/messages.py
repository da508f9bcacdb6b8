"""Message: the part of a tensor that one rank sends to another, and its slices on both ranks.

An axis is cut into shards. A dim may cut it in zigzag, as Megatron orders a causal sequence for
context parallelism: each rank then holds two shards for this dim. `zigzag_order` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_int
from hypercomm.layout.layout import RankLayout
from hypercomm.layout.parsing import nearest_multiples


@attrs.frozen
class Cut:
    """A tensor axis that the source cuts into some shards and the target into others.

    Both are counted in units, the largest pieces of the axis that no border of a shard cuts:
    there are as many as the least common multiple of both numbers of shards.

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
        >>> cut.part(1, 1)
        Part(axis=0, start=3, stop=4, units=6, on_source=(0, 3), on_target=(1, 2))
    """

    axis: int
    source: int
    target: int
    source_held: int = 1
    target_held: int = 1

    @property
    def sources(self) -> int:
        """The factor by which the axis is shorter on a rank of the source than as a whole."""
        return self.source // self.source_held

    @property
    def targets(self) -> int:
        """The factor by which the axis is shorter on a rank of the target than as a whole."""
        return self.target // self.target_held

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

    def part(self, source: int, target: int, slots: tuple[int, int] = (0, 0)) -> Part:
        """Return what a shard of the source and one of the target have in common.

        `slots` are the positions of both among the shards of their ranks.
        """
        wide, narrow = self.units // self.source, self.units // self.target
        start = max(source * wide, target * narrow)
        stop = min((source + 1) * wide, (target + 1) * narrow)
        on_source = slots[0] * wide + start % wide, wide * self.source_held
        on_target = slots[1] * narrow + start % narrow, narrow * self.target_held
        return Part(self.axis, start, stop, self.units, on_source, on_target)


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
        on_source: The first unit among those of the source's rank, and how many that rank has.
        on_target: The same of the target's rank.
    """

    axis: int
    start: int
    stop: int
    units: int
    on_source: tuple[int, int]
    on_target: tuple[int, int]


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
        return self._slices(shape, [(part.start, part.units) for part in self.parts])

    def source_slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return its slices of the sender's tensor, of this shape; as `global_slices`."""
        return self._slices(shape, [part.on_source for part in self.parts])

    def target_slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return its slices of the receiver's tensor, of this shape; as `global_slices`."""
        return self._slices(shape, [part.on_target for part in self.parts])

    def _slices(self, shape: Sequence[int], firsts: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
        lengths = [as_int(one, "every length in shape", 0) for one in shape]
        slices = [slice(None)] * len(lengths)
        axes = resolve_axes(self.parts, len(lengths))
        for part, axis, (first, units) in zip(self.parts, axes, firsts, strict=True):
            step = length_of_unit(part.axis, lengths[axis], units)
            slices[axis] = slice(first * step, (first + part.stop - part.start) * step)
        return tuple(slices)


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


def zigzag_order(dims: Sequence[tuple[int, bool]]) -> NDArray[np.int64]:
    """Return the shards of an axis that each rank holds, where some dims cut it in zigzag.

    A dim of n coordinates that cuts in zigzag cuts what the dims further out have left into 2 * n
    chunks, and gives coordinate i the chunks i and 2 * n - 1 - i, one after the other. Any other
    dim cuts it into n blocks.

    Args:
        dims: Size of each dim, and whether it cuts in zigzag, outermost first.

    Returns:
        An array of shape (ranks, shards of each rank), the last dim varying fastest.

    Example:
        >>> zigzag_order([(2, True)]).tolist(), zigzag_order([(2, True), (2, False)]).tolist()
        ([[0, 3], [1, 2]], [[0, 1], [6, 7], [2, 3], [4, 5]])
    """
    held = 1 << sum(is_zigzag for _, is_zigzag in dims)
    local = np.arange(math.prod([size for size, _ in dims]) * held).reshape(1, -1)
    for size, is_zigzag in dims:
        chunks = local.reshape(len(local), 2 * size if is_zigzag else size, -1)
        if is_zigzag:
            chunks = np.concatenate([chunks[:, :size], chunks[:, : size - 1 : -1]], axis=2)
        local = chunks.reshape(len(local) * size, -1)
    return local


class AxisCut:
    """The dims of a layout that cut one tensor axis.

    Args:
        layout: The layout.
        dims: The dims, outermost first; those that the layout lacks have size 1.
        zigzag: The dims among them that cut in zigzag.

    Attributes:
        dims: The dims of the layout, with their sizes.
        count: The number of ranks that the axis is cut between.
        held: The number of shards of each rank.
    """

    def __init__(self, layout: RankLayout, dims: Iterable[str], zigzag: Collection[str]) -> None:
        self.dims = [(dim, layout.size_of(dim)) for dim in dims if dim in layout.dim_names]
        self.count = math.prod([size for _, size in self.dims])
        steps = [(size, dim in zigzag and size > 1) for dim, size in self.dims]
        self._order = zigzag_order(steps) if any(is_zigzag for _, is_zigzag in steps) else None
        self.held = 1 if self._order is None else self._order.shape[1]

    def shards_at(self, coords: Mapping[str, int]) -> list[int]:
        """Return the shards of the rank with these coordinates."""
        index = 0
        for dim, size in self.dims:
            index = index * size + coords[dim]
        return [index] if self._order is None else self._order[index].tolist()

    def place_of(self, shard: int) -> tuple[int, int]:
        """Return the rank, by its number among those of the axis, and the position of a shard."""
        if self._order is None:
            return shard, 0
        rank, position = np.argwhere(self._order == shard)[0].tolist()
        return rank, position


class Sharding:
    """How the ranks of one pipeline stage of a layout hold a tensor.

    A dim that cuts the tensor gives each of its coordinates another shard of an axis; every other
    dim replicates. Ranks that hold the same cell are its replicas, in the order of the layout.

    Args:
        layout: The ranks.
        cuts: For each tensor axis that is cut, the dims that cut it, outermost first. Dims that
            the layout lacks count as dims of size 1.
        stage: The coordinate of the stage along the dim of the pipeline; none: all ranks.
        zigzag: The dims of `cuts` that cut in zigzag.
        leaders: Whether only the first replica of a cell sends or receives.

    Attributes:
        axes: The dims that cut each axis.
        active: The number of replicas of a cell that send or receive.

    Example:
        >>> sharding = Sharding(RankLayout.parse("tp=2,dp=2,pp=2"), [("dp",)], {"pp": 1})
        >>> sharding.active, sharding.ranks, sharding.replicas_of(7)
        (2, (4, 5, 6, 7), (6, 7))
        >>> sharding.shards_of(7), sharding.shards_of(3), sharding.rank_at((1,), 1)
        ([(1,)], [], 7)
        >>> Sharding(RankLayout.parse("cp=2"), [("cp",)], zigzag={"cp"}).shards_of(0)
        [(0,), (3,)]
    """

    def __init__(
        self,
        layout: RankLayout,
        cuts: Iterable[Sequence[str]],
        stage: Mapping[str, int] | None = None,
        zigzag: Collection[str] = (),
        *,
        leaders: bool = False,
    ) -> None:
        self.layout, self.stage = layout, dict(stage or {})
        self.axes = [AxisCut(layout, dims, zigzag) for dims in cuts]
        taken = {*self.stage, *[dim for axis in self.axes for dim, _ in axis.dims]}
        copying = [dim for dim in reversed(layout.dim_names) if dim not in taken]
        self._copies = AxisCut(layout, copying, ())
        self.active = 1 if leaders else self._copies.count

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the stage, in the order of the layout."""
        return self.layout.ranks_where(**self.stage)

    def replica_of(self, rank: int) -> int:
        """Return the index of a rank among the ranks that hold the same cells."""
        return self._copies.shards_at(self.layout.coords(rank))[0]

    def shards_of(self, rank: int) -> list[tuple[int, ...]]:
        """Return what a rank of the layout sends or receives: an index for each axis that is cut.

        A rank has several if a dim cuts in zigzag. It has none outside the stage, or if only the
        first replica of its cell sends or receives.
        """
        coords = self.layout.coords(rank)
        if not self.stage.items() <= coords.items() or self.replica_of(rank) >= self.active:
            return []
        return list(product(*[axis.shards_at(coords) for axis in self.axes]))

    def slots_of(self, cell: tuple[int, ...]) -> tuple[int, ...]:
        """Return the position of a cell among those of its rank, along each axis that is cut."""
        places = zip(self.axes, cell, strict=True)
        return tuple([axis.place_of(shard)[1] for axis, shard in places])

    def rank_at(self, cell: tuple[int, ...], replica: int) -> int:
        """Return the rank that holds a cell as one of its replicas."""
        coords = dict(self.stage)
        for axis, shard in zip((*self.axes, self._copies), (*cell, replica), strict=True):
            index, _ = axis.place_of(shard)
            for dim, size in reversed(axis.dims):
                index, coords[dim] = divmod(index, size)
        return self.layout.rank(**coords)

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold what `rank` holds, itself included; () off the stage."""
        coords = self.layout.coords(rank)
        if not self.stage.items() <= coords.items():
            return ()
        copying = dict(self._copies.dims)
        others = {dim: at for dim, at in coords.items() if dim not in copying}
        return self.layout.ranks_where(**others)
