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
from hypercomm.layout.checks import as_int, as_ordered
from hypercomm.layout.layout import RankLayout, read_layout
from hypercomm.layout.messages import (
    Cut,
    Message,
    Sharding,
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

Cell = tuple[int, ...]
"""A part of a tensor: the index of its shard along each axis that is cut."""

Given = int | str | tuple[str, int]
"""A tensor axis, "zigzag", or ("zigzag", axis)."""

_MAY_LACK = ("dp", "cp", "pp")
"""The dims that are named by default, whether or not a layout has them."""

_MOST_MESSAGES = 2**20
"""The most messages that a table lists."""


class HasLayout(Protocol):
    """An object with a layout, as a grid."""

    @property
    def layout(self) -> RankLayout:
        """The layout of its ranks."""


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
        source, target = read_layout(source), read_layout(target)
        batch_axis = as_int(batch_axis, "batch_axis")
        sequence = 0 if batch_axis == 1 else 1
        if shards is None:
            dims = {*source.dim_names, *target.dim_names} - {along, pipeline}
            shards = {"cp": sequence} if along and "cp" in dims else {}
        pairs = as_shards(shards, sequence)
        self.__attrs_init__(source, target, along, batch_axis, pairs, pipeline, leaders, backward)
        self._check_roles()
        axes = dims_of_axes(along, batch_axis, pairs).items()
        cuts = {axis: dims for axis, dims in axes if max(map(max, map(self._sizes, dims))) > 1}
        zigzag = [dim for dim, axis in pairs if isinstance(axis, tuple)]
        before, after = (
            Sharding(layout, cuts.values(), self._stage(layout, last), zigzag, leaders=leaders)
            for layout, last in ((source, not backward), (target, backward))
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
        layout = read_layout(source)
        part = layout.select(**at) if at else layout
        return cls(part, target, None, shards=shards, pipeline=None)

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
                how = " in zigzag" if cut.source_held + cut.target_held > 2 else ""
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
            LayoutError: There are more than a million.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=2"), RankLayout([3], ["tp"], 2))
            >>> [row.tolist() for row in mapping.table()[["source", "target"]]]
            [(0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4)]
            >>> mapping.table()["start"].ravel().tolist()
            [0, 0, 0, 1, 1, 1]
        """
        pairs = [cut.source + cut.target - math.gcd(cut.source, cut.target) for cut in self.cuts]
        count = math.prod(pairs) * self._after.active
        if count > _MOST_MESSAGES:
            hint = "ask about single ranks, or give the mapping leaders=True"
            raise LayoutError(f"these are {count} messages, more than {_MOST_MESSAGES}; {hint}")
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
        messages: list[Message] = []
        for cell in self._before.shards_of(rank):
            messages += self._sent_from(cell, rank)
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
        messages: list[Message] = []
        for cell in self._after.shards_of(rank):
            messages += self._received_at(cell, rank)
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
        """Return the shape that a target rank receives, given the shape on a source rank.

        Raises:
            LayoutError: A length cannot be cut evenly, or an axis that is cut does not exist.

        Example:
            >>> mapping = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> mapping.received_shape([3, 5]), mapping.inverse().received_shape([6, 5])
            ((6, 5), (3, 5))
        """
        lengths = [as_int(length, "every length in shape", 0) for length in shape]
        for cut, axis in zip(self.cuts, resolve_axes(self.cuts, len(lengths)), strict=True):
            length_of_unit(cut.axis, lengths[axis], cut.units // cut.sources)
            lengths[axis] = lengths[axis] * cut.sources // cut.targets
        return tuple(lengths)

    # ---- inside -------------------------------------------------------------------------------

    def _sent_from(self, cell: Cell, rank: int) -> Iterator[Message]:
        """Return what a rank sends of one of its cells."""
        choices = [cut.targets_of(shard) for cut, shard in zip(self.cuts, cell, strict=True)]
        for own in _shards_of(self._after, rank):
            if all(shard in some for shard, some in zip(own, choices, strict=True)):
                yield self._message(cell, own, rank, rank)
        consumers = math.prod(map(len, choices)) * self._after.active
        replica, senders = self._before.replica_of(rank), self._before.active
        first, last = (-(-turn * consumers // senders) for turn in (replica, replica + 1))
        for turn in range(first, last):
            rest, receiver = divmod(turn, self._after.active)
            reversed_cell = []
            for shards in reversed(choices):
                rest, position = divmod(rest, len(shards))
                reversed_cell.append(shards[position])
            there = tuple(reversed_cell[::-1])
            target = self._after.rank_at(there, receiver)
            if cell not in _shards_of(self._before, target):  # else it keeps its own
                yield self._message(cell, there, rank, target)

    def _received_at(self, cell: Cell, rank: int) -> Iterator[Message]:
        """Return what a rank receives of one cell."""
        choices = [cut.sources_of(shard) for cut, shard in zip(self.cuts, cell, strict=True)]
        own = _shards_of(self._before, rank)
        for here in product(*choices):
            if here in own:
                yield self._message(here, cell, rank, rank)
                continue
            position, cells = 0, 1
            for cut, source, target in zip(self.cuts, here, cell, strict=True):
                shards = cut.targets_of(source)
                position = position * len(shards) + target - shards.start
                cells *= len(shards)
            turn = position * self._after.active + self._after.replica_of(rank)
            sender = turn * self._before.active // (cells * self._after.active)
            yield self._message(here, cell, self._before.rank_at(here, sender), rank)

    def _message(self, here: Cell, there: Cell, source: int, target: int) -> Message:
        slots = zip(self._before.slots_of(here), self._after.slots_of(there), strict=True)
        shards = zip(self.cuts, here, there, slots, strict=True)
        parts = [cut.part(one, other, both) for cut, one, other, both in shards]
        return Message(source, target, tuple(parts))

    def _check_roles(self) -> None:
        """Check that each dim has one role, that a layout has it, and that the batch divides."""
        given = [("along", self.along), *(("shards", dim) for dim, _ in self.shards)]
        named = [*given, ("pipeline", self.pipeline)]
        roles = roles_of([(role, dim) for role, dim in named if dim is not None])
        names = self.source.dim_names, self.target.dim_names
        idle = replicating(self.source, self.target, roles)
        for dim, role in roles.items():
            may_lack = dim in _MAY_LACK and not (role == "along" and idle)
            if not may_lack and dim not in {*names[0], *names[1]}:
                hint = "; give along=None if no dim splits a batch" if role == "along" else ""
                raise UnknownDimError(
                    f"{role} names dim {shown(dim)}, which neither layout has; the source has dims "
                    f"{names[0]}, the target {names[1]}{hint}"
                )
        for dim, axis in self.shards:
            if self.along is not None and axis == (ZIGZAG, self.batch_axis):
                raise LayoutError(
                    f"dim {dim!r} in shards cannot cut the batch axis {self.batch_axis} in zigzag; "
                    f"give the sequence axis, as in {{{dim!r}: ({ZIGZAG!r}, 1)}}"
                )
        before, after = (1, 1) if self.along is None else self._sizes(self.along)
        if before % after and after % before:
            raise LayoutError(
                f"the batch is cut along {self.along} into {before} shards on the source and "
                f"{after} on the target; one number must be a multiple of the other, as "
                f"{nearest_multiples(before, after)} on the source"
            )

    def _sizes(self, dim: str) -> tuple[int, int]:
        return self.source.size_of(dim, default=1), self.target.size_of(dim, default=1)

    def _stage(self, layout: RankLayout, is_last: bool) -> dict[str, int]:
        if self.pipeline is None or self.pipeline not in layout.dim_names:
            return {}
        return {self.pipeline: layout.size_of(self.pipeline) - 1 if is_last else 0}


def _shards_of(sharding: Sharding, rank: int) -> list[Cell]:
    """Return the cells of any rank; none if the layout does not hold it."""
    return sharding.shards_of(rank) if rank in sharding.layout else []


def _by_place(message: Message) -> tuple[int, int, list[int]]:
    return message.source, message.target, [part.start for part in message.parts]


def _with_ranks(layout: RankLayout) -> str:
    listing = layout._listing
    ranks = f"{layout.rank_offset}" if listing is None else some_of(listing.ranks, 16)
    return f"{layout} {'at' if listing is None else 'on ranks'} {ranks}"


# ---- arguments ----------------------------------------------------------------------------------


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
                f"shards must map dims to axes, as in {{'cp': 1}}, got {shown(value)}"
            )
        dim, axis = pair
        what = f"the axis of dim {dim!r} in shards"
        if axis == ZIGZAG:
            axis = ZIGZAG, sequence
        if isinstance(axis, tuple) and len(axis) == 2 and axis[0] == ZIGZAG:
            shards.append((dim, (ZIGZAG, as_int(axis[1], what))))
        else:
            shards.append((dim, as_int(axis, what)))
    return tuple(shards)


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


def replicating(
    source: RankLayout, target: RankLayout, roles: Collection[str | None]
) -> tuple[str, ...]:
    """Return the dims larger than 1, of either layout, that have none of the roles.

    Example:
        >>> replicating(RankLayout.parse("tp=2,cp=1,dp=2"), RankLayout.parse("ep=3"), {"dp"})
        ('tp', 'ep')
    """
    dims = dict.fromkeys((*source.dim_names, *target.dim_names))
    return tuple(
        dim
        for dim in dims
        if dim not in roles
        and any(layout.size_of(dim, default=1) > 1 for layout in (source, target))
    )
