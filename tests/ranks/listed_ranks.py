"""What real ranks run in the tests of layouts over a list of ranks."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hypercomm import HyperCommGrid, RankLayout
from hypercomm.errors import CreationError


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
    with HyperCommGrid.from_layout(layout, creation=creation) as grid:
        alone = [grid.create_pg(dims) for dims in every_dims]
        batch = grid.create_pgs([{"dims": dims, "name": "again"} for dims in every_dims])
        for group, again in zip(alone, batch, strict=True):
            found.append(None if group is None else (used(group), used(again)))
    return found


def derived_groups(shape, names, ranks):
    """The halves of a group, and its ends."""
    layout = RankLayout(shape, names, ranks=ranks)
    with HyperCommGrid.from_layout(layout) as grid:
        halves = grid.create_pg(names, name="half", derive=lambda groups: groups.chunks(2))
        ends = grid.create_pg(
            names,
            name="ends",
            derive=lambda groups: groups.pick(lambda ranks: {ranks[-1], ranks[0]}),
        )
        return used(halves), ends and used(ends)


def refusals(ranks):
    """What is said to a way of creating groups that cannot keep their order."""
    layout = RankLayout([len(ranks)], ["dp"], ranks=ranks)
    said = []
    for creation in ("split", "enumerate"):
        with HyperCommGrid.from_layout(layout, creation=creation) as grid:
            try:
                group = grid.create_pg("dp")
                said.append(used(group)[1])
            except CreationError as error:
                said.append(str(error))
    return said


def redistribute(ranks):
    """Ranks as dp=2 and tp=2: the local parts of a tensor on a mesh, and the whole again."""
    layout = RankLayout([2, 2], ["tp", "dp"], ranks=ranks)
    with HyperCommGrid.from_layout(layout) as grid:
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
