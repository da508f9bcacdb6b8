"""Reshaping on real gloo processes: numbers summed over a group say who is in it."""

import contextlib
import os
import signal
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from busy import late_s
from group_facts import attempt, sum_over
from mortal_ranks import run_scene

from hypercomm import HyperCommGrid, run_ranks
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.calls import Call
from hypercomm.testing import registered_groups

START, OTHER = "tp=2,cp=2,dp=2", "tp=4,dp=2"
KEYS = [("tp",), ("cp",), ("dp",), ("tp", "cp"), ("cp", "dp"), ("tp", "cp", "dp")]


def numpy_sums(layout, rank, keys, order=None):
    """10**member summed over the groups of a rank, by key, from numpy alone."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in layout.split(","))}
    order = np.arange(np.prod([*sizes.values()])) if order is None else np.array(order)
    ranks = order.reshape([*sizes.values()], order="F")
    (where,) = np.argwhere(ranks == rank)

    def total(dims):
        index = [slice(None) if name in dims else at for name, at in zip(sizes, where, strict=True)]
        return int((10 ** np.atleast_1d(ranks[tuple(index)]).ravel()).sum())

    return {dims: total(dims) for dims in keys if {*dims} <= {*sizes}}


def sums(grid):
    """The sum over each group of a grid, by the dims of its key."""
    return {key.dims: sum_over(group) for key, group in grid.pgs.items() if group is not None}


def unchanged(grid, before):
    """Whether a grid has the very groups that it had, and torch those alone."""
    now = dict(grid.pgs)
    is_same = list(now) == list(before) and all(now[key] is before[key] for key in before)
    return is_same and registered_groups() == {dist.group.WORLD, *now.values()}


# ---- what survives ------------------------------------------------------------------------------


def there_and_back(rounds, verify, batched):
    """Reshape there and back; the sums after each, and what survived as the same object."""
    told = []
    with HyperCommGrid(START, verify=verify) as grid:
        if batched:
            grid.create_pgs(KEYS)
        else:
            for dims in KEYS:
                grid.create_pg(dims)
        for _ in range(rounds):
            for target in (OTHER, START):
                before = dict(grid.pgs)
                result = grid.reshape(target)
                kept = [
                    (new.dims, old.dims) for new, old in result.kept if grid.pgs[new] is before[old]
                ]
                told.append((str(grid.layout), sums(grid), kept, len(result.kept)))
                grid.verify()
            grid.create_pgs([dims for dims in KEYS if "cp" in dims])  # they were destroyed
        last = sums(grid)
    return told, last, registered_groups() == {dist.group.WORLD}


# There and back, twice: after each reshape every key that has its dims reduces over what numpy
# finds, and what was kept is the very object; with and without verify, one by one or batched.
@pytest.mark.parametrize(
    ("verify", "batched"), [(False, True), pytest.param(True, False, marks=pytest.mark.full)]
)
def test_there_and_back(verify, batched):
    got = run_ranks(there_and_back, 8, args=(2, verify, batched), timeout=180)
    without_cp = [dims for dims in KEYS if "cp" not in dims]
    for rank, (told, last, is_clean) in enumerate(got):
        assert [layout for layout, *_ in told] == [OTHER, START] * 2
        for layout, totals, kept, count in told:
            assert totals == numpy_sums(layout, rank, without_cp)
            assert len(kept) == count
        # tp has the ranks of tp+cp; dp those that it had: (0, 4), (1, 5), ...
        assert told[0][2] == [(("tp",), ("tp", "cp")), (("dp",), ("dp",))]
        assert told[1][2] == [(("dp",), ("dp",))]
        assert last == numpy_sums(START, rank, KEYS)
        assert is_clean


# ---- ranks that differ, or do not come ----------------------------------------------------------


# ---- a rank that fails --------------------------------------------------------------------------

ERROR = ZeroDivisionError("on purpose")


class Derive:
    """Derives groups, but where it fails; all ranks say that they pass it."""

    def __init__(self, function):
        self.function, self.fails = function, False

    def __call__(self, groups):
        if self.fails:
            raise ERROR
        return self.function(groups)


@contextlib.contextmanager
def failing_on(rank, derive, where):
    """Let one rank fail to derive groups, or to create them."""
    is_here = dist.get_rank() == rank
    derive.fails = is_here and where == "derive"
    fails = mock.patch.object(c10d, "new_group", side_effect=ERROR)
    with fails if is_here and where == "create" else contextlib.nullcontext():
        yield
    derive.fails = False


def one_fails(failing, where, verify):
    """On one rank a derived group cannot be made, before the ranks meet or afterwards."""
    derive = Derive(lambda groups: groups.levels([2, 2])[1])
    with HyperCommGrid("tp=2,dp=4", verify=verify) as grid:
        grid.create_pg("tp")
        grid.create_pg("dp", name="pairs", derive=derive)
        before = dict(grid.pgs)
        dist.barrier()  # who still waits in a creation would hear of the failure there
        with failing_on(failing, derive, where):
            said = attempt(lambda: grid.reshape("dp=4,tp=2"))
        is_same, totals = unchanged(grid, before), sums(grid)
        grid.reshape("dp=4,tp=2")
        return *said, is_same, totals["tp",], sums(grid)["tp",]


# One rank fails, before the ranks meet or in the creation: it raises its own error, the others
# raise within seconds and name it, nobody has lost or kept anything, and all may try again.
@pytest.mark.full
@pytest.mark.parametrize(
    ("failing", "where", "verify"),
    [(0, "derive", True), (0, "create", False), (6, "derive", False), (6, "create", True)],
)
def test_one_rank_fails(failing, where, verify):
    got = run_ranks(one_fails, 8, args=(failing, where, verify), timeout=90)
    for rank, (said, waited, is_same, before, after) in enumerate(got):
        kind = "ZeroDivisionError: on purpose"
        assert said.startswith(kind if rank == failing else "CreationError: "), said
        assert rank == failing or (f"rank {failing} (host" in said and kind in said)
        assert waited < late_s(5)
        assert is_same
        assert before == numpy_sums("tp=2,dp=4", rank, [("tp",)])["tp",]
        assert after == numpy_sums("dp=4,tp=2", rank, [("tp",)])["tp",]


def one_of_two_grids():
    """A reshape that fails leaves another grid's group alone, which would have served a key."""
    derive = Derive(lambda groups: groups.pick(lambda ranks: (ranks[0], ranks[-1])))
    with HyperCommGrid("tp=2,dp=2", share="identical", name="lender") as lender:
        lent = lender.create_pg(["tp", "dp"])
        with HyperCommGrid("tp=2,dp=2", share="identical", share_with=lender) as grid:
            grid.create_pgs(["tp", {"dims": "tp", "name": "ends", "derive": derive}])
            with failing_on(0, derive, "create"):
                said, _ = attempt(lambda: grid.reshape("tp=4,dp=1"))
            totals = [sum_over(lent)]
            grid.destroy_pg("tp", name="ends")
            grid.reshape("tp=4,dp=1")
            served = str(grid.explain("tp").served_by)
            is_lent = grid.get_pg("tp") is lent
            grid.reshape("tp=2,dp=2")
        totals.append(sum_over(lent))
    return said, totals, is_lent, served


