"""A rank dies, and training continues on the remaining ranks from the last checkpoint.

    python examples/elastic_restart.py

Trains on 4 local ranks with tp=2,dp=2, kills one rank, continues with tp=1,dp=3, and compares the
losses with one process. torchrun --nnodes 1:4 --max-restarts 3 can also run `train`.
"""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel

from hypercomm import HyperCommGrid, RankLayout, run_ranks
from hypercomm.errors import RankFailedError

BATCH, STEPS = 12, 6


def train(folder: str, victim: int = -1, death: int = -1) -> tuple[str, list[float]]:
    """Train from the last checkpoint. Return the layout and the losses of all steps."""
    with HyperCommGrid(RankLayout.fit(dist.get_world_size(), tp=[1, 2], dp=-1)) as grid:
        grid.create_pgs(["tp", "dp"])
        dp, mesh = grid["dp"], grid.device_mesh("dp", "tp")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.GELU())
        columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
        parallel.parallelize_module(model, mesh["tp"], {"0": columns, "2": rows})
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data, losses = torch.randn(STEPS, BATCH, 8), torch.zeros(STEPS)

        def state() -> dict[str, Any]:
            weights, moments = get_state_dict(model, optimizer)
            return {"weights": weights, "moments": moments, "losses": losses}

        saved = sorted(Path(folder).glob("*/.metadata"))
        if saved:
            dcp.load(last := state(), checkpoint_id=saved[-1].parent)
            weights, moments = last["weights"], last["moments"]
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        for step in range(len(saved), STEPS):
            if (dist.get_rank(), step) == (victim, death):
                os.kill(os.getpid(), signal.SIGKILL)
            x = data[step].chunk(dp.size)[dp.rank]
            loss = (model(x) - x.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[step] = dp.mean(loss.detach())
            dcp.save(state(), checkpoint_id=f"{folder}/{step}")
        return f"{grid.layout}, from step {len(saved)} on", losses.tolist()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as several:
        [(_, wanted)] = run_ranks(train, 1, args=(one,))
        try:
            run_ranks(train, 4, args=(several, 2, 3))
        except RankFailedError as error:
            print(str(error).splitlines()[0])  # then what the other ranks did
        how, losses = run_ranks(train, 3, args=(several,))[0]
    print(f"{how}: {' '.join(f'{loss:.4f}' for loss in losses)}")
    print(f"largest difference: {max(abs(a - b) for a, b in zip(losses, wanted, strict=True)):.1e}")
