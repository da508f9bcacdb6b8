"""Programs that launchers start: each joins its job, and proves that the ranks communicate."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import hypercomm


def sums(job):
    """Sum ranks over each dim of a grid of 4 ranks."""
    layout = hypercomm.RankLayout.parse("tp=2,dp=-1", world_size=job.size)
    with hypercomm.HyperCommGrid.from_layout(layout) as grid:
        found = {}
        for dim in layout.dim_names:
            tensor = torch.tensor([job.rank])
            dist.all_reduce(tensor, group=grid.create_pg(dim))
            found[dim] = int(tensor)
    return found


def joined(**arguments):
    """Join, communicate, leave; return what was found."""
    limit = {"timeout": timedelta(seconds=60), **arguments}
    with hypercomm.join(**limit) as job:
        again = hypercomm.join()
        again.leave()  # not its own
        found = sums(job)
        dist.barrier()  # nobody leaves while another, which is slow, still connects to it
    return {
        "launcher": job.launcher,
        "rank": job.rank,
        "size": job.size,
        "local": [job.local_rank, job.local_size],
        "place": [job.address, job.port],
        "again": [again.launcher, again.rank, again.size, again.backend],
        "text": str(job),
        "sums": found,
        "left": not dist.is_initialized(),
    }


def rejoined(ports):
    """Leave the job of `run_ranks`, and join others one after the other, as the arguments say."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    return [joined(rank=rank, size=size, address="127.0.0.1", port=port) for port in ports]


def live():
    """Join a job that is live, and contradict it."""
    wrong = {
        "rank": {"rank": 7, "size": 8},
        "size": {"rank": dist.get_rank(), "size": 4},
        "backend": {"backend": "cpu:mpi"},
    }
    world = dist.group.WORLD
    job = hypercomm.join(rank=dist.get_rank(), size=dist.get_world_size(), backend="gloo")
    with job:
        pass
    errors = {}
    for name, arguments in wrong.items():
        try:
            hypercomm.join(**arguments)
        except hypercomm.errors.HyperCommError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return {
        "job": [
            *(job.launcher, job.rank, job.size, job.local_rank, job.local_size),
            *(job.backend, str(job.device)),
        ],
        "still": dist.group.WORLD is world,
        "errors": errors,
    }


def costs(port, rounds):
    """Seconds of torch's initialisation and of join()'s, in turns."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    by_hand, ours = [], []
    for number in range(2 * rounds):
        times = ours if number % 2 else by_hand
        os.environ["MASTER_PORT"] = str(port + number)
        begin = time.perf_counter()
        if number % 2:
            hypercomm.join()
        else:
            address = f"tcp://127.0.0.1:{port + number}"
            dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        times.append(time.perf_counter() - begin)
        dist.barrier()
        dist.destroy_process_group()
    return by_hand[1:], ours[1:]


def restarted(folder):
    """Join; in the first attempt rank 1 ends the job after a collective."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with hypercomm.join(timeout=timedelta(seconds=60)) as job:
        found = sums(job)
        Path(folder, f"{attempt}-{job.rank}.json").write_text(json.dumps(found))
        dist.barrier()
        if attempt == "0" and job.rank == 1:
            os._exit(3)
        if attempt == "0":
            time.sleep(60)  # torchrun ends it


if __name__ == "__main__":
    if sys.argv[1:2] == ["restarted"]:
        restarted(sys.argv[2])
    else:
        told = {}
        if sys.argv[1:2] == ["told"]:  # what torchrun says, by argument
            told = {"rank": int(os.environ["RANK"]), "size": int(os.environ["WORLD_SIZE"])}
            told["environment"] = dict(os.environ)
        # In one piece, as all ranks write into one stream.
        sys.stdout.write(json.dumps(joined(**told)) + "\n")
        sys.stdout.flush()
