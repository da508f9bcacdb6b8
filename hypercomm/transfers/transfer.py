"""Moves a tensor between the ranks of the running job, as a RankMapping specifies.

The ranks exchange descriptions of their tensors, so each rank knows the size of every message. All
checks precede the first message. Then each rank posts all its receives and sends together, so ranks
cannot deadlock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import prod

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, LayoutError
from hypercomm.layout.checks import as_int, as_ordered
from hypercomm.layout.text import first_n, short_repr
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.spec import as_verified
from hypercomm.process_groups.world import World, current
from hypercomm.transfers.buckets import BucketPlan, Segment, plan_of
from hypercomm.transfers.exchange import Exchange, details, read_json, tag_of
from hypercomm.transfers.holdings import (
    Held,
    Shape,
    describe_plain,
    from_rows,
    name_of,
    to_rows,
)
from hypercomm.transfers.mapping import (
    RankMapping,
    check_mapping,
    chunk_sizes,
    length_of_unit,
    resolve_axes,
)
from hypercomm.transfers.matching import lengths_of, misfit
from hypercomm.transfers.mover import Mover
from hypercomm.transfers.tensors import (
    as_bytes,
    as_tensor,
    check_buffer,
    share_memory,
    writing_to,
)

_BLOCK_BYTES = 1024
"""The size of the description that each rank sends to all others."""

_NAME = "tensor"
"""The name of the tensor in descriptions and plans."""


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
    exchange = Exchange(world, mapping)
    if world.rank not in exchange.ranks:
        return None
    with exchange.alone(("tensor", details(mapping))):
        is_exchanged = world.has_store and rows is None and not mapping.sizes
        try:
            with exchange.failing_together() if is_verified else contextlib.nullcontext():
                is_source, siblings = _role(mapping, world.rank)
                given = as_tensor(tensor, "tensor")
                buffer = _check_buffer(given, out, is_source, siblings)
                parts = ((True, given if is_source else None), (False, buffer))
                held = {
                    is_sent: describe_plain(_NAME, one, mapping, world.rank, is_source=is_sent)
                    for is_sent, one in parts
                    if one is not None
                }
                group = _check_group(groups, siblings if mapping.leaders else ())
                known = None if is_exchanged else _sizes_from_own(mapping, held, world.rank, rows)
        except LayoutError as error:
            if is_exchanged and not is_verified:
                device = torch.device(torchdist.device_type(world.pg or torchdist.world_group()))
                refusal = f"{type(error).__name__}: {error}".encode("ascii", "replace").decode()
                _gather(exchange, device, {}, refusal[:200])
            raise
        if is_verified:
            dtype = name_of(given.dtype)
            sizes = f"{known[1]} of {dtype}, {known[0].sizes}" if known else "any shape"
            exchange.agree(f"a tensor by {mapping}", sizes)
        exact, whole = known or _fit(mapping, _gather(exchange, given.device, held))
        if buffer is None and siblings:
            buffer = given.new_empty(exact.shape_at(world.rank, whole, is_source=False))
        received = {} if buffer is None else {_NAME: buffer.detach()}
        tag = tag_of(f"{details(exact)} {whole} {given.dtype}") if world.has_store else 0
        plan = _plan(exact, whole, given.dtype, world.rank)
        mover = Mover(plan, {_NAME: given.detach()}, received, world, tag)
        mover.copy()
        mover.move()
        if group is not None and buffer is not None:
            _broadcast(buffer.detach(), siblings[0], group)
        return buffer


# ---- checks before anything is sent -------------------------------------------------------------


@lru_cache(maxsize=128)
def _role(mapping: RankMapping, rank: int) -> tuple[bool, tuple[int, ...]]:
    """Return whether a rank is a source, and the target ranks that receive the same part."""
    is_target = rank in mapping.target_ranks
    return rank in mapping.source_ranks, mapping.broadcast_siblings(rank) if is_target else ()


def _check_buffer(
    given: Tensor, out: object, is_source: bool, siblings: tuple[int, ...]
) -> Tensor | None:
    """Return the buffer to receive into, or None if a new tensor is needed or nothing arrives."""
    if is_source and siblings:
        return None if out is None else _check_out(out, given)
    if out is not None:
        raise LayoutError(
            "out= is only for ranks in both stages; on other ranks, pass the buffer as tensor="
        )
    if not siblings:
        return None
    check_buffer(given, "tensor")
    return given


def _check_out(out: object, tensor: Tensor) -> Tensor:
    """Check the buffer of a rank that sends and receives."""
    buffer = as_tensor(out, "out=")
    if (buffer.ndim, buffer.dtype, buffer.device) != (tensor.ndim, tensor.dtype, tensor.device):
        raise LayoutError(
            f"out= must have {tensor.ndim} axes, {tensor.dtype} and device {tensor.device}, like "
            f"tensor=; got {buffer.ndim} axes, {buffer.dtype} and device {buffer.device}"
        )
    check_buffer(buffer, "out=")
    if share_memory(buffer, tensor):
        raise LayoutError("out= must not share memory with tensor=, because tensor= is being sent")
    return buffer


def _check_group(groups: object, siblings: tuple[int, ...]) -> ProcessGroup | None:
    """Return the group in which this rank's leader broadcasts, or None if no rank broadcasts."""
    if len(siblings) < 2:
        return None
    members = dist.get_process_group_ranks(groups) if isinstance(groups, ProcessGroup) else []
    if not isinstance(groups, ProcessGroup) or sorted(members) != sorted(siblings):
        raise LayoutError(
            f"groups= must be the process group of this rank's broadcast_siblings {siblings}, got "
            f"{tuple(members) or short_repr(groups)}"
        )
    return groups


