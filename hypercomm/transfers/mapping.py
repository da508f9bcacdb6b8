"""Computes the messages that redistribute a tensor from one layout to another.

Each rank computes its messages from the two layouts, without communication.

A cell is the part of the tensor on a rank. The ranks that have the same cell are the replicas of
the cell. A cell of the source overlaps one or more cells of the target. The replicas of these
target cells are the consumers of the source cell. The n consumers are numbered from 0 on. In this
numbering, the replica of a target cell varies fastest, followed by the position along the last axis
that is split. A consumer that has the source cell copies the overlap locally. Any other consumer k
receives the overlap from replica k * R // n, where R is the number of replicas of the source cell.
With `leaders`, only the first replica of each cell sends or receives.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, product
from operator import attrgetter
from typing import Literal, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError, RankOutsideError, UnknownDimError
from hypercomm.layout.checks import as_int, as_ordered, world_too_small
from hypercomm.layout.layout import RankLayout, read_layout
from hypercomm.layout.parsing import nearest_multiples
from hypercomm.layout.text import first_n, short_repr

Cell = tuple[int, ...]
"""A part of a tensor, given as the index of its shard along each axis that is split."""

Shards = tuple[tuple[str, int], ...]
"""Pairs of a dim and the tensor axis that the dim splits."""

GivenShards = Mapping[str, int] | Iterable[tuple[str, int]] | None

_MAY_LACK = ("dp", "cp", "pp")
"""The dims in the default arguments of `RankMapping`. A layout need not have these dims."""

Sizes = tuple[tuple[int, ...], tuple[int, ...]]
"""The lengths of the shards of an axis, at the source and at the target."""

_MOST_MESSAGES = 2**20
"""The largest number of messages in a table."""


class HasLayout(Protocol):
    """An object with a layout, such as a grid."""

    @property
    def layout(self) -> RankLayout:
        """The layout of its ranks."""


AnyLayout = RankLayout | HasLayout | str | Mapping[str, int]
"""A layout, a grid, or the sizes of dims as text or by name."""


# ---- split axes, parts and messages -------------------------------------------------------------


@attrs.frozen(slots=False)
class Cut:
    """A tensor axis that the source and the target split into shards.

    Lengths are counted in units. Without `sizes`, the shards are even, and the axis has
    lcm(source, target) units, so the length of every shard is an integer number of units. With
    `sizes`, a unit is one element.

    Attributes:
        axis: The tensor axis. -1 is the last axis.
        source: The number of shards at the source.
        target: The number of shards at the target.
        sizes: The lengths of the shards at the source and at the target, or None if the shards are
            even.

    Example:
        >>> cut = Cut(axis=0, source=2, target=3)
        >>> cut.units, list(cut.targets_of(0)), list(cut.sources_of(1))
        (6, [0, 1], [0, 1])
        >>> cut.part(1, 1)
        Part(axis=0, start=3, stop=4, units=6, source=(3, 6), target=(2, 4), is_exact=False)
        >>> list(Cut(axis=0, source=2, target=3, sizes=((3, 2), (2, 2, 1))).targets_of(0))
        [0, 1]
    """

    axis: int
    source: int
    target: int
    sizes: Sizes | None = None

    @property
    def units(self) -> int:
        """The number of units of the axis."""
        return math.lcm(self.source, self.target) if self.sizes is None else sum(self.sizes[0])

    @cached_property
    def borders(self) -> tuple[Sequence[int], Sequence[int]]:
        """The borders of the shards at the source and at the target, in units."""
        if self.sizes is not None:
            before, after = (tuple(accumulate(sizes, initial=0)) for sizes in self.sizes)
            return before, after
        end = self.units + 1
        return range(0, end, self.units // self.source), range(0, end, self.units // self.target)

    def targets_of(self, shard: int) -> range:
        """Return the target's shards that overlap a shard of the source."""
        return _overlapping(shard, *self.borders)

    def sources_of(self, shard: int) -> range:
        """Return the source's shards that overlap a shard of the target."""
        return _overlapping(shard, *self.borders[::-1])

    def part(self, source: int, target: int) -> Part:
        """Return the units that a shard of the source and a shard of the target have in common."""
        here = self.borders[0][source], self.borders[0][source + 1]
        there = self.borders[1][target], self.borders[1][target + 1]
        start = max(here[0], there[0])
        stop = max(start, min(here[1], there[1]))
        return Part(self.axis, start, stop, self.units, here, there, self.sizes is not None)


