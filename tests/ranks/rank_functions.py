"""What real ranks run in the tests: functions of a module, so that processes can import them."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid
from hypercomm.errors import CreationError
from ranks.common import all_reduce_of, given_back, threads_and_files
from ranks.common import tables as registered


def sums_over(shape, dim_names, offset, every_dims, creation):
    """The sum of 10**rank over each group: its digits say which ranks took part."""
    sums = []
    with HyperCommGrid(shape, dim_names, offset, creation=creation) as grid:
        for dims in every_dims:
            group = grid.create_pg(dims)
            if not grid.is_current_rank_in_grid():
                sums.append(group)
                continue
            sums.append(all_reduce_of(10 ** dist.get_rank(), group))
    return sums


def two_grids_side_by_side(split):
    """Grids over ranks 0..split-1 and split..: each rank has one, and makes no other."""
    rank, world = dist.get_rank(), dist.get_world_size()
    offset, size = (0, split) if rank < split else (split, world - split)
    with HyperCommGrid([size], ["dp"], offset) as grid:
        return all_reduce_of(10**rank, grid.create_pg("dp"))


def uneven_memberships():
    """Ranks 0 and 3 create one group more than the others, then all create the grid's."""
    rank = dist.get_rank()
    extra = dist.new_group([0, 3], use_local_synchronization=True) if rank in {0, 3} else None
    overlapping = HyperCommGrid([2], ["pair"], rank_offset=2) if rank >= 2 else None
    if overlapping is not None:
        overlapping.create_pg("pair")
    with HyperCommGrid([4], ["dp"], name="late") as grid:
        everyone = all_reduce_of(10**rank, grid.create_pg("dp"))
    if overlapping is not None:
        overlapping.destroy()
    if extra is not None:
        dist.destroy_process_group(extra)
    return everyone


def collectives_of_neighbours(shape, dim_names):
    """All-gather along each dim, as coordinates; gives each rank's neighbours in group order."""
    with HyperCommGrid(shape, dim_names) as grid:
        gathered = {}
        for dim in dim_names:
            group = grid.create_pg(dim)
            own = torch.tensor([dist.get_rank()])
            parts = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(parts, own, group=group)
            gathered[dim] = [part.item() for part in parts]
        return gathered


def group_timeouts():
    """The timeouts of a group that inherits, and of one that is told."""

    def timeout_of(group):
        return group._get_backend(torch.device("cpu")).options._timeout

    with HyperCommGrid([2], ["dp"]) as grid:
        inherited = grid.create_pg("dp")
        told = grid.create_pg("dp", name="told", timeout=timedelta(seconds=33))
        return timeout_of(inherited), timeout_of(told)


def destroy_only_own(creation):
    """What is registered before and after a grid's life beside a group that is not its own."""
    foreign = dist.new_group([0, 1])
    with HyperCommGrid([2, 2], ["tp", "dp"], creation=creation) as warm_up:
        warm_up.create_pg("tp")
    before = registered()
    with HyperCommGrid([2, 2], ["tp", "dp"], creation=creation) as grid:
        for dims in ("tp", "dp", ["tp", "dp"]):
            grid.create_pg(dims)
        during = len(registered()[0])
    grid.destroy()
    rank = dist.get_rank()
    still = [all_reduce_of(10**rank, None)]
    if rank in {0, 1}:
        still.append(all_reduce_of(10**rank, foreign))
    return before == registered(), during - len(before[0]), still


def cycles(count):
    """Create and destroy, over and over; threads and open files before and after."""

    def cycle():
        with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
            for dims in ("tp", "dp", ["tp", "dp"]):
                all_reduce_of(1, grid.create_pg(dims))

    cycle()
    dist.barrier()
    before = threads_and_files()
    for _ in range(count):
        cycle()
    dist.barrier()
    return before, given_back(before)


def create_and_destroy_at_once(count):
    """No communication in between: a member may be done while its peer is still connecting."""
    for cycle in range(count):
        with HyperCommGrid(
            [2, 2], ["tp", "dp"], creation=("local", "enumerate")[cycle % 2]
        ) as grid:
            grid.create_pg("tp")
    return count


def shared_groups():
    """With share="identical", dp and dp+cp are one group where cp is 1, destroyed once."""
    before = registered()[0]
    with HyperCommGrid([1, 1, 2], ["tp", "cp", "dp"], share="identical") as grid:
        dp, dp_cp = grid.create_pg("dp"), grid.create_pg(["dp", "cp"])
        tp, cp = grid.create_pg("tp"), grid.create_pg("cp")
        own = grid.create_pg("dp", name="overlap", share="never")
        described = grid.create_pg(["tp", "dp"], group_desc="apart")
        same = (dp is dp_cp, tp is cp, dp is own, dp is described)
        created = len(registered()[0] - before)
        total = all_reduce_of(1, dp_cp)
    return same, created, total, registered()[0] == before


def gloo_readers():
    """Ranks whose users let gloo read addresses in different ways meet; the choice stays theirs."""
    name, rank, sums = "GLOO_ENABLE_STORE_V2_API", dist.get_rank(), []
    with HyperCommGrid([4], ["dp"]) as grid:
        for value in ("0", "1" if rank % 2 else "0", "1"):
            os.environ[name] = value
            group = grid.create_pg("dp", name=f"{len(sums)}")
            sums.append((all_reduce_of(10**rank, group), os.environ[name]))
    return sums


def late_rank_times_out():
    """Rank 1 never comes; rank 0 waits as long as it was told, and is left as it was."""
    grid = HyperCommGrid([2], ["dp"])
    before = registered()
    begin = time.monotonic()
    failed = None
    if dist.get_rank() == 0:
        try:
            grid.create_pg("dp", timeout=timedelta(seconds=1))
        except RuntimeError as error:
            failed = type(error).__name__
    waited = time.monotonic() - begin
    return failed, waited, registered() == before, list(grid.pgs)


def late_for_the_first_try(late):
    """One rank comes too late for a creation; then all ranks try it again."""
    grid, rank = HyperCommGrid([2, 1, 2], ["tp", "cp", "dp"]), dist.get_rank()
    if rank == late:
        time.sleep(3)
    said = None
    try:
        grid.create_pg(["tp", "dp"], timeout=timedelta(seconds=1))
    except RuntimeError as error:
        said = str(error)
    dist.barrier()
    with grid:
        return said, all_reduce_of(10**rank, grid.create_pg(["tp", "dp"]))


def survivor_and_replacement(folder):
    """Ranks 0 and 1 are a job; then 0, which has a past, and 2, which has none, are another."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    parts = {0: [("first", 0), ("second", 0)], 1: [("first", 1)], 2: [("second", 1)]}
    sums = []
    for job, number in parts[rank]:
        store = dist.FileStore(f"{folder}/{job}", 2)
        dist.init_process_group("gloo", store=store, rank=number, world_size=2)
        with HyperCommGrid([2], ["dp"]) as grid:
            group = grid.create_pg("dp", timeout=timedelta(seconds=10))
            sums.append(all_reduce_of(10**rank, group))
        dist.destroy_process_group()
    return sums


def split_is_refused():
    grid = HyperCommGrid([2], ["dp"], creation="split")
    try:
        grid.create_pg("dp")
    except CreationError as error:
        return str(error)
    return "created"
