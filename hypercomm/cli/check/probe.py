"""What every rank does in `hypercomm check`: create a group, communicate over it, compare."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hypercomm.cli.check.collectives import COLLECTIVES, Member, compare, seconds_of
from hypercomm.cli.check.request import Figures, Message, Request, Timing
from hypercomm.cli.plan.keys import Key
from hypercomm.grid import HyperCommGrid
from hypercomm.joining import devices
from hypercomm.process_groups import torch_internals as c10d

_SMALL_ROUNDS = 20
_LARGE_ROUNDS = 3
_LARGE_BYTES = 4 * 1024 * 1024


def use_device(backend: str, local_rank: int | None, local_size: int | None) -> torch.device:
    """Make the device of a rank the current one, where the backend is for other than the host's.

    Raises:
        LaunchError: The host has fewer devices than ranks, or nothing tells which one is whose.
    """
    device = devices.device_of_rank(c10d.devices_made_for(backend), local_rank, local_size)
    devices.use(device)
    return device


def probe(
    request: Request, tell: Callable[[Message], None], device: torch.device | None = None
) -> None:
    """Create all groups that are wanted, one after another, and tell what comes of each.

    Args:
        request: What is wanted; its layout must fill the world.
        tell: Called with what is begun, and with what was found.
        device: Where the groups communicate; default: the host's memory.
    """
    device = device or torch.device("cpu")
    with HyperCommGrid.from_layout(request.layout, backend=request.backend, cover="exact") as grid:
        for name, view, shared in request.views:
            grid.register_view(name, view.shape, view.dim_names, shared)
        for key in request.keys:
            tell((dist.get_rank(), key, "creation"))
            dist.barrier()
            tell((dist.get_rank(), key, _figures(grid, key, request, tell, device)))


def _figures(
    grid: HyperCommGrid,
    key: Key,
    request: Request,
    tell: Callable[[Message], None],
    device: torch.device,
) -> Figures:
    rank = dist.get_rank()
    begin = time.perf_counter()
    owner = grid if key.view is None else grid.view(key.view)
    group = owner.create_pg(key.dims)
    creation = time.perf_counter() - begin
    member = Member(group, owner.group_ranks(key.dims), rank, device)
    tell((rank, key, "comparison"))
    wrong, lacking = compare(member)
    latency = _all_reduce_time(member, 8, _SMALL_ROUNDS)
    bandwidth = _LARGE_BYTES / _all_reduce_time(member, _LARGE_BYTES, _LARGE_ROUNDS)
    sweep: list[Timing] = []
    for collective in COLLECTIVES if request.sweep.sizes and len(member.ranks) > 1 else ():
        if collective.name not in lacking:
            tell((rank, key, collective.name))
            sweep += [
                seconds_of(collective, member, size, request.sweep.rounds)
                for size in request.sweep.sizes
            ]
    return Figures(
        host=socket.gethostname(),
        creation=creation,
        latency=latency,
        bandwidth=bandwidth,
        wrong=wrong,
        lacking=lacking,
        sweep=sweep,
    )


def _all_reduce_time(member: Member, size: int, rounds: int) -> float:
    """Return the median seconds of an all-reduce of `size` bytes."""
    data = member.zeros(size)
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        dist.all_reduce(data, group=member.group)
        member.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])
