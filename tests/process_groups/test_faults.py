"""Test that every call ends in time with the right error if a rank or the store dies or stops."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from group_checks import sum_over
from killable_ranks import run_scenario, signal_self, start
from processes import run_python, state_of
from time_limits import scaled_s, wait_until

from hypercomm import HyperCommGrid, renew_world
from hypercomm.errors import GroupCreationTimeout, HyperCommError
from hypercomm.testing import registered_groups

GRACE_S = scaled_s(2)
"""A call may end this many seconds after its timeout."""

TIMEOUT_S = 2.0  # a pause of the whole machine must not make other ranks late


# ---- a rank -------------------------------------------------------------------------------------


def lose_one(rank, fault, victim, number):
    """Lose a rank before or after a creation. Check that the other ranks raise."""
    grid = HyperCommGrid("tp=2,dp=2")
    dist.barrier()
    if rank == victim and fault == "before":
        signal_self(number)
    begin = time.monotonic()
    if fault == "after":
        group = grid.create_pg(["tp", "dp"], timeout=timedelta(seconds=TIMEOUT_S))
        dist.barrier()
        if rank == victim:
            signal_self(number)
        begin = time.monotonic()
        with pytest.raises(RuntimeError):
            sum_over(group)
    else:
        with pytest.raises(GroupCreationTimeout) as caught:
            grid.create_pg(["tp", "dp"], timeout=timedelta(seconds=TIMEOUT_S))
        assert caught.value.missing == (victim,)
        assert not grid.pgs
    assert time.monotonic() - begin < TIMEOUT_S + GRACE_S
    begin = time.monotonic()
    grid.destroy()
    assert time.monotonic() - begin < (TIMEOUT_S + GRACE_S if fault == "after" else scaled_s(1))
    assert registered_groups() == {dist.group.WORLD}


# If a rank is killed or stopped before it joins a creation, every other rank raises within the
# timeout plus two seconds. The error names the lost rank, and no group is kept. If the rank is lost
# after the creation, the next collective fails in time. destroy() does not hang, and no group is
# left.
@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "fault", "victim"),
    [(signal.SIGSTOP, "before", 0), (signal.SIGKILL, "before", 2), (signal.SIGSTOP, "after", 3)],
)
def test_lost_rank_is_named(tmp_path, number, fault, victim):
    run_scenario(tmp_path, lose_one, 4, fault, victim, number, victims=[victim])


# ---- the store ----------------------------------------------------------------------------------

STORE_S = 1.0


def serve(file):
    """Serve the store of a job in a separate process, until it is killed or gets SIGUSR1."""

    def stop(*_):
        signal.signal(signal.SIGCONT, stop)  # in case the process receives SIGCONT
        os.kill(os.getpid(), signal.SIGSTOP)

    signal.signal(signal.SIGUSR1, stop)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    file.with_suffix(".new").write_text(str(store.port))
    file.with_suffix(".new").rename(file)
    while True:
        signal.pause()


def lose_the_store(rank, server, number):
    """Kill or stop the process of the store. Then make all calls, each on a separate grid.

    Each rank starts with a different call.
    """
    timeout = timedelta(seconds=STORE_S)
    calls = {
        "create_pg": lambda grid: grid.create_pg("dp", timeout=timeout),
        "create_pgs": lambda grid: grid.create_pgs([{"dims": "dp", "timeout": timeout}]),
        "verify": lambda grid: grid.verify(timeout),
        "connect": lambda grid: grid.connect(timeout=timeout),
        "reshape": lambda grid: grid.reshape("tp=4", timeout=timeout),
        "ranks": lambda grid: grid.reshape("tp=4", ranks=range(4), timeout=timeout),
        "survivors": lambda grid: grid.survivors(3 * timeout),  # longer than the groups' timeout
        "renew": lambda _: renew_world(range(4), timeout=timeout),
    }
    grids = {name: HyperCommGrid("tp=2,dp=2", name=name) for name in calls}
    for grid in grids.values():
        grid.create_pg("tp", timeout=2 * timeout)
    dist.barrier()
    if rank == 0:
        os.kill(server, number)
        wait_until(lambda: state_of(server) in "TZX")
    dist.barrier()
    names = [*calls]
    for name in names[2 * rank :] + names[: 2 * rank]:
        begin = time.monotonic()
        # Under load, a rank may pause for long. It then assumes that the other ranks have timed
        # out.
        with pytest.raises(HyperCommError, match=r"store|timed out on the other ranks"):
            calls[name](grids[name])
        limit_s = STORE_S * (3 if name == "survivors" else 1) + GRACE_S
        assert time.monotonic() - begin < limit_s, name


# If the process that serves the store is dead or unresponsive, each call and all later calls end in
# time with a HyperCommError that names the store.
@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_lost_store_is_named(tmp_path, number):
    file = tmp_path / "port"
    server = start(serve, file)
    try:
        wait_until(file.exists)
        port = int(file.read_text())
        run_scenario(tmp_path, lose_the_store, 4, server.pid, number, port=port)
    finally:
        server.kill()
        server.join()


# ---- exit of the interpreter --------------------------------------------------------------------

PROGRAM = """
import sys, threading, time
import torch.distributed as dist
from hypercomm import HyperCommGrid

file, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
grid = HyperCommGrid("dp=2")
if rank == 1:
    threading.Thread(target=grid.create_pg, args=["dp"], daemon=True).start()
    time.sleep(1)
else:
    sys.stdin.read()  # until the other one has ended
"""


# An interpreter exits normally while one of its threads waits for another rank.
@pytest.mark.full
def test_interpreter_exits_during_a_creation(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    first, second = (subprocess.Popen([*command, rank], **pipes) for rank in "01")
    for program in (second, first):
        program.communicate(timeout=scaled_s(35))
        assert program.returncode == 0


EXIT = """
import atexit, threading
atexit.register(lambda: print([type(one) for one in threading.enumerate()]))  # called last
import torch.distributed as dist
from hypercomm import HyperCommGrid

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with HyperCommGrid("dp=1") as grid:
    grid.create_pg("dp")
"""


# No thread of hypercomm ends a group of gloo while the interpreter exits: torch would abort it.
@pytest.mark.full
def test_interpreter_exits_after_groups_are_destroyed():
    done = run_python("-c", EXIT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Timer" not in done.stdout
    assert "MainThread" in done.stdout
