"""Reshaping on real gloo processes: numbers summed over a group say who is in it."""

import json
from datetime import timedelta

import numpy as np
import pytest
from busy import late_s
from ranks import reshape_ranks
from ranks.mortal_ranks import exit_codes

from hypercomm.testing import run_ranks

SHAPES = {"tp=2,cp=2,dp=2": {"tp": 2, "cp": 2, "dp": 2}, "tp=4,dp=2": {"tp": 4, "dp": 2}}
KEYS = [tuple([dims] if isinstance(dims, str) else dims) for dims in reshape_ranks.KEYS]
STANDS_STILL = 2
"""How much longer ranks wait here: a machine that stands still for a second makes others late."""


def numpy_sum(sizes, dims, rank, order=None):
    """10**member summed over the group of a rank, from numpy alone."""
    shape = list(sizes.values())
    ranks = np.arange(np.prod(shape)) if order is None else np.array(order)
    ranks = ranks.reshape(shape, order="F")
    (where,) = np.argwhere(ranks == rank)
    index = tuple(
        slice(None) if name in dims else at for name, at in zip(sizes, where, strict=True)
    )
    return int((10 ** np.atleast_1d(ranks[index]).ravel()).sum())


def numpy_sums(sizes, rank, keys):
    return {dims: numpy_sum(sizes, dims, rank) for dims in keys if set(dims) <= set(sizes)}


# There and back, twice: after each reshape every key that has its dims reduces over what
# numpy finds, and what was kept is the very object; with and without verify, one by one or batched.
@pytest.mark.parametrize(("verify", "batched"), [(False, True), (True, False), (True, True)])
def test_there_and_back(verify, batched):
    rounds = 2
    got = run_ranks(reshape_ranks.there_and_back, 8, args=(rounds, verify, batched), timeout=180)
    without_cp = [dims for dims in KEYS if "cp" not in dims]
    for rank, (told, last, is_clean) in enumerate(got):
        for layout, sums, kept, count in told:
            assert sums == numpy_sums(SHAPES[layout], rank, without_cp)
            assert len(kept) == count
        # tp has the ranks of tp+cp; dp those that it had: (0, 4), (1, 5), ...
        assert told[0][2] == [(("tp",), ("tp", "cp")), (("dp",), ("dp",))]
        assert told[1][2] == [(("dp",), ("dp",))]
        assert [layout for layout, *_ in told] == ["tp=4,dp=2", "tp=2,cp=2,dp=2"] * rounds
        assert last == numpy_sums(SHAPES["tp=2,cp=2,dp=2"], rank, KEYS)
        assert is_clean


# A list of ranks that differs from the old order in two places: ranks 0 to 3 keep their tp group,
# the others create theirs, whose members are in the list's order; and the next reshape works.
@pytest.mark.parametrize("verify", [False, True])
def test_partial_survival(verify):
    order = [0, 1, 2, 3, 4, 6, 5, 7]
    sizes = {"tp": 2, "dp": 4}
    pairs = np.array(order).reshape(4, 2).tolist()
    got = run_ranks(reshape_ranks.partial_survival, 8, args=(verify,), timeout=90)
    for rank, (first, is_kept, gathered, sums, second, last) in enumerate(got):
        assert is_kept == (rank < 4)
        assert gathered == next(pair for pair in pairs if rank in pair)
        assert sums == {(dim,): numpy_sum(sizes, dim, rank, order) for dim in ("tp", "dp")}
        kept, rest = ("tp", "dp") if rank < 4 else ("none", "tp, dp")
        assert first.split("\n  ") == [
            "tp=2,dp=4 -> tp=2,dp=4",
            f"kept: {kept}",
            f"created: {rest}",
            f"destroyed: {rest}",
        ]
        assert second == "tp=2,dp=4 -> tp=8\n  kept: none\n  created: tp\n  destroyed: tp, dp"
        assert last == {("tp",): 11111111}


