"""A trainer sends weights to inference ranks, on Ray actors or on local ranks.

    python examples/reinforcement_actors.py

Trains a small language model with tp=4, dp=2 on 8 actors, moves its weights to tp=2, dp=2 on 4
other actors, and compares the words that trainer and inference generate. Without `ray`, local ranks
replace the actors.
"""

import importlib.util
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from hypercomm import HyperCommGrid, RankLayout, RankMapping, run_ranks, transfer_state

WORDS, HIDDEN, INNER, STEPS, LENGTH = 32, 16, 64, 3, 12
TRAINER, INFERENCE = RankLayout("tp=4,dp=2"), RankLayout("tp=2,dp=2", rank_offset=8)
SHARDS = {"up": {"tp": 1}, "down": {"tp": 0}, "*": {}}


def part(whole: dict[str, Tensor], layout: RankLayout, rank: int) -> dict[str, Tensor]:
    """Return a rank's shards of all weights. tp splits the columns of `up` and rows of `down`."""
    size, at = layout.size_of("tp"), layout.coords(rank)["tp"]
    cuts = {name: axis["tp"] for name, axis in SHARDS.items() if axis}
    return {
        name: weight.chunk(size, cuts[name])[at].clone() if name in cuts else weight.clone()
        for name, weight in whole.items()
    }


class Summed(torch.autograd.Function):
    """Sums the parts of all ranks of tp. Each part has the gradient of the sum."""

    @staticmethod
    def forward(_: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(summed := partial.clone(), group=group)
        return summed

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Copied(torch.autograd.Function):
    """Returns the same tensor on each rank of tp. The gradients of the copies are summed."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(summed := gradient.clone(), group=ctx.group)
        return summed, None


def logits(weights: dict[str, Tensor], words: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the scores of the words that may follow each word."""
    hidden = weights["words"][words]
    inner = torch.relu(Copied.apply(hidden, group) @ weights["up"]) @ weights["down"]
    return (hidden + Summed.apply(inner, group)) @ weights["out"]


def generate(weights: dict[str, Tensor], first: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Continue each first word with the most likely words."""
    words = [first]
    with torch.no_grad():
        for _ in range(LENGTH):
            words.append(logits(weights, words[-1], group).argmax(-1))
    return torch.stack(words, 1)


def train(weights: dict[str, Tensor], grid: HyperCommGrid) -> None:
    """Make some training steps. In the data, word n is followed by word n + 5."""
    words = torch.arange(WORDS).chunk(grid["dp"].size)[grid["dp"].rank]
    for _ in range(STEPS):
        for weight in weights.values():
            weight.requires_grad_()
        cross_entropy(logits(weights, words, grid["tp"].group), (words + 5) % WORDS).backward()
        for name, weight in weights.items():
            assert weight.grad is not None
            dist.all_reduce(weight.grad, group=grid["dp"].group)
            weights[name] = (weight - 0.5 / grid["dp"].size * weight.grad).detach()


def work() -> float:
    """Run one rank. Return how many words differ from the words that the trainer generates."""
    torch.manual_seed(0)
    rank, scale = dist.get_rank(), 0.3
    shapes = {
        "words": (WORDS, HIDDEN),
        "up": (HIDDEN, INNER),
        "down": (INNER, HIDDEN),
        "out": (HIDDEN, WORDS),
    }
    whole = {name: torch.randn(shape) * scale for name, shape in shapes.items()}
    mapping = RankMapping(TRAINER, INFERENCE, along=None)
    trainer = HyperCommGrid([4, 2], ["tp", "dp"], name="trainer")
    inference = HyperCommGrid([2, 2], ["tp", "dp"], 8, name="inference")
    with trainer, inference:
        if rank in TRAINER:
            grid, weights = trainer, part(whole, TRAINER, rank)
            train(weights, grid)
            transfer_state(mapping, weights, shards=SHARDS, verify=True)
        else:
            grid, weights = inference, part(whole, INFERENCE, rank)
            transfer_state(mapping, into=weights, shards=SHARDS, verify=True)
        first = torch.arange(8)
        said = generate(weights, first, grid["tp"].group)
        trainers = said if rank == 0 else torch.empty_like(said)
        dist.broadcast(trainers, 0)
        return (said != trainers).sum().item()


class Actor:
    """A rank in a process that Ray starts."""

    def address(self) -> str:
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{os.environ.get('RAY_NODE_IP', '127.0.0.1')}:{free.getsockname()[1]}"

    def run(self, address: str, rank: int, size: int) -> float:
        dist.init_process_group("gloo", address, rank=rank, world_size=size)
        difference = work()
        dist.destroy_process_group()
        return difference


def on_actors(size: int) -> list[float]:
    """Run all ranks as actors of Ray."""
    import ray

    ray.init(num_cpus=size, include_dashboard=False, log_to_driver=False)
    actors = [ray.remote(num_cpus=1)(Actor).remote() for _ in range(size)]
    address = ray.get(actors[0].address.remote())
    runs = [actor.run.remote(address, rank, size) for rank, actor in enumerate(actors)]
    return ray.get(runs)


if __name__ == "__main__":
    ranks = TRAINER.size + INFERENCE.size
    has_ray = importlib.util.find_spec("ray") is not None
    print("on Ray actors" if has_ray else "on local ranks, as ray is not installed")
    differences = on_actors(ranks) if has_ray else run_ranks(work, ranks, max_ranks=ranks)
    print(f"largest difference: {max(differences)}")
