"""Views, and the end of single groups, on real gloo processes."""

import pytest
import torch.distributed as dist
from by_numpy import sum_of
from group_facts import store_of_world, sum_over

from hypercomm import HyperCommGrid
from hypercomm.testing import registered_groups


# Dense tp=2,dp=4 beside expert ep=4,expt_dp=2: each group reduces over what numpy puts in it.
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.ranks(8)
def test_dense_and_expert(batched):
    rank, dense, expert = dist.get_rank(), ["tp", "dp"], ["ep", "expt_dp"]
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


def store_keys():
    """How many keys the job's store holds, once all ranks are here and their messages arrived."""
    dist.barrier()
    store = store_of_world()
    store.check(["hypercomm"])  # an answer means that all before it was read
    dist.barrier()
    keys = store.num_keys()
    dist.barrier()
    return keys


# Destroyed and created again under the same keys, ten times: every sum is right, the group that
# stays works, and neither torch nor the store keeps more of them each time; what torch's own
# enumeration leaves in the store is torch's.
@pytest.mark.full
@pytest.mark.parametrize(
    ("creation", "verify", "is_batched"),
    [("local", False, False), ("local", True, True), ("enumerate", True, True)],
)
@pytest.mark.ranks(4)
def test_destroyed_and_created_again(creation, verify, is_batched):
    rank, keys = dist.get_rank(), []
    tp, dp = (sum_of([2, 2], ["tp", "dp"], 0, [dim], rank) for dim in ("tp", "dp"))
    requests = [{"dims": "dp"}, {"dims": "ep", "view": "expert"}]
    with HyperCommGrid([2, 2], ["tp", "dp"], creation=creation, verify=verify) as grid:
        grid.register_view("expert", [4], ["ep"])
        stays = grid.create_pg("tp")
        before = registered_groups()
        for _ in range(10):
            if is_batched:
                groups = grid.create_pgs(requests)
            else:
                groups = [grid.create_pg(**each) for each in requests]
            assert [sum_over(group) for group in (stays, *groups)] == [tp, dp, 1111]
            for each in requests:
                grid.destroy_pg(**each)
            assert registered_groups() == before
            assert [str(key) for key in grid.pgs] == ["tp"]
            del groups
            keys.append(store_keys())
    if creation == "local":
        assert keys[-1] - keys[0] <= 8  # one round of addresses, which the next call deletes
