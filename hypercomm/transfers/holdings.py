"""Computes which part of each parameter each rank has, as boxes of the full tensor.

A box is a block of a tensor, given as a range of indices along each axis. Each rank describes its
tensors. A plain tensor is one shard along each axis that is split. The mesh and the placements of a
DTensor determine the indices of the rank's part. All ranks exchange their descriptions, and compute
the same boxes from the descriptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from hypercomm.errors import LayoutError, PlanMismatchError
from hypercomm.layout.text import first_n
from hypercomm.transfers.mapping import RankMapping, chunk_sizes, resolve_axes

Shape = tuple[int, ...]

Span = tuple[int, int]
"""The first index along an axis, and the index after the last index."""

Box = tuple[Span, ...]
"""A span along each axis of a full tensor."""


class Fused(NamedTuple):
    """A parameter of the target whose parts are several parameters of the source.

    Attributes:
        parts: The names of the parts, or patterns of names, in the order in which the parts are
            concatenated. The n-th "*" in such a pattern is replaced by the text that the n-th "*"
            in the key of `fused=` matches.
        heads: The number of heads of each part. Heads are not split. If a part has fewer heads
            than there are shards, several neighbouring ranks have the same head. Default: each part
            is split by torch.chunk's rule.
        axis: The axis along which the parts are concatenated.

    Example:
        >>> rule = Fused(["*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"], (32, 8, 8))
        >>> fused = {"*.qkv_proj.weight": rule}
    """

    parts: Sequence[str]
    heads: Sequence[int] | None = None
    axis: int = 0


@attrs.frozen
class Held:
    """The part of a parameter on one rank.

    Attributes:
        name: The name of the parameter.
        dtype: The type of its elements.
        shape: The shape of the part.
        placements: For a DTensor, a text that describes its placements and its mesh. All source
            ranks have the same text, and all target ranks have the same text.
        cells: For each axis that is split, the axis, the index of this rank's shard, and the number
            of shards.
        whole: The shape of the full tensor. None for a plain tensor, whose full shape is unknown.
        spans: For a DTensor, the spans of the part along each axis of the full tensor.
        fused: For a fused parameter, the parts, their heads and the axis. Otherwise None.
    """

    name: str
    dtype: str
    shape: Shape
    placements: str = ""
    cells: tuple[tuple[int, int, int], ...] = ()
    whole: Shape | None = None
    spans: tuple[tuple[Span, ...], ...] = ()
    fused: tuple[tuple[str, ...], tuple[int, ...] | None, int] | None = None

    @property
    def how(self) -> str:
        """A text that describes how the parameter is split."""
        counts = ", ".join(f"{count} shards of axis {axis}" for axis, _, count in self.cells)
        return self.placements or counts or "unsharded"


def to_rows(held: Iterable[Held]) -> list[tuple[Any, ...]]:
    """Return descriptions as rows for JSON. `from_rows` is the inverse."""
    return [attrs.astuple(one, recurse=False) for one in held]


def from_rows(rows: Iterable[Any]) -> list[Held]:
    """Return the descriptions that `to_rows` wrote."""
    return [Held(*_frozen(row)) for row in rows]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


# ---- the description of one rank ----------------------------------------------------------------


def describe_plain(
    name: str, dtype: str, shape: Shape, mapping: RankMapping, rank: int, *, is_source: bool
) -> Held:
    """Describe a rank's part of a plain tensor that is split as in `mapping`."""
    sharding = mapping.before if is_source else mapping.after
    places = sharding.place_of(rank) or ()
    axes = resolve_axes(mapping.cuts, len(shape))
    every = zip(axes, places, sharding.counts, strict=True)
    cells = tuple(sorted(cell for cell in every if cell[2] > 1))
    return Held(name, dtype, shape, cells=cells)


