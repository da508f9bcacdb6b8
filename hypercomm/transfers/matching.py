"""Computes which part of each parameter each rank has, as boxes of the full tensor.

A box is a block of a tensor, given as a range of indices along each axis. All ranks compute the
same boxes from the descriptions of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, product
from math import prod

import attrs
import torch

from hypercomm.errors import LayoutError, PlanMismatchError
from hypercomm.layout.text import first_n
from hypercomm.transfers.holdings import Held, Shape, Span, name_of
from hypercomm.transfers.mapping import RankMapping, chunk_sizes

Box = tuple[Span, ...]
"""A span along each axis of a full tensor."""


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
    parts_of = _by_name(sent, "state")
    sources = {}
    for name, held in parts_of.items():
        whole, regions = _regions(f"state[{name!r}]", held)
        boxes: dict[Box, dict[int, Shape]] = {}
        for rank, some in regions.items():
            for box, start in some:
                boxes.setdefault(box, {})[rank] = start
        sources[name] = SourceTensor(next(iter(held.values())).dtype, whole, boxes)
    targets = []
    used: set[str] = set()
    for name, held in sorted(_by_name(received, "into").items()):
        rank, one = next(iter(held.items()))
        parts = [name] if one.fused is None else one.fused[0]
        for part in parts:
            if part not in sources:
                near = first_n([repr(known) for known in sorted(sources)], 4)
                stages = (stage or {}).items()
                only = "".join(f" of stage {dim}={at}, which sends," for dim, at in stages)
                raise misfit(
                    f"rank {rank} needs {part!r} for into[{name!r}], but state={only} contains "
                    f"{near}"
                )
            _check_dtype(name, one.dtype, part, sources[part].dtype, dtype)
        used.update(parts)
        wanted = (
            _unfused(name, held, parts_of[name], sources[name])
            if one.fused is None
            else [_fused(rank, its, sources) for rank, its in held.items()]
        )
        targets.append(Target(name, one.dtype, wanted))
    unused = sorted(sources.keys() - used)
    if unused:
        owner = next(iter(parts_of[unused[0]]))
        names = first_n([repr(name) for name in unused], 4)
        raise misfit(f"rank {owner} has {names} in state=, which no rank has in into=")
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
    name: str, held: Mapping[int, Held], sent: Mapping[int, Held], source: SourceTensor
) -> list[list[Wanted]]:
    """Return the boxes that each target rank needs of a parameter that is not fused."""
    whole, regions = _regions(f"into[{name!r}]", held)
    if whole != source.whole:
        rank, one = next(iter(held.items()))
        sender, its = next(iter(sent.items()))
        raise misfit(
            f"the full shape of {name!r} is {source.whole} in state= and {whole} in into=: rank "
            f"{sender} sends a part of shape {its.shape} ({its.how}), and rank {rank} receives "
            f"a part of shape {one.shape} ({one.how})"
        )
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
    title: str, held: Mapping[int, Held]
) -> tuple[Shape, dict[int, list[tuple[Box, Shape]]]]:
    """Return the full shape of a parameter, and the boxes of each rank.

    Each box is returned with the index at which it begins in the tensor of the rank.

    Args:
        title: The name of the parameter in errors.
        held: The part on each rank.

    Raises:
        PlanMismatchError: The parts do not fit, or no rank has some part.
    """
    first = next(iter(held.values()))
    shards: list[list[Span]] = []  # of a plain tensor, the span of each shard along each axis
    if first.whole is None:
        lengths = lengths_of(title, held)
        for axis, _, count in first.cells:
            missing = {*range(count)} - {*lengths[axis]}
            if missing:
                raise misfit(
                    f"shard {min(missing)} of {count} along axis {axis} of {title} is on no rank; "
                    f"ranks {first_n(tuple(held), 8)} have other shards"
                )
        for some in lengths:
            borders = accumulate((some[shard] for shard in sorted(some)), initial=0)
            shards.append(list(pairwise(borders)))
    found = {}
    for rank, one in held.items():
        at = {axis: shard for axis, shard, _ in one.cells}
        spans = one.spans or [[some[at.get(axis, 0)]] for axis, some in enumerate(shards)]
        starts = [
            accumulate((stop - start for start, stop in some[:-1]), initial=0) for some in spans
        ]
        boxes = zip(product(*spans), product(*starts), strict=True)
        found[rank] = [(box, start) for box, start in boxes if size_of(box)]
    return first.whole or tuple(some[-1][1] for some in shards), found


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
    places = {on: (shard, count) for on, shard, count in held.cells}
    wanted = []
    shapes = []
    offset = 0
    for part, number in zip(parts, heads or [0] * len(parts), strict=True):
        whole = sources[part].whole
        if len(whole) != len(held.shape):
            raise misfit(
                f"into[{held.name!r}] has shape {held.shape}, but its part {part!r} has shape "
                f"{whole}, with another number of axes"
            )
        box = [_chunk_of(length, *places.get(at, (0, 1))) for at, length in enumerate(whole)]
        if number:
            box[axis] = _heads_of(part, whole[axis], number, *places.get(axis, (0, 1)))
        start = [0] * len(whole)
        start[axis] = offset
        wanted.append(Wanted(rank, part, tuple(box), tuple(start)))
        shapes.append(tuple(end - begin for begin, end in box))
        offset += shapes[-1][axis]
    due = [{*lengths} for lengths in zip(*shapes, strict=True)]
    due[axis] = {offset}
    if due != [{length} for length in held.shape]:
        raise misfit(
            f"into[{held.name!r}] has shape {held.shape} on rank {rank}, but this rank's shards of "
            f"its parts {list(parts)} have shapes {shapes}, and are concatenated along axis "
            f"{axis}; the full parts have shapes {[sources[part].whole for part in parts]}"
        )
    return [one for one in wanted if size_of(one.box)]


def _chunk_of(length: int, shard: int, count: int) -> Span:
    """Return the span of a shard by torch.chunk's rule."""
    sizes = chunk_sizes(length, [count])
    return sum(sizes[:shard]), sum(sizes[: shard + 1])


def _heads_of(part: str, length: int, heads: int, shard: int, count: int) -> Span:
    """Return the span of a shard in a part. A head is never split.

    If there are more shards than heads, several shards have the same head.

    >>> _heads_of("q", 64, 8, 1, 4), _heads_of("k", 16, 2, 1, 4)
    ((16, 32), (0, 8))
    """
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
        for is_source, ranks in ((True, mapping.source_ranks), (False, mapping.target_ranks)):
            for rank in ranks:
                shape = mapping.shape_at(rank, whole, is_source=is_source)
                cells = mapping.cells_at(rank, len(shape), is_source=is_source)
                part = Held(one.name, one.dtype, shape, cells=cells)
                found[is_source].setdefault(rank, []).append(part)
    return found[True], found[False]