# A key that another grid's group serves: a reshape that fails does not destroy it, and one that
# succeeds uses it; it stays its owner's.
def test_a_group_of_another_grid():
    for rank, (said, *rest) in enumerate(run_ranks(one_of_two_grids, 4, timeout=60)):
        assert said.startswith("ZeroDivisionError" if rank == 0 else "CreationError"), said
        assert rest == [[1111, 1111], True, "another grid"]


STANDS_STILL = 2


def sums_without(grid, absent):
    """The sums over the groups that a rank is not in."""
    members = dist.get_process_group_ranks
    return sorted(sum_over(group) for group in grid.pgs.values() if absent not in members(group))


def groups_without(rank, absent):
    groups = [{0, 1}, {2, 3}, {0, 2}, {1, 3}]
    return sorted(
        sum(10**one for one in group) for group in groups if rank in group and absent not in group
    )


def is_killed(rank, victim, target, timeout_s):
    """A rank dies before it has finished; the others are as before, and go on."""
    grid = HyperCommGrid("tp=2,dp=2")
    grid.create_pgs(["tp", "dp"])
    before, timeout = dict(grid.pgs), timedelta(seconds=timeout_s)
    dist.barrier()  # who still waits in a creation would hear of the loss there
    if rank == victim:
        Call._finish = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    told = attempt(lambda: grid.reshape(target, timeout=timeout))
    return *told, unchanged(grid, before), sums_without(grid, victim)


# A rank is killed after the ranks have met, whether or not groups are created: the others end in
# time with an error that names it, are as they were, and their groups without it still work.
@pytest.mark.full
@pytest.mark.parametrize(("victim", "target"), [(0, "dp=2,tp=2"), (3, "tp=4")])
def test_a_rank_is_killed(tmp_path, victim, target, timeout_s):
    timeout_s *= STANDS_STILL
    args = (victim, target, timeout_s)
    for rank, got in run_scene(tmp_path, is_killed, 4, *args, victims=[victim]).items():
        said, waited, is_same, alive = got
        assert said.startswith("GroupCreationTimeout: "), said
        assert f"rank {victim} (" in said
        assert waited < timeout_s + late_s(3)
        assert is_same
        assert alive == groups_without(rank, victim)
