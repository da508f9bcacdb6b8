"""Test that the norm of gradients over ranks equals the norm of the full model in one process."""

import math
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hypercomm import HyperCommGrid, join_world
from hypercomm.errors import GroupOptionsError, HyperCommError
from hypercomm.testing import fake_world
from hypercomm.training import clip_grad_norm_, grad_norm

SHAPES = {"split": (4, 6), "whole": (6,), "sharded": (8, 4), "experts": (4, 5)}


def full(name, stage):
    """Return the full gradient of a parameter of a pipeline stage."""
    seed = [*name.encode(), stage]
    return np.random.default_rng(seed).normal(size=SHAPES[name]).astype(np.float32) * 3


EVERY = np.concatenate([full(name, stage).ravel() for name in SHAPES for stage in (0, 1)])


def cut(tensor, mesh, placements):
    """Return a DTensor, made from a tensor that all ranks have."""
    at = mesh.get_local_rank(0)
    return DTensor.from_local(tensor.chunk(mesh.size(0))[at], mesh, placements, run_check=False)


def parameter(gradient):
    made = torch.nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient
    return made


def pieces(grid):
    """Return this rank's parts of the gradients, by the dims that split them."""
    tp, dp = grid["tp"], grid["dp"]
    stage = grid["pp"].rank
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


