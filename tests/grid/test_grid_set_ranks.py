"""Sets of grids on real gloo processes: who takes part is read off the numbers they sum."""

import pytest
from by_numpy import group_of
from megatron_facts import megatrons_fields
from ranks import grid_set_ranks

from hypercomm.launch import run_ranks


def expected(shape, names, offset, dims, rank, pick=slice(None)):
    """10**member summed over the group of a rank, from numpy alone; None for a rank outside."""
    members = (group_of(shape, names, offset, dims, rank) or [])[pick]
    return sum(10**member for member in members) if rank in members else None


# An encoder and a language model beside each other: each rank creates its own groups only, which
# reach exactly their members; leaving the block leaves nothing in torch's registries.
@pytest.mark.parametrize("creation", ["local", "enumerate"])
def test_tiled(creation):
    got = run_ranks(grid_set_ranks.tiled, 8, args=(creation,), timeout=120)
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


# Grids that share some ranks: the shared ones take part in both, and nobody waits for ever.
def test_overlapping():
    got = run_ranks(grid_set_ranks.overlapping, 8, timeout=120)
    for rank, (sums, overlaps) in enumerate(got):
        assert overlaps == {("low", "high"): [2, 3, 4, 5]}
        assert sums == {
            "low": [expected([2, 3], ["tp", "dp"], 0, [dim], rank) for dim in ("tp", "dp")],
            "high": [expected([3, 2], ["cp", "dp"], 2, [dim], rank) for dim in ("cp", "dp")],
        }


# Grids on the same ranks are created in the set's order on every rank, although half of the ranks
# write their requests in another one; a comparison of plans finds no difference.
@pytest.mark.parametrize("share", ["never", "identical"])
def test_colocated(share):
    got = run_ranks(grid_set_ranks.colocated, 8, args=(share,), timeout=120)
    for rank, (names, sums) in enumerate(got):
        assert names == ["training", "inference"]
        assert sums == {
            "training": [expected([2, 4], ["tp", "dp"], 0, [dim], rank) for dim in ("tp", "dp")],
            "inference": [expected([4, 2], ["tp", "dp"], 0, [dim], rank) for dim in ("tp", "dp")],
        }


# A creation that fails in the second grid leaves nothing of the first; the right call then works.
def test_failing():
    got = run_ranks(grid_set_ranks.failing, 8, timeout=120)
    for rank, (outcomes, sums) in enumerate(got):
        assert outcomes == [("UnknownDimError", True), ("ValueError", True)]
        assert sums == {
            "a": [expected([2, 4], ["tp", "dp"], 0, [dim], rank) for dim in ("tp", "dp")],
            "b": [expected([4, 2], ["tp", "dp"], 0, ["tp"], rank)],
        }


# Ranks that ask for different groups of the second grid hear it, and none keeps the first's.
def test_some_fail():
    got = run_ranks(grid_set_ranks.some_fail, 8, timeout=120)
    assert got == [("PlanMismatchError", True)] * 8


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


# One rank that fails in its grid fails the call on all ranks, also those that are in another grid
# only, and long before a timeout; nothing is left, and a retry at once works, however often.
@pytest.mark.parametrize(
    ("kind", "verify", "fails"),
    [*((kind, False, 1) for kind in KINDS), ("colocated", True, 2), ("tiled", True, 2)],
)
def test_one_fails(kind, verify, fails):
    got = run_ranks(grid_set_ranks.one_fails, 4, args=(kind, verify, fails), timeout=120)
    for rank, (outcomes, sums) in enumerate(got):
        assert len(outcomes) == fails + 1
        for error, keys, seconds in outcomes[:-1]:
            assert error == ("ValueError" if rank == 3 else "CreationError")
            assert keys == {"a": [], "b": []}
            assert seconds < 20
        assert outcomes[-1][:2] == (None, {"a": ["tp"], "b": ["tp (own)", "tp"]})
        check_sums(kind, sums, rank, (1, 2))


# Ranks that wait in vain for one that comes late all give up; it meets those that try again, and
# succeeds with its first call.
@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_one_is_late(kind, timeout_s):
    got = run_ranks(grid_set_ranks.one_is_late, 4, args=(kind, timeout_s), timeout=120)
    for rank, (outcomes, sums) in enumerate(got):
        errors = [error for error, _, _ in outcomes]
        assert errors[-1] is None
        assert set(errors[:-1]) <= {"LateRankError" if rank == 3 else "GroupCreationTimeout"}
        assert all(keys == {"a": [], "b": []} for _, keys, _ in outcomes[:-1])
        check_sums(kind, sums, rank, (1, 1))


# A rank that asks for something else is heard of by all, in the grid or outside; then all agree.
@pytest.mark.parametrize("kind", KINDS)
def test_one_asks_otherwise(kind):
    got = run_ranks(grid_set_ranks.one_asks_otherwise, 4, args=(kind,), timeout=120)
    for rank, (((error, keys, _), (again, _, _)), sums) in enumerate(got):
        assert (error, again) == ("PlanMismatchError", None)
        assert keys == {"a": [], "b": []}
        check_sums(kind, sums, rank, (1, 1))


# After a reshape on real ranks, every field is Megatron's at the new sizes, and reaches its ranks.
def test_reshaped_megatrons():
    views = {"expert": "expt_tp=2,ep=2,expt_dp=2,pp=1"}
    arguments = ({"tp": 2, "pp": 2, "ep": 2}, "tp=2,cp=2,dp=2,pp=1", views)
    got = run_ranks(grid_set_ranks.reshaped, 8, args=arguments, timeout=120)
    for rank, (ranks, sums) in enumerate(got):
        wanted = megatrons_fields(8, rank, tp=2, cp=2, ep=2)
        assert {
            name: found and tuple(found) for name, found in ranks.items() if name in wanted
        } == wanted
        for found, total in zip(ranks.values(), sums, strict=True):
            assert total == (found and sum(10**member for member in found))


# Megatron's groups of training and of inference work on the same ranks, and are all destroyed.
def test_megatrons():
    got = run_ranks(grid_set_ranks.megatrons, 8, timeout=180)
    models = {
        "training": (([2, 1, 2, 2], ["tp", "cp", "dp", "pp"]), ([2, 2, 1, 2], "expt")),
        "inference": (([4, 1, 2, 1], ["tp", "cp", "dp", "pp"]), ([4, 1, 2, 1], "expt")),
    }
    for rank, (sums, is_clean) in enumerate(got):
        assert is_clean
        for name, ((shape, names), (expert, _)) in models.items():
            dense = [
                expected(shape, names, 0, dims, rank)
                for dims in (["tp"], ["pp"], ["dp"], ["tp", "pp"])
            ]
            experts = [
                expected(expert, ["tp", "ep", "dp", "pp"], 0, dims, rank)
                for dims in (["ep"], ["dp"], ["tp", "ep", "pp"])
            ]
            ends = [
                expected(shape, names, 0, ["pp"], rank),
                expected(shape, names, 0, ["pp"], rank, slice(1)),
            ]
            assert sums[name] == dense + experts + ends