# Each rank may have created its groups in another order, as groups that connect later wait for
# nobody: a reshape, and one with other ranks, has them in one order.
@pytest.mark.parametrize("ranks", [None, [3, 1, 0, 2]])
def test_created_in_other_orders(ranks):
    order = ranks or [0, 1, 2, 3]
    got = run_ranks(reshape_ranks.created_in_other_orders, 4, args=(ranks,), timeout=60)
    for rank, (created, sums) in enumerate(got):
        assert created == ["tp", "dp", "dp (twin)"] + ["tp+dp"] * (ranks is not None)
        assert sums.pop(("dp", "twin")) == sums[("dp",)]
        keys = [("tp",), ("dp",), ("tp", "dp")]
        sizes = {"tp": 1, "dp": 4}
        assert sums == {key: numpy_sum(sizes, key, rank, order) for key in keys}


# A rank that reshapes to something else: every rank raises within seconds, however late it or the
# others are; each grid is as it was and works; and the next reshape works on all.
@pytest.mark.long
@pytest.mark.parametrize(
    ("odd", "verify", "lag_s"),
    [
        (0, False, 0),
        (0, False, 1.0),
        pytest.param(0, False, -1.0, marks=pytest.mark.slow),
        (5, True, 0),
        pytest.param(5, True, 1.0, marks=pytest.mark.slow),
        (5, True, -1.0),
    ],
)
def test_another_target(odd, verify, lag_s):
    args = (odd, verify, lag_s)
    got = run_ranks(reshape_ranks.another_target, 8, args=args, timeout=120)
    for rank, (told, layout, sums) in enumerate(got):
        for said, waited, is_same in told[::2]:
            assert said.startswith("PlanMismatchError: ranks differ in what they create"), said
            assert "reshape to {" in said
            assert f"rank {odd} (host" in said
            assert waited < late_s(5)
            assert is_same
        for before in told[1::2]:
            assert before == numpy_sums(SHAPES["tp=2,cp=2,dp=2"], rank, KEYS)
        assert layout == "tp=4,dp=2"
        assert sums == numpy_sums(SHAPES[layout], rank, KEYS)


# Other sizes of a view are another target, though no group of the view exists.
def test_another_view():
    got = run_ranks(reshape_ranks.another_view, 8, args=(3,), timeout=60)
    for rank, ((said, waited), shape, sums) in enumerate(got):
        assert said.startswith("PlanMismatchError: ")
        assert "with view expert: ep=2,rest=4" in said
        assert "with view expert: ep=8,rest=1" in said
        assert waited < late_s(5)
        assert shape == (8, 1)
        assert sums == {("tp",): numpy_sum(SHAPES["tp=4,dp=2"], "tp", rank)}


# Who does not call it is named, each time, a timeout after the first of the others has called: its
# word ends the meeting for all. The grids stay usable; then a call by all works.
@pytest.mark.long
@pytest.mark.parametrize(("absent", "verify"), [(0, False), (2, False), (3, True)])
def test_a_rank_that_does_not_call(absent, verify, timeout_s):
    timeout_s *= STANDS_STILL
    sleep_s = 2 * timeout_s + 0.5
    got = run_ranks(
        reshape_ranks.does_not_call,
        4,
        args=(absent, verify, sleep_s, timedelta(seconds=timeout_s)),
        timeout=90,
    )
    place = f"rank {absent} (tp={absent % 2}, dp={absent // 2}; host "
    for rank, (told, sums) in enumerate(got):
        assert sums == {("tp",): 1111}
        assert len(told) == (0 if rank == absent else 4)
        for number, (said, waited, is_same, begin) in enumerate(told[::2]):
            first = min(others[2 * number][3] for others, _ in got if others)
            assert said.startswith("GroupCreationTimeout: reshape() of the grid tp=2,dp=2 waited")
            assert place in said
            assert timeout_s <= begin + waited - first
            assert waited < timeout_s + late_s(2)
            assert is_same
        for still in told[1::2]:
            apart = {0: 3, 1: 2, 2: 1, 3: 0}[absent]  # shares no group with the absent one
            assert len(still) == (2 if rank == apart else 1)


