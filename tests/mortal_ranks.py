"""Ranks that die on purpose, where `run_ranks` would end all of them with the first."""

import multiprocessing
import time

import torch.distributed as dist

# The server that run_ranks uses, too, with torch loaded.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["hypercomm.preload"])


def exit_codes(function, count, *args, seconds=60):
    """Run `function(rank, port, *args)` as each rank of a job to its end; how each one ended.

    Here is the store of the job, at `port`. Who has not ended after some seconds is killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        CONTEXT.Process(target=function, args=(rank, store.port, *args)) for rank in range(count)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]
