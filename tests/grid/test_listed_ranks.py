"""Layouts over a list of ranks on real gloo processes: numpy says who is where in each group."""

import inspect
from itertools import chain, combinations

import numpy as np
import pytest
import torch.distributed as dist
from ranks import listed_ranks

from hypercomm.launch import run_ranks

KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters

LISTS = {
    "permuted": ([2, 2, 2], ["tp", "cp", "dp"], 8, [6, 7, 2, 3, 5, 4, 0, 1]),
    "left out": ([2, 3], ["tp", "dp"], 8, [0, 1, 4, 5, 6, 7]),
    "both": ([3, 2], ["tp", "dp"], 8, [7, 0, 3, 5, 2, 6]),
    "turned round": ([4], ["dp"], 4, [3, 2, 1, 0]),
}


def every_combination(names):
    return list(chain.from_iterable(combinations(names, n) for n in range(1, len(names) + 1)))


def expected_use(ranks, rank):
    """What a group of these ranks does, as one of them sees it."""
    at = ranks.index(rank)
    return ranks, ranks, [at, at, at], sum(10**member for member in ranks), ranks[0]


def expected_group(shape, names, ranks, dims, rank):
    """The group of a rank in the order of the list, by numpy alone."""
    table = np.array(ranks).reshape(shape[::-1]).transpose()
    where = np.argwhere(table == rank)[0]
    part = table[
        tuple(slice(None) if name in dims else at for name, at in zip(names, where, strict=True))
    ]
    return np.ravel(part, order="F").tolist()


# The members of a group are in the order of the list: what they gather arrives in it, their group
# ranks are their positions, and a sum reaches all. So it is for groups created at once.
@pytest.mark.full
@pytest.mark.parametrize("creation", ["auto", "enumerate"] if KEEPS_ORDER else ["auto"])
@pytest.mark.parametrize("case", LISTS.values(), ids=LISTS)
def test_groups_are_in_the_order_of_the_list(case, creation):
    shape, names, world, ranks = case
    every_dims = every_combination(names)
    args = (shape, names, ranks, every_dims, creation)
    got = run_ranks(listed_ranks.groups_of_a_list, world, args=args, timeout=120)
    for rank in range(world):
        for dims, found in zip(every_dims, got[rank], strict=True):
            if rank not in ranks:
                assert found is None
                continue
            wanted = expected_use(expected_group(shape, names, ranks, dims, rank), rank)
            assert found == (wanted, wanted)


# Groups made of others keep their order too.
def test_derived_groups():
    ranks = [3, 1, 0, 2]
    got = run_ranks(listed_ranks.derived_groups, 4, args=([2, 2], ["tp", "dp"], ranks))
    for rank, (half, ends) in enumerate(got):
        first = [3, 1] if rank in {1, 3} else [0, 2]
        assert half == expected_use(first, rank)
        assert ends == (expected_use([3, 2], rank) if rank in {2, 3} else None)


# Splitting WORLD is refused, and so is enumeration where torch would sort the ranks of a group.
def test_what_cannot_keep_the_order():
    for split, enumerated in run_ranks(listed_ranks.refusals, 3, args=([2, 0, 1],)):
        assert "'split' cannot create groups of backend 'gloo' here" in split
        if KEEPS_ORDER:
            assert enumerated == [2, 0, 1]
        else:
            assert "new_group of this torch sorts the ranks of each group" in enumerated


# DTensors are sharded over a mesh of listed ranks by their places in the list; and every rank reads
# the list back from the mesh, also those whose own lines ascend.
@pytest.mark.full
@pytest.mark.parametrize("ranks", [[2, 0, 3, 1], [0, 1, 3, 2]], ids=str)
def test_mesh(ranks):
    whole = np.arange(24.0).reshape(4, 6)
    for rank, (sharded, swapped, full, is_read_back) in enumerate(
        run_ranks(listed_ranks.redistribute, 4, args=(ranks,))
    ):
        dp, tp = divmod(ranks.index(rank), 2)
        np.testing.assert_array_equal(sharded, whole[dp * 2 : dp * 2 + 2, tp * 3 : tp * 3 + 3])
        np.testing.assert_array_equal(swapped, whole[tp * 2 : tp * 2 + 2])
        np.testing.assert_array_equal(full, whole)
        assert is_read_back
