"""What the real ranks of blame/test_watch_ranks.py do: programs with planted mistakes."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid

SIZES = "tp=2,dp=4"
RANKS = 8
FORMER = [("tp", 4), ("dp", 8), ("tp", 4), ("WORLD", 1)]
"""What each rank calls, again and again: all_reduce over these dims, of so many numbers."""


def members(dims, rank):
    """The ranks of a group of tp=2,dp=4 that a rank is in."""
    if dims == "tp":
        return [rank // 2 * 2, rank // 2 * 2 + 1]
    if dims in {"dp", "broadcast"}:
        return [rank % 2 + 2 * index for index in range(4)]
    return list(range(RANKS))


def programs(mistake):
    """What each rank calls, step by step: dims, elements, dtype."""
    usual = [(dims, count, "float32") for dims, count in FORMER * 2]
    found = {rank: list(usual) for rank in range(RANKS)}
    if mistake == "skip":
        del found[3][4]
    elif mistake == "swap":
        found[2][5:8] = [usual[5], usual[7], usual[6]]
    elif mistake == "shape":  # gloo ends a process that is sent more than it expects
        for steps in found.values():
            steps[5] = ("broadcast", 8, "float32")
        found[6][5] = ("broadcast", 12, "float32")
    elif mistake == "dtype":
        found[5][5] = ("dp", 8, "int32")
    elif mistake in {"pipe", "message"}:  # each sends to the next what it has received
        for rank, steps in found.items():
            received = [("recv", 3, "float32")] * (rank > 0)
            is_wrong = mistake == "message" and rank == 3
            sent = [("send", 3, "float32")] * (rank < RANKS - 1 and not is_wrong)
            steps[4:4] = [*received, *sent]
    elif mistake in {"loop", "raise", "leave", "die"}:
        found[5][4:] = [(mistake, 0, "")]
    elif mistake == "late":  # 1 waits for 0 in tp, those of its dp for 1, all others for them
        found[0][4:] = [("loop", 0, "")]
    return found


def standstill(mistake):
    """How many calls each rank has begun when nobody can go on, by simulating rendezvous."""
    program = programs(mistake)
    begun = dict.fromkeys(program, 0)

    def count(rank, dims):
        return sum(step[0] == dims for step in program[rank][: begun[rank]])

    def may_go_on(rank):
        here, steps = begun[rank], program[rank]
        if here == len(steps) or steps[here][1] == 0:
            return False
        dims = steps[here - 1][0]
        if here and dims in {"send", "recv"}:
            other, answer = (rank + 1, "recv") if dims == "send" else (rank - 1, "send")
            return count(other, answer) >= count(rank, dims)
        return here == 0 or all(count(m, dims) >= count(rank, dims) for m in members(dims, rank))

    while free := [rank for rank in program if may_go_on(rank)]:
        for rank in free:
            begun[rank] += 1
    return begun


def files_of(folder, ranks):
    """How many calls the record of each rank holds; None until all ranks have one."""
    found = {}
    for rank in ranks:
        try:
            record = json.loads(Path(folder, f"hypercomm_watch_{rank}.json").read_text())
        except (OSError, ValueError):
            return None
        found[rank] = len(record["entries"])
    return found


def keep(folder, kept, expected):
    """Copy the records once all ranks stand where they must come to stand."""
    while (found := files_of(folder, expected)) is None or found != expected:
        time.sleep(0.02)
    shutil.copytree(folder, f"{kept}.part")
    Path(f"{kept}.part").rename(kept)


def end(kept):
    """End this process, wherever it is, once the records are kept."""
    while not Path(kept).exists():
        time.sleep(0.02)
    os._exit(0)


def job(folder, kept, mistake):
    """Run a program under a watch, until the records are kept."""
    rank = dist.get_rank()
    expected = standstill(mistake)
    if mistake == "die":
        del expected[5]
    if rank == 0:  # it tells the others by what it has kept
        threading.Thread(target=keep, args=(folder, kept, expected), daemon=True).start()
    threading.Thread(target=end, args=(kept,), daemon=True).start()
    grid = HyperCommGrid(SIZES)
    groups = {
        "tp": grid.create_pg("tp"),
        "dp": grid.create_pg("dp"),
        "WORLD": None,
        "broadcast": grid["dp"].group,
    }
    dist.barrier()
    try:
        with grid.watch(0.3, folder) as watch:
            for dims, count, dtype in programs(mistake)[rank]:
                step(dims, groups.get(dims), count, dtype, watch)
    except (RuntimeError, ValueError):
        pass
    time.sleep(60)  # with its connections open


def mortal(rank, port, *args):
    """Do as `job`, where the end of a rank is not that of all."""
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    job(*args)


def step(dims, group, count, dtype, watch):
    """One step of a program."""
    if dims == "loop":
        endless_loop()
    elif dims == "raise":
        raise ValueError("a planted mistake")
    elif dims == "leave":
        watch.stop()
    elif dims == "die":
        watch.file.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif dims == "broadcast":
        dist.broadcast(torch.ones(count), src=dist.get_rank() % 2, group=group)
    elif dims == "send":
        dist.send(torch.ones(count), dist.get_rank() + 1)
    elif dims == "recv":
        dist.recv(torch.ones(count), dist.get_rank() - 1)
    else:
        dist.all_reduce(torch.ones(count, dtype=getattr(torch, dtype)), group=group)


def endless_loop():
    """Where a rank stays."""
    while True:
        sum(range(1000))


def messages(folder):
    """Send more messages of turning shapes than are kept, some of them to whoever asks; all end."""
    rank = dist.get_rank()
    grid = HyperCommGrid([2], ["dp"])
    with grid.watch(60, folder):
        dist.barrier()
        for number in range(130):
            value = torch.ones(1 + number % 3)
            dist.send(value, 1) if rank == 0 else dist.recv(value, 0)
        dist.barrier()
        for _ in range(3):
            dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1))
    grid.destroy()


def posted_early(folder, kept):
    """Rank 1 has posted what has come, and loops before it waits for it; rank 0 is further on."""
    rank = dist.get_rank()
    grid = HyperCommGrid([2], ["dp"])
    if rank == 0:  # barrier, isend, all_reduce; barrier, irecv
        threading.Thread(target=keep, args=(folder, kept, {0: 3, 1: 2}), daemon=True).start()
    threading.Thread(target=end, args=(kept,), daemon=True).start()
    with grid.watch(0.3, folder):
        dist.barrier()
        if rank == 0:
            dist.isend(torch.ones(1), 1)
            dist.all_reduce(torch.ones(1))
        else:
            dist.irecv(torch.ones(1), 0)
            endless_loop()


def takes_from_anybody():
    """A message that nobody sends."""
    dist.recv(torch.ones(1))


def from_anybody(folder, kept, is_awaited):
    """Rank 2 takes what nobody sends; the others are done, or wait for it."""
    rank = dist.get_rank()
    grid = HyperCommGrid([3], ["dp"])
    if rank == 0:
        expected = {0: 1 + is_awaited, 1: 1 + is_awaited, 2: 2}
        threading.Thread(target=keep, args=(folder, kept, expected), daemon=True).start()
    threading.Thread(target=end, args=(kept,), daemon=True).start()
    with grid.watch(0.3, folder):
        dist.barrier()
        if rank == 2:
            takes_from_anybody()
        elif is_awaited:
            dist.all_reduce(torch.ones(1))
    time.sleep(60)


def each_kind(folder):
    """Call some collectives over both dims of a grid."""
    grid = HyperCommGrid("tp=2,dp=2")
    groups = grid.create_pgs(["tp", "dp"])
    with grid.watch(60, folder):
        for group in groups:
            dist.all_reduce(torch.ones(4), group=group)
            dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=group)
            dist.barrier(group=group)
    grid.destroy()