# Parameters are split by tp, FSDP2, experts or stages, or replicated. On all ranks, each element
# counts once.
@pytest.mark.ranks(8)
def test_norm_matches_the_whole_model():
    rank = dist.get_rank()
    right = {}
    with HyperCommGrid("tp=2,dp=2,pp=2") as grid:
        grid.register_view("expert", [4, 2], ["ep", "pp"], ["pp"])
        grid.create_pgs(["tp", "dp"])
        for kind in (2.0, 1.0, 3, math.inf):
            right[kind] = np.linalg.norm(EVERY.astype(np.float64), kind)
            assert float(grad_norm(pieces(grid), kind)) == pytest.approx(right[kind], rel=1e-5)
        held = {
            dims: list(own) if not isinstance(own, torch.Tensor) else [own]
            for dims, own in pieces(grid).items()
        }
        assert float(clip_grad_norm_(held, 1.0)) == pytest.approx(right[2.0], rel=1e-5)
        assert float(grad_norm(held)) == pytest.approx(1.0, rel=1e-4)
        assert float(clip_grad_norm_(held, 100.0)) == pytest.approx(1.0, rel=1e-4)
        split = held[grid["tp", "pp"]][0].grad.numpy()
        own = np.split(full("split", rank // 4), 2)[rank % 2]
        assert split == pytest.approx(own / right[2.0], rel=1e-4)


# The placements of a DTensor show how the tensor is split. Dims that contradict them raise.
@pytest.mark.ranks(4)
def test_dims_must_match_dtensors():
    with HyperCommGrid("tp=2,dp=2") as grid:
        grid.create_pgs(["tp", "dp"])
        mesh = grid.device_mesh("dp", "tp")
        whole = cut(torch.ones(4), mesh, [Shard(0), Replicate()])
        partial = DTensor.from_local(torch.ones(4), mesh["dp"], [Partial()])
        for dims, gradient, message in (
            ("tp", whole, r"sharded along 'dp', .* the key .* is grid\['tp'\]"),
            (("tp", "dp"), whole, r"replicated along 'tp', .* the key .* is grid\['tp', 'dp'\]"),
            ("dp", partial, "over 'dp', so it is not summed"),
        ):
            weight = torch.nn.Parameter(torch.zeros_like(gradient))
            weight.grad = gradient
            with pytest.raises(HyperCommError, match=message):
                grad_norm({grid[dims]: [weight]})


NARROW = [torch.float32, torch.complex64, torch.bfloat16, torch.float16]
WIDE = [torch.float64, torch.complex128]


# For random dtypes, shapes and values, the norm and the scaled gradients match numpy. The norm is
# computed in the dtype of each gradient, but at least in float32. Gradients in float64 may have
# values that are infinite in float32.
@pytest.mark.parametrize("seed", range(60))
def test_clipping_matches_numpy(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtypes = draw.choice([WIDE, NARROW, WIDE + NARROW])
    gradients = []
    for dtype in draw.choices(dtypes, k=draw.randint(0, 5)):
        scale = draw.choice([1e-3, 1.0, 1e3, 1e50 if dtype in WIDE else 1e4])
        gradients.append(torch.randn(draw.choice([(), (0,), (3,), (2, 5)]), dtype=dtype) * scale)
    weights = [*map(parameter, gradients), torch.nn.Parameter(torch.zeros(2))]
    copies = [gradient.to(torch.complex128, copy=True).numpy() for gradient in gradients]
    kind = draw.choice([0.5, 1.0, 2.0, 3, math.inf])
    right = np.linalg.norm(np.concatenate([np.zeros(1), *map(np.ravel, copies)]), kind)
    limit = draw.choice([0.5, 1e60])
    found = clip_grad_norm_({None: weights}, limit, kind)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(right, 1e-12 if dtypes is WIDE else 1e-5)
    for weight, copy in zip(weights, copies, strict=False):
        scaled = torch.from_numpy(np.asarray(copy * min(1.0, limit / (right + 1e-6))))
        wanted = scaled if weight.grad.is_complex() else scaled.real
        torch.testing.assert_close(weight.grad, wanted.to(weight.grad.dtype))


# Gradients in bfloat16 are scaled by a float32 factor, and rounded once.
def test_factor_of_half_precision():
    gradient = torch.arange(1, 129).bfloat16()
    right = np.arange(1, 129)
    norm = np.linalg.norm(right)
    weight = parameter(gradient.clone())
    found = clip_grad_norm_({None: weight}, 0.1255 * norm)
    assert found.item() == pytest.approx(norm, rel=1e-6)
    assert found.dtype == torch.float64
    wanted = torch.tensor(right * 0.1255).bfloat16()
    torch.testing.assert_close(weight.grad, wanted, rtol=0, atol=0)


# All ranks have the same norm in the same dtype, even if some ranks have no float64 gradient, or no
# gradient at all.
@pytest.mark.ranks(2)
def test_ranks_with_different_dtypes():
    with HyperCommGrid("tp=2") as grid:
        tp = grid["tp"]
        first = tp.rank == 0
        large = torch.tensor([3e50, 0.1], dtype=torch.float64)
        for other in ([], [parameter(torch.tensor([4.0]))]):
            for kind in (1.0, 2.0, math.inf):
                norm = grad_norm({tp: [parameter(large)] if first else other}, kind)
                assert norm.item() == pytest.approx(3e50, rel=1e-15)
                assert norm.dtype == torch.float64
        own = torch.tensor([1 / 3], dtype=torch.float64)
        norm = grad_norm({tp: [parameter(own)], None: [parameter(torch.tensor([0.25]))]})
        assert norm.item() == pytest.approx(math.sqrt(2 / 9 + 0.0625), rel=1e-15)
        assert grad_norm({tp: parameter(torch.ones(1))}).dtype == torch.float64


# Some ranks may have no gradient, an empty gradient, or another dtype. A NaN on one rank is kept.
@pytest.mark.ranks(2)
def test_ranks_with_different_gradients():
    with HyperCommGrid("dp=2") as grid:
        dp = grid["dp"]
        first = dp.rank == 0
        doubles = {dp: [parameter(torch.ones(2).double())] if first else []}
        assert float(grad_norm(doubles)) == pytest.approx(math.sqrt(2))
        own = torch.full((1,), 3.0) if first else torch.zeros(0)
        for kind in (2.0, math.inf):
            assert float(grad_norm({dp: parameter(own)}, kind)) == pytest.approx(3.0)
        number = torch.tensor([math.nan if not first else 2.0])
        assert math.isnan(grad_norm({dp: parameter(number)}, math.inf))
        whole = cut(torch.ones(4), grid.device_mesh("dp"), [Shard(0)])
        with pytest.raises(HyperCommError, match=r"sharded along 'dp', .* the key .* is None"):
            grad_norm({None: parameter(whole)})


# A parameter that is given twice would count twice.
def test_parameter_given_twice_raises():
    weight = parameter(torch.ones(2))
    with fake_world(1), HyperCommGrid("tp=1,pp=1") as grid:
        for twice in ({None: [weight, weight]}, {grid["tp"]: weight, grid["tp", "pp"]: [weight]}):
            with pytest.raises(GroupOptionsError, match=r"shape \(2,\) twice: .*give .* once"):
                grad_norm(twice)
        with pytest.raises(GroupOptionsError, match=r"key grid\['tp'\], .* grid\['tp', 'pp'\]"):
            clip_grad_norm_(twice, 1.0)
    assert weight.grad.tolist() == [1.0, 1.0]


def test_gradients_in_a_joined_world():
    at = {"name": "w", "parts": {"trainer": 1}, "part": "trainer", "rank": 0}
    with join_world(dist.HashStore(), **at) as world:
        grid = HyperCommGrid("tp=1", world=world)
        own = torch.tensor([3.0, 4.0])
        gradient = DTensor.from_local(own, grid.device_mesh(), [Shard(0)], run_check=False)
        assert grad_norm({grid["tp"]: parameter(gradient)}) == 5.0
