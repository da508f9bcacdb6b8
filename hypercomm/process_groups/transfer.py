"""The transfer: a tensor moves between the ranks of the running job, as a RankMapping says.

All is checked before anything is sent. Then each rank posts what it receives and what it sends at
once, so no order of the ranks can let two wait for each other.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import starmap

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from hypercomm.errors import LayoutError, NotInitializedError, WorldSizeError
from hypercomm.layout import RankMapping
from hypercomm.layout.axes import Axis, are_nested
from hypercomm.layout.messages import shown
from hypercomm.process_groups.options import as_verified
from hypercomm.process_groups.rehearsal import rehearse

Pieces = dict[int, Tensor]
"""Views of parts of a tensor, by the rank at the other end: a pair of ranks has one message."""

Route = tuple[tuple[int, tuple[slice, ...]], ...]
"""The rank at the other end of each message, and where it lies in this rank's tensor."""


@attrs.frozen
class _Duty:
    """What a mapping asks of a rank, whatever the tensor.

    Attributes:
        sends_to: Whom it sends to; None where it is not on the stage that sends.
        receives_from: Whom it receives from, if it is on the stage that receives.
        siblings: Who wants the same, itself included; () where it is not on that stage.
        is_led: Whether the first of the siblings alone receives, and broadcasts.
        last_rank: The largest rank of the mapping.
    """

    sends_to: tuple[int, ...] | None
    receives_from: tuple[int, ...]
    siblings: tuple[int, ...]
    is_led: bool
    last_rank: int

    def peers(self, rank: int) -> frozenset[int]:
        """The ranks that this one exchanges something with."""
        others = {*(self.sends_to or ()), *self.receives_from}
        if self.is_led:
            others |= set(self.siblings if rank == self.siblings[0] else self.siblings[:1])
        return frozenset(others - {rank})


@attrs.frozen
class _Plan:
    """What one rank does: what it receives and from whom, what it sends, and who broadcasts."""

    received: Tensor | None
    receives: Pieces
    sends: Pieces
    group: ProcessGroup | None
    siblings: tuple[int, ...]

    def words(self, rank: int) -> dict[int, list[str]]:
        """What this rank means to exchange with each other one."""
        words: dict[int, list[str]] = {}
        for peer, piece in self.sends.items():
            words.setdefault(peer, []).append(f"{rank} sends {peer} {_kind(piece)}")
        for peer, piece in self.receives.items():
            words.setdefault(peer, []).append(f"{peer} sends {rank} {_kind(piece)}")
        if self.group is not None and self.received is not None:
            leader = self.siblings[0]
            for peer in self.siblings if rank == leader else (leader,):
                text = f"{leader} broadcasts {_kind(self.received)}"
                words.setdefault(peer, []).append(text)
        words.pop(rank, None)
        return words


