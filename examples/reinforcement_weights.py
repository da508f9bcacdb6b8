"""Weights move from the grid of a trainer to the grid of a rollout after each training step.

    python examples/reinforcement_weights.py

Trains with tp=2, fsdp=2, pp=2 and generates with tp=4, dp=2, on the same 8 local ranks, and
compares all bits of the received weights with the weights of one process.
"""

from itertools import product

import torch
from torch import Tensor

from hypercomm import GridSet, HyperCommGrid, RankMapping, run_ranks, transfer_state

STEPS, STAGES = 3, 2
SHAPES = {"up": (32, 16), "down": (16, 32)}
AXES = {"up": 0, "down": 1}  # the axis of a weight that tp splits; fsdp then splits axis 0


def model() -> dict[tuple[int, str], Tensor]:
    """Return all weights by pipeline stage and name. Every rank gets the same weights."""
    torch.manual_seed(0)
    return {key: torch.randn(SHAPES[key[1]]) for key in product(range(STAGES), SHAPES)}


def part(weight: Tensor, grid: HyperCommGrid, cuts: dict[str, int]) -> Tensor:
    """Return this rank's shard of a weight. Each dim splits the shard of the dims before it."""
    for dim, axis in cuts.items():
        if dim in grid:
            weight = weight.chunk(grid[dim].size, axis)[grid[dim].rank]
    return weight.clone()


def train_and_generate() -> float:
    """Transfer all weights after each step. Return the largest difference."""
    difference = 0.0
    with GridSet.colocated(trainer=f"tp=2,fsdp=2,pp={STAGES}", rollout="tp=4,dp=2") as grids:
        trainer, rollout, whole = grids["trainer"], grids["rollout"], model()
        cuts = {name: {"tp": AXES[name], "fsdp": 0} for name in SHAPES}
        own = trainer["pp"].rank
        mine = {name: part(whole[own, name], trainer, cuts[name]) for name in SHAPES}
        for _, stage in product(range(STEPS), range(STAGES)):
            source = trainer.layout.select(pp=stage)  # the layout of the ranks with these weights
            mapping = RankMapping(source, rollout.layout, along=None)
            wanted = {
                name: part(whole[stage, name].mul_(0.9), rollout, cuts[name]) for name in cuts
            }
            got = {name: torch.empty_like(weight) for name, weight in wanted.items()}
            if stage == own:
                for weight in mine.values():
                    weight.mul_(0.9)  # in place of a training step
            transfer_state(mapping, mine, into=got, shards=cuts)
            for name, weight in got.items():
                difference = max(difference, (weight - wanted[name]).abs().max().item())
    return difference


if __name__ == "__main__":
    print(f"largest difference: {max(run_ranks(train_and_generate, 8)):.1e}")
