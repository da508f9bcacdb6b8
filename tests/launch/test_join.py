"""join() in each kind of job, on each kind of device, and its errors."""

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from group_facts import all_reduce_of
from ports import free_port

from hypercomm import HyperCommGrid, join
from hypercomm.errors import GroupOptionsError, LaunchError, LayoutError
from hypercomm.job_environment import VARIABLES
from hypercomm.testing import fake_world, simulate

STEP = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"}
"""A step without a list of its nodes."""


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    """No launcher has been here, and no world is left."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    assert not dist.is_initialized()


@pytest.fixture
def ports():
    return [free_port(), free_port()]


# In plain python the world is this process alone; a grid works in it, and so do collectives.
def test_a_world_of_one():
    with join() as job:
        assert (job.launcher, job.rank, job.size) == ("none", 0, 1)
        assert "_made" not in repr(job)
        assert (job.local_rank, job.local_size, job.address, job.port) == (0, 1, None, None)
        assert (job.backend, job.device) == ("gloo", torch.device("cpu"))
        with HyperCommGrid("tp=1,dp=1") as grid:
            tensor = torch.tensor([7])
            dist.all_reduce(tensor, group=grid.create_pg("tp+dp"))
            assert tensor.item() == 7
    assert not dist.is_initialized()
    with join(rank=0, size=1) as job:  # once more, in the same process
        assert job.launcher == "the call"


# A launcher's world of one needs no network, either; with an address it has one.
def test_one_rank_of_a_launcher():
    environment, port = {"RANK": "0", "WORLD_SIZE": "1"}, free_port()
    with join(environment=environment) as job:
        assert (job.launcher, job.address) == ("the environment", None)
    place = {"MASTER_ADDR": "127.0.0.1 ", "MASTER_PORT": str(port)}
    with join(environment=environment | place) as job:
        assert (job.address, job.port) == ("127.0.0.1", port)


# A job that is live is described, and left alone; a rank, size or backend that contradicts it is an
# error. Then its ranks leave, meet where the arguments say, sum over a grid, leave, and meet again.
@pytest.mark.ranks(4)
def test_ranks_that_join(ports):
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    with join(rank=rank, size=size, backend="gloo") as job:
        assert (job.launcher, job.rank, job.size) == ("the environment", rank, 4)
        assert (job.local_rank, job.local_size) == (rank, 4)
    for wrong in ({"rank": 7, "size": 8}, {"rank": rank, "size": 5}, {"backend": "cpu:mpi"}):
        with pytest.raises(LaunchError, match=f"size={size}"):
            join(**wrong)
    assert dist.group.WORLD is world
    dist.destroy_process_group()
    # tp=2,dp=2: groups 0 1, 2 3 and 0 2, 1 3
    sums = [{"tp": 1, "dp": 2}, {"tp": 1, "dp": 4}, {"tp": 5, "dp": 2}, {"tp": 5, "dp": 4}]
    for port in ports:
        with join(rank=rank, size=size, address="127.0.0.1", port=port) as job:
            assert (job.launcher, job.local_rank) == ("the call", rank)
            with HyperCommGrid("tp=2,dp=2") as grid:
                for dim, right in sums[rank].items():
                    assert all_reduce_of(rank, grid.create_pg(dim)) == right
            dist.barrier()  # nobody leaves while another still connects to it
        assert not dist.is_initialized()


# So are a fake world and a simulated one, whatever launcher has started the process.
def test_worlds_that_are_not_real(monkeypatch):
    with fake_world(8, rank=5):
        with join() as job:
            assert (job.launcher, job.rank, job.size) == ("torch.distributed", 5, 8)
        assert dist.is_initialized()  # it is not the job's own
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    found = []

    def program():
        job = join(backend="nccl")
        found.append((job.rank, job.size, job.backend, HyperCommGrid("tp=-1").size))

    simulate(program, 3, backend="nccl")
    assert found == [(rank, 3, "nccl", 3) for rank in range(3)]


# If no other rank arrives, the error names the rank and the address, and nothing is initialised; if
# another program uses the port, the error explains how to choose one.
@pytest.mark.full
def test_ranks_that_do_not_meet():
    port = free_port()
    with pytest.raises(LaunchError) as caught:
        join(rank=0, size=2, address="127.0.0.1", port=port, timeout=timedelta(seconds=1))
    assert f"rank 0 of 2 on {socket.gethostname()}" in str(caught.value)
    assert f"127.0.0.1, port {port}" in str(caught.value)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=r"EADDRINUSE.* set MASTER_PORT, or give port="):
            join(rank=0, size=1, address="127.0.0.1", port=port)


class FakeDevices:
    """A host that has some devices of one kind, one of which is current."""

    def __init__(self, kind, count, monkeypatch):
        self.count, self.current = count, None
        rooms = "hypercomm.process_groups.torch_internals"
        monkeypatch.setattr(f"{rooms}.why_unavailable", lambda _: None)
        monkeypatch.setattr(torch, "get_device_module", lambda _: self)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda **_: torch.device(kind)
        )

    def device_count(self):
        return self.count

    def is_available(self):
        return self.count > 0

    def set_device(self, device):
        self.current = device.index


@pytest.fixture
def started(monkeypatch):
    """The calls of init_process_group, which does nothing else."""
    calls = []
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **kw: calls.append((a, kw)))
    return calls


BOTH = "cpu:gloo,cuda:nccl"


def job_of(local, size):
    """A host of `size` ranks that torchrun started, as one of them sees it."""
    names = {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environment = {name: str(value) for name, value in names.items() if value is not None}
    return {"environment": environment | {"MASTER_ADDR": "node7", "MASTER_PORT": "1"}}


# With GPUs a rank gets the one of its local number, and WORLD both backends; alone on a host it has
# the first one, unless it says otherwise. Another accelerator has another backend; one without a
# backend is not used by default. The device is the current one before WORLD is bound to it.
@pytest.mark.parametrize(
    ("kind", "arguments", "backend", "device"),
    [
        ("cuda", job_of(2, 4), BOTH, "cuda:2"),
        ("cuda", job_of(3, 4) | {"device": "cpu"}, "gloo", "cpu"),
        ("cuda", job_of(1, 2) | {"backend": "nccl"}, "nccl", "cuda:1"),
        ("cuda", {}, BOTH, "cuda:0"),
        ("cuda", {"local_rank": 3}, BOTH, "cuda:3"),
        ("xpu", job_of(1, 2), "cpu:gloo,xpu:xccl", "xpu:1"),
        ("mps", job_of(0, 1), "gloo", "cpu"),
    ],
)
def test_devices(kind, arguments, backend, device, started, monkeypatch):
    devices = FakeDevices(kind, 4, monkeypatch)
    job = join(**arguments)
    assert (job.backend, str(job.device)) == (backend, device)
    [((given,), options)] = started
    assert (given, devices.current) == (backend, job.device.index)
    assert options.get("device_id") == (job.device if "nccl" in backend else None)


# A wrong call raises before anything changes, and the error has the argument and its value.
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"need_launcher": True}, LaunchError, "no launcher was found"),
        ({"environment": {"SLURM_NTASKS": "8"}}, LaunchError, "SLURM_NTASKS=8 .* srun"),
        ({"environment": STEP}, LaunchError, "MASTER_ADDR=None.* rank 1 of 4"),
        ({"rank": 1, "size": 4, "address": "node7"}, LaunchError, "node7, MASTER_PORT=None"),
        ({"rank": 4}, LaunchError, "rank=4 and size=None: give both"),
        ({"rank": "0", "size": 1}, LayoutError, "rank must be an int"),
        ({"device": "gpu0"}, RuntimeError, "gpu0"),
        ({"backend": "glooo"}, GroupOptionsError, "unknown backend 'glooo'"),
        ({"backend": "nccl", "device": "cpu"}, LaunchError, "'cpu' does not fit .* 'nccl'"),
        ({"rank": 1, "size": 2, "address": "a", "port": 1}, LaunchError, "local_rank= or device="),
        (job_of(7, 8), LaunchError, "8 ranks .* a device each, and it has 4 of type 'cuda'"),
    ],
)
def test_mistakes(arguments, error, words, monkeypatch):
    FakeDevices("cuda", 4, monkeypatch)
    before = dict(os.environ)
    with pytest.raises(error, match=words):
        join(**arguments)
    assert not dist.is_initialized()
    assert dict(os.environ) == before
