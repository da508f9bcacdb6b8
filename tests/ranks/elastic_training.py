"""A program for torchrun: its grid fits the world that it finds, whatever was there before."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid, RankLayout


def sum_over(group):
    value = torch.tensor([10.0 ** dist.get_rank()], dtype=torch.float64)
    dist.all_reduce(value, group=group)
    return int(value)


def layout_of(world_size):
    """Two ranks to a tensor-parallel group, or one where the world has an odd size."""
    fitting = [RankLayout.suggest(world_size, tp=tp, dp=-1) for tp in (2, 1)]
    return [*fitting[0], *fitting[1]][0]


def train(folder, victim):
    """Add up over tp and dp until the folder holds "enough", as rank 0 sees it."""
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with HyperCommGrid.from_layout(layout_of(dist.get_world_size()), cover="exact") as grid:
        tp, dp = grid.create_pgs(["tp", "dp"])
        is_enough = torch.zeros(1)
        while not is_enough:
            sums = [sum_over(tp), sum_over(dp)]
            seen = {"layout": str(grid.layout), "sums": sums, "pid": os.getpid()}
            draft = folder / f"{attempt}-{rank}.draft"
            draft.write_text(json.dumps({**seen, "agent": os.getppid()}))
            draft.rename(draft.with_suffix(".json"))
            if attempt == 0 and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            is_enough = torch.tensor([float((folder / "enough").exists())])
            dist.broadcast(is_enough, src=0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()
