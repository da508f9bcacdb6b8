"""Plans a state transfer as segments of parameters in buckets of bounded size.

Every rank computes the plan from the descriptions of all ranks, so all ranks have the same plan. A
box is a block of a parameter, given as a range of indices along each axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, zip_longest

import attrs
import torch

from hypercomm.errors import PlanMismatchError
from hypercomm.transfers.holdings import Shape
from hypercomm.transfers.matching import Box, SourceTensor, Target, Wanted, size_of

ALIGNMENT = 16
"""Segments begin at multiples of this number of bytes, which is the size of the largest dtype.

The checksum after a segment also has this size.
"""

LEAST_BUCKET = 1024

Slices = tuple[slice, ...]


@attrs.frozen
class Segment:
    """A part of a parameter that one rank sends to another in one bucket.

    Attributes:
        name: The name of the parameter at the target.
        source_name: The name of the parameter at the source. If the target's parameter is fused,
            this is the name of one of its parts.
        dtype: The type of the sent elements.
        source: The rank that sends.
        target: The rank that receives. If the same rank sends, the segment is copied.
        source_slices: The slices of the segment in the source rank's tensor.
        target_slices: The slices of the segment in the target rank's tensor.
        nbytes: The size of the segment in bytes.
        bucket: The index of the segment's bucket, or -1 for a copy.
    """

    name: str
    source_name: str
    dtype: torch.dtype
    source: int
    target: int
    source_slices: Slices
    target_slices: Slices
    nbytes: int
    bucket: int

    @property
    def room(self) -> int:
        """The number of bytes that the segment needs in a buffer, with padding and a checksum.

        Example:
            >>> Segment("w", "w", torch.int32, 0, 1, (), (), nbytes=20, bucket=0).room
            48
        """
        return room_for(self.nbytes)


def room_for(nbytes: int) -> int:
    """Return the number of bytes that a segment of `nbytes` bytes needs in a buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT


@attrs.frozen
class BucketPlan:
    """The plan of one rank.

    Attributes:
        copies: The segments that stay on the rank, which copies them.
        sends: The segments that the rank sends in each bucket.
        receives: The segments that the rank receives in each bucket.
    """

    copies: Sequence[Segment]
    sends: Sequence[Sequence[Segment]]
    receives: Sequence[Sequence[Segment]]

    @property
    def buckets(self) -> int:
        """The number of buckets, which is the same on all ranks."""
        return len(self.sends)

    @property
    def moved(self) -> set[str]:
        """The names of the parameters that the rank receives, or copies to another place."""
        names = {one.name for bucket in self.receives for one in bucket}
        for one in self.copies:
            if (one.source_name, one.source_slices) != (one.name, one.target_slices):
                names.add(one.name)
        return names


def plan_of(every: Iterable[Segment], rank: int) -> BucketPlan:
    """Return the plan of a rank, from the segments of all ranks."""
    copies: list[Segment] = []
    sends: list[list[Segment]] = []
    receives: list[list[Segment]] = []
    for segment in every:
        while len(sends) <= segment.bucket:
            sends.append([])
            receives.append([])
        if segment.source == segment.target == rank:
            copies.append(segment)
        elif segment.source == rank:
            sends[segment.bucket].append(segment)
        elif segment.target == rank:
            receives[segment.bucket].append(segment)
    return BucketPlan(copies, sends, receives)


