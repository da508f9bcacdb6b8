"""Moves all parameters of a model to other ranks, for example from a trainer to inference.

The parameters are sent in buckets. At most two buckets are in progress at a time. A bucket consists
of segments. Each segment is one message, which contains either the contiguous bytes of a tensor or
a packed copy with room for a checksum.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor
from torch.distributed import Work

from hypercomm.errors import (
    CreationError,
    LayoutError,
    OutcomeUnknownError,
    PlanMismatchError,
    StateTransferError,
)
from hypercomm.layout.checks import as_int, as_ordered
from hypercomm.layout.text import did_you_mean, first_n, short_repr
from hypercomm.process_groups.options import as_verified
from hypercomm.process_groups.world import World, current
from hypercomm.transfers.buckets import LEAST_BUCKET, BucketPlan, Segment, plan_of
from hypercomm.transfers.exchange import (
    as_bytes,
    checksum,
    consent,
    details,
    gather,
    only_one,
    post,
    ranks_of,
    tag_of,
)
from hypercomm.transfers.holdings import (
    Fused,
    Held,
    assume,
    check_order,
    describe_dtensor,
    describe_plain,
    from_rows,
    misfit,
    name_of,
    put_together,
    replicas_of,
    to_rows,
)
from hypercomm.transfers.mapping import RankMapping, as_shards, format_ends
from hypercomm.transfers.transfer import (
    as_tensor,
    check_buffer,
    check_mapping,
    mark_written,
    memory_span,
    share_memory,
    writing_to,
)

BUCKET_BYTES = 64 << 20

_KEPT = 8
"""The number of plans that a rank keeps for each world."""

_HEAD_BYTES = 64
_DAMAGE_BYTES = 1024

Tensors = dict[str, Tensor]
T = TypeVar("T")


def transfer_state(
    mapping: RankMapping,
    state: Mapping[str, Tensor] | None = None,
    *,
    into: Mapping[str, Tensor] | None = None,
    shards: Mapping[str, Mapping[str, int]] | None = None,
    fused: Mapping[str, Sequence[str] | Fused] | None = None,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    start: int = 0,
    verify: bool | None = None,
    world: World | None = None,
) -> int | None:
    """Move all parameters of a model between ranks. All ranks of both layouts must call it.

    The ranks exchange descriptions of their tensors. If the names, shapes or dtypes at the source
    and the target do not fit, every rank raises and nothing is sent. Then the parameters are sent
    in buckets, in the order of their names. A rank that already has a part copies it. If several
    source ranks have another part, the rank that has sent the fewest bytes so far sends the part. A
    second call with the same names, shapes and mapping uses the plan of the first call.

    Args:
        mapping: The mapping between the layouts, as `RankMapping.weights` returns it. The mapping
            must have `along=None`, because weights have no batch, and `leaders=False`.
        state: On a source rank, the rank's parts of the parameters, by name. Each part is a DTensor
            on a mesh of source ranks, or a plain tensor that is split as in `shards`. A rank passes
            only the parameters that it has, such as its own experts. Equal names on two ranks are
            the same parameter.
        into: On a target rank, the DTensors or plain tensors to receive into, by name. A rank
            passes only the parameters that it needs. These tensors must not share memory with each
            other or with tensors of `state`. The only exception is a tensor that is in both
            arguments, because the rank sends and needs exactly the same part.
        shards: The dims that split the plain tensors of this rank, and the axis that each dim
            splits: {"*.qkv.weight": {"tp": 0}, "*": {}}. The keys are patterns as in `fnmatch`. The
            first pattern that matches a name applies. A dim without an axis replicates the tensor.
            Shards are in the order of the coordinates, and may have any lengths.
            Default: the shards of the mapping, for all parameters.
        fused: On a target rank, the parameters whose parts are several parameters of the source:
            {"*.gate_up.weight": ["*.gate.weight", "*.up.weight"]}. Each rank receives its shards of
            all parts, concatenated in this order. Pass a `hypercomm.Fused` instead of a list to
            specify the numbers of heads as well. With a single part, the parameter is only renamed.
        dtype: The type to which the sender converts floating-point tensors. In `into`, the
            converted tensors must have this type. All ranks must pass the same value. Default:
            nothing is converted, and the dtypes in `state` and `into` must be equal.
        bucket_bytes: The largest number of bytes that a rank sends and receives together in one
            bucket. A rank needs memory for two buckets in addition to the tensors.
        start: The index of the first bucket to move. To continue after a failure, all ranks pass
            the smallest `bucket` of their errors. If communication failed, first initialise
            torch.distributed again. If data was damaged, continue in the same job.
        verify: Whether to compare checksums. Source ranks compare their replicas, and every rank
            raises before anything is sent if two replicas differ. Receivers compare each segment,
            and every rank raises at the end if one differs. All ranks must pass the same value.
            Default: the environment variable HYPERCOMM_VERIFY, "0" or "1".
        world: The world of the ranks in the mapping. Default: the world of torch's WORLD group.

    Returns:
        The number of buckets, or None on a rank that is in neither layout.

    Raises:
        NotInitializedError: torch.distributed is not initialised.
        WorldSizeError: The job has too few ranks.
        LayoutError: An argument of this rank is invalid.
        PlanMismatchError: The arguments of two ranks, or `state` and `into`, do not fit, or, with
            `verify`, two replicas differ. Nothing was sent.
        GroupCreationTimeout, CreationError: Ranks are missing, a rank failed, or another thread of
            this rank transfers a state between the same ranks. Nothing was sent.
        StateTransferError: Communication failed, or data was damaged. The error names the
            parameters that may be partly written. To continue, all ranks pass the smallest `bucket`
            of their errors as `start`.
        OutcomeUnknownError: The job's store is gone. Restart the job.
        GroupOptionsError: `verify` is not True, False or None.

    Every rank computes the plan of all ranks, once for each set of parameters. This takes time
    proportional to the number of parameters and target ranks. `transfer` explains devices and
    backends. In a fake or simulated world, plain tensors are assumed to be even shards.

    Example:
        >>> from hypercomm import RankLayout
        >>> from hypercomm.testing import fake_world
        >>> mapping = RankMapping(RankLayout([1], ["tp"]), RankLayout([1], ["tp"]), along=None)
        >>> mine, theirs = {"w": torch.arange(3)}, {"w": torch.zeros(3, dtype=torch.int64)}
        >>> with fake_world(1):  # the only rank copies its parameter, without a bucket
        ...     transfer_state(mapping, mine, into=theirs, shards={"*": {}})
        0
        >>> theirs["w"].tolist()
        [0, 1, 2]
    """
    world = world or current()
    check_mapping(mapping, world.size)
    if mapping.along is not None or mapping.leaders:
        raise LayoutError(
            f"mapping must have along=None and leaders=False, because a state has no batch and all "
            f"replicas of its tensors take part; got {mapping}"
        )
    if world.rank not in ranks_of(mapping):
        return None
    with only_one(world, ("state", ranks_of(mapping)), mapping):
        try:
            start = as_int(start, "start", 0)
            how = _How(
                as_int(bucket_bytes, "bucket_bytes", LEAST_BUCKET), as_verified(verify), dtype
            )
            own = read_tensors(mapping, {True: state, False: into}, world.rank)
            key = (mapping, how, repr(shards), repr(fused), own.facts)
            plans = _plans.setdefault(world, {})
            kept = plans.get(key)
            about = (
                kept.about if kept else describe_tensors(mapping, own, shards, fused or {}, world)
            )
            ready = None if kept is None else _Mover(own, kept, world, how, start)
            sums = {}
            if how.is_verified:
                sums = {name: checksum(one) for name, one in own.sent.items()}
        except BaseException as error:  # the caller's dicts and torch may raise any error
            consent(world, mapping, "", error)
            raise
        what = f"a state {format_ends(mapping)}"
        interrupt = consent(world, mapping, what, entries=[f"{how}, from bucket {start}"])
        mover = _planned(world, mapping, own, about, how, start, ready)
        if mover is not ready:
            interrupt = consent(world, mapping, what, entries=[mover.kept.digest]) or interrupt
            plans[key] = mover.kept
            while len(plans) > _KEPT:
                plans.pop(next(iter(plans)))
        _compare_replicas(world, mapping, own, mover.kept, sums)
        with torch.no_grad(), writing_to(own.received.values()):
            mover.move(start)
        for tensor in own.received.values():
            mark_written(tensor)
        if how.is_verified:
            _share_damage(world, mapping, own, mover)
        if interrupt is not None:
            raise interrupt  # only now, because this rank had agreed to take part
        return mover.plan.buckets


# ---- arguments ----------------------------------------------------------------------------------


@attrs.frozen(str=False)
class _How:
    """The arguments that must be equal on all ranks, in addition to the mapping."""

    limit: int
    is_verified: bool
    dtype: torch.dtype | None = attrs.field()

    @dtype.validator
    def _check_dtype(self, _: object, dtype: object) -> None:
        if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            return
        raise LayoutError(f"dtype must be a floating-point dtype of torch, got {short_repr(dtype)}")

    def __str__(self) -> str:
        return f"buckets of {self.limit} bytes, verify={self.is_verified}, dtype={self.dtype}"


@attrs.frozen
class _Own:
    """The tensors of this rank.

    Attributes:
        given: `state` under the key True if this rank is a source, and `into` under the key False
            if this rank is a target.
        sent: The parts that this rank sends, by name. Empty if the rank is not a source.
        received: The parts that this rank receives into, by name. Empty if the rank is not a
            target.
        facts: The values on which the descriptions of the tensors depend.
        device: The device of all tensors.
    """

    given: Mapping[bool, Mapping[str, Any]]
    sent: Tensors
    received: Tensors
    facts: tuple[object, ...]
    device: torch.device


@attrs.frozen
class _About:
    """The descriptions of the tensors of this rank.

    Attributes:
        text: All descriptions as JSON, for the other ranks.
        cuts: The mapping of each plain tensor.
    """

    text: bytes
    cuts: Mapping[str, RankMapping]


def read_tensors(mapping: RankMapping, given: Mapping[bool, object], rank: int) -> _Own:
    """Check the tensors of this rank. `given` maps True to `state`, and False to `into`."""
    ends = {True: mapping.source_ranks, False: mapping.target_ranks}
    values = {
        end: _as_state(given[end], _WHAT[end], rank) for end, ranks in ends.items() if rank in ranks
    }
    tensors: dict[bool, Tensors] = {True: {}, False: {}}
    facts: list[object] = []
    for end, value in values.items():
        for name in sorted(value):
            what = f"{_WHAT[end]}[{name!r}]"
            tensor = value[name]
            is_sharded = _is_dtensor(tensor)
            with torch.no_grad():
                local = as_tensor(tensor.to_local() if is_sharded else tensor, what).detach()
            if not end:
                check_buffer(local, what)
            tensors[end][name] = local
            facts.append((end, name, local.shape, local.dtype))
            if is_sharded:
                _with_name(what, check_order, tensor)  # also if an equal mesh has a plan
                facts.append((tensor.shape, tensor.placements, tensor.device_mesh))
    devices = {one.device for some in tensors.values() for one in some.values()}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise LayoutError(f"all tensors of a rank must be on one device, found {names}")
    return _Own(values, tensors[True], tensors[False], tuple(facts), devices.pop())


def _with_name(what: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function, and add the name of a tensor to its error."""
    try:
        return function(*arguments)
    except LayoutError as error:
        raise type(error)(f"{what}: {error}") from error


