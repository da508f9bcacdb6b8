"""Communicates for transfers: agrees on a transfer, gathers descriptions, and posts messages."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from hypercomm.errors import CreationError, OutcomeUnknownError, PlanMismatchError
from hypercomm.process_groups.meeting import agree, refuse
from hypercomm.process_groups.world import Scope, World
from hypercomm.transfers.mapping import RankMapping


@lru_cache(maxsize=128)
def ranks_of(mapping: RankMapping) -> tuple[int, ...]:
    """Return the ranks of the sending and the receiving stage, ascending."""
    return tuple(sorted({*mapping.source_ranks, *mapping.target_ranks}))


@lru_cache(maxsize=128)
def details(mapping: RankMapping) -> str:
    """Return the properties of a mapping that must be equal on all ranks, and that titles omit."""
    layouts = hashlib.sha256(f"{mapping.source.to_json()} {mapping.target.to_json()}".encode())
    return (
        f"along={mapping.along!r}, batch_axis={mapping.batch_axis}, shards={mapping.shards}, "
        f"leaders={mapping.leaders}, backward={mapping.backward}, sizes={mapping.sizes}, "
        f"pipeline={mapping.pipeline!r}, layouts {layouts.hexdigest()[:12]}"
    )


class Exchange:
    """The agreements of the ranks of a transfer, and their exchanges of descriptions.

    Args:
        world: The world of the ranks in the mapping.
        mapping: The mapping of the transfer.
    """

    def __init__(self, world: World, mapping: RankMapping) -> None:
        self.world = world
        self.mapping = mapping
        self._ranks = ranks_of(mapping)

    def agree(self, what: str, *entries: str, effect: str = "nothing was sent") -> None:
        """Wait until all ranks of the transfer have joined and have proposed the same transfer.

        Args:
            what: A description of the data and of its movement, such as "a state from tp=2 at 0 to
                tp=1 at 2". All ranks must pass the same description.
            entries: Further descriptions that must be equal on all ranks.
            effect: The consequence of a failure for the data. The error begins with this text.

        Raises:
            PlanMismatchError: Ranks propose different transfers.
            GroupCreationTimeout: Ranks are missing.
            CreationError: A rank has failed.
            OutcomeUnknownError: The store is gone, and the other ranks may have continued.
        """
        proposal = [what, details(self.mapping), *entries]
        limit_s = self.world.limit_s(None)
        try:
            agree(self._scope(), f"transfer of {what}", proposal, limit_s)
        except CreationError as error:
            if not isinstance(error, OutcomeUnknownError):
                error.args = (f"{effect}: {error}",)
            raise

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Make a `with` block whose errors fail the next agreement of the other ranks.

        The other ranks raise a CreationError with the text of the error, and this rank does not
        wait. A PlanMismatchError is not passed on, because all ranks raise it.
        """
        try:
            yield
        except PlanMismatchError:
            raise
        except BaseException as error:  # the caller's dicts and torch may raise any error
            refuse(self._scope(), error)
            raise

    def _scope(self) -> Scope:
        digest = hashlib.sha256(str(self._ranks).encode()).hexdigest()[:12]
        return Scope(self.world, f"transfers/{digest}", self._ranks)

    def gather(
        self, purpose: str, value: object, size: int, device: torch.device
    ) -> dict[int, bytes]:
        """Gather a value from every rank of the transfer on every rank of the transfer.

        For n ranks, there are ceil(log2(n)) rounds. In each round, a rank sends all known values to
        one rank, and receives as many values from another rank. In a fake world, the result
        contains only the value of this rank.

        Args:
            purpose: The content of the values. Threads may gather for different purposes together.
            value: The value of this rank, for JSON.
            size: The size of the longest value as JSON. All ranks must pass the same size.
            device: The device on which the backend communicates.

        Returns:
            JSON by rank, padded with zeros. `read_json` returns the value.

        Raises:
            RuntimeError: A rank has not sent its value within the timeout of the world, or is gone.
        """
        ranks = self._ranks if self.world.has_store else (self.world.rank,)
        at = ranks.index(self.world.rank)
        count = len(ranks)
        known = 1
        tag = tag_of(f"{purpose} {details(self.mapping)} {ranks} {size}")
        filled = bytearray(json.dumps(value).encode().ljust(size, b"\0"))
        blocks = torch.zeros(count, size, dtype=torch.uint8)
        blocks[0] = torch.frombuffer(filled, dtype=torch.uint8)
        blocks = blocks.to(device)
        until = time.monotonic() + self.world.limit_s(None)  # one limit for all rounds
        while known < count:
            more = min(known, count - known)
            receives = [(ranks[(at + known) % count], blocks[known : known + more])]
            sends = [(ranks[(at - known) % count], blocks[:more])]
            for work in post(receives, sends, self.world.pg, tag):
                _wait(work, until)
            known += more
        rows = blocks.cpu().numpy()
        return {ranks[(at + turn) % count]: rows[turn].tobytes() for turn in range(count)}


