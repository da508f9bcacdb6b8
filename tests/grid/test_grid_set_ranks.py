"""Sets of grids on real gloo processes: who takes part is read off the numbers they sum."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from by_numpy import group_of
from group_facts import all_reduce_of
from group_facts import tables as registered

from hypercomm import GridSet, RankLayout
from hypercomm.errors import HyperCommError
from hypercomm.launch import run_ranks

SIZES = {"encoder": "tp=2,dp=2", "llm": "tp=2,pp=2"}
SETS = {
    "tiled": {"a": RankLayout.parse("tp=2"), "b": RankLayout.parse("tp=2", rank_offset=2)},
    "overlapping": {"a": RankLayout.parse("tp=4"), "b": RankLayout.parse("tp=2", rank_offset=2)},
    "colocated": {"a": RankLayout.parse("tp=2,dp=2"), "b": RankLayout.parse("tp=4")},
}


def expected(shape, names, offset, dims, rank):
    """10**member summed over the group of a rank, from numpy alone; None for a rank outside."""
    members = group_of(shape, names, offset, dims, rank)
    return None if members is None else sum(10**member for member in members)


def sums_of(created):
    """The sum of 10**rank over each group, or None where this rank is in none."""
    return {
        name: [group and all_reduce_of(10 ** dist.get_rank(), group) for group in groups]
        for name, groups in created.items()
    }


def tiled(creation):
    """Two grids of 4 ranks, one behind the other: the sums over groups, and what is left."""
    with GridSet.tile(**SIZES, creation=creation) as warm_up:
        warm_up.create_pgs({"encoder": ["tp"], "llm": ["tp"]})
    before = registered()
    with GridSet.tile(**SIZES, creation=creation) as grids:
        created = grids.create_pgs({"llm": ["pp", ["tp", "pp"]], "encoder": ["tp", "dp"]})
        sums = sums_of(created)
        for name in grids.grids_of():
            grids[name].verify()
        held = sum(group is not None for groups in created.values() for group in groups)
        new = len(registered()[0]) - len(before[0])
    return sums, (held, new), registered() == before, grids.grids_of()


# An encoder and a language model beside each other: each rank creates its own groups only, which
# reach exactly their members; leaving the block leaves nothing in torch's registries.
@pytest.mark.parametrize("creation", ["local", pytest.param("enumerate", marks=pytest.mark.full)])
def test_tiled(creation):
    got = run_ranks(tiled, 8, args=(creation,), timeout=120)
    for rank, (sums, (held, new), is_clean, names) in enumerate(got):
        assert sums == {
            "encoder": [expected([2, 2], ["tp", "dp"], 0, [dim], rank) for dim in ("tp", "dp")],
            "llm": [
                expected([2, 2], ["tp", "pp"], 4, dims, rank) for dims in (["pp"], ["tp", "pp"])
            ],
        }
        assert (held, new) == (2, 2)
        assert is_clean
        assert names == (("encoder",) if rank < 4 else ("llm",))


def colocated(share):
    """Two grids on the same ranks; each rank writes its requests in an order of its own."""
    requests = {"training": ["tp", "dp"], "inference": ["tp", "dp"]}
    if dist.get_rank() % 2:
        requests = dict(reversed(requests.items()))
    sizes = {"training": "tp=2,dp=4", "inference": "tp=4,dp"}
    with GridSet.colocated(**sizes, verify=True, share=share) as grids:
        created = grids.create_pgs(requests)
        return list(created), sums_of(created)


# Grids on the same ranks are created in the set's order on every rank, although half of the ranks
# write their requests in another one; a comparison of plans finds no difference.
@pytest.mark.parametrize("share", ["identical", pytest.param("never", marks=pytest.mark.full)])
def test_colocated(share):
    got = run_ranks(colocated, 8, args=(share,), timeout=120)
    for rank, (names, sums) in enumerate(got):
        assert names == ["training", "inference"]
        assert sums == {
            "training": [expected([2, 4], ["tp", "dp"], 0, [dim], rank) for dim in ("tp", "dp")],
            "inference": [expected([4, 2], ["tp", "dp"], 0, [dim], rank) for dim in ("tp", "dp")],
        }


KINDS = ("tiled", "overlapping", "colocated")
KIND_SHAPES = {
    "tiled": (([2], ["tp"], 0), ([2], ["tp"], 2)),
    "overlapping": (([4], ["tp"], 0), ([2], ["tp"], 2)),
    "colocated": (([2, 2], ["tp", "dp"], 0), ([4], ["tp"], 0)),
}


def check_sums(kind, sums, rank, times):
    """Every group over tp holds its members, also those that were created under a name."""
    for (name, got), (shape, names, offset), count in zip(
        sums.items(), KIND_SHAPES[kind], times, strict=True
    ):
        assert (name, got) == (name, [expected(shape, names, offset, ["tp"], rank)] * count)


def attempt(grids, requests, **arguments):
    """What came of a creation: the error, which keys there are, and the seconds that it took."""
    begin, error = time.monotonic(), None
    try:
        grids.create_pgs(requests, **arguments)
    except (HyperCommError, ValueError) as raised:
        error = type(raised).__name__
    keys = {name: [str(key) for key in grid.pgs] for name, grid in grids.items()}
    return error, keys, time.monotonic() - begin


def one_fails(kind, verify, fails):
    """Rank 3 alone fails in the second grid, as often as is said; each retries at once."""
    outcomes = []

    def derive(groups):
        if dist.get_rank() == 3 and len(outcomes) < fails:
            raise ValueError("mine")
        return groups

    requests = {"a": ["tp"], "b": [{"dims": "tp", "name": "own", "derive": derive}, "tp"]}
    with GridSet(SETS[kind], verify=verify) as grids:
        before = registered()
        for attempted in range(fails + 1):
            outcomes.append(attempt(grids, requests, timeout=timedelta(seconds=30)))
            if attempted < fails and registered() != before:
                outcomes.append("something is left")
        created = {name: list(grid.pgs.values()) for name, grid in grids.items()}
        return outcomes, sums_of(created)


# One rank that fails in its grid fails the call on all ranks, also those that are in another grid
# only, and long before a timeout; nothing is left, and a retry at once works, however often.
@pytest.mark.parametrize(
    ("kind", "verify", "fails"),
    [
        ("overlapping", False, 1),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                *((kind, False, 1) for kind in KINDS if kind != "overlapping"),
                ("colocated", True, 2),
                ("tiled", True, 2),
            ]
        ),
    ],
)
def test_one_fails(kind, verify, fails):
    got = run_ranks(one_fails, 4, args=(kind, verify, fails), timeout=120)
    for rank, (outcomes, sums) in enumerate(got):
        assert len(outcomes) == fails + 1
        for error, keys, seconds in outcomes[:-1]:
            assert error == ("ValueError" if rank == 3 else "CreationError")
            assert keys == {"a": [], "b": []}
            assert seconds < 20
        assert outcomes[-1][:2] == (None, {"a": ["tp"], "b": ["tp (own)", "tp"]})
        check_sums(kind, sums, rank, (1, 2))


def one_asks_otherwise(kind):
    """Rank 0 asks for another group of the second grid, which it may be outside of; then not."""
    others = {"a": ["tp"], "b": ["tp"]}
    requests = {"a": ["tp"], "b": [{"dims": "tp", "name": "other"}]}
    with GridSet(SETS[kind]) as grids:
        first = requests if dist.get_rank() == 0 else others
        outcomes = [attempt(grids, asked) for asked in (first, others)]
        created = {name: list(grid.pgs.values()) for name, grid in grids.items()}
        return outcomes, sums_of(created)


# A rank that asks for something else is heard of by all, in the grid or outside; then all agree.
@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_one_asks_otherwise(kind):
    got = run_ranks(one_asks_otherwise, 4, args=(kind,), timeout=120)
    for rank, (((error, keys, _), (again, _, _)), sums) in enumerate(got):
        assert (error, again) == ("PlanMismatchError", None)
        assert keys == {"a": [], "b": []}
        check_sums(kind, sums, rank, (1, 1))
