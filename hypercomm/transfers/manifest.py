"""The manifest: what parameters a rank has of a model, read from its state dicts and patterns."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import attrs
from torch import Tensor

from hypercomm.errors import LayoutError
from hypercomm.layout import RankMapping
from hypercomm.layout.messages import resolve_axes
from hypercomm.layout.text import did_you_mean, shown
from hypercomm.transfers.buckets import Parameter
from hypercomm.transfers.memory import Overlaps
from hypercomm.transfers.tensors import as_tensor, check_buffer, check_device

Tensors = dict[str, Tensor]


@attrs.frozen
class Manifest:
    """What a rank has of a model, and where it wants it.

    Attributes:
        parameters: All parameters, by name.
        sent: What it has, by name; empty off the stage that sends.
        received: What is written to, by name; empty off the stage that receives.
    """

    parameters: tuple[Parameter, ...]
    sent: Tensors
    received: Tensors

    def entries(self) -> list[str]:
        """Say what is moved, parameter by parameter, as all ranks must alike."""
        lines = [f"parameter {number} as {each}" for number, each in enumerate(self.parameters, 1)]
        return [*lines, f"no parameter {len(lines) + 1}"]


def read_manifest(
    mapping: RankMapping,
    rank: int,
    state: object,
    into: object,
    shards: object,
    *,
    is_target: bool,
    is_source: bool,
) -> Manifest:
    """Read and check what a rank gives.

    Raises:
        LayoutError: Something is missing, or does not fit; says what, of which parameter.
    """
    patterns = _patterns(mapping, shards)
    sent = _tensors(state, "state", rank, "sends") if is_source else {}
    received = _tensors(into, "into", rank, "receives") if is_target else {}
    _check_devices(sent, received)
    for name, buffer in received.items():
        check_buffer(buffer, f"into[{name!r}]")
    names = sorted(sent or received)
    found = _match(patterns, names)
    sides = [(given, source) for given, source in ((sent, True), (received, False)) if given]
    whole = [_parameters(found, given, source=source) for given, source in sides]
    if whole[0] != whole[-1]:
        raise LayoutError(_first_difference(whole[0], whole[-1]))
    _refuse_shared(sent, received, found, rank)
    return Manifest(tuple(whole[0].values()), sent, received)


# ---- shards -------------------------------------------------------------------------------------


def _patterns(mapping: RankMapping, shards: object) -> dict[str, RankMapping]:
    """Read how the parameters are cut: the mapping of each pattern."""
    if shards is None:
        return {"*": mapping}
    if not isinstance(shards, Mapping) or not shards:
        raise LayoutError(
            f"shards must map patterns of names to dims and axes, as in "
            f"{{'*.qkv.weight': {{'tp': 0}}, '*': {{}}}}, got {shown(shards)}"
        )
    patterns: dict[str, RankMapping] = {}
    for pattern, cuts in shards.items():
        if not isinstance(pattern, str):
            raise LayoutError(f"every pattern in shards must be a string, got {shown(pattern)}")
        if not isinstance(cuts, Mapping):
            raise LayoutError(
                f"shards[{pattern!r}] must map dims to axes, as in {{'tp': 0}}, got {shown(cuts)}"
            )
        try:
            patterns[pattern] = attrs.evolve(mapping, shards=cuts)
        except LayoutError as error:
            raise type(error)(f"shards[{pattern!r}]: {error}") from error
    return patterns


def _match(patterns: Mapping[str, RankMapping], names: list[str]) -> dict[str, RankMapping]:
    """Give each name the first pattern that matches it."""
    found: dict[str, RankMapping] = {}
    used = set()
    for name in names:
        for pattern, mapping in patterns.items():
            if fnmatchcase(name, pattern):
                found[name] = mapping
                used.add(pattern)
                break
        else:
            raise LayoutError(
                f"no pattern of shards matches parameter {name!r}: they are {shown([*patterns])}; "
                f"add '*': {{}} as the last for those that no dim cuts"
            )
    for pattern in patterns:
        if pattern in used or pattern == "*":
            continue
        taken = [name for name in names if fnmatchcase(name, pattern)]
        if taken:
            raise LayoutError(
                f"the pattern {pattern!r} of shards comes too late: patterns before it match all "
                f"that it does, {taken[0]!r} first; put it before them"
            )
        raise LayoutError(
            f"the pattern {pattern!r} of shards matches no parameter; there are {len(names)}, "
            f"{names[0]!r} first{did_you_mean(pattern, names)}"
        )
    return found


# ---- tensors ------------------------------------------------------------------------------------


def _tensors(value: object, what: str, rank: int, does: str) -> Tensors:
    """Read a state dict: which tensors a rank gives, by name."""
    if value is None:
        raise LayoutError(f"rank {rank} {does}, and must give {what}, a dict of tensors by name")
    if not isinstance(value, Mapping):
        raise LayoutError(f"{what} must be a dict of tensors by name, got {shown(type(value))}")
    if not value:
        raise LayoutError(f"{what} holds no tensors; rank {rank} {does}, and must give some")
    tensors: Tensors = {}
    for name, given in value.items():
        if not isinstance(name, str):
            raise LayoutError(f"every name in {what} must be a string, got {shown(name)}")
        if isinstance(given, Tensor) and hasattr(given, "to_local"):
            raise LayoutError(
                f"{what}[{name!r}] is a DTensor; give its to_local(), and say in shards which dims "
                f"cut it"
            )
        tensors[name] = as_tensor(given, f"{what}[{name!r}]").detach()
    return tensors


def _check_devices(sent: Tensors, received: Tensors) -> None:
    """Check that all tensors are on one device, which WORLD can move from."""
    first: tuple[str, Any] | None = None
    for what, tensors in (("state", sent), ("into", received)):
        for name, tensor in tensors.items():
            if first is None:
                first = f"{what}[{name!r}]", tensor.device
                check_device(tensor, None, first[0])
            if tensor.device != first[1]:
                raise LayoutError(
                    f"all tensors of a rank must be on one device, but {first[0]} is on "
                    f"{first[1]}, and {what}[{name!r}] on {tensor.device}"
                )


def _parameters(
    found: Mapping[str, RankMapping], given: Tensors, *, source: bool
) -> dict[str, Parameter]:
    """Tell the whole parameters, of which a rank has parts; by name, in order."""
    parameters = {}
    for name in sorted(given):
        tensor = given[name]
        mapping = found.get(name)
        if mapping is None:
            raise LayoutError(
                f"into has {name!r}, which state lacks; this rank is in both, and gives both alike"
            )
        lengths = list(tensor.shape)
        try:
            (mapping if source else mapping.inverse()).received_shape(lengths)
            axes = resolve_axes(mapping.cuts, len(lengths))
        except LayoutError as error:
            what = "state" if source else "into"
            raise type(error)(f"{what}[{name!r}]: {error}") from error
        for cut, axis in zip(mapping.cuts, axes, strict=True):
            lengths[axis] *= cut.sources if source else cut.targets
        parameters[name] = Parameter(
            name, tuple(lengths), str(tensor.dtype), tensor.element_size(), mapping
        )
    return parameters


def _first_difference(here: Mapping[str, Parameter], there: Mapping[str, Parameter]) -> str:
    """Say what a rank of both ends gives that does not fit together."""
    for name in here:
        if name not in there:
            return f"state has {name!r}, which into lacks; a rank in both gives both alike"
        if here[name] != there[name]:
            break
    return (
        f"state and into differ in {name!r}: as a whole it is {here[name].shape} of "
        f"{here[name].dtype} in state, {there[name].shape} of {there[name].dtype} in into"
    )


def _refuse_shared(
    sent: Tensors, received: Tensors, found: Mapping[str, RankMapping], rank: int
) -> None:
    """Refuse buffers that hold what is still to be sent; one that stays as it is may be shared."""
    overlapping = Overlaps(sent)
    for name, buffer in received.items():
        for other in overlapping.with_(buffer):
            if found[other] == found[name] and _stays(sent[other], buffer, found[name], rank):
                continue
            raise LayoutError(
                f"into[{name!r}] shares memory with state[{other!r}], which is still being sent; "
                f"give a buffer of its own"
            )


def _stays(own: Tensor, buffer: Tensor, mapping: RankMapping, rank: int) -> bool:
    """Whether a rank keeps exactly what it has."""
    found = [(each.data_ptr(), each.shape, each.stride()) for each in (own, buffer)]
    return found[0] == found[1] and mapping.sources_of(rank) == (rank,)
