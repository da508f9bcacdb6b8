"""The grid on real gloo processes: who takes part in what is read off the numbers they sum."""

from datetime import timedelta
from itertools import chain, combinations

import numpy as np
import pytest
from by_numpy import group_of
from ranks import rank_functions

from hypercomm.launch import run_ranks


def expected_sums(shape, names, offset, dims, rank):
    """10**member summed over the group of a rank, from numpy alone."""
    members = group_of(shape, names, offset, dims, rank)
    return None if members is None else sum(10**member for member in members)


def every_combination(names):
    return list(chain.from_iterable(combinations(names, n) for n in range(1, len(names) + 1)))


# Whatever the shape, an all-reduce over a group reaches exactly the ranks that numpy's reshape
# puts in it, for every combination of dims, with each way of creating groups that gloo can have.
@pytest.mark.parametrize("creation", ["local", "enumerate"])
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ([2], ["dp"]),
        ([2, 2], ["tp", "dp"]),
        ([3, 2], ["tp", "dp"]),
        ([2, 1, 3], ["tp", "cp", "dp"]),
        ([2, 2, 2], ["tp", "cp", "dp"]),
    ],
)
def test_all_reduce_reaches_the_group(shape, names, creation):
    size = int(np.prod(shape))
    every_dims = every_combination(names)
    got = run_ranks(
        rank_functions.sums_over, size, args=(shape, names, 0, every_dims, creation), timeout=120
    )
    for rank in range(size):
        assert got[rank] == [expected_sums(shape, names, 0, dims, rank) for dims in every_dims]


# A grid at an offset holds its own ranks only; the others get None and are not waited for.
def test_grid_at_an_offset():
    args = ([2, 2], ["tp", "dp"], 1, [("tp",), ("tp", "dp")], "auto")
    got = run_ranks(rank_functions.sums_over, 6, args=args)
    for rank in range(6):
        assert got[rank] == [
            expected_sums([2, 2], ["tp", "dp"], 1, dims, rank) for dims in (("tp",), ("tp", "dp"))
        ]


# Grids beside each other, each rank knowing only its own, do not wait for each other.
def test_grids_beside_each_other():
    got = run_ranks(rank_functions.two_grids_side_by_side, 5, args=(2,))
    assert got == [11, 11, 11100, 11100, 11100]


# Ranks that have created different numbers of groups still agree on a group's name
# (pytorch issue 173608: torch's own members-only creation waits for ever here).
def test_uneven_memberships():
    assert run_ranks(rank_functions.uneven_memberships, 4, timeout=60) == [1111] * 4


# An all-gather along a dim arrives in ascending rank order, which is the order of coordinates.
def test_members_are_in_ascending_order():
    shape, names = [2, 3], ["tp", "dp"]
    ranks = np.arange(6).reshape(shape, order="F")
    for rank, gathered in enumerate(
        run_ranks(rank_functions.collectives_of_neighbours, 6, args=(shape, names))
    ):
        tp, dp = np.argwhere(ranks == rank)[0]
        assert gathered == {"tp": ranks[:, dp].tolist(), "dp": ranks[tp, :].tolist()}


# A created group inherits the timeout of the default process group unless it is told another.
def test_timeouts_are_inherited():
    got = run_ranks(rank_functions.group_timeouts, 2, group_timeout=timedelta(seconds=77))
    assert got == [(timedelta(seconds=77), timedelta(seconds=33))] * 2


# A grid destroys what it created, and leaves WORLD and other people's groups alone and working.
@pytest.mark.parametrize("creation", ["local", "enumerate"])
def test_destroys_only_its_own(creation):
    got = run_ranks(rank_functions.destroy_only_own, 4, args=(creation,))
    assert got == [(True, 3, [1111, 11])] * 2 + [(True, 3, [1111])] * 2


# Creating and destroying again and again returns every thread and every file.
def test_cycles_leave_no_thread_and_no_file():
    for before, after in run_ranks(rank_functions.cycles, 4, args=(10,), timeout=120):
        assert after == before


# A group may be destroyed as soon as it is created: that waits for members that still connect.
# Without that, five of six such runs failed with gloo's "Connection closed by peer".
@pytest.mark.full
def test_destroying_at_once():
    assert run_ranks(rank_functions.create_and_destroy_at_once, 4, args=(60,)) == [60] * 4


# Keys with the same ranks, backend and options hold one group, which works, and is destroyed once.
def test_sharing():
    assert (
        run_ranks(rank_functions.shared_groups, 2) == [((True, True, False, False), 4, 2, True)] * 2
    )


# Whichever way a user lets gloo read the store, ranks meet.
def test_how_gloo_reads():
    got = run_ranks(rank_functions.gloo_readers, 4)
    for rank, sums in enumerate(got):
        assert sums == [(1111, "0"), (1111, "1" if rank % 2 else "0"), (1111, "1")]


# A creation that a rank never joins ends after the timeout asked for, and leaves nothing behind.
def test_a_creation_that_times_out_leaves_nothing():
    (failed, waited, unchanged, groups), absent = run_ranks(rank_functions.late_rank_times_out, 2)
    assert failed is not None
    assert 1 <= waited < 10
    assert unchanged
    assert groups == []
    assert absent[0] is None


# Whoever waited is told who did not come, with coordinates; and the same creation, tried again by
# all, succeeds under a name that the failed one has left nothing at.
@pytest.mark.full
@pytest.mark.parametrize(("late", "place"), [(3, "tp=1, cp=0, dp=1"), (0, "tp=0, cp=0, dp=0")])
def test_a_creation_is_tried_again(late, place):
    got = run_ranks(rank_functions.late_for_the_first_try, 4, args=(late,), timeout=90)
    assert [total for _, total in got] == [1111] * 4
    for rank in {0, 1, 2, 3} - {late}:
        assert f"rank {late} ({place}) did not join" in got[rank][0]


# A process that was in another job before agrees on names with one that is new.
def test_a_survivor_and_its_new_peer(tmp_path):
    got = run_ranks(rank_functions.survivor_and_replacement, 3, args=(str(tmp_path),), timeout=60)
    assert got == [[11, 101], [11], [101]]


# A strategy that cannot work here is refused before anything is created, with those that can.
def test_split_without_a_device():
    for message in run_ranks(rank_functions.split_is_refused, 2):
        assert "'split' cannot create groups of backend 'gloo' here" in message
        assert "use one of ['auto', 'local', 'enumerate']" in message
