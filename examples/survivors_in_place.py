"""A rank is killed, and DistributedDataParallel and FSDP2 continue with the same wrappers.

    python examples/survivors_in_place.py

Trains on 6 local ranks with shard=2,dp=3, kills one rank, and continues on 4 ranks. The wrappers
and their process groups stay the same objects, but the groups have other members. The losses are
compared with a job of 4 ranks that starts from a checkpoint. The example needs torch 2.14, which
can reconfigure process groups.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hypercomm import HyperCommGrid, run_ranks

SIZE, STEPS, DEATH, VICTIM, BATCH = 6, 8, 4, 3, 12
WHOLE = StateDictOptions(full_state_dict=True)


def wrapped(kind: str, grid: HyperCommGrid, saved: dict[str, Any]) -> torch.nn.Module:
    """Return the model, in DistributedDataParallel or FSDP2 over the grid's groups."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)
    model = torch.nn.Sequential(*layers).double()
    if kind == "DDP":
        model.load_state_dict(saved or model.state_dict())
        group = grid["shard", "dp"].group
        replica = DistributedDataParallel(model, process_group=group)
        # without the hook, DDP divides the first step after the failure by the old size
        replica.register_comm_hook(group, allreduce_hook)
        return replica
    mesh = grid.device_mesh("dp", "shard")
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    if saved:
        set_model_state_dict(model, saved, options=WHOLE)
    return model


def train(kind: str, checkpoint: str, first: int = 0) -> tuple[list[float], list[str]]:
    """Train to the end. Return the losses from step `first` on, and what happened on this rank."""
    path = Path(checkpoint)
    grid = HyperCommGrid("shard=2,dp=-1", enable_reconfigure=True)
    model = wrapped(kind, grid, torch.load(path) if first else {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    data = torch.randn(STEPS, BATCH, 8, generator=torch.Generator().manual_seed(1)).double()
    losses: list[float] = []
    notes: list[str] = []
    groups = set(grid.pgs.values())
    for step in range(first, STEPS):
        if step == DEATH and not first:
            whole = get_model_state_dict(model, options=WHOLE)
            if dist.get_rank() == 0:
                torch.save(whole, path)
        while True:
            began, part = time.monotonic(), grid["shard", "dp"]
            try:
                optimizer.zero_grad()
                x = data[step].chunk(part.size)[part.rank]
                loss = (model(x) - x.roll(1, 1)).square().mean()
                if (dist.get_rank(), step, first) == (VICTIM, DEATH, 0):
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                break
            except RuntimeError:  # a collective has failed
                left = grid.survivors(timedelta(seconds=1))
                pairs = [pair for pair in grid.layout.groups("shard") if {*pair} <= {*left}]
                grid.reshape("shard=2,dp=-1", ranks=[rank for pair in pairs for rank in pair])
                if not grid.is_current_rank_in_grid():
                    return losses, ["spare"]
                if isinstance(model, FSDPModule):
                    model.reset_iter_state()
                notes += [
                    f"{kind} continues as {grid.layout} after {time.monotonic() - began:.1f} s",
                    f"{kind} has the same groups: {groups <= {*grid.pgs.values()}}",
                ]
        optimizer.step()
        losses.append(part.mean(loss.item()))
    return losses, notes


def be_rank(
    rank: int, port: int, kind: str, path: str, results: "multiprocessing.Queue[Any]"
) -> None:
    """Run one rank. One of the ranks dies. The store is in the parent process."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timeout)
    results.put((rank, train(kind, path)))
    store.wait(["all have ended"])  # because a rank that ends breaks its connections
    os._exit(0)  # without waiting for the lost rank of WORLD


def lose_a_rank(kind: str, path: str) -> tuple[list[float], list[str]]:
    """Run the job that loses a rank. Return the result of rank 0."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    args = (store.port, kind, path, results)
    ranks = [context.Process(target=be_rank, args=(n, *args), daemon=True) for n in range(SIZE)]
    for process in ranks:
        process.start()
    ended: dict[int, tuple[list[float], list[str]]]
    ended = dict(results.get(timeout=200) for _ in ranks[1:])
    store.set("all have ended", "")
    for process in ranks:
        process.join()
    return ended[0]


if __name__ == "__main__":
    if not hasattr(dist, "_reconfigure"):
        raise SystemExit(f"torch {torch.__version__} cannot reconfigure process groups; 2.14 can")
    largest = 0.0
    for kind in ("DDP", "FSDP2"):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "whole.pt"))
            losses, notes = lose_a_rank(kind, path)
            restarted = run_ranks(train, 4, args=(kind, path, DEATH))[0][0]
        print(*notes, sep="\n")
        print(" ".join(f"{loss:.6f}" for loss in losses))
        differences = [abs(a - b) for a, b in zip(losses[DEATH:], restarted, strict=True)]
        largest = max(largest, *differences)
    print(f"largest difference: {largest:.1e}")
