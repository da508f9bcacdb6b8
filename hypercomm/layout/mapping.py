"""RankMapping: the messages that redistribute a tensor from one layout to another.

The messages of one rank are computed from the two layouts, without communication.

A cell is the part of the tensor that a rank holds; ranks with the same cell are its replicas.
A cell of the source overlaps one or more cells of the target. The replicas of those target cells
are the consumers of the source cell. They are numbered from 0 to n - 1: the replicas of a target
cell vary fastest, then the position along the last axis that is cut. A consumer that holds the
source cell copies it locally. Any other consumer k receives it from replica k * R // n, where R is
the number of replicas of the source cell. With `leaders`, each cell has one replica.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Literal, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError, UnknownDimError
from hypercomm.layout.checks import as_flag, as_int, as_ordered
from hypercomm.layout.layout import RankLayout, read_layout
from hypercomm.layout.messages import (
    Cut,
    Message,
    Shard,
    Sharding,
    as_lengths,
    length_of_unit,
    resolve_axes,
)
from hypercomm.layout.parsing import nearest_multiples
from hypercomm.layout.text import shown, some_of

ZIGZAG = "zigzag"

TensorAxis = int | tuple[str, int]
"""A tensor axis that is cut in contiguous blocks, or ("zigzag", axis)."""

Shards = tuple[tuple[str, TensorAxis], ...]
"""Which dim cuts which axis."""

Given = int | str | tuple[str, int]
"""A tensor axis, "zigzag", or ("zigzag", axis)."""

_MAY_LACK = ("dp", "cp", "pp")
"""The dims that are named by default, whether or not a layout has them."""

_MOST_MESSAGES = 2**20
"""The most messages that one call lists."""


class HasLayout(Protocol):
    """An object with a layout, as a grid."""

    @property
    def layout(self) -> RankLayout:
        """The numbering of its ranks."""


AnyLayout = RankLayout | HasLayout | str | Mapping[str, int]
"""A layout, a grid that has one, or sizes as text or by name."""


@attrs.frozen(repr=False, init=False)
class RankMapping:
    """The messages that redistribute a tensor from one layout to another.

    One dim splits the batch, further dims may cut further axes, and every other dim replicates the
    tensor. The last pipeline stage of the source sends it to the first stage of the target. Each
    target rank receives each element from exactly one source rank: from itself if it has the
    element, else from one of the replicas that have it. The replicas share the messages evenly,
    whatever their bytes: if n ranks need a part that R ranks have, each of the R sends to at most
    ceil(n / R) of them.

    A mapping is a value: frozen, hashable and picklable. It needs no torch; `hypercomm.transfer`
    moves tensors by it. The layouts may be disjoint, overlap, or be on the same ranks.

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
        leaders: Whether only the first of the ranks with the same elements sends, and only the
            first of those that want them receives; the others get them from that one.
        backward: Whether the tensor goes from the first stage of the source to the last of the
            target, as gradients do: what `inverse()` makes.

    Raises:
        LayoutError: `source` or `target` is not a layout, a dim is given two roles, an axis is not
            an int, or neither size along the batch is a multiple of the other.
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

    source: RankLayout
    target: RankLayout
    along: str | None
    batch_axis: int
    shards: Shards
    pipeline: str | None
    leaders: bool
    backward: bool
    cuts: tuple[Cut, ...] = attrs.field(init=False, eq=False)
    """The tensor axes that are cut, the axis of the batch first if it is."""
    _before: Sharding = attrs.field(init=False, eq=False)
    _after: Sharding = attrs.field(init=False, eq=False)

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
        axes = dims_of_axes(along, batch_axis, pairs).items()
        cuts = {axis: dims for axis, dims in axes if max(map(max, map(self._sizes, dims))) > 1}
        before, after = (
            Sharding(layout, tuple(cuts.values()), self._stage(layout, is_last), zigzag_dims(pairs))
            for layout, is_last in ((source, not backward), (target, backward))
        )
        numbers = [
            Cut(axis, here.count * here.held, there.count * there.held, here.held, there.held)
            for axis, here, there in zip(cuts, before.axes, after.axes, strict=True)
        ]
        object.__setattr__(self, "_before", before)
        object.__setattr__(self, "_after", after)
        object.__setattr__(self, "cuts", tuple(numbers))

    @classmethod
    def weights(
        cls,
        source: AnyLayout,
        target: AnyLayout,
        shards: Mapping[str, Given] | Iterable[tuple[str, Given]] | None = None,
        *,
        at: Mapping[str, int] | None = None,
    ) -> RankMapping:
        """Map a tensor without a batch, such as a weight, to all ranks of the target.

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
    def kind(self) -> Literal["equal", "fan-in", "fan-out"]:
        """Whether the batch keeps its number of shards along `along`, or has fewer or more."""
        before, after = (1, 1) if self.along is None else self._sizes(self.along)
        return "equal" if before == after else "fan-in" if before > after else "fan-out"

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The ranks that the tensor leaves, in the order of the layout."""
        return self._before.ranks

    @property
    def target_ranks(self) -> tuple[int, ...]:
        """The ranks that the tensor enters, in the order of the layout."""
        return self._after.ranks

    def __str__(self) -> str:
        axes = dims_of_axes(self.along, self.batch_axis, self.shards)
        words = []
        if self.along is not None:
            before, after = self._sizes(self.along)
            words = [f"{self.kind} {before} -> {after} along {self.along}"]
        for cut in self.cuts:
            if axes[cut.axis] != (self.along,):
                is_zigzag = not zigzag_dims(self.shards).isdisjoint(axes[cut.axis])
                how = " in zigzag" if is_zigzag else ""
                words.append(f"{cut.sources} -> {cut.targets} on axis {cut.axis}{how}")
        words = words or ["whole"]
        words += ["leaders only"] * self.leaders + ["backward"] * self.backward
        roles = {self.along, self.pipeline, *dict(self.shards)}
        idle = replicating(self.source, self.target, roles)
        copies = f"; {', '.join(idle)} {'replicates' if len(idle) == 1 else 'replicate'}"
        ends = f"{_with_ranks(self.source)} -> {_with_ranks(self.target)}"
        return f"{ends}: {', '.join(words)}{copies if idle else ''}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"

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
        _, receivers = self._replicas
        pairs = [cut.source + cut.target - math.gcd(cut.source, cut.target) for cut in self.cuts]
        _check_count(math.prod(pairs) * receivers)
        messages = [message for rank in self.source_ranks for message in self.sends(rank)]
        messages.sort(key=_by_place)
        ends = [(name, np.int64) for name in ("source", "target")]
        units = [(name, np.int64, (len(self.cuts),)) for name in ("start", "stop")]
        rows = np.empty(len(messages), dtype=[*ends, *units])
        for row, message in zip(rows, messages, strict=True):
            row["source"], row["target"] = message.source, message.target
            row["start"] = [part.start for part in message.parts]
            row["stop"] = [part.stop for part in message.parts]
        return rows

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
        senders, receivers = self._replicas
        messages: list[Message] = []
        for here in self._before.shards_of(rank):
            if here.replica < senders:
                messages += self._sent_from(here, rank, senders, receivers)
        return tuple(sorted(messages, key=_by_place))

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
        senders, receivers = self._replicas
        own = {shard.cell: shard for shard in _shards_of(self._before, rank, senders)}
        messages: list[Message] = []
        for there in self._after.shards_of(rank):
            if there.replica < receivers:
                messages += self._received_at(there, own, senders, receivers)
        return tuple(sorted(messages, key=_by_place))

    def targets_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank sends to, ascending; arguments and errors as for `sends`."""
        return tuple(dict.fromkeys(message.target for message in self.sends(rank)))

    def sources_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank receives from, ascending; else as for `receives`."""
        return tuple(dict.fromkeys(message.source for message in self.receives(rank)))

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
        return self._after.replicas_of(rank)

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
            length_of_unit(cut.axis, lengths[axis], cut.units // cut.sources)
            lengths[axis] = lengths[axis] * cut.sources // cut.targets
        return tuple(lengths)

    # ---- inside -------------------------------------------------------------------------------

    def _sent_from(self, here: Shard, rank: int, senders: int, receivers: int) -> Iterator[Message]:
        """Return what a rank sends of one of its cells."""
        choices = [cut.targets_of(shard) for cut, shard in zip(self.cuts, here.cell, strict=True)]
        consumers = math.prod(map(len, choices)) * receivers
        first, last = (
            -(-replica * consumers // senders) for replica in (here.replica, here.replica + 1)
        )
        _check_count(last - first)
        for own in _shards_of(self._after, rank, receivers):
            if all(shard in some for shard, some in zip(own.cell, choices, strict=True)):
                yield self._message(here, own)
        for turn in range(first, last):
            rest, replica = divmod(turn, receivers)
            reversed_cell = []
            for shards in reversed(choices):
                rest, position = divmod(rest, len(shards))
                reversed_cell.append(shards[position])
            there = Shard(tuple(reversed_cell[::-1]), replica)
            theirs = _shards_of(self._before, self._after.rank_at(*there), senders)
            if all(shard.cell != here.cell for shard in theirs):  # else it keeps its own
                yield self._message(here, there)

    def _received_at(
        self, there: Shard, own: Mapping[tuple[int, ...], Shard], senders: int, receivers: int
    ) -> Iterator[Message]:
        """Return what a rank receives of one cell, given what it has itself."""
        choices = [cut.sources_of(shard) for cut, shard in zip(self.cuts, there.cell, strict=True)]
        _check_count(math.prod(map(len, choices)))
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

    @property
    def _replicas(self) -> tuple[int, int]:
        """How many replicas of a cell of the source send, and of the target receive."""
        return (1, 1) if self.leaders else (self._before.replicas, self._after.replicas)

    def _message(self, here: Shard, there: Shard) -> Message:
        slots = zip(self._before.slots_of(here.cell), self._after.slots_of(there.cell), strict=True)
        shards = zip(self.cuts, here.cell, there.cell, slots, strict=True)
        parts = tuple(cut.part(source, target, both) for cut, source, target, both in shards)
        return Message(self._before.rank_at(*here), self._after.rank_at(*there), parts)

    def _sizes(self, dim: str) -> tuple[int, int]:
        return self.source.size_of(dim, default=1), self.target.size_of(dim, default=1)

    def _stage(self, layout: RankLayout, is_last: bool) -> dict[str, int]:
        if self.pipeline is None or self.pipeline not in layout.dim_names:
            return {}
        return {self.pipeline: layout.size_of(self.pipeline) - 1 if is_last else 0}


def _shards_of(sharding: Sharding, rank: int, replicas: int) -> list[Shard]:
    """The shards of any rank, if it is among the replicas that take part."""
    found = sharding.shards_of(rank) if rank in sharding.layout else ()
    return [shard for shard in found if shard.replica < replicas]


def _by_place(message: Message) -> tuple[int, int, list[int]]:
    return message.source, message.target, [part.start for part in message.parts]


def _check_count(messages: int) -> None:
    if messages > _MOST_MESSAGES:
        raise LayoutError(
            f"these are {messages} messages, more than the {_MOST_MESSAGES} that can be listed; "
            f"ask about single ranks, or give the mapping leaders=True"
        )


def _with_ranks(layout: RankLayout) -> str:
    listing = layout._listing
    ranks = f"{layout.rank_offset}" if listing is None else some_of(listing.ranks, 16)
    return f"{layout} {'at' if listing is None else 'on ranks'} {ranks}"


# ---- arguments ----------------------------------------------------------------------------------


def as_layout(given: AnyLayout, what: str) -> RankLayout:
    """Return a layout in one of the forms of `AnyLayout`; `what` is its name in errors."""
    if not isinstance(given, (str, Mapping)) and not isinstance(
        getattr(given, "layout", given), RankLayout
    ):
        raise LayoutError(
            f"{what} must be a RankLayout, a grid, or sizes such as 'tp=2,dp=4', got {shown(given)}"
        )
    return read_layout(given)


def part_of(given: AnyLayout, at: Mapping[str, int] | None, what: str) -> RankLayout:
    """Return a layout, or the part of it at some coordinates.

    Raises:
        LayoutError, UnknownDimError: As for `as_layout` and `RankLayout.select`.
    """
    layout = as_layout(given, what)
    if at is not None and not isinstance(at, Mapping):
        raise LayoutError(f"at must be a mapping such as {{'pp': 1}}, got {shown(at)}")
    return (
        layout.select(**{as_dim(dim, "at"): index for dim, index in at.items()}) if at else layout
    )


def as_dim(value: object, what: str) -> str:
    """Return the name of a dim; `what` begins the error's sentence.

    Raises:
        LayoutError: It is not a string, or empty.

    Example:
        >>> as_dim("dp", "along")
        'dp'
    """
    if not isinstance(value, str) or not value:
        raise LayoutError(f"{what} must be the name of a dim, got {shown(value)}")
    return str(value)


def as_shards(value: object, sequence: int) -> Shards:
    """Return the tensor axis that each dim cuts, from a mapping or from pairs.

    Args:
        value: The mapping or the pairs; "zigzag" alone stands for the axis of the sequence.
        sequence: That axis.

    Raises:
        LayoutError: It is neither, a dim is not a string, or an axis is not an int.

    Example:
        >>> as_shards({"cp": "zigzag", "tp": -1}, sequence=1)
        (('cp', ('zigzag', 1)), ('tp', -1))
    """
    pairs = as_ordered(tuple(value.items()) if isinstance(value, Mapping) else value, "shards")
    shards: list[tuple[str, TensorAxis]] = []
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise LayoutError(
                f"shards must map dims to tensor axes, as in {{'cp': 1}}, got {shown(value)}"
            )
        dim = as_dim(pair[0], "every dim in shards")
        shards.append((dim, _as_axis(pair[1], sequence, f"the axis of dim {dim!r} in shards")))
    return tuple(shards)


def _as_axis(value: object, sequence: int, what: str) -> TensorAxis:
    if isinstance(value, str):
        if value != ZIGZAG:
            raise LayoutError(
                f"{what} must be an int, {ZIGZAG!r} or ({ZIGZAG!r}, axis), got {shown(value)}"
            )
        return ZIGZAG, sequence
    if isinstance(value, (tuple, list)) and len(value) == 2 and value[0] == ZIGZAG:
        return ZIGZAG, as_int(value[1], what)
    return as_int(value, what)


def zigzag_dims(shards: Shards) -> frozenset[str]:
    """Return the dims that cut in zigzag.

    Example:
        >>> zigzag_dims((("cp", ("zigzag", 1)), ("tp", -1)))
        frozenset({'cp'})
    """
    return frozenset([dim for dim, axis in shards if isinstance(axis, tuple)])


def dims_of_axes(along: str | None, batch_axis: int, shards: Shards) -> dict[int, tuple[str, ...]]:
    """Return the dims that cut each tensor axis, outermost first; the axis of the batch first.

    Example:
        >>> dims_of_axes("dp", 0, (("cp", 1), ("tp", 0)))
        {0: ('dp', 'tp'), 1: ('cp',)}
    """
    axes: dict[int, tuple[str, ...]] = {}
    batch = [] if along is None else [(along, batch_axis)]
    plain = [(dim, axis[1] if isinstance(axis, tuple) else axis) for dim, axis in shards]
    for dim, axis in (*batch, *plain):
        axes[axis] = (*axes.get(axis, ()), dim)
    return axes


def roles_of(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the role of each dim, from pairs of role and dim; a dim with two is an error."""
    roles: dict[str, str] = {}
    for role, dim in named:
        if dim in roles:
            raise LayoutError(
                f"dim {shown(dim)} is named by {roles[dim]} and by {role}; a dim has one role"
            )
        roles[dim] = role
    return roles


def check_roles(
    source: RankLayout,
    target: RankLayout,
    along: str | None,
    batch_axis: int,
    shards: Shards,
    pipeline: str | None,
) -> None:
    """Check that each dim has one role and that at least one layout has it.

    Raises:
        LayoutError: A dim is named twice, or neither size along the batch is a multiple of the
            other.
        UnknownDimError: Neither layout has a dim that is not a default; or neither has `along`,
            and a dim without a role would replicate the batch.

    Example:
        >>> layout = RankLayout.parse("tp=2,dp=2")
        >>> check_roles(layout, layout, "dp", 0, (("tp", -1),), "pp")
    """
    named = [("along", along), *(("shards", dim) for dim, _ in shards), ("pipeline", pipeline)]
    roles = [(role, dim) for role, dim in named if dim is not None]
    dims = {*source.dim_names, *target.dim_names}
    idle = replicating(source, target, {dim for _, dim in roles})
    for role, dim in roles:
        if dim in dims or (dim in _MAY_LACK and not (role == "along" and idle)):
            continue
        hint = f"; give along={idle[0]!r}, or along=None if no dim splits a batch" if idle else ""
        raise UnknownDimError(
            f"{role} names dim {shown(dim)}, which neither layout has; the source has dims "
            f"{source.dim_names}, the target {target.dim_names}{hint if role == 'along' else ''}"
        )
    roles_of(roles)
    if along is None:
        return
    for dim, axis in shards:
        if axis == (ZIGZAG, batch_axis):
            raise LayoutError(
                f"dim {dim!r} in shards cuts axis {batch_axis} in zigzag, which is the batch's; "
                f"give the axis of the sequence, as in {{{dim!r}: ({ZIGZAG!r}, 1)}}"
            )
    before, after = source.size_of(along, default=1), target.size_of(along, default=1)
    if before % after and after % before:
        raise LayoutError(
            f"the batch is cut along {along} into {before} shards on the source and {after} on "
            f"the target; one number must be a multiple of the other, as "
            f"{nearest_multiples(before, after)} on the source"
        )


def replicating(
    source: RankLayout, target: RankLayout, roles: Collection[str | None]
) -> tuple[str, ...]:
    """Return the dims larger than 1, of either layout, that have none of the roles.

    Example:
        >>> replicating(RankLayout.parse("tp=2,cp=1,dp=2"), RankLayout.parse("ep=3"), {"dp"})
        ('tp', 'ep')
    """
    dims = dict.fromkeys((*source.dim_names, *target.dim_names))
    sizes = {
        dim: max(source.size_of(dim, default=1), target.size_of(dim, default=1)) for dim in dims
    }
    return tuple(dim for dim, size in sizes.items() if size > 1 and dim not in roles)
