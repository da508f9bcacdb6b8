"""ezpz.tp on real gloo ranks: every group communicates, nothing is left, and layers train on it."""

import numpy as np
import pytest
import torch
from ranks import ezpz_ranks

from hypercomm import run_ranks

# Eight ranks as (pp, cp, tp), the last one fastest, as in ezpz; dp is left with one.
WORLD = np.arange(8).reshape(1, 2, 2, 2)


# One all-reduce over each group reaches its members and nobody else.
def test_every_group_communicates():
    for rank, sums in enumerate(run_ranks(ezpz_ranks.sums, 8)):
        place = np.unravel_index(rank, WORLD.shape)
        for axis, name in enumerate(("data", "pipeline", "context", "tensor")):
            line = tuple(slice(None) if at == axis else place[at] for at in range(4))
            assert sums[name] == sum(10**member for member in WORLD[line].tolist())


# Fifty times leave as many groups, threads and files as one.
@pytest.mark.slow
def test_cycles():
    for before, after in run_ranks(ezpz_ranks.cycles, 4, args=(50,)):
        assert after == before
        assert before[0] == 1  # WORLD


# Each dim has the backend that it was given, and a part of one that cannot be had is refused.
def test_backends():
    for found, refused, changed, initialised in run_ranks(ezpz_ranks.backends, 4):
        assert "cpu:gloo" in found["tensor"]
        assert found["pipeline"] == "cpu:gloo"
        assert found["data"] == found["context"]
        assert "unknown backend 'cpu:gloo,cuda:smoke'" in refused
        assert changed
        assert not initialised


# A two-layer network split over tensor and data parallel ranks trains as the whole one does.
def test_layers_train():
    *weights, inputs, targets = ezpz_ranks.problem()
    for weight in weights:
        weight.requires_grad_()
    losses = []
    for x, target in zip(inputs.flatten(1, 2), targets.flatten(1, 2), strict=True):
        loss = (torch.relu(x @ weights[0] @ weights[1]) @ weights[2] - target).square().mean()
        losses.append(loss.item())
        for weight, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= 0.1 * grad
    got = run_ranks(ezpz_ranks.train, 4)
    assert losses[-1] < losses[0]
    for found, _ in got:
        np.testing.assert_allclose(found, losses, rtol=1e-12)
    for pair in (got[:2], got[2:]):
        whole, first, second = zip(*(parts for _, parts in pair), strict=True)
        for part in whole:
            np.testing.assert_allclose(part, weights[0].detach(), rtol=1e-10)
        np.testing.assert_allclose(np.hstack(first), weights[1].detach(), rtol=1e-10)
        np.testing.assert_allclose(np.vstack(second), weights[2].detach(), rtol=1e-10)
