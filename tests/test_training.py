"""The norm of gradients over ranks is that of the whole model in one process."""

import math

import numpy as np
import pytest
import torch
from ranks import training_ranks
from ranks.training_ranks import full

from hypercomm import run_ranks
from hypercomm.errors import GroupOptionsError
from hypercomm.testing import fake_world
from hypercomm.training import clip_grad_norm_, grad_norm

EVERY = np.concatenate(
    [full(name, stage).ravel() for name in training_ranks.SHAPES for stage in (0, 1)]
)


# Shards of tp, of FSDP2, of experts, replicas and stages: each element counts once, on all ranks.
def test_norms_of_a_model():
    right = [np.linalg.norm(EVERY.astype(np.float64), kind) for kind in (2, 1, 3, np.inf)]
    for rank, (found, before, after, again, split) in enumerate(run_ranks(training_ranks.norms, 8)):
        assert found == pytest.approx(right, rel=1e-5)
        assert before == pytest.approx(right[0], rel=1e-5)
        assert after == again == pytest.approx(1.0, rel=1e-4)
        own = np.split(full("split", rank // 4), 2)[rank % 2]
        assert split == pytest.approx(own / right[0], rel=1e-4)


def test_mistakes_of_dtensors():
    for cut, whole, partial in run_ranks(training_ranks.mistakes, 4):
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


# Ranks may have nothing where others have something, or in another dtype; a NaN is not lost.
def test_odd_ranks():
    for doubles, norm, largest, number, said in run_ranks(training_ranks.odd_ranks, 2):
        assert doubles == pytest.approx(math.sqrt(2))
        assert norm == largest == pytest.approx(3.0)
        assert math.isnan(number)
        assert "cut along 'dp', but its parameter is given under dims ()" in said
