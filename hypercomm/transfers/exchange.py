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
from hypercomm.process_groups.world import Scope, World, digest_of
from hypercomm.transfers.mapping import RankMapping
from hypercomm.transfers.tensors import as_bytes

_LONGEST_S = 365 * 86_400.0
"""A wait without a limit is as long as this, because torch cannot count in larger numbers."""


@lru_cache(maxsize=128)
def ranks_of(mapping: RankMapping) -> tuple[int, ...]:
    """Return the ranks of the sending and the receiving stage, ascending."""
    return tuple(sorted({*mapping.source_ranks, *mapping.target_ranks}))


@lru_cache(maxsize=128)
def details(mapping: RankMapping) -> str:
    """Return the properties of a mapping that must be equal on all ranks, and that titles omit."""
    layouts = digest_of((mapping.source.to_json(), mapping.target.to_json()))
    return (
        f"along={mapping.along!r}, batch_axis={mapping.batch_axis}, shards={mapping.shards}, "
        f"leaders={mapping.leaders}, backward={mapping.backward}, sizes={mapping.sizes}, "
        f"pipeline={mapping.pipeline!r}, layouts {layouts}"
    )


class Exchange:
    """The agreements of the ranks of a transfer, and their exchanges of descriptions.

    Args:
        world: The world of the ranks in the mapping.
        mapping: The mapping of the transfer.

    Attributes:
        ranks: The ranks of the sending and the receiving stage, ascending.
    """

    def __init__(self, world: World, mapping: RankMapping) -> None:
        self.world = world
        self.mapping = mapping
        self.ranks = ranks_of(mapping)

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
        try:
            agree(self._scope(), f"transfer of {what}", proposal, self.world.limit_s(None))
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
        except BaseException as error:  # the caller's dicts and torch may raise any error
            if not isinstance(error, PlanMismatchError):
                refuse(self._scope(), error)
            raise

    def _scope(self) -> Scope:
        return Scope(self.world, f"transfers/{digest_of(self.ranks)}", self.ranks)

    @contextlib.contextmanager
    def alone(self, key: object) -> Iterator[None]:
        """Make a `with` block that only one thread of this rank at a time can enter with a key.

        Args:
            key: A value that is equal for transfers whose messages ranks cannot tell apart.

        Raises:
            CreationError: Another thread is in a block with an equal key.
        """
        place = (self.world, key)
        if _running.setdefault(place, self) is not self:
            raise CreationError(
                f"nothing was sent: another thread of this rank makes a transfer between the same "
                f"ranks, and this one is {self.mapping}; make one transfer after the other, in the "
                f"same order on all ranks"
            )
        try:
            yield
        finally:
            del _running[place]

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
            JSON by rank, ascending, padded with zeros. `read_json` returns the value.

        Raises:
            RuntimeError: A rank has not sent its value within the timeout of the world, or is gone.
        """
        ranks = self.ranks if self.world.has_store else (self.world.rank,)
        at = ranks.index(self.world.rank)
        order = ranks[at:] + ranks[:at]  # this rank is first
        tag = tag_of(f"{purpose} {details(self.mapping)} {ranks} {size}")
        filled = bytearray(json.dumps(value).encode().ljust(size, b"\0"))
        blocks = torch.zeros(len(order), size, dtype=torch.uint8)
        blocks[0] = torch.frombuffer(filled, dtype=torch.uint8)
        blocks = blocks.to(device)
        until = time.monotonic() + self.world.limit_s(None)  # one limit for all rounds
        known = 1
        while known < len(order):
            more = min(known, len(order) - known)
            receives = [(order[known], blocks[known : known + more])]
            sends = [(order[-known], blocks[:more])]
            for work in post(receives, sends, self.world.pg, tag):
                left_s = min(max(until - time.monotonic(), 0.001), _LONGEST_S)
                work.wait(timedelta(seconds=left_s))
            known += more
        rows = blocks.cpu().numpy()
        return dict(sorted((rank, row.tobytes()) for rank, row in zip(order, rows, strict=True)))


_running: dict[tuple[World, object], Exchange] = {}
"""The transfers that threads of this process are making, by world and key."""

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


def read_json(block: bytes) -> Any:
    """Return the value of a padded block of JSON."""
    return json.loads(block.rstrip(b"\0"))