def describe_dtensor(
    name: str, tensor: Any, local: Tensor, ranks: Sequence[int], *, is_numbered: bool = True
) -> Held:
    """Describe a DTensor.

    Args:
        name: The name of the parameter.
        tensor: The DTensor.
        local: The local tensor of the DTensor.
        ranks: The ranks of the source or of the target. The mesh must consist of some or all of
            these ranks.
        is_numbered: Whether the mesh uses the same rank numbers as `ranks`. In a joined world, a
            mesh on torch's default process group uses other numbers.

    Raises:
        LayoutError: A placement neither shards nor replicates, the mesh has ranks outside of
            `ranks`, or the shape of the local tensor does not fit the mesh and the placements.
    """
    mesh = tensor.device_mesh
    placements = tensor.placements
    coordinate = mesh.get_coordinate()
    # A slice of a mesh can be read only on the ranks of the slice.
    members = () if coordinate is None else _members(mesh)
    fits = {*members} <= {*ranks} if is_numbered else len(members) <= len(ranks)
    if coordinate is None or not fits:
        raise LayoutError(
            f"is a DTensor on a mesh of ranks {first_n(members, 8) or 'that exclude this rank'}, "
            f"but the mapping requires a mesh of some or all of ranks {first_n(ranks, 8)}"
        )
    whole = tuple(tensor.shape)
    spans = spans_of(whole, tuple(mesh.shape), coordinate, placements)
    due = tuple(sum(stop - start for start, stop in some) for some in spans)
    if due != tuple(local.shape):
        raise LayoutError(
            f"is a DTensor whose local shape is {tuple(local.shape)}, but {placements} on a mesh "
            f"of shape {tuple(mesh.shape)} require {due}"
        )
    how = f"{placements} on a mesh of shape {tuple(mesh.shape)}"
    return Held(name, name_of(tensor.dtype), due, how, whole=whole, spans=spans)


def check_order(tensor: Any) -> None:
    """Raise if the groups along the dims that shard a DTensor lack the order of its mesh.

    The collectives of DTensor use the order of a group's ranks. On a mesh whose groups torch has
    sorted, `full_tensor()` differs from the shards by coordinates, and can differ between ranks.
    """
    mesh = tensor.device_mesh
    for dim, index in enumerate(mesh.get_coordinate() or ()):
        if tensor.placements[dim].is_replicate():
            continue
        try:
            position = mesh.get_group(dim).rank()
        except RuntimeError:  # torch's error for a mesh without groups
            continue
        if position != index:
            raise LayoutError(
                f"is a DTensor on a mesh of ranks {first_n(_members(mesh), 8)} and shape "
                f"{tuple(mesh.shape)}, but torch has sorted the ranks of its groups: this rank has "
                f"index {index} along dim {dim} of the mesh, and index {position} in the group; "
                f"pass ascending ranks to DeviceMesh, or make the mesh with grid.device_mesh(), "
                f"whose groups keep the order"
            )


@lru_cache(maxsize=16)
def _members(mesh: Any) -> tuple[int, ...]:
    """Return the ranks of a mesh."""
    return tuple(mesh.mesh.flatten().tolist())


def spans_of(
    whole: Shape, sizes: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[Span, ...], ...]:
    """Return the spans that one rank of a mesh has along each axis of a tensor.

    Args:
        whole: The shape of the full tensor.
        sizes: The sizes of the mesh.
        coordinate: The coordinates of the rank in the mesh.
        placements: The placement along each dim of the mesh.

    Raises:
        LayoutError: A placement neither shards nor replicates.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> spans_of((10, 4), (2, 4), (1, 3), [Replicate(), Shard(0)])
        (((9, 10),), ((0, 4),))
    """
    spans: list[tuple[Span, ...]] = [((0, length),) for length in whole]
    for dim, pieces in _in_order(sizes, placements):
        axis = placements[dim].dim
        found: list[Span] = []
        for piece in range(pieces):
            part = _chunk(spans[axis], pieces, piece)
            found += _chunk(part, sizes[dim], coordinate[dim])
        spans[axis] = tuple(found)
    return tuple(some or ((0, 0),) for some in spans)


