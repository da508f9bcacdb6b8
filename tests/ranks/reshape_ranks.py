"""What the real ranks of process_groups/test_reshape_ranks.py do."""

import contextlib
import gc
import json
import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid, RankLayout
from hypercomm.process_groups import reshaping
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.testing import registered_groups
from ranks.common import attempt, settle, sum_over

SHAPE, NAMES = [2, 2, 2], ["tp", "cp", "dp"]
START, OTHER = "tp=2,cp=2,dp=2", "tp=4,dp=2"
KEYS = ["tp", "cp", "dp", ["tp", "cp"], ["cp", "dp"], ["tp", "cp", "dp"]]


def sums(grid):
    """The sum over each group of a grid, by the dims of its key."""
    return {key.dims: sum_over(group) for key, group in grid.pgs.items() if group is not None}


def unchanged(grid, before):
    """Whether a grid has the very groups that it had, and torch those alone."""
    now = dict(grid.pgs)
    is_same = list(now) == list(before) and all(now[key] is before[key] for key in before)
    return is_same and registered_groups() == {dist.group.WORLD, *now.values()}


def there_and_back(rounds, verify, batched):
    """Reshape there and back; the sums after each, and what survived as the same object."""
    told = []
    with HyperCommGrid(SHAPE, NAMES, verify=verify) as grid:
        if batched:
            grid.create_pgs(KEYS)
        else:
            for dims in KEYS:
                grid.create_pg(dims)
        for _ in range(rounds):
            for target in (OTHER, START):
                before = dict(grid.pgs)
                result = grid.reshape(target)
                kept = [
                    (new.dims, old.dims) for new, old in result.kept if grid.pgs[new] is before[old]
                ]
                told.append((str(grid.layout), sums(grid), kept, len(result.kept)))
                grid.verify()
            grid.create_pgs([dims for dims in KEYS if "cp" in dims])  # they were destroyed
        last = sums(grid)
    return told, last, registered_groups() == {dist.group.WORLD}


def partial_survival(verify):
    """Where ranks are listed in another order, some of them keep the group of a key."""
    target = RankLayout([2, 4], ["tp", "dp"], ranks=[0, 1, 2, 3, 4, 6, 5, 7])
    with HyperCommGrid([2, 4], ["tp", "dp"], verify=verify) as grid:
        grid.create_pgs(["tp", "dp"])
        tp = grid.get_pg("tp")
        first = grid.reshape(target)
        is_kept = grid.get_pg("tp") is tp
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(gathered, torch.tensor([dist.get_rank()]), group=grid.get_pg("tp"))
        order, totals = [part.item() for part in gathered], sums(grid)
        second = grid.reshape("tp=8")
        return str(first), is_kept, order, totals, str(second), sums(grid)


def created_in_other_orders(ranks):
    """Each rank creates its groups in an order of its own; then all reshape."""
    keys = [{"dims": "tp"}, {"dims": "dp"}, {"dims": "dp", "name": "twin"}, {"dims": "tp+dp"}]
    first = dist.get_rank()
    with HyperCommGrid([2, 2], ["tp", "dp"], lazy_init=True) as grid:
        for key in keys[first:] + keys[:first]:
            grid.create_pg(**key)
        created = [str(key) for key in grid.reshape("tp=1,dp=4", ranks=ranks).created]
        named = {(*key.dims, *filter(None, [key.name])): pg for key, pg in grid.pgs.items()}
        return created, {key: sum_over(group) for key, group in named.items()}


def another_target(odd, verify, late_s):
    """One rank reshapes to something else, sooner or later than the others; then all to one."""
    rank = dist.get_rank()
    with HyperCommGrid(SHAPE, NAMES, verify=verify) as grid:
        grid.create_pgs(KEYS)
        before, said = dict(grid.pgs), []
        for target in ("tp=2,dp=4", RankLayout([4, 2], ["tp", "dp"], ranks=range(7, -1, -1))):
            if late_s and (rank == odd) == (late_s > 0):
                time.sleep(abs(late_s))
            wrong = target if rank == odd else OTHER
            said.append(
                (*attempt(lambda wrong=wrong: grid.reshape(wrong)), unchanged(grid, before))
            )
            said.append(sums(grid))
            dist.barrier()
        grid.reshape(OTHER)
        return said, str(grid.layout), sums(grid)


def another_view(odd):
    """One rank gives a view other sizes, though no group of it exists."""
    with HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
        grid.register_view("expert", [4, 2], ["ep", "rest"])
        grid.create_pg("tp")
        sizes = "ep=2,rest=4" if dist.get_rank() == odd else "ep=8,rest=1"
        said = attempt(lambda: grid.reshape(OTHER, views={"expert": sizes}))
        grid.reshape(OTHER, views={"expert": "ep=8,rest=1"})
        return said, grid.views["expert"].shape, sums(grid)


