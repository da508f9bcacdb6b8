"""Move all parameters of a model to other ranks, for example from a trainer to inference.

The parameters travel in buckets, at most two of which are in progress at a time. Each segment is a
message: the contiguous bytes of a tensor, or a packed copy with room for a checksum.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import zip_longest

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.distributed import Work

from hypercomm.errors import (
    CreationError,
    LayoutError,
    OutcomeUnknownError,
    StateTransferError,
)
from hypercomm.layout.checks import as_int
from hypercomm.layout.text import did_you_mean, shown
from hypercomm.process_groups.options import as_verified
from hypercomm.process_groups.world import World, current
from hypercomm.transfers.buckets import (
    LEAST_BUCKET,
    Parameter,
    Plan,
    Segment,
    plan_of,
)
from hypercomm.transfers.mapping import RankMapping
from hypercomm.transfers.transfer import (
    as_tensor,
    check_buffer,
    check_mapping,
    consent,
    mark_written,
    memory_span,
    post,
    shapes_of,
)

BUCKET_BYTES = 64 << 20

_CONTINUE = "continue on all ranks with the smallest start that one of them reports (start={})"

Tensors = dict[str, Tensor]


def transfer_state(
    mapping: RankMapping,
    state: Mapping[str, Tensor] | None = None,
    *,
    into: Mapping[str, Tensor] | None = None,
    shards: Mapping[str, Mapping[str, int]] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    start: int = 0,
    verify: bool | None = None,
    world: World | None = None,
) -> int | None:
    """Move all parameters of a model between ranks of the job; all ranks of both layouts call it.

    First the ranks check that they propose the same parameters, shapes and dtypes. On a difference,
    every rank raises and nothing is sent. Then the parameters are sent in the order of their names,
    in buckets. A rank that has a part already copies it. Otherwise the part comes from the rank
    that has sent the fewest bytes so far among those that have it.

    Args:
        mapping: The mapping between the layouts, with `along=None`, because weights have no batch,
            and without leaders, as `RankMapping.weights` makes it. With a pipeline, make one call
            for each stage, with a mapping of the ranks of that stage (`at={"pp": 0}`).
        state: On a source rank its parts of the parameters, by name. The dtype is not converted:
            if `into` has another one, pass `{name: tensor.bfloat16(), ...}`.
        into: On a target rank the tensors to receive into, by name. On a rank of both layouts, none
            may overlap a tensor of `state` in memory, unless the rank keeps exactly what it has.
        shards: The dims that cut each parameter, with the axis: {"*.qkv.weight": {"tp": 0},
            "*": {}}. The first pattern that matches a name applies, as in `fnmatch`. A dim without
            an axis replicates. Default: the shards of the mapping, for all parameters.
        bucket_bytes: The most bytes that a rank sends and receives in one bucket. Two buckets are
            the only memory that is needed in addition to the tensors.
        start: The first bucket to move. After a failed bucket, all ranks continue from it, in a job
            that was initialised again, or in the same job if the bucket was damaged.
        verify: Whether each segment is sent with a checksum, which the receiver compares. If one
            differs, every rank raises at the end. All ranks must pass the same value. Default: the
            environment variable HYPERCOMM_VERIFY, "0" or "1".
        world: The world whose ranks the mapping has. Default: that of WORLD.

    Returns:
        The number of buckets; None on a rank of neither layout.

    Raises:
        NotInitializedError: torch.distributed is not initialised.
        WorldSizeError: The job has too few ranks.
        LayoutError: An argument does not fit.
        PlanMismatchError: Ranks differ; nothing was sent.
        GroupCreationTimeout, CreationError: Ranks are missing, or one failed; nothing was sent.
        StateTransferError: Communication failed, or data was damaged. All ranks continue from the
            smallest `bucket` of their errors.
        OutcomeUnknownError: The job's store is gone; restart the job.
        GroupOptionsError: `verify` is not True, False or None.

    Every rank computes the whole plan, once for the same parameters. This takes time proportional
    to the number of parameters and target ranks. Devices and backends are those of `transfer`.

    Example:
        >>> from hypercomm import RankLayout
        >>> from hypercomm.testing import fake_world
        >>> mapping = RankMapping(RankLayout([1], ["tp"]), RankLayout([1], ["tp"]), along=None)
        >>> mine, theirs = {"w": torch.arange(3)}, {"w": torch.zeros(3, dtype=torch.int64)}
        >>> with fake_world(1):  # the only rank copies its parameter, in no bucket
        ...     transfer_state(mapping, mine, into=theirs, shards={"*": {}})
        0
        >>> theirs["w"].tolist()
        [0, 1, 2]
    """
    world = world or current()
    check_mapping(mapping, world.size)
    if mapping.along is not None or mapping.leaders:
        raise LayoutError(
            f"mapping must have along=None and no leaders, because a state has no batch and all "
            f"its replicas take part; got {mapping}"
        )
    is_source, is_target = world.rank in mapping.source_ranks, world.rank in mapping.target_ranks
    if not is_source and not is_target:
        return None
    try:
        is_verified = as_verified(verify)
        limit = as_int(bucket_bytes, "bucket_bytes", LEAST_BUCKET)
        patterns = {"*": mapping}
        if shards is not None:
            patterns = {name: attrs.evolve(mapping, shards=cuts) for name, cuts in shards.items()}
        model = _read(
            patterns,
            _read_tensors(state, "state", world.rank) if is_source else {},
            _read_tensors(into, "into", world.rank) if is_target else {},
            world.rank,
        )
        plan = plan_of(model.parameters, limit, world.rank)
        start = as_int(start, "start", 0, plan.buckets)
        mover = _Mover(model, plan, world, is_verified=is_verified)
    except Exception as error:  # including those of the caller's mappings, and of torch
        consent(world, mapping, "", error)
        raise
    how = f"buckets of {limit} bytes from number {start}, verify={is_verified}"
    interrupt = consent(world, mapping, "a state", entries=[*model.entries(), how])
    with torch.no_grad():
        mover.move(start)
    for tensor in model.received.values():
        mark_written(tensor)
    if is_verified:
        _share_damage(world, mapping, mover.damage)
    if interrupt is not None:
        raise interrupt  # only now, because the other ranks had this rank's consent
    return plan.buckets


# ---- arguments ----------------------------------------------------------------------------------


@attrs.frozen
class _Model:
    """The parameters of a model, and the tensors of this rank by name.

    Attributes:
        parameters: The parameters, in the order of their names.
        sent: The parts that this rank sends; empty if it is not a source.
        received: The parts that it receives into; empty if it is not a target.
    """

    parameters: tuple[Parameter, ...]
    sent: Tensors
    received: Tensors

    def entries(self) -> list[str]:
        """Describe the parameters; the lines must be equal on all ranks."""
        lines = [f"parameter {number} as {each}" for number, each in enumerate(self.parameters, 1)]
        return [*lines, f"no parameter {len(lines) + 1}"]


def _read(
    patterns: Mapping[str, RankMapping], sent: Tensors, received: Tensors, rank: int
) -> _Model:
    """Check the tensors of a rank against each other and against the patterns."""
    devices = {str(tensor.device) for tensor in (*sent.values(), *received.values())}
    if len(devices) > 1:
        raise LayoutError(f"all tensors of a rank must be on one device, found {sorted(devices)}")
    for name, buffer in received.items():
        check_buffer(buffer, f"into[{name!r}]")
    mappings = _match(patterns, sorted({*sent, *received}))
    here = _parameters(mappings, sent, is_source=True)
    there = _parameters(mappings, received, is_source=False)
    for one, other in zip_longest(here or there, there or here):
        if one != other:
            raise LayoutError(
                f"state and into differ on rank {rank}, which sends and receives: state has {one}, "
                f"into has {other}"
            )
    _check_overlaps(sent, received, mappings, rank)
    return _Model(here or there, sent, received)


def _match(patterns: Mapping[str, RankMapping], names: Sequence[str]) -> dict[str, RankMapping]:
    """Return the mapping of each name: that of the first pattern that matches it."""
    unused = {pattern for pattern in patterns if pattern != "*"}
    found: dict[str, RankMapping] = {}
    for name in names:
        pattern = next((one for one in patterns if fnmatchcase(name, one)), None)
        if pattern is None:
            raise LayoutError(
                f"no pattern in shards matches parameter {name!r}, got {shown([*patterns])}; add "
                f"'*': {{}} as the last one for parameters that are not sharded"
            )
        found[name] = patterns[pattern]
        unused.discard(pattern)
    if unused:
        raise LayoutError(
            f"the pattern {min(unused)!r} of shards matches no parameter that an earlier pattern "
            f"leaves; there are {len(names)}, such as {names[0]!r}"
            f"{did_you_mean(min(unused), names)}"
        )
    return found


def _read_tensors(value: object, what: str, rank: int) -> Tensors:
    """Return a state dict with checked tensors."""
    if not isinstance(value, Mapping) or not value:
        raise LayoutError(
            f"rank {rank} needs {what}, a dict of tensors by name that is not empty; got "
            f"{shown(value)}"
        )
    tensors: Tensors = {}
    for name, given in value.items():
        if hasattr(given, "to_local"):
            raise LayoutError(
                f"{what}[{name!r}] is a DTensor; pass its to_local(), and list in shards the dims "
                f"that cut it"
            )
        tensors[name] = as_tensor(given, f"{what}[{name!r}]").detach()
    return tensors


def _parameters(
    mappings: Mapping[str, RankMapping], tensors: Tensors, *, is_source: bool
) -> tuple[Parameter, ...]:
    """Return the parameters of which a rank has parts, in the order of their names."""
    parameters = []
    for name in sorted(tensors):
        tensor, mapping = tensors[name], mappings[name]
        try:
            shapes = shapes_of(mapping, tuple(tensor.shape), is_source=is_source)
        except LayoutError as error:
            raise type(error)(f"{'state' if is_source else 'into'}[{name!r}]: {error}") from error
        parameters.append(Parameter(name, *shapes, tensor.dtype, mapping))
    return tuple(parameters)


def _check_overlaps(
    sent: Tensors, received: Tensors, mappings: Mapping[str, RankMapping], rank: int
) -> None:
    """Raise if a buffer overlaps a tensor that is being sent, unless the rank keeps it in place."""
    names = list(sent)
    spans = np.array([memory_span(tensor) for tensor in sent.values()]).reshape(-1, 2)
    for name, buffer in received.items():
        begin, end = memory_span(buffer)
        for at in np.flatnonzero((spans[:, 0] < end) & (begin < spans[:, 1])):
            other = names[at]
            places = {
                (each.data_ptr(), each.shape, each.stride()) for each in (sent[other], buffer)
            }
            is_same = len(places) == 1 and mappings[other] == mappings[name]
            if not is_same or mappings[name].sources_of(rank) != (rank,):
                raise LayoutError(
                    f"into[{name!r}] overlaps state[{other!r}] in memory, which is being sent; "
                    f"pass another buffer"
                )


# ---- communication ------------------------------------------------------------------------------


@attrs.frozen
class _Piece:
    """The data of a segment on this rank.

    Attributes:
        segment: The segment.
        tensor: Its elements.
        buffer: The bytes that are sent or received: those of the tensor, or bytes of a pool.
        packed: The elements in the pool; None if the bytes are those of the tensor.
    """

    segment: Segment
    tensor: Tensor
    buffer: Tensor
    packed: Tensor | None = None


class _Mover:
    """Carries out the plan of a rank.

    Attributes:
        damage: The error for the first segment with a wrong checksum.
    """

    def __init__(self, model: _Model, plan: Plan, world: World, *, is_verified: bool) -> None:
        self.model, self.plan, self.is_verified = model, plan, is_verified
        self.rank, self.pg = world.rank, world.pg
        self.damage: StateTransferError | None = None
        device = next(iter({**model.sent, **model.received}.values())).device
        room = plan.room
        self.pools = [torch.empty(room, dtype=torch.uint8, device=device) for _ in range(2)]

    def move(self, start: int) -> None:
        """Copy the parts that stay, and move all buckets from one on."""
        for segment in self.plan.copies:
            here = self._part(segment, is_sent=True)
            there = self._part(segment, is_sent=False)
            if there.data_ptr() != here.data_ptr():
                there.copy_(here)
        done = start
        in_progress: deque[tuple[list[_Piece], list[Work]]] = deque()
        try:
            for number in range(start, self.plan.buckets):
                in_progress.append(self._begin(number))
                if len(in_progress) == 2:
                    self._finish(*in_progress.popleft())
                    done += 1
            for received, works in in_progress:
                self._finish(received, works)
        except RuntimeError as error:
            raise StateTransferError(
                f"rank {self.rank} lost bucket {done} of {self.plan.buckets}: "
                f"{str(error).splitlines()[0]}; all earlier ones have arrived on this rank: "
                f"initialise torch.distributed again, and {_CONTINUE.format(done)}",
                bucket=done,
            ) from error

    def _begin(self, number: int) -> tuple[list[_Piece], list[Work]]:
        """Start all messages of a bucket; return the pieces to receive, and the operations."""
        received, sent = self.plan.receives[number], self.plan.sends[number]
        pieces = []
        at = 0
        for segment in (*received, *sent):
            tensor = self._part(segment, is_sent=segment.source == self.rank)
            if tensor.is_contiguous() and not self.is_verified:
                pieces.append(_Piece(segment, tensor, tensor.view(-1).view(torch.uint8)))
                continue
            room = segment.room if self.is_verified else segment.nbytes
            buffer = self.pools[number % 2][at : at + room]
            packed = buffer[: segment.nbytes].view(tensor.dtype).view(tensor.shape)
            pieces.append(_Piece(segment, tensor, buffer, packed))
            at += segment.room
        incoming, outgoing = pieces[: len(received)], pieces[len(received) :]
        for piece in outgoing:
            if piece.packed is not None:
                piece.packed.copy_(piece.tensor)
            if self.is_verified:
                piece.buffer[piece.segment.nbytes :].zero_()
                words = piece.buffer.view(torch.int64)
                words[-2] = words[:-2].sum()  # the checksum: one wrong byte changes it
        works = post(
            [(piece.segment.source, piece.buffer) for piece in incoming],
            [(piece.segment.target, piece.buffer) for piece in outgoing],
            self.pg,
        )
        return incoming, works

    def _finish(self, received: Sequence[_Piece], works: Sequence[Work]) -> None:
        """Wait for the messages of a bucket, and unpack the received ones."""
        for work in works:
            work.wait()
        for piece in received:
            if self.is_verified:
                self._compare(piece.segment, piece.buffer)
            if piece.packed is not None:
                piece.tensor.copy_(piece.packed)

    def _compare(self, segment: Segment, buffer: Tensor) -> None:
        words = buffer.view(torch.int64)
        found, expected = words[:-2].sum().item(), words[-2].item()
        if found != expected and self.damage is None:
            self.damage = StateTransferError(
                f"parameter {self.model.parameters[segment.parameter].name!r} was damaged between "
                f"rank {segment.source} and rank {segment.target} in bucket {segment.bucket} of "
                f"{self.plan.buckets}: the checksum of {segment.nbytes} bytes is {found:#x}, "
                f"expected {expected:#x}; {_CONTINUE.format(segment.bucket)}",
                bucket=segment.bucket,
            )

    def _part(self, segment: Segment, *, is_sent: bool) -> Tensor:
        name = self.model.parameters[segment.parameter].name
        if is_sent:
            return self.model.sent[name][segment.source_slices]
        return self.model.received[name][segment.target_slices]


def _share_damage(world: World, mapping: RankMapping, damage: StateTransferError | None) -> None:
    """Raise on all ranks if one of them received damaged data."""
    title, effect = "the end of a state", "the received data may be incomplete"
    try:
        consent(world, mapping, title, damage, effect=effect)
    except OutcomeUnknownError:
        raise
    except CreationError as error:
        found = re.search(r"\(start=(\d+)\)", str(error))
        raise StateTransferError(str(error), bucket=int(found[1]) if found else 0) from error
    if damage is not None:
        raise damage
