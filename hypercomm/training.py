"""The norm of a model's gradients over many ranks, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hypercomm.errors import GroupOptionsError
from hypercomm.grid.dims import GridDims
from hypercomm.layout.text import short_repr
from hypercomm.process_groups import torch_internals as torchdist

__all__ = ["clip_grad_norm_", "grad_norm"]

Cut = GridDims | None
"""The dims that shard a parameter, or None if every rank has the full parameter."""

Parameters = Mapping[Cut, Tensor | Iterable[Tensor]]


def grad_norm(parameters: Parameters, norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients of a model whose parameters are sharded over ranks.

    Each element counts once. Gradients must already be averaged over data parallel ranks, because
    all ranks that have the same shard of a parameter must have the same gradient.

    Args:
        parameters: Maps the dims that shard parameters to the calling rank's parameters. Use
            `grid["tp", "pp"]` for layers that tensor parallelism shards, `grid["pp"]` for layers
            that it replicates, and `grid.view("expert")["ep", "pp"]` for experts. Use None for
            parameters that every rank of the grid has in full. Every rank must pass the same dims
            in the same order, with an empty list if it has no such parameters. For a DTensor, such
            as a parameter of FSDP2, also name the mesh dims that shard the DTensor, because only
            the local part is used.
        norm_type: The p of the p-norm, larger than 0. `math.inf` means the largest absolute value.

    Returns:
        A scalar tensor, equal on all ranks. Its dtype is float64, or float32 on Apple's GPUs. The
        norm of each gradient is computed in the dtype of the gradient, but at least in float32.

    Raises:
        GroupOptionsError: `parameters` or `norm_type` is wrong, a parameter is given twice, or the
            key of a DTensor does not name exactly the dims of its mesh that shard it.
        RankOutsideError: The calling rank is not in the grid.

    The dims of plain tensors cannot be checked, and neither can dims that are not in the mesh of a
    DTensor. With wrong dims, the norm is wrong.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> split, whole = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        >>> split.grad, whole.grad = torch.tensor([3.0]), torch.tensor([4.0])
        >>> with fake_world(1), HyperCommGrid("tp=1") as grid:
        ...     grad_norm({grid["tp"]: [split], None: [whole]}).item()
        5.0
    """
    return _norm(_gradients(parameters), norm_type)


def clip_grad_norm_(parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of a model so that their norm is at most `max_norm`.

    This is `torch.nn.utils.clip_grad_norm_` over all ranks.

    Args:
        parameters: Maps dims or None to the calling rank's parameters. See `grad_norm`.
        max_norm: The largest norm, at least 0.
        norm_type: The p of the p-norm, larger than 0. `math.inf` means the largest absolute value.

    Returns:
        The norm before scaling. See `grad_norm`.

    Raises:
        GroupOptionsError: `max_norm` is negative, or `grad_norm` rejects an argument.
        RankOutsideError: The calling rank is not in the grid.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> bias = torch.nn.Parameter(torch.zeros(2))
        >>> bias.grad = torch.tensor([3.0, 4.0])
        >>> with fake_world(1), HyperCommGrid("tp=1") as grid:
        ...     norm = clip_grad_norm_({None: [bias]}, 1.0)
        >>> norm.item(), [round(each, 3) for each in bias.grad.tolist()]
        (5.0, [0.6, 0.8])

    Source: the factor of torch 2.13's `torch.nn.utils.clip_grads_with_norm_`.
    """
    if not isinstance(max_norm, (Real, Tensor)) or not max_norm >= 0:
        raise GroupOptionsError(
            f"max_norm must be a number of at least 0, got {short_repr(max_norm)}"
        )
    cuts = _gradients(parameters)  # reads iterators only once
    norm = _norm(cuts, norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, gradients in cuts:
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))  # rounds once, to the gradient's dtype
    return norm


def _norm(cuts: Sequence[tuple[Cut, Sequence[Tensor]]], given: float) -> Tensor:
    try:
        norm_type = float(given)  # torch also takes "inf"
    except (TypeError, ValueError):
        norm_type = math.nan
    if not norm_type > 0:
        raise GroupOptionsError(
            f"norm_type must be a number larger than 0, got {short_repr(given)}"
        )
    devices = [one.device for _, gradients in cuts for one in gradients]
    # The total is float64, because other ranks may have float64 gradients. Apple's GPUs lack
    # float64.
    is_narrow = bool(devices) and devices[0].type == "mps"
    dtype = torch.float32 if is_narrow else torch.float64
    total = torch.zeros((), dtype=dtype, device=devices[0] if devices else None)
    for cut, gradients in cuts:
        # An empty gradient, from an uneven shard, has no largest element.
        norms = [_norm_of(one, norm_type).to(total) for one in gradients if one.numel()]
        part = _norm_of(torch.stack([torch.zeros_like(total), *norms]), norm_type)
        if cut is not None and cut.size > 1:
            part = _over(cut, part, norm_type).to(total)
        total = _norm_of(torch.stack([total, part]), norm_type)
    return total


def _norm_of(values: Tensor, norm_type: float) -> Tensor:
    """Return the norm in the dtype of the values, but at least in float32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(values, norm_type, dtype=dtype)
    return norm


def _over(cut: GridDims, part: Tensor, norm_type: float) -> Tensor:
    """Combine the norms of the ranks of a group into one norm, in float64."""
    part = part.to(torchdist.device_type(cut.group), torch.float64)
    if math.isinf(norm_type):  # ReduceOp.MAX may ignore a NaN
        found = torch.stack([part.nan_to_num(0.0, math.inf), part.isnan().to(part.dtype)])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=cut.group)
        return torch.where(found[1] > 0, torch.full_like(part, math.nan), found[0])
    power = part.pow(norm_type)
    dist.all_reduce(power, group=cut.group)
    return power.pow(1.0 / norm_type)


