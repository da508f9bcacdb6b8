"""join(): what it finds, what it makes, and what it refuses."""

import os
import socket
import statistics
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from ranks import join_ranks

from hypercomm import HyperCommGrid, join, run_ranks
from hypercomm.errors import GroupOptionsError, JoinError, LaunchError, LayoutError
from hypercomm.launch import devices
from hypercomm.launchers import VARIABLES
from hypercomm.testing import fake_world, simulate

STEP = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "1",
}
"""A step whose nodes nobody tells."""


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    """No launcher has been here, and no world is left."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    assert not dist.is_initialized()


# In plain python the world is this process alone; a grid works in it, and so do collectives.
def test_a_world_of_one():
    with join() as job:
        assert (job.launcher, job.rank, job.size) == ("nobody", 0, 1)
        assert (job.local_rank, job.local_size, job.address, job.port) == (0, 1, None, None)
        assert (job.backend, job.device) == ("gloo", torch.device("cpu"))
        assert str(job).startswith("rank 0 of 1")
        with HyperCommGrid("tp=1,dp=1") as grid:
            tensor = torch.tensor([7])
            dist.all_reduce(tensor, group=grid.create_pg("tp+dp"))
            assert tensor.item() == 7
    assert not dist.is_initialized()
    with join(rank=0, size=1) as job:  # once more, in the same process
        assert job.launcher == "the call"


# Alone on a host with several devices a rank has the first one, unless it says otherwise.
@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("arguments", "local"),
    [
        ({}, (0, 1)),
        ({"rank": 0, "size": 1}, (0, 1)),
        ({"environment": {"RANK": "0", "WORLD_SIZE": "1"}}, (0, 1)),
        ({"rank": 0, "size": 1, "local_rank": 3}, (3, None)),
        ({"local_rank": 3}, (3, None)),
    ],
)
def test_a_world_of_one_beside_devices(arguments, local, monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    job = join(**arguments)
    assert (job.local_rank, job.local_size) == local
    assert (job.backend, job.device) == ("cpu:gloo,cuda:nccl", torch.device("cuda", local[0]))


# A launcher's world of one needs no network, either; with an address it has one.
def test_one_rank_of_a_launcher():
    with join(environment={"RANK": "0", "WORLD_SIZE": "1"}) as job:
        assert (job.launcher, job.address) == ("the environment", None)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with join(rank=0, size=1, address=" 127.0.0.1\n", port=free_port()) as job:
        assert job.address == "127.0.0.1"
    with join(environment={"RANK": "0", "WORLD_SIZE": "1", **place}) as job:
        assert job.address == "127.0.0.1"
        assert f"127.0.0.1:{job.port}" in str(job)


# Four ranks meet where the arguments say, sum over a grid, leave, and meet again.
def test_ranks_that_are_told():
    found = run_ranks(join_ranks.rejoined, 4, args=([free_port(), free_port()],))
    for attempt in range(2):
        sums = [rank[attempt]["sums"] for rank in found]
        assert sums == [
            {"tp": 1, "dp": 2},
            {"tp": 1, "dp": 4},
            {"tp": 5, "dp": 2},
            {"tp": 5, "dp": 4},
        ]
        assert {rank[attempt]["launcher"] for rank in found} == {"the call"}
        assert [rank[attempt]["local"] for rank in found] == [[rank, 4] for rank in range(4)]
        assert all(rank[attempt]["left"] for rank in found)


# A live job is described, and left alone; a rank, size or backend that contradicts it is an error.
def test_a_live_job():
    found = run_ranks(join_ranks.live, 2)
    for rank, told in enumerate(found):
        assert told["job"] == ["the environment", rank, 2, rank, 2, "gloo", "cpu"]
        assert told["still"]
        assert {name: text.split(":")[0] for name, text in told["errors"].items()} == dict.fromkeys(
            ["rank", "size", "backend"], "LaunchError"
        )
        assert "size 2" in told["errors"]["size"]
        assert "size=4" in told["errors"]["size"]


def test_a_fake_world():
    with fake_world(8, rank=5):
        job = join()
        assert (job.launcher, job.rank, job.size, job.address) == ("torch.distributed", 5, 8, None)
        with job:
            pass
        assert dist.is_initialized()  # it is not the job's own


# So does a simulated one, whatever launcher has started the process that simulates.
def test_a_simulated_job(monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    found = []

    def program():
        job = join(backend="nccl")
        found.append((job.rank, job.size, job.backend, HyperCommGrid("tp=-1").size))

    simulate(program, 3, backend="nccl")
    assert found == [(rank, 3, "nccl", 3) for rank in range(3)]
    assert os.environ["SLURM_PROCID"] == "1"


# A wrong call raises before anything changes, and the error has the argument and its value.
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"need_launcher": True}, LaunchError, "no launcher was found: none of RANK, .* is set"),
        ({"address": "node7"}, LaunchError, "no launcher was found"),
        ({"environment": {"SLURM_NTASKS": "8"}}, LaunchError, "SLURM_NTASKS=8, .* start with srun"),
        ({"environment": STEP}, LaunchError, "unknown MASTER_ADDR and MASTER_PORT: this is rank 1"),
        ({"rank": 1, "size": 4, "address": "node7"}, LaunchError, "unknown MASTER_PORT: this is"),
        ({"rank": 4, "size": 4}, LaunchError, "rank=4 and size=4: the ranks are 0 to size - 1"),
        ({"rank": 4}, LaunchError, "rank=4 and size=None: give both"),
        ({"rank": -1, "size": 4}, LaunchError, "rank=-1 and size=4"),
        ({"rank": 0, "size": 0}, LaunchError, "rank=0 and size=0"),
        ({"device": "gpu0"}, RuntimeError, "gpu0"),
        ({"backend": "glooo"}, GroupOptionsError, "unknown backend 'glooo'"),
        ({"backend": "gloo", "device": "meta:0"}, LaunchError, "device 'meta:0' .* backend 'gloo'"),
        ({"timeout": 30}, GroupOptionsError, "timeout must be"),
        ({"rank": "0", "size": 1}, LayoutError, "rank must be an int"),
    ],
)
def test_mistakes(arguments, error, words):
    before = dict(os.environ)
    with pytest.raises(error, match=words):
        join(**arguments)
    assert not dist.is_initialized()
    assert dict(os.environ) == before


# If no other rank arrives, the error names the rank and the address, and nothing is initialised.
def test_nobody_comes():
    port = free_port()
    with pytest.raises(JoinError) as caught:
        join(rank=0, size=2, address="127.0.0.1", port=port, timeout=timedelta(seconds=1))
    assert f"rank 0 of 2 on {socket.gethostname()}" in str(caught.value)
    assert f"127.0.0.1, port {port}" in str(caught.value)
    assert not dist.is_initialized()


# If another program uses the port, the error explains how to choose one.
def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(JoinError, match=r"EADDRINUSE.* set MASTER_PORT, or give port="):
            join(rank=0, size=1, address="127.0.0.1", port=port)
    assert not dist.is_initialized()


class FakeDevices:
    """A host that has some devices, one of which is current."""

    def __init__(self, count):
        self.count = count
        self.current = 0

    def device_count(self):
        return self.count

    def is_available(self):
        return self.count > 0

    def current_device(self):
        return self.current

    def set_device(self, device):
        self.current = device.index


def has(kind, module, monkeypatch):
    """Let torch find some devices of a kind, and a backend for them."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device(kind))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr("hypercomm.process_groups.torch_internals.why_unavailable", lambda _: None)
    monkeypatch.setattr("hypercomm.process_groups.torch_internals.why_not_here", lambda _: None)