def _as_state(value: object, what: str, rank: int) -> Mapping[str, Any]:
    names = list(value) if isinstance(value, Mapping) else []
    for name in names:
        if not isinstance(name, str):
            raise LayoutError(f"the names in {what}= must be texts, got {short_repr(name)}")
    if not isinstance(value, Mapping) or not names:
        advice = "; pass module.state_dict()" if hasattr(value, "state_dict") else ""
        raise LayoutError(
            f"rank {rank} must pass {what}=, a non-empty dict of tensors by name; got "
            f"{short_repr(value)}{advice}"
        )
    return value


def _is_dtensor(tensor: object) -> bool:
    return hasattr(tensor, "to_local")


def describe_tensors(
    mapping: RankMapping,
    own: _Own,
    shards: Mapping[str, Mapping[str, int]] | None,
    fused: Mapping[str, Sequence[str] | Fused],
    world: World,
) -> _About:
    """Describe the tensors of this rank."""
    patterns = {"*": mapping}
    if shards is not None:
        known = {
            cuts: attrs.evolve(mapping, shards=cuts, sizes=())
            for cuts in map(as_shards, shards.values())
        }
        patterns = {name: known[as_shards(cuts)] for name, cuts in shards.items()}
    matches = _match(patterns, sorted({*own.sent, *own.received}), "shards")
    cuts = {name: patterns[pattern] for name, pattern in matches.items()}
    rules = _match(fused, sorted(own.received), "fused") if own.received else {}
    rows = []
    for end, tensors in ((True, own.sent), (False, own.received)):
        described = []
        for name, local in tensors.items():
            facts = name, own.given[end][name], local, mapping, cuts, world, end
            held = _with_name(f"{_WHAT[end]}[{name!r}]", _held, *facts)
            if not end and name in rules:
                held = _with_parts(held, rules[name], fused[rules[name]])
            described.append(held)
        rows.append(to_rows(described))
    return _About(json.dumps(rows).encode(), cuts)


