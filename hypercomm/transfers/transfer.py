"""Move a tensor between the ranks of the running job, following a RankMapping.

Everything is checked before anything is sent. Then each rank posts all its receives and sends
together, so no order of the ranks can deadlock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup, Work

from hypercomm.errors import CreationError, LayoutError, OutcomeUnknownError
from hypercomm.layout.checks import world_too_small
from hypercomm.layout.text import shown
from hypercomm.process_groups.agreement.calls import Scope, agree, limit_of, refuse
from hypercomm.process_groups.options import as_verified
from hypercomm.process_groups.world import World, current
from hypercomm.transfers.mapping import Message, RankMapping

Shape = tuple[int, ...]

Pieces = list[tuple[int, Tensor]]
"""Views of parts of a tensor, each with the rank at the other end, in the same order on both."""


@attrs.frozen
class _Role:
    """The role of one rank in a mapping, for tensors of any shape.

    Attributes:
        is_source: Whether it sends.
        siblings: The target ranks that receive the same part, including this one; () if it does
            not receive.
        sends: The messages to other ranks and to itself.
        receives: The messages from other ranks and from itself.
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
    verify: bool | None = None,
    world: World | None = None,
) -> Tensor | None:
    """Move a tensor between the ranks of the running job; every rank of both stages calls it.

    Gradients do not flow through it. Move them back with `transfer(mapping.inverse(), gradient)`.

    Args:
        mapping: The mapping from the source layout to the target layout.
        tensor: On a source rank the part to send; on a rank of the target alone the buffer to
            receive into. Ignored on all other ranks.
        groups: If `mapping` has leaders, and other ranks need the same part as this rank of the
            target: the process group of its `broadcast_siblings`, whose first rank broadcasts.
            Otherwise None or torch's `GroupMember.NON_GROUP_MEMBER`.
        out: On a rank of both stages, the buffer to receive into. It must not overlap `tensor` in
            memory. Default: a new tensor.
        verify: Whether all ranks of both stages first check that they propose the same mapping,
            dtype and shapes. Every rank raises if two differ, if one rejects its arguments or
            leaves, or if one has not joined by the timeout of WORLD. All ranks must pass the same
            value. Default: the environment variable HYPERCOMM_VERIFY, "0" or "1".
        world: The world whose ranks the mapping has. Default: that of WORLD.

    Returns:
        The received tensor on a target rank, None on other ranks.

    Raises:
        NotInitializedError: torch.distributed is not initialised.
        WorldSizeError: The job has too few ranks.
        LayoutError: `mapping` is not a RankMapping, or a tensor or a group does not fit.
        PlanMismatchError: With `verify`: ranks differ; nothing was sent.
        GroupCreationTimeout, CreationError: With `verify`: ranks are missing, or one failed;
            nothing was sent.
        OutcomeUnknownError: With `verify`: the job's store is gone; restart the job.
        GroupOptionsError: `verify` is not True, False or None.

    With `verify`, ranks that wait for each other in different transfers raise within a second if
    their waits form a cycle. A rank that waits for a rank outside such a cycle raises at the
    timeout. The error names the missing ranks and their last transfer.

    Without `verify`, each rank checks only its own arguments. If one raises, the others wait for it
    until the timeout. If mapping, shape or dtype differ between two ranks, the bytes arrive as
    they are: gloo aborts a process whose buffer is too short and partly fills one that is too long,
    and NCCL waits. A message that only one rank expects stays queued for the next transfer.

    With NCCL, as for torch's `batch_isend_irecv`, all ranks of the job must have communicated
    before, or the default process group must be bound to a device.

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
    try:
        description, received, receives, sends = _check(mapping, role, tensor, out)
        group = _check_group(groups, role, leaders=mapping.leaders)
    except LayoutError as error:
        if is_verified:
            consent(world, mapping, "", error)
        raise
    interrupt = consent(world, mapping, description) if is_verified else None
    with torch.no_grad():
        _exchange(receives, sends, world)
        if group is not None and received is not None:
            _broadcast(received.detach(), role.siblings[0], group)
    if received is not None:
        mark_written(received)
    if interrupt is not None:
        raise interrupt  # only now, because the other ranks had this rank's consent
    return received


@lru_cache(maxsize=128)
def _role(mapping: RankMapping, rank: int) -> _Role:
    is_source, is_target = rank in mapping.source_ranks, rank in mapping.target_ranks
    siblings = mapping.broadcast_siblings(rank) if is_target else ()
    sends = mapping.sends(rank) if is_source else ()
    return _Role(is_source, siblings, sends, mapping.receives(rank) if is_target else ())


@lru_cache(maxsize=256)
def shapes_of(mapping: RankMapping, shape: Shape, *, is_source: bool) -> tuple[Shape, Shape]:
    """Return the shapes of the parts at the source and at the target, given one of the two.

    Raises:
        LayoutError: A length cannot be cut evenly, or an axis that is cut does not exist.
    """
    if is_source:
        return shape, mapping.received_shape(shape)
    return mapping.inverse().received_shape(shape), shape


# ---- checks before anything is sent -------------------------------------------------------------


def check_mapping(mapping: object, size: int) -> None:
    """Raise unless this is a RankMapping whose ranks all exist in a job of this size."""
    if not isinstance(mapping, RankMapping):
        raise LayoutError(f"mapping must be a RankMapping, got {shown(mapping)}")
    last_rank = max(mapping.source.last_rank, mapping.target.last_rank)
    if last_rank >= size:
        raise world_too_small(f"the mapping {mapping}", last_rank, size)


def _check(
    mapping: RankMapping, role: _Role, tensor: object, out: object
) -> tuple[str, Tensor | None, Pieces, Pieces]:
    """Check the tensors of this rank, and return its operations.

    Returns:
        A description of the transfer that is identical on all ranks, the tensor that is received,
        and the messages to receive and to send.
    """
    given = as_tensor(tensor, "tensor")
    shapes = shapes_of(mapping, tuple(given.shape), is_source=role.is_source)
    received = None
    if role.is_source and role.siblings:
        received = given.new_empty(shapes[1]) if out is None else _check_out(out, given, shapes[1])
    elif out is not None:
        raise LayoutError(
            "out is for ranks of both stages; a rank of one of them passes its tensor as tensor"
        )
    elif role.siblings:
        received = given
        check_buffer(received, "tensor")
    receives: Pieces = []
    sends: Pieces = []
    if received is not None:
        buffer = received.detach()
        receives = [(m.source, buffer[m.target_slices(shapes[1])]) for m in role.receives]
    if role.is_source:
        whole = given.detach()
        sends = [(m.target, whole[m.source_slices(shapes[0])]) for m in role.sends]
    description = f"parts {shapes[0]} to parts {shapes[1]} of {given.dtype}"
    return description, received, receives, sends


def _check_out(out: object, tensor: Tensor, shape: Shape) -> Tensor:
    """Check the buffer of a rank that sends and receives."""
    buffer = as_tensor(out, "out")
    found = (tuple(buffer.shape), buffer.dtype, buffer.device)
    if found != (shape, tensor.dtype, tensor.device):
        raise LayoutError(
            f"out must have shape {shape}, {tensor.dtype} and device {tensor.device} to match "
            f"tensor; it has {found[0]}, {found[1]} and {found[2]}"
        )
    check_buffer(buffer, "out")
    begin, end = memory_span(tensor)
    out_begin, out_end = memory_span(buffer)
    if begin < out_end and out_begin < end:
        raise LayoutError("out must not overlap tensor in memory, because tensor is being sent")
    return buffer


def _check_group(groups: object, role: _Role, *, leaders: bool) -> ProcessGroup | None:
    """Return the group in which this rank's leader broadcasts, or None if there is no broadcast."""
    if not leaders or len(role.siblings) < 2:
        return None
    members = dist.get_process_group_ranks(groups) if isinstance(groups, ProcessGroup) else []
    if not isinstance(groups, ProcessGroup) or sorted(members) != sorted(role.siblings):
        raise LayoutError(
            f"groups must be the process group of this rank's broadcast_siblings {role.siblings}, "
            f"got {tuple(members) or shown(groups)}"
        )
    return groups