# Who comes once the others have given up meets them where they try again, in one call.
@pytest.mark.long
@pytest.mark.parametrize("late", [0, 3])
def test_a_rank_that_comes_late(late, timeout_s):
    timeout_s *= STANDS_STILL
    got = run_ranks(
        reshape_ranks.comes_late,
        4,
        # what is left of the others' time is for the groups
        args=(late, timeout_s + 0.25, timedelta(seconds=timeout_s)),
        timeout=60,
    )
    for rank, (said, result, sums) in enumerate(got):
        assert said.startswith("GroupCreationTimeout: ") == (rank != late)
        assert "created: tp" in result
        assert sums == {("tp",): 1111}


# One rank fails, before the ranks meet or in the creation: it raises its own error, the others
# raise within seconds and name it, nobody has lost or kept anything, and all may try again.
@pytest.mark.parametrize("where", ["derive", "create"])
@pytest.mark.parametrize(("failing", "verify"), [(0, False), (6, True)])
def test_one_rank_fails(failing, where, verify):
    got = run_ranks(reshape_ranks.one_fails, 8, args=(failing, where, verify), timeout=90)
    old, new = {"tp": 2, "dp": 4}, {"dp": 4, "tp": 2}
    words = f"rank {failing} failed in reshape(): ZeroDivisionError: on purpose"
    for rank, ((said, waited), is_same, sums, (again, _), after) in enumerate(got):
        mine = "ZeroDivisionError: on purpose"
        assert said == (mine if rank == failing else f"PlanMismatchError: {words}")
        assert waited < late_s(5)
        assert is_same
        assert set(sums) == {("tp",), ("dp",)}
        assert sums["tp",] == numpy_sum(old, "tp", rank)
        assert again.startswith("tp=2,dp=4 -> dp=4,tp=2\n"), again
        assert after["tp",] == numpy_sum(new, "tp", rank)
        assert after["dp", "tp"] == 11111111


# A rank is killed after the ranks have met, whether or not something is to be created: the others
# end in time with an error, are as they were, and their groups without it still work.
@pytest.mark.long
@pytest.mark.parametrize("target", ["dp=2,tp=2", "tp=4"])
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_is_killed(tmp_path, victim, target, timeout_s):
    timeout_s *= STANDS_STILL
    exit_codes(reshape_ranks.one_is_killed, 4, tmp_path, victim, target, timeout_s)
    for rank in set(range(4)) - {victim}:
        said, waited, is_same, alive = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said.startswith(("GroupCreationTimeout: ", "PlanMismatchError: ")), said
        assert f"rank {victim} (" in said
        assert waited < timeout_s + late_s(3)
        assert is_same
        groups = [{0, 1}, {2, 3}, {0, 2}, {1, 3}]
        assert sorted(alive) == sorted(
            sum(10**member for member in group)
            for group in groups
            if rank in group and victim not in group
        )
    assert not (tmp_path / f"{victim}.json").exists()


# Twenty reshapes leave no thread and no group; files may differ by a few that gloo is about to
# close, where a group left by each reshape would hold two sockets at least.
@pytest.mark.slow
def test_no_leftovers():
    reshapes = 20
    for before, after in run_ranks(reshape_ranks.many, 8, args=(reshapes // 2,), timeout=180):
        assert (after[0], after[2]) == (before[0], before[2])
        assert after[1] - before[1] < reshapes // 2


# A key that another grid's group serves: a reshape that fails does not destroy it, and one that
# succeeds uses it; it stays its owner's.
def test_a_group_of_another_grid():
    got = run_ranks(reshape_ranks.one_of_two_grids, 4, timeout=60)
    for rank, (said, totals, created, is_lent, served) in enumerate(got):
        failed = "ZeroDivisionError: on purpose"
        told = f"PlanMismatchError: rank 0 failed in reshape(): {failed}"
        assert said == (failed if rank == 0 else told)
        assert totals == [1111, 1111]
        assert created == ["tp"]
        assert is_lent
        assert served == "another grid"
