"""Exchange: the messages between two spreads of a tensor, for one rank or as a table.

A cell of the source overlaps some cells of the target, and each replica of those wants the part in
common. These are the cell's consumers: n of them, the target's replicas varying fastest, then the
last axis that is cut. Consumer k is served by replica k * R // n of the R that the cell has.
"""

from __future__ import annotations

import math
from itertools import product
from operator import attrgetter

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import LARGEST_WORLD
from hypercomm.layout.messages import shown
from hypercomm.layout.parts import Cut, Message
from hypercomm.layout.spread import Place, Spread

_MOST_MESSAGES = LARGEST_WORLD
"""The most messages that one call lists; more would hardly fit into memory."""


@attrs.frozen
class Exchange:
    """The messages that bring a tensor from one spread to another.

    Attributes:
        before: How the tensor is spread.
        after: How it is wanted.
        cuts: The axes that are cut, in the order of the cells of both.

    Example:
        >>> from hypercomm import RankLayout
        >>> before = Spread(RankLayout.parse("tp=2,dp=2"), (("dp",),), None)
        >>> after = Spread(RankLayout([4], ["dp"], 4), (("dp",),), None)
        >>> exchange = Exchange(before, after, (Cut(axis=0, source=2, target=4),))
        >>> [message.target for message in exchange.sends(3)]
        [7]
    """

    before: Spread
    after: Spread
    cuts: tuple[Cut, ...]

    def sends(self, rank: int, *, leaders: bool = False) -> tuple[Message, ...]:
        """Return what a rank sends, by target; as `RankMapping.sends`."""
        place, (senders, receivers) = self.before.place(rank), self._replicas(leaders)
        if place is None or (leaders and place.replica):
            return ()
        choices = [cut.targets_of(shard) for cut, shard in zip(self.cuts, place.cell, strict=True)]
        consumers = math.prod(map(len, choices)) * receivers
        first, last = (
            -(-replica * consumers // senders) for replica in (place.replica, place.replica + 1)
        )
        _refuse_too_many(last - first)
        messages = []
        for turn in range(first, last):
            rest, replica = divmod(turn, receivers)
            reversed_cell = []
            for shards in reversed(choices):
                rest, position = divmod(rest, len(shards))
                reversed_cell.append(shards[position])
            messages.append(self._message(place, Place(tuple(reversed_cell[::-1]), replica)))
        return tuple(sorted(messages, key=attrgetter("target")))

    def receives(self, rank: int, *, leaders: bool = False) -> tuple[Message, ...]:
        """Return what a rank receives, by source; as `RankMapping.receives`."""
        place, (senders, receivers) = self.after.place(rank), self._replicas(leaders)
        if place is None or (leaders and place.replica):
            return ()
        choices = [cut.sources_of(shard) for cut, shard in zip(self.cuts, place.cell, strict=True)]
        _refuse_too_many(math.prod(map(len, choices)))
        messages = []
        for cell in product(*choices):
            position, cells = 0, 1
            for cut, here, there in zip(self.cuts, cell, place.cell, strict=True):
                shards = cut.targets_of(here)
                position = position * len(shards) + there - shards.start
                cells *= len(shards)
            turn = position * receivers + place.replica
            sender = turn * senders // (cells * receivers)
            messages.append(self._message(Place(cell, sender), place))
        return tuple(sorted(messages, key=attrgetter("source")))

    def table(self, *, leaders: bool = False) -> NDArray[np.void]:
        """List all messages, by source and then by target; as `RankMapping.table`."""
        senders, receivers = self._replicas(leaders)
        _refuse_too_many(math.prod(cut.overlaps for cut in self.cuts) * receivers)
        pairs = [cut.pairs() for cut in self.cuts]
        boxes = math.prod(len(sources) for sources, _ in pairs)
        chosen = np.indices([len(sources) for sources, _ in pairs]).reshape(len(pairs), boxes)
        here, there, position = (np.zeros(boxes, dtype=np.int64) for _ in range(3))
        cells = np.ones(boxes, dtype=np.int64)
        bounds = np.empty((2, boxes, len(pairs)), dtype=np.int64)
        for axis, (cut, (sources, targets)) in enumerate(zip(self.cuts, pairs, strict=True)):
            source, target = sources[chosen[axis]], targets[chosen[axis]]
            first, count = _run_lengths(sources, targets, source)
            here, there = here * cut.source + source, there * cut.target + target
            position, cells = position * count + target - first, cells * count
            wide, narrow = cut.units // cut.source, cut.units // cut.target
            np.maximum(source * wide, target * narrow, out=bounds[0, :, axis])
            np.minimum((source + 1) * wide, (target + 1) * narrow, out=bounds[1, :, axis])
        turn = position[:, None] * receivers + np.arange(receivers)
        sender = turn * senders // (cells[:, None] * receivers)
        columns = [(name, np.int64) for name in ("source", "target")]
        bound_columns = [(name, np.int64, (len(pairs),)) for name in ("start", "stop")]
        rows = np.empty(boxes * receivers, dtype=[*columns, *bound_columns])
        rows["source"] = self.before.to_array()[here[:, None], sender].ravel()
        rows["target"] = self.after.to_array()[there, :receivers].ravel()
        rows["start"], rows["stop"] = bounds.repeat(receivers, axis=1)
        ordered: NDArray[np.void] = rows[np.lexsort((rows["target"], rows["source"]))]
        return ordered

    def _replicas(self, leaders: bool) -> tuple[int, int]:
        """How many replicas of a cell of the source send, and of the target receive."""
        if not isinstance(leaders, (bool, np.bool_)):
            raise LayoutError(f"leaders must be True or False, got {shown(leaders)}")
        return (1, 1) if leaders else (self.before.replicas, self.after.replicas)

    def _message(self, here: Place, there: Place) -> Message:
        shards = zip(self.cuts, here.cell, there.cell, strict=True)
        parts = tuple(cut.part(source, target) for cut, source, target in shards)
        return Message(self.before.rank_at(*here), self.after.rank_at(*there), parts)


def _run_lengths(
    sources: NDArray[np.int64], targets: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first target of each chosen source, and how many it has, of pairs sorted by source."""
    counts = np.bincount(sources)
    begins = np.cumsum(counts) - counts
    return targets[begins][chosen], counts[chosen]


def _refuse_too_many(messages: int) -> None:
    if messages > _MOST_MESSAGES:
        raise LayoutError(
            f"these are {messages} messages, more than the {_MOST_MESSAGES} that can be listed; "
            f"ask about single ranks, or with leaders=True"
        )
