"""What the ranks of test_hosts.py do: a program that torchrun starts on each host."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid

TIMEOUT = timedelta(seconds=5)


def write(path, value):
    """Write JSON that a reader sees whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value))
    draft.rename(path)


def wait_for(path):
    while not path.exists():
        time.sleep(0.02)


def sum_over(group):
    value = torch.tensor([10.0 ** dist.get_rank()], dtype=torch.float64)
    dist.all_reduce(value, group=group)
    return int(value)


def caught(function):
    """What a call raised, as what a test can compare, and how long it took."""
    begin, outcome = time.monotonic(), {"kinds": [], "words": "", "missing": []}
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test judges it
        outcome["kinds"] = [kind.__name__ for kind in type(error).__mro__]
        outcome["words"] = f"{type(error).__name__}: {error}"
        outcome["missing"] = list(getattr(error, "missing", []))
    return {**outcome, "took": time.monotonic() - begin, "ended": time.monotonic()}


def creation(folder, grid, is_cut_off):
    """Wait for ranks that are cut off before they come; once the link is back, all try again."""
    rank = dist.get_rank()
    grid.create_pg("tp")
    write(folder / f"{rank}.ready", os.getpid())
    if not is_cut_off:
        got = caught(lambda: grid.create_pg("dp", timeout=TIMEOUT))
        write(folder / f"{rank}.json", got)
    wait_for(folder / "go on")
    if (folder / "go on").read_text() == "again":
        write(folder / f"{rank}.again", sum_over(grid.create_pg("dp")))


def collective(folder, grid, _):
    """All-reduce until the link is cut, then leave the grid."""
    rank = dist.get_rank()

    def endless():
        for step in range(10**9):
            sum_over(group)
            if step == 20:
                write(folder / f"{rank}.ready", os.getpid())

    with grid:
        group = grid.create_pg("dp", timeout=TIMEOUT)
        got = caught(endless)
        write(folder / f"{rank}.json", got)
        left = caught(grid.destroy)
        write(folder / f"{rank}.left", left)


if __name__ == "__main__":
    what, folder, cut_off = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    node = int(os.environ["GROUP_RANK"])
    whole = HyperCommGrid([2, dist.get_world_size() // 2], ["tp", "dp"])
    {"creation": creation, "collective": collective}[what](folder, whole, node == cut_off)
    whole.destroy()
    dist.destroy_process_group()
