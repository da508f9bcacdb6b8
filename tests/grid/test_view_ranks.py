"""Views, and the end of single groups, on real gloo processes."""

import numpy as np
import pytest
from busy import late_s
from ranks import view_ranks

from hypercomm.testing import run_ranks


def numpy_sum(shape, axes, rank):
    """10**member summed over the group of a rank along some axes, from numpy alone."""
    ranks = np.arange(np.prod(shape)).reshape(shape, order="F")
    (where,) = np.argwhere(ranks == rank)
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(where))
    return int((10 ** np.atleast_1d(ranks[index]).ravel()).sum())


# Dense tp=2,dp=4 beside expert ep=4,expt_dp=2: each group reduces over what numpy puts in it.
@pytest.mark.parametrize("batched", [False, True])
def test_dense_and_expert(batched):
    got = run_ranks(view_ranks.dense_and_expert, 8, args=(batched,), timeout=60)
    for rank, (sums, is_clean) in enumerate(got):
        dense = [numpy_sum([2, 4], axes, rank) for axes in ({0}, {1})]
        expert = [numpy_sum([4, 2], axes, rank) for axes in ({0}, {0, 1}, {1})]
        assert sums == dense + expert
        assert is_clean


# A dim that the view shares has one process group in both; over it and another, one of its own.
def test_shared_pipeline():
    got = run_ranks(view_ranks.shared_pipeline, 8, timeout=60)
    for rank, (counts, same, sums, left) in enumerate(got):
        assert counts == [1, 1, 2]
        assert same
        expected = [numpy_sum([4, 1, 2], axes, rank) for axes in ({2}, {0, 2}, {0})]
        assert list(sums) == expected
        assert left == 0


VIEW = "ep=2,expt_dp=2,pp=2 sharing pp"


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
    got = run_ranks(view_ranks.another_view, 8, args=args, timeout=60)
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


# Destroyed and created again under the same keys, ten times: every sum is right, the group that
# stays works, and neither torch nor the store keeps more of them each time; what torch's own
# enumeration leaves in the store is torch's.
@pytest.mark.full
@pytest.mark.parametrize(
    ("creation", "verify", "is_batched", "are_deleted"),
    [
        ("local", False, False, True),
        ("local", False, True, True),
        ("local", True, False, True),
        ("local", True, True, True),
        ("enumerate", False, False, False),
        ("enumerate", True, True, False),
    ],
)
def test_destroyed_and_created_again(creation, verify, is_batched, are_deleted):
    args = (10, creation, verify, is_batched)
    got = run_ranks(view_ranks.destroy_and_recreate, 4, args=args, timeout=120)
    for rank, (told, keys) in enumerate(got):
        dp, tp = numpy_sum([2, 2], {1}, rank), numpy_sum([2, 2], {0}, rank)
        assert told == [(dp, 1111, tp, True, ["tp"])] * 10
        if are_deleted:
            assert keys[-1] - keys[0] <= 8  # one round of addresses, which the next call deletes


# A group that serves two keys stays until both are destroyed, and then it is gone.
def test_shared_groups_stay():
    got = run_ranks(view_ranks.destroy_shared, 4, timeout=60)
    for rank, (counts, sums, served, is_one) in enumerate(got):
        assert counts == [2, 2, 1]
        assert sums == [numpy_sum([2, 2], {0}, rank)] * 2
        assert served is None  # it is the first of its keys now
        assert is_one


# Nobody is waited for in between: creating and destroying in turn works, whoever is late.
def test_destroyed_at_different_times():
    assert run_ranks(view_ranks.destroy_at_different_times, 4, timeout=60) == [[1111] * 4] * 4
