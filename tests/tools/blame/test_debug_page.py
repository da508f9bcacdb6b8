"""Test the page of torch's debug server during a hang, while calls complete, and at the end."""

import html
import re
import subprocess
import sys

import pytest
from ports import free_port
from processes import launcher_free

from hypercomm import HyperCommGrid
from hypercomm.errors import ToolError
from hypercomm.testing import fake_world

PROGRAM = """
import contextlib, sys, threading, time, urllib.request
import torch, torch.distributed as dist
from torch.distributed.debug import start_debug_server, stop_debug_server
from hypercomm import HyperCommGrid

def page(found=""):
    url = f"http://localhost:{sys.argv[1]}/grid"
    while not found:
        with contextlib.suppress(OSError), urllib.request.urlopen(url) as answer:
            found = answer.read().decode()
    return found

def show(store):
    while "has not entered" not in (found := page()):
        pass
    print(found, flush=True)
    store.set("seen", "1")
    while not store.check(["watched"]):  # calls still complete
        found = page()
    print("<h3>running</h3>", found, flush=True)
    store.set("read", "1")

def main():
    dist.init_process_group("gloo")
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    grid = HyperCommGrid("tp=2,dp=2")
    groups = grid.create_pg("tp"), grid.create_pg("dp")
    with grid.watch(60, sys.argv[2]) as watch:
        start_debug_server(int(sys.argv[1]), handlers=[watch.debug_page()], start_method="spawn")
        dist.all_reduce(torch.ones(4), group=groups[0])
        if rank == 0:
            threading.Thread(target=show, args=[store]).start()
        if rank == 3:
            store.wait(["seen"])
        dist.all_reduce(torch.ones(4), group=groups[1])
        dist.barrier()
        for _ in range(200):
            dist.all_reduce(torch.ones(4), group=groups[0])
            time.sleep(0.01)
        dist.barrier()
        if rank == 0:
            store.set("watched", "1")
        while not store.check(["read"]):  # wait() would block the other thread's use of the store
            time.sleep(0.05)
    dist.barrier()
    if rank == 0:
        print("<h3>over</h3>", page(), flush=True)
        stop_debug_server()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


# Rank 3 has not entered the all_reduce over dp of ranks 1 and 3, so the page names rank 3. The page
# shows the coordinates and the last call of each rank. While calls complete, no rank is named. No
# process is aborted at the end.
@pytest.mark.full
def test_page_names_the_hanging_rank(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command = [*torchrun, str(program), str(free_port()), str(tmp_path / "watch")]
    done = subprocess.run(
        command, env=launcher_free(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    page, running, over = re.split("<h3>\\w+</h3>", html.unescape(done.stdout))
    assert "no rank waits" in running
    assert "this rank has no watch" in over
    assert "rank 3 (tp=1, dp=1" in page
    rows = [re.findall("<td>(.*?)</td>", row) for row in page.split("<tr>")]
    assert ["dp", "1, 3", "all_reduce 1", "1", "3"] in rows
    ranks = {row[0]: row for row in rows if len(row) == 6}
    coords = [f"tp={rank % 2}, dp={rank // 2}" for rank in range(4)]
    assert [ranks[str(rank)][1] for rank in range(4)] == coords
    assert ranks["1"][3:5] == ["all_reduce number 1 of dp (ranks 1, 3)", "started"]
    assert ranks["3"][3:5] == ["all_reduce number 1 of tp (ranks 2..3)", "finished"]
    assert ranks["1"][5].startswith(f"{program}:")


# Without torch's debug server, as in torch 2.10, debug_page() raises.
def test_torch_without_a_debug_server(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "hypercomm.blame.debug_page", raising=False)
    monkeypatch.setitem(sys.modules, "hypercomm.process_groups.torch_internals.debug_server", None)
    with fake_world(4):
        watch = HyperCommGrid("tp=4").watch(60, tmp_path)
        with watch, pytest.raises(ToolError):
            watch.debug_page()
