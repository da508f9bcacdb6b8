"""Sets of grids on real gloo processes: who takes part is read off the numbers they sum."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from by_numpy import sum_of
from group_facts import sum_over
from group_facts import tables as registered

from hypercomm import GridSet, RankLayout
from hypercomm.errors import CreationError, PlanMismatchError


# An encoder and a language model beside each other: each rank creates its own groups only, which
# reach exactly their members; leaving the block leaves nothing in torch's registries.
@pytest.mark.parametrize("creation", ["local", pytest.param("enumerate", marks=pytest.mark.full)])
@pytest.mark.ranks(8, timeout=120)
def test_tiled(creation):
    rank, asked = dist.get_rank(), {"encoder": ["tp", "dp"], "llm": ["pp", ["tp", "pp"]]}
    sizes = {"encoder": "tp=2,dp=2", "llm": "tp=2,pp=2"}
    for _ in range(2):  # the first one fills torch's tables with what stays
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


# Grids on the same ranks are created in the set's order on every rank, although half of the ranks
# write their requests in another one; a comparison of plans finds no difference.
@pytest.mark.parametrize("share", ["identical", pytest.param("never", marks=pytest.mark.full)])
@pytest.mark.ranks(8, timeout=120)
def test_colocated(share):
    rank, requests = dist.get_rank(), {"training": ["tp", "dp"], "inference": ["tp", "dp"]}
    if rank % 2:
        requests = dict(reversed(requests.items()))
    sizes = {"training": "tp=2,dp=4", "inference": "tp=4,dp"}
    with GridSet.colocated(**sizes, verify=True, share=share) as grids:
        created = grids.create_pgs(requests)
        assert [*created] == ["training", "inference"]
        for shape, groups in zip(([2, 4], [4, 2]), created.values(), strict=True):
            wanted = [sum_of(shape, ["tp", "dp"], 0, [dim], rank) for dim in ("tp", "dp")]
            assert [sum_over(group) for group in groups] == wanted


# One rank that asks for something else, or fails in its grid, fails the call on all ranks, also
# those that are in another grid only, and long before a timeout; nothing is left, and a retry at
# once works, however often.
@pytest.mark.ranks(4, timeout=120)
def test_one_rank_is_wrong():
    rank, times = dist.get_rank(), iter(range(3))

    def derive(groups):
        if rank == 3 and next(times) < 2:
            raise ValueError("mine")
        return groups

    right = {"a": ["tp"], "b": [{"dims": "tp", "name": "own", "derive": derive}, "tp"]}
    other = {"a": ["tp"], "b": [{"dims": "tp", "name": "other"}]}
    with GridSet(a="tp=4", b=RankLayout("tp=2", rank_offset=2)) as grids:
        before = registered()
        for requests, error in (
            (other if rank == 0 else {"a": ["tp"], "b": ["tp"]}, PlanMismatchError),
            *[(right, ValueError if rank == 3 else CreationError)] * 2,
        ):
            begin = time.monotonic()
            with pytest.raises(error):
                grids.create_pgs(requests, timeout=timedelta(seconds=30))
            assert time.monotonic() - begin < 20
            assert registered() == before
            assert not any(grid.pgs for grid in grids.values())
        created = grids.create_pgs(right)
        assert [sum_over(group) for group in created["a"]] == [1111]
        assert [sum_over(group) for group in created["b"]] == [1100 if rank > 1 else None] * 2
