"""The norm of gradients over ranks is that of the whole model in one process."""

import math

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hypercomm import HyperCommGrid, run_ranks
from hypercomm.errors import GroupOptionsError, HyperCommError
from hypercomm.testing import fake_world
from hypercomm.training import clip_grad_norm_, grad_norm

SHAPES = {"split": (4, 6), "whole": (6,), "sharded": (8, 4), "experts": (4, 5)}


def full(name, stage):
    """The gradient of a parameter of a stage, in the whole model."""
    seed = [*name.encode(), stage]
    return np.random.default_rng(seed).normal(size=SHAPES[name]).astype(np.float32) * 3


EVERY = np.concatenate([full(name, stage).ravel() for name in SHAPES for stage in (0, 1)])


def cut(tensor, mesh, placements):
    """A tensor that all ranks have, as a DTensor."""
    at = mesh.get_local_rank(0)
    return DTensor.from_local(tensor.chunk(mesh.size(0))[at], mesh, placements, run_check=False)


def parameter(gradient):
    made = torch.nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient
    return made


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


# Shards of tp, of FSDP2, of experts, replicas and stages: each element counts once, on all ranks.
def test_norms_of_a_model():
    right = [np.linalg.norm(EVERY.astype(np.float64), kind) for kind in (2, 1, 3, np.inf)]
    for rank, (found, before, after, again, split) in enumerate(run_ranks(norms, 8)):
        assert found == pytest.approx(right, rel=1e-5)
        assert before == pytest.approx(right[0], rel=1e-5)
        assert after == again == pytest.approx(1.0, rel=1e-4)
        own = np.split(full("split", rank // 4), 2)[rank % 2]
        assert split == pytest.approx(own / right[0], rel=1e-4)


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


def test_mistakes_of_dtensors():
    for cut, whole, partial in run_ranks(mistakes, 4):
        assert "cut along 'dp', but its parameter is given under dims ('tp',)" in cut
        assert "whole along 'tp', but its parameter is given under dims ('tp', 'dp')" in whole
        assert "not summed over 'dp' yet" in partial


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: grad_norm([torch.zeros(1)]), "parameters must map dims to parameters"),
        (lambda: grad_norm({"tp": []}), "such as grid.'tp', 'pp'., or None, got 'tp'"),
        (lambda: grad_norm({None: []}, 0), "norm_type must be a number larger than 0, got 0"),
        (lambda: clip_grad_norm_({None: []}, -1), "max_norm must be .* at least 0, got -1"),
    ],
)
def test_what_is_refused(call, words):
    with fake_world(4), pytest.raises(GroupOptionsError, match=words):
        call()


# One process is torch's own function.
@pytest.mark.parametrize("kind", [1.0, 2.0, math.inf])
def test_alone(kind):
    weights = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(3)]
    twins = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(3)]
    for weight, twin in zip(weights[:2], twins[:2], strict=True):
        weight.grad = torch.randn(3, 4)
        twin.grad = weight.grad.clone()
    right = torch.nn.utils.clip_grad_norm_(twins, 0.5, kind)
    assert clip_grad_norm_({None: weights}, 0.5, kind) == pytest.approx(right.item())
    for weight, twin in zip(weights[:2], twins[:2], strict=True):
        torch.testing.assert_close(weight.grad, twin.grad)
    assert grad_norm({None: []}) == 0


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


# Ranks may have nothing where others have something, or in another dtype; a NaN is not lost.
def test_odd_ranks():
    for doubles, norm, largest, number, said in run_ranks(odd_ranks, 2):
        assert doubles == pytest.approx(math.sqrt(2))
        assert norm == largest == pytest.approx(3.0)
        assert math.isnan(number)
        assert "cut along 'dp', but its parameter is given under dims ()" in said
