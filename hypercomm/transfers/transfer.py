"""Moves a tensor between the ranks of the running job, as a RankMapping specifies.

The ranks exchange the shapes of their tensors, so each rank knows the size of every message. All
checks precede the first message. Then each rank posts all its receives and sends together, so ranks
cannot deadlock.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import chain

import attrs
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, LayoutError
from hypercomm.layout.checks import as_int, as_ordered, world_too_small
from hypercomm.layout.text import first_n, short_repr
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.options import as_verified
from hypercomm.process_groups.world import World, current
from hypercomm.transfers.exchange import as_bytes, consent, details, gather, only_one, post, tag_of
from hypercomm.transfers.holdings import Held, describe_plain, lengths_of, misfit, name_of
from hypercomm.transfers.mapping import Message, RankMapping, chunk_sizes, resolve_axes

Shape = tuple[int, ...]

Pieces = list[tuple[int, Tensor]]
"""Views of parts of a tensor, each with the rank that sends or receives it.

The sender and the receiver have the pieces in the same order.
"""

_OFFER_BYTES = 512
"""The size of the description that each rank sends to all others."""


@attrs.frozen
class _Offer:
    """The description that a rank sends to all others before a transfer.

    Attributes:
        dtype: The type of the elements of the rank's tensors.
        sent: The shape of the part that the rank sends, or None if it is not a source.
        buffer: The shape of the rank's buffer, or None if it has no buffer.
        refusal: The error that keeps the rank from taking part, or "".
    """

    dtype: str = ""
    sent: Shape | None = None
    buffer: Shape | None = None
    refusal: str = ""

    def block(self) -> bytes:
        """Return the description as JSON of at most `_OFFER_BYTES` bytes."""
        refusal = self.refusal.encode("ascii", "replace").decode()
        return json.dumps([self.dtype, self.sent, self.buffer, refusal[:200]]).encode()


@lru_cache(maxsize=1024)
def _read(block: bytes) -> _Offer:
    dtype, *shapes, refusal = json.loads(block)
    sent, buffer = (None if shape is None else tuple(shape) for shape in shapes)
    return _Offer(dtype, sent, buffer, refusal)


@attrs.frozen
class _Role:
    """The role of one rank in a mapping, for tensors of any shape.

    Attributes:
        is_source: Whether the rank is in the sending stage.
        siblings: The target ranks that receive the same part, including this rank. Empty if this
            rank does not receive.
        sends: The messages from this rank to other ranks and to itself.
        receives: The messages to this rank from other ranks and from itself.
    """

    is_source: bool
    siblings: tuple[int, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def transfer(
    mapping: RankMapping,
    tensor: Tensor | None,
    groups: ProcessGroup | None = None,
    *,
    out: Tensor | None = None,
    rows: Sequence[int] | None = None,
    verify: bool | None = None,
    world: World | None = None,
) -> Tensor | None:
    """Move a tensor between the ranks of the running job. Every rank of both stages must call it.

    Shards may have different lengths, because the ranks first exchange the shapes of their tensors.
    All ranks raise if the shapes do not fit. Autograd does not record the transfer. Send gradients
    back with `transfer(mapping.inverse(), gradient)`.

    Args:
        mapping: The mapping from the source layout to the target layout.
        tensor: On a source rank, the part to send. On a rank that is only in the target, the buffer
            to receive into. Ignored on all other ranks.
        groups: The process group of this rank's `broadcast_siblings`, in which the first rank
            broadcasts. The group is needed on a target rank if `mapping` has leaders and other
            ranks need the same part. Otherwise, pass None or torch's
            `GroupMember.NON_GROUP_MEMBER`.
        out: On a rank that is in both stages, the buffer to receive into. The buffer must not share
            memory with `tensor`. Default: a new tensor. Along an axis that is split, the new tensor
            consists of complete source shards if the number of source shards is a multiple of the
            number of target shards. Otherwise, torch.chunk's rule determines its length.
        rows: The lengths of the shards of the batch in the layout with more shards, in the order of
            the coordinates along `along`. In the other layout, the length of a shard is the sum of
            consecutive lengths. All ranks must pass the same value. With `rows`, shapes are not
            exchanged, and the other axes must be split evenly. Default: the lengths of the tensors.
        verify: Whether all ranks of both stages first check that they propose the same mapping.
            Every rank raises if two mappings differ, if a rank rejects its arguments or leaves, or
            if a rank has not joined by the timeout of WORLD. All ranks must pass the same value.
            Default: the environment variable HYPERCOMM_VERIFY, "0" or "1".
        world: The world of the ranks in the mapping. Default: the world of torch's WORLD group.

    Returns:
        The received tensor on a target rank, None on other ranks.

    Raises:
        NotInitializedError: torch.distributed is not initialised.
        WorldSizeError: The job has too few ranks.
        LayoutError: `mapping` is not a RankMapping, or a tensor or a group does not fit.
        PlanMismatchError: Shapes or dtypes of two ranks do not fit, or, with `verify`, their
            mappings differ. Nothing was sent.
        CreationError: Another rank rejected its arguments, or another thread of this rank makes a
            transfer by an equal mapping. Nothing was sent.
        GroupCreationTimeout: With `verify`, ranks are missing. Nothing was sent.
        OutcomeUnknownError: With `verify`, the job's store is gone. Restart the job.
        GroupOptionsError: `verify` is not True, False or None.

    With `verify`, ranks that wait for each other in different transfers raise within a second if
    their waits form a cycle. A rank that waits for a rank outside such a cycle raises at the
    timeout. The error names the missing ranks and their last transfer.

    Without `verify`, a rank that waits for a missing rank raises torch's error at the timeout. With
    `rows`, a rank that rejects its arguments raises alone, and other ranks wait until the timeout.
    Ranks whose mappings or `rows` differ also wait. NCCL may instead deliver the wrong message,
    because it ignores tags.

    To exchange shapes among n ranks, each rank sends ceil(log2(n)) small messages. With NCCL, the
    host waits for this exchange, so pass `rows` if the lengths are known. As with torch's
    `batch_isend_irecv`, all ranks of the job must have communicated before, or the default process
    group must be bound to a device.

    Example:
        >>> from hypercomm import RankLayout
        >>> from hypercomm.testing import fake_world
        >>> mapping = RankMapping(RankLayout([2], ["dp"]), RankLayout([4], ["dp"]))
        >>> with fake_world(4, rank=0):  # rank 0 keeps its first row and sends the second
        ...     transfer(mapping, torch.tensor([[1, 2], [3, 4]])).tolist()
        [[1, 2]]
    """
    world = world or current()
    check_mapping(mapping, world.size)
    is_verified = as_verified(verify)
    role = _role(mapping, world.rank)
    if not role.is_source and not role.siblings:
        return None
    with only_one(world, details(mapping), mapping):
        is_exchanged = world.has_store and rows is None and not mapping.sizes
        try:
            offer, given, buffer = _check(mapping, role, tensor, out)
            group = _check_group(groups, role, leaders=mapping.leaders)
            known = None if is_exchanged else _sizes_from_own(mapping, world.rank, offer, rows)
        except BaseException as error:
            if is_verified:
                consent(world, mapping, "", error)
            elif is_exchanged and isinstance(error, LayoutError):
                _exchange_shapes(world, mapping, _Offer(refusal=f"{type(error).__name__}: {error}"))
            raise
        entries = [f"{known[1]} of {offer.dtype}, {known[0].sizes}" if known else "any shape"]
        interrupt = None
        if is_verified:
            interrupt = consent(world, mapping, f"a tensor by {mapping}", entries=entries)
        if known is None:
            known = _fit(mapping, _exchange_shapes(world, mapping, offer, given.device))
        exact, whole = known
        with torch.no_grad(), writing_to([] if buffer is None else [buffer]):
            received = _move(world, exact, whole, given.detach(), buffer)
            if group is not None and received is not None:
                _broadcast(received.detach(), role.siblings[0], group)
        if received is not None:
            mark_written(received)
        if interrupt is not None:
            raise interrupt  # only now, because this rank had agreed to take part
        return received


@lru_cache(maxsize=128)
def _role(mapping: RankMapping, rank: int) -> _Role:
    is_source = rank in mapping.source_ranks
    is_target = rank in mapping.target_ranks
    siblings = mapping.broadcast_siblings(rank) if is_target else ()
    sends = mapping.sends(rank) if is_source else ()
    return _Role(is_source, siblings, sends, mapping.receives(rank) if is_target else ())


# ---- checks before anything is sent -------------------------------------------------------------


def check_mapping(mapping: object, size: int) -> None:
    """Raise unless `mapping` is a RankMapping and a job of `size` ranks has all its ranks."""
    if not isinstance(mapping, RankMapping):
        raise LayoutError(f"mapping must be a RankMapping, got {short_repr(mapping)}")
    last_rank = max(mapping.source.last_rank, mapping.target.last_rank)
    if last_rank >= size:
        raise world_too_small(f"the mapping {mapping}", last_rank, size)


def _check(
    mapping: RankMapping, role: _Role, tensor: object, out: object
) -> tuple[_Offer, Tensor, Tensor | None]:
    """Check the tensors of this rank.

    Returns:
        The description of these tensors, the given tensor, and the buffer to receive into or None.
    """
    given = as_tensor(tensor, "tensor")
    resolve_axes(mapping.cuts, given.ndim)
    buffer = None
    if role.is_source and role.siblings:
        buffer = None if out is None else _check_out(out, given)
    elif out is not None:
        raise LayoutError(
            "out= is only for ranks in both stages; on other ranks, pass the buffer as tensor="
        )
    elif role.siblings:
        buffer = given
        check_buffer(given, "tensor")
    sent = tuple(given.shape) if role.is_source else None
    into = None if buffer is None else tuple(buffer.shape)
    return _Offer(name_of(given.dtype), sent, into), given, buffer


def _check_out(out: object, tensor: Tensor) -> Tensor:
    """Check the buffer of a rank that sends and receives."""
    buffer = as_tensor(out, "out=")
    if (buffer.ndim, buffer.dtype, buffer.device) != (tensor.ndim, tensor.dtype, tensor.device):
        raise LayoutError(
            f"out= must have {tensor.ndim} axes, {tensor.dtype} and device {tensor.device}, like "
            f"tensor=; got {buffer.ndim} axes, {buffer.dtype} and device {buffer.device}"
        )
    check_buffer(buffer, "out=")
    begin, end = memory_span(tensor)
    out_begin, out_end = memory_span(buffer)
    if begin < out_end and out_begin < end:
        raise LayoutError("out= must not share memory with tensor=, because tensor= is being sent")
    return buffer


def _check_group(groups: object, role: _Role, *, leaders: bool) -> ProcessGroup | None:
    """Return the group in which this rank's leader broadcasts, or None if no rank broadcasts."""
    if not leaders or len(role.siblings) < 2:
        return None
    members = dist.get_process_group_ranks(groups) if isinstance(groups, ProcessGroup) else []
    if not isinstance(groups, ProcessGroup) or sorted(members) != sorted(role.siblings):
        raise LayoutError(
            f"groups= must be the process group of this rank's broadcast_siblings "
            f"{role.siblings}, got {tuple(members) or short_repr(groups)}"
        )
    return groups


