"""Starts ranks that a test may kill. (`run_ranks` ends all ranks when the first rank dies.)"""

import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import cloudpickle
import torch.distributed as dist

# The fork server that run_ranks uses, with torch loaded.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["hypercomm.grid", "cloudpickle"])


def call(pickled):
    """Call a pickled function of a test file that this process has not imported."""
    function, args = cloudpickle.loads(pickled)
    function(*args)


def start(function, *args):
    """Start a process that calls a function."""
    module = sys.modules[function.__module__]
    if module.__name__.startswith("test_"):
        cloudpickle.register_pickle_by_value(module)
    process = CONTEXT.Process(target=call, args=(cloudpickle.dumps((function, args)),))
    process.start()
    return process


def signal_self(number):
    """Send this process a signal until it has ended or is stopped for good."""
    while True:
        os.kill(os.getpid(), number)


def exit_codes(function, count, *args, seconds=60, stopped=(), port=None):
    """Run `function(rank, port, *args)` as each rank of a job, and return the exit codes.

    This process serves the job's store, unless a port is given. A rank that has not ended after
    `seconds` is killed. Ranks in `stopped` are killed without waiting for them.
    """
    if port is None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    ranks = [start(function, rank, port, *args) for rank in range(count)]
    deadline = time.monotonic() + seconds
    for rank in {*range(count)} - {*stopped}:
        ranks[rank].join(max(0.0, deadline - time.monotonic()))
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def run_scenario(folder, scene, size, *args, victims=(), timeout_s=30, seconds=90, port=None):
    """Run `scene(rank, *args)` on the ranks of a job, and return the results of the survivors.

    A rank in `victims` must be killed or stopped. All other ranks must end without an error.
    """

    def take_part(rank, port):
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        result = json.dumps(scene(rank, *args))
        draft = Path(folder, f"{rank}.draft")
        draft.write_text(result)
        draft.rename(draft.with_suffix(".json"))
        while len([*Path(folder).glob("*.json")]) < size - len(victims):
            time.sleep(0.01)  # a rank that ends breaks the connections of other ranks
        os._exit(0)  # destroying a WORLD that has lost ranks would wait for them

    module = sys.modules[scene.__module__]
    cloudpickle.register_pickle_by_value(module)
    codes = exit_codes(take_part, size, seconds=seconds, stopped=victims, port=port)
    assert codes == [-9 if rank in victims else 0 for rank in range(size)], codes
    return {
        rank: json.loads(Path(folder, f"{rank}.json").read_text())
        for rank in {*range(size)} - {*victims}
    }