def _gradients(parameters: Parameters) -> list[tuple[Cut, list[Tensor]]]:
    """Return the gradients of this rank, grouped by the dims that shard them."""
    if not isinstance(parameters, Mapping):
        raise GroupOptionsError(
            f"parameters= must map dims to parameters, as in {{grid['tp']: layer.parameters()}}, "
            f"got {short_repr(parameters)}"
        )
    cuts = []
    seen: dict[int, tuple[Tensor, Cut]] = {}
    for cut, given in parameters.items():
        if cut is not None and not isinstance(cut, GridDims):
            raise GroupOptionsError(
                f"the keys of parameters= must be dims of a grid, such as grid['tp', 'pp'], or "
                f"None, got {short_repr(cut)}"
            )
        if isinstance(given, torch.nn.Module):
            raise GroupOptionsError(
                f"parameters= contains a module under the key {_key(cut)}; pass its parameters()"
            )
        own = [given] if isinstance(given, Tensor) else list(given)
        for position, parameter in enumerate(own):
            if id(parameter) in seen:
                _, first = seen[id(parameter)]
                raise GroupOptionsError(
                    f"parameters= contains a parameter of shape {tuple(parameter.shape)} twice: "
                    f"under the key {_key(first)}, and at position {position} under the key "
                    f"{_key(cut)}; give each parameter once"
                )
            seen[id(parameter)] = parameter, cut
        cuts.append((cut, [_local(cut, one) for one in own if one.grad is not None]))
    return cuts


def _key(cut: Cut) -> str:
    return "None" if cut is None else f"grid[{', '.join(map(repr, cut.dims))}]"


def _local(cut: Cut, parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient. `cut` must match the placements of a DTensor."""
    dtensor: Any = parameter.grad
    if not hasattr(dtensor, "to_local"):
        gradient: Tensor = dtensor.detach()
        return gradient
    what = f"the gradient of a parameter of shape {tuple(parameter.shape)}"
    mesh = dtensor.device_mesh
    group = mesh.get_group(0)
    rank = dist.get_global_rank(group, group.rank())  # the mesh may be of a joined world
    named = {rank} if cut is None else {*cut.ranks}
    for at, placement in enumerate(dtensor.placements):
        dim = (mesh.mesh_dim_names or range(mesh.ndim))[at]
        others = {*dist.get_process_group_ranks(mesh.get_group(at))} - {rank}
        if others and placement.is_partial():
            raise GroupOptionsError(
                f"{what} has placement {placement} over {dim!r}, so it is not summed yet; "
                f"redistribute it first"
            )
        is_whole = placement.is_replicate()
        wrong = others & named if is_whole else others - named
        if wrong:
            raise GroupOptionsError(
                f"{what} is {'replicated' if is_whole else 'sharded'} along {dim!r}, but the key "
                f"of this parameter is {_key(cut)}; the key must name exactly the dims that shard "
                f"the parameter"
            )
    local: Tensor = dtensor.to_local()
    return local.detach()
