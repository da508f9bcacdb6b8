"""Executes the plan of a rank: copies the parts that stay on it, and moves the others in buckets.

At most two buckets are in progress at a time. Each segment is one message, which contains either
the contiguous bytes of a tensor or a packed copy with room for a checksum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor
from torch.distributed import Work

from hypercomm.errors import StateTransferError
from hypercomm.layout.text import first_n
from hypercomm.process_groups.world import World
from hypercomm.transfers.buckets import BucketPlan, Segment
from hypercomm.transfers.exchange import as_bytes, post

Tensors = Mapping[str, Tensor]


@attrs.frozen
class _Piece:
    """The data of a segment on this rank.

    Attributes:
        segment: The segment.
        tensor: The elements of the segment in a tensor of this rank.
        buffer: The bytes that are sent or received: the memory of the tensor, or a part of a pool.
        packed: A copy of the elements in the pool. None if the buffer is the tensor's memory.
    """

    segment: Segment
    tensor: Tensor
    buffer: Tensor
    packed: Tensor | None = None


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
        self._done = 0
        self._copies = [
            (received[one.name][one.target_slices], sent[one.source_name][one.source_slices])
            for one in plan.copies
        ]
        self._incoming = [
            [(one, received[one.name][one.target_slices]) for one in bucket]
            for bucket in plan.receives
        ]
        self._outgoing = [
            [(one, sent[one.source_name][one.source_slices]) for one in bucket]
            for bucket in plan.sends
        ]
        rooms = [
            sum(one.room for one, tensor in (*here, *there) if self._is_packed(one, tensor))
            for here, there in zip(self._incoming, self._outgoing, strict=True)
        ]
        device = next(iter((*sent.values(), *received.values()))).device
        self._pools = [
            torch.empty(max(rooms[turn::2], default=0), dtype=torch.uint8, device=device)
            for turn in range(2)
        ]
        self._buckets = [self._pieces(number) for number in range(plan.buckets)]

    def _is_packed(self, segment: Segment, tensor: Tensor) -> bool:
        """Return whether the message is a copy of the elements, and not the tensor's memory."""
        return self.is_verified or not tensor.is_contiguous() or tensor.dtype != segment.dtype

    def _pieces(self, number: int) -> tuple[list[_Piece], list[_Piece]]:
        """Return the pieces that this rank receives in a bucket, and the pieces that it sends."""
        pieces = []
        start = 0
        for segment, tensor in (*self._incoming[number], *self._outgoing[number]):
            if not self._is_packed(segment, tensor):
                pieces.append(_Piece(segment, tensor, as_bytes(tensor)))
                continue
            size = segment.room if self.is_verified else segment.nbytes
            buffer = self._pools[number % 2][start : start + size]
            packed = buffer[: segment.nbytes].view(segment.dtype).view(tensor.shape)
            pieces.append(_Piece(segment, tensor, buffer, packed))
            start += segment.room
        count = len(self._incoming[number])
        return pieces[:count], pieces[count:]

    def copy(self) -> None:
        """Copy the parts that stay on this rank."""
        for there, here in self._copies:
            if there.data_ptr() != here.data_ptr():
                there.copy_(here)

    def move(self, start: int = 0) -> None:
        """Move all buckets from `start` on."""
        self._done = start
        in_progress: deque[list[Work]] = deque()
        for number in range(start, self.plan.buckets):
            in_progress.append(self._begin(number))
            if len(in_progress) == 2:
                self._finish(in_progress.popleft())
        for works in in_progress:
            self._finish(works)

    def _begin(self, number: int) -> list[Work]:
        """Start all messages of a bucket."""
        incoming, outgoing = self._buckets[number]
        for piece in outgoing:
            if piece.packed is not None:
                piece.packed.copy_(piece.tensor)
            if self.is_verified:
                piece.buffer[piece.segment.nbytes :].zero_()
                words = piece.buffer.view(torch.int64)
                words[-2] = words[:-2].sum()  # detects a change of any one byte
        return post(
            [(piece.segment.source, piece.buffer) for piece in incoming],
            [(piece.segment.target, piece.buffer) for piece in outgoing],
            self.world.pg,
            self.tag,
        )

    def _finish(self, works: Sequence[Work]) -> None:
        """Wait for the messages of the next bucket, and unpack the received ones."""
        for work in works:
            work.wait()
        for piece in self._buckets[self._done][0]:
            if self.is_verified:
                self._compare(piece.segment, piece.buffer)
            if piece.packed is not None:
                piece.tensor.copy_(piece.packed)
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
            f"with {first_n(messages, 4)}: {first_line(error)}; all earlier buckets have arrived "
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


_CONTINUE = "continue on all ranks with the smallest start= that any rank reports (here start={})"


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error."""
    return (str(error).splitlines() or [""])[0]


def advice_after_loss(world: World) -> str:
    """Return the advice for all ranks after a communication failure."""
    if world.parts:
        return "call world.rejoin() on all ranks"
    return "initialise torch.distributed again"