def segments(
    sources: Mapping[str, SourceTensor], targets: Iterable[Target], bucket_bytes: int
) -> Iterator[Segment]:
    """Split parameters into segments, and assign each segment to a source, a target and a bucket.

    If several source ranks have the elements of a segment, the rank that has sent the fewest bytes
    so far sends the segment. In one bucket, all segments that a rank sends and receives need at
    most `bucket_bytes` bytes together.

    Args:
        sources: The parameters of the source, by name.
        targets: The parameters of the target, in the order in which they are sent.
        bucket_bytes: The size of a bucket in bytes, at least `LEAST_BUCKET`.

    Raises:
        PlanMismatchError: An element that a target rank needs is not in exactly one source box.

    Example:
        Two source ranks have the same row of 2048 numbers, and each rank sends one half of the row.

        >>> row = ((0, 2048),)
        >>> sources = {"row": SourceTensor("float32", (2048,), {row: {0: (0,), 1: (0,)}})}
        >>> targets = [Target("row", "float32", [[Wanted(2, "row", row, (0,))]])]
        >>> found = segments(sources, targets, 1 << 16)
        >>> [(one.source, one.target_slices[0], one.bucket) for one in found]
        [(0, slice(0, 1024, None), 0), (1, slice(1024, 2048, None), 0)]
    """
    # Small pieces balance the bytes of the senders, and fill the buckets.
    grain = min(max(bucket_bytes // 16, 4096), bucket_bytes // 4)
    sent: Counter[int] = Counter()
    last: dict[int, tuple[int, int]] = {}  # the last bucket of each rank, and the bytes used in it
    find = cache(_overlaps)  # parameters with equal boxes use the same result
    for target in targets:
        dtype: torch.dtype = getattr(torch, target.dtype)
        most = max(1, grain // dtype.itemsize)
        lanes = [_pieces(sources, find, wanted, most) for wanted in target.wanted]
        # Take one piece for each rank in turn, so that all ranks receive at the same time.
        for piece in filter(None, chain(*zip_longest(*lanes))):
            wanted, holders, source_box, box = piece
            nbytes = size_of(box) * dtype.itemsize
            source = wanted.rank
            if source not in holders:
                source = min(holders, key=sent.__getitem__)
            bucket = -1
            if source != wanted.rank:
                sent[source] += nbytes
                bucket = _reserve(last, (source, wanted.rank), room_for(nbytes), bucket_bytes)
            here = _slices(box, source_box, holders[source])
            there = _slices(box, wanted.box, wanted.start)
            ends = source, wanted.rank, here, there
            yield Segment(target.name, wanted.source, dtype, *ends, nbytes, bucket)


def _slices(box: Box, whole: Box, start: Shape) -> Slices:
    """Return the slices that select a box in a tensor.

    The box `whole` begins at index `start` of the tensor, and contains `box`.
    """
    firsts = [at - span[0] for at, span in zip(start, whole, strict=True)]
    return tuple(
        slice(first + begin, first + end) for first, (begin, end) in zip(firsts, box, strict=True)
    )


Holders = dict[int, Shape]
"""For each rank that has a box, the index at which the box begins in the tensor of the rank."""


def _overlaps(boxes: tuple[Box, ...], wanted: Box) -> list[tuple[Box, Box]]:
    """Return the boxes that overlap a wanted box, each with the overlap."""
    commons = [(one, _common(one, wanted)) for one in boxes]
    return [(one, common) for one, common in commons if common is not None]


def _common(one: Box, other: Box) -> Box | None:
    """Return the common part of two boxes, or None if it is empty."""
    spans = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return spans if all(start < stop for start, stop in spans) else None


def _pieces(
    sources: Mapping[str, SourceTensor],
    find: Callable[[tuple[Box, ...], Box], list[tuple[Box, Box]]],
    wanted: Iterable[Wanted],
    most: int,
) -> Iterator[tuple[Wanted, Holders, Box, Box]]:
    """Yield pieces of the boxes that target ranks need.

    An item consists of the wanted box, the holders of a source box that overlaps the wanted box,
    the source box, and a piece of the overlap. A piece that is sent has at most `most` elements.

    Args:
        sources: The parameters of the source.
        find: The function `_overlaps`.
        wanted: The wanted boxes.
        most: The largest number of elements of a piece.
    """
    for one in wanted:
        boxes = sources[one.source].boxes
        overlaps = find(tuple(boxes), one.box)
        if sum(size_of(common) for _, common in overlaps) != size_of(one.box):
            raise PlanMismatchError(
                f"nothing was sent: rank {one.rank} needs {list(one.box)} of {one.source!r}, but "
                f"the source ranks do not have each element exactly once"
            )
        for source_box, common in overlaps:
            holders = boxes[source_box]
            for piece in split(common, size_of(common) if one.rank in holders else most):
                yield one, holders, source_box, piece


def split(box: Box, most: int) -> Iterator[Box]:
    """Split a box into boxes of similar size with at most `most` elements, in memory order.

    Example:
        >>> list(split(((0, 2), (0, 5)), most=3))
        [((0, 1), (0, 3)), ((0, 1), (3, 5)), ((1, 2), (0, 3)), ((1, 2), (3, 5))]
        >>> list(split(((4, 9), (0, 2)), most=4))
        [((4, 6), (0, 2)), ((6, 8), (0, 2)), ((8, 9), (0, 2))]
    """
    size = size_of(box)
    if size <= most:
        yield box
        return
    axis = next(axis for axis, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[axis]
    length = stop - start
    count = -(-length // max(1, most * length // size))
    step = -(-length // count)
    for first in range(start, stop, step):
        part = (*box[:axis], (first, min(first + step, stop)), *box[axis + 1 :])
        yield from split(part, most)


def _reserve(
    last: dict[int, tuple[int, int]], ranks: tuple[int, int], room: int, limit: int
) -> int:
    """Reserve room in the first bucket that has enough room on both ranks, and return its index.

    The search starts at the last bucket that the two ranks use.
    """
    ends = [last.get(rank, (0, 0)) for rank in ranks]
    bucket = max(number for number, _ in ends)
    used = [amount if number == bucket else 0 for number, amount in ends]
    if max(used) + room > limit:
        bucket += 1
        used = [0, 0]
    for rank, amount in zip(ranks, used, strict=True):
        last[rank] = bucket, amount + room
    return bucket
