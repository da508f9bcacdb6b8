"""The transfer: a tensor moves between the ranks of the running job, as a RankMapping says.

All is checked before anything is sent. Then each rank posts what it receives and what it sends at
once, so no order of the ranks can let two wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hypercomm.errors import LayoutError, NotInitializedError, WorldSizeError
from hypercomm.layout import RankMapping
from hypercomm.layout.messages import shown

Pieces = dict[int, Tensor]
"""Views of parts of a tensor, by the rank at the other end: a pair of ranks has one message."""


@attrs.frozen
class _Plan:
    """What one rank does: what it receives and from whom, what it sends, and who broadcasts."""

    received: Tensor | None
    receives: Pieces
    sends: Pieces
    group: ProcessGroup | None
    leader: int


def transfer(
    mapping: RankMapping,
    tensor: Tensor | None,
    groups: ProcessGroup | None = None,
    *,
    leaders: bool | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """Move a tensor as `mapping` says; arguments, result and errors as `RankMapping.transfer`.

    Example:
        >>> from hypercomm import RankLayout
        >>> from hypercomm.testing import fake_world
        >>> mapping = RankMapping(RankLayout([2], ["dp"]), RankLayout([4], ["dp"]))
        >>> with fake_world(4, rank=0):  # rank 0 keeps its first row, and sends the others
        ...     transfer(mapping, torch.tensor([[1, 2], [3, 4]])).tolist()
        [[1, 2]]
    """
    if not dist.is_initialized():
        raise NotInitializedError(
            "transfer() needs torch.distributed; call torch.distributed.init_process_group() first"
        )
    last_rank = max(mapping.source.last_rank, mapping.target.last_rank)
    if last_rank >= dist.get_world_size():
        raise WorldSizeError(
            f"the mapping {mapping} needs ranks up to {last_rank}, but the job has "
            f"{dist.get_world_size()} ranks"
        )
    if not (leaders is None or isinstance(leaders, bool)):
        raise LayoutError(f"leaders must be True, False or None, got {shown(leaders)}")
    plan = _plan(mapping, dist.get_rank(), tensor, groups, leaders, out)
    if plan is None:
        return None
    with torch.no_grad():
        _exchange(plan)
        if plan.group is not None and plan.received is not None:
            _broadcast(plan.received.detach(), plan.leader, plan.group)
    return plan.received


# ---- before anything is sent --------------------------------------------------------------------


def _plan(
    mapping: RankMapping,
    rank: int,
    tensor: object,
    groups: object,
    leaders: bool | None,
    out: object,
) -> _Plan | None:
    """Check the arguments of this rank; None where it has nothing to do."""
    siblings = mapping.broadcast_siblings(rank) if rank in mapping.target else ()
    is_source = rank in mapping.source and bool(mapping.gather_siblings(rank))
    if not siblings and not is_source:
        return None
    by_leaders = groups is not None if leaders is None else leaders
    group = _check_group(groups, siblings, by_leaders=by_leaders)
    given = _as_tensor(tensor, "tensor")
    if not is_source or not siblings:
        if out is not None:
            raise LayoutError(
                f"out is for ranks of both stages; rank {rank} is on one, and gives its tensor "
                f"as tensor"
            )
        sent, received = (given, None) if is_source else (None, given)
    else:
        sent, received = given, _buffer(mapping, given, out)
    for moving in (None, group):
        _check_device(given, moving)
    receives, sends = {}, {}
    if received is not None:
        _check_buffer(received, "tensor" if out is None else "out")
        place = received.detach()
        mapping.inverse().received_shape(received.shape)  # also where nothing comes but a broadcast
        for message in mapping.receives(rank, leaders=by_leaders):
            receives[message.source] = place[message.target_slices(received.shape)]
    if sent is not None:
        mapping.received_shape(sent.shape)
        plain = sent.detach().resolve_conj().resolve_neg()
        for message in mapping.sends(rank, leaders=by_leaders):
            sends[message.target] = plain[message.source_slices(plain.shape)]
    return _Plan(received, receives, sends, group, siblings[0] if siblings else rank)


def _as_tensor(value: object, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise LayoutError(f"{what} must be a torch.Tensor, got {shown(value)}")
    if value.layout is not torch.strided or value.device.type == "meta":
        raise LayoutError(
            f"{what} must be a dense tensor with data, got {value.layout} on {value.device}"
        )
    return value


def _check_buffer(buffer: Tensor, what: str) -> None:
    """Check that each element of what receives is in memory once."""
    steps = zip(buffer.shape, buffer.stride(), strict=True)
    if any(size > 1 and not stride for size, stride in steps):
        raise LayoutError(f"{what} must not be expanded: several of its elements are one in memory")


def _check_device(tensor: Tensor, group: ProcessGroup | None) -> None:
    """Check that a group has a backend for where a tensor is."""
    found = dist.get_backend_config(group)  # as in "cpu:gloo,cuda:nccl"
    devices = [entry.partition(":")[0] for entry in found.split(",")]
    if tensor.device.type not in devices:
        raise LayoutError(
            f"tensor is on {tensor.device}, but the process group that moves it has backends for "
            f"{', '.join(devices)}"
        )


def _buffer(mapping: RankMapping, tensor: Tensor, out: object) -> Tensor:
    """What receives on a rank that also sends."""
    shape = mapping.received_shape(tensor.shape)
    if out is None:
        return tensor.new_empty(shape)
    buffer = _as_tensor(out, "out")
    found = (tuple(buffer.shape), buffer.dtype, buffer.device)
    if found != (shape, tensor.dtype, tensor.device):
        raise LayoutError(
            f"out must have shape {shape}, {tensor.dtype} and device {tensor.device}, as follows "
            f"from tensor; it has {found[0]}, {found[1]} and {found[2]}"
        )
    first, second = _extent(tensor), _extent(buffer)
    if max(first.start, second.start) < min(first.stop, second.stop):
        raise LayoutError("out must not share memory with tensor, which is still being sent")
    return buffer


def _extent(tensor: Tensor) -> range:
    """The addresses from the first byte of a tensor to its last; none where it is empty."""
    if not tensor.numel():
        return range(0)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def _check_group(
    groups: object, siblings: Sequence[int], *, by_leaders: bool
) -> ProcessGroup | None:
    """Check the group in which this rank's leader broadcasts; None where there is nobody else."""
    if groups is not None and not by_leaders:
        raise LayoutError("groups is given, but leaders=False: then nobody broadcasts")
    if groups is not None and not isinstance(groups, ProcessGroup):
        raise LayoutError(f"groups must be a process group or None, got {shown(groups)}")
    if not siblings or not by_leaders or (groups is None and len(siblings) == 1):
        return None
    if groups is None:
        raise LayoutError(
            f"leaders=True needs groups, the process group of {tuple(siblings)}, which want the "
            f"same as this rank"
        )
    members = dist.get_process_group_ranks(groups)
    if sorted(members) != sorted(siblings):
        raise LayoutError(
            f"groups must hold the ranks {tuple(siblings)}, which want the same as this rank "
            f"(its broadcast_siblings), but it holds {tuple(members)}"
        )
    return groups


