"""The transfer: a tensor moves between the ranks of the running job, as a RankMapping says.

All is checked before anything is sent. Then each rank posts what it receives and what it sends at
once, so no order of the ranks can let two wait for each other.
"""

from __future__ import annotations

from functools import lru_cache

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hypercomm.errors import LayoutError
from hypercomm.layout import RankMapping
from hypercomm.layout.checks import world_too_small
from hypercomm.layout.messages import resolve_axes
from hypercomm.layout.text import shown
from hypercomm.process_groups.job import current
from hypercomm.process_groups.options import as_verified
from hypercomm.transfers.consent import consent
from hypercomm.transfers.memory import may_share
from hypercomm.transfers.tensors import (
    as_tensor,
    check_buffer,
    check_device,
    mark_written,
    post,
)

Pieces = list[tuple[int, Tensor]]
"""Views of parts of a tensor, each with the rank at the other end, in one order on both."""

Route = tuple[tuple[int, tuple[slice, ...]], ...]
"""The rank at the other end of each message, and where it lies in this rank's tensor."""


@attrs.frozen
class _Duty:
    """What a mapping asks of a rank, whatever the tensor.

    Attributes:
        rank: The rank.
        is_source: Whether it is on the stage that sends.
        siblings: Who wants the same, itself included; () where it is not on that stage.
        is_led: Whether the first of the siblings alone receives, and broadcasts.
        last_rank: The largest rank of the mapping.
    """

    rank: int
    is_source: bool
    siblings: tuple[int, ...]
    is_led: bool
    last_rank: int


@attrs.frozen
class _Moves:
    """What one rank receives and from whom, what it sends, and where it broadcasts.

    Attributes:
        words: What all ranks move.
    """

    words: str
    received: Tensor | None
    receives: Pieces
    sends: Pieces
    group: ProcessGroup | None


def transfer(
    mapping: RankMapping,
    tensor: Tensor | None,
    groups: ProcessGroup | None = None,
    *,
    out: Tensor | None = None,
    verify: bool | None = None,
) -> Tensor | None:
    """Move a tensor between the ranks of the running job; every rank of both stages calls it.

    Gradients do not flow through it: they go back by `transfer(mapping.inverse(), gradient)`.

    Args:
        mapping: Who sends what to whom.
        tensor: On a source rank what it has; on a rank of the target alone the buffer that
            receives. Elsewhere it does not matter.
        groups: With leaders, on a target rank that shares its part: the process group of its
            `broadcast_siblings`, in which the first of them broadcasts. Else None; what torch
            gives those outside a group (`GroupMember.NON_GROUP_MEMBER`) is as good.
        out: On a rank of both stages, the buffer that receives, which shares no element with
            `tensor`; default: a new one.
        verify: Whether all ranks of both stages first meet, and make sure that they mean the same
            mapping, dtype and shape of the whole. All hear of a difference, of a rank that refuses
            its arguments or leaves, and, at the timeout of WORLD, of one that did not come. All
            ranks must say the same. Default: as the environment's HYPERCOMM_VERIFY says, "0" or
            "1".

    Returns:
        What was received on a target rank, else None.

    Raises:
        NotInitializedError: torch.distributed is not initialised.
        WorldSizeError: The job has too few ranks.
        LayoutError: `mapping` is none, or a tensor or a group does not fit.
        TransferMismatchError: With `verify`: ranks differ or are missing; nothing was sent.
        OutcomeUnknownError: With `verify`: the job's store is gone; restart the job.
        GroupOptionsError: `verify` is none of True, False and None.

    With `verify`, a rank that means a transfer among others than those that wait for it waits
    elsewhere. Where that makes a circle, in which each waits for the next, all of it hear so within
    a second. Else the one that waits in vain cannot be told from one whose partner is late: at the
    timeout it hears who is missing, and in which transfer that one was last.

    Without `verify` each rank checks its own arguments alone. Where it refuses them, the others
    wait for it until the timeout. Where the ends differ in mapping, shape or dtype, bytes
    arrive as they are: gloo aborts the process of a buffer that is too short and leaves one
    that is too long half filled, NCCL waits; and a message that only one end means stays for
    the next transfer to take.

    With NCCL, as for torch's `batch_isend_irecv`, all ranks of the job must have communicated
    before, or the default process group be bound to a device.

    Example:
        >>> from hypercomm import RankLayout
        >>> from hypercomm.testing import fake_world
        >>> mapping = RankMapping(RankLayout([2], ["dp"]), RankLayout([4], ["dp"]))
        >>> with fake_world(4, rank=0):  # rank 0 keeps its first row, and sends the others
        ...     transfer(mapping, torch.tensor([[1, 2], [3, 4]])).tolist()
        [[1, 2]]
    """
    if not isinstance(mapping, RankMapping):
        raise LayoutError(f"mapping must be a RankMapping, got {shown(mapping)}")
    job, is_verified = current(), as_verified(verify)
    duty = _duty(mapping, job.rank)
    if duty.last_rank >= job.size:
        raise world_too_small(f"the mapping {mapping}", duty.last_rank, job.size)
    if not duty.is_source and not duty.siblings:
        return None
    try:
        moves = _check(mapping, duty, tensor, groups, out)
    except LayoutError as error:
        if is_verified:
            consent(mapping, "", error)
        raise
    interrupt = consent(mapping, moves.words) if is_verified else None
    with torch.no_grad():
        _exchange(moves, job.rank)
        if moves.group is not None and moves.received is not None:
            _broadcast(moves.received.detach(), duty.siblings[0], moves.group)
    if moves.received is not None:
        mark_written(moves.received)
    if interrupt is not None:
        raise interrupt  # only now: the others had this rank's consent
    return moves.received


