"""What the real ranks of test_agreement.py do."""

import json
import os
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from hypercomm import HyperCommGrid
from ranks.common import registered, sum_over

LONG = timedelta(seconds=40)
SHORT = timedelta(seconds=2)
LONG_ENOUGH = timedelta(seconds=6)
"""Where some wait until it is over, as all that exists is alike."""


def store():
    return dist.distributed_c10d._get_default_store()


def attempt(action):
    """What came of an action, and how long it took."""
    begin = time.monotonic()
    try:
        said = action()
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - begin


def another_grid(odd, arguments, delays):
    """Four ranks build a grid, of which one builds another; then all build the same one."""
    rank = dist.get_rank()
    if rank > 3:
        return None
    before, usual = registered(), ([2, 2], ["tp", "dp"])
    grid = HyperCommGrid(*(arguments if rank == odd else usual))
    time.sleep(delays[rank])
    said, waited = attempt(lambda: grid.create_pg(grid.dim_names, timeout=LONG))
    is_clean = registered() == before and (said is None or not grid.pgs)
    grid.destroy()
    store().set(f"tried {rank}", "")
    store().wait([f"tried {member}" for member in range(4)])
    with HyperCommGrid(*usual) as grid:
        if said is None:  # it was outside its own grid, and hears now what the others heard
            said, waited = attempt(lambda: grid.create_pg("tp"))
        return said, waited, is_clean, sum_over(grid.create_pg(["tp", "dp"], timeout=LONG))


def another_plan(odd, usual, differing, verified):
    """Ranks create one after the other; one of them has another plan. Then all verify."""
    rank = dist.get_rank()
    grid, said = HyperCommGrid([2, 2], ["tp", "dp"], verify=verified), []
    timeout = LONG_ENOUGH if verified else SHORT
    for entry in differing if rank == odd else usual:
        told, waited = attempt(lambda entry=entry: grid.create_pg(**{"timeout": timeout, **entry}))
        if isinstance(told, str):
            said.append((told, waited))
            break
    said.append(attempt(lambda: grid.verify(timeout)))
    grid.destroy()
    return said


def agreeing(verified):
    """Ranks that agree, with a late one and a rank outside, are told nothing."""
    rank = dist.get_rank()
    with HyperCommGrid([2, 2], ["tp", "dp"], rank_offset=1, verify=verified) as grid:
        if rank == 2:
            time.sleep(1)
        sums = [grid.create_pg(dims) for dims in ("tp", ["tp", "dp"])]
        sums += grid.create_pgs(["dp", {"dims": "dp", "name": "twin"}])
        if rank:
            grid.verify(LONG)
        return [None if group is None else sum_over(group) for group in sums]


def not_all_verify():
    """One rank never asks."""
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    if dist.get_rank() == 2:
        return None
    return attempt(lambda: grid.verify(timedelta(seconds=1)))


def uneven_grids():
    """Grids that not all ranks have, in whatever order ranks come to them, are no disagreement."""
    rank, sums = dist.get_rank(), []
    with HyperCommGrid([1], ["own"], rank_offset=rank) as own:
        own.create_pg("own")
        if rank < 2:
            with HyperCommGrid([2], ["encoder"]) as encoder:
                time.sleep(0.6)  # the others wait for these two meanwhile, and look
                sums.append(sum_over(encoder.create_pg("encoder")))
        with HyperCommGrid([2, 2], ["tp", "dp"]) as one, HyperCommGrid([4], ["dp"]) as other:
            sums.append(sum_over(one.create_pg(["tp", "dp"])))
            sums.append(sum_over(other.create_pg("dp")))
    return sums


def planted(key, value):
    """Something else has written under a key of ours; what a creation says, and one afterwards."""
    rank = dist.get_rank()
    key = key_in_this_job(key)
    if rank == 0:
        store().set(key, value)
    dist.barrier()
    with HyperCommGrid([2], ["dp"], name="planted", verify=True) as grid:
        if rank == 1:
            time.sleep(0.6)  # so that rank 0 looks
        said = attempt(lambda: sum_over(grid.create_pg("dp", timeout=SHORT)))
        verified = attempt(lambda: grid.verify(SHORT))
        is_clean = isinstance(said[0], int) or not grid.pgs
    dist.barrier()
    if rank == 0:
        store().delete_key(key)
    dist.barrier()
    with HyperCommGrid([2], ["x"], name="afterwards") as grid:
        return said, verified, is_clean, sum_over(grid.create_pg("x")), key