# ---- threads ------------------------------------------------------------------------------------

_running: dict[tuple[World, object], object] = {}
"""The transfers that threads of this process are making, by world and key."""


@contextlib.contextmanager
def only_one(world: World, key: object, mapping: RankMapping) -> Iterator[None]:
    """Make a `with` block that only one thread at a time can enter with a key.

    Args:
        world: The world of the ranks.
        key: A value that is equal for transfers whose messages ranks cannot tell apart.
        mapping: The mapping of the transfer, for the error.

    Raises:
        CreationError: Another thread is in a block with an equal key.
    """
    place = (world, key)
    mine = object()
    if _running.setdefault(place, mine) is not mine:
        raise CreationError(
            f"nothing was sent: another thread of this rank makes a transfer between the same "
            f"ranks, and this one is {mapping}; make one transfer after the other, in the same "
            f"order on all ranks"
        )
    try:
        yield
    finally:
        del _running[place]


_CHECKED_WORDS = 1 << 20
"""The number of words of which `checksum` makes a copy."""

# ---- messages -----------------------------------------------------------------------------------


def tag_of(text: str) -> int:
    """Return a tag for messages.

    Backends that support tags match messages only between ranks that pass the same text.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def post(
    receives: Iterable[tuple[int, Tensor]],
    sends: Iterable[tuple[int, Tensor]],
    pg: ProcessGroup | None,
    tag: int = 0,
) -> list[Work]:
    """Start all receives and sends together. Messages between two ranks are matched in order.

    The tensors must be contiguous. Empty tensors are skipped. NCCL ignores the tag.
    """
    ends = (dist.irecv, receives), (dist.isend, sends)
    ops = [
        dist.P2POp(start, as_bytes(one), rank, pg, tag)
        for start, some in ends
        for rank, one in some
        if one.numel()
    ]
    return dist.batch_isend_irecv(ops) if ops else []


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes, because backends lack some dtypes."""
    # A tensor of one element may have strides that do not allow a view as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def checksum(tensor: Tensor) -> int:
    """Return a checksum of the bytes of a tensor, of 64 bits.

    It detects a change of one word of 8 bytes, and detects that words have other positions.
    """
    data = as_bytes(tensor.contiguous())
    count = min(_CHECKED_WORDS, -(-data.numel() // 8))
    words = torch.zeros(count, dtype=torch.int64, device=data.device)
    weights = 2 * torch.arange(count, device=data.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for some in torch.split(data, 8 * count or 1):
        words.zero_().view(torch.uint8)[: some.numel()] = some
        total = 31 * total + (words * weights).sum()
    return int(total.item()) % 2**64


def read_json(block: bytes) -> Any:
    """Return the value of a padded block of JSON."""
    return json.loads(block.rstrip(b"\0"))


def _wait(work: Work, until: float) -> None:
    """Wait for a message until a time of `time.monotonic`."""
    left_s = until - time.monotonic()
    if left_s < timedelta.max.total_seconds():
        work.wait(timedelta(seconds=max(left_s, 0.001)))
    else:
        work.wait()
