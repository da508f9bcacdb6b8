"""Gradients of a model whose parameters are cut in all ways at once."""

import math

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hypercomm import HyperCommGrid
from hypercomm.errors import HyperCommError
from hypercomm.training import clip_grad_norm_, grad_norm

SHAPES = {"split": (4, 6), "whole": (6,), "sharded": (8, 4), "experts": (4, 5)}


def full(name, stage):
    """The gradient of a parameter of a stage, in the whole model."""
    seed = [*name.encode(), stage]
    return np.random.default_rng(seed).normal(size=SHAPES[name]).astype(np.float32) * 3


def parameter(gradient):
    made = torch.nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient
    return made


def cut(tensor, mesh, placements):
    """A tensor that all ranks have, as a DTensor."""
    at = mesh.get_local_rank(0)
    return DTensor.from_local(tensor.chunk(mesh.size(0))[at], mesh, placements, run_check=False)


def pieces(grid):
    """What of each gradient is on this rank, by the dims that cut it."""
    tp, dp, stage = grid["tp"], grid["dp"], grid["pp"].rank
    expert = grid.view("expert")["ep"]
    split = np.split(full("split", stage), tp.size)[tp.rank]
    experts = np.split(full("experts", stage), expert.size)[expert.rank]
    mesh = grid.device_mesh("dp", "tp")
    sharded = cut(torch.tensor(full("sharded", stage)), mesh, [Shard(0), Replicate()])
    assert isinstance(sharded, DTensor)
    assert sharded.to_local().shape[0] == SHAPES["sharded"][0] // dp.size
    return {
        grid["tp", "pp"]: [parameter(torch.tensor(split)), torch.nn.Parameter(torch.zeros(3))],
        grid["pp"]: parameter(torch.tensor(full("whole", stage))),
        grid["dp", "pp"]: iter([parameter(sharded)]),
        grid.view("expert")["ep", "pp"]: [parameter(torch.tensor(experts).double())],
    }


def norms():
    """Norms of all kinds, and the gradients after clipping."""
    with HyperCommGrid("tp=2,dp=2,pp=2") as grid:
        grid.register_view("expert", [4, 2], ["ep", "pp"], ["pp"])
        grid.create_pgs(["tp", "dp"])
        found = [float(grad_norm(pieces(grid), kind)) for kind in (2.0, 1.0, 3, math.inf)]
        held = {
            dims: list(own) if not isinstance(own, torch.Tensor) else [own]
            for dims, own in pieces(grid).items()
        }
        before = float(clip_grad_norm_(held, 1.0))
        after = float(grad_norm(held))
        again = float(clip_grad_norm_(held, 100.0))
        split = held[grid["tp", "pp"]][0].grad.numpy()
        return found, before, after, again, split


def mistakes():
    """What is refused of a DTensor that says itself how it is cut."""
    said = []
    with HyperCommGrid("tp=2,dp=2") as grid:
        grid.create_pgs(["tp", "dp"])
        mesh = grid.device_mesh("dp", "tp")
        whole = cut(torch.ones(4), mesh, [Shard(0), Replicate()])
        partial = DTensor.from_local(torch.ones(4), mesh["dp"], [Partial()])
        for dims, gradient in (("tp", whole), (("tp", "dp"), whole), ("dp", partial)):
            weight = torch.nn.Parameter(torch.zeros_like(gradient))
            weight.grad = gradient
            try:
                grad_norm({grid[dims]: [weight]})
            except HyperCommError as error:
                said.append(str(error))
    return said


def odd_ranks():
    """What one rank has and another has not: elements, dtypes, gradients, numbers."""
    with HyperCommGrid("dp=2") as grid:
        dp = grid["dp"]
        first = dp.rank == 0
        found = [float(grad_norm({dp: [parameter(torch.ones(2).double())] if first else []}))]
        own = torch.full((1,), 3.0) if first else torch.zeros(0)
        found += [float(grad_norm({dp: parameter(own)}, kind)) for kind in (2.0, math.inf)]
        number = torch.tensor([math.nan if not first else 2.0])
        found.append(float(grad_norm({dp: parameter(number)}, math.inf)))
        flat = grid.device_mesh("dp")
        whole = cut(torch.ones(4), flat, [Shard(0)])
        try:
            grad_norm({None: parameter(whole)})
        except HyperCommError as error:
            found.append(str(error))
        return found
