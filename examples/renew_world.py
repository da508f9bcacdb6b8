"""A host is lost, and the ranks of the other hosts continue in a new WORLD.

    python examples/renew_world.py

Trains on 6 local ranks, as if on three hosts, with DistributedDataParallel, which uses WORLD. One
rank is killed, and the other rank of its host leaves. The four remaining ranks create a new WORLD,
wrap the model again and repeat the step. The losses are compared with one process.
"""

import multiprocessing
import os
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hypercomm import HyperCommGrid, RankLayout, join, renew_world

RANKS, STEPS, BATCH = 6, 6, 12
VICTIM, DEATH = 3, 2
TIMEOUT = timedelta(seconds=5)


def train(victim: int = -1) -> tuple[str, list[float]]:
    """Train to the end, even if a rank dies. Return the layout and the losses of all steps."""
    grid = HyperCommGrid(RankLayout.fit(dist.get_world_size(), gpu=[1, 2], host=-1))
    grid.create_pgs(["gpu", "host"])
    torch.manual_seed(0)
    data = torch.randn(STEPS, BATCH, 8).double()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallel = DistributedDataParallel(model)
    losses: list[float] = []
    how, job, first = str(grid.layout), None, dist.get_rank()
    while len(losses) < STEPS:
        if (first, len(losses)) == (victim, DEATH):  # another rank has this number later
            os.kill(os.getpid(), signal.SIGKILL)
        x = data[len(losses), dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        try:
            loss = (parallel(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            mean = grid["host"].mean(grid["gpu"].mean(loss.detach()))
        except RuntimeError as error:  # a collective has failed
            left = grid.survivors(3 * TIMEOUT)
            hosts = [host for host in grid.layout.groups("gpu") if {*host} <= {*left}]
            ranks = [rank for host in hosts for rank in host]
            if dist.get_rank() not in ranks:
                grid.abort()
                return "leaves", []
            del parallel  # DDP still uses the old WORLD
            job = renew_world(ranks)
            steps = [0] * job.size
            dist.all_gather_object(steps, len(losses))
            if len(set(steps)) > 1:  # some ranks completed the step that failed on others
                raise RuntimeError(f"ranks are at steps {steps}: use a checkpoint") from error
            lost = grid.reshape("gpu=2,host=-1", ranks=range(job.size)).lost
            parallel = DistributedDataParallel(model)
            how = f"{grid.layout}, without ranks {lost.summary}; rank {first} is {job.rank}"
        else:
            optimizer.step()
            losses.append(float(mean))
    grid.destroy()
    if job is not None:
        job.leave()  # all ranks of the new WORLD leave together
    return how, losses


def be_rank(rank: int, port: int, results: "multiprocessing.Queue[Any]") -> None:
    """Run one rank. One of the ranks dies. The store is in the parent process."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(f"{rank} is ready", "")
    store.wait([f"{other} is ready" for other in range(RANKS)])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    how, losses = train(VICTIM)
    results.put((rank, (how, losses)))
    if how == "leaves":  # WORLD has lost a rank: do not wait for it
        results.close()
        results.join_thread()
        os._exit(0)


if __name__ == "__main__":
    with join(rank=0, size=1):
        _, wanted = train()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    args = (store.port, results)
    ranks = [context.Process(target=be_rank, args=(n, *args), daemon=True) for n in range(RANKS)]
    for process in ranks:
        process.start()
    ended = dict(results.get(timeout=200) for _ in range(RANKS - 1))
    for process in ranks:
        process.join()
    how, losses = ended[5]
    print(f"{how}; leaves: {[rank for rank, (how, _) in ended.items() if how == 'leaves']}")
    print(f"exit codes: {[process.exitcode for process in ranks]}")
    print(" ".join(f"{loss:.6f}" for loss in losses))
    print(f"largest difference: {max(abs(a - b) for a, b in zip(losses, wanted, strict=True)):.1e}")
