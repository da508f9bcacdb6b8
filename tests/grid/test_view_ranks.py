"""Views, and the end of single groups, on real gloo processes."""

import time

import pytest
import torch.distributed as dist
from busy import late_s
from by_numpy import group_of
from group_facts import sum_over

from hypercomm import HyperCommGrid
from hypercomm.testing import registered_groups, run_ranks

EXPERT = "expert", [4, 2], ["ep", "expt_dp"]


def numpy_sum(shape, axes, rank):
    """10**member summed over the group of a rank along some axes, from numpy alone."""
    return sum(10**member for member in group_of(shape, range(len(shape)), 0, axes, rank))


def dense_and_expert(batched):
    """The sum over each group of a grid and of its view, in the order of creation."""
    requests = [
        "tp",
        "dp",
        {"dims": "ep", "view": "expert"},
        {"dims": ["expt_dp", "ep"], "view": "expert"},
        {"dims": "expt_dp", "view": "expert"},
    ]
    with HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
        grid.register_view(*EXPERT)
        if batched:
            groups = grid.create_pgs(requests)
        else:
            groups = [
                grid.create_pg(**each) if isinstance(each, dict) else grid.create_pg(each)
                for each in requests
            ]
        sums = [sum_over(group) for group in groups]
    return sums, registered_groups() == {dist.group.WORLD}


# Dense tp=2,dp=4 beside expert ep=4,expt_dp=2: each group reduces over what numpy puts in it.
@pytest.mark.parametrize("batched", [False, True])
def test_dense_and_expert(batched):
    got = run_ranks(dense_and_expert, 8, args=(batched,), timeout=60)
    for rank, (sums, is_clean) in enumerate(got):
        dense = [numpy_sum([2, 4], axes, rank) for axes in ({0}, {1})]
        expert = [numpy_sum([4, 2], axes, rank) for axes in ({0}, {0, 1}, {1})]
        assert sums == dense + expert
        assert is_clean


VIEW = "ep=2,expt_dp=2,pp=2 sharing pp"


def another_view(odd, arguments, comes, dims):
    """One rank has registered another view of the name; what each rank is told, and what works."""
    rank = dist.get_rank()
    usual = [2, 2, 2], ["ep", "expt_dp", "pp"], ["pp"]
    mine = arguments if rank == odd else usual
    begin_groups = registered_groups()
    with HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"]) as grid:
        grid.register_view("expert", *mine)
        tp = grid.create_pg("tp")
        before = registered_groups()
        if (rank == odd) == (comes == "last"):
            time.sleep(0.5)
        begin = time.monotonic()
        said = "created"
        try:
            grid.create_pg(dims, view="expert")
        except Exception as error:  # noqa: BLE001 - the test looks at what it is
            said = f"{type(error).__name__}: {error}"
        waited = time.monotonic() - begin
        is_clean = said == "created" or (registered_groups() == before and len(grid.pgs) == 1)
        dist.barrier()
        total = sum_over(tp)
    dist.barrier()
    with HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"]) as grid:  # as all of them mean it
        grid.register_view("expert", *usual)
        again = sum_over(grid.create_pg("ep", view="expert"))
    return said, waited, is_clean, total, again, registered_groups() == begin_groups


