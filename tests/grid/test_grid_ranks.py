"""The grid on real gloo processes: who takes part in what is read off the numbers they sum."""

from datetime import timedelta
from itertools import chain, combinations

import numpy as np
import pytest
import torch.distributed as dist
from by_numpy import group_of
from group_facts import all_reduce_of, attempt, given_back, threads_and_files
from group_facts import tables as registered

from hypercomm import HyperCommGrid
from hypercomm.launch import run_ranks


def expected_sums(shape, names, offset, dims, rank):
    """10**member summed over the group of a rank, from numpy alone."""
    members = group_of(shape, names, offset, dims, rank)
    return None if members is None else sum(10**member for member in members)


def every_combination(names):
    return list(chain.from_iterable(combinations(names, n) for n in range(1, len(names) + 1)))


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


# Whatever the shape, an all-reduce over a group reaches exactly the ranks that numpy's reshape
# puts in it, for every combination of dims, with each way of creating groups that gloo can have.
# Ranks outside of a grid get None, and are not waited for.
@pytest.mark.parametrize("creation", ["local", "enumerate"])
@pytest.mark.parametrize(
    ("shape", "names", "offset"),
    [
        pytest.param([2], ["dp"], 0, marks=pytest.mark.full),
        pytest.param([3, 2], ["tp", "dp"], 0, marks=pytest.mark.full),
        ([2, 2], ["tp", "dp"], 1),
        ([2, 1, 3], ["tp", "cp", "dp"], 0),
        pytest.param([2, 2, 2], ["tp", "cp", "dp"], 0, marks=pytest.mark.full),
    ],
)
def test_all_reduce_reaches_the_group(shape, names, offset, creation):
    world = int(np.prod(shape)) + 2 * offset
    every_dims = every_combination(names)
    args = (shape, names, offset, every_dims, creation)
    for rank, sums in enumerate(run_ranks(sums_over, world, args=args, timeout=120)):
        assert sums == [expected_sums(shape, names, offset, dims, rank) for dims in every_dims]


def two_grids_side_by_side(split):
    """Grids over ranks 0..split-1 and split..: each rank has one, and makes no other."""
    rank, world = dist.get_rank(), dist.get_world_size()
    offset, size = (0, split) if rank < split else (split, world - split)
    with HyperCommGrid([size], ["dp"], offset) as grid:
        return all_reduce_of(10**rank, grid.create_pg("dp"))


# Grids beside each other, each rank knowing only its own, do not wait for each other.
def test_grids_beside_each_other():
    got = run_ranks(two_grids_side_by_side, 5, args=(2,))
    assert got == [11, 11, 11100, 11100, 11100]


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


# Ranks that have created different numbers of groups still agree on a group's name
# (pytorch issue 173608: torch's own members-only creation waits for ever here).
def test_uneven_memberships():
    assert run_ranks(uneven_memberships, 4, timeout=60) == [1111] * 4


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


# A grid destroys what it created, and leaves WORLD and other people's groups alone and working.
@pytest.mark.parametrize("creation", ["local", "enumerate"])
def test_destroys_only_its_own(creation):
    got = run_ranks(destroy_only_own, 4, args=(creation,))
    assert got == [(True, 3, [1111, 11])] * 2 + [(True, 3, [1111])] * 2


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


# Creating and destroying again and again returns every thread and every file.
@pytest.mark.full
def test_cycles_leave_no_thread_and_no_file():
    for before, after in run_ranks(cycles, 4, args=(10,), timeout=120):
        assert after == before


def create_and_destroy_at_once(count):
    """No communication in between: a member may be done while its peer is still connecting."""
    for cycle in range(count):
        with HyperCommGrid(
            [2, 2], ["tp", "dp"], creation=("local", "enumerate")[cycle % 2]
        ) as grid:
            grid.create_pg("tp")
    return count


# A group may be destroyed as soon as it is created: that waits for members that still connect.
# Without that, five of six such runs failed with gloo's "Connection closed by peer".
@pytest.mark.full
def test_destroying_at_once():
    assert run_ranks(create_and_destroy_at_once, 4, args=(60,)) == [60] * 4


def late_for_the_first_try(late):
    """One rank comes to a creation once the others have given up; then all try it again."""
    grid, rank = HyperCommGrid([2, 1, 2], ["tp", "cp", "dp"]), dist.get_rank()
    dist.barrier()
    said = ""
    if rank != late:
        timeout = timedelta(seconds=1)
        said, _ = attempt(lambda: grid.create_pg(["tp", "dp"], timeout=timeout))
    dist.barrier()
    with grid:
        return said, all_reduce_of(10**rank, grid.create_pg(["tp", "dp"]))


# Whoever waited is told who did not come, with coordinates; and the same creation, tried again by
# all, succeeds under a name that the failed one has left nothing at. On a busy machine a rank may
# come when the others have given up already: it is told so.
@pytest.mark.full
@pytest.mark.parametrize(("late", "place"), [(3, "tp=1, cp=0, dp=1"), (0, "tp=0, cp=0, dp=0")])
def test_a_creation_is_tried_again(late, place):
    got = run_ranks(late_for_the_first_try, 4, args=(late,), timeout=90)
    assert [total for _, total in got] == [1111] * 4
    waited = [said for rank, (said, _) in enumerate(got) if rank != late]
    named = [said for said in waited if said.startswith("GroupCreationTimeout: ")]
    assert named
    assert all(f"rank {late} ({place})" in said for said in named)
    assert all(said.startswith("LateRankError: ") for said in waited if said not in named)


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


# A process that was in another job before agrees on names with one that is new.
def test_a_survivor_and_its_new_peer(tmp_path):
    got = run_ranks(survivor_and_replacement, 3, args=(str(tmp_path),), timeout=60)
    assert got == [[11, 101], [11], [101]]
