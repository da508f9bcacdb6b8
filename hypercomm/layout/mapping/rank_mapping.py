"""RankMapping: who sends what to whom when a tensor moves from one layout to another.

Everything about one rank is arithmetic on the two layouts; the table of all messages is vectorised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import starmap
from typing import Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.mapping.cuts import Cut, Message, as_lengths, resolve_axes
from hypercomm.layout.mapping.dim_roles import (
    as_dim,
    as_shards,
    check_roles,
    dims_of_axes,
    zigzag_dims,
)
from hypercomm.layout.mapping.looks import AnyLayout, MappingLooks, as_layout, part_of
from hypercomm.layout.mapping.messages import Messages
from hypercomm.layout.mapping.sharding import Sharding
from hypercomm.layout.rank_layout import RankLayout
from hypercomm.layout.reading.checks import as_few, as_flag, as_int
from hypercomm.layout.reading.shown import shown
from hypercomm.layout.reading.signatures import with_own_names

Given = int | str | tuple[str, int]
"""A tensor axis, "zigzag", or ("zigzag", axis)."""


@with_own_names
@attrs.frozen(repr=False, init=False)
class RankMapping(MappingLooks):
    """Who sends what to whom, when a tensor spread over one layout is wanted over another.

    The batch is split along one dim, further dims may cut further axes, and every other dim
    replicates the tensor. It leaves the last pipeline stage of the source, and enters the first of
    the target. Each element that a target rank wants comes from exactly one source rank: itself,
    where it has the part; else one of the replicas that have it. These share the work in number of
    messages, not in bytes: of n ranks that want a part of what R have, none serves more than
    ceil(n / R) others.

    It is a value: frozen, hashable and picklable, and needs no torch; `hypercomm.transfer` moves
    tensors by it. The layouts may lie beside each other, overlap, or be on the same ranks.

    Args:
        source: Where the tensor is: a layout, a grid, or sizes as text, for ranks from 0 on.
        target: Where it is wanted, likewise.
        along: The dim that splits the batch. Of its sizes, one must be a multiple of the other. A
            dim that a layout lacks has size 1 there. None: there is no batch, as in a weight.
        batch_axis: The tensor axis of the batch; -1 is the last.
        shards: Further dims that cut the tensor, and the axis of each, in contiguous blocks. Dims
            may cut the same axis: `along` is outermost, then they are in the order given. Any size
            may become any other. Default: where there is a batch, "cp" cuts the sequence: axis 1,
            or 0 if the batch is 1. {"cp": "zigzag"} is that axis in Megatron's causal order, chunks
            i and 2 * cp - 1 - i on rank i of cp, {"cp": ("zigzag", 2)} another one. Where one end
            alone has it so, rename the dim at the other: {"cp": "zigzag", "sp": 1}.
        pipeline: The dim of the pipeline. None, or one that a layout lacks: all ranks take part.
        leaders: Whether of the ranks that have the same the first sends alone, and of those that
            want the same the first alone receives; the others get it from that one.
        backward: Whether the tensor goes from the first stage of the source to the last of the
            target, as gradients do: what `inverse()` makes.

    Raises:
        LayoutError: `source` or `target` is no layout, a dim is given two roles, an axis is no
            int, or neither size along the batch is a multiple of the other.
        UnknownDimError: A dim other than "dp", "cp" and "pp" is in neither layout; or `along` is,
            while dims without a role would replicate the tensor.

    Example:
        The source's ranks 0, 1 and 2, 3 hold the halves of the batch twice; the target's ranks
        4 .. 7 want a quarter each.

        >>> mapping = RankMapping(RankLayout.parse("tp=2,dp=2"), RankLayout([4], ["dp"], 4))
        >>> print(mapping)
        tp=2,dp=2 at 0 -> dp=4 at 4: fan-out 2 -> 4 along dp; tp replicates
        >>> [mapping.targets_of(rank) for rank in range(4)]
        [(4,), (5,), (6,), (7,)]
        >>> mapping.receives(5)[0].global_slices([12])
        (slice(3, 6, None),)

        A weight that tp=2 has cut goes to tp=3: each rank keeps what it has already.

        >>> here, there = RankLayout([2], ["tp"]), RankLayout([3], ["tp"])
        >>> weight = RankMapping(here, there, along=None, shards={"tp": 0})
        >>> [(message.source, message.target) for message in weight.receives(1)]
        [(0, 1), (1, 1)]
    """

    _messages: Messages = attrs.field(init=False, eq=False)

    def __init__(
        self,
        source: AnyLayout,
        target: AnyLayout,
        along: str | None = "dp",
        *,
        batch_axis: int = 0,
        shards: Mapping[str, Given] | Iterable[tuple[str, Given]] | None = None,
        pipeline: str | None = "pp",
        leaders: bool = False,
        backward: bool = False,
    ) -> None:
        source, target = as_layout(source, "source"), as_layout(target, "target")
        along = None if along is None else as_dim(along, "along")
        pipeline = None if pipeline is None else as_dim(pipeline, "pipeline")
        batch_axis = as_int(batch_axis, "batch_axis")
        sequence = 0 if batch_axis == 1 else 1
        if shards is None:
            dims = {*source.dim_names, *target.dim_names} - {along, pipeline}
            shards = {"cp": sequence} if along and "cp" in dims else {}
        pairs = as_shards(shards, sequence)
        flags = as_flag(leaders, "leaders"), as_flag(backward, "backward")
        self.__attrs_init__(source, target, along, batch_axis, pairs, pipeline, *flags)
        check_roles(source, target, along, batch_axis, pairs, pipeline)
        object.__setattr__(self, "_messages", self._work_out())

    @classmethod
    def weights(
        cls,
        source: AnyLayout,
        target: AnyLayout,
        shards: Mapping[str, Given] | Iterable[tuple[str, Given]] | None = None,
        *,
        at: Mapping[str, int] | None = None,
    ) -> RankMapping:
        """Map what has no batch, as weights; it enters all ranks of the target.

        Args:
            source: As for the class.
            target: Likewise.
            shards: Likewise. A dim of both that cuts at one alone, as dp of FSDP does, gets another
                name there: `layout.rename(dp="fsdp")`.
            at: Where in the source it is, as {"pp": 1} for a weight of that stage; default: on all.

        Example:
            >>> mapping = RankMapping.weights("tp=2,pp=2", "tp=4", {"tp": 0}, at={"pp": 1})
            >>> mapping.source_ranks, mapping.sources_of(3)
            ((2, 3), (3,))
        """
        return cls(part_of(source, at, "source"), target, None, shards=shards, pipeline=None)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The tensor axes that are cut, the batch's first if it is."""
        return self._messages.cuts

    @property
    def kind(self) -> Literal["equal", "fan-in", "fan-out"]:
        """Whether the batch keeps its number of shards along `along`, or has fewer or more."""
        before, after = (1, 1) if self.along is None else self._sizes(self.along)
        return "equal" if before == after else "fan-in" if before > after else "fan-out"

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The ranks that the tensor leaves, in the order of the layout."""
        return self._messages.before.ranks

    @property
    def target_ranks(self) -> tuple[int, ...]:
        """The ranks that the tensor enters, in the order of the layout."""
        return self._messages.after.ranks

    def inverse(self) -> RankMapping:
        """Return the way back, which gradients take: between the same stages.

        Each source rank gets the gradient of what it has from one of the target's replicas, which
        must agree, as they do after the all-reduce of tensor parallelism.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("pp=2"), RankLayout.parse("pp=2"))
            >>> mapping.source_ranks, mapping.inverse().target_ranks
            ((1,), (1,))
        """
        return attrs.evolve(
            self, source=self.target, target=self.source, backward=not self.backward
        )

    def table(self) -> NDArray[np.void]:
        """List all messages.

        Returns:
            A structured array, by source and then by target: "source" and "target" (ranks), and
            "start" and "stop" (units, one column for each of `cuts`).

        Raises:
            LayoutError: There are too many to list.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=2"), RankLayout([3], ["tp"], 2))
            >>> [row.tolist() for row in mapping.table()[["source", "target"]]]
            [(0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4)]
            >>> mapping.table()["start"].ravel().tolist()
            [0, 0, 0, 1, 1, 1]
        """
        return self._messages.table()

    # ---- one rank ---------------------------------------------------------------------------

    def sends(self, rank: int) -> tuple[Message, ...]:
        """Return what a rank sends, by target; () where it is not on the stage that sends.

        Args:
            rank: A rank of the source.

        Raises:
            RankOutsideError: The source does not hold `rank`.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> [message.target for message in mapping.sends(2)]
            [2, 3]
        """
        return self._messages.sent_by(rank)

    def receives(self, rank: int) -> tuple[Message, ...]:
        """Return what a rank receives, by source; () where it is not on the stage that receives.

        Args:
            rank: A rank of the target.

        Raises:
            RankOutsideError: The target does not hold `rank`.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> [(message.source, message.target) for message in mapping.receives(3)]
            [(2, 3), (3, 3)]
        """
        return self._messages.received_by(rank)

    def targets_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank sends to, ascending; arguments and errors as for `sends`."""
        return tuple(dict.fromkeys(message.target for message in self.sends(rank)))

    def sources_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank receives from, ascending; else as for `receives`."""
        return tuple(dict.fromkeys(message.source for message in self.receives(rank)))

    def shares(self, rank: int) -> dict[int, tuple[Fraction, Fraction]]:
        """Return which share of the whole batch, from where to where, a rank sends to whom.

        Raises:
            RankOutsideError: The source does not hold `rank`.

        Example:
            >>> RankMapping(RankLayout.parse("dp=2"), RankLayout([4], ["dp"], 2)).shares(1)
            {4: (Fraction(1, 2), Fraction(3, 4)), 5: (Fraction(3, 4), Fraction(1, 1))}
        """
        batch, messages = self._batch, self.sends(rank)
        if batch is None:
            return {message.target: (Fraction(0), Fraction(1)) for message in messages}
        return {
            message.target: (Fraction(part.start, batch.units), Fraction(part.stop, batch.units))
            for message in messages
            for part in message.parts[:1]
        }

    def slices(self, pair: Message | tuple[int, int], shape: Sequence[int]) -> tuple[slice, ...]:
        """Return what of a whole tensor goes from one rank to another.

        Args:
            pair: A message, or (source rank, target rank).
            shape: The whole tensor's, in elements.

        Returns:
            A slice for each axis of the tensor.

        Raises:
            RankOutsideError: A layout does not hold its rank.
            LayoutError: Nothing goes from the one to the other, the message is not one of this
                mapping's, a length cannot be cut evenly (the nearest that can are told), or an axis
                that is cut is not there.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=2"), RankLayout([4], ["dp"], 2))
            >>> mapping.slices((1, 4), [8, 5])
            (slice(4, 6, None), slice(None, None, None))
        """
        ranks = (pair.source, pair.target) if isinstance(pair, Message) else as_few(pair, "pair")
        if len(ranks) != 2:
            raise LayoutError(f"pair must be (source rank, target rank), got {shown(pair)}")
        source, target = ranks
        sent: dict[int, list[Message]] = {}
        for message in self.receives(target):
            sent.setdefault(message.source, []).append(message)
        if self._messages.before.shard_of(source) is None or source not in sent:
            senders = shown(tuple(sent))
            raise LayoutError(
                f"rank {source} sends nothing to rank {target}, which receives from {senders}"
            )
        found = sent[source]
        if isinstance(pair, Message) and pair not in found:
            raise LayoutError(
                f"{shown(pair)} is not of this mapping, in which rank {source} sends rank {target} "
                f"{', '.join(map(shown, found))}"
            )
        if not isinstance(pair, Message) and len(found) > 1:
            raise LayoutError(
                f"rank {source} sends rank {target} {len(found)} messages, as a dim cuts in "
                f"zigzag; give one of them"
            )
        return (pair if isinstance(pair, Message) else found[0]).global_slices(shape)

    def broadcast_siblings(self, rank: int) -> tuple[int, ...]:
        """Return the target's ranks that want the same elements as `rank`, itself included.

        The first is the leader, which receives where only leaders do. () where `rank` is not on
        the stage that receives.

        Raises:
            RankOutsideError: The target does not hold `rank`.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> mapping.broadcast_siblings(3)
            (2, 3)
        """
        return self._messages.after.replicas_of(rank)

    def gather_siblings(self, rank: int) -> tuple[int, ...]:
        """Return the source's ranks whose shares of the batch meet in one shard of the target.

        In the order of the batch, `rank` included; all else that they hold is alike. Where a shard
        of the target is not made of several whole ones, `rank` alone. () where it is not on the
        stage that sends.

        Raises:
            RankOutsideError: The source does not hold `rank`.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> mapping.gather_siblings(3)
            (2, 3)
        """
        before, batch = self._messages.before, self._batch
        shard = before.shard_of(rank)
        if shard is None:
            return ()
        if batch is None or batch.source % batch.target:
            return (int(rank),)
        own, *rest = shard.cell
        fan_in = batch.source // batch.target
        first = own // fan_in * fan_in
        cells = [(index, *rest) for index in range(first, first + fan_in)]
        return tuple(before.rank_at(cell, shard.replica) for cell in cells)

    def received_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what a target rank receives, from that of what a source rank has.

        Raises:
            LayoutError: A length cannot be cut evenly, or an axis that is cut is not there.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> mapping.received_shape([3, 5]), mapping.inverse().received_shape([6, 5])
            ((6, 5), (3, 5))
        """
        lengths = list(as_lengths(shape))
        for cut, axis in zip(self.cuts, resolve_axes(self.cuts, len(lengths)), strict=True):
            whole = cut.part(0, 0)
            whole.slice_of(lengths[axis], cut.source, held=cut.source_held)  # refuses odd lengths
            lengths[axis] = lengths[axis] * cut.sources // cut.targets
        return tuple(lengths)

    # ---- inside -------------------------------------------------------------------------------

    def _work_out(self) -> Messages:
        """Tell, once, how both layouts hold the tensor; an axis that neither cuts is left alone."""
        axes = dims_of_axes(self.along, self.batch_axis, self.shards).items()
        cuts = {axis: dims for axis, dims in axes if max(map(max, map(self._sizes, dims))) > 1}
        zigzag = zigzag_dims(self.shards)
        before, after = (
            Sharding(layout, tuple(cuts.values()), self._stage(layout, last=is_last), zigzag)
            for layout, is_last in ((self.source, not self.backward), (self.target, self.backward))
        )
        numbers = zip(cuts, before.shards, after.shards, before.held, after.held, strict=True)
        return Messages(before, after, tuple(starmap(Cut, numbers)), self.leaders)

    def _sizes(self, dim: str) -> tuple[int, int]:
        return self.source.size_of(dim, default=1), self.target.size_of(dim, default=1)

    def _stage(self, layout: RankLayout, *, last: bool) -> dict[str, int]:
        if self.pipeline is None or self.pipeline not in layout.dim_names:
            return {}
        return {self.pipeline: layout.size_of(self.pipeline) - 1 if last else 0}

    @property
    def _batch(self) -> Cut | None:
        """How the batch is cut, if it is."""
        cut = next(iter(self.cuts), None)
        return cut if cut and self.along is not None and cut.axis == self.batch_axis else None
