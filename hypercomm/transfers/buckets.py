"""Buckets: a whole model's parameters, in segments, a bounded number of bytes at a time.

Every rank works out the whole plan for itself, from the parameters alone, and so the same one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product, zip_longest

import attrs

from hypercomm.layout.mapping import RankMapping
from hypercomm.layout.messages import Message, resolve_axes

ALIGNMENT = 16
"""Bytes at whose multiples a segment may begin in a buffer: the largest element's."""

LEAST_BUCKET = 1024
_LEAST_GRAIN = 4096
_TURNS = 64
"""Segments that a rank sends at least, where they are not too small: they are what balances."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The first index along each axis, and how many."""


@attrs.frozen
class Parameter:
    """A parameter of a model.

    Attributes:
        name: Its name.
        shape: The whole one's, in elements.
        dtype: Its type, as text.
        itemsize: Bytes of an element.
        mapping: Who has which part of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    mapping: RankMapping

    @property
    def nbytes(self) -> int:
        """Bytes of the whole one."""
        return math.prod(self.shape) * self.itemsize

    def shape_on(self, *, source: bool) -> tuple[int, ...]:
        """Return the shape of the part that each rank of one end has."""
        lengths, cuts = list(self.shape), self.mapping.cuts
        for cut, axis in zip(cuts, resolve_axes(cuts, len(lengths)), strict=True):
            lengths[axis] //= cut.sources if source else cut.targets
        return tuple(lengths)

    def __str__(self) -> str:
        return f"{self.name!r}: {self.shape} of {self.dtype}, cut by {dict(self.mapping.shards)}"


@attrs.frozen
class Segment:
    """A part of a parameter that goes from one rank to another in one bucket.

    Attributes:
        parameter: The parameter's position.
        source: The rank that sends.
        target: The rank that receives; perhaps the same, which copies.
        source_slices: Where it lies in what the source has.
        target_slices: Where it goes in what the target has.
        nbytes: Its bytes.
        bucket: The number of its bucket; -1 where a rank copies it.
    """

    parameter: int
    source: int
    target: int
    source_slices: tuple[slice, ...]
    target_slices: tuple[slice, ...]
    nbytes: int
    bucket: int

    @property
    def room(self) -> int:
        """Bytes of a buffer that it takes, with room for a checksum behind it.

        Example:
            >>> Segment(0, 0, 1, (), (), nbytes=20, bucket=0).room
            48
        """
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT


def segments(parameters: Sequence[Parameter], bucket_bytes: int) -> Iterator[Segment]:
    """Cut parameters into segments, and say who sends each to whom in which bucket.

    A segment goes from that replica of its part which has sent the fewest bytes so far. What a rank
    sends and receives in one bucket takes at most `bucket_bytes` of room there.

    Args:
        parameters: The parameters, in the order in which they go.
        bucket_bytes: At least `LEAST_BUCKET`.

    Example:
        Two source ranks have the same row of 2048 numbers: each sends one half of it.

        >>> from hypercomm import RankLayout
        >>> row = RankMapping("dp=2", RankLayout([1], ["tp"], 2), along=None)
        >>> found = segments([Parameter("row", (2048,), "float32", 4, row)], 1 << 16)
        >>> [(one.source, one.target_slices[0], one.bucket) for one in found]
        [(0, slice(0, 1024, None), 0), (1, slice(1024, 2048, None), 0)]
    """
    grain = _grain(parameters, bucket_bytes)
    sent: defaultdict[int, int] = defaultdict(int)
    filling = _Filling(bucket_bytes)
    routes: dict[RankMapping, list[Route]] = {}
    for position, parameter in enumerate(parameters):
        if not parameter.nbytes:
            continue
        mapping = parameter.mapping
        if mapping not in routes:
            routes[mapping] = _routes(mapping)
        shapes = parameter.shape_on(source=True), parameter.shape_on(source=False)
        most = max(1, grain // parameter.itemsize)
        lanes = (_pieces(route, shapes, most) for route in routes[mapping])
        # A piece for each target in turn, so that all of them receive at once.
        for target, holders, here, there in filter(None, chain(*zip_longest(*lanes))):
            nbytes = math.prod(one.stop - one.start for one in here) * parameter.itemsize
            source = min(holders, key=sent.__getitem__)
            segment = Segment(position, source, target, here, there, nbytes, -1)
            if source != target:
                sent[source] += nbytes
                bucket = filling.bucket_for(source, target, segment.room)
                segment = attrs.evolve(segment, bucket=bucket)
            yield segment


Route = tuple[int, list[tuple[Message, tuple[int, ...]]]]
"""A target rank with what it receives, and who could send each."""

Piece = tuple[int, tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]
"""A target rank, who could send it something, and where that lies on both."""


def _routes(mapping: RankMapping) -> list[Route]:
    """Tell who could send what to each target rank: itself alone, where it has the part."""
    back = mapping.inverse()

    def holders(message: Message) -> tuple[int, ...]:
        if message.source == message.target:
            return (message.source,)
        return back.broadcast_siblings(message.source)

    return [
        (target, [(one, holders(one)) for one in mapping.receives(target)])
        for target in mapping.target_ranks
    ]


def _pieces(route: Route, shapes: tuple[tuple[int, ...], ...], most: int) -> Iterator[Piece]:
    """Cut what a target rank receives into pieces of at most `most` elements."""
    target, messages = route
    for message, holders in messages:
        (here, lengths), (there, _) = (
            _box_of(slices, shape)
            for slices, shape in zip(
                (message.source_slices(shapes[0]), message.target_slices(shapes[1])),
                shapes,
                strict=True,
            )
        )
        if message.source == target:
            yield target, holders, _slices(here, lengths), _slices(there, lengths)
            continue
        for offsets, extents in split(lengths, most):
            yield (
                target,
                holders,
                _slices(map(sum, zip(here, offsets, strict=True)), extents),
                _slices(map(sum, zip(there, offsets, strict=True)), extents),
            )


def _box_of(slices: Iterable[slice], shape: Iterable[int]) -> Box:
    bounds = [one.indices(length)[:2] for one, length in zip(slices, shape, strict=True)]
    return tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds)


def _slices(starts: Iterable[int], extents: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + extent) for at, extent in zip(starts, extents, strict=True))


def split(lengths: tuple[int, ...], most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `most` elements, nearly alike, in the order of memory.

    Example:
        >>> list(split((2, 5), most=3))
        [((0, 0), (1, 3)), ((0, 3), (1, 2)), ((1, 0), (1, 3)), ((1, 3), (1, 2))]
        >>> list(split((5, 2), most=4))
        [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((4, 0), (1, 2))]
    """
    axis, inner = len(lengths), 1
    while axis and inner * lengths[axis - 1] <= most:
        axis -= 1
        inner *= lengths[axis]
    if not axis:
        yield (0,) * len(lengths), lengths
        return
    length, rest = lengths[axis - 1], lengths[axis:]
    count = -(-length // (most // inner))
    step = -(-length // count)
    for outer in product(*map(range, lengths[: axis - 1])):
        for first in range(0, length, step):
            extents = (*[1] * (axis - 1), min(step, length - first), *rest)
            yield (*outer, first, *[0] * len(rest)), extents


def _grain(parameters: Sequence[Parameter], bucket_bytes: int) -> int:
    """Return the most bytes of a segment: few enough to balance, and for buckets to fill up."""
    total, senders = 0, 1
    for parameter in parameters:
        mapping = parameter.mapping
        parts = math.prod(cut.targets for cut in mapping.cuts)
        total += parameter.nbytes * len(mapping.target_ranks) // parts
        senders = len(mapping.source_ranks)
    even = max(total // (senders * _TURNS), _LEAST_GRAIN)
    return min(even, bucket_bytes // 4)


@attrs.define
class _Filling:
    """How full the buckets are; each rank fills them in order.

    Attributes:
        limit: Bytes of room that a rank has in a bucket.
        last: The bucket of each rank that is being filled, and the room taken in it.
    """

    limit: int
    last: dict[int, tuple[int, int]] = attrs.field(factory=dict)

    def bucket_for(self, source: int, target: int, room: int) -> int:
        """Take room in the first bucket that has some on both ranks, and is not behind them."""
        ends = [self.last.get(rank, (0, 0)) for rank in (source, target)]
        bucket = max(number for number, _ in ends)
        taken = [used if number == bucket else 0 for number, used in ends]
        if max(taken) + room > self.limit:
            bucket, taken = bucket + 1, [0, 0]
        for rank, used in zip((source, target), taken, strict=True):
            self.last[rank] = bucket, used + room
        return bucket
