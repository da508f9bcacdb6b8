"""Weights go from a trainer's grid to a rollout's, as after each step of reinforcement learning.

    python examples/reinforcement_weights.py

trains with tp=2, fsdp=2, pp=2 and generates with tp=4, dp=2, on the same 8 local ranks, and
compares what arrives with the weights of one process, to the bit.
"""

from itertools import product

import torch
from torch import Tensor

from hypercomm import GridSet, HyperCommGrid, RankMapping, run_ranks, transfer

STEPS, STAGES = 3, 2
SHAPES = {"up": (32, 16), "down": (16, 32)}
AXES = {"up": 0, "down": 1}  # which axis of a weight tp cuts; fsdp then cuts the first


def model() -> dict[tuple[int, str], Tensor]:
    """Make all weights, by pipeline stage and name, alike on every rank."""
    torch.manual_seed(0)
    return {key: torch.randn(SHAPES[key[1]]) for key in product(range(STAGES), SHAPES)}


def part(weight: Tensor, grid: HyperCommGrid, cuts: dict[str, int]) -> Tensor:
    """Return what this rank has of a weight: each dim cuts what those before it have left."""
    for dim, axis in cuts.items():
        if dim in grid:
            weight = weight.chunk(grid[dim].size, axis)[grid[dim].rank]
    return weight.clone()


def train_and_generate() -> float:
    """Let all weights arrive after each step; return the largest difference."""
    difference = 0.0
    with GridSet.colocated(trainer=f"tp=2,fsdp=2,pp={STAGES}", rollout="tp=4,dp=2") as grids:
        trainer, rollout, whole = grids["trainer"], grids["rollout"], model()
        cuts = {(stage, name): {"tp": AXES[name], "fsdp": 0} for stage, name in whole}
        mine = {
            key: part(whole[key], trainer, cuts[key])
            for key in whole
            if key[0] == trainer["pp"].rank
        }
        for _, key in product(range(STEPS), whole):
            source = trainer.layout.select(pp=key[0])  # of the ranks that have the weight
            mapping = RankMapping(source, rollout.layout, along=None, shards=cuts[key])
            wanted = part(whole[key].mul_(0.9), rollout, cuts[key])  # a step of one process
            got = torch.empty_like(wanted)
            if key in mine:
                transfer(mapping, mine[key].mul_(0.9), out=got)
            else:
                transfer(mapping, got)
            difference = max(difference, (got - wanted).abs().max().item())
    return difference


if __name__ == "__main__":
    print(f"largest difference: {max(run_ranks(train_and_generate, 8)):.1e}")