def as_tensor(value: object, what: str) -> Tensor:
    """Return a value that is a dense tensor with data, or raise LayoutError."""
    if not isinstance(value, Tensor):
        raise LayoutError(f"{what} must be a torch.Tensor, got {shown(value)}")
    if value.layout is not torch.strided or value.device.type == "meta":
        raise LayoutError(
            f"{what} must be a dense tensor with data, got {value.layout} on {value.device}"
        )
    if value.is_conj() or value.is_neg():
        raise LayoutError(f"{what} must be resolved: pass {what}.resolve_conj().resolve_neg()")
    return value


def check_buffer(buffer: Tensor, what: str) -> None:
    """Raise unless a tensor can be received into."""
    if any(not step and n > 1 for n, step in zip(buffer.shape, buffer.stride(), strict=True)):
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


# ---- communication ------------------------------------------------------------------------------


def post(
    receives: Iterable[tuple[int, Tensor]],
    sends: Iterable[tuple[int, Tensor]],
    pg: ProcessGroup | None,
) -> list[Work]:
    """Start all receives and sends together. Two ranks match their messages in order.

    Empty tensors are skipped.
    """
    ops = [dist.P2POp(dist.irecv, tensor, rank, pg) for rank, tensor in receives if tensor.numel()]
    ops += [dist.P2POp(dist.isend, tensor, rank, pg) for rank, tensor in sends if tensor.numel()]
    return dist.batch_isend_irecv(ops) if ops else []


