"""The plan of a state transfer: segments of parameters in buckets of bounded size.

Every rank computes the plan from the parameters alone, so all ranks have the same plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, product, zip_longest

import attrs
import torch

from hypercomm.transfers.mapping import Message, RankMapping

ALIGNMENT = 16
"""Segments begin at multiples of this many bytes: the size of the largest element type.

As many bytes after each segment hold its checksum.
"""

LEAST_BUCKET = 1024

Slices = tuple[slice, ...]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The first index and the length along each axis."""


@attrs.frozen
class Parameter:
    """A parameter of a model.

    Attributes:
        name: Its name.
        source_shape: The shape of the part on each source rank.
        target_shape: The shape of the part on each target rank.
        dtype: The type of its elements.
        mapping: The mapping of its parts.
    """

    name: str
    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    dtype: torch.dtype
    mapping: RankMapping

    def __str__(self) -> str:
        return (
            f"{self.name!r}: parts {self.source_shape} to parts {self.target_shape} of "
            f"{self.dtype}, cut by {dict(self.mapping.shards)}"
        )


@attrs.frozen
class Segment:
    """A part of a parameter that one rank sends to another in one bucket.

    Attributes:
        parameter: The position of the parameter.
        source: The rank that sends.
        target: The rank that receives. If it is the source, the segment is copied.
        source_slices: The slices of the source's part.
        target_slices: The slices of the target's part.
        nbytes: Its size in bytes.
        bucket: The number of its bucket; -1 for a copy.
    """

    parameter: int
    source: int
    target: int
    source_slices: Slices
    target_slices: Slices
    nbytes: int
    bucket: int

    @property
    def room(self) -> int:
        """The bytes that it takes in a buffer, padded and with room for a checksum.

        Example:
            >>> Segment(0, 0, 1, (), (), nbytes=20, bucket=0).room
            48
        """
        return room_for(self.nbytes)