# ---- what a mapping asks of a rank, worked out once ---------------------------------------------


@lru_cache(maxsize=128)
def _duty(mapping: RankMapping, rank: int) -> _Duty:
    siblings = mapping.broadcast_siblings(rank) if rank in mapping.target else ()
    return _Duty(
        rank,
        is_source=rank in mapping.source_ranks,
        siblings=siblings,
        is_led=mapping.leaders and len(siblings) > 1,
        last_rank=max(mapping.source.last_rank, mapping.target.last_rank),
    )


@lru_cache(maxsize=256)
def _route_out(mapping: RankMapping, rank: int, shape: tuple[int, ...]) -> Route:
    """Whom a rank sends which part of its tensor; its shape is checked even if it sends nothing."""
    mapping.received_shape(shape)
    return tuple((found.target, found.source_slices(shape)) for found in mapping.sends(rank))


@lru_cache(maxsize=256)
def _route_in(mapping: RankMapping, rank: int, shape: tuple[int, ...]) -> Route:
    """From whom a rank receives which part; checked likewise, as a broadcast alone may come."""
    mapping.inverse().received_shape(shape)
    return tuple((found.source, found.target_slices(shape)) for found in mapping.receives(rank))


# ---- before anything is sent --------------------------------------------------------------------


def _check(
    mapping: RankMapping, duty: _Duty, tensor: object, groups: object, out: object
) -> _Moves:
    """Check the arguments of this rank, and say what it does with them."""
    is_source, is_target = duty.is_source, bool(duty.siblings)
    group = _check_group(groups, duty, leaders=mapping.leaders)
    given = as_tensor(tensor, "tensor")
    if not is_source or not is_target:
        if out is not None:
            raise LayoutError(
                f"out is for ranks of both stages; rank {duty.rank} is on one, and gives its "
                f"tensor as tensor"
            )
        sent, received = (given, None) if is_source else (None, given)
    else:
        sent, received = given, _buffer(mapping, given, out)
    for moving in (None, group):
        check_device(given, moving)
    receives: Pieces = []
    sends: Pieces = []
    if received is not None:
        check_buffer(received, "tensor" if out is None else "out")
        buffer = received.detach()
        for peer, part in _route_in(mapping, duty.rank, tuple(received.shape)):
            receives.append((peer, buffer[part]))
    if sent is not None:
        plain = sent.detach().resolve_conj().resolve_neg()
        for peer, part in _route_out(mapping, duty.rank, tuple(sent.shape)):
            sends.append((peer, plain[part]))
    return _Moves(_words(mapping, given, is_source=is_source), received, receives, sends, group)


