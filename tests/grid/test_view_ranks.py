"""Test groups of views on real gloo processes."""

import pytest
import torch.distributed as dist
from group_checks import sum_over
from numpy_oracle import sum_of

from hypercomm import HyperCommGrid
from hypercomm.testing import registered_groups


# In the grid tp=2,dp=4 with an expert view ep=4,expt_dp=2, the all-reduce of each group covers the
# right ranks. numpy computes the expected ranks.
@pytest.mark.parametrize("batched", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.ranks(8)
def test_dense_and_expert_groups(batched):
    rank = dist.get_rank()
    dense = ["tp", "dp"]
    expert = ["ep", "expt_dp"]
    requests = [{"dims": dims} for dims in dense]
    requests += [{"dims": dims, "view": "expert"} for dims in ("ep", ["expt_dp", "ep"], "expt_dp")]
    with HyperCommGrid([2, 4], dense) as grid:
        grid.register_view("expert", [4, 2], expert)
        if batched:
            groups = grid.create_pgs(requests)
        else:
            groups = [grid.create_pg(**each) for each in requests]
        assert [sum_over(group) for group in groups] == [
            *(sum_of([2, 4], dense, 0, [dims], rank) for dims in dense),
            *(sum_of([4, 2], expert, 0, dims, rank) for dims in (["ep"], expert, ["expt_dp"])),
        ]
    assert registered_groups() == {dist.group.WORLD}
