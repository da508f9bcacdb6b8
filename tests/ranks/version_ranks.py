"""What the real ranks of test_torch_versions.py do."""

import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo as Gloo

from hypercomm import HyperCommGrid
from hypercomm.process_groups import torch_internals as c10d
from ranks.common import registered, sum_over

seen = []
"""Novelty and timeout of each gloo group of this rank."""


def a_trial_that_fails():
    """The first creation of rank 1 fails for a reason of its own; the second does not."""
    grid, said = HyperCommGrid([2], ["dp"]), None
    if dist.get_rank() == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    begin = time.monotonic()
    try:
        grid.create_pg("dp", timeout=timedelta(seconds=30))
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    waited = time.monotonic() - begin
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    dist.barrier()
    with grid:
        return said, waited, sum_over(grid.create_pg("dp"))


def another_timeout():
    """How long rank 0 waits for rank 1 once the timeout of their group is another."""
    grid = HyperCommGrid([2], ["dp"])
    group, waited = grid.create_pg("dp"), None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c10d.set_timeout(timedelta(seconds=0.5), group)
    if dist.get_rank() == 0:
        begin = time.monotonic()
        try:
            sum_over(group)
        except RuntimeError:
            waited = time.monotonic() - begin
    dist.barrier()
    grid.destroy()
    return waited


def refused_options():
    """Options that gloo would leave aside, and what is left after they were refused."""
    before, said = registered(), []
    grid = HyperCommGrid([2], ["dp"])
    for options in (Gloo._Options(), object(), 7):
        try:
            grid.create_pg("dp", pg_options=options)
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said, registered() == before, dict(grid.pgs)


PACKAGE = """
import torch.distributed as dist

def create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

def register():
    dist.Backend.register_backend("theirs", create, devices=["cpu"])
"""
ENTRY_POINTS = """[torch.distributed.backends]
theirs = theirs_of_the_test:register
broken = nowhere:register
"""


def write_package(folder):
    """Install a third party's backend into a folder."""
    (folder / "theirs_of_the_test.py").write_text(PACKAGE)
    info = folder / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


def a_third_party(folder):
    """Create a group of a third party's backend."""
    sys.path.insert(0, folder)
    with HyperCommGrid([2], ["dp"]) as grid:
        try:
            said = str(grid.create_pg("dp", backend="broken"))
        except ValueError as error:
            said = str(error)
        total = sum_over(grid.create_pg("dp", backend="theirs"))
        return said, c10d.known_backends(), total


def survive(rank, port, folder):
    """Lose rank 2, and go on without it."""
    torchs = dist.distributed_c10d
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, enable_reconfigure=True)

    def reconfigure(attempt, ranks):
        store.set(f"{attempt}/{rank}", torchs._get_reconfigure_handle())
        handles = [store.get(f"{attempt}/{member}").decode() for member in ranks]
        torchs._reconfigure(uuid=attempt, handles=handles).wait()

    reconfigure(1, [0, 1, 2])
    grid = HyperCommGrid([3], ["dp"])
    before = sum_over(grid.create_pg("dp"))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    grid.abort()
    reconfigure(2, [0, 1])
    smaller = HyperCommGrid([2], ["dp"])
    after = sum_over(smaller.create_pg("dp"))
    told = [before, dist.get_world_size(), after]
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # WORLD has lost a rank: nobody waits for it


def permuted_meshes(ranks):
    """Read a mesh that keeps its order, and make one of a grid over listed ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"), preserve_rank_order=True)
    grid = HyperCommGrid.from_device_mesh(mesh)
    read = [list(grid.layout.ranks), grid.get_rank_enum("tp"), grid.get_rank_enum("dp")]
    mine = DTensor.from_local(torch.full((1,), float(dist.get_rank())), mesh["tp"], [Shard(0)])
    shards = mine.redistribute(mesh["tp"], [Replicate()]).to_local().tolist()
    with HyperCommGrid.from_layout(grid.layout) as own:
        own.create_pgs(["tp", "dp"])
        given = own.device_mesh("dp", "tp")
        slice_of_it = HyperCommGrid.from_device_mesh(given["tp"])
        facts = [
            given
            == DeviceMesh(
                "cpu",
                ranks,
                mesh_dim_names=("dp", "tp"),
                preserve_rank_order=True,
                _init_backend=False,
            ),
            HyperCommGrid.from_device_mesh(given).layout == grid.layout,
            slice_of_it.get_rank_enum("tp"),
        ]
    return dist.get_rank(), read, shards, facts
