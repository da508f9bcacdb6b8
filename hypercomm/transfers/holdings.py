"""Describes the part of each parameter that a rank has.

A plain tensor is one shard along each axis that is split. The mesh and the placements of a DTensor
determine the indices of the rank's part. All ranks exchange their descriptions.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_int, as_ordered
from hypercomm.layout.text import first_n, short_repr
from hypercomm.process_groups.world import World
from hypercomm.transfers.mapping import (
    RankMapping,
    Shards,
    as_shards,
    chunk_sizes,
)
from hypercomm.transfers.tensors import as_tensor, check_buffer

Shape = tuple[int, ...]

Span = tuple[int, int]
"""The first index along an axis, and the index after the last index."""


WHAT = {True: "state", False: "into"}
"""The name of the argument, by whether its tensors are sent."""


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


# ---- the tensors of a state ---------------------------------------------------------------------


@attrs.frozen
class LocalTensors:
    """The tensors of a state on this rank.

    Attributes:
        sent: The parts that this rank sends, by name. Empty if the rank is not a source.
        received: The parts that this rank receives into, by name. Empty if the rank is not a
            target.
        sharded: The given DTensors, by whether they are sent, and by name.
        facts: The values on which the descriptions of the tensors depend.
        device: The device of all tensors.
    """

    sent: Mapping[str, Tensor]
    received: Mapping[str, Tensor]
    sharded: Mapping[tuple[bool, str], Any]
    facts: tuple[object, ...]
    device: torch.device


def read_tensors(given: Mapping[bool, object], rank: int) -> LocalTensors:
    """Check the tensors of this rank.

    Args:
        given: `state` under the key True if this rank is a source, and `into` under the key False
            if this rank is a target.
        rank: This rank.
    """
    tensors: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
    sharded: dict[tuple[bool, str], Any] = {}
    facts: list[object] = []
    for is_sent, value in given.items():
        state = _as_state(value, WHAT[is_sent], rank)
        for name in sorted(state):
            tensor = state[name]
            what = f"{WHAT[is_sent]}[{name!r}]"
            is_sharded = hasattr(tensor, "to_local")
            with torch.no_grad():
                local = as_tensor(tensor.to_local() if is_sharded else tensor, what).detach()
            if not is_sent:
                check_buffer(local, what)
            tensors[is_sent][name] = local
            facts.append((is_sent, name, local.shape, local.dtype))
            if is_sharded:
                with naming(is_sent, name):
                    check_order(tensor)  # also if an equal mesh has a plan
                sharded[is_sent, name] = tensor
                facts.append((tensor.shape, tensor.placements, tensor.device_mesh))
    devices = {one.device for some in tensors.values() for one in some.values()}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise LayoutError(f"all tensors of a rank must be on one device, found {names}")
    return LocalTensors(tensors[True], tensors[False], sharded, tuple(facts), devices.pop())


@contextlib.contextmanager
def naming(is_sent: bool, name: str) -> Iterator[None]:
    """Make a `with` block that adds the name of a tensor of a state to its errors."""
    try:
        yield
    except LayoutError as error:
        raise type(error)(f"{WHAT[is_sent]}[{name!r}]: {error}") from error


def _as_state(value: object, what: str, rank: int) -> Mapping[str, Any]:
    names = list(value) if isinstance(value, Mapping) else []
    for name in names:
        if not isinstance(name, str):
            raise LayoutError(f"the names in {what}= must be texts, got {short_repr(name)}")
    if not isinstance(value, Mapping) or not names:
        advice = "; pass module.state_dict()" if hasattr(value, "state_dict") else ""
        raise LayoutError(
            f"rank {rank} must pass {what}=, a non-empty dict of tensors by name; got "
            f"{short_repr(value)}{advice}"
        )
    return value


# ---- the description of one rank ----------------------------------------------------------------


def describe_plain(
    name: str, tensor: Tensor, mapping: RankMapping, rank: int, *, is_source: bool
) -> Held:
    """Describe a rank's part of a plain tensor that is split as in `mapping`."""
    cells = mapping.cells_at(rank, tensor.ndim, is_source=is_source)
    return Held(name, name_of(tensor.dtype), tuple(tensor.shape), cells=cells)


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
    last = first + sizes[at]
    found = []
    for start, stop in spans:
        begin = start + max(0, first)
        end = min(stop, start + last)
        if begin < end:
            found.append((begin, end))
        first -= stop - start
        last -= stop - start
    return found


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module name."""
    return str(dtype).removeprefix("torch.")


# ---- the state of one rank ----------------------------------------------------------------------


@attrs.frozen
class Description:
    """The descriptions of the tensors of this rank.

    Attributes:
        rows: The descriptions of the sent and the received tensors, for JSON, and the patterns
            that match no tensor of this rank, each with the name of its argument.
        cuts: The mapping of each plain tensor.
    """

    rows: list[Any]
    cuts: Mapping[str, RankMapping]


def describe_tensors(
    mapping: RankMapping,
    tensors: LocalTensors,
    shards: Mapping[str, Mapping[str, int]] | None,
    fused: Mapping[str, Sequence[str] | Fused],
    world: World,
) -> Description:
    """Describe the tensors of this rank."""
    patterns = {"*": mapping}
    if shards is not None:
        patterns = {name: _cut_by(mapping, as_shards(cuts)) for name, cuts in shards.items()}
    matches = _match(patterns, {*tensors.sent, *tensors.received})
    cuts = {name: patterns[pattern] for name, pattern in matches.items()}
    rules = _match(fused, tensors.received)
    rows: list[Any] = []
    for is_sent, some in ((True, tensors.sent), (False, tensors.received)):
        ranks = mapping.source_ranks if is_sent else mapping.target_ranks
        described = []
        for name, local in some.items():
            with naming(is_sent, name):
                if (is_sent, name) in tensors.sharded:
                    given = tensors.sharded[is_sent, name]
                    held = describe_dtensor(name, given, local, ranks, is_numbered=not world.parts)
                elif name in cuts:
                    held = describe_plain(name, local, cuts[name], world.rank, is_source=is_sent)
                else:
                    raise LayoutError(
                        "no pattern in shards= matches this name; add '*': {} as the last pattern "
                        "for parameters that are not sharded"
                    )
            if not is_sent and name in rules:
                held = _with_parts(held, rules[name], fused[rules[name]])
            described.append(held)
        rows.append(to_rows(described))
    used = {"*", *matches.values(), *rules.values()}
    unused = [("shards", one) for one in patterns if one not in used]
    if tensors.received:
        unused += [("fused", one) for one in fused if one not in used]
    return Description([*rows, unused], cuts)


@lru_cache(maxsize=64)
def _cut_by(mapping: RankMapping, shards: Shards) -> RankMapping:
    """Return the mapping of a tensor that is split along other dims."""
    return attrs.evolve(mapping, shards=shards, sizes=())


def _match(patterns: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Map each name to the first pattern that matches it. Names without a match are omitted."""
    firsts = {
        name: next((one for one in patterns if fnmatchcase(name, one)), None) for name in names
    }
    return {name: pattern for name, pattern in firsts.items() if pattern is not None}


