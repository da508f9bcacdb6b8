"""A rank is killed, and training continues on the remaining ranks without a restart.

    python examples/survivors.py

Trains on 8 local ranks with tp=2,dp=4, kills one rank, and continues on 6 ranks with tp=2,dp=3 from
the last checkpoint. The tp partner of the lost rank is not used. The losses are compared with one
process.
"""

import multiprocessing
import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid, RankLayout, run_ranks

STEPS, BATCH, SAVED_EVERY, DEATH = 8, 12, 2, 5


def step_of(grid: HyperCommGrid, weights: list[torch.Tensor], x: torch.Tensor) -> float:
    """Train on this rank's part of a batch. dp splits the batch, and tp splits the weights."""
    dp, tp = grid["dp"], grid["tp"]
    x = x.chunk(dp.size)[dp.rank]
    hidden = (x @ weights[0]).tanh()
    y = hidden @ weights[1]
    dist.all_reduce(y, group=tp.group)
    error = 2 * (y - x.roll(1, 1)) / (BATCH * x.shape[1])  # gradient of the batch mean
    inner = (error @ weights[1].T) * (1 - hidden**2)
    for weight, gradient in zip(weights, [x.T @ inner, hidden.T @ error], strict=True):
        dist.all_reduce(gradient, group=dp.group)
        weight.sub_(gradient, alpha=0.25)
    return float(dp.mean((y - x.roll(1, 1)).square().mean()))


def train(folder: str, victim: int = -1) -> tuple[str, list[float]]:
    """Train to the end, even if a rank dies. Return the layout and the losses of all steps."""
    timeout = timedelta(seconds=6)
    grid = HyperCommGrid(RankLayout.fit(dist.get_world_size(), tp=[1, 2], dp=-1))
    grid.create_pgs([{"dims": dim, "timeout": timeout} for dim in ("tp", "dp")])
    data = torch.randn(STEPS, BATCH, 8, generator=torch.Generator().manual_seed(0)).double()
    whole = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1)).double() / 4
    losses, step, how = [0.0] * STEPS, 0, str(grid.layout)
    weights: list[torch.Tensor] = []
    while step < STEPS:
        try:
            if not weights:  # this rank's part of the last checkpoint
                if saved := sorted(Path(folder).glob("*.pt")):
                    step, whole, losses = torch.load(saved[-1])
                weights = [part.chunk(grid["tp"].size, 1)[grid["tp"].rank] for part in whole]
                weights = [weights[0].clone(), weights[1].T.clone()]
            if (dist.get_rank(), step) == (victim, DEATH):
                os.kill(os.getpid(), signal.SIGKILL)
            losses[step] = step_of(grid, weights, data[step])
            step += 1
            if step % SAVED_EVERY == 0:
                save(grid, Path(folder, f"{step}"), weights, step, losses)
        except RuntimeError:  # a collective has failed
            left = grid.survivors(3 * timeout)
            columns = grid.layout.groups("tp")
            ranks = [rank for group in columns if {*group} <= {*left} for rank in group]
            reshaped = grid.reshape("tp=2,dp=-1", ranks=ranks)
            if not grid.is_current_rank_in_grid():
                return "spare", []
            weights, how = [], f"{grid.layout}, without ranks {reshaped.lost.summary}"
    return how, losses


def save(
    grid: HyperCommGrid, path: Path, weights: list[torch.Tensor], step: int, losses: list[float]
) -> None:
    """Save the full weights on the first rank."""
    parts = [weights[0], weights[1].T]
    every = [
        [torch.empty_like(part.contiguous()) for _ in range(grid["tp"].size)] for part in parts
    ]
    for into, part in zip(every, parts, strict=True):
        dist.all_gather(into, part.contiguous(), group=grid["tp"].group)
    if grid.coords() == {"tp": 0, "dp": 0}:
        whole = torch.stack([torch.cat(parts, 1) for parts in every])
        torch.save((step, whole, losses), draft := path.with_suffix(".new"))
        draft.rename(path.with_suffix(".pt"))


def be_rank(rank: int, port: int, folder: str, results: "multiprocessing.Queue[Any]") -> None:
    """Run one of 8 ranks. One of the ranks dies. The store is in the parent process."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=8)
    results.put((rank, train(folder, victim=5)))
    store.wait(["all have ended"])  # because a rank that ends breaks its connections
    os._exit(0)  # without waiting for the lost rank of WORLD


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as several:
        [(_, wanted)] = run_ranks(train, 1, args=(one,))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        results = context.Queue()
        args = (store.port, several, results)
        ranks = [context.Process(target=be_rank, args=(n, *args), daemon=True) for n in range(8)]
        for process in ranks:
            process.start()
        ended = dict(results.get(timeout=200) for _ in range(7))
        store.set("all have ended", "")
        for process in ranks:
            process.join()
    how, losses = ended[0]
    print(f"{how}; spare: ranks {[rank for rank, (how, _) in ended.items() if how == 'spare']}")
    print(" ".join(f"{loss:.6f}" for loss in losses))
    print(f"largest difference: {max(abs(a - b) for a, b in zip(losses, wanted, strict=True)):.1e}")
