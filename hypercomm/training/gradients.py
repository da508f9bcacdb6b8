"""Gradients: their norm over all ranks, each element counted once, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hypercomm.errors import GroupOptionsError
from hypercomm.grid.dims import GridDims
from hypercomm.layout.text import shown
from hypercomm.process_groups import torch_internals as c10d

Cut = GridDims | None
"""The dims along which ranks hold different elements of a parameter; None: each rank has all."""

Cuts = Sequence[tuple[Cut, Sequence[Tensor]]]
"""The gradients that the calling rank has, by the dims that cut them."""

Parameters = Mapping[Cut, Tensor | Iterable[Tensor]]


def grad_norm(parameters: Parameters, norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients of a model, as one process with the whole model would.

    Ranks that differ only in other dims than those of a parameter hold the same gradient, which
    counts once. So the gradients must have been averaged over data parallel ranks before.

    Args:
        parameters: The calling rank's parameters, by the dims that cut them: `grid["tp", "pp"]`
            for the layers that tensor parallelism splits, `grid["pp"]` for those that each of its
            ranks has whole, `grid.view("expert")["ep", "pp"]` for experts, None for what all ranks
            have. Every rank of the grid must give the same dims, in the same order, an empty list
            where it has no such parameters. Of a DTensor, such as FSDP2's, the local part counts:
            name the dims of its mesh that shard it, too.
        norm_type: The p of the p-norm, larger than 0; `math.inf` for the largest element.

    Returns:
        A tensor without dims, the same on all ranks.

    Raises:
        GroupOptionsError: `parameters` is no such mapping, or `norm_type` no such number.
        RankOutsideError: The calling rank is in none of the groups.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> with fake_world(1), HyperCommGrid("tp=1") as grid:
        ...     grad_norm({grid["tp"]: [weight]}).item()
        5.0
    """
    return _norm(_read(parameters), norm_type)


def clip_grad_norm_(parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of a model so that their norm is at most `max_norm`.

    Does over all ranks what `torch.nn.utils.clip_grad_norm_` does in one process.

    Args:
        parameters: As for `grad_norm`.
        max_norm: The largest norm, at least 0.
        norm_type: As for `grad_norm`.

    Returns:
        The norm before.

    Raises:
        GroupOptionsError, RankOutsideError: As for `grad_norm`; or `max_norm` is no such number.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> with fake_world(1), HyperCommGrid("tp=1") as grid:
        ...     norm = clip_grad_norm_({grid["tp"]: [weight]}, 1.0)
        >>> norm.item(), [round(each, 3) for each in weight.grad.tolist()]
        (5.0, [0.6, 0.8])

    Source: the factor is that of torch 2.13's `torch.nn.utils.clip_grads_with_norm_`.
    """
    if not _is_number(max_norm) or not max_norm >= 0:
        raise GroupOptionsError(f"max_norm must be a number of at least 0, got {shown(max_norm)}")
    cuts = _read(parameters)  # once: they may be iterators
    norm = _norm(cuts, norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, gradients in cuts:
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm


def _norm(cuts: Cuts, norm_type: float) -> Tensor:
    if not _is_number(norm_type) or not norm_type > 0:
        raise GroupOptionsError(f"norm_type must be a number larger than 0, got {shown(norm_type)}")
    devices = [one.device for _, gradients in cuts for one in gradients]
    device = devices[0] if devices else torch.device("cpu")
    total = torch.zeros((), device=device)
    for cut, gradients in cuts:
        part = _joined([_norm_of(one, norm_type).to(total) for one in gradients], norm_type, total)
        if cut is not None and cut.size > 1:
            part = _over(cut.group, part, norm_type).to(total)
        total = _joined([total, part], norm_type, total)
    return total


def _norm_of(gradient: Tensor, norm_type: float) -> Tensor:
    if not gradient.numel():  # an uneven shard, of which there is no largest element
        return torch.zeros((), device=gradient.device)
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
    return norm


def _joined(norms: Sequence[Tensor], norm_type: float, like: Tensor) -> Tensor:
    joined: Tensor = torch.linalg.vector_norm(
        torch.stack([torch.zeros_like(like), *norms]), norm_type
    )
    return joined


def _over(group: ProcessGroup, part: Tensor, norm_type: float) -> Tensor:
    """Join the norms of the members: in one dtype, on one device, whatever each of them holds."""
    device = torch.device(c10d.device_type(group))
    part = part.to(device, torch.float32)
    if math.isinf(norm_type):  # the largest of some numbers may hide that one is none
        found = torch.stack([part.nan_to_num(0.0, math.inf), part.isnan().to(part.dtype)])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return torch.where(found[1] > 0, torch.full_like(part, math.nan), found[0])
    power = part.double().pow(norm_type) if device.type != "mps" else part.pow(norm_type)
    dist.all_reduce(power, group=group)
    return power.pow(1.0 / norm_type)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read(parameters: Parameters) -> Cuts:
    """Read the gradients, as what of them is on this rank."""
    if not isinstance(parameters, Mapping):
        raise GroupOptionsError(
            f"parameters must map dims to parameters, as in {{grid['tp']: layer.parameters()}}, "
            f"got {shown(parameters)}"
        )
    cuts = []
    for cut, given in parameters.items():
        if cut is not None and not isinstance(cut, GridDims):
            raise GroupOptionsError(
                f"the keys of parameters must be dims of a grid, such as grid['tp', 'pp'], or "
                f"None, got {shown(cut)}"
            )
        own = [given] if isinstance(given, Tensor) or not isinstance(given, Iterable) else given
        gradients = []
        for one in own:
            if not isinstance(one, Tensor):
                raise GroupOptionsError(
                    f"parameters under {cut or 'None'} must be tensors, such as "
                    f"module.parameters(), got {shown(one)}"
                )
            if one.grad is not None:
                gradients.append(_local(cut, one.grad))
        cuts.append((cut, gradients))
    return cuts


def _local(cut: Cut, gradient: Tensor) -> Tensor:
    """What of a gradient is on this rank; a DTensor says itself along which dims it is cut."""
    if not hasattr(gradient, "to_local"):
        return gradient.detach()
    dtensor: Any = gradient
    mesh, rank = dtensor.device_mesh, dist.get_rank()
    named = {rank} if cut is None else {*cut.ranks}
    dims = () if cut is None else cut.dims
    for at, placement in enumerate(dtensor.placements):
        dim = (mesh.mesh_dim_names or range(mesh.ndim))[at]
        others = {*dist.get_process_group_ranks(mesh.get_group(at))} - {rank}
        if others and placement.is_partial():
            raise GroupOptionsError(
                f"a gradient is not summed over {dim!r} yet (its placement is {placement}); "
                f"redistribute it first"
            )
        if placement.is_replicate() and others & named:
            raise GroupOptionsError(
                f"a gradient is whole along {dim!r}, but its parameter is given under dims "
                f"{dims}; leave {dim!r} out, or its elements count several times"
            )
        if not placement.is_replicate() and not others <= named:
            raise GroupOptionsError(
                f"a gradient is cut along {dim!r}, but its parameter is given under dims {dims}; "
                f"name {dim!r}, too, or its elements on other ranks do not count"
            )
    local: Tensor = dtensor.to_local()
    return local.detach()
