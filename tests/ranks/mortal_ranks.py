"""Ranks that die on purpose, where `run_ranks` would end all of them with the first."""

import multiprocessing
import time

import torch.distributed as dist

# The server that run_ranks uses, too, with torch loaded.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["hypercomm.grid", "cloudpickle"])


def exit_codes(function, count, *args, seconds=60, server=None, stopped=()):
    """Run `function(rank, port, *args)` as each rank of a job to its end; how each one ended.

    The store of the job is here, at `port`; or with a rank that writes its port into a file: a pair
    `server` of both. Who has not ended after some seconds is killed, who is stopped at once.
    """
    ranks = {}

    def start(rank, port):
        ranks[rank] = CONTEXT.Process(target=function, args=(rank, port, *args))
        ranks[rank].start()

    if server is None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    else:
        rank, file = server
        start(rank, 0)
        while not file.exists():
            time.sleep(0.01)
        port = int(file.read_text())
    for rank in sorted({*range(count)} - ranks.keys()):
        start(rank, port)
    deadline = time.monotonic() + seconds
    for rank in {*range(count)} - {*stopped}:
        ranks[rank].join(max(0.0, deadline - time.monotonic()))
    for process in ranks.values():
        process.kill()
        process.join()
    return [ranks[rank].exitcode for rank in range(count)]