def _overlapping(shard: int, own: Sequence[int], others: Sequence[int]) -> range:
    """Return the shards of the other layout, from the first to the last that overlaps a shard.

    >>> _overlapping(0, (0, 5), (0, 3, 3, 5)), _overlapping(1, (0, 3, 3, 5), (0, 5))
    (range(0, 3), range(0, 1))
    """
    first = bisect_right(others, own[shard]) - 1
    return range(first, bisect_left(others, own[shard + 1]))


@attrs.frozen
class Part:
    """The units of a tensor axis that a source shard and a target shard have in common.

    Attributes:
        axis: The tensor axis.
        start: The first unit.
        stop: The unit after the last unit.
        units: The number of units of the axis.
        source: The first unit of the source shard, and the unit after its last unit.
        target: The first unit of the target shard, and the unit after its last unit.
        is_exact: Whether a unit is one element.
    """

    axis: int
    start: int
    stop: int
    units: int
    source: tuple[int, int]
    target: tuple[int, int]
    is_exact: bool = False


@attrs.frozen
class Message:
    """A part of a tensor that one rank sends to another.

    Along an axis that is not split, the part has the full length.

    Attributes:
        source: The rank that sends.
        target: The rank that receives. A rank may send to itself.
        parts: The units along each axis that is split. If the batch axis is split, it is first.

    Example:
        The source splits 12 rows into two shards, and the target splits them into three shards.
        The second source shard has rows 6 to 11. The second target shard has rows 4 to 7. Both
        shards have rows 6 and 7.

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
        """Return the slices of the message in the full tensor.

        Args:
            shape: The shape of the full tensor, in elements.

        Returns:
            A slice for each axis. `tensor[message.global_slices(tensor.shape)]` is the part.

        Raises:
            LayoutError: A length is not a multiple of the number of units of its axis, or the
                mapping splits an axis that the tensor does not have.
        """
        return self._slices(shape, [(0, part.units) for part in self.parts])

    def source_slices(self, local_shape: Sequence[int]) -> tuple[slice, ...]:
        """Return the slices of the message in the sender's tensor, which has `local_shape`.

        See `global_slices` for the errors.
        """
        return self._slices(local_shape, [part.source for part in self.parts])

    def target_slices(self, local_shape: Sequence[int]) -> tuple[slice, ...]:
        """Return the slices of the message in the receiver's tensor, which has `local_shape`.

        See `global_slices` for the errors.
        """
        return self._slices(local_shape, [part.target for part in self.parts])

    def _slices(self, shape: Sequence[int], within: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
        """Return the slices in a tensor that has the units `within` along each split axis."""
        lengths = [as_int(one, "every length in shape", 0) for one in shape]
        slices = [slice(None)] * len(lengths)
        axes = resolve_axes(self.parts, len(lengths))
        for part, axis, (first, end) in zip(self.parts, axes, within, strict=True):
            if part.is_exact and lengths[axis] != end - first:
                raise LayoutError(
                    f"tensor axis {part.axis} has length {lengths[axis]}, but the mapping requires "
                    f"{end - first}"
                )
            step = 1 if part.is_exact else length_of_unit(part.axis, lengths[axis], end - first)
            slices[axis] = slice((part.start - first) * step, (part.stop - first) * step)
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
            f"tensor axis {axis} has length {length}, which cannot be split evenly, because it is "
            f"not a multiple of {units}; use {nearest_multiples(length, units)}"
        )
    return length // units


def chunk_sizes(length: int, counts: Iterable[int]) -> tuple[int, ...]:
    """Split an axis one or more times by torch.chunk's rule, and return the sizes of the shards.

    Args:
        length: The length of the axis.
        counts: For each split, the number of shards into which it divides each existing shard. The
            outermost split is first. The last shards may be empty.

    Example:
        >>> chunk_sizes(10, [4]), chunk_sizes(5, [2, 2]), chunk_sizes(2, [3])
        ((3, 3, 3, 1), (2, 1, 1, 1), (1, 1, 0))
    """
    sizes = [length]
    for count in counts:
        steps = [(size, -(-size // count)) for size in sizes]
        sizes = [
            max(0, min(step, size - step * turn)) for size, step in steps for turn in range(count)
        ]
    return tuple(sizes)


def resolve_axes(cuts: Iterable[Cut | Part], ndim: int) -> list[int]:
    """Return the axes that are split as non-negative indices, for a tensor of `ndim` axes.

    Raises:
        LayoutError: The tensor has no such axis, or two entries refer to the same axis.

    Example:
        >>> resolve_axes([Cut(0, 2, 2), Cut(-1, 2, 2)], ndim=3)
        [0, 2]
    """
    axes: list[int] = []
    for cut in cuts:
        if not -ndim <= cut.axis < ndim:
            raise LayoutError(
                f"the mapping splits tensor axis {cut.axis}, but the tensor has {ndim} axes"
            )
        axis = cut.axis % ndim
        if axis in axes:
            raise LayoutError(
                f"the mapping splits axes {axis} and {axis - ndim}, which are one axis of a tensor "
                f"of {ndim} axes; give both dims the same number"
            )
        axes.append(axis)
    return axes


# ---- the part of each rank ----------------------------------------------------------------------


def number_at(digits: Iterable[int], sizes: Iterable[int]) -> int:
    """Return the number with these mixed-radix digits. The last digit varies fastest.

    >>> number_at([1, 2], [2, 3]), digits_of(5, [2, 3])
    (5, (1, 2))
    """
    number = 0
    for digit, size in zip(digits, sizes, strict=True):
        number = number * size + digit
    return number


def digits_of(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the mixed-radix digits of a number. This is the inverse of `number_at`."""
    digits = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        digits.append(digit)
    return tuple(digits[::-1])