def transfer(
    mapping: RankMapping,
    tensor: Tensor | None,
    groups: ProcessGroup | None = None,
    *,
    out: Tensor | None = None,
    verify: bool | None = None,
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
    rank, is_verified = dist.get_rank(), as_verified(verify)
    duty = _duty(mapping, rank)
    if duty.last_rank >= dist.get_world_size():
        raise WorldSizeError(
            f"the mapping {mapping} needs ranks up to {duty.last_rank}, but the job has "
            f"{dist.get_world_size()} ranks"
        )
    if duty.sends_to is None and not duty.siblings:
        return None
    try:
        plan = _plan(mapping, rank, duty, tensor, groups, out)
    except LayoutError as error:
        if is_verified:
            rehearse(mapping, duty.peers(rank), str(error), _device_of(tensor))
        raise
    if is_verified:
        rehearse(mapping, duty.peers(rank), plan.words(rank), _device_of(tensor))
    with torch.no_grad():
        _exchange(plan)
        if plan.group is not None and plan.received is not None:
            _broadcast(plan.received.detach(), duty.siblings[0], plan.group)
    if plan.received is not None and not plan.received.is_inference():
        increment_version(plan.received)  # what is received is no operation that autograd sees
    return plan.received


# ---- what a mapping asks of a rank, worked out once ---------------------------------------------


@lru_cache(maxsize=128)
def _duty(mapping: RankMapping, rank: int) -> _Duty:
    siblings = mapping.broadcast_siblings(rank) if rank in mapping.target else ()
    is_source = rank in mapping.source and bool(mapping.gather_siblings(rank))
    return _Duty(
        sends_to=mapping.targets_of(rank) if is_source else None,
        receives_from=mapping.sources_of(rank) if siblings else (),
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


def _plan(
    mapping: RankMapping, rank: int, duty: _Duty, tensor: object, groups: object, out: object
) -> _Plan:
    """Check the arguments of this rank."""
    is_source, is_target = duty.sends_to is not None, bool(duty.siblings)
    group = _check_group(groups, duty, leaders=mapping.leaders)
    given = _as_tensor(tensor, "tensor")
    if not is_source or not is_target:
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
        for peer, part in _route_in(mapping, rank, tuple(received.shape)):
            receives[peer] = place[part]
    if sent is not None:
        plain = sent.detach().resolve_conj().resolve_neg()
        for peer, part in _route_out(mapping, rank, tuple(sent.shape)):
            sends[peer] = plain[part]
    return _Plan(received, receives, sends, group, duty.siblings)


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _as_tensor(value: object, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise LayoutError(f"{what} must be a torch.Tensor, got {shown(value)}")
    if value.layout is not torch.strided or value.device.type == "meta":
        raise LayoutError(
            f"{what} must be a dense tensor with data, got {value.layout} on {value.device}"
        )
    if value.is_quantized or value.is_nested:
        kind = "quantized" if value.is_quantized else "nested"
        raise LayoutError(f"{what} must be a plain tensor, got a {kind} one")
    return value


def _check_buffer(buffer: Tensor, what: str) -> None:
    """Check that what receives may be written to, and has each element in memory once."""
    steps = sorted(starmap(Axis, zip(buffer.shape, buffer.stride(), strict=True)), key=_stride)
    if buffer.numel() and not are_nested(steps):
        raise LayoutError(
            f"{what} must have each element at an address of its own, but shape "
            f"{tuple(buffer.shape)} has strides {buffer.stride()}; give a contiguous one"
        )
    if buffer.grad_fn is not None:
        raise LayoutError(
            f"{what} was computed from what requires a gradient, and may not be overwritten; give "
            f"another buffer, as torch.empty_like(...) makes"
        )


def _stride(axis: Axis) -> int:
    return axis.stride


def _device_of(tensor: object) -> torch.device:
    return tensor.device if isinstance(tensor, Tensor) else torch.device("cpu")


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
    if _may_share(tensor, buffer):
        raise LayoutError("out must share no element with tensor, which is still being sent")
    return buffer


def _may_share(one: Tensor, other: Tensor) -> bool:
    """Whether elements of both may be at one address; False for apart ones, columns and rows."""
    if not one.numel() or not other.numel():
        return False
    pitches = {stride * each.element_size() for each in (one, other) for stride in each.stride()}
    return all(_meet(one, other, pitch) for pitch in {0, *pitches})


def _meet(one: Tensor, other: Tensor, pitch: int) -> bool:
    """Whether the bytes of both meet in rows of this pitch laid above each other; 0: one row."""
    extents = []
    for each in (one, other):
        size = each.element_size()
        steps = zip(each.shape, each.stride(), strict=True)
        across = [(n - 1) * step * size for n, step in steps if not pitch or step * size % pitch]
        extents.append(sum(across) + size)
    ahead, behind = other.data_ptr() - one.data_ptr(), one.data_ptr() - other.data_ptr()
    if pitch:
        ahead, behind = ahead % pitch, behind % pitch
        return ahead < extents[0] or behind < extents[1]
    return ahead < extents[0] and behind < extents[1]


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
