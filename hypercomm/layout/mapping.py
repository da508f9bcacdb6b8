"""RankMapping: who sends what to whom when a tensor moves from one layout to another.

Everything about one rank is arithmetic on the two layouts; the table of all messages is vectorised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_few, as_int
from hypercomm.layout.exchange import Exchange
from hypercomm.layout.messages import shown
from hypercomm.layout.parts import Cut, Message, as_lengths, resolve_axes
from hypercomm.layout.rank_layout import RankLayout
from hypercomm.layout.roles import as_dim, as_shards, check_batch, check_roles
from hypercomm.layout.spread import Spread

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

Kind = Literal["equal", "fan-in", "fan-out"]
"""Whether the batch has as many shards on the target as on the source, fewer, or more."""


@attrs.frozen(repr=False, init=False)
class RankMapping:
    """Who sends what to whom, when a tensor spread over one layout is wanted over another.

    The batch is split along one dim, further dims may cut further axes, and every other dim
    replicates the tensor. It leaves the last pipeline stage of the source, and enters the first of
    the target. Each element that a target rank wants comes from exactly one source rank; the
    replicas of the source share the work, their numbers of messages differing by 1 at most.

    It is a value: frozen, hashable and picklable, and needs no torch until `transfer`. The layouts
    may lie beside each other, overlap, or be on the same ranks.

    Args:
        source: Where the tensor is.
        target: Where it is wanted.
        along: The dim that splits the batch. Of its sizes, one must be a multiple of the other. A
            dim that a layout lacks has size 1 there.
        batch_axis: The tensor axis of the batch; -1 is the last.
        shards: Further dims that cut the tensor, and the axis of each. Dims may cut the same axis:
            `along` is outermost, then they are in the order given. Any size may become any other.
            Default: "cp", where a layout has it, cuts the sequence: axis 1, or 0 if the batch is 1.
        pipeline: The dim of the pipeline. None, or one that a layout lacks: all ranks take part.

    Raises:
        LayoutError: `source` or `target` is no layout, a dim is given two roles, an axis is no
            int, or neither size along the batch is a multiple of the other.
        UnknownDimError: A dim other than "dp", "cp" and "pp" is in neither layout.

    Example:
        The source's ranks 0, 1 and 2, 3 hold the halves of the batch twice; the target's ranks
        4 .. 7 want a quarter each.

        >>> mapping = RankMapping(RankLayout.parse("tp=2,dp=2"), RankLayout([4], ["dp"], 4))
        >>> print(mapping)
        tp=2,dp=2 at 0 -> dp=4 at 4: fan-out 2 -> 4 along dp
        >>> [mapping.targets_of(rank) for rank in range(4)]
        [(4,), (5,), (6,), (7,)]
        >>> mapping.receives(5)[0].global_slices([12])
        (slice(3, 6, None),)
    """

    source: RankLayout
    target: RankLayout
    along: str
    batch_axis: int
    shards: tuple[tuple[str, int], ...]
    pipeline: str | None
    _is_inverse: bool = attrs.field(init=False)
    _exchange: Exchange = attrs.field(init=False, eq=False)

    def __init__(
        self,
        source: RankLayout,
        target: RankLayout,
        along: str = "dp",
        *,
        batch_axis: int = 0,
        shards: Mapping[str, int] | Iterable[tuple[str, int]] | None = None,
        pipeline: str | None = "pp",
    ) -> None:
        for layout, what in ((source, "source"), (target, "target")):
            if not isinstance(layout, RankLayout):
                raise LayoutError(f"{what} must be a RankLayout, got {shown(layout)}")
        along, batch_axis = as_dim(along, "along"), as_int(batch_axis, "batch_axis")
        pipeline = None if pipeline is None else as_dim(pipeline, "pipeline")
        if shards is None:
            dims = {*source.dim_names, *target.dim_names} - {along, pipeline}
            shards = {"cp": 0 if batch_axis == 1 else 1} if "cp" in dims else {}
        pairs = as_shards(shards)
        self.__attrs_init__(source, target, along, batch_axis, pairs, pipeline)
        check_roles(source, target, along, pairs, pipeline)
        self._prepare(is_inverse=False)

    def _prepare(self, *, is_inverse: bool) -> None:
        """Work out, once, how both layouts hold the tensor."""
        dims_of_axis: dict[int, tuple[str, ...]] = {self.batch_axis: (self.along,)}
        for dim, axis in self.shards:
            dims_of_axis[axis] = (*dims_of_axis.get(axis, ()), dim)
        dims = tuple(dims_of_axis.values())
        before = Spread(self.source, dims, self._stage(self.source, last=not is_inverse))
        after = Spread(self.target, dims, self._stage(self.target, last=is_inverse))
        shards = zip(dims_of_axis, before.shards, after.shards, strict=True)
        cuts = tuple(Cut(axis, source, target) for axis, source, target in shards)
        check_batch(cuts[0], dims[0])
        object.__setattr__(self, "_is_inverse", is_inverse)
        object.__setattr__(self, "_exchange", Exchange(before, after, cuts))

    def _stage(self, layout: RankLayout, *, last: bool) -> tuple[str, int] | None:
        if self.pipeline is None or self.pipeline not in layout.dim_names:
            return None
        return self.pipeline, layout.size_of(self.pipeline) - 1 if last else 0

    # ---- the whole --------------------------------------------------------------------------

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The tensor axes that are cut, the batch's first."""
        return self._exchange.cuts

    @property
    def kind(self) -> Kind:
        """Whether the batch keeps its number of shards ("equal") or has fewer or more after it."""
        batch = self.cuts[0]
        if batch.source == batch.target:
            return "equal"
        return "fan-in" if batch.source > batch.target else "fan-out"

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The ranks that the tensor leaves, in the order of the layout."""
        return self._exchange.before.ranks

    @property
    def target_ranks(self) -> tuple[int, ...]:
        """The ranks that the tensor enters, in the order of the layout."""
        return self._exchange.after.ranks

    def inverse(self) -> RankMapping:
        """Return the way back, which gradients take: between the same stages.

        Every source rank gets the gradient of what it has, from one replica of the target: all of
        them must hold the same one, as they do after the all-reduce of tensor parallelism.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("pp=2"), RankLayout.parse("pp=2"))
            >>> mapping.source_ranks, mapping.inverse().target_ranks
            ((1,), (1,))
            >>> mapping.inverse().inverse() == mapping
            True
        """
        back = RankMapping(
            self.target,
            self.source,
            self.along,
            batch_axis=self.batch_axis,
            shards=self.shards,
            pipeline=self.pipeline,
        )
        back._prepare(is_inverse=not self._is_inverse)
        return back

    def table(self, *, leaders: bool = False) -> NDArray[np.void]:
        """List all messages.

        Args:
            leaders: As for `sends`.

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
        return self._exchange.table(leaders=leaders)

    # ---- one rank ---------------------------------------------------------------------------

    def sends(self, rank: int, *, leaders: bool = False) -> tuple[Message, ...]:
        """Return what a rank sends, by target; () where it is not on the stage that sends.

        Args:
            rank: A rank of the source.
            leaders: Whether the first replica of each cell sends alone, to the first of each that
                wants it; the others get it from that one.

        Raises:
            RankOutsideError: The source does not hold `rank`.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> [message.target for message in mapping.sends(2)]
            [2, 3]
            >>> [message.target for message in mapping.sends(2, leaders=True)]
            [2]
        """
        return self._exchange.sends(rank, leaders=leaders)

    def receives(self, rank: int, *, leaders: bool = False) -> tuple[Message, ...]:
        """Return what a rank receives, by source; () where it is not on the stage that receives.

        Args:
            rank: A rank of the target.
            leaders: As for `sends`.

        Raises:
            RankOutsideError: The target does not hold `rank`.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> [(message.source, message.target) for message in mapping.receives(3)]
            [(2, 3), (3, 3)]
        """
        return self._exchange.receives(rank, leaders=leaders)

    def targets_of(self, rank: int, *, leaders: bool = False) -> tuple[int, ...]:
        """Return the ranks that a rank sends to, ascending; arguments and errors as for `sends`."""
        return tuple(message.target for message in self.sends(rank, leaders=leaders))

    def sources_of(self, rank: int, *, leaders: bool = False) -> tuple[int, ...]:
        """Return the ranks that a rank receives from, ascending; else as for `receives`."""
        return tuple(message.source for message in self.receives(rank, leaders=leaders))

    def shares(self, rank: int) -> dict[int, tuple[Fraction, Fraction]]:
        """Return which share of the whole batch, from where to where, a rank sends to whom.

        Raises:
            RankOutsideError: The source does not hold `rank`.

        Example:
            >>> RankMapping(RankLayout.parse("dp=2"), RankLayout([4], ["dp"], 2)).shares(1)
            {4: (Fraction(1, 2), Fraction(3, 4)), 5: (Fraction(3, 4), Fraction(1, 1))}
        """
        units = self.cuts[0].units
        batches = {message.target: message.parts[0] for message in self.sends(rank)}
        return {
            target: (Fraction(part.start, units), Fraction(part.stop, units))
            for target, part in batches.items()
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
            LayoutError: Nothing goes from the one to the other, a length cannot be cut evenly (the
                nearest that can are told), or an axis that is cut is not there.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=2"), RankLayout([4], ["dp"], 2))
            >>> mapping.slices((1, 4), [8, 5])
            (slice(4, 6, None), slice(None, None, None))
        """
        if isinstance(pair, Message):
            return pair.global_slices(shape)
        ranks = as_few(pair, "pair")
        if len(ranks) != 2:
            raise LayoutError(f"pair must be (source rank, target rank), got {shown(pair)}")
        source, target = ranks
        sent = {message.source: message for message in self.receives(target)}
        if self._exchange.before.place(source) is None or source not in sent:
            senders = shown(tuple(sent))
            raise LayoutError(
                f"rank {source} sends nothing to rank {target}, which receives from {senders}"
            )
        return sent[source].global_slices(shape)

    # ---- who has the same -------------------------------------------------------------------

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
        return self._exchange.after.replicas_of(rank)

    def gather_siblings(self, rank: int) -> tuple[int, ...]:
        """Return the source's ranks whose shares of the batch meet in one shard of the target.

        In the order of the batch, `rank` included; all else that they hold is alike. Unless the
        mapping is a fan-in, `rank` alone. () where it is not on the stage that sends.

        Raises:
            RankOutsideError: The source does not hold `rank`.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> mapping.gather_siblings(3)
            (2, 3)
        """
        place = self._exchange.before.place(rank)
        if place is None:
            return ()
        batch, *rest = place.cell
        fan_in = max(self.cuts[0].source // self.cuts[0].target, 1)
        first = batch // fan_in * fan_in
        cells = [(shard, *rest) for shard in range(first, first + fan_in)]
        return tuple(self._exchange.before.rank_at(cell, place.replica) for cell in cells)

    # ---- on live ranks ----------------------------------------------------------------------

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
            cut.part(0, 0).slice_of(lengths[axis], cut.source)  # refuses what cannot be cut
            lengths[axis] = lengths[axis] * cut.source // cut.target
        return tuple(lengths)

    def transfer(
        self,
        tensor: Tensor | None,
        groups: ProcessGroup | None = None,
        *,
        leaders: bool | None = None,
        out: Tensor | None = None,
    ) -> Tensor | None:
        """Move a tensor between the ranks of the running job; every rank of both stages calls it.

        Gradients do not flow through it: they go back by `inverse().transfer(gradient)`.

        Args:
            tensor: On a source rank what it has; on a rank of the target alone the buffer that
                receives. Elsewhere it does not matter.
            groups: None: every target rank receives for itself. A process group of the calling
                rank's `broadcast_siblings`: the leaders alone receive, and broadcast in it.
            leaders: Whether the leaders alone exchange; all ranks must say the same. Default:
                whether `groups` is given, which ranks of the source alone cannot.
            out: On a rank of both stages, the buffer that receives; default: a new one.

        Returns:
            What was received on a target rank, else None.

        Raises:
            NotInitializedError: torch.distributed is not initialised.
            WorldSizeError: The job has too few ranks.
            LayoutError: A tensor or a group does not fit; nothing was sent.

        With NCCL, as for torch's `batch_isend_irecv`, all ranks of the job must have communicated
        before, or the default process group be bound to a device.
        """
        # The one step upwards: what moves tensors needs torch, and is loaded when one is moved.
        from hypercomm.process_groups.transfer import transfer

        return transfer(self, tensor, groups, leaders=leaders, out=out)

    def __str__(self) -> str:
        first, *others = self.cuts
        words = f"{self.kind} {first.source} -> {first.target} along {self.along}"
        words += "".join(f", {cut.source} -> {cut.target} on axis {cut.axis}" for cut in others)
        ends = [f"{layout} at {layout.rank_offset}" for layout in (self.source, self.target)]
        return f"{' -> '.join(ends)}: {words}"

    def __repr__(self) -> str:
        return f"<RankMapping {self}>"
