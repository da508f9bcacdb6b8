"""What the ranks of several tests ask of their process and of torch, and do with a group."""

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hypercomm.testing import registered_groups as registered

STEADY_S = 1.0
SETTLED_WITHIN_S = 60.0


def tables():
    """What torch knows of all groups, in all of its tables."""
    world = dist.distributed_c10d._world
    return (
        registered(),
        dict(world.pg_names),
        {group: dict(ranks) for group, ranks in world.pg_group_ranks.items()},
        dict(world.pg_backend_config),
        dict(world.pg_to_tag),
        {tag: list(groups) for tag, groups in world.tags_to_pg.items()},
    )


def replaceable():
    """What a simulation replaces in torch, and puts back."""
    torchs = dist.distributed_c10d
    return torchs._world, torchs._new_process_group_helper


def store_of_world():
    """The store in which the ranks of WORLD have met."""
    return dist.distributed_c10d._get_default_store()


def world_anew(backend="gloo", **options):
    """End WORLD, and begin another one with the same ranks; return this one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("again", store_of_world())
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
    return rank


coalescing = dist.distributed_c10d._coalescing_manager
"""Megatron's way to begin several collectives as one."""


def all_reduce_of(value, group, device="cpu"):
    """The sum of what the members of a group give."""
    tensor = torch.tensor([value], device=device)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def sum_over(group, device="cpu"):
    """The sum of 10**rank over a group: its digits say which ranks took part; None without one."""
    return None if group is None else all_reduce_of(10 ** dist.get_rank(), group, device)


def figures_of(ranks):
    """What `figures` has of a group of these ranks."""
    return [sum(10**rank for rank in ranks), list(ranks)]


def figures(grid):
    """What communicates, by key: the sum over each group, and its members in order; or None."""
    told = {}
    for key, group in grid.pgs.items():
        told[str(key)] = None
        if group is not None:
            parts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
            dist.all_gather(parts, torch.tensor([dist.get_rank()]), group=group)
            members = [part.item() for part in parts]
            dist.broadcast(last := torch.tensor([dist.get_rank()]), src=members[-1], group=group)
            told[str(key)] = [sum_over(group), members]
            assert last.item() == members[-1]
            assert told[str(key)] == figures_of(dist.get_process_group_ranks(group))
    return told


def threads_and_files():
    """How many threads and open files this process has, but for threads that ask its store.

    As many of those stay as were ever busy at once, and a late answer makes them one more.
    """
    asking = sum(thread.name == "hypercomm" for thread in threading.enumerate())
    tasks, files = (len(list(Path("/proc/self", what).iterdir())) for what in ("task", "fd"))
    return tasks - asking, files


def given_back(before):
    """Threads and files, once they are as they were, or ten seconds later: peers close theirs."""
    deadline = time.monotonic() + 10
    while threads_and_files() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return threads_and_files()


def settle():
    """Wait until nothing has been closed for a while: gloo's own threads close what they have."""
    begin = since = time.monotonic()
    before = None
    while time.monotonic() < min(since + STEADY_S, begin + SETTLED_WITHIN_S):
        now = threads_and_files()
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.1)
