"""Reads the group tables and resources of a process, and communicates over its groups."""

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hypercomm.testing import registered_groups as registered

STEADY_S = 1.0
SETTLED_WITHIN_S = 60.0


def tables():
    """Return a copy of every table in which torch registers groups."""
    world = dist.distributed_c10d._world
    return (
        registered(),
        dict(world.pg_names),
        {group: dict(ranks) for group, ranks in world.pg_group_ranks.items()},
        dict(world.pg_backend_config),
        dict(world.pg_to_tag),
        {tag: list(groups) for tag, groups in world.tags_to_pg.items()},
    )


def patched_attributes():
    """Return the attributes of torch that a simulation replaces and restores."""
    torchs = dist.distributed_c10d
    return torchs._world, torchs._new_process_group_helper


def store_of_world():
    """Return the store of WORLD."""
    return dist.distributed_c10d._get_default_store()


def restart_world(backend="gloo", **options):
    """Destroy WORLD and initialise a new WORLD of the same ranks. Return this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("again", store_of_world())
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
    return rank


coalescing = dist.distributed_c10d._coalescing_manager
"""The context manager with which Megatron combines several collectives."""


def all_reduce_of(value, group, device="cpu"):
    """All-reduce a value over a group, and return the sum."""
    tensor = torch.tensor([value], device=device)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def sum_over(group, device="cpu"):
    """Return the sum of 10**rank over a group, or None if there is no group.

    The digits of the sum show which ranks took part.
    """
    return None if group is None else all_reduce_of(10 ** dist.get_rank(), group, device)


def expected_sum_and_members(ranks):
    """Return the value of `sums_and_members` for a group of these ranks."""
    return [sum(10**rank for rank in ranks), list(ranks)]


def sums_and_members(grid):
    """Return the sum over each group and its members, by key. The value is None outside a group."""
    result = {}
    for key, group in grid.pgs.items():
        result[str(key)] = None
        if group is not None:
            parts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
            dist.all_gather(parts, torch.tensor([dist.get_rank()]), group=group)
            members = [part.item() for part in parts]
            dist.broadcast(last := torch.tensor([dist.get_rank()]), src=members[-1], group=group)
            result[str(key)] = [sum_over(group), members]
            assert last.item() == members[-1]
            assert result[str(key)] == expected_sum_and_members(dist.get_process_group_ranks(group))
    return result


def threads_and_files():
    """Return the number of threads and open files of this process.

    Threads named "hypercomm" do not count. A process keeps as many of these threads as were ever
    busy at the same time, so a slow reply of the store may add one.
    """
    workers = sum(thread.name == "hypercomm" for thread in threading.enumerate())
    threads = len(list(Path("/proc/self/task").iterdir()))
    files = len(list(Path("/proc/self/fd").iterdir()))
    return threads - workers, files


def left_over(before):
    """Wait up to twenty seconds for added threads and files to end; return how many remain.

    Other ranks may close their sides of the connections a little later. What was open before may
    close as well, which is no leak.
    """
    deadline = time.monotonic() + 20
    while (extra := _beyond(before)) != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    return extra


def _beyond(before):
    return tuple(max(0, now - then) for now, then in zip(threads_and_files(), before, strict=True))


def settle():
    """Wait until the numbers are steady for a second, because threads of gloo close files."""
    begin = since = time.monotonic()
    before = None
    while time.monotonic() < min(since + STEADY_S, begin + SETTLED_WITHIN_S):
        now = threads_and_files()
        if now != before:
            before = now
            since = time.monotonic()
        time.sleep(0.1)