def as_tensor(value: object, what: str) -> Tensor:
    """Return a value that is a dense tensor with data, or raise LayoutError."""
    if not isinstance(value, Tensor):
        raise LayoutError(f"{what} must be a torch.Tensor, got {short_repr(value)}")
    if value.layout is not torch.strided or value.device.type == "meta":
        raise LayoutError(
            f"{what} must be a dense tensor with data, got {value.layout} on {value.device}"
        )
    if hasattr(value, "to_local"):
        raise LayoutError(f"{what} must be a plain tensor, got a DTensor; pass its to_local()")
    if value.is_conj() or value.is_neg():
        raise LayoutError(f"{what} must be resolved; pass its resolve_conj().resolve_neg()")
    return value


def check_buffer(buffer: Tensor, what: str) -> None:
    """Raise if elements of a buffer share memory, because data cannot be received into it."""
    if share_memory(buffer):
        raise LayoutError(
            f"{what} is expanded: its shape {tuple(buffer.shape)} has strides {buffer.stride()}, "
            f"so elements share memory; pass a contiguous tensor"
        )


def memory_span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and the address after its last byte."""
    if not tensor.numel():
        return 0, 0
    begin = tensor.data_ptr()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def share_memory(tensor: Tensor, other: Tensor | None = None) -> bool:
    """Return whether elements of two tensors, or two elements of one tensor, share memory."""
    if not tensor.numel():
        return False
    begin, end = memory_span(tensor)
    if other is None:
        reach = 0
        for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if n > 1 and step <= reach:
                break  # elements may share memory
            reach += (n - 1) * step
        else:
            return False
        marks = np.zeros(end - begin, dtype=bool)
        _bytes_of(tensor, marks, begin)[...] = True
        return int(marks.sum()) < tensor.numel() * tensor.element_size()
    other_begin, other_end = memory_span(other)
    if begin >= other_end or other_begin >= end:
        return False
    if tensor.is_contiguous() and other.is_contiguous():
        return True
    first = min(begin, other_begin)
    marks = np.zeros(max(end, other_end) - first, dtype=bool)
    _bytes_of(tensor, marks, first)[...] = True
    return bool(_bytes_of(other, marks, first).any())


def _bytes_of(tensor: Tensor, marks: NDArray[np.bool_], first: int) -> NDArray[np.bool_]:
    """Return the bytes of a tensor as a view of `marks`, whose first byte has address `first`."""
    size = tensor.element_size()
    steps = [step * size for step in tensor.stride()]
    start = marks[tensor.data_ptr() - first :]
    return np.lib.stride_tricks.as_strided(start, (*tensor.shape, size), (*steps, 1))


# ---- the length of every shard -------------------------------------------------------------------


def _exchange_shapes(
    world: World, mapping: RankMapping, offer: _Offer, device: torch.device | None = None
) -> tuple[tuple[int, bytes], ...]:
    """Return the descriptions of all ranks of a transfer, by rank."""
    device = device or torch.device(torchdist.device_type(world.pg or torchdist.world_group()))
    blocks = gather(world, mapping, "shapes", offer.block(), _OFFER_BYTES, device)
    return tuple((rank, blocks[rank].rstrip(b"\0")) for rank in sorted(blocks))


@lru_cache(maxsize=128)
def _fit(mapping: RankMapping, blocks: tuple[tuple[int, bytes], ...]) -> tuple[RankMapping, Shape]:
    """Return the mapping with the lengths of all shards, and the shape of the full tensor.

    Raises:
        PlanMismatchError: The tensors of two ranks do not fit.
        CreationError: A rank rejected its arguments.
    """
    offers = {rank: _read(block) for rank, block in blocks}
    for rank, offer in offers.items():
        if offer.refusal:
            raise CreationError(f"nothing was sent: rank {rank} failed: {offer.refusal}")
    sent = _described(mapping, offers, is_source=True)
    into = _described(mapping, offers, is_source=False)
    first, one = next(iter(sent.items()))
    for rank, other in chain(sent.items(), into.items()):
        if (len(other.shape), other.dtype) != (len(one.shape), one.dtype):
            raise misfit(
                f"rank {first} has {one.shape} of torch.{one.dtype}, and rank {rank} has "
                f"{other.shape} of torch.{other.dtype}"
            )
    here = lengths_of("tensor", sent)
    there = lengths_of("tensor", into) if into else None
    axes = resolve_axes(mapping.cuts, len(one.shape))
    counts = {axis: cut.target for axis, cut in zip(axes, mapping.cuts, strict=True)}
    whole = []
    sizes = []
    for axis, lengths in enumerate(here):
        source = tuple(lengths[shard] for shard in sorted(lengths))
        rule = _by_rule(source, counts.get(axis, 1))
        known = {} if there is None else there[axis]
        target = tuple(known.get(shard, length) for shard, length in enumerate(rule))
        whole.append(sum(source))
        sizes.append((source, target))
        if sum(source) != sum(target):
            receiver, buffer = next(iter(into.items()))
            raise misfit(
                f"the length of tensor axis {axis} differs: {sum(source)} at the source, and "
                f"{sum(target)} at the target; the source has shards of {first_n(source, 8)} "
                f"(rank {first} has {one.shape}), and the target has shards of "
                f"{first_n(target, 8)} (rank {receiver} has {buffer.shape})"
            )
    return attrs.evolve(mapping, sizes=[sizes[axis] for axis in axes]), tuple(whole)


def _described(
    mapping: RankMapping, offers: Mapping[int, _Offer], *, is_source: bool
) -> dict[int, Held]:
    """Describe the part of each source rank, or the buffer of each target rank with a buffer."""
    found = {}
    for rank in mapping.source_ranks if is_source else mapping.target_ranks:
        offer = offers[rank]
        shape = offer.sent if is_source else offer.buffer
        if shape is not None:
            found[rank] = describe_plain(
                "tensor", offer.dtype, shape, mapping, rank, is_source=is_source
            )
    return found


def _by_rule(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the default lengths of the target's shards, from the lengths of the source's shards.

    >>> _by_rule((3, 2), 1), _by_rule((5, 3), 4), _by_rule((3, 2), 3)
    ((5,), (3, 2, 2, 1), (2, 2, 1))
    """
    if not len(sizes) % count:
        each = len(sizes) // count
        return tuple(sum(sizes[at : at + each]) for at in range(0, len(sizes), each))
    if not count % len(sizes):
        return tuple(one for size in sizes for one in chunk_sizes(size, [count // len(sizes)]))
    return chunk_sizes(sum(sizes), [count])


def _sizes_from_own(
    mapping: RankMapping, rank: int, offer: _Offer, rows: Sequence[int] | None
) -> tuple[RankMapping, Shape]:
    """Return the same as `_fit`, but computed from the tensors of this rank alone.

    Raises:
        LayoutError: The tensors of this rank have the wrong shapes.
    """
    is_source = offer.sent is not None
    shape = offer.sent if offer.sent is not None else offer.buffer
    if shape is None:
        raise LayoutError("a rank of neither stage has no shapes")
    exact = mapping
    whole = list(shape)
    axes = resolve_axes(mapping.cuts, len(shape))
    for number, (axis, cut) in enumerate(zip(axes, mapping.cuts, strict=True)):
        if mapping.sizes:
            whole[axis] = sum(mapping.sizes[number][0])
        else:
            whole[axis] *= cut.source if is_source else cut.target
    if rows is not None:
        exact = _with_rows(mapping, rows, whole)
    elif not mapping.sizes:
        # This call raises unless the shards of the other layout are even, too.
        (mapping if is_source else mapping.inverse()).received_shape(shape)
        exact = mapping.of_shape(whole)
    for found, end in ((offer.sent, True), (offer.buffer, False)):
        due = exact.shape_at(rank, whole, is_source=end) if found is not None else None
        if found != due:
            raise LayoutError(
                f"rank {rank} must {'send' if end else 'receive into'} a tensor of shape {due}, "
                f"got {found}"
            )
    return exact, tuple(whole)


def _with_rows(mapping: RankMapping, rows: Sequence[int], whole: list[int]) -> RankMapping:
    """Return a mapping whose batch is split into `rows`. Set the batch length in `whole`."""
    given = tuple(as_int(one, "every length in rows=", 0) for one in as_ordered(rows, "rows="))
    axes = [cut.axis for cut in mapping.cuts]
    if mapping.along is None or mapping.batch_axis not in axes:
        raise LayoutError(
            f"rows= is only allowed if the mapping splits the batch axis; got rows={given} for "
            f"{mapping}"
        )
    number = axes.index(mapping.batch_axis)
    counts = mapping.cuts[number].source, mapping.cuts[number].target
    if len(given) != max(counts) or max(counts) % min(counts):
        raise LayoutError(
            f"rows= must contain {max(counts)} lengths, one for each shard of the batch, got "
            f"{given}"
        )
    whole[mapping.batch_axis] = sum(given)
    sizes = list(mapping.of_shape(whole).sizes)
    source, target = (_by_rule(given, count) for count in counts)
    sizes[number] = source, target
    return attrs.evolve(mapping, sizes=sizes)


# ---- communication ------------------------------------------------------------------------------


def mark_written(tensor: Tensor) -> None:
    """Increment the version of a received tensor, because autograd did not record the write."""
    if not tensor.is_inference():
        increment_version(tensor)


def writing_to(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Return a context in which the tensors may be written, also tensors of inference mode."""
    is_needed = any(one.is_inference() for one in tensors)
    return torch.inference_mode() if is_needed else contextlib.nullcontext()


def _move(
    world: World, exact: RankMapping, whole: Shape, given: Tensor, buffer: Tensor | None
) -> Tensor | None:
    """Send this rank's parts of a tensor, and return the tensor that it receives."""
    role = _role(exact, world.rank)
    received = buffer
    receiving: Pieces = []
    sending: Pieces = []
    if role.siblings:
        shape = exact.shape_at(world.rank, whole, is_source=False)
        received = given.new_empty(shape) if buffer is None else buffer
        into = received.detach()
        receiving = [(one.source, into[one.target_slices(shape)]) for one in role.receives]
    if role.is_source:
        sending = [(one.target, given[one.source_slices(given.shape)]) for one in role.sends]
    tag = tag_of(f"{details(exact)} {whole} {given.dtype}") if world.has_store else 0
    _exchange(receiving, sending, world, tag)
    return received


def _exchange(receiving: Pieces, sending: Pieces, world: World, tag: int) -> None:
    """Receive and send everything, and copy the pieces that stay on this rank."""
    kept = (piece for target, piece in sending if target == world.rank)
    receives: Pieces = []
    copies: list[tuple[Tensor, Tensor]] = []
    for source, piece in receiving:
        if source == world.rank:
            piece.copy_(next(kept))
            continue
        packed = piece
        if not piece.is_contiguous():
            packed = torch.empty_like(piece, memory_format=torch.contiguous_format)
            copies.append((piece, packed))
        receives.append((source, packed))
    sends = [(target, piece.contiguous()) for target, piece in sending if target != world.rank]
    for work in post(receives, sends, world.pg, tag):
        work.wait()
    for piece, packed in copies:
        piece.copy_(packed)


def _broadcast(received: Tensor, leader: int, group: ProcessGroup) -> None:
    """Broadcast the received part from the leader to the other ranks of the group."""
    packed = received.contiguous()
    if packed.numel():
        dist.broadcast(as_bytes(packed), leader, group)
    if packed is not received:
        received.copy_(packed)