def _held(
    name: str,
    tensor: Any,
    local: Tensor,
    mapping: RankMapping,
    cuts: Mapping[str, RankMapping],
    world: World,
    is_source: bool,
) -> Held:
    """Describe a tensor of `state` or `into`. `cuts` maps names of plain tensors to mappings."""
    if _is_dtensor(tensor):
        ranks = mapping.source_ranks if is_source else mapping.target_ranks
        return describe_dtensor(name, tensor, local, ranks, is_numbered=not world.parts)
    if name not in cuts:
        raise LayoutError(
            "no pattern in shards= matches this name; add '*': {} as the last pattern for "
            "parameters that are not sharded"
        )
    facts = name_of(local.dtype), tuple(local.shape), cuts[name], world.rank
    return describe_plain(name, *facts, is_source=is_source)


_WHAT = {True: "state", False: "into"}


def _match(patterns: Mapping[str, object], names: Sequence[str], what: str) -> dict[str, str]:
    """Map each name to the first pattern that matches it. Names without a match are omitted."""
    unused = {pattern for pattern in patterns if pattern != "*"}
    found: dict[str, str] = {}
    for name in names:
        pattern = next((one for one in patterns if fnmatchcase(name, one)), None)
        if pattern is not None:
            found[name] = pattern
            unused.discard(pattern)
    if unused:
        near = f", such as {names[0]!r}" if names else ""
        raise LayoutError(
            f"the pattern {min(unused)!r} of {what}= matches no parameter, or only parameters that "
            f"an earlier pattern also matches; there are {len(names)} parameters{near}"
            f"{did_you_mean(min(unused), names)}"
        )
    return found


