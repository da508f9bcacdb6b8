"""The state: all parameters of a model move to other ranks, as from a trainer to inference.

They go in buckets, two of which are under way at a time. Small segments for one rank are packed
into one message, large ones go as they lie in memory; with checksums, which stand behind each
segment, all are packed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import attrgetter

import attrs
import torch
from torch import Tensor
from torch.distributed import Work

from hypercomm.errors import LayoutError, StateTransferError, TransferMismatchError
from hypercomm.layout import RankMapping
from hypercomm.layout.checks import as_int, world_too_small
from hypercomm.layout.text import shown
from hypercomm.process_groups.job import current
from hypercomm.process_groups.options import as_verified
from hypercomm.transfers.buckets import ALIGNMENT, LEAST_BUCKET, Parameter, Segment, segments
from hypercomm.transfers.consent import consent
from hypercomm.transfers.manifest import Manifest, read_manifest
from hypercomm.transfers.tensors import mark_written, post

BUCKET_BYTES = 64 << 20

_LARGE = 64 << 10
"""Bytes from which a segment is a message of its own, which no copy is made for."""


def transfer_state(
    mapping: RankMapping,
    state: Mapping[str, Tensor] | None = None,
    *,
    into: Mapping[str, Tensor] | None = None,
    shards: Mapping[str, Mapping[str, int]] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    start: int = 0,
    verify: bool | None = None,
) -> int | None:
    """Move all parameters of a model between ranks of the running job; all of both ends call it.

    First the ranks of both ends meet, and make sure that they mean the same parameters, shapes and
    dtypes: of the first difference all hear, and nothing was sent. Then the parameters go in the
    order of their names, in buckets. Each part comes from one of the ranks that have it: from the
    receiving one itself, else from the one that has sent the fewest bytes so far.

    Args:
        mapping: From which layout to which: one with `along=None`, as weights have no batch, and
            without leaders, as `RankMapping.weights` makes. With a pipeline, a stage's parameters
            are moved by a call for it, on a mapping of that stage's ranks (`at={"pp": 0}`).
        state: On a source rank its parts of the parameters, by name. Nothing is cast on the way:
            where `into` has another dtype, give `{name: one.bfloat16(), ...}`.
        into: On a target rank the tensors that receive, by name. On a rank of both ends, none may
            share memory with `state`, unless it keeps exactly what it has; memory that is mapped
            at two addresses is not noticed.
        shards: Which dims cut which parameters, and along which axis: {"*.qkv.weight": {"tp": 0},
            "*": {}}. Of patterns as in `fnmatch`, the first that matches a name counts. A dim that
            is not named replicates. Default: the mapping's own shards, for all.
        bucket_bytes: The most bytes that a rank sends and receives in one bucket. Two buckets are
            all the memory that is needed beside the tensors.
        start: The first bucket that is moved. Where one failed, all ranks go on from it, in a job
            that was initialised anew, or, where it was damaged, in the same.
        verify: Whether each segment is sent with a checksum, which the receiver compares, and
            whether all ranks hear at the end of one that differs. All ranks must say the same.
            Default: as the environment's HYPERCOMM_VERIFY says, "0" or "1".

    Returns:
        The number of buckets; None on a rank of neither end.

    Raises:
        NotInitializedError: torch.distributed is not initialised.
        WorldSizeError: The job has too few ranks.
        LayoutError: An argument does not fit.
        TransferMismatchError: Ranks differ or are missing; nothing was sent.
        StateTransferError: Communication failed, or what arrived is not what was sent; `bucket`
            says from which bucket to go on: all ranks from the smallest that one of them says.
        OutcomeUnknownError: The job's store is gone; restart the job.
        GroupOptionsError: `verify` is none of True, False and None.

    Every rank works out the whole plan, once for the same parameters: it takes time in proportion
    to the parameters and target ranks. What devices and backends are asked for, `transfer` says.

    Example:
        >>> from hypercomm import RankLayout
        >>> from hypercomm.testing import fake_world
        >>> mapping = RankMapping(RankLayout([1], ["tp"]), RankLayout([1], ["tp"]), along=None)
        >>> mine, theirs = {"w": torch.arange(3)}, {"w": torch.zeros(3, dtype=torch.int64)}
        >>> with fake_world(1):  # there is nobody else: it is copied, in no bucket
        ...     transfer_state(mapping, mine, into=theirs, shards={"*": {}})
        0
        >>> theirs["w"].tolist()
        [0, 1, 2]
    """
    job = current()
    is_source, is_target = _ends(mapping, job.rank, job.size)
    if not is_source and not is_target:
        return None
    try:
        is_verified = as_verified(verify)
        limit = _bucket_bytes(bucket_bytes)
        manifest = read_manifest(
            mapping, job.rank, state, into, shards, is_source=is_source, is_target=is_target
        )
        plan = _plan(manifest.parameters, limit, job.rank)
        start = _start(start, plan.buckets)
        mover = _Mover(manifest, plan, job.rank, is_verified=is_verified)
    except Exception as error:  # also of a dict that loads, and of memory that is not there
        consent(mapping, "", error)
        raise
    how = f"buckets of {limit} bytes from number {start} on, verify={is_verified}"
    interrupt = consent(mapping, "a state", entries=[*manifest.entries(), how])
    with torch.no_grad():
        damage = mover.move(start)
    for tensor in manifest.received.values():
        mark_written(tensor)
    if is_verified:
        _report(mapping, damage)
    if interrupt is not None:
        raise interrupt  # only now: the others had this rank's consent
    return plan.buckets


# ---- before anything is sent --------------------------------------------------------------------


def _ends(mapping: object, rank: int, size: int) -> tuple[bool, bool]:
    """Check the mapping, and say whether a rank sends, and whether it receives."""
    if not isinstance(mapping, RankMapping):
        raise LayoutError(f"mapping must be a RankMapping, got {shown(mapping)}")
    if mapping.along is not None or mapping.leaders:
        raise LayoutError(
            f"a state has no batch, and every replica of it takes part: make the mapping with "
            f"along=None and without leaders; got {mapping}"
        )
    last_rank = max(mapping.source.last_rank, mapping.target.last_rank)
    if last_rank >= size:
        raise world_too_small(f"the mapping {mapping}", last_rank, size)
    return rank in mapping.source_ranks, rank in mapping.target_ranks


def _bucket_bytes(value: object) -> int:
    number = as_int(value, "bucket_bytes")
    if number < LEAST_BUCKET:
        raise LayoutError(f"bucket_bytes must be at least {LEAST_BUCKET}, got {number}")
    return number


def _start(value: object, buckets: int) -> int:
    number = as_int(value, "start")
    if not 0 <= number <= buckets:
        raise LayoutError(f"start must be the number of a bucket, in 0 .. {buckets}, got {number}")
    return number


@attrs.frozen
class _Plan:
    """What one rank does.

    Attributes:
        buckets: How many buckets there are, on all ranks together.
        copies: What it copies to itself.
        sends: What it sends in each bucket, by target.
        receives: What it receives in each bucket, by source.
        room: The most bytes that it sends and receives in one bucket.
    """

    buckets: int
    copies: Sequence[Segment]
    sends: Sequence[Sequence[Segment]]
    receives: Sequence[Sequence[Segment]]
    room: int


@lru_cache(maxsize=4)
def _plan(parameters: tuple[Parameter, ...], bucket_bytes: int, rank: int) -> _Plan:
    copies: list[Segment] = []
    own: list[Segment] = []
    buckets = 0
    for segment in segments(parameters, bucket_bytes):
        buckets = max(buckets, segment.bucket + 1)
        if rank in (segment.source, segment.target):
            (copies if segment.bucket < 0 else own).append(segment)
    sends: list[list[Segment]] = [[] for _ in range(buckets)]
    receives: list[list[Segment]] = [[] for _ in range(buckets)]
    for segment in own:
        (sends if segment.source == rank else receives)[segment.bucket].append(segment)
    room = 0
    for sent, received in zip(sends, receives, strict=True):
        sent.sort(key=attrgetter("target"))  # which keeps the order of each rank's segments
        received.sort(key=attrgetter("source"))
        room = max(room, sum(segment.room for segment in (*sent, *received)))
    return _Plan(buckets, copies, sends, receives, room)


# ---- moving -------------------------------------------------------------------------------------


@attrs.frozen
class _Message:
    """What goes to another rank, or comes from one, in one bucket.

    Attributes:
        rank: The other rank.
        buffer: The bytes of all segments, one behind the other.
        parts: Each segment, and its bytes with those of its checksum; () if it needs no packing.
    """

    rank: int
    buffer: Tensor
    parts: Sequence[tuple[Segment, Tensor]]


@attrs.frozen
class _Bucket:
    """A bucket under way."""

    number: int
    received: Sequence[_Message]
    works: Sequence[Work]


@attrs.define
class _Damage:
    """The first segment that arrived with another checksum than it was sent with."""

    words: str
    bucket: int


class _Mover:
    """Moves what a plan asks of a rank."""

    def __init__(self, manifest: Manifest, plan: _Plan, rank: int, *, is_verified: bool) -> None:
        self.manifest, self.plan, self.rank, self.is_verified = manifest, plan, rank, is_verified
        self.damage: _Damage | None = None
        device = next(iter({**manifest.sent, **manifest.received}.values())).device
        self.pools = [
            torch.empty(plan.room, dtype=torch.uint8, device=device)
            for _ in range(min(2, plan.buckets))
        ]

    def move(self, start: int) -> _Damage | None:
        """Move all buckets from one on; return what of it arrived damaged."""
        for segment in self.plan.copies:
            there, here = self._there(segment), self._here(segment)
            if there.data_ptr() != here.data_ptr():
                there.copy_(here)
        before: _Bucket | None = None
        number = start
        try:
            for number in range(start, self.plan.buckets):
                bucket = self._begin(number)
                if before is not None:
                    self._finish(before)
                before = bucket
            if before is not None:
                self._finish(before)
        except RuntimeError as error:
            number = number if before is None else before.number
            raise StateTransferError(
                f"rank {self.rank} lost bucket {number} of {self.plan.buckets}: "
                f"{str(error).splitlines()[0]}; all before it have arrived here: initialise "
                f"torch.distributed anew, and go on with start={number}, or with the smallest "
                f"number that a rank says",
                bucket=number,
            ) from error
        return self.damage

    def _begin(self, number: int) -> _Bucket:
        """Pack what is sent in a bucket, and post all of it."""
        sent, received = self.plan.sends[number], self.plan.receives[number]
        pool, at = self.pools[number % 2], 0
        incoming, at = self._messages(received, pool, at, attrgetter("source"), self._there)
        outgoing, at = self._messages(sent, pool, at, attrgetter("target"), self._here)
        for message in outgoing:
            for segment, room in message.parts:
                self._pack(segment, room)
        works = post(
            [(message.rank, message.buffer) for message in incoming],
            [(message.rank, message.buffer) for message in outgoing],
        )
        return _Bucket(number, incoming, works)

    def _messages(
        self,
        segments: Sequence[Segment],
        pool: Tensor,
        at: int,
        peer: attrgetter[int],
        find: Callable[[Segment], Tensor],
    ) -> tuple[list[_Message], int]:
        """Lay segments into a pool from a byte on, by rank; also return the first byte behind."""
        messages = []
        for rank, some in groupby(segments, key=peer):
            small = []
            for segment in some:
                if self.is_verified or segment.nbytes < _LARGE:
                    small.append(segment)
                    continue
                plain = _bytes_of(find(segment))
                if plain is not None:
                    messages.append(_Message(rank, plain, ()))
                    continue
                room = pool[at : at + segment.nbytes]
                messages.append(_Message(rank, room, [(segment, room)]))
                at += segment.room
            begin, rooms = at, []
            for segment in small:
                rooms.append((segment, pool[at : at + segment.room]))
                at += segment.room
            if rooms:
                messages.append(_Message(rank, pool[begin:at], rooms))
        return messages, at

    def _finish(self, bucket: _Bucket) -> None:
        """Wait for a bucket, and unpack what has come."""
        for work in bucket.works:
            work.wait()
        for message in bucket.received:
            for segment, room in message.parts:
                if self.is_verified:
                    self._compare(segment, room)
                self._there(segment).copy_(_as(self._there(segment), room, segment.nbytes))

    def _pack(self, segment: Segment, room: Tensor) -> None:
        here = self._here(segment)
        _as(here, room, segment.nbytes).copy_(here)
        if self.is_verified:
            room[segment.nbytes :].zero_()
            room[-ALIGNMENT:].view(torch.int64)[0] = _checksum(room)

    def _compare(self, segment: Segment, room: Tensor) -> None:
        expected = room[-ALIGNMENT:].view(torch.int64)[0].item()
        found = _checksum(room).item()
        if found != expected and self.damage is None:
            name = self.manifest.parameters[segment.parameter].name
            words = (
                f"parameter {name!r} did not arrive as it was sent: of {segment.nbytes} bytes from "
                f"rank {segment.source} to rank {segment.target}, in bucket {segment.bucket} of "
                f"{self.plan.buckets}, the checksum is {found:#x}, and was {expected:#x}; go on "
                f"with start={segment.bucket}, or with the smallest number that a rank says"
            )
            self.damage = _Damage(words, segment.bucket)

    def _here(self, segment: Segment) -> Tensor:
        name = self.manifest.parameters[segment.parameter].name
        return self.manifest.sent[name][segment.source_slices]

    def _there(self, segment: Segment) -> Tensor:
        name = self.manifest.parameters[segment.parameter].name
        return self.manifest.received[name][segment.target_slices]


def _bytes_of(tensor: Tensor) -> Tensor | None:
    """Return the bytes of a tensor where they lie; None where they are not in order."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.view(-1).view(torch.uint8)


def _as(tensor: Tensor, room: Tensor, nbytes: int) -> Tensor:
    """Return the bytes of a segment as what they are."""
    return room[:nbytes].view(tensor.dtype).view(tensor.shape)


def _checksum(room: Tensor) -> Tensor:
    """Add up all words of 8 bytes but those of the checksum: one wrong byte changes the sum."""
    return room[:-ALIGNMENT].view(torch.int64).sum()


_DAMAGED = "what was sent may not be whole"


def _report(mapping: RankMapping, damage: _Damage | None) -> None:
    """Let all ranks hear of damage at one of them.

    Raises:
        StateTransferError: There was some.
    """
    if damage is not None:
        error = StateTransferError(damage.words, bucket=damage.bucket)
        consent(mapping, "the end of a state", error, effect=_DAMAGED)
        raise error
    try:
        consent(mapping, "the end of a state", effect=_DAMAGED)
    except TransferMismatchError as error:
        said = re.search(r"start=(\d+), or with", str(error))
        bucket = int(said[1]) if said else 0
        raise StateTransferError(str(error), bucket=bucket) from error
