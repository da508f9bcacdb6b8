"""What every rank does in `hypercomm check`: create a group, communicate over it, compare."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.grid import HyperCommGrid
from hypercomm.layout import RankLayout

_SMALL_ROUNDS = 20
_LARGE_ROUNDS = 3
_LARGE_BYTES = 4 * 1024 * 1024


class Finding(TypedDict):
    """What one rank found over the groups of some dims; times in seconds."""

    rank: int
    dims: list[str]
    creation: float
    latency: float | None
    bandwidth: float | None
    wrong: list[str]


class Start(TypedDict):
    """Said by a rank that begins with the groups of some dims."""

    rank: int
    dims: list[str]
    starting: bool


def probe(
    layout: RankLayout,
    wanted: Sequence[tuple[str, ...]],
    backend: str,
    tell: Callable[[Finding | Start], None],
) -> None:
    """Create the groups of all dims wanted, one after another, and tell what comes of each.

    Args:
        layout: The layout of the grid; it must fill the world.
        wanted: Dims of each set of groups.
        backend: Backend of the groups.
        tell: Called when a set of groups is begun, and with what was found.
    """
    rank = dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else "cpu"
    with HyperCommGrid.from_layout(layout, backend=backend, cover="exact") as grid:
        for dims in wanted:
            tell(Start(rank=rank, dims=list(dims), starting=True))
            dist.barrier()
            begin = time.perf_counter()
            group = grid.create_pg(dims)
            creation = time.perf_counter() - begin
            ranks = grid.group_ranks(dims)
            wrong = _compare(group, ranks, rank, device)
            latency = _all_reduce_time(group, 8, _SMALL_ROUNDS, device)
            large = _all_reduce_time(group, _LARGE_BYTES, _LARGE_ROUNDS, device)
            alone = len(ranks) == 1
            tell(
                Finding(
                    rank=rank,
                    dims=list(dims),
                    creation=creation,
                    latency=None if alone else latency,
                    bandwidth=None if alone else _LARGE_BYTES / large,
                    wrong=wrong,
                )
            )


def quieten() -> None:
    """Keep what libraries print from the user: the check says what is wrong itself.

    Older versions of gloo greet on stdout for every group.
    """
    warnings.simplefilter("ignore")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _compare(
    group: ProcessGroup | None, ranks: Sequence[int], rank: int, device: torch.device | str
) -> list[str]:
    """Run each collective once, and name those whose result the layout does not predict."""
    own = torch.tensor([rank + 1, rank * rank], device=device)
    total = own.clone()
    dist.all_reduce(total, group=group)
    gathered = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(gathered, own, group=group)
    sent = own.clone()
    dist.broadcast(sent, src=ranks[-1], group=group)
    each = [[member + 1, member * member] for member in ranks]
    outcomes = [
        ("all-reduce", total.tolist(), [sum(column) for column in zip(*each, strict=True)]),
        ("all-gather", [tensor.tolist() for tensor in gathered], each),
        ("broadcast", sent.tolist(), each[-1]),
    ]
    return [
        f"{name} gave {got}, expected {expected}"
        for name, got, expected in outcomes
        if got != expected
    ]


def _all_reduce_time(
    group: ProcessGroup | None, size: int, rounds: int, device: torch.device | str
) -> float:
    """Return the median seconds of an all-reduce of `size` bytes."""
    data = torch.zeros(size // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        dist.all_reduce(data, group=group)
        if data.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])
