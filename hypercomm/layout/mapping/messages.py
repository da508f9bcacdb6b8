"""Messages: what goes from one sharding of a tensor to another, for one rank or as a table.

A cell of the source overlaps some cells of the target, and each replica of those wants the part in
common. (A rank has one cell, or several where a dim cuts in zigzag, and a message for each box that
two cells have in common.) These are the cell's consumers: n of them, the target's replicas varying
fastest, then the last axis that is cut. A consumer that has the cell itself is served by itself;
else consumer k is served by replica k * R // n of the R that the cell has. Among leaders, R is 1
and so are the target's replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.mapping.cuts import Cut, Message, overlapping
from hypercomm.layout.mapping.sharding import Shard, Sharding
from hypercomm.layout.reading.checks import LARGEST_WORLD

_MOST_MESSAGES = LARGEST_WORLD
"""The most messages that one call lists; more would hardly fit into memory."""


@attrs.frozen
class Messages:
    """The messages that bring a tensor from one sharding to another.

    Attributes:
        before: How the tensor is sharded.
        after: How it is wanted.
        cuts: The axes that are cut, in the order of the cells of both.
        leaders: Whether the first replica of each cell sends alone, to the first of each that
            wants it.

    Example:
        >>> from hypercomm import RankLayout
        >>> before = Sharding(RankLayout.parse("tp=2,dp=2"), [("dp",)])
        >>> after = Sharding(RankLayout([4], ["dp"], 4), [("dp",)])
        >>> messages = Messages(before, after, (Cut(axis=0, source=2, target=4),))
        >>> [message.target for message in messages.sent_by(3)]
        [7]
    """

    before: Sharding
    after: Sharding
    cuts: tuple[Cut, ...]
    leaders: bool = False

    def sent_by(self, rank: int) -> tuple[Message, ...]:
        """Return what a rank sends, by target; () where it sends nothing."""
        senders, receivers = self._replicas
        messages: list[Message] = []
        for here in self.before.shards_of(rank):
            if here.replica < senders:
                messages += self._sent_from(here, rank, senders, receivers)
        return tuple(sorted(messages, key=_by_target))

    def _sent_from(self, here: Shard, rank: int, senders: int, receivers: int) -> Iterator[Message]:
        """Return what a rank sends of one of its cells."""
        choices = [cut.targets_of(shard) for cut, shard in zip(self.cuts, here.cell, strict=True)]
        consumers = math.prod(map(len, choices)) * receivers
        first, last = (
            -(-replica * consumers // senders) for replica in (here.replica, here.replica + 1)
        )
        _refuse_too_many(last - first)
        for own in _shards_of(self.after, rank, receivers):
            if all(shard in some for shard, some in zip(own.cell, choices, strict=True)):
                yield self._message(here, own)
        for turn in range(first, last):
            rest, replica = divmod(turn, receivers)
            reversed_cell = []
            for shards in reversed(choices):
                rest, position = divmod(rest, len(shards))
                reversed_cell.append(shards[position])
            there = Shard(tuple(reversed_cell[::-1]), replica)
            theirs = _shards_of(self.before, self.after.rank_at(*there), senders)
            if all(shard.cell != here.cell for shard in theirs):  # else it serves itself
                yield self._message(here, there)

    def received_by(self, rank: int) -> tuple[Message, ...]:
        """Return what a rank receives, by source; () where it receives nothing."""
        senders, receivers = self._replicas
        own = {shard.cell: shard for shard in _shards_of(self.before, rank, senders)}
        messages: list[Message] = []
        for there in self.after.shards_of(rank):
            if there.replica < receivers:
                messages += self._received_at(there, own, senders, receivers)
        return tuple(sorted(messages, key=_by_source))

    def _received_at(
        self, there: Shard, own: Mapping[tuple[int, ...], Shard], senders: int, receivers: int
    ) -> Iterator[Message]:
        """Return what a rank receives of one cell, given what it has itself."""
        choices = [cut.sources_of(shard) for cut, shard in zip(self.cuts, there.cell, strict=True)]
        _refuse_too_many(math.prod(map(len, choices)))
        for cell in product(*choices):
            if cell in own:
                yield self._message(own[cell], there)
                continue
            position, cells = 0, 1
            for cut, source, target in zip(self.cuts, cell, there.cell, strict=True):
                shards = cut.targets_of(source)
                position = position * len(shards) + target - shards.start
                cells *= len(shards)
            turn = position * receivers + there.replica
            sender = turn * senders // (cells * receivers)
            yield self._message(Shard(cell, sender), there)

    def table(self) -> NDArray[np.void]:
        """List all messages, by source and then by target; a row is one of `RankMapping.table`."""
        senders, receivers = self._replicas
        _refuse_too_many(math.prod(cut.overlaps for cut in self.cuts) * receivers)
        pairs = [cut.pairs() for cut in self.cuts]
        boxes = math.prod(len(sources) for sources, _ in pairs)
        chosen = np.indices([len(sources) for sources, _ in pairs]).reshape(len(pairs), boxes)
        here, there, position = (np.zeros(boxes, dtype=np.int64) for _ in range(3))
        cells = np.ones(boxes, dtype=np.int64)
        bounds = np.empty((2, boxes, len(pairs)), dtype=np.int64)
        for axis, (cut, (sources, targets)) in enumerate(zip(self.cuts, pairs, strict=True)):
            source, target = sources[chosen[axis]], targets[chosen[axis]]
            first, stop = overlapping(source, cut.source, cut.target)
            here, there = here * cut.source + source, there * cut.target + target
            position, cells = position * (stop - first) + target - first, cells * (stop - first)
            wide, narrow = cut.units // cut.source, cut.units // cut.target
            np.maximum(source * wide, target * narrow, out=bounds[0, :, axis])
            np.minimum((source + 1) * wide, (target + 1) * narrow, out=bounds[1, :, axis])
        turn = position[:, None] * receivers + np.arange(receivers)
        sender = turn * senders // (cells[:, None] * receivers)
        columns = [(name, np.int64) for name in ("source", "target")]
        bound_columns = [(name, np.int64, (len(pairs),)) for name in ("start", "stop")]
        rows = np.empty(boxes * receivers, dtype=[*columns, *bound_columns])
        held = self.before.to_array()[:, :senders]
        wanted = self.after.to_array()[:, :receivers]
        targets = wanted[there]
        serves_itself = _are_in(targets, here[:, None], held)
        rows["source"] = np.where(serves_itself, targets, held[here[:, None], sender]).ravel()
        rows["target"] = targets.ravel()
        rows["start"], rows["stop"] = bounds.repeat(receivers, axis=1)
        starts = [rows["start"][:, axis] for axis in reversed(range(len(pairs)))]
        order = np.lexsort((*starts, rows["target"], rows["source"]))
        ordered: NDArray[np.void] = rows[order]
        return ordered

    @property
    def _replicas(self) -> tuple[int, int]:
        """How many replicas of a cell of the source send, and of the target receive."""
        return (1, 1) if self.leaders else (self.before.replicas, self.after.replicas)

    def _message(self, here: Shard, there: Shard) -> Message:
        slots = zip(self.before.slots_of(here.cell), self.after.slots_of(there.cell), strict=True)
        shards = zip(self.cuts, here.cell, there.cell, slots, strict=True)
        parts = tuple(cut.part(source, target, both) for cut, source, target, both in shards)
        return Message(self.before.rank_at(*here), self.after.rank_at(*there), parts)


def _shards_of(sharding: Sharding, rank: int, replicas: int) -> list[Shard]:
    """What any rank holds, if it is one of the first replicas of it, which take part."""
    found = sharding.shards_of(rank) if rank in sharding.layout else ()
    return [shard for shard in found if shard.replica < replicas]


def _by_target(message: Message) -> tuple[int, list[int]]:
    return message.target, [part.start for part in message.parts]


def _by_source(message: Message) -> tuple[int, list[int]]:
    return message.source, [part.start for part in message.parts]


def _are_in(
    ranks: NDArray[np.int64], rows: NDArray[np.int64], held: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether each rank is in its row of `held`; a rank may be in several."""
    world = 1 + max(int(ranks.max(initial=0)), int(held.max(initial=0)))
    keys = np.arange(len(held))[:, None] * world + held
    return np.isin(rows * world + ranks, keys)


def _refuse_too_many(messages: int) -> None:
    if messages > _MOST_MESSAGES:
        raise LayoutError(
            f"these are {messages} messages, more than the {_MOST_MESSAGES} that can be listed; "
            f"ask about single ranks, or give the mapping leaders=True"
        )