# A rank with a view of other sizes, order or shared dims: it and those that meet it raise within
# seconds, and name both views; nothing is left; other groups work, and so does a new grid.
@pytest.mark.full
@pytest.mark.parametrize("comes", ["first", "last"])
@pytest.mark.parametrize(
    ("odd", "arguments", "words"),
    [
        (1, ([4, 1, 2], ["ep", "expt_dp", "pp"], ["pp"]), "ep=4,expt_dp=1,pp=2 sharing pp"),
        (6, ([2, 2, 2], ["expt_dp", "ep", "pp"], ["pp"]), "expt_dp=2,ep=2,pp=2 sharing pp"),
        (0, ([2, 2, 2], ["ep", "expt_dp", "pp"], None), "ep=2,expt_dp=2,pp=2"),
    ],
)
def test_another_view(odd, arguments, words, comes):
    args = (odd, arguments, comes, ["ep", "expt_dp"])
    got = run_ranks(another_view, 8, args=args, timeout=60)
    stage = {rank for rank in range(8) if rank // 4 == odd // 4}  # those that the odd one meets
    told = [rank for rank, (said, *_) in enumerate(got) if said != "created"]
    assert stage <= set(told)
    if comes == "last":
        assert set(told) == stage
    for rank, (said, waited, is_clean, total, again, is_gone) in enumerate(got):
        if rank in told:
            assert said.startswith("PlanMismatchError: create_pg("), said
            in_circle = "ranks wait for each other in different calls" in said
            assert in_circle or (words in said and VIEW in said), said
            assert waited < late_s(5)
        assert is_clean
        assert total == numpy_sum([2, 2, 2], {0}, rank)
        assert again == numpy_sum([2, 2, 2], {0}, rank)
        assert is_gone


def store_keys():
    """How many keys the job's store holds, once all ranks are here and their messages arrived."""
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    store.check(["hypercomm"])  # an answer means that all before it was read
    dist.barrier()
    keys = store.num_keys()
    dist.barrier()
    return keys


def destroy_and_recreate(rounds, creation, verify, is_batched):
    """Groups of a key destroyed and created again; sums, and what was left each time."""
    told = []
    with HyperCommGrid([2, 2], ["tp", "dp"], creation=creation, verify=verify) as grid:
        grid.register_view("expert", [4], ["ep"])
        stays = grid.create_pg("tp")
        groups, keys = registered_groups(), []
        for _ in range(rounds):
            if is_batched:
                dp, ep = grid.create_pgs(["dp", {"dims": "ep", "view": "expert"}])
            else:
                dp, ep = grid.create_pg("dp"), grid.create_pg("ep", view="expert")
            told.append((sum_over(dp), sum_over(ep), sum_over(stays)))
            grid.destroy_pg("dp")
            grid.destroy_pg("ep", view="expert")
            told[-1] += (registered_groups() == groups, [str(key) for key in grid.pgs])
            dp = ep = None
            keys.append(store_keys())
    return told, keys


# Destroyed and created again under the same keys, ten times: every sum is right, the group that
# stays works, and neither torch nor the store keeps more of them each time; what torch's own
# enumeration leaves in the store is torch's.
@pytest.mark.full
@pytest.mark.parametrize(
    ("creation", "verify", "is_batched", "are_deleted"),
    [
        ("local", False, False, True),
        ("local", True, True, True),
        ("enumerate", True, True, False),
    ],
)
def test_destroyed_and_created_again(creation, verify, is_batched, are_deleted):
    args = (10, creation, verify, is_batched)
    got = run_ranks(destroy_and_recreate, 4, args=args, timeout=120)
    for rank, (told, keys) in enumerate(got):
        dp, tp = numpy_sum([2, 2], {1}, rank), numpy_sum([2, 2], {0}, rank)
        assert told == [(dp, 1111, tp, True, ["tp"])] * 10
        if are_deleted:
            assert keys[-1] - keys[0] <= 8  # one round of addresses, which the next call deletes


def destroy_shared():
    """Two keys hold one group: it stays until both are gone, and serves the first key again."""
    with HyperCommGrid([1, 2, 2], ["cp", "tp", "dp"], share="identical") as grid:
        tp = grid.create_pg("tp")
        both = grid.create_pg(["cp", "tp"])
        counts = [len(registered_groups())]
        grid.destroy_pg("tp")
        counts.append(len(registered_groups()))
        sums, served = [sum_over(both)], grid.explain(["cp", "tp"]).served_by
        is_one = grid.create_pg("tp") is tp is both
        grid.destroy_pg("tp")
        grid.destroy_pg(["cp", "tp"])
        counts.append(len(registered_groups()))
        sums.append(sum_over(grid.create_pg("tp")))
    return counts, sums, served, is_one


# A group that serves two keys stays until both are destroyed, and then it is gone.
def test_shared_groups_stay():
    got = run_ranks(destroy_shared, 4, timeout=60)
    for rank, (counts, sums, served, is_one) in enumerate(got):
        assert counts == [2, 2, 1]
        assert sums == [numpy_sum([2, 2], {0}, rank)] * 2
        assert served is None  # it is the first of its keys now
        assert is_one