def does_not_call(absent, verify, sleep_s, timeout):
    """One rank does not come to a reshape in time, twice; then all do."""
    with HyperCommGrid([2, 2], ["tp", "dp"], verify=verify) as grid:
        grid.create_pgs(["tp", "dp"], timeout=timeout)
        before, said = dict(grid.pgs), []
        if dist.get_rank() == absent:
            time.sleep(sleep_s)
        else:
            for _ in range(2):
                begin = time.monotonic()  # one clock for all ranks of a host
                words, waited = attempt(lambda: grid.reshape("tp=4", timeout=timeout))
                said.append((words, waited, unchanged(grid, before), begin))
                said.append(sums_without(grid, absent))
        dist.barrier()
        grid.reshape("tp=4")
        return said, sums(grid)


def sums_without(grid, absent):
    """The sums over the groups that a rank is not in."""
    return [
        sum_over(group)
        for group in grid.pgs.values()
        if absent not in dist.get_process_group_ranks(group)
    ]


def comes_late(late, sleep_s, timeout):
    """One rank comes to a reshape once the others have given up; they try again at once."""
    with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        grid.create_pgs(["tp", "dp"], timeout=timeout)
        said = ""
        if dist.get_rank() == late:
            time.sleep(sleep_s)
        else:
            said, _ = attempt(lambda: grid.reshape("tp=4", timeout=timeout))
        result = grid.reshape("tp=4", timeout=timeout)
        grid.verify()
        return said, str(result), sums(grid)


ERROR = ZeroDivisionError("on purpose")


class Derive:
    """Derives groups, but where it fails; all ranks say that they pass it."""

    def __init__(self, function):
        self.function, self.fails = function, False

    def __call__(self, groups):
        if self.fails:
            raise ERROR
        return self.function(groups)


@contextlib.contextmanager
def failing_on(rank, derive, where):
    """Let one rank fail to derive groups, or to create them."""
    is_here = dist.get_rank() == rank
    derive.fails = is_here and where == "derive"
    creates = is_here and where == "create"
    with mock.patch.object(c10d, "new_group", side_effect=ERROR) if creates else nullcontext():
        yield
    derive.fails = False


def one_fails(failing, where, verify):
    """On one rank a derived group cannot be made, before the ranks meet or afterwards."""
    derive = Derive(lambda groups: groups.levels([2, 2])[1])
    with HyperCommGrid([2, 4], ["tp", "dp"], verify=verify) as grid:
        grid.create_pg("tp")
        grid.create_pg("dp", name="pairs", derive=derive)
        before = dict(grid.pgs)
        dist.barrier()  # who still waits in a creation would hear of the failure there
        with failing_on(failing, derive, where):
            said = attempt(lambda: grid.reshape("dp=4,tp=2"))
        is_same, totals = unchanged(grid, before), sums(grid)
        again = attempt(lambda: grid.reshape("dp=4,tp=2"))
        grid.create_pgs([["tp", "dp"]])
        return said, is_same, totals, again, sums(grid)


def one_is_killed(rank, port, folder, victim, target, timeout_s):
    """A rank dies between the meeting and the creation; the others are as before, and go on."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    timeout = timedelta(seconds=timeout_s)  # not of WORLD, which is to begin on any machine
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    grid.create_pgs(["tp", "dp"], timeout=timeout)
    before = dict(grid.pgs)
    if rank == victim:
        reshaping.Batch.create = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    said, waited = attempt(lambda: grid.reshape(target, timeout=timeout))
    told = said, waited, unchanged(grid, before), sums_without(grid, victim)
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # the world is broken: nobody waits for it


def standing():
    """The numbers of threads and of open files, and what torch has registered."""
    dist.barrier()
    gc.collect()
    settle()
    counts = [len(list(Path("/proc/self", kind).iterdir())) for kind in ("task", "fd")]
    return [*counts, len(registered_groups())]


def many(rounds):
    """Threads, files and groups after some reshapes, and after many more."""
    with HyperCommGrid(SHAPE, NAMES) as grid:
        grid.create_pgs(KEYS)

        def cycle():
            grid.reshape(OTHER)
            grid.reshape(START)
            grid.create_pgs([dims for dims in KEYS if "cp" in dims])
            sums(grid)

        for _ in range(2):
            cycle()
        before = standing()
        for _ in range(rounds):
            cycle()
        return before, standing()


def one_of_two_grids():
    """A reshape that fails leaves another grid's group alone, which would have served a key."""
    derive = Derive(lambda groups: groups.pick(lambda ranks: (ranks[0], ranks[-1])))
    with HyperCommGrid([2, 2], ["tp", "dp"], share="identical", name="lender") as lender:
        lent = lender.create_pg(["tp", "dp"])
        with HyperCommGrid([2, 2], ["tp", "dp"], share="identical", share_with=lender) as grid:
            grid.create_pgs(["tp", {"dims": "tp", "name": "ends", "derive": derive}])
            with failing_on(0, derive, "create"):
                said, _ = attempt(lambda: grid.reshape("tp=4,dp=1"))
            totals = [sum_over(lent)]
            grid.destroy_pg("tp", name="ends")
            created = grid.reshape("tp=4,dp=1").created
            served = str(grid.explain("tp").served_by)
            is_lent = grid.get_pg("tp") is lent
            grid.reshape("tp=2,dp=2")
        totals.append(sum_over(lent))
    return said, totals, [str(key) for key in created], is_lent, served
