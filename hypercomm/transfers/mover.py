"""Executes the plan of a rank: copies the parts that stay on it, and moves the others in buckets.

At most two buckets are in progress at a time. Each segment is one message, which contains either
the contiguous bytes of a tensor or a packed copy with room for a checksum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import attrs
import torch
from torch import Tensor
from torch.distributed import Work

from hypercomm.errors import LayoutError, StateTransferError
from hypercomm.layout.text import first_n, summary_of
from hypercomm.process_groups.world import World
from hypercomm.transfers.buckets import BucketPlan, Segment
from hypercomm.transfers.exchange import post
from hypercomm.transfers.holdings import WHAT, LocalTensors
from hypercomm.transfers.tensors import (
    as_bytes,
    mark_written,
    memory_span,
    share_memory,
    writing_to,
)

Tensors = Mapping[str, Tensor]


@attrs.frozen
class _Piece:
    """The data of a segment on this rank.

    Attributes:
        segment: The segment.
        tensor: The elements of the segment in a tensor of this rank.
        start: The position of a packed copy in the pool, or None if the message is the memory of
            the tensor.
    """

    segment: Segment
    tensor: Tensor
    start: int | None


class Mover:
    """Executes the plan of a rank.

    The constructor allocates all memory. If there is too little memory, the constructor raises
    before data is sent.

    Args:
        plan: The plan of this rank.
        sent: The tensors that this rank sends, by name.
        received: The tensors that this rank receives into, by name.
        world: The world of the ranks.
        tag: The tag of the messages.
        is_verified: Whether each segment has a checksum, which the receiver compares.

    Attributes:
        damage: The error for the first segment with a wrong checksum, or None.
        received: The tensors that this rank receives into.
    """

    def __init__(
        self,
        plan: BucketPlan,
        sent: Tensors,
        received: Tensors,
        world: World,
        tag: int,
        *,
        is_verified: bool = False,
    ) -> None:
        self.plan = plan
        self.world = world
        self.tag = tag
        self.is_verified = is_verified
        self.damage: StateTransferError | None = None
        self.received = tuple(received.values())
        self._done = 0
        self._copies = [
            (received[one.name][one.target_slices], sent[one.source_name][one.source_slices])
            for one in plan.copies
        ]
        self._buckets: list[tuple[list[_Piece], list[_Piece]]] = []
        rooms = [0, 0]
        for receives, sends in zip(plan.receives, plan.sends, strict=True):
            views = [(one, received[one.name][one.target_slices]) for one in receives]
            views += [(one, sent[one.source_name][one.source_slices]) for one in sends]
            pieces = []
            start = 0
            for segment, tensor in views:
                is_plain = tensor.is_contiguous() and tensor.dtype == segment.dtype
                if is_plain and not is_verified:
                    pieces.append(_Piece(segment, tensor, None))
                    continue
                pieces.append(_Piece(segment, tensor, start))
                start += segment.room
            turn = len(self._buckets) % 2
            rooms[turn] = max(rooms[turn], start)
            self._buckets.append((pieces[: len(receives)], pieces[len(receives) :]))
        device = next(iter((*sent.values(), *received.values()))).device
        self._pools = [torch.empty(room, dtype=torch.uint8, device=device) for room in rooms]

    def _buffer(self, piece: _Piece) -> Tensor:
        """Return the bytes of a message: the memory of the tensor, or a part of a pool."""
        if piece.start is None:
            return as_bytes(piece.tensor)
        segment = piece.segment
        size = segment.room if self.is_verified else segment.nbytes
        return self._pools[segment.bucket % 2][piece.start : piece.start + size]

    def copy(self) -> None:
        """Copy the parts that stay on this rank."""
        with torch.no_grad(), writing_to(self.received):
            for there, here in self._copies:
                if there.data_ptr() != here.data_ptr():
                    there.copy_(here)

    def move(self, start: int = 0) -> None:
        """Move all buckets from `start` on. All parts have then been written, also by `copy`."""
        self._done = start
        in_progress: deque[list[Work]] = deque()
        with torch.no_grad(), writing_to(self.received):
            for number in range(start, self.plan.buckets):
                in_progress.append(self._begin_bucket(number))
                if len(in_progress) == 2:
                    self._finish_bucket(in_progress.popleft())
            for works in in_progress:
                self._finish_bucket(works)
        for tensor in self.received:
            mark_written(tensor)

    def _begin_bucket(self, number: int) -> list[Work]:
        """Start all messages of a bucket."""
        incoming, outgoing = self._buckets[number]
        sends = []
        for piece in outgoing:
            buffer = self._buffer(piece)
            sends.append((piece.segment.target, buffer))
            if piece.start is not None:
                _packed(piece, buffer).copy_(piece.tensor)
            if self.is_verified:
                buffer[piece.segment.nbytes :].zero_()
                words = buffer.view(torch.int64)
                words[-2] = words[:-2].sum()  # detects a change of any one byte
        receives = [(piece.segment.source, self._buffer(piece)) for piece in incoming]
        return post(receives, sends, self.world.pg, self.tag)

    def _finish_bucket(self, works: Sequence[Work]) -> None:
        """Wait for the messages of the next bucket, and unpack the received ones."""
        for work in works:
            work.wait()
        for piece in self._buckets[self._done][0]:
            if piece.start is not None:
                buffer = self._buffer(piece)
                if self.is_verified:
                    self._compare(piece.segment, buffer)
                piece.tensor.copy_(_packed(piece, buffer))
        self._done += 1

    def lost(self, error: RuntimeError) -> StateTransferError:
        """Return the error for the bucket whose communication failed in `move`."""
        number = self._done
        incoming, outgoing = self._buckets[number]
        ends = [(one.segment, "from", one.segment.source) for one in incoming]
        ends += [(one.segment, "to", one.segment.target) for one in outgoing]
        messages = [
            f"{segment.nbytes} bytes of {segment.name!r} {way} {self.world.title(rank)}"
            for segment, way, rank in ends
        ]
        left = self.plan.receives[number:]
        names = sorted({repr(segment.name) for bucket in left for segment in bucket})
        partly = f"; perhaps partly written: {first_n(names, 8)}" if names else ""
        return StateTransferError(
            f"{self.world.title(self.world.rank)} lost bucket {number} of {self.plan.buckets}, "
            f"with {first_n(messages, 4)}: {summary_of(error)}; all earlier buckets have arrived "
            f"on this rank{partly}; {advice_after_loss(self.world)}, and "
            f"{_CONTINUE.format(number)}",
            bucket=number,
        )

    def _compare(self, segment: Segment, buffer: Tensor) -> None:
        words = buffer.view(torch.int64)
        found = words[:-2].sum().item()
        expected = words[-2].item()
        if found != expected and self.damage is None:
            self.damage = StateTransferError(
                f"parameter {segment.name!r} was damaged between "
                f"{self.world.title(segment.source)} and {self.world.title(segment.target)} in "
                f"bucket {segment.bucket} of {self.plan.buckets}: the checksum of "
                f"{segment.nbytes} bytes is {found:#x}, expected {expected:#x}; "
                f"{_CONTINUE.format(segment.bucket)}",
                bucket=segment.bucket,
            )


def _packed(piece: _Piece, buffer: Tensor) -> Tensor:
    """Return the part of a buffer that holds a copy of the elements."""
    return buffer[: piece.segment.nbytes].view(piece.segment.dtype).view(piece.tensor.shape)


_CONTINUE = "continue on all ranks with the smallest start= that any rank reports (here start={})"


def advice_after_loss(world: World) -> str:
    """Return the advice for all ranks after a communication failure."""
    if world.parts:
        return "call world.rejoin() on all ranks"
    return "initialise torch.distributed again"


def check_overlaps(tensors: LocalTensors, moved: Collection[str]) -> None:
    """Raise if a buffer shares memory with another tensor, except for a part that stays.

    Args:
        tensors: The tensors of this rank.
        moved: The names of the received tensors whose elements change.
    """
    items = [(*memory_span(one), True, name, one) for name, one in tensors.sent.items()]
    for name, one in tensors.received.items():
        may_stay = name in tensors.sent and name not in moved
        if not may_stay or _place_of(one) != _place_of(tensors.sent[name]):
            items.append((*memory_span(one), False, name, one))
    active: list[tuple[int, int, bool, str, Tensor]] = []
    for item in sorted(items, key=lambda item: item[:2]):
        active = [other for other in active if other[1] > item[0]]
        for other in active:
            pair = sorted((item, other), key=lambda each: each[2:4])
            (_, _, is_sent, name, buffer), (_, _, is_other_sent, other_name, tensor) = pair
            if not is_sent and share_memory(buffer, tensor):
                raise LayoutError(
                    f"into[{name!r}] shares memory with {WHAT[is_other_sent]}[{other_name!r}], "
                    f"which is {'sent' if is_other_sent else 'also received into'}; pass another "
                    f"buffer"
                )
        active.append(item)


def _place_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
