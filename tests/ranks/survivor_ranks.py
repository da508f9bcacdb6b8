"""What the real ranks of process_groups/test_survivors.py do: some die, and the rest goes on."""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hypercomm import GridSet, HyperCommGrid, renew_world
from hypercomm.errors import GroupCreationTimeout
from hypercomm.process_groups.torch_internals import store as c10d
from hypercomm.testing import registered_groups
from ranks.common import attempt, sum_over

PATIENCE = timedelta(seconds=4)


def take_part(rank, port, folder, size, timeout_s, scene, *args):
    """Be one rank of a job whose store its parent serves; leave what the scene tells."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    told = globals()[scene](rank, *args)
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    store.add("told", 1)
    while store.add("told", 0) < args[-1]:  # a rank that ends breaks connections
        time.sleep(0.01)
    os._exit(0)  # WORLD has lost ranks: nobody waits for it


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def figures(grid):
    """What communicates: the sum over each group, and in which order its members are."""
    told = {}
    for key, group in grid.pgs.items():
        if group is None:
            told[str(key)] = None
            continue
        parts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        dist.all_gather(parts, torch.tensor([dist.get_rank()]), group=group)
        told[str(key)] = [sum_over(group), [part.item() for part in parts]]
    return told


def hear_from(rank, group):
    """Wait for a rank alone: who waits for others, which fail, waits as long as the timeout."""
    dist.recv(torch.zeros(1), src=rank, group=group)


def meet(name, count):
    """Wait for so many ranks, so that those that die are the only ones that come late."""
    store = c10d.store()
    store.add(name, 1)
    while store.add(name, 0) < count:
        time.sleep(0.01)


def lose(rank, losses, _):
    """Lose ranks, once or again: each time (the victims, the ranks that go on, as what)."""
    told = []
    grid = HyperCommGrid("tp=2,dp=-1")
    grid.create_pgs(["tp", "dp", ["tp", "dp"]])
    for victims, ranks, target in losses:
        if rank in victims:
            die()
        failed, waited = attempt(lambda: hear_from(victims[0], grid.get_pg("tp+dp")))  # noqa: B023
        meet(target, grid.size - len(victims))
        left = grid.survivors(PATIENCE)
        result = grid.reshape(target, ranks=ranks)
        is_in = grid.is_current_rank_in_grid()
        owned = set(filter(None, grid.pgs.values()))
        is_clean = registered_groups() == {dist.group.WORLD, *owned}
        told.append([failed, waited, left, str(result), figures(grid), is_in, is_clean])
        if not is_in:
            return told
    return told


def lose_of_a_set(rank, others):
    """One module of two loses a rank; all others go on."""
    grids = GridSet.tile(encoder="tp=2,dp=2", llm="tp=2,dp=2", share="identical")
    grids.create_pgs({"encoder": ["tp", "dp"], "llm": ["tp", "dp"]})
    if rank == 6:
        die()
    meet("set", others)
    left = grids["llm"].survivors(PATIENCE) if rank > 3 else None
    said = str(grids["llm"].reshape("tp=1,dp=3", ranks=[4, 5, 7], timeout=PATIENCE))
    twin = {"dims": "dp", "name": "twin"}
    grids.create_pgs({"encoder": [twin], "llm": [twin]})
    told = [figures(grids["encoder"]), figures(grids["llm"])]
    return [left, said, *told, grids.placement, list(grids.spare_ranks), str(grids)]


def grow(_rank, _):
    """Ranks that were outside come, and go again."""
    grid = HyperCommGrid("tp=2,dp=2")
    grid.create_pgs(["tp", "dp"])
    told = [figures(grid)]
    for target, ranks in (("tp=2,dp=4", range(8)), ("tp=2,dp=1", [7, 1]), ("tp=4", [0, 1, 6, 7])):
        grid.reshape(target, ranks=ranks)
        told.append(figures(grid))
    grid.destroy()
    return [told, registered_groups() == {dist.group.WORLD}]


def wait_elsewhere(rank, _):
    """Rank 2 does not come: it waits for rank 3, which is in no grid of the others."""
    grid = HyperCommGrid("dp=3", world_size=4)
    grid.create_pg("dp")
    if rank == 2:
        other = HyperCommGrid("pp=2", rank_offset=2, name="other", world_size=4)
        return attempt(lambda: other.create_pg("pp", timeout=timedelta(seconds=6)))[0]
    if rank == 3:
        return ""
    time.sleep(1)  # rank 2 says by then whom it waits for
    begin = time.monotonic()
    left = grid.survivors(timedelta(seconds=2))
    return [left, time.monotonic() - begin]


def renew(rank, losses, folder, _):
    """Lose ranks, once or again; the rest makes a WORLD of its own, and the grid goes on in it."""
    told, number = [], rank
    grid = HyperCommGrid("tp=2,dp=-1")
    grid.create_pgs(["tp", "dp"])
    for at, (victims, going, target) in enumerate(losses):
        if number in victims:
            die()
        meet(target, dist.get_world_size() - len(victims))
        left = grid.survivors(PATIENCE)
        begin = time.monotonic()
        store = dist.FileStore(f"{folder}/{at}") if folder else None
        job = renew_world(left, store=store, timeout=PATIENCE)
        waited = time.monotonic() - begin
        said, _ = attempt(lambda: grid.create_pg("tp", name="early"))
        result = grid.reshape(target, ranks=[job.numbers[one] for one in going])
        whole = sum_over(dist.group.WORLD)
        is_in = grid.is_current_rank_in_grid()
        owned = set(filter(None, grid.pgs.values()))
        is_clean = registered_groups() == {dist.group.WORLD, *owned}
        here = [job.rank, job.size, dist.get_rank(), dist.get_world_size()]
        told.append([left, here, said, result.lost.words, figures(grid), whole, is_in, is_clean])
        assert waited < 20
        number = job.rank
    grid.destroy()
    job.leave()
    assert not dist.is_initialized()
    return told


def renew_without_one(rank, _):
    """Rank 3 does not come, and rank 2 means other ranks, before the three do it."""
    grid = HyperCommGrid("dp=4")
    grid.create_pg("dp")
    told, begin = [], time.monotonic()
    if rank < 3:
        wanted = [0, 1, 2] if rank == 2 else [0, 1, 2, 3]
        try:
            renew_world(wanted, timeout=timedelta(seconds=2))
        except GroupCreationTimeout as error:
            told = [str(error), list(error.missing), time.monotonic() - begin]
    works = sum_over(grid.get_pg("dp"))
    if rank < 3:
        with renew_world([2, 0, 1], timeout=PATIENCE) as job:
            return [*told, works, job.rank, sum_over(dist.group.WORLD)]
    return [attempt(lambda: renew_world([0, 1, 2]))[0], works]


def disagree(rank, lists, late, _):
    """Ranks go on with different ranks; then, told so, with the same ones."""
    grid = HyperCommGrid("tp=2,dp=2")
    grid.create_pgs(["tp", "dp"])
    before = dict(grid.pgs)
    if rank == late:
        time.sleep(1)
    said, waited = attempt(lambda: grid.reshape("tp=1,dp=-1", ranks=lists[rank]))
    same = dict(grid.pgs) == before and str(grid.layout) == "tp=2,dp=2"
    works = sum_over(grid.get_pg("dp"))
    if rank == 3:
        return [said, waited, same, works, "", {}]
    again = str(grid.reshape("tp=1,dp=3", ranks=[0, 1, 2]))
    return [said, waited, same, works, again, figures(grid)]


def name_the_dead(rank, _):
    """Go on with a rank that is dead; then without it."""
    grid = HyperCommGrid("tp=2,dp=2")
    grid.create_pgs(["tp", "dp"])
    if rank == 2:
        die()
    begin = time.monotonic()
    try:
        grid.reshape("tp=1,dp=4", ranks=range(4), timeout=timedelta(seconds=2))
    except GroupCreationTimeout as error:
        told = [str(error), list(error.missing), time.monotonic() - begin]
    kept = [str(grid.layout), sorted(map(str, grid.pgs))]
    grid.reshape("tp=1,dp=3", ranks=[0, 1, 3], timeout=timedelta(seconds=4))
    return [told, kept, figures(grid)]


def other_targets(rank, _):
    """Ranks go on with the same ranks, as something else."""
    grid = HyperCommGrid("tp=2,dp=2")
    grid.create_pgs(["tp", "dp"])
    order = [0, 2, 1] if rank == 1 else [0, 1, 2]
    said, waited = attempt(lambda: grid.reshape("dp=3", ranks=order)) if rank < 3 else ("", 0)
    return [said, waited, figures(grid)]