def _in_order(sizes: Sequence[int], placements: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the dims of a mesh that shard a tensor, in the order in which they split each axis.

    Returns:
        Each dim, and the number of pieces of the axis that it splits one by one.

    Raises:
        LayoutError: A placement neither shards nor replicates.
    """
    dims_of: dict[int, list[int]] = {}
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        axis = getattr(placement, "dim", None)
        if axis is None or placement.is_partial():
            raise LayoutError(
                f"has placement {placement}; first redistribute it to Replicate() or Shard()"
            )
        dims_of.setdefault(axis, []).append(dim)
    factors = [getattr(placement, "split_factor", 1) for placement in placements]
    return [pair for dims in dims_of.values() for pair in _order_of_axis(dims, sizes, factors)]


def _order_of_axis(
    dims: Sequence[int], sizes: Sequence[int], factors: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the dims that shard one axis, in the order in which they split it.

    FSDP2 splits parameters that tensor parallelism has already split, although its mesh dim comes
    first. Its placement is a strided shard, whose factor is the number of shards that later mesh
    dims make. If a factor is not such a number, the dims split in the order of the mesh, and a
    strided shard has a part of each of several pieces.

    Args:
        dims: The dims, in the order of the mesh.
        sizes: The sizes of the mesh.
        factors: The factor of each placement, which is 1 if the shard is not strided.
    """
    order: list[int] = []
    for dim in reversed(dims):
        shards = 1
        before = 0
        while shards < factors[dim] and before < len(order):
            shards *= sizes[order[before]]
            before += 1
        if shards != factors[dim]:
            return [(each, factors[each]) for each in dims]
        order.insert(before, dim)
    return [(each, 1) for each in order]


def _chunk(spans: Sequence[Span], count: int, at: int) -> list[Span]:
    """Split the indices in `spans` by torch.chunk's rule, and return chunk `at` of `count`."""
    sizes = chunk_sizes(sum(stop - start for start, stop in spans), [count])
    first = sum(sizes[:at])
    last = sum(sizes[: at + 1])
    found = []
    before = 0
    for start, stop in spans:
        begin = start + max(0, first - before)
        end = min(stop, start + last - before)
        if begin < end:
            found.append((begin, end))
        before += stop - start
    return found


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module name."""
    return str(dtype).removeprefix("torch.")


def infer_remote_parts(
    held: Iterable[Held], cuts: Mapping[str, RankMapping]
) -> tuple[dict[int, list[Held]], dict[int, list[Held]]]:
    """Return the parts on all source ranks and on all target ranks, assuming that shards are even.

    In a fake world, only one rank exists, so the descriptions of other ranks are not available.

    Args:
        held: The parts on one rank.
        cuts: The mapping of each parameter, by name.

    Raises:
        LayoutError: A parameter is a DTensor or fused, so its parts on other ranks are not known.
    """
    found: dict[bool, dict[int, list[Held]]] = {True: {}, False: {}}
    for one in held:
        if one.whole is not None or one.fused is not None:
            raise LayoutError(
                f"{one.name!r} is a DTensor or fused, so a fake world cannot know its parts on "
                f"other ranks; use run_ranks"
            )
        mapping = cuts[one.name]
        counts = {axis: count for axis, _, count in one.cells}
        whole = [length * counts.get(axis, 1) for axis, length in enumerate(one.shape)]
        for end, ranks in ((True, mapping.source_ranks), (False, mapping.target_ranks)):
            for rank in ranks:
                shape = mapping.shape_at(rank, whole, is_source=end)
                other = describe_plain(one.name, one.dtype, shape, mapping, rank, is_source=end)
                found[end].setdefault(rank, []).append(other)
    return found[True], found[False]


# ---- all ranks together -------------------------------------------------------------------------


@attrs.frozen
class SourceTensor:
    """A parameter of the source.

    Attributes:
        dtype: The type of its elements.
        whole: The shape of the full tensor.
        boxes: The ranks that have each box. Each rank is mapped to the index at which the box
            begins in the tensor of the rank.
    """

    dtype: str
    whole: Shape
    boxes: dict[Box, dict[int, Shape]]


@attrs.frozen
class Wanted:
    """A box of a source parameter that a target rank receives or copies.

    Attributes:
        rank: The target rank.
        source: The name of the parameter of the source.
        box: The box, as indices of the full source tensor.
        start: The index at which the box begins in the tensor of the target rank.
    """

    rank: int
    source: str
    box: Box
    start: Shape


@attrs.frozen
class Target:
    """A parameter of the target.

    Attributes:
        name: The name of the parameter.
        dtype: The type of its elements.
        wanted: For each target rank, the boxes that the rank needs.
    """

    name: str
    dtype: str
    wanted: list[list[Wanted]]


def match_tensors(
    sent: Mapping[int, Sequence[Held]],
    received: Mapping[int, Sequence[Held]],
    dtype: torch.dtype | None = None,
    stage: Mapping[str, int] | None = None,
) -> tuple[dict[str, SourceTensor], list[Target]]:
    """Return the parameters of the source and the target, from the descriptions of all ranks.

    Args:
        sent: The descriptions of each source rank.
        received: The descriptions of each target rank.
        dtype: The type to which the sender converts floating-point tensors.
        stage: The coordinates of the pipeline stage that sends, for errors.

    Raises:
        PlanMismatchError: The tensors of two ranks, or of source and target, do not fit. All ranks
            raise the same error.
    """
    stage = stage or {}
    sources = {}
    for name, held in _by_name(sent, "state").items():
        whole = _whole(f"state[{name!r}]", held)
        boxes: dict[Box, dict[int, Shape]] = {}
        for rank, regions in _regions(held, whole).items():
            for box, start in regions:
                boxes.setdefault(box, {})[rank] = start
        sources[name] = SourceTensor(next(iter(held.values())).dtype, tuple(map(sum, whole)), boxes)
    targets = []
    used = set()
    for name, held in sorted(_by_name(received, "into").items()):
        rank, one = next(iter(held.items()))
        parts = [name] if one.fused is None else one.fused[0]
        for part in parts:
            if part not in sources:
                near = first_n([repr(known) for known in sorted(sources)], 4)
                only = "".join(f" of stage {dim}={at}, which sends," for dim, at in stage.items())
                raise misfit(
                    f"rank {rank} needs {part!r} for into[{name!r}], but state={only} contains "
                    f"{near}"
                )
            _check_dtype(name, one.dtype, part, sources[part].dtype, dtype)
        used |= {*parts}
        wanted = (
            _unfused(name, held, sent, sources[name])
            if one.fused is None
            else [_fused(rank, one, sources) for rank, one in held.items()]
        )
        targets.append(Target(name, one.dtype, wanted))
    unused = [repr(name) for name in sorted(sources.keys() - used)]
    if unused:
        owner = next(
            rank for rank, some in sent.items() if any(repr(one.name) == unused[0] for one in some)
        )
        raise misfit(f"rank {owner} has {first_n(unused, 4)} in state=, which no rank has in into=")
    return sources, targets


def replicas_of(sources: Mapping[str, SourceTensor]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the source ranks that have the same part of a parameter, for each such part.

    Example:
        >>> boxes = {((0, 2),): {0: (0,), 2: (0,)}, ((2, 4),): {1: (0,)}}
        >>> replicas_of({"w": SourceTensor("float32", (4,), boxes)})
        [('w', (0, 2))]
    """
    groups = [(name, tuple(ranks)) for name, one in sources.items() for ranks in one.boxes.values()]
    return [(name, ranks) for name, ranks in dict.fromkeys(groups) if len(ranks) > 1]


def _unfused(
    name: str, held: Mapping[int, Held], sent: Mapping[int, Sequence[Held]], source: SourceTensor
) -> list[list[Wanted]]:
    """Return the boxes that each target rank needs of a parameter that is not fused."""
    lengths = _whole(f"into[{name!r}]", held)
    whole = tuple(map(sum, lengths))
    if whole != source.whole:
        rank, one = next(iter(held.items()))
        sender, its = next(
            (sender, other) for sender, some in sent.items() for other in some if other.name == name
        )
        raise misfit(
            f"the full shape of {name!r} is {source.whole} in state= and {whole} in into=: rank "
            f"{sender} sends a part of shape {its.shape} ({its.how}), and rank {rank} receives "
            f"a part of shape {one.shape} ({one.how})"
        )
    regions = _regions(held, lengths)
    return [[Wanted(rank, name, *one) for one in some] for rank, some in regions.items()]


def misfit(text: str) -> PlanMismatchError:
    """Return the error for ranks whose tensors do not fit."""
    return PlanMismatchError(f"nothing was sent: ranks differ: {text}")


def _check_dtype(name: str, target: str, part: str, source: str, dtype: torch.dtype | None) -> None:
    is_converted = dtype is not None and getattr(torch, source).is_floating_point
    due = name_of(dtype) if dtype is not None and is_converted else source
    if target != due:
        hint = "" if is_converted else "; pass dtype= to convert it"
        raise misfit(f"state[{part!r}] arrives as {due}, and into[{name!r}] has {target}{hint}")


def _by_name(described: Mapping[int, Sequence[Held]], what: str) -> dict[str, dict[int, Held]]:
    """Return the part of each parameter on each rank that has it. Raise if the shards differ."""
    found: dict[str, dict[int, Held]] = {}
    for rank, some in described.items():
        for held in some:
            found.setdefault(held.name, {})[rank] = held
    for name, parts in found.items():
        first, one = next(iter(parts.items()))
        for rank, other in parts.items():
            facts = [(h.how, h.dtype, len(h.shape), h.whole, h.fused) for h in (one, other)]
            if facts[0] != facts[1]:
                raise misfit(
                    f"{what}[{name!r}] is {_as_text(one)} on rank {first}, and {_as_text(other)} "
                    f"on rank {rank}"
                )
    return found


def _as_text(held: Held) -> str:
    fused = f", fused from {list(held.fused[0])}" if held.fused else ""
    return f"{held.dtype} of shape {held.whole or held.shape} ({held.how}){fused}"


def _whole(title: str, held: Mapping[int, Held]) -> list[list[int]]:
    """Return the lengths of the shards along each axis of a parameter."""
    first = next(iter(held.values()))
    if first.whole is not None:
        return [[length] for length in first.whole]
    lengths = lengths_of(title, held)
    for axis, _, count in first.cells:
        missing = {*range(count)} - {*lengths[axis]}
        if missing:
            raise misfit(
                f"shard {min(missing)} of {count} along axis {axis} of {title} is on no rank; "
                f"ranks {first_n(tuple(held), 8)} have other shards"
            )
    return [[some[shard] for shard in sorted(some)] for some in lengths]


def lengths_of(title: str, held: Mapping[int, Held]) -> list[dict[int, int]]:
    """Return the length of each shard along each axis of a plain tensor.

    Args:
        title: The name of the tensor in errors.
        held: The part on each rank.

    Raises:
        PlanMismatchError: The same shard has different lengths on two ranks.
    """
    lengths: list[dict[int, int]] = []
    for axis in range(len(next(iter(held.values())).shape)):
        seen: dict[int, int] = {}
        for rank, one in held.items():
            shard = next((index for at, index, _ in one.cells if at == axis), 0)
            other = seen.setdefault(shard, rank)
            if held[other].shape[axis] != one.shape[axis]:
                raise misfit(
                    f"{title} has shape {held[other].shape} on rank {other} and {one.shape} on "
                    f"rank {rank} ({one.how})"
                )
        lengths.append({shard: held[rank].shape[axis] for shard, rank in seen.items()})
    return lengths


def _regions(
    held: Mapping[int, Held], lengths: Sequence[Sequence[int]]
) -> dict[int, list[tuple[Box, Shape]]]:
    """Return the boxes of each rank, and the index at which each box begins in its tensor."""
    borders = [list(pairwise(accumulate(sizes, initial=0))) for sizes in lengths]
    found = {}
    for rank, one in held.items():
        cells = {axis: index for axis, index, _ in one.cells}
        spans = one.spans or [[some[cells.get(axis, 0)]] for axis, some in enumerate(borders)]
        starts = [
            list(accumulate((stop - start for start, stop in some), initial=0)) for some in spans
        ]
        boxes = product(*spans)
        found[rank] = [
            (box, start)
            for box, start in zip(boxes, product(*(some[:-1] for some in starts)), strict=True)
            if size_of(box)
        ]
    return found


def size_of(box: Box) -> int:
    """Return the number of elements of a box.

    >>> size_of(((0, 3), (2, 4)))
    6
    """
    return prod(stop - start for start, stop in box)


def _fused(rank: int, held: Held, sources: Mapping[str, SourceTensor]) -> list[Wanted]:
    """Return the boxes of the source parameters that a rank needs for a fused parameter."""
    if held.fused is None:
        return []
    parts, heads, axis = held.fused
    shard, count = next(((at, n) for on, at, n in held.cells if on == axis), (0, 1))
    wanted = []
    offset = 0
    for part, number in zip(parts, heads or [0] * len(parts), strict=True):
        whole = sources[part].whole
        if len(whole) != len(held.shape):
            raise misfit(
                f"into[{held.name!r}] has shape {held.shape}, but its part {part!r} has shape "
                f"{whole}, with another number of axes"
            )
        box = [_cut_evenly(length, held.cells, at) for at, length in enumerate(whole)]
        box[axis] = _heads_of(part, whole[axis], number, shard, count)
        start = [0] * len(whole)
        start[axis] = offset
        offset += box[axis][1] - box[axis][0]
        wanted.append(Wanted(rank, part, tuple(box), tuple(start)))
    due = [stop - start for start, stop in wanted[0].box]
    due[axis] = offset
    each = [tuple(stop - start for start, stop in one.box) for one in wanted]
    is_even = all(
        (*one[:axis], *one[axis + 1 :]) == (*due[:axis], *due[axis + 1 :]) for one in each
    )
    if tuple(due) != held.shape or not is_even:
        raise misfit(
            f"into[{held.name!r}] has shape {held.shape} on rank {rank}, but this rank's shards of "
            f"its parts {list(parts)} have shapes {each}, and are concatenated along axis {axis}; "
            f"the full parts have shapes {[sources[part].whole for part in parts]}"
        )
    return [one for one in wanted if size_of(one.box)]


def _cut_evenly(length: int, cells: Sequence[tuple[int, int, int]], axis: int) -> Span:
    for on, shard, count in cells:
        if on == axis:
            sizes = chunk_sizes(length, [count])
            return sum(sizes[:shard]), sum(sizes[: shard + 1])
    return 0, length


def _heads_of(part: str, length: int, heads: int, shard: int, count: int) -> Span:
    """Return the span of a shard in a part. A head is never split.

    If there are more shards than heads, several shards have the same head. With `heads` 0, the part
    is split by torch.chunk's rule.

    >>> _heads_of("q", 64, 8, 1, 4), _heads_of("k", 16, 2, 1, 4), _heads_of("up", 10, 0, 3, 4)
    ((16, 32), (0, 8), (9, 10))
    """
    if not heads:
        return _cut_evenly(length, [(0, shard, count)], 0)
    if length % heads or (heads % count and count % heads):
        raise misfit(
            f"{part!r} has {length} rows in {heads} heads, which cannot be divided into {count} "
            f"shards: the number of rows must be a multiple of the number of heads, and one of the "
            f"numbers of heads and shards must be a multiple of the other"
        )
    size = length // heads
    copies = max(1, count // heads)
    each = max(1, heads // count)
    first = shard // copies * each
    return first * size, (first + each) * size