def _with_parts(held: Held, pattern: str, given: Sequence[str] | Fused) -> Held:
    """Return the description of a fused parameter, with the names of its parts."""
    what = f"fused[{pattern!r}]"
    if held.whole is not None:
        raise LayoutError(
            f"into[{held.name!r}] is a DTensor, but matches {what}; pass its to_local(), and "
            f"specify its sharding in shards="
        )
    rule = given if isinstance(given, Fused) else Fused(as_ordered(given, what))
    texts = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), held.name)
    parts = []
    for part in rule.parts:
        first, *more = part.split("*")
        if texts is None:
            raise LayoutError(f"the key of {what} may contain '*', but not '?' or '['")
        if len(more) > len(texts.groups()):
            raise LayoutError(f"{what} contains the part {part!r} with more '*' than the key")
        filled = zip(texts.groups(), more, strict=False)
        parts.append(first + "".join(text + piece for text, piece in filled))
    heads = None
    if rule.heads is not None:
        heads = tuple(as_int(one, f"each of the heads of {what}", 1) for one in rule.heads)
    if not parts or (heads is not None and len(heads) != len(parts)):
        raise LayoutError(
            f"{what} must contain one or more parts, and heads=, if given, must contain a number "
            f"for each part; got {len(parts)} parts and heads={heads}"
        )
    axes = len(held.shape)
    axis = as_int(rule.axis, f"the axis of {what}", -axes, axes - 1)
    return attrs.evolve(held, fused=(tuple(parts), heads, axis % axes))