class Sharding:
    """The distribution of a tensor over the ranks of one pipeline stage of a layout.

    Along a dim that splits the tensor, ranks have different shards of an axis. Along every other
    dim, ranks have replicas of the same part. A cell is such a part. The replicas of a cell are in
    the order of the layout.

    Args:
        layout: The layout of the ranks.
        cuts: For each tensor axis that is split, the dims that split it, outermost first. Dims
            that the layout does not have count as dims of size 1.
        stage: The pipeline dim with the coordinate of the stage. If empty, all ranks take part.
        leaders: Whether only the first replica of a cell sends or receives.

    Attributes:
        counts: The number of shards of each axis that is split.
        active: The number of replicas of each cell that send or receive.

    Example:
        >>> sharding = Sharding(RankLayout("tp=2,dp=2,pp=2"), [("dp",)], {"pp": 1})
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
        self.layout = layout
        self.stage = stage
        axes = [tuple(filter(layout.dim_names.__contains__, dims)) for dims in cuts]
        taken = {*stage, *[dim for dims in axes for dim in dims]}
        copying = tuple([dim for dim in reversed(layout.dim_names) if dim not in taken])
        self._dims = (*axes, copying)
        self._sizes = [[layout.size_of(dim) for dim in dims] for dims in self._dims]
        *self.counts, copies = map(math.prod, self._sizes)
        self.active = 1 if leaders else copies

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the stage, in the order of the layout."""
        return self.layout.ranks_where(**self.stage)

    def place_of(self, rank: int) -> tuple[Cell, int] | None:
        """Return the cell of a rank of the layout, and the index of the rank among its replicas.

        Return None if the rank is not in the stage.
        """
        coords = self.layout.coords(rank)
        if not self.stage.items() <= coords.items():
            return None
        every = zip(self._dims, self._sizes, strict=True)
        *cell, replica = [number_at([coords[dim] for dim in dims], sizes) for dims, sizes in every]
        return tuple(cell), replica

    def cell_of(self, rank: int) -> Cell | None:
        """Return the cell that a rank sends or receives.

        Return None if the rank is not in the stage. With `leaders`, also return None for all
        replicas of a cell except the first.
        """
        place = self.place_of(rank) if rank in self.layout else None
        return place[0] if place is not None and place[1] < self.active else None

    def chunks_of(self, lengths: Iterable[int]) -> list[tuple[int, ...]]:
        """Return the sizes of the shards along each split axis, given the lengths of these axes."""
        every = zip(lengths, self._sizes[:-1], strict=True)
        return [chunk_sizes(length, sizes) for length, sizes in every]

    def rank_at(self, cell: Cell, replica: int) -> int:
        """Return the rank that has a replica of a cell, given the index of the replica."""
        coords = dict(self.stage)
        for dims, sizes, at in zip(self._dims, self._sizes, (*cell, replica), strict=True):
            coords.update(zip(dims, digits_of(at, sizes), strict=True))
        return self.layout.rank(**coords)

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """Return `rank` and the other replicas of its cell, or () if it is not in the stage."""
        coords = self.layout.coords(rank)
        if not self.stage.items() <= coords.items():
            return ()
        others = {dim: at for dim, at in coords.items() if dim not in self._dims[-1]}
        return self.layout.ranks_where(**others)


# ---- the mapping --------------------------------------------------------------------------------