def room_for(nbytes: int) -> int:
    """Return the room of a segment of this many bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT


@attrs.frozen
class Plan:
    """The plan of one rank.

    Attributes:
        copies: The segments that the rank copies to itself.
        sends: The segments that it sends in each bucket.
        receives: The segments that it receives in each bucket.
    """

    copies: Sequence[Segment]
    sends: Sequence[Sequence[Segment]]
    receives: Sequence[Sequence[Segment]]

    @property
    def buckets(self) -> int:
        """The number of buckets, which is the same on all ranks."""
        return len(self.sends)

    @property
    def room(self) -> int:
        """The most bytes that the rank sends and receives in one bucket."""
        buckets = zip(self.sends, self.receives, strict=True)
        return max((sum(one.room for one in chain(*bucket)) for bucket in buckets), default=0)


@lru_cache(maxsize=4)
def plan_of(parameters: tuple[Parameter, ...], bucket_bytes: int, rank: int) -> Plan:
    """Return the plan of a rank; the arguments are those of `segments`."""
    copies: list[Segment] = []
    sends: list[list[Segment]] = []
    receives: list[list[Segment]] = []
    for segment in segments(parameters, bucket_bytes):
        while len(sends) <= segment.bucket:
            sends.append([])
            receives.append([])
        if segment.source == segment.target == rank:
            copies.append(segment)
        elif segment.source == rank:
            sends[segment.bucket].append(segment)
        elif segment.target == rank:
            receives[segment.bucket].append(segment)
    return Plan(copies, sends, receives)


def segments(parameters: Sequence[Parameter], bucket_bytes: int) -> Iterator[Segment]:
    """Cut parameters into segments, and assign each to a source, a target and a bucket.

    Each segment comes from the replica that has sent the fewest bytes so far. The segments that one
    rank sends and receives in one bucket take at most `bucket_bytes` of room.

    Args:
        parameters: The parameters, in the order in which they are sent.
        bucket_bytes: At least `LEAST_BUCKET`.

    Example:
        Two source ranks have the same row of 2048 numbers, and each sends one half of it.

        >>> from hypercomm import RankLayout
        >>> row = RankMapping("dp=2", RankLayout([1], ["tp"], 2), along=None)
        >>> found = segments([Parameter("row", (2048,), (2048,), torch.float32, row)], 1 << 16)
        >>> [(one.source, one.target_slices[0], one.bucket) for one in found]
        [(0, slice(0, 1024, None), 0), (1, slice(1024, 2048, None), 0)]
    """
    # Small enough to balance the senders and to fill the buckets.
    grain = min(max(bucket_bytes // 16, 4096), bucket_bytes // 4)
    sent: Counter[int] = Counter()
    last: dict[int, tuple[int, int]] = {}  # for each rank, its last bucket and the bytes used in it
    all_routes: dict[RankMapping, list[Route]] = {}
    for position, parameter in enumerate(parameters):
        if 0 in parameter.source_shape:
            continue
        mapping = parameter.mapping
        if mapping not in all_routes:
            all_routes[mapping] = _routes(mapping)
        lanes = [_pieces(route, parameter, grain) for route in all_routes[mapping]]
        # One piece for each target in turn, so that all of them receive at the same time.
        for holders, target, here, there in filter(None, chain(*zip_longest(*lanes))):
            nbytes = math.prod(one.stop - one.start for one in here) * parameter.dtype.itemsize
            source = min(holders, key=sent.__getitem__)
            bucket = -1
            if source != target:
                sent[source] += nbytes
                bucket = _reserve(last, (source, target), room_for(nbytes), bucket_bytes)
            yield Segment(position, source, target, here, there, nbytes, bucket)


Route = list[tuple[Message, tuple[int, ...]]]
"""The messages to a target rank, each with the ranks that have its data."""


def _routes(mapping: RankMapping) -> list[Route]:
    """Return the route to each target rank. A rank that has its part already copies it."""
    back = mapping.inverse()
    return [
        [
            (one, (target,) if one.source == target else back.broadcast_siblings(one.source))
            for one in mapping.receives(target)
        ]
        for target in mapping.target_ranks
    ]


def _pieces(
    route: Route, parameter: Parameter, grain: int
) -> Iterator[tuple[tuple[int, ...], int, Slices, Slices]]:
    """Yield pieces of at most `grain` bytes: holders, target, and the slices on both."""
    most = max(1, grain // parameter.dtype.itemsize)
    for message, holders in route:
        here = _bounds(message.source_slices(parameter.source_shape), parameter.source_shape)
        there = _bounds(message.target_slices(parameter.target_shape), parameter.target_shape)
        lengths = tuple(stop - start for start, stop in here)
        is_copy = message.source == message.target
        for box in split(lengths, math.prod(lengths) if is_copy else most):
            yield holders, message.target, _slices_of(box, here), _slices_of(box, there)


def _bounds(slices: Slices, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [one.indices(n)[:2] for one, n in zip(slices, shape, strict=True)]


def _slices_of(box: Box, bounds: list[tuple[int, int]]) -> Slices:
    starts = [start + offset for (start, _), offset in zip(bounds, box[0], strict=True)]
    return tuple(slice(at, at + n) for at, n in zip(starts, box[1], strict=True))


def split(lengths: tuple[int, ...], most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `most` elements of similar size, in memory order.

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


def _reserve(
    last: dict[int, tuple[int, int]], ranks: tuple[int, int], room: int, limit: int
) -> int:
    """Reserve room in the first bucket that has space on both ranks, in order on both."""
    ends = [last.get(rank, (0, 0)) for rank in ranks]
    bucket = max(number for number, _ in ends)
    used = [amount if number == bucket else 0 for number, amount in ends]
    if max(used) + room > limit:
        bucket, used = bucket + 1, [0, 0]
    for rank, amount in zip(ranks, used, strict=True):
        last[rank] = bucket, amount + room
    return bucket
