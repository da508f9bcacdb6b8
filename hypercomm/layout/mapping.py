"""RankMapping: who sends what to whom when a tensor moves from one layout to another.

Everything about one rank is arithmetic on the two layouts; the table of all messages is vectorised.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_few
from hypercomm.layout.mapping_fields import MappingFields
from hypercomm.layout.messages import shown
from hypercomm.layout.parts import Message, as_lengths, resolve_axes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@attrs.frozen(repr=False, init=False)
class RankMapping(MappingFields):
    """Who sends what to whom, when a tensor spread over one layout is wanted over another.

    The batch is split along one dim, further dims may cut further axes, and every other dim
    replicates the tensor. It leaves the last pipeline stage of the source, and enters the first of
    the target. Each element that a target rank wants comes from exactly one source rank: itself,
    where it has the part; else one of the replicas that have it. These share the work in number of
    messages, not in bytes: of n ranks that want a part of what R have, none serves more than
    ceil(n / R) others.

    It is a value: frozen, hashable and picklable, and needs no torch until `transfer`. The layouts
    may lie beside each other, overlap, or be on the same ranks.

    Args:
        source: Where the tensor is.
        target: Where it is wanted.
        along: The dim that splits the batch. Of its sizes, one must be a multiple of the other. A
            dim that a layout lacks has size 1 there. None: there is no batch, as in a weight.
        batch_axis: The tensor axis of the batch; -1 is the last.
        shards: Further dims that cut the tensor, and the axis of each, in contiguous blocks. Dims
            may cut the same axis: `along` is outermost, then they are in the order given. Any size
            may become any other. Default: where there is a batch, "cp" cuts the sequence: axis 1,
            or 0 if the batch is 1. (Megatron's causal order, chunks i and 2 * cp - 1 - i on rank i
            of cp, is not contiguous: reorder the sequence before and after, or leave cp out.)
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

        >>> from hypercomm import RankLayout
        >>> mapping = RankMapping(RankLayout.parse("tp=2,dp=2"), RankLayout([4], ["dp"], 4))
        >>> print(mapping)
        tp=2,dp=2 at 0 -> dp=4 at 4: fan-out 2 -> 4 along dp; tp replicates
        >>> [mapping.targets_of(rank) for rank in range(4)]
        [(4,), (5,), (6,), (7,)]
        >>> mapping.receives(5)[0].global_slices([12])
        (slice(3, 6, None),)

        A weight that tp=2 has cut goes to tp=3: each rank keeps what it has already.

        >>> weight = RankMapping(
        ...     RankLayout([2], ["tp"]), RankLayout([3], ["tp"]), None, shards={"tp": 0}
        ... )
        >>> [(message.source, message.target) for message in weight.receives(1)]
        [(0, 1), (1, 1)]
    """

    def inverse(self) -> RankMapping:
        """Return the way back, which gradients take: between the same stages.

        Every source rank gets the gradient of what it has, from one replica of the target: all of
        them must hold the same one, as they do after the all-reduce of tensor parallelism.

        Example:
            >>> from hypercomm import RankLayout
            >>> mapping = RankMapping(RankLayout.parse("pp=2"), RankLayout.parse("pp=2"))
            >>> mapping.source_ranks, mapping.inverse().target_ranks
            ((1,), (1,))
            >>> mapping.inverse().inverse() == mapping
            True
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
            >>> from hypercomm import RankLayout
            >>> mapping = RankMapping(RankLayout.parse("dp=2"), RankLayout([3], ["tp"], 2))
            >>> [row.tolist() for row in mapping.table()[["source", "target"]]]
            [(0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4)]
            >>> mapping.table()["start"].ravel().tolist()
            [0, 0, 0, 1, 1, 1]
        """
        return self._exchange.table()

    # ---- one rank ---------------------------------------------------------------------------

    def sends(self, rank: int) -> tuple[Message, ...]:
        """Return what a rank sends, by target; () where it is not on the stage that sends.

        Args:
            rank: A rank of the source.

        Raises:
            RankOutsideError: The source does not hold `rank`.

        Example:
            >>> from hypercomm import RankLayout
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> [message.target for message in mapping.sends(2)]
            [2, 3]
            >>> leading = attrs.evolve(mapping, leaders=True)
            >>> [message.target for message in leading.sends(2)]
            [2]
        """
        return self._exchange.sends(rank)

    def receives(self, rank: int) -> tuple[Message, ...]:
        """Return what a rank receives, by source; () where it is not on the stage that receives.

        Args:
            rank: A rank of the target.

        Raises:
            RankOutsideError: The target does not hold `rank`.

        Example:
            >>> from hypercomm import RankLayout
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> [(message.source, message.target) for message in mapping.receives(3)]
            [(2, 3), (3, 3)]
        """
        return self._exchange.receives(rank)

    def targets_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank sends to, ascending; arguments and errors as for `sends`."""
        return tuple(message.target for message in self.sends(rank))

    def sources_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank receives from, ascending; else as for `receives`."""
        return tuple(message.source for message in self.receives(rank))

    def shares(self, rank: int) -> dict[int, tuple[Fraction, Fraction]]:
        """Return which share of the whole batch, from where to where, a rank sends to whom.

        Raises:
            RankOutsideError: The source does not hold `rank`.

        Example:
            >>> from hypercomm import RankLayout
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
            >>> from hypercomm import RankLayout
            >>> mapping = RankMapping(RankLayout.parse("dp=2"), RankLayout([4], ["dp"], 2))
            >>> mapping.slices((1, 4), [8, 5])
            (slice(4, 6, None), slice(None, None, None))
        """
        ranks = (pair.source, pair.target) if isinstance(pair, Message) else as_few(pair, "pair")
        if len(ranks) != 2:
            raise LayoutError(f"pair must be (source rank, target rank), got {shown(pair)}")
        source, target = ranks
        sent = {message.source: message for message in self.receives(target)}
        if self._exchange.before.place(source) is None or source not in sent:
            senders = shown(tuple(sent))
            raise LayoutError(
                f"rank {source} sends nothing to rank {target}, which receives from {senders}"
            )
        if isinstance(pair, Message) and pair != sent[source]:
            raise LayoutError(
                f"{shown(pair)} is not of this mapping, in which rank {source} sends rank {target} "
                f"{shown(sent[source])}"
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
            >>> from hypercomm import RankLayout
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> mapping.broadcast_siblings(3)
            (2, 3)
        """
        return self._exchange.after.replicas_of(rank)

    def gather_siblings(self, rank: int) -> tuple[int, ...]:
        """Return the source's ranks whose shares of the batch meet in one shard of the target.

        In the order of the batch, `rank` included; all else that they hold is alike. Where a shard
        of the target is not made of several whole ones, `rank` alone. () where it is not on the
        stage that sends.

        Raises:
            RankOutsideError: The source does not hold `rank`.

        Example:
            >>> from hypercomm import RankLayout
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> mapping.gather_siblings(3)
            (2, 3)
        """
        place = self._exchange.before.place(rank)
        if place is None:
            return ()
        batch = self._batch
        if batch is None or batch.source % batch.target:
            return (int(rank),)
        shard, *rest = place.cell
        fan_in = batch.source // batch.target
        first = shard // fan_in * fan_in
        cells = [(shard, *rest) for shard in range(first, first + fan_in)]
        return tuple(self._exchange.before.rank_at(cell, place.replica) for cell in cells)

    # ---- on live ranks ----------------------------------------------------------------------

    def received_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what a target rank receives, from that of what a source rank has.

        Raises:
            LayoutError: A length cannot be cut evenly, or an axis that is cut is not there.

        Example:
            >>> from hypercomm import RankLayout
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
        out: Tensor | None = None,
        verify: bool | None = None,
    ) -> Tensor | None:
        """Move a tensor between the ranks of the running job; every rank of both stages calls it.

        Gradients do not flow through it: they go back by `inverse().transfer(gradient)`.

        Args:
            tensor: On a source rank what it has; on a rank of the target alone the buffer that
                receives. Elsewhere it does not matter.
            groups: With `leaders`, on a target rank that shares its part: the process group of its
                `broadcast_siblings`, in which the first of them broadcasts. Else None; what torch
                gives those outside a group (`GroupMember.NON_GROUP_MEMBER`) is as good.
            out: On a rank of both stages, the buffer that receives, which shares no element with
                `tensor`; default: a new one.
            verify: Whether the two ends of each message first tell each other what they are about
                to move: both raise where mapping, dtype or shape differ, or one refuses its
                arguments; so do those that exchange something with either. All ranks must say the
                same. Default: as the environment's HYPERCOMM_VERIFY says, "0" or "1".

        Returns:
            What was received on a target rank, else None.

        Raises:
            NotInitializedError: torch.distributed is not initialised.
            WorldSizeError: The job has too few ranks.
            LayoutError: A tensor or a group does not fit, or, with `verify`, the ends differ;
                nothing was sent.
            GroupOptionsError: `verify` is none of True, False and None.

        Without `verify` each rank checks its own arguments alone. Where it refuses them, the others
        wait for it until the timeout. Where the ends differ in mapping, shape or dtype, bytes
        arrive as they are: gloo aborts the process of a buffer that is too short and leaves one
        that is too long half filled, NCCL waits; and a message that only one end means stays for
        the next transfer to take.

        With NCCL, as for torch's `batch_isend_irecv`, all ranks of the job must have communicated
        before, or the default process group be bound to a device.
        """
        # The one step upwards: what moves tensors needs torch, and is loaded when one is moved.
        from hypercomm.process_groups.transfer import transfer

        return transfer(self, tensor, groups, out=out, verify=verify)