def _with_parts(held: Held, pattern: str, given: Sequence[str] | Fused) -> Held:
    """Return the description of a fused parameter, with the names of its parts."""
    what = f"fused[{pattern!r}]"
    if held.whole is not None:
        raise LayoutError(
            f"into[{held.name!r}] is a DTensor, but matches {what}; pass its to_local(), and "
            f"specify its sharding in shards="
        )
    rule = given if isinstance(given, Fused) else Fused(as_ordered(given, what))
    texts = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), held.name)
    parts = []
    for part in rule.parts:
        first, *more = part.split("*")
        if texts is None:
            raise LayoutError(f"the key of {what} may contain '*', but not '?' or '['")
        if len(more) > len(texts.groups()):
            raise LayoutError(f"{what} contains the part {part!r} with more '*' than the key")
        filled = zip(texts.groups(), more, strict=False)
        parts.append(first + "".join(text + piece for text, piece in filled))
    heads = None
    if rule.heads is not None:
        heads = tuple(as_int(one, f"each of the heads of {what}", 1) for one in rule.heads)
    if not parts or (heads is not None and len(heads) != len(parts)):
        raise LayoutError(
            f"{what} must contain one or more parts, and heads=, if given, must contain a number "
            f"for each part; got {len(parts)} parts and heads={heads}"
        )
    axes = len(held.shape)
    axis = as_int(rule.axis, f"the axis of {what}", -axes, axes - 1)
    return attrs.evolve(held, fused=(tuple(parts), heads, axis % axes))