@pytest.fixture
def four_gpus(monkeypatch):
    module = FakeDevices(4)
    has("cuda", module, monkeypatch)
    return module


BOTH = "cpu:gloo,cuda:nccl"


# With GPUs a rank gets the one of its local number, and WORLD both backends.
@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((None, None, 2, 4), (BOTH, "cuda:2")),
        ((None, "cuda:1", 2, 4), (BOTH, "cuda:1")),
        ((None, torch.device("cuda"), 3, 4), (BOTH, "cuda:3")),
        ((None, "cpu", 3, 4), ("gloo", "cpu")),
        (("gloo", None, 3, 4), ("gloo", "cpu")),
        (("gloo", "cuda:1", 3, 4), ("gloo", "cuda:1")),
        (("nccl", None, 1, 2), ("nccl", "cuda:1")),
    ],
)
def test_devices(arguments, expected):
    backend, device = devices.choose(*arguments)
    assert (backend, str(device)) == expected


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nccl", "cpu", 2, 4), "device 'cpu' does not fit backend 'nccl'"),
        ((None, "mps", 0, 1), "device 'mps.*' does not fit backend 'gloo'"),
        ((None, None, None, None), "4 devices .* local_rank= or device="),
        ((None, None, 7, 8), "8 ranks .* need a device each, and it has 4 of type 'cuda'"),
        ((None, None, 5, 2), "6 ranks"),  # the launcher counts another way: a sixth rank is here
    ],
)
def test_devices_that_do_not_fit(arguments, words):
    with pytest.raises(LaunchError, match=words):
        devices.choose(*arguments)


# Another accelerator has another backend; one without a backend is not used by default.
def test_other_devices(monkeypatch):
    has("xpu", FakeDevices(2), monkeypatch)
    assert devices.choose(None, None, 1, 2) == ("cpu:gloo,xpu:xccl", torch.device("xpu:1"))
    has("mps", FakeDevices(1), monkeypatch)
    assert devices.choose(None, None, 0, 1) == ("gloo", torch.device("cpu"))


# The device is made the current one before WORLD is bound to it.
def test_the_current_device(four_gpus, monkeypatch):
    calls = []

    def init_process_group(*words, **options):
        calls.append((four_gpus.current, words, options["device_id"]))
        raise RuntimeError("no GPU\nhere")

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with pytest.raises(JoinError, match=r"^rank 0 of 1 on .* could not join .*: no GPU here$"):
        join(rank=0, size=1, local_rank=2)
    assert calls == [(2, (BOTH,), torch.device("cuda:2"))]


# The time that join() adds to torch's own initialisation of four gloo ranks, measured in turns.
@pytest.mark.alone
@pytest.mark.slow
def test_what_it_costs():
    found = run_ranks(join_ranks.costs, 4, args=(free_port(), 6), timeout=120)
    by_hand, ours = (
        statistics.median(map(max, zip(*times, strict=True))) for times in zip(*found, strict=True)
    )
    print(f"torch {1e3 * by_hand:.1f} ms, join() {1e3 * ours:.1f} ms")
    assert ours - by_hand < 0.05
