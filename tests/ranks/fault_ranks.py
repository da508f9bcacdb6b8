"""What the real ranks of test_faults.py do: one of them dies, stops or is late; the others tell."""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hypercomm import HyperCommGrid
from hypercomm.process_groups.torch_internals.gloo import GlooStore
from ranks.common import registered, sum_over

WORLD_SIZE = 4
EVERY = ["tp", "dp"]


def signal_self(number):
    os.kill(os.getpid(), number)


def once_its_address_is_known(number):
    """Let this rank get a signal after it has left its address, before it connects."""
    leave = GlooStore.set

    def leave_and_end(self, key, value):
        leave(self, key, value)
        if self._size > 1:  # else it is tried out, alone
            self._store.check([key])  # it has arrived
            signal_self(number)

    GlooStore.set = leave_and_end


def attempt(action):
    """What came of an action, and how long it took."""
    begin = time.monotonic()
    try:
        said = str(action())
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - begin


def take_part(rank, port, folder, fault, victim, number, timeout_s):
    """Be one rank of a job in which the victim has a fault."""
    is_master = port == 0
    store = dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)
    if is_master:
        Path(folder, "port.new").write_text(str(store.port))
        Path(folder, "port.new").rename(Path(folder, "port"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    grid, before = HyperCommGrid([2, 2], ["tp", "dp"]), len(registered())
    dist.barrier()
    if rank == victim:
        if fault == "before":
            signal_self(number)
        elif fault == "during":
            once_its_address_is_known(number)
        elif fault == "late":
            time.sleep(timeout_s / 2)
        elif fault == "store":
            time.sleep(timeout_s / 6)
            signal_self(number)
    timeout = timedelta(seconds=timeout_s)
    told = [attempt(lambda: grid.create_pg(EVERY, timeout=timeout) is not None)]
    told.append((f"{len(registered()) - before} more, {len(grid.pgs)} in the grid", 0.0))
    if fault == "after" and rank == victim:
        signal_self(number)
    if grid.pgs:
        told.append(attempt(lambda: sum_over(grid.get_pg(EVERY))))
    told.append(attempt(grid.destroy))
    told.append((f"{len(registered()) - before} more", 0.0))
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # the world is broken: nobody waits for it


def signals():
    return {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