# ---- the length of every shard -------------------------------------------------------------------


def _gather(
    exchange: Exchange, device: torch.device, held: Mapping[bool, Held], refusal: str = ""
) -> tuple[tuple[int, bytes], ...]:
    """Return the descriptions of all ranks of a transfer, by rank."""
    value = [list(held), to_rows(held.values()), refusal]
    return tuple(exchange.gather("shapes", value, _BLOCK_BYTES, device).items())


@lru_cache(maxsize=128)
def _fit(mapping: RankMapping, blocks: tuple[tuple[int, bytes], ...]) -> tuple[RankMapping, Shape]:
    """Return the mapping with the lengths of all shards, and the shape of the full tensor.

    Raises:
        PlanMismatchError: The tensors of two ranks do not fit.
        CreationError: A rank rejected its arguments.
    """
    ends: dict[bool, dict[int, Held]] = {True: {}, False: {}}
    for rank, block in blocks:
        keys, rows, refusal = read_json(block)
        if refusal:
            raise CreationError(f"nothing was sent: rank {rank} failed: {refusal}")
        for is_sent, one in zip(keys, from_rows(rows), strict=True):
            ends[is_sent][rank] = one
    sent, into = ends[True], ends[False]
    first, one = next(iter(sent.items()))
    for rank, other in chain(sent.items(), into.items()):
        if (len(other.shape), other.dtype) != (len(one.shape), one.dtype):
            raise misfit(
                f"rank {first} has {one.shape} of torch.{one.dtype}, and rank {rank} has "
                f"{other.shape} of torch.{other.dtype}"
            )
    axes = resolve_axes(mapping.cuts, len(one.shape))
    counts = {axis: cut.target for axis, cut in zip(axes, mapping.cuts, strict=True)}
    there = lengths_of(_NAME, into) if into else [{} for _ in one.shape]
    sizes = []
    for axis, (here, known) in enumerate(zip(lengths_of(_NAME, sent), there, strict=True)):
        source = tuple(here[shard] for shard in sorted(here))
        rule = _by_rule(source, counts.get(axis, 1))
        target = tuple(known.get(shard, length) for shard, length in enumerate(rule))
        sizes.append((source, target))
        if sum(source) != sum(target):
            receiver, buffer = next(iter(into.items()))
            raise misfit(
                f"the length of tensor axis {axis} differs: {sum(source)} at the source, and "
                f"{sum(target)} at the target; the source has shards of {first_n(source, 8)} "
                f"(rank {first} has {one.shape}), and the target has shards of "
                f"{first_n(target, 8)} (rank {receiver} has {buffer.shape})"
            )
    exact = attrs.evolve(mapping, sizes=[sizes[axis] for axis in axes])
    return exact, tuple(sum(source) for source, _ in sizes)


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
    mapping: RankMapping, held: Mapping[bool, Held], rank: int, rows: Sequence[int] | None
) -> tuple[RankMapping, Shape]:
    """Return the same as `_fit`, but computed from the tensors of this rank alone.

    Raises:
        LayoutError: The tensors of this rank have the wrong shapes.
    """
    is_source, one = next(iter(held.items()))
    whole = list(one.shape)
    for axis, cut in zip(resolve_axes(mapping.cuts, len(whole)), mapping.cuts, strict=True):
        count = cut.source if is_source else cut.target
        if cut.sizes is not None:
            whole[axis] = sum(cut.sizes[0])
            continue
        if rows is None:
            length_of_unit(cut.axis, whole[axis], cut.units // count)  # raises if it is uneven
        whole[axis] *= count
    exact = mapping
    if rows is not None:
        exact = _with_rows(mapping, rows, whole)
    elif not mapping.sizes:
        exact = mapping.of_shape(whole)
    for is_sent, one in held.items():
        due = exact.shape_at(rank, whole, is_source=is_sent)
        if one.shape != due:
            raise LayoutError(
                f"rank {rank} must {'send' if is_sent else 'receive into'} a tensor of shape "
                f"{due}, got {one.shape}"
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


@lru_cache(maxsize=128)
def _plan(exact: RankMapping, whole: Shape, dtype: torch.dtype, rank: int) -> BucketPlan:
    """Return the plan of a rank: the messages of the mapping in one bucket."""
    return plan_of(_segments(exact, whole, dtype, rank), rank)


def _segments(exact: RankMapping, whole: Shape, dtype: torch.dtype, rank: int) -> Iterator[Segment]:
    """Yield the messages that a rank sends or receives, as segments."""
    sends = exact.sends(rank) if rank in exact.source else ()
    receives = exact.receives(rank) if rank in exact.target else ()
    for one in dict.fromkeys((*sends, *receives)):
        here = one.source_slices(exact.shape_at(one.source, whole, is_source=True))
        there = one.target_slices(exact.shape_at(one.target, whole, is_source=False))
        slices = zip(one.global_slices(whole), whole, strict=True)
        nbytes = dtype.itemsize * prod(len(range(length)[part]) for part, length in slices)
        bucket = -1 if one.source == one.target else 0
        ends = one.source, one.target, here, there
        yield Segment(_NAME, _NAME, dtype, *ends, nbytes, bucket)


def _broadcast(received: Tensor, leader: int, group: ProcessGroup) -> None:
    """Broadcast the received part from the leader to the other ranks of the group."""
    packed = received.contiguous()
    if packed.numel():
        dist.broadcast(as_bytes(packed), leader, group)
    if packed is not received:
        with writing_to([received]):
            received.copy_(packed)
