"""What the real ranks of test_nccl_calls.py do, on a stand-in for NCCL that communicates."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from nccl_stand_in import part_of, recorded_nccl

from hypercomm import HyperCommGrid

ASLEEP_S = 2.0


def begin_bound(backend):
    """Make WORLD anew, bound to a device for each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        device_id=torch.device("cuda", rank),
        timeout=timedelta(seconds=30),
    )
    return rank


def sum_over(group):
    """The sum of 10**rank over the members; None where there is no group."""
    if group is None:
        return None
    number = torch.tensor([10.0 ** dist.get_rank()])
    part_of(group).allreduce([number]).wait()
    return int(number)


def members_alone(backend, creation):
    """Ranks 2 and 3 create their group while the others sleep; seconds, sum and calls."""
    with recorded_nccl(communicates=True) as calls:
        rank = begin_bound(backend)
        begin, total = time.monotonic(), None
        if rank >= 2:
            grid = HyperCommGrid([2], ["tp"], rank_offset=2, creation=creation)
            total = sum_over(grid.create_pg("tp"))
        else:
            time.sleep(ASLEEP_S)
        took_s = time.monotonic() - begin
        every = sum_over(dist.group.WORLD)
        if rank >= 2:
            grid.destroy()
        made = [(call.what, call.ranks, call.splits) for call in calls]
        bound = dist.group.WORLD.bound_device_id
        dist.destroy_process_group()
    return took_s, total, every, made, str(bound)


def mixed():
    """Groups of a WORLD of gloo and NCCL, all and in part; strategies, sums and gloo's sums."""
    found = []
    with recorded_nccl(communicates=True):
        begin_bound("cpu:gloo,cuda:nccl")
        with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
            for backend in (None, "nccl", "cuda:nccl", "gloo", "cpu:gloo,cuda:nccl"):
                told = grid.explain("dp", name=f"of {backend}", backend=backend)
                group = grid.create_pg("dp", name=f"of {backend}", backend=backend)
                total = None if part_of(group) is None else sum_over(group)
                number = torch.tensor([10.0 ** dist.get_rank()])
                if backend not in {"nccl", "cuda:nccl"}:
                    dist.all_reduce(number, group=group)
                found.append((told.strategy, total, int(number), dist.get_backend(group)))
        dist.destroy_process_group()
    return found