def name_of_a_grid():
    """What the store's keys of a grid begin with, but for those that all keys of a job have."""
    with HyperCommGrid([2], ["dp"], name="planted", verify=True) as grid:
        return "/".join(grid.create_pg("dp").group_name.split("/")[-4:-2])


def key_in_this_job(key):
    """Fill in what all keys of this job begin with."""
    with HyperCommGrid([2], ["probe"], name="probe") as grid:
        name = grid.create_pg("probe").group_name
    dist.barrier()
    return key.replace("JOB", "/".join(name.split("/")[:-4]))


def threads(count):
    """Threads of each rank create groups of their own at once, and all the same one once."""
    outcomes, rank = {}, dist.get_rank()
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    order = range(count) if rank % 2 else reversed(range(count))  # not alike on all ranks

    def create(number):
        own = grid.create_pg(["tp", "dp"], name=f"thread {number}")
        outcomes[number] = own, grid.ensure_pg("dp")

    running = [threading.Thread(target=create, args=(number,)) for number in order]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    every = [outcomes[number] for number in range(count)]
    sums = [sum_over(own) for own, _ in every]
    is_one = len({id(shared) for _, shared in every}) == 1
    total = sum_over(every[0][1])
    grid.destroy()
    return sums, is_one, total, len(registered())


def destroyed_meanwhile():
    """A grid is destroyed while a thread of it waits for another rank, which comes too late."""
    grid, said = HyperCommGrid([2], ["dp"]), []
    if dist.get_rank() == 1:
        dist.barrier()
        return None
    timeout = timedelta(seconds=1)
    thread = threading.Thread(
        target=lambda: said.append(attempt(lambda: grid.create_pg("dp", timeout=timeout)))
    )
    thread.start()
    time.sleep(0.3)
    grid.destroy()
    thread.join()
    dist.barrier()
    return said[0], len(registered())


def forked():
    """What a forked child can do with its parent's grid, and the parent afterwards."""
    grid = HyperCommGrid([2], ["dp"])
    group, (reading, writing) = grid.create_pg("dp"), os.pipe()
    child = os.fork()
    if child == 0:
        calls = [
            lambda: grid.get_pg("dp"),
            lambda: grid.ensure_pg("dp"),
            lambda: grid.create_pg("dp", name="twin"),
            lambda: len(grid.pgs),
            grid.destroy,
            group.size,
        ]
        os.write(writing, json.dumps([attempt(call)[0] for call in calls]).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:  # noqa: PTH123 - a file descriptor
        told = json.load(pipe)
    os.waitpid(child, 0)
    total = sum_over(grid.get_pg("dp"))
    grid.destroy()
    return told, total, len(registered())


def aborted():
    """A rank that waits in a collective for ever, until another thread aborts the grid."""
    grid, rank = HyperCommGrid([2], ["dp"]), dist.get_rank()
    group = grid.create_pg("dp", timeout=LONG)
    begin = time.monotonic()
    grid.abort()
    grid.abort()
    took = time.monotonic() - begin
    said = attempt(lambda: grid.create_pg("dp"))[0]
    dist.barrier()
    del group, rank
    return took, said, len(registered()), len(grid.pgs)


def world_goes_first():
    """WORLD is destroyed before the grid, and a new job begins in the same process."""
    grid = HyperCommGrid([2], ["dp"])
    grid.create_pg("dp")
    port, rank = int(os.environ["MASTER_PORT"]), dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    grid.destroy()
    grid.destroy()
    del port, rank
    return attempt(lambda: grid.create_pg("dp"))[0]


def interrupted():
    """Ctrl-C ends a creation that waits, and leaves nothing; then both ranks create."""
    import signal

    grid, rank = HyperCommGrid([2], ["dp"]), dist.get_rank()
    if rank == 1:
        dist.barrier()
        return sum_over(grid.create_pg("dp", timeout=LONG))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        grid.create_pg("dp", timeout=LONG)
    except KeyboardInterrupt:
        waited = time.monotonic() - begin
    left = len(registered()), len(grid.pgs)
    dist.barrier()
    return waited, left, sum_over(grid.create_pg("dp", timeout=LONG))