# ---- sending ------------------------------------------------------------------------------------


def _exchange(plan: _Plan) -> None:
    """Receive and send all at once, and keep what this rank sends to itself."""
    rank = dist.get_rank()
    landings: list[tuple[Tensor, Tensor]] = []
    ops: list[dist.P2POp] = []
    for source, place in sorted(plan.receives.items()):
        if source == rank:
            place.copy_(plan.sends[rank])
        elif place.numel():
            buffer = _plain(place)
            landings.append((place, buffer))
            ops.append(dist.P2POp(dist.irecv, buffer, source))
    for target, piece in sorted(plan.sends.items()):
        if target != rank and piece.numel():
            ops.append(dist.P2POp(dist.isend, piece.contiguous(), target))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    for place, buffer in landings:
        _land(place, buffer)


def _plain(place: Tensor) -> Tensor:
    """Return the tensor itself, or a new one, whose memory a collective can fill in order."""
    if place.is_contiguous() and not place.is_conj() and not place.is_neg():
        return place
    return torch.empty(place.shape, dtype=place.dtype, device=place.device)


def _land(place: Tensor, buffer: Tensor) -> None:
    if buffer is not place:
        place.copy_(buffer)


def _broadcast(received: Tensor, leader: int, group: ProcessGroup) -> None:
    """Give what the leader has received to the others of its group."""
    if not received.numel():
        return
    buffer = _plain(received)
    if buffer is not received and leader == dist.get_rank():
        buffer.copy_(received)
    dist.broadcast(buffer, leader, group)
    _land(received, buffer)