# ---- the plan -----------------------------------------------------------------------------------


@attrs.frozen
class _Kept:
    """A plan that a rank keeps for later calls.

    Attributes:
        digest: A digest of the descriptions of all ranks.
        plan: The plan of this rank.
        about: The descriptions of this rank.
        replicas: With `verify`, the result of `replicas_of`.
    """

    digest: str
    plan: BucketPlan
    about: _About
    replicas: Sequence[tuple[str, tuple[int, ...]]] = ()


_plans: WeakKeyDictionary[World, dict[tuple[object, ...], _Kept]] = WeakKeyDictionary()
"""The plans of each world. The keys consist of the arguments of this rank."""


def _planned(
    world: World,
    mapping: RankMapping,
    own: _Own,
    about: _About,
    how: _How,
    start: int,
    ready: _Mover | None,
) -> _Mover:
    """Return `ready` if all ranks have kept the same plan. Otherwise, return a new mover."""
    try:
        texts = _exchange_texts(
            world, mapping, own, about, "" if ready is None else ready.kept.digest
        )
        if texts is None and ready is not None:
            return ready
        kept = _plan(world, mapping, about, texts or {world.rank: about.text}, how)
        return _Mover(own, kept, world, how, start)
    except PlanMismatchError:
        raise  # all ranks raise it, because they have the same descriptions
    except BaseException as error:
        consent(world, mapping, "", error)
        raise


def _exchange_texts(
    world: World, mapping: RankMapping, own: _Own, about: _About, digest: str
) -> dict[int, bytes] | None:
    """Return the descriptions of all ranks, or None if all ranks have a plan with this digest."""
    if not world.has_store:
        return None
    head = json.dumps([digest, len(about.text)]).encode()
    ends = world, mapping, own
    heads = [read_json(one) for one in _gather(*ends, "plans", head, _HEAD_BYTES).values()]
    if digest and all(other == digest for other, _ in heads):
        return None
    return _gather(*ends, "descriptions", about.text, max(size for _, size in heads))


def _gather(
    world: World, mapping: RankMapping, own: _Own, purpose: str, block: bytes, size: int
) -> dict[int, bytes]:
    try:
        return gather(world, mapping, f"{purpose} of a state", block, size, own.device)
    except RuntimeError as error:
        raise StateTransferError(
            f"{world.title(world.rank)} failed to exchange descriptions with the other ranks: "
            f"{_reason(error)}; no parameter was sent; {_advice(world)}"
        ) from error


def read_json(block: bytes) -> Any:
    """Return the value of a padded block of JSON."""
    return json.loads(block.rstrip(b"\0"))


def _plan(
    world: World, mapping: RankMapping, about: _About, texts: Mapping[int, bytes], how: _How
) -> _Kept:
    """Make the plan of this rank. All ranks raise the same error, or none does."""
    every = {rank: read_json(texts[rank]) for rank in sorted(texts)}
    sent, received = (
        {rank: from_rows(pair[end]) for rank, pair in every.items() if pair[end]} for end in (0, 1)
    )
    if not world.has_store:
        sent, received = _assumed(world.rank, about, sent, received)
    sources, targets = put_together(sent, received, how.dtype, mapping.before.stage)
    replicas = replicas_of(sources) if how.is_verified and world.has_store else []
    plan = plan_of(sources, targets, how.limit, world.rank)
    digest = hashlib.sha256(json.dumps([f"{details(mapping)} {how}", every]).encode())
    return _Kept(digest.hexdigest()[:32], plan, about, replicas)


def _assumed(
    rank: int, about: _About, sent: Mapping[int, list[Held]], received: Mapping[int, list[Held]]
) -> tuple[dict[int, list[Held]], dict[int, list[Held]]]:
    """Return the descriptions of all ranks of a fake world."""
    is_source = rank in sent
    both = assume((sent if is_source else received)[rank], about.cuts)
    return {**both[0], **sent}, {**both[1], **received}


