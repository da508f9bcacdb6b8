"""Test sets of grids on real gloo processes. The sums over groups show which ranks took part."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from group_checks import sum_over, tables as registered
from numpy_oracle import sum_of

from hypercomm import GridSet, RankLayout
from hypercomm.errors import CreationError, PlanMismatchError


# An encoder and a language model have disjoint ranks. Each rank creates only the groups that
# contain it, and exactly the ranks of a group take part in its sum. After the `with` block, torch's
# tables are as before.
@pytest.mark.parametrize("creation", ["local", pytest.param("enumerate", marks=pytest.mark.full)])
@pytest.mark.ranks(8, timeout=120)
def test_tiled_set(creation):
    rank = dist.get_rank()
    asked = {"encoder": ["tp", "dp"], "llm": ["pp", ["tp", "pp"]]}
    sizes = {"encoder": "tp=2,dp=2", "llm": "tp=2,pp=2"}
    for _ in range(2):  # the first pass adds entries to torch's tables that stay
        before = registered()
        with GridSet.tile(**sizes, creation=creation) as grids:
            created = grids.create_pgs(dict(reversed(asked.items())))
            assert {name: [*map(sum_over, groups)] for name, groups in created.items()} == {
                "encoder": [sum_of([2, 2], ["tp", "dp"], 0, [dim], rank) for dim in ("tp", "dp")],
                "llm": [
                    sum_of([2, 2], ["tp", "pp"], 4, dims, rank) for dims in (["pp"], ["tp", "pp"])
                ],
            }
            assert grids.grids_of() == (("encoder",) if rank < 4 else ("llm",))
            for name in grids.grids_of():
                grids[name].verify()
            assert len(registered()[0]) == len(before[0]) + 2
    assert registered() == before


# The groups of colocated grids are created in the order of the set on every rank, although half of
# the ranks pass their requests in another order. verify=True finds no difference.
@pytest.mark.parametrize("share", ["identical", pytest.param("never", marks=pytest.mark.full)])
@pytest.mark.ranks(8, timeout=120)
def test_colocated_set(share):
    rank = dist.get_rank()
    requests = {"training": ["tp", "dp"], "inference": ["tp", "dp"]}
    if rank % 2:
        requests = dict(reversed(requests.items()))
    sizes = {"training": "tp=2,dp=4", "inference": "tp=4,dp"}
    with GridSet.colocated(**sizes, verify=True, share=share) as grids:
        created = grids.create_pgs(requests)
        assert [*created] == ["training", "inference"]
        for shape, groups in zip(([2, 4], [4, 2]), created.values(), strict=True):
            wanted = [sum_of(shape, ["tp", "dp"], 0, [dim], rank) for dim in ("tp", "dp")]
            assert [sum_over(group) for group in groups] == wanted


# If one rank makes a different request or fails, the call fails on all ranks long before the
# timeout, even on ranks that are only in another grid. No group is left, and an immediate retry
# works, even many times.
@pytest.mark.ranks(4, timeout=120)
def test_error_on_one_rank_fails_all():
    rank = dist.get_rank()
    times = iter(range(3))

    def derive(groups):
        if rank == 3 and next(times) < 2:
            raise ValueError("mine")
        return groups

    right = {"a": ["tp"], "b": [{"dims": "tp", "name": "own", "derive": derive}, "tp"]}
    other = {"a": ["tp"], "b": [{"dims": "tp", "name": "other"}]}
    with GridSet(a="tp=4", b=RankLayout("tp=2", rank_offset=2)) as grids:
        before = registered()
        failure = (right, ValueError if rank == 3 else CreationError)
        mismatch = (other if rank == 0 else {"a": ["tp"], "b": ["tp"]}, PlanMismatchError)
        for requests, error in (mismatch, failure, failure):
            begin = time.monotonic()
            with pytest.raises(error):
                grids.create_pgs(requests, timeout=timedelta(seconds=30))
            assert time.monotonic() - begin < 20
            assert registered() == before
            assert not any(grid.pgs for grid in grids.values())
        created = grids.create_pgs(right)
        assert [sum_over(group) for group in created["a"]] == [1111]
        assert [sum_over(group) for group in created["b"]] == [1100 if rank > 1 else None] * 2