@attrs.frozen(repr=False, init=False)
class RankMapping:
    """The messages that redistribute a tensor from one layout to another.

    One dim splits the batch. Further dims may split further axes. Every other dim replicates the
    tensor. The last pipeline stage of the source sends the tensor to the first stage of the target.
    Each target rank receives each element that it needs from exactly one source rank. A target rank
    that is also a source rank with this element copies it. Any other target rank receives the
    element from one of the source ranks that have it. The messages are divided among these source
    ranks by number and not by size: if n target ranks need a part that R source ranks have, each of
    the R ranks sends the part to at most ceil(n / R) ranks.

    A mapping is frozen, hashable and picklable, and does not need torch. `hypercomm.transfer` moves
    tensors with it. The layouts may be disjoint, overlap, or have the same ranks.

    Args:
        source: The layout of the ranks that have the tensor. Pass a layout, a grid, or the sizes of
            dims as text. With sizes, ranks start at 0.
        target: The layout of the ranks that receive the tensor, in the same forms.
        along: The dim that splits the batch. Its size in one layout must be a multiple of its size
            in the other. In a layout without this dim, the size is 1. Pass None for a tensor
            without a batch, such as a weight.
        batch_axis: The tensor axis of the batch. -1 is the last.
        shards: Further dims that split the tensor into contiguous blocks, and the axis that each
            dim splits. If several dims split one axis, `along` is outermost, followed by the other
            dims in the given order. The numbers of shards at the source and at the target need not
            be multiples of each other. Default: if there is a batch, "cp" splits the sequence. The
            sequence is axis 1, or axis 0 if the batch is axis 1.
        pipeline: The dim of the pipeline. If `pipeline` is None, or a layout does not have this
            dim, all ranks of the layout take part.
        leaders: Whether only leaders send and receive. Of the source ranks that have the same
            elements, only the first rank sends. Of the target ranks that need these elements, only
            the first rank receives. This rank then broadcasts the elements to the other ranks.
        backward: Whether the tensor is sent from the first stage of the source to the last stage of
            the target, like gradients. `inverse()` returns such a mapping.
        sizes: For each axis in `cuts`, the lengths of the shards at the source and at the target,
            as `of_shape` computes them. Default: the shards are even, and the tensor may have any
            shape.

    Raises:
        LayoutError: `source` or `target` is not a layout, a dim has two roles, an axis is not an
            int, or neither of the two sizes of `along` is a multiple of the other.
        UnknownDimError: An argument names a dim that neither layout has. Only "dp", "cp" and "pp"
            may be absent. If `along` is absent, every dim larger than 1 must have a role, because a
            dim without a role would replicate the tensor.

    Example:
        Ranks 0 and 1 of the source have the first half of the batch, and ranks 2 and 3 have the
        second half. Each of the ranks 4 to 7 of the target needs a quarter.

        >>> mapping = RankMapping(RankLayout("tp=2,dp=2"), RankLayout([4], ["dp"], 4))
        >>> print(mapping)
        tp=2,dp=2 at 0 -> dp=4 at 4: fan-out 2 -> 4 along dp; tp replicates
        >>> [mapping.targets_of(rank) for rank in range(4)]
        [(4,), (5,), (6,), (7,)]
        >>> mapping.receives(5)[0].global_slices([12])
        (slice(3, 6, None),)

        A weight is split by tp=2 at the source and by tp=3 at the target. A rank copies the rows
        that it already has.

        >>> here, there = RankLayout([2], ["tp"]), RankLayout([3], ["tp"])
        >>> weight = RankMapping(here, there, along=None, shards={"tp": 0})
        >>> [(message.source, message.target) for message in weight.receives(1)]
        [(0, 1), (1, 1)]
    """

    source: RankLayout
    target: RankLayout
    along: str | None
    batch_axis: int
    shards: Shards
    pipeline: str | None
    leaders: bool
    backward: bool
    sizes: tuple[Sizes, ...]
    cuts: tuple[Cut, ...] = attrs.field(init=False, eq=False)
    """The tensor axes that are split. If the batch axis is split, it is first."""
    before: Sharding = attrs.field(init=False, eq=False)
    """The distribution of the tensor over the ranks of the source."""
    after: Sharding = attrs.field(init=False, eq=False)
    """The distribution of the tensor over the ranks of the target."""

    def __init__(
        self,
        source: AnyLayout,
        target: AnyLayout,
        along: str | None = "dp",
        *,
        batch_axis: int = 0,
        shards: GivenShards = None,
        pipeline: str | None = "pp",
        leaders: bool = False,
        backward: bool = False,
        sizes: Iterable[Sizes] = (),
    ) -> None:
        source, target = read_layout(source), read_layout(target)
        batch_axis = as_int(batch_axis, "batch_axis")
        if shards is None:
            dims = {*source.dim_names, *target.dim_names} - {along, pipeline}
            shards = {"cp": 0 if batch_axis == 1 else 1} if along and "cp" in dims else {}
        pairs = as_shards(shards)
        known = tuple(sizes)
        self.__attrs_init__(
            source, target, along, batch_axis, pairs, pipeline, leaders, backward, known
        )
        self._check_roles()
        axes = dims_of_axes(along, batch_axis, pairs).items()
        cuts = {axis: dims for axis, dims in axes if max(map(max, map(self._sizes, dims))) > 1}
        stage = self._stage(source, is_last=not backward)
        before = Sharding(source, cuts.values(), stage, leaders=leaders)
        stage = self._stage(target, is_last=backward)
        after = Sharding(target, cuts.values(), stage, leaders=leaders)
        numbers = [*zip(before.counts, after.counts, strict=True)]
        if known and [tuple(map(len, one)) for one in known] != numbers:
            raise LayoutError(
                f"sizes= must contain one length for each shard; the numbers of shards at the "
                f"source and at the target are {numbers}, got {known}"
            )
        lengths: Sequence[Sizes | None] = known or [None] * len(cuts)
        made = [Cut(axis, *two, one) for axis, two, one in zip(cuts, numbers, lengths, strict=True)]
        object.__setattr__(self, "before", before)
        object.__setattr__(self, "after", after)
        object.__setattr__(self, "cuts", tuple(made))

    @classmethod
    def weights(
        cls,
        source: AnyLayout,
        target: AnyLayout,
        shards: GivenShards = None,
        *,
        at: Mapping[str, int] | None = None,
    ) -> RankMapping:
        """Map a tensor without a batch, such as a weight, to all ranks of the target.

        Args:
            source: The layout of the ranks that have the tensor.
            target: The layout of the ranks that receive it.
            shards: The dims that split the tensor, and the axis that each dim splits. If both
                layouts have a dim that splits the tensor in only one layout, such as dp with FSDP,
                rename the dim in that layout: `layout.rename(dp="fsdp")`.
            at: Coordinates of the source ranks that have the tensor, such as {"pp": 1} for a weight
                of stage 1. Default: all source ranks have the tensor.

        Example:
            >>> mapping = RankMapping.weights("tp=2,pp=2", "tp=4", {"tp": 0}, at={"pp": 1})
            >>> mapping.source_ranks, mapping.sources_of(3)
            ((2, 3), (3,))
        """
        layout = read_layout(source)
        part = layout.select(**at) if at else layout
        return cls(part, target, None, shards=shards, pipeline=None)

    @property
    def kind(self) -> Literal["equal", "fan-in", "fan-out"]:
        """Whether the target has equally many, fewer (fan-in) or more (fan-out) batch shards."""
        before, after = self._sizes(self.along)
        return "equal" if before == after else "fan-in" if before > after else "fan-out"

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The ranks of the source's stage, in the order of the layout."""
        return self.before.ranks

    @property
    def target_ranks(self) -> tuple[int, ...]:
        """The ranks of the target's stage, in the order of the layout."""
        return self.after.ranks

    def __str__(self) -> str:
        axes = dims_of_axes(self.along, self.batch_axis, self.shards)
        words = []
        if self.along is not None:
            before, after = self._sizes(self.along)
            words = [f"{self.kind} {before} -> {after} along {self.along}"]
        for cut in self.cuts:
            if axes[cut.axis] != (self.along,):
                words.append(f"{cut.source} -> {cut.target} on axis {cut.axis}")
        words = words or ["unsharded"]
        if self.leaders:
            words.append("leaders only")
        if self.backward:
            words.append("backward")
        text = f"{_with_ranks(self.source)} -> {_with_ranks(self.target)}: {', '.join(words)}"
        roles = {self.along, self.pipeline, *dict(self.shards)}
        idle = replicating(self.source, self.target, roles)
        if idle:
            text += f"; {', '.join(idle)} {'replicates' if len(idle) == 1 else 'replicate'}"
        return text

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"

    def inverse(self) -> RankMapping:
        """Return the mapping from the target back to the source, for gradients.

        Each source rank receives the gradient of its part from one of the target ranks that have
        this gradient. All replicas must have the same gradient, as after the all-reduce of tensor
        parallelism.

        Example:
            >>> mapping = RankMapping(RankLayout("pp=2"), RankLayout("pp=2"))
            >>> mapping.source_ranks, mapping.inverse().target_ranks
            ((1,), (1,))
        """
        return attrs.evolve(
            self,
            source=self.target,
            target=self.source,
            backward=not self.backward,
            sizes=[(after, before) for before, after in self.sizes],
        )

    def of_shape(self, shape: Sequence[int]) -> RankMapping:
        """Return this mapping for a tensor of a given shape.

        The tensor is split by torch.chunk's rule. If several dims split an axis, each dim splits
        the shards of the previous dim. The last shards of an axis may be shorter or empty. In the
        messages of the new mapping, a unit is one element.

        Args:
            shape: The shape of the full tensor.

        Raises:
            LayoutError: The tensor does not have an axis that the mapping splits, or a length is
                not an int.

        Example:
            >>> mapping = RankMapping.weights("fsdp=4", "tp=2", {"fsdp": 0, "tp": 0})
            >>> ten_rows = mapping.of_shape([10, 8])
            >>> ten_rows.sizes, ten_rows.sources_of(1)
            ((((3, 3, 3, 1), (5, 5)),), (1, 2, 3))
            >>> ten_rows.shape_at(3, [10, 8], is_source=True)
            (1, 8)
        """
        lengths = [as_int(length, "every length in shape", 0) for length in shape]
        cut = [lengths[axis] for axis in resolve_axes(self.cuts, len(lengths))]
        both = zip(self.before.chunks_of(cut), self.after.chunks_of(cut), strict=True)
        return attrs.evolve(self, sizes=tuple(both))

    def shape_at(self, rank: int, shape: Sequence[int], *, is_source: bool) -> tuple[int, ...]:
        """Return the shape of a rank's part of a tensor.

        Args:
            rank: A rank of the stage that sends or of the stage that receives.
            shape: The shape of the full tensor. Without `sizes` in the mapping, the tensor is split
                by torch.chunk's rule.
            is_source: Whether to return the shape at the source instead of the shape at the target.

        Raises:
            RankOutsideError: The rank is not in the stage that sends, with `is_source`, or not in
                the stage that receives, without it.
            LayoutError: The tensor does not have an axis that the mapping splits.
        """
        exact = self if self.sizes else self.of_shape(shape)
        cell = exact._cell_at(rank, is_source)
        lengths = list(shape)
        axes = resolve_axes(exact.cuts, len(lengths))
        for axis, index, sizes in zip(axes, cell, exact.sizes, strict=True):
            lengths[axis] = sizes[0 if is_source else 1][index]
        return tuple(lengths)

    def cells_at(
        self, rank: int, ndim: int, *, is_source: bool
    ) -> tuple[tuple[int, int, int], ...]:
        """Return the shards that a rank has of a tensor of `ndim` axes.

        Args:
            rank: A rank of the stage that sends or of the stage that receives.
            ndim: The number of axes of the tensor.
            is_source: Whether to return the shards at the source instead of those at the target.

        Returns:
            For each axis that is split, the axis, the index of the shard, and the number of shards.

        Raises:
            RankOutsideError: The rank is not in the stage.
            LayoutError: The tensor does not have an axis that the mapping splits.
        """
        cell = self._cell_at(rank, is_source)
        counts = (self.before if is_source else self.after).counts
        shards = zip(resolve_axes(self.cuts, ndim), cell, counts, strict=True)
        return tuple(sorted(shard for shard in shards if shard[2] > 1))

    def _cell_at(self, rank: int, is_source: bool) -> Cell:
        """Return the cell of a rank in the stage that sends or in the stage that receives."""
        place = (self.before if is_source else self.after).place_of(rank)
        if place is None:
            raise RankOutsideError(f"rank {rank} is not in the stage that has the tensor")
        return place[0]

    def table(self) -> NDArray[np.void]:
        """Return all messages as a table.

        Returns:
            A structured array, sorted by source and target. The fields "source" and "target" are
            ranks. The fields "start" and "stop" are units, with one column for each split axis.

        Raises:
            LayoutError: There are more than a million messages.

        Example:
            >>> mapping = RankMapping(RankLayout("dp=2"), RankLayout([3], ["tp"], 2))
            >>> [row.tolist() for row in mapping.table()[["source", "target"]]]
            [(0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4)]
            >>> mapping.table()["start"].ravel().tolist()
            [0, 0, 0, 1, 1, 1]
        """
        pairs = [cut.source + cut.target - math.gcd(cut.source, cut.target) for cut in self.cuts]
        count = math.prod(pairs) * self.after.active
        if count > _MOST_MESSAGES:
            raise LayoutError(
                f"the table would have {count} messages, but the limit is {_MOST_MESSAGES}; call "
                f"sends() and receives() for single ranks, or create the mapping with leaders=True"
            )
        messages = [message for rank in self.source_ranks for message in self.sends(rank)]
        messages.sort(key=attrgetter("source", "target"))
        ends = [(name, np.int64) for name in ("source", "target")]
        units = [(name, np.int64, (len(self.cuts),)) for name in ("start", "stop")]
        rows = np.empty(len(messages), dtype=[*ends, *units])
        for row, message in zip(rows, messages, strict=True):
            row["source"], row["target"] = message.source, message.target
            row["start"] = [part.start for part in message.parts]
            row["stop"] = [part.stop for part in message.parts]
        return rows

    # ---- one rank ---------------------------------------------------------------------------

    def sends(self, rank: int) -> tuple[Message, ...]:
        """Return the messages that a rank sends, sorted by target.

        The result is empty if the rank is not in the sending stage.

        Args:
            rank: A rank of the source.

        Raises:
            RankOutsideError: The source does not contain `rank`.

        Example:
            >>> mapping = RankMapping(RankLayout("dp=4"), RankLayout("tp=2,dp=2"))
            >>> [message.target for message in mapping.sends(2)]
            [2, 3]
        """
        here = self.before.place_of(rank)
        if here is None or here[1] >= self.before.active:
            return ()
        return tuple(sorted(self._sent_from(*here, rank), key=attrgetter("target")))

    def receives(self, rank: int) -> tuple[Message, ...]:
        """Return the messages that a rank receives, sorted by source.

        The result is empty if the rank is not in the receiving stage.

        Args:
            rank: A rank of the target.

        Raises:
            RankOutsideError: The target does not contain `rank`.

        Example:
            >>> mapping = RankMapping(RankLayout("dp=4"), RankLayout("tp=2,dp=2"))
            >>> [(message.source, message.target) for message in mapping.receives(3)]
            [(2, 3), (3, 3)]
        """
        there = self.after.place_of(rank)
        if there is None or there[1] >= self.after.active:
            return ()
        return tuple(sorted(self._received_at(*there, rank), key=attrgetter("source")))

    def targets_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank of the source sends to, ascending. See `sends`."""
        return tuple([message.target for message in self.sends(rank)])

    def sources_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank of the target receives from, ascending. See `receives`."""
        return tuple([message.source for message in self.receives(rank)])

    def broadcast_siblings(self, rank: int) -> tuple[int, ...]:
        """Return the target ranks that need the same elements as `rank`, including `rank`.

        The first of these ranks is the leader. With `leaders`, only the leader receives these
        elements. The result is empty if the rank is not in the receiving stage.

        Raises:
            RankOutsideError: The target does not contain `rank`.

        Example:
            >>> mapping = RankMapping(RankLayout("dp=4"), RankLayout("tp=2,dp=2"))
            >>> mapping.broadcast_siblings(3)
            (2, 3)
        """
        return self.after.replicas_of(rank)

    # ---- inside -------------------------------------------------------------------------------

    def _sent_from(self, here: Cell, replica: int, rank: int) -> Iterator[Message]:
        """Yield the messages with which a rank sends its cell."""
        choices = [cut.targets_of(shard) for cut, shard in zip(self.cuts, here, strict=True)]
        own = self.after.cell_of(rank)
        if own is not None and all(shard in some for shard, some in zip(own, choices, strict=True)):
            yield self._message(here, own, rank, rank)
        counts = [*map(len, choices), self.after.active]
        consumers = math.prod(counts)
        senders = self.before.active
        first, last = (-(-turn * consumers // senders) for turn in (replica, replica + 1))
        for turn in range(first, last):
            *positions, receiver = digits_of(turn, counts)
            there = tuple([some[at] for some, at in zip(choices, positions, strict=True)])
            target = self.after.rank_at(there, receiver)
            if self.before.cell_of(target) != here:  # otherwise the target copies the cell
                yield self._message(here, there, rank, target)

    def _received_at(self, there: Cell, replica: int, rank: int) -> Iterator[Message]:
        """Yield the messages with which a rank receives its cell."""
        choices = [cut.sources_of(shard) for cut, shard in zip(self.cuts, there, strict=True)]
        own = self.before.cell_of(rank)
        for here in product(*choices):
            if here == own:
                yield self._message(here, there, rank, rank)
                continue
            shards = [cut.targets_of(shard) for cut, shard in zip(self.cuts, here, strict=True)]
            positions = [at - some.start for at, some in zip(there, shards, strict=True)]
            counts = [*map(len, shards), self.after.active]
            turn = number_at([*positions, replica], counts)
            sender = turn * self.before.active // math.prod(counts)
            yield self._message(here, there, self.before.rank_at(here, sender), rank)

    def _message(self, here: Cell, there: Cell, source: int, target: int) -> Message:
        parts = [cut.part(*shards) for cut, *shards in zip(self.cuts, here, there, strict=True)]
        return Message(source, target, tuple(parts))

    def _check_roles(self) -> None:
        """Raise unless each dim is known and has only one role, and the sizes of `along` fit."""
        given = [("along", self.along), *(("shards", dim) for dim, _ in self.shards)]
        named = [*given, ("pipeline", self.pipeline)]
        roles = roles_of([(role, dim) for role, dim in named if dim is not None])
        names = self.source.dim_names, self.target.dim_names
        idle = replicating(self.source, self.target, roles)
        for dim, role in roles.items():
            may_lack = dim in _MAY_LACK and not (role == "along" and idle)
            if not may_lack and dim not in {*names[0], *names[1]}:
                hint = "; pass along=None if no dim splits a batch" if role == "along" else ""
                raise UnknownDimError(
                    f"{role}= contains dim {short_repr(dim)}, which neither layout has; the source "
                    f"has dims {names[0]}, and the target has dims {names[1]}{hint}"
                )
        before, after = self._sizes(self.along)
        if before % after and after % before:
            raise LayoutError(
                f"the batch is split along {self.along} into {before} shards at the source and "
                f"{after} shards at the target; one number must be a multiple of the other, for "
                f"example {nearest_multiples(before, after)} at the source"
            )

    def _sizes(self, dim: str | None) -> tuple[int, int]:
        if dim is None:
            return 1, 1
        return self.source.size_of(dim, default=1), self.target.size_of(dim, default=1)

    def _stage(self, layout: RankLayout, is_last: bool) -> dict[str, int]:
        if self.pipeline is None or self.pipeline not in layout.dim_names:
            return {}
        return {self.pipeline: layout.size_of(self.pipeline) - 1 if is_last else 0}


def format_ends(mapping: RankMapping) -> str:
    """Return both layouts of a mapping as text, without the shards.

    >>> format_ends(RankMapping("tp=2", RankLayout([1], ["tp"], 2), along=None))
    'from tp=2 at 0 to tp=1 at 2'
    """
    return f"from {_with_ranks(mapping.source)} to {_with_ranks(mapping.target)}"


def _with_ranks(layout: RankLayout) -> str:
    if layout.is_listed:
        return f"{layout} on ranks {first_n(tuple(layout.ranks), 16)}"
    return f"{layout} at {layout.rank_offset}"


# ---- arguments ----------------------------------------------------------------------------------


def as_shards(value: object) -> Shards:
    """Return the tensor axis that each dim splits, from a mapping or from pairs.

    Raises:
        LayoutError: The value is neither a mapping nor pairs, or an axis is not an int.

    Example:
        >>> as_shards({"cp": 1, "tp": -1})
        (('cp', 1), ('tp', -1))
    """
    shards = []
    for pair in as_ordered(tuple(value.items()) if isinstance(value, Mapping) else value, "shards"):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise LayoutError(
                f"shards= must map dims to axes, as in {{'cp': 1}}, got {short_repr(value)}"
            )
        shards.append((pair[0], as_int(pair[1], f"the axis of dim {pair[0]!r} in shards=")))
    return tuple(shards)


def dims_of_axes(along: str | None, batch_axis: int, shards: Shards) -> dict[int, tuple[str, ...]]:
    """Return the dims that split each tensor axis, outermost first. The batch axis is first.

    Example:
        >>> dims_of_axes("dp", 0, (("cp", 1), ("tp", 0)))
        {0: ('dp', 'tp'), 1: ('cp',)}
    """
    axes: dict[int, tuple[str, ...]] = {}
    batch = [] if along is None else [(along, batch_axis)]
    for dim, axis in (*batch, *shards):
        axes[axis] = (*axes.get(axis, ()), dim)
    return axes


def roles_of(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the role of each dim from pairs of role and dim. Raise if a dim has two roles."""
    roles: dict[str, str] = {}
    for role, dim in named:
        if dim in roles:
            raise LayoutError(
                f"dim {short_repr(dim)} has two roles, {roles[dim]} and {role}; give it one role"
            )
        roles[dim] = role
    return roles


def replicating(
    source: RankLayout, target: RankLayout, roles: Collection[str | None]
) -> tuple[str, ...]:
    """Return the dims without a role that are larger than 1 in the source or in the target.

    Example:
        >>> replicating(RankLayout("tp=2,cp=1,dp=2"), RankLayout("ep=3"), {"dp"})
        ('tp', 'ep')
    """
    dims = dict.fromkeys((*source.dim_names, *target.dim_names))
    return tuple(
        dim
        for dim in dims
        if dim not in roles
        and any(layout.size_of(dim, default=1) > 1 for layout in (source, target))
    )


def check_mapping(mapping: object, size: int) -> None:
    """Raise unless `mapping` is a RankMapping and a job of `size` ranks has all its ranks."""
    if not isinstance(mapping, RankMapping):
        raise LayoutError(f"mapping must be a RankMapping, got {short_repr(mapping)}")
    last_rank = max(mapping.source.last_rank, mapping.target.last_rank)
    if last_rank >= size:
        raise world_too_small(f"the mapping {mapping}", last_rank, size)
