"""Moves all parameters of a model to other ranks, for example from a trainer to inference.

The ranks describe their tensors, and compute the same plan from all descriptions. `buckets.py`
makes the plan, and `mover.py` executes it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from hypercomm.errors import (
    CreationError,
    LayoutError,
    OutcomeUnknownError,
    StateTransferError,
)
from hypercomm.layout.checks import as_int
from hypercomm.layout.text import did_you_mean, first_n, short_repr, summary_of
from hypercomm.process_groups.spec import as_verified
from hypercomm.process_groups.world import World, current, digest_of
from hypercomm.transfers.buckets import LEAST_BUCKET, BucketPlan, plan_of, segments
from hypercomm.transfers.exchange import Exchange, details, read_json, tag_of
from hypercomm.transfers.holdings import (
    Description,
    Fused,
    LocalTensors,
    describe_tensors,
    from_rows,
    read_tensors,
)
from hypercomm.transfers.mapping import RankMapping, check_mapping, format_ends
from hypercomm.transfers.matching import infer_remote_parts, match_tensors, misfit, replicas_of
from hypercomm.transfers.mover import Mover, advice_after_loss, check_overlaps
from hypercomm.transfers.tensors import checksum

BUCKET_BYTES = 64 << 20

_CACHED_PLANS = 8
"""The number of plans that a rank keeps for each world."""

_HEAD_BYTES = 64
_SUM_BYTES = 22
_DAMAGE_BYTES = 1024
"""The sizes of exchanged JSON: a digest and a length, a checksum with its comma, an error."""


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
            arguments, because the rank sends and needs exactly the same part. Views of one memory
            must have equal strides.
        shards: The dims that split the plain tensors of this rank, and the axis that each dim
            splits: {"*.qkv.weight": {"tp": 0}, "*": {}}. The keys are patterns as in `fnmatch`. The
            first pattern that matches a name applies. Each pattern must match a parameter of some
            rank, so all ranks may pass the same patterns. A dim without an axis replicates the
            tensor. Shards are in the order of the coordinates, and may have any lengths. Default:
            the shards of the mapping, for all parameters.
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
    exchange = Exchange(world, mapping)
    if world.rank not in exchange.ranks:
        return None
    with exchange.alone(("state", exchange.ranks)):
        with exchange.failing_together():
            start = as_int(start, "start", 0)
            options = TransferOptions(
                as_int(bucket_bytes, "bucket_bytes", LEAST_BUCKET), as_verified(verify), dtype
            )
            ends = ((True, mapping.source_ranks, state), (False, mapping.target_ranks, into))
            given = {is_sent: value for is_sent, ranks, value in ends if world.rank in ranks}
            tensors = read_tensors(given, world.rank)
            call = _StateTransfer(exchange, options, tensors, start)
            key = (mapping, options, repr(shards), repr(fused), tensors.facts)
            plans = _plans.setdefault(world, {})
            cached = plans.get(key)
            mover = None if cached is None else call.mover(cached)
            described = (
                cached.described
                if cached is not None
                else describe_tensors(mapping, tensors, shards, fused or {}, world)
            )
            checked = tensors.sent if options.is_verified else {}
            sums = {name: checksum(one) for name, one in checked.items()}
        what = f"a state {format_ends(mapping)}"
        exchange.agree(what, f"{options}, from bucket {start}")
        with exchange.failing_together():
            every = call.share(described, cached)
            if cached is None or mover is None or every is not None:
                cached = call.plan(described, every or {})
                mover = call.mover(cached)
        if plans.get(key) is not cached:
            exchange.agree(what, cached.digest)
            plans[key] = cached
            while len(plans) > _CACHED_PLANS:
                plans.pop(next(iter(plans)))
        call.compare_replicas(cached, sums)
        mover.copy()
        try:
            mover.move(start)
        except RuntimeError as error:
            raise mover.lost(error) from error
        if options.is_verified:
            call.share_damage(mover)
        return mover.plan.buckets


# ---- arguments ----------------------------------------------------------------------------------


@attrs.frozen(str=False)
class TransferOptions:
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


# ---- the plan -----------------------------------------------------------------------------------


def _check_patterns(every: Mapping[int, Any], names: Sequence[str]) -> None:
    """Raise if a pattern matches no parameter of any rank, because it may be misspelled."""
    for rank, (sent, received, unused) in every.items():
        own = {row[0] for row in (*sent, *received)}
        for what, pattern in unused:
            if not any(fnmatchcase(name, pattern) for name in names if name not in own):
                raise misfit(
                    f"the pattern {pattern!r} of {what}= on rank {rank} matches no parameter, or "
                    f"only parameters that an earlier pattern also matches; there are {len(names)} "
                    f"parameters, such as {names[0]!r}{did_you_mean(pattern, names)}"
                )


@attrs.frozen
class CachedPlan:
    """A plan that a rank keeps for later calls.

    Attributes:
        digest: A digest of the descriptions of all ranks.
        plan: The plan of this rank.
        described: The descriptions of this rank.
        replicas: With `verify`, the result of `replicas_of`.
    """

    digest: str
    plan: BucketPlan
    described: Description
    replicas: Sequence[tuple[str, tuple[int, ...]]]


_plans: WeakKeyDictionary[World, dict[tuple[object, ...], CachedPlan]] = WeakKeyDictionary()
"""The plans of each world. The keys consist of the arguments of this rank."""


@attrs.frozen
class _StateTransfer:
    """A call of `transfer_state` on this rank.

    Attributes:
        exchange: The agreements and exchanges of the ranks.
        options: The options of the call.
        tensors: The tensors of this rank.
        start: The index of the first bucket to move.
    """

    exchange: Exchange
    options: TransferOptions
    tensors: LocalTensors
    start: int

    def share(self, described: Description, cached: CachedPlan | None) -> dict[int, Any] | None:
        """Return the descriptions of all ranks, or None if all ranks have cached the same plan."""
        digest = "" if cached is None else cached.digest
        blocks = self._gather("plans", [digest, len(json.dumps(described.rows))], _HEAD_BYTES)
        heads = [*map(read_json, blocks.values())]
        if digest and all(other == digest for other, _ in heads):
            return None
        blocks = self._gather("descriptions", described.rows, max(size for _, size in heads))
        return {rank: read_json(block) for rank, block in blocks.items()}

    def _gather(self, purpose: str, value: object, size: int) -> dict[int, bytes]:
        try:
            return self.exchange.gather(f"{purpose} of a state", value, size, self.tensors.device)
        except RuntimeError as error:
            world = self.exchange.world
            raise StateTransferError(
                f"{world.title(world.rank)} failed to exchange descriptions with the other ranks: "
                f"{summary_of(error)}; no parameter was sent; {advice_after_loss(world)}"
            ) from error

    def plan(self, described: Description, every: Mapping[int, Any]) -> CachedPlan:
        """Make the plan of this rank. All ranks raise the same error, or none does."""
        world, mapping = self.exchange.world, self.exchange.mapping
        sent, received = (
            {rank: from_rows(pair[side]) for rank, pair in every.items() if pair[side]}
            for side in (0, 1)
        )
        if not world.has_store:
            held = (sent or received)[world.rank]
            others = infer_remote_parts(held, described.cuts)
            sent, received = {**others[0], **sent}, {**others[1], **received}
        names = {one.name for some in (*sent.values(), *received.values()) for one in some}
        _check_patterns(every, sorted(names))
        sources, targets = match_tensors(sent, received, self.options.dtype, mapping.before.stage)
        plan = plan_of(segments(sources, targets, self.options.limit), world.rank)
        digest = digest_of((details(mapping), str(self.options), every))
        replicas = replicas_of(sources) if self.options.is_verified and world.has_store else []
        return CachedPlan(digest, plan, described, replicas)

    def mover(self, cached: CachedPlan) -> Mover:
        """Return the object that moves the tensors of this rank, after the last checks."""
        as_int(self.start, "start", 0, cached.plan.buckets)
        check_overlaps(self.tensors, cached.plan.moved)
        sent, received, world = self.tensors.sent, self.tensors.received, self.exchange.world
        tag = tag_of(f"state {cached.digest}") if world.has_store else 0
        is_verified = self.options.is_verified and world.has_store  # else no data arrives
        return Mover(cached.plan, sent, received, world, tag, is_verified=is_verified)

    def compare_replicas(self, cached: CachedPlan, sums: Mapping[str, int]) -> None:
        """Raise on all ranks if source ranks that have the same part have different elements.

        Args:
            cached: The plan, with the replicas to compare.
            sums: The checksum of each tensor that this rank sends.
        """
        counts = Counter(rank for _, ranks in cached.replicas for rank in ranks)
        if not counts:
            return
        here = self.exchange.world.rank
        mine = [sums[name] for name, ranks in cached.replicas if here in ranks]
        blocks = self._gather("checksums", mine, _SUM_BYTES * max(counts.values()) + 2)
        left = {rank: iter(read_json(block)) for rank, block in blocks.items()}
        wrong: dict[tuple[tuple[int, ...], ...], list[str]] = {}
        for name, ranks in cached.replicas:
            equal: dict[int, list[int]] = {}
            for rank in ranks:
                equal.setdefault(next(left[rank]), []).append(rank)
            if len(equal) > 1:
                wrong.setdefault(tuple(map(tuple, equal.values())), []).append(repr(name))
        if wrong:
            (some, others, *_), names = next(iter(wrong.items()))
            raise misfit(
                f"{first_n(names, 4)} in state= should be the same on all ranks that have the same "
                f"shard, but ranks {first_n(some, 8)} have other elements than ranks "
                f"{first_n(others, 8)}; if these are different parameters, such as the experts of "
                f"two ranks, give each one its own name"
            )

    def share_damage(self, mover: Mover) -> None:
        """Raise on all ranks if a rank received damaged data, naming the first damaged bucket."""
        damage = mover.damage
        found = None if damage is None else [damage.bucket, str(damage)[:800]]
        with self.exchange.failing_together():
            blocks = self._gather("damage", found, _DAMAGE_BYTES)
        what = f"the end of a state {format_ends(self.exchange.mapping)}"
        try:
            self.exchange.agree(what, effect="the received data may be incomplete")
        except OutcomeUnknownError:
            raise
        except CreationError as error:
            raise StateTransferError(str(error), bucket=mover.plan.buckets) from error
        damages = [one for one in map(read_json, blocks.values()) if one is not None]
        if damages:
            bucket, text = min(damages)
            raise StateTransferError(text, bucket=bucket)