def _words(mapping: RankMapping, part: Tensor, *, is_source: bool) -> str:
    """Say what is moved as a whole, of which a rank has a part: all ranks say it alike."""
    lengths = list(part.shape)
    for cut, axis in zip(mapping.cuts, resolve_axes(mapping.cuts, part.ndim), strict=True):
        lengths[axis] *= cut.sources if is_source else cut.targets
    return f"{tuple(lengths)} of {part.dtype}"


def _buffer(mapping: RankMapping, tensor: Tensor, out: object) -> Tensor:
    """What receives on a rank that also sends."""
    shape = mapping.received_shape(tensor.shape)
    if out is None:
        return tensor.new_empty(shape)
    buffer = as_tensor(out, "out")
    found = (tuple(buffer.shape), buffer.dtype, buffer.device)
    if found != (shape, tensor.dtype, tensor.device):
        raise LayoutError(
            f"out must have shape {shape}, {tensor.dtype} and device {tensor.device}, as follows "
            f"from tensor; it has {found[0]}, {found[1]} and {found[2]}"
        )
    if may_share(tensor, buffer):
        raise LayoutError("out must share no element with tensor, which is still being sent")
    return buffer


def _check_group(groups: object, duty: _Duty, *, leaders: bool) -> ProcessGroup | None:
    """Check the group in which this rank's leader broadcasts; None where there is nobody else."""
    if isinstance(groups, int) and groups == dist.GroupMember.NON_GROUP_MEMBER:
        groups = None
    if groups is not None and not isinstance(groups, ProcessGroup):
        raise LayoutError(f"groups must be a process group or None, got {shown(groups)}")
    if groups is not None and not leaders:
        raise LayoutError(
            "groups is given, but the mapping is not of leaders: nobody would broadcast in it; "
            "make the mapping with leaders=True, or leave groups out"
        )
    if not duty.is_led:
        return None
    if groups is None:
        raise LayoutError(
            f"a mapping of leaders needs groups, the process group of {duty.siblings}, which want "
            f"the same as this rank"
        )
    members = dist.get_process_group_ranks(groups)
    if sorted(members) != sorted(duty.siblings):
        raise LayoutError(
            f"groups must hold the ranks {duty.siblings}, which want the same as this rank "
            f"(its broadcast_siblings), but it holds {tuple(members)}"
        )
    return groups


# ---- sending ------------------------------------------------------------------------------------


def _exchange(moves: _Moves, rank: int) -> None:
    """Receive and send all at once, and keep what this rank sends to itself."""
    copies: list[tuple[Tensor, Tensor]] = []
    receives: Pieces = []
    kept = (piece for target, piece in moves.sends if target == rank)
    for source, piece in moves.receives:
        if source == rank:
            piece.copy_(next(kept))
        elif piece.numel():
            flat = _plain(piece)
            copies += [(piece, flat)] * (flat is not piece)
            receives.append((source, flat))
    sends = [
        (target, piece.contiguous())
        for target, piece in moves.sends
        if target != rank and piece.numel()
    ]
    for work in post(receives, sends):
        work.wait()
    for piece, flat in copies:
        piece.copy_(flat)


def _plain(piece: Tensor) -> Tensor:
    """Return the tensor itself, or a new one, whose memory a collective can fill in order."""
    if piece.is_contiguous() and not piece.is_conj() and not piece.is_neg():
        return piece
    return torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)


def _broadcast(received: Tensor, leader: int, group: ProcessGroup) -> None:
    """Give what the leader has received to the others of its group."""
    if not received.numel():
        return
    flat = _plain(received)
    if flat is received:
        dist.broadcast(received, leader, group)
        return
    if leader == current().rank:
        flat.copy_(received)
    dist.broadcast(flat, leader, group)
    received.copy_(flat)
