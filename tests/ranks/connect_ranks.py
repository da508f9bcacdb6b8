"""What real ranks do to connect the groups of grids."""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hypercomm import GridSet, HyperCommGrid
from hypercomm.compat.megatron.state import ParallelState
from hypercomm.errors import HyperCommError
from hypercomm.grid import connect as connecting
from ranks.common import sum_over

LIMIT = timedelta(seconds=20)
SHORT = timedelta(seconds=2)


def rows_of(connections):
    return [(row.title, row.ranks) for row in connections]


def in_other_orders(lazily):
    """Stages create two groups over tp in another order; one key shares another's group."""
    with HyperCommGrid("tp=2,dp=1,pp=4", lazy_init=lazily) as grid:
        names = [None, "twin"]
        for name in names if grid.coords()["pp"] % 2 else reversed(names):
            grid.create_pg("tp", name=name)
        for name in ("one", "two"):
            grid.create_pg("tp", name=name, share="identical")
        grid.create_pgs(["pp", "dp", "tp+pp"])
        told = grid.connect(timeout=LIMIT)
        assert all((row.seconds > 0) == (len(row.ranks) > 1) for row in told)
        return rows_of(told), sum_over(grid.get_pg("tp+pp"))


def said_of(call, *arguments, catch=HyperCommError, **keywords):
    """What a call raises, in words, and within how many seconds."""
    begin = time.monotonic()
    try:
        call(*arguments, **keywords)
    except catch as error:
        missing, group = getattr(error, "missing", ()), getattr(error, "group", "")
        return f"{type(error).__name__}: {error}", missing, group, time.monotonic() - begin
    return "nothing", (), "", time.monotonic() - begin


def one_stays_away(absent):
    """One rank comes only to the second call."""
    with HyperCommGrid("tp=2,dp=2") as grid:
        grid.create_pgs(["tp", "dp"])
        said = None
        if dist.get_rank() != absent:
            said = said_of(grid.connect, timeout=SHORT)
        dist.barrier()
        return said, rows_of(grid.connect(timeout=LIMIT)), sum_over(grid.get_pg("dp"))


def one_has_another_group():
    """Rank 1 has a twin that the others lack; all may go on afterwards."""
    with HyperCommGrid("tp=2,dp=2") as grid:
        grid.create_pgs(["tp", "dp"])
        if dist.get_rank() % 2:
            grid.create_pg("dp", name="twin")
        said = said_of(grid.connect, timeout=LIMIT)
        dist.barrier()
        if dist.get_rank() % 2:
            grid.destroy_pg("dp", name="twin")
        return said, len(grid.connect(timeout=LIMIT))


def of_a_set():
    """Two grids behind each other, with pipelines; then one whose second grid has a rank more."""
    with GridSet.tile(encoder="tp=2", llm="tp=3,pp=2") as grids:
        grids.create_pgs({"encoder": ["tp"], "llm": ["tp", "pp"]})
        return rows_of(grids.connect(timeout=LIMIT))


def of_a_state():
    """A parallel state with experts and pipelines."""
    with ParallelState.create(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
    ) as state:
        told = rows_of(state.connect(timeout=LIMIT))
        return told, sum_over(state.read("_DATA_PARALLEL_GROUP"))


def fails_before():
    """Rank 1 fails before the ranks meet; then all connect."""
    with HyperCommGrid("tp=2,dp=2") as grid:
        grid.create_pgs(["tp", "dp"])
        items_of = connecting._items_of
        if dist.get_rank() == 1:
            connecting._items_of = None
        said = said_of(grid.connect, timeout=LIMIT, catch=Exception)
        connecting._items_of = items_of
        dist.barrier()
        return said, len(grid.connect(timeout=LIMIT))


def of_a_view():
    """Rank 4 is outside; a view has groups of its own, and those of the dim that it shares."""
    with HyperCommGrid([2, 2], ["tp", "pp"]) as grid:
        grid.register_view("expert", [2, 2], ["ep", "pp"], ["pp"])
        grid.create_pgs(["tp", "pp", {"dims": "ep", "view": "expert"}])
        view = grid.view("expert")
        return rows_of(view.connect(timeout=LIMIT)), rows_of(grid.connect(timeout=LIMIT))


def gone_at_dp(rank, port, folder, how, lazily, more):
    """Rank 3 is killed, or stopped, when it comes to dp; the others say what they hear."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    grid = HyperCommGrid("tp=2,dp=2", lazy_init=lazily)
    grid.create_pgs(["tp", "dp", *more])
    dist.barrier()
    if rank == 3:
        connect = connecting._Item.connect

        def leave(item, own):
            if item.row.title == "dp":
                os.kill(os.getpid(), how)
                time.sleep(60)
            return connect(item, own)

        connecting._Item.connect = leave
    said = said_of(grid.connect, timeout=timedelta(seconds=4))
    begin = time.monotonic()
    others = sum_over(grid.get_pg("tp")) if rank < 2 else None
    grid.destroy()
    told = [*said, others, time.monotonic() - begin]
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # the world is broken: nobody waits for it


KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP


def recovers(verify):
    """Rank 3 is slow at dp: after the timeout that group is made anew, and the others serve."""
    with HyperCommGrid("tp=2,dp=2", verify=verify) as grid:
        grid.create_pgs(["tp", "dp"])
        connect = connecting._Item.connect

        def slow(item, own):
            if item.row.title == "dp" and own == 3:
                time.sleep(4)
            return connect(item, own)

        connecting._Item.connect = slow
        said = said_of(grid.connect, timeout=SHORT)
        connecting._Item.connect = connect
        dist.barrier()
        grid.destroy_pg("dp")
        grid.create_pg("dp", timeout=LIMIT)
        rows = rows_of(grid.connect(timeout=LIMIT))
        grid.verify(LIMIT)
        return said, rows, sum_over(grid.get_pg("dp")), sum_over(grid.get_pg("tp"))
