"""Layouts over a list of ranks on real gloo processes: numpy says who is where in each group."""

import inspect
from itertools import chain, combinations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hypercomm import HyperCommGrid, RankLayout
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


def used(group):
    """What a group does: who is where in it, by torch's words and by messages; a sum; a root."""
    own = torch.tensor([dist.get_rank()])
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    total = 10**own
    dist.all_reduce(total, group=group)
    from_first = own.clone()
    dist.broadcast(from_first, src=ranks[0], group=group)
    scattered = torch.empty_like(own)
    tickets = [torch.tensor([at]) for at in range(group.size())]
    last = ranks[-1] == dist.get_rank()
    dist.scatter(scattered, tickets if last else None, src=ranks[-1], group=group)
    gathered = [part.item() for part in parts]
    numbers = [group.rank(), dist.get_group_rank(group, dist.get_rank()), scattered.item()]
    return ranks, gathered, numbers, total.item(), from_first.item()


def groups_of_a_list(shape, names, ranks, every_dims, creation):
    """What the caller's group does over each of some dims, created alone and at once."""
    found = []
    layout = RankLayout(shape, names, ranks=ranks)
    with HyperCommGrid(layout, creation=creation) as grid:
        alone = [grid.create_pg(dims) for dims in every_dims]
        batch = grid.create_pgs([{"dims": dims, "name": "again"} for dims in every_dims])
        for group, again in zip(alone, batch, strict=True):
            found.append(None if group is None else (used(group), used(again)))
    return found


# The members of a group are in the order of the list: what they gather arrives in it, their group
# ranks are their positions, and a sum reaches all. So it is for groups created at once.
@pytest.mark.full
@pytest.mark.parametrize("creation", ["auto", "enumerate"] if KEEPS_ORDER else ["auto"])
@pytest.mark.parametrize("case", LISTS.values(), ids=LISTS)
def test_groups_are_in_the_order_of_the_list(case, creation):
    shape, names, world, ranks = case
    every_dims = every_combination(names)
    args = (shape, names, ranks, every_dims, creation)
    got = run_ranks(groups_of_a_list, world, args=args, timeout=120)
    for rank in range(world):
        for dims, found in zip(every_dims, got[rank], strict=True):
            if rank not in ranks:
                assert found is None
                continue
            wanted = expected_use(expected_group(shape, names, ranks, dims, rank), rank)
            assert found == (wanted, wanted)


def redistribute(ranks):
    """Ranks as dp=2 and tp=2: the local parts of a tensor on a mesh, and the whole again."""
    layout = RankLayout([2, 2], ["tp", "dp"], ranks=ranks)
    with HyperCommGrid(layout) as grid:
        for dim in ("tp", "dp"):
            grid.create_pg(dim)
        mesh = grid.device_mesh("dp", "tp")
        whole = torch.arange(24.0).reshape(4, 6)
        if dist.get_rank() != ranks[0]:
            whole = torch.zeros_like(whole)  # a mesh has it from its first rank
        tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        swapped = tensor.redistribute(mesh, [Replicate(), Shard(0)])
        return (
            tensor.to_local().tolist(),
            swapped.to_local().tolist(),
            tensor.full_tensor().tolist(),
            HyperCommGrid.from_device_mesh(mesh).layout == layout,
        )


# DTensors are sharded over a mesh of listed ranks by their places in the list; and every rank reads
# the list back from the mesh, also those whose own lines ascend.
@pytest.mark.full
@pytest.mark.parametrize("ranks", [[2, 0, 3, 1], [0, 1, 3, 2]], ids=str)
def test_mesh(ranks):
    whole = np.arange(24.0).reshape(4, 6)
    for rank, (sharded, swapped, full, is_read_back) in enumerate(
        run_ranks(redistribute, 4, args=(ranks,))
    ):
        dp, tp = divmod(ranks.index(rank), 2)
        np.testing.assert_array_equal(sharded, whole[dp * 2 : dp * 2 + 2, tp * 3 : tp * 3 + 3])
        np.testing.assert_array_equal(swapped, whole[tp * 2 : tp * 2 + 2])
        np.testing.assert_array_equal(full, whole)
        assert is_read_back
