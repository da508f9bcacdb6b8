"""Ranks that die on purpose, where `run_ranks` would end all of them with the first."""

import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import cloudpickle
import torch.distributed as dist

# The server that run_ranks uses, too, with torch loaded.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["hypercomm.grid", "cloudpickle"])


def call(pickled):
    """Call a function of a test file, which the process need not import."""
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


def end_by(number):
    """End this process by a signal, or stop it, again should something let it continue."""
    while True:
        os.kill(os.getpid(), number)


def exit_codes(function, count, *args, seconds=60, stopped=(), port=None):
    """Run `function(rank, port, *args)` as each rank of a job to its end; how each one ended.

    The store of the job is here, unless another port is given. Who has not ended after some seconds
    is killed, who is stopped at once.
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


def run_scene(folder, scene, size, *args, victims=(), timeout_s=30, seconds=90, port=None):
    """Run `scene(rank, *args)` on the ranks of a job; what each one tells that is no victim.

    All others must end by themselves; a victim is killed or stopped.
    """

    def take_part(rank, port):
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        told = json.dumps(scene(rank, *args))
        draft = Path(folder, f"{rank}.draft")
        draft.write_text(told)
        draft.rename(draft.with_suffix(".json"))
        while len([*Path(folder).glob("*.json")]) < size - len(victims):
            time.sleep(0.01)  # a rank that ends breaks connections
        os._exit(0)  # WORLD may have lost ranks: nobody waits for it

    module = sys.modules[scene.__module__]
    cloudpickle.register_pickle_by_value(module)
    codes = exit_codes(take_part, size, seconds=seconds, stopped=victims, port=port)
    assert codes == [-9 if rank in victims else 0 for rank in range(size)], codes
    return {
        rank: json.loads(Path(folder, f"{rank}.json").read_text())
        for rank in {*range(size)} - {*victims}
    }