def _compare_replicas(
    world: World, mapping: RankMapping, own: _Own, kept: _Kept, sums: Mapping[str, int]
) -> None:
    """Raise on all ranks if source ranks that have the same part have different elements.

    Args:
        world: The world of the ranks.
        mapping: The mapping of the transfer.
        own: The tensors of this rank.
        kept: The plan, with the replicas to compare.
        sums: The checksum of each tensor that this rank sends.
    """
    counts = Counter(rank for _, ranks in kept.replicas for rank in ranks)
    if not counts:
        return
    mine = [sums[name] for name, ranks in kept.replicas if world.rank in ranks]
    block = b"".join(one.to_bytes(8, "big") for one in mine)
    blocks = _gather(world, mapping, own, "checksums", block, 8 * max(counts.values()))
    seen: Counter[int] = Counter()  # how many checksums of each rank have been read
    wrong: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, ranks in kept.replicas:
        equal: dict[bytes, list[int]] = {}
        for rank in ranks:
            equal.setdefault(blocks[rank][8 * seen[rank] :][:8], []).append(rank)
            seen[rank] += 1
        if len(equal) > 1:
            wrong.setdefault(tuple(map(tuple, equal.values())), []).append(repr(name))
    if wrong:
        (some, others, *_), names = next(iter(wrong.items()))
        raise misfit(
            f"{first_n(names, 4)} in state= should be the same on all ranks that have the same "
            f"shard, but ranks {first_n(some, 8)} have other elements than ranks "
            f"{first_n(others, 8)}; if these are different parameters, such as the experts of two "
            f"ranks, give each one its own name"
        )


# ---- communication ------------------------------------------------------------------------------


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


