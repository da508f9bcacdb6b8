"""One rank of a real job dies or stops: every other one ends in time, with the right words."""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from busy import late_s
from ranks import mortal_ranks
from ranks.common import attempt, registered, sum_over

from hypercomm import HyperCommGrid
from hypercomm.process_groups.torch_internals.gloo import GlooStore

SIZE = 4
EVERY = ["tp", "dp"]
GRACE_S = late_s(2)
"""How much later than its timeout a rank may end."""


def die_once_the_address_is_known(number):
    """Let this rank get a signal after it has published its address, before it connects."""
    publish = GlooStore.set

    def publish_and_end(self, key, value):
        publish(self, key, value)
        self._store.check([key])  # it has arrived
        os.kill(os.getpid(), number)

    GlooStore.set = publish_and_end


def take_part(rank, port, folder, fault, victim, number, timeout_s):
    """Be one rank of a job in which the victim gets a signal."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    grid, before = HyperCommGrid([2, 2], EVERY), len(registered())
    dist.barrier()
    if rank == victim and fault == "during":
        die_once_the_address_is_known(number)
    elif rank == victim and fault != "after":
        if fault == "store":
            time.sleep(0.5)
            os.kill(int(Path(folder, "server").read_text().split()[0]), number)
        os.kill(os.getpid(), number)
    timeout = timedelta(seconds=timeout_s)
    told = [attempt(lambda: grid.create_pg(EVERY, timeout=timeout) is not None)]
    told.append((len(registered()) - before, len(grid.pgs)))
    if rank == victim:
        os.kill(os.getpid(), number)
    if grid.pgs:
        told.append(attempt(lambda: sum_over(grid.get_pg(EVERY))))
    told.append(attempt(grid.destroy))
    told.append((len(registered()) - before, 0))
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # the world is broken: nobody waits for it


def serve(folder):
    """Serve the store of a job, in a process that can be killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Path(folder, "draft").write_text(f"{os.getpid()} {store.port}")
    Path(folder, "draft").rename(Path(folder, "server"))
    time.sleep(60)


# Whenever a rank is killed or stopped, or the process that serves the store, every other rank hears
# so in time, and has nothing left; where the group exists, its next collective ends in time.
@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "victim", "number"),
    [
        ("before", 2, signal.SIGKILL),
        ("before", 0, signal.SIGSTOP),
        ("during", 2, signal.SIGKILL),
        ("during", 0, signal.SIGSTOP),
        ("after", 2, signal.SIGKILL),
        ("after", 0, signal.SIGSTOP),
        ("store", 0, signal.SIGKILL),
    ],
)
def test_a_rank_is_lost(tmp_path, fault, victim, number):
    timeout_s = 3.0
    server = mortal_ranks.start(serve, str(tmp_path))
    while not (tmp_path / "server").exists():
        time.sleep(0.01)
    codes = mortal_ranks.exit_codes(
        *(take_part, SIZE, str(tmp_path), fault, victim, number, timeout_s),
        port=int((tmp_path / "server").read_text().split()[1]),
        stopped=[victim] if number == signal.SIGSTOP else [],
    )
    server.kill()
    server.join()
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(SIZE)]
    for rank in {*range(SIZE)} - {victim}:
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        (said, waited), (left, keys), *used, (destroyed, took), (after, _) = told
        assert waited < timeout_s + GRACE_S
        assert (destroyed, after) == (None, 0)
        assert took < timeout_s + GRACE_S
        if said is True:
            assert fault in {"during", "after"}
            assert (left, keys) == (1, 1)
            assert "Error: " in used[0][0]
            assert used[0][1] < timeout_s + GRACE_S
        else:
            assert (left, keys, used) == (0, 0, [])
            if fault == "store":
                assert said.startswith("CreationError: "), said
                assert "store is gone" in said
            else:
                assert said.startswith("GroupCreationTimeout: "), said
                assert f"rank {victim} (" in said
                assert all(f"rank {other} (" not in said for other in {*range(SIZE)} - {victim})