def mark_written(tensor: Tensor) -> None:
    """Increment the version of a tensor, because autograd does not see that it was received."""
    if not tensor.is_inference():
        increment_version(tensor)


def _exchange(receiving: Pieces, sending: Pieces, world: World) -> None:
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
    for work in post(receives, sends, world.pg):
        work.wait()
    for piece, packed in copies:
        piece.copy_(packed)


def _broadcast(received: Tensor, leader: int, group: ProcessGroup) -> None:
    """Send the received part from the leader to the other members of its group."""
    packed = received.contiguous()
    if packed.numel():
        dist.broadcast(packed, leader, group)
    if packed is not received:
        received.copy_(packed)


# ---- the agreement before a transfer ------------------------------------------------------------


def consent(
    world: World,
    mapping: RankMapping,
    tensor: str,
    refusal: BaseException | None = None,
    *,
    entries: Sequence[str] = (),
    effect: str = "nothing was sent",
) -> BaseException | None:
    """Wait until all ranks of a transfer have joined and propose the same one.

    Args:
        world: The world whose ranks the mapping has.
        mapping: The mapping of the transfer.
        tensor: A description of the data that is identical on all ranks.
        refusal: The error that keeps this rank from taking part. The other ranks raise it, and
            this rank does not wait.
        entries: Further descriptions that must be equal on all ranks.
        effect: The consequence of a failure for the data, as the error states it.

    Returns:
        An interrupt that reached this rank although all ranks continue. The caller raises it after
        the transfer.

    Raises:
        PlanMismatchError: Ranks propose different transfers.
        GroupCreationTimeout: Some are missing.
        CreationError: One has failed.
        OutcomeUnknownError: The store is gone, and the other ranks may have continued.
    """
    ranks = _ranks(mapping)
    digest = hashlib.sha256(str(ranks).encode()).hexdigest()[:12]
    scope = Scope(world, f"transfers/{digest}", ranks)
    title = f"transfer of {tensor} by {mapping}" if tensor else f"transfer by {mapping}"
    if refusal is not None:
        refuse(scope, refusal)
        return None
    every = [f"{tensor} by {mapping}", _details(mapping), *entries]
    try:
        return agree(scope, title, lambda: every, limit_of(None, world)).pending
    except CreationError as error:
        if not isinstance(error, OutcomeUnknownError):
            error.args = (f"{effect}: {error}",)
        raise


@lru_cache(maxsize=128)
def _ranks(mapping: RankMapping) -> tuple[int, ...]:
    """Return the ranks of both stages."""
    return tuple(sorted({*mapping.source_ranks, *mapping.target_ranks}))


@lru_cache(maxsize=128)
def _details(mapping: RankMapping) -> str:
    """Return the properties of a mapping that its text leaves out."""
    layouts = hashlib.sha256(f"{mapping.source.to_json()} {mapping.target.to_json()}".encode())
    return (
        f"along={mapping.along!r}, batch_axis={mapping.batch_axis}, shards={mapping.shards}, "
        f"pipeline={mapping.pipeline!r}, layouts {layouts.hexdigest()[:12]}"
    )