class _Mover:
    """Executes the plan of a rank.

    The constructor allocates all memory. If there is too little memory, the constructor raises
    before data is sent.

    Attributes:
        damage: The error for the first segment with a wrong checksum, or None.
    """

    def __init__(self, own: _Own, kept: _Kept, world: World, how: _How, start: int) -> None:
        self.own = own
        self.world = world
        self.is_verified = how.is_verified
        self.kept = kept
        self.plan = plan = kept.plan
        self.tag = tag_of(f"state {kept.digest}") if world.has_store else 0
        self.damage: StateTransferError | None = None
        as_int(start, "start", 0, plan.buckets)
        self._check_overlaps()
        room = plan.room
        self.pools = [torch.empty(room, dtype=torch.uint8, device=own.device) for _ in range(2)]
        self.copies = [
            (
                own.received[one.name][one.target_slices],
                own.sent[one.source_name][one.source_slices],
            )
            for one in plan.copies
        ]
        self.buckets = [self._pieces(number) for number in range(plan.buckets)]

    def _check_overlaps(self) -> None:
        """Raise if a buffer shares memory with another tensor, except for a part that stays."""
        moved = {one.name for bucket in self.plan.receives for one in bucket}
        for one in self.plan.copies:
            if one.source_name != one.name or one.source_slices != one.target_slices:
                moved.add(one.name)
        ends = ((self.own.sent, True), (self.own.received, False))
        tensors = [
            (*memory_span(one), end, name, one) for some, end in ends for name, one in some.items()
        ]
        active: list[tuple[int, int, bool, str, Tensor]] = []
        for item in sorted(tensors, key=lambda item: item[:2]):
            active = [other for other in active if other[1] > item[0]]
            for other in active:
                pair = sorted((item, other), key=lambda each: each[2:4])
                (_, _, is_sent, name, buffer), (_, _, is_other_sent, other_name, tensor) = pair
                is_kept = is_other_sent and name == other_name and name not in moved
                if (
                    is_sent
                    or not share_memory(buffer, tensor)
                    or (is_kept and _place_of(buffer) == _place_of(tensor))
                ):
                    continue
                raise LayoutError(
                    f"into[{name!r}] shares memory with {_WHAT[is_other_sent]}[{other_name!r}], "
                    f"which is {'sent' if is_other_sent else 'also received into'}; pass another "
                    f"buffer"
                )
            active.append(item)

    def _pieces(self, number: int) -> tuple[list[_Piece], list[_Piece]]:
        """Return the pieces that this rank receives in a bucket, and the pieces that it sends."""
        received = self.plan.receives[number]
        sent = self.plan.sends[number]
        pieces = []
        at = 0
        for is_sent, segment in (
            *((False, one) for one in received),
            *((True, one) for one in sent),
        ):
            if is_sent:
                tensor = self.own.sent[segment.source_name][segment.source_slices]
            else:
                tensor = self.own.received[segment.name][segment.target_slices]
            is_as_it_is = tensor.is_contiguous() and tensor.dtype == segment.dtype
            if is_as_it_is and not self.is_verified:
                pieces.append(_Piece(segment, tensor, as_bytes(tensor)))
                continue
            room = segment.room if self.is_verified else segment.nbytes
            buffer = self.pools[number % 2][at : at + room]
            packed = buffer[: segment.nbytes].view(segment.dtype).view(tensor.shape)
            pieces.append(_Piece(segment, tensor, buffer, packed))
            at += segment.room
        return pieces[: len(received)], pieces[len(received) :]

    def move(self, start: int) -> None:
        """Copy the parts that stay on this rank, and move all buckets from `start` on."""
        for there, here in self.copies:
            if there.data_ptr() != here.data_ptr():
                there.copy_(here)
        done = start
        in_progress: deque[list[Work]] = deque()
        try:
            for number in range(start, self.plan.buckets):
                in_progress.append(self._begin(number))
                if len(in_progress) == 2:
                    self._finish(done, in_progress.popleft())
                    done += 1
            for works in in_progress:
                self._finish(done, works)
                done += 1
        except RuntimeError as error:
            raise self._lost(done, error) from error

    def _begin(self, number: int) -> list[Work]:
        """Start all messages of a bucket."""
        incoming, outgoing = self.buckets[number]
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

    def _finish(self, number: int, works: Sequence[Work]) -> None:
        """Wait for the messages of a bucket, and unpack the received ones."""
        for work in works:
            work.wait()
        for piece in self.buckets[number][0]:
            if self.is_verified:
                self._compare(piece.segment, piece.buffer)
            if piece.packed is not None:
                piece.tensor.copy_(piece.packed)

    def _lost(self, number: int, error: RuntimeError) -> StateTransferError:
        """Return the error for a bucket whose communication failed."""
        incoming, outgoing = self.buckets[number]
        ends = [
            (one.segment.nbytes, one.segment.name, "from", one.segment.source) for one in incoming
        ]
        ends += [
            (one.segment.nbytes, one.segment.name, "to", one.segment.target) for one in outgoing
        ]
        messages = [
            f"{nbytes} bytes of {name!r} {way} {self.world.title(rank)}"
            for nbytes, name, way, rank in ends
        ]
        left = self.plan.receives[number:]
        names = sorted({repr(segment.name) for bucket in left for segment in bucket})
        partly = f"; perhaps partly written: {first_n(names, 8)}" if names else ""
        return StateTransferError(
            f"{self.world.title(self.world.rank)} lost bucket {number} of {self.plan.buckets}, "
            f"with {first_n(messages, 4)}: {_reason(error)}; all earlier buckets have arrived on "
            f"this rank{partly}; {_advice(self.world)}, and {_CONTINUE.format(number)}",
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


def _place_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _advice(world: World) -> str:
    """Return the advice for all ranks after a communication failure."""
    if world.parts:
        return "call world.rejoin() on all ranks"
    return "initialise torch.distributed again"


def _share_damage(world: World, mapping: RankMapping, own: _Own, mover: _Mover) -> None:
    """Raise on all ranks if a rank received damaged data, naming the first damaged bucket."""
    damage = mover.damage
    found = None if damage is None else [damage.bucket, str(damage)[:800]]
    blocks = {world.rank: json.dumps(found).encode()}
    what = f"the end of a state {format_ends(mapping)}"
    effect = "the received data may be incomplete"
    try:
        if world.has_store:
            blocks = _gather(world, mapping, own, "damage", blocks[world.rank], _DAMAGE_BYTES)
    except BaseException as error:
        consent(world, mapping, what, error)
        raise
    try:
        consent(world, mapping, what, effect=effect)
    except OutcomeUnknownError:
        raise
    except CreationError as error:
        raise StateTransferError(str(error), bucket=mover.plan.buckets) from error
    damages = [one for one in map(read_json, blocks.values()) if one is not None]
    if damages:
        bucket, text = min(damages)
        raise StateTransferError(text, bucket=bucket)
