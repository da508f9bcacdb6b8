"""Test join() in each kind of job and on each kind of device, and its errors."""

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from group_checks import all_reduce_of
from ports import free_port

from hypercomm import HyperCommGrid, join
from hypercomm.errors import GroupOptionsError, LaunchError, LayoutError
from hypercomm.job_environment import VARIABLES
from hypercomm.testing import fake_world, simulate

STEP = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"}
"""A SLURM step without a node list."""


@pytest.fixture(autouse=True)
def without_a_launcher(monkeypatch):
    """Remove the variables of launchers, and check that the test leaves no WORLD."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    assert not dist.is_initialized()


@pytest.fixture
def ports():
    return [free_port(), free_port()]


# Without a launcher, WORLD consists of this process only. Grids and collectives work in WORLD.
def test_join_without_a_launcher():
    with join() as job:
        assert (job.launcher, job.rank, job.size) == ("none", 0, 1)
        assert "_made" not in repr(job)
        assert (job.local_rank, job.local_size, job.address, job.port) == (0, 1, None, None)
        assert job.backend == "gloo"
        assert job.device == torch.device("cpu")
        with HyperCommGrid("tp=1,dp=1") as grid:
            tensor = torch.tensor([7])
            dist.all_reduce(tensor, group=grid.create_pg("tp+dp"))
            assert tensor.item() == 7
    assert not dist.is_initialized()
    with join(rank=0, size=1) as job:  # again, in the same process
        assert job.launcher == "the call"


# In a job of one rank that a launcher started, join() needs no address. It uses an address if there
# is one.
def test_join_as_the_only_rank_of_a_launcher():
    environment = {"RANK": "0", "WORLD_SIZE": "1"}
    port = free_port()
    with join(environment=environment) as job:
        assert (job.launcher, job.address) == ("the environment", None)
    place = {"MASTER_ADDR": "127.0.0.1 ", "MASTER_PORT": str(port)}
    with join(environment=environment | place) as job:
        assert (job.address, job.port) == ("127.0.0.1", port)


# In a live job, join() describes the job and leaves it running. If the given rank, size or backend
# differs from the job's, it raises. Then the ranks join at a given address, sum over a grid, leave,
# and join again.
@pytest.mark.ranks(4)
def test_join_a_live_job_and_two_new_ones(ports):
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
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
            dist.barrier()  # a rank that leaves early would break connections of others
        assert not dist.is_initialized()


# Two jobs use one address. Rank 1 of job B arrives before rank 1 of job A. If the launcher gives an
# id to each job, the rank of B raises, and the sum of A is right. If not, the second rank 1 raises.
# (With plain torch, ranks 0 of A and 1 of B form a WORLD, and the second rank 1 times out.)
@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", ""])
@pytest.mark.ranks(3)
def test_two_jobs_at_one_address(variable, ports, tmp_path):
    place = dist.get_rank()
    dist.destroy_process_group()
    name, rank = (("A", 0), ("B", 1), ("A", 1))[place]
    order = dist.FileStore(str(tmp_path / "order"), 3)
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(ports[0])} | ({variable: name} if variable else {})
    accepted, rejected = ([0, 2], 1) if variable else ([0, 1], 2)
    if place == 2:
        order.wait(["first"])
    if place == rejected:
        message = f"job {variable}=B, .* job {variable}=A" if variable else "has joined as rank 1"
        with pytest.raises(LaunchError, match=message):
            join(environment=environment)
    else:
        with join(environment=environment):
            total = torch.tensor([10**place])
            dist.all_reduce(total)
            assert total.item() == sum(10**other for other in accepted)
            if place == 1:
                order.set("first", "")
            order.wait(["rejected"])
            dist.barrier()
    if place == rejected:
        order.set("rejected", "")
        order.set("first", "")


# In a SLURM step that is only a part of the job, the id of the step's job is not compared, because
# a user may join the ranks of several allocations by hand.
@pytest.mark.ranks(2)
def test_one_job_of_two_allocations(ports):
    rank = dist.get_rank()
    dist.destroy_process_group()
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(ports[0]), "SLURM_JOB_ID": str(rank), "SLURM_NTASKS": "1"}
    with join(environment=environment):
        total = torch.tensor([1])
        dist.all_reduce(total)
        assert total.item() == 2
        dist.barrier()


# In a fake or simulated world, join() describes that world, whatever the launcher's variables say.
def test_join_in_fake_and_simulated_worlds(monkeypatch):
    with fake_world(8, rank=5):
        with join() as job:
            assert (job.launcher, job.rank, job.size) == ("torch.distributed", 5, 8)
        assert dist.is_initialized()  # the world does not belong to the job
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    found = []

    def program():
        job = join(backend="nccl")
        found.append((job.rank, job.size, job.backend, HyperCommGrid("tp=-1").size))

    simulate(program, 3, backend="nccl")
    assert found == [(rank, 3, "nccl", 3) for rank in range(3)]


# If no other rank joins, the error names the rank and the address, and nothing is initialised. If
# the port is in use, the error suggests how to choose another port.
@pytest.mark.full
def test_join_without_other_ranks():
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
    """Devices of one kind on this host, one of which is current."""

    def __init__(self, kind, count, monkeypatch):
        self.count = count
        self.current = None
        internals = "hypercomm.process_groups.torch_internals"
        monkeypatch.setattr(f"{internals}.why_unavailable", lambda _: None)
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
    """Replace init_process_group, and return a list of its calls."""
    calls = []
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **kw: calls.append((a, kw)))
    return calls


BOTH = "cpu:gloo,cuda:nccl"


def job_of(local, size):
    """Return the arguments of a rank that torchrun has started, with `size` ranks on one host."""
    names = {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environment = {name: str(value) for name, value in names.items() if value is not None}
    return {"environment": environment | {"MASTER_ADDR": "node7", "MASTER_PORT": "1"}}


# With GPUs, a rank gets the GPU whose index is its local rank, and WORLD has both gloo and NCCL. A
# rank that is alone on its host gets the first GPU by default. Another accelerator has another
# backend. An accelerator without a backend is not used by default. The device is made current
# before WORLD is bound to it.
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
def test_device_and_backend(kind, arguments, backend, device, started, monkeypatch):
    devices = FakeDevices(kind, 4, monkeypatch)
    job = join(**arguments)
    assert job.backend == backend
    assert str(job.device) == device
    [((given,), options)] = started
    assert given == backend
    assert devices.current == job.device.index
    assert options.get("device_id") == (job.device if "nccl" in backend else None)


# Invalid arguments raise before anything changes. The error names the argument and its value.
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"need_launcher": True}, LaunchError, "no launcher was found"),
        ({"environment": {"SLURM_NTASKS": "8"}}, LaunchError, "SLURM_NTASKS=8 .* srun"),
        ({"environment": STEP}, LaunchError, "rank 1 of 4 .*MASTER_ADDR=None"),
        ({"rank": 1, "size": 4, "address": "node7"}, LaunchError, "node7, MASTER_PORT=None"),
        ({"rank": 4}, LaunchError, "rank=4 and size=None: give both"),
        ({"rank": "0", "size": 1}, LayoutError, "rank must be an int"),
        ({"device": "gpu0"}, RuntimeError, "gpu0"),
        ({"backend": "glooo"}, GroupOptionsError, "unknown backend 'glooo'"),
        ({"backend": "nccl", "device": "cpu"}, LaunchError, "'cpu' does not fit .* 'nccl'"),
        ({"rank": 1, "size": 2, "address": "a", "port": 1}, LaunchError, "local_rank= or device="),
        (job_of(7, 8), LaunchError, "8 ranks .* a device each, but the host has 4 of type 'cuda'"),
    ],
)
def test_invalid_arguments(arguments, error, message, monkeypatch):
    FakeDevices("cuda", 4, monkeypatch)
    before = dict(os.environ)
    with pytest.raises(error, match=message):
        join(**arguments)
    assert not dist.is_initialized()
    assert dict(os.environ) == before
