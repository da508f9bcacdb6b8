"""join(): what it finds, what it makes, and what it refuses."""

import os
import re
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
from hypercomm.joining import devices
from hypercomm.launch.launchers import VARIABLES
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
        assert str(job) == f"rank 0 of 1, local 0 of 1 on {job.host}, by nobody; gloo on cpu"
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
        assert str(job).endswith(
            f"by the environment, which met at 127.0.0.1:{job.port}; gloo on cpu"
        )


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


# A live job is described, and left alone; arguments that contradict it are refused.
def test_a_live_job():
    found = run_ranks(join_ranks.live, 2)
    for rank, told in enumerate(found):
        assert told["job"] == ["the environment", rank, 2, rank, 2, "gloo", "cpu"]
        assert told["still"]
        assert len(told["refused"]) == 8
        for name, sentence in told["refused"].items():
            assert sentence.startswith("LaunchError: torch.distributed is initialised already, and")
            assert f" {name}=" in sentence
            assert "call torch.distributed.destroy_process_group() first" in sentence
        assert told["refused"]["size"] == (
            "LaunchError: torch.distributed is initialised already, and size=4 contradicts what is "
            "there, 2; leave size out, or call torch.distributed.destroy_process_group() first"
        )


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


MISTAKES = [
    (
        {"need_launcher": True},
        LaunchError,
        (
            "no launcher was found: none of RANK, WORLD_SIZE, OMPI_COMM_WORLD_RANK, "
            "OMPI_COMM_WORLD_SIZE, PMI_RANK, PMI_SIZE, PALS_RANKID, MV2_COMM_WORLD_RANK, "
            "MV2_COMM_WORLD_SIZE, FLUX_TASK_RANK, FLUX_JOB_SIZE, JSM_NAMESPACE_RANK, "
            "JSM_NAMESPACE_SIZE, SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_NTASKS, SLURM_NPROCS is "
            "set; start the program with torchrun, srun or mpirun, or give rank=, size=, address= "
            "and port="
        ),
    ),
    (
        {"environment": {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}},
        LaunchError,
        (
            "SLURM_NTASKS=8, and SLURM_STEP_ID names no step: this is inside an allocation, not in "
            "a step of it; start with srun, or unset SLURM_NTASKS to stay on this host"
        ),
    ),
    (
        {"environment": {"RAY_RAYLET_PID": "77"}},
        LaunchError,
        (
            "RAY_RAYLET_PID=77, and there is no rank: this is a worker of Ray, which tells no "
            "rank: give rank=, size=, address= and port=, or use Ray Train, which sets RANK and "
            "WORLD_SIZE; for a world of this process alone give rank=0, size=1"
        ),
    ),
    (
        {"environment": {"JOB_COMPLETION_INDEX": "3"}},
        LaunchError,
        (
            "JOB_COMPLETION_INDEX=3, and there is no rank: this is a pod of an indexed Job of "
            "Kubernetes: start torchrun in it with --node-rank; for a world of this process alone "
            "give rank=0, size=1"
        ),
    ),
    (
        {"environment": {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"}},
        LaunchError,
        (
            "PET_NPROC_PER_NODE=8, and there is no rank: this is a pod of a PyTorchJob that has "
            "not started torchrun; start with torchrun, which reads PET_*; for a world of this "
            "process alone give rank=0, size=1"
        ),
    ),
    (
        {"environment": {"RANK": "0", "WORLD_SIZE": "8"} | STEP},
        LaunchError,
        (
            "RANK=0 and WORLD_SIZE=8, of the environment, contradict SLURM_PROCID=1 and "
            "SLURM_NTASKS=4, of srun; unset those that are left from another job"
        ),
    ),
    (
        {"environment": {"RANK": "0", "WORLD_SIZE": "many"}},
        LaunchError,
        "the environment's WORLD_SIZE must be an integer of at least 1, got 'many'",
    ),
    (
        {"environment": {"RANK": "4", "WORLD_SIZE": "4"}},
        LaunchError,
        "RANK=4 and WORLD_SIZE=4 contradict each other: the last rank would be 3",
    ),
    (
        {"environment": STEP},
        LaunchError,
        (
            "MASTER_ADDR and MASTER_PORT are missing: SLURM_PROCID=1 and SLURM_NTASKS=4 say that "
            "this is rank 1 of 4 ranks; set them to the host of rank 0 and a free port there"
        ),
    ),
    (
        {"rank": 1, "size": 4, "address": "node7"},
        LaunchError,
        (
            "MASTER_PORT is missing: rank=1 and size=4 say that this is rank 1 of 4 ranks; give "
            "join() address= and port="
        ),
    ),
    (
        {"rank": 4, "size": 4},
        LaunchError,
        "rank=4 and size=4 contradict each other: the last rank would be 3",
    ),
    (
        {"rank": 4},
        LaunchError,
        "rank=4 without size=; give both, or neither, to be told by the launcher",
    ),
    ({"rank": -1, "size": 4}, LaunchError, "rank must be at least 0, got -1"),
    ({"rank": 0, "size": 0}, LaunchError, "size must be at least 1, got 0"),
    ({"port": 70_000}, LaunchError, "port must be at most 65535, got 70000"),
    (
        {"address": "node7"},
        LaunchError,
        ("address='node7', and no launcher has told which rank this is; give rank= and size=, too"),
    ),
    (
        {"address": " "},
        LaunchError,
        "address must be the name or number of rank 0's host, got ' '",
    ),
    (
        {"environment": "RANK=0"},
        LaunchError,
        "environment must be a mapping such as os.environ, got 'RANK=0'",
    ),
    (
        {"environment": {"RANK": 0}},
        LaunchError,
        "the environment's RANK must be a string, as in os.environ, got 0",
    ),
    ({"need_launcher": "yes"}, LaunchError, "need_launcher must be a bool, got 'yes'"),
    (
        {"device": "gpu0"},
        LaunchError,
        "device must be one such as 'cuda:0' or 'cpu', got 'gpu0'",
    ),
    ({"device": True}, LaunchError, "device must be one such as 'cuda:0' or 'cpu', got True"),
]


@pytest.mark.parametrize(("arguments", "error", "sentence"), MISTAKES)
def test_mistakes(arguments, error, sentence):
    before = dict(os.environ)
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        join(**arguments)
    assert not dist.is_initialized()
    assert dict(os.environ) == before


# Beginnings of what torch's version, or the check of another module, completes.
@pytest.mark.parametrize(
    ("arguments", "error", "beginning"),
    [
        ({"backend": "glooo"}, GroupOptionsError, "unknown backend 'glooo'; this torch knows ["),
        ({"backend": 7}, GroupOptionsError, "backend must be a name such as 'gloo', got 7"),
        ({"timeout": 30}, GroupOptionsError, "timeout must be"),
        ({"rank": "0", "size": 1}, LayoutError, "rank must be an int"),
    ],
)
def test_other_mistakes(arguments, error, beginning):
    with pytest.raises(error, match=re.escape(beginning)):
        join(**arguments)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_does_not_exist():
    with pytest.raises(LaunchError) as caught:
        join(device="cuda:3")
    assert str(caught.value) == (
        "device 'cuda:3' does not exist: torch sees none on this host; use 'cpu'"
    )


# Nobody else comes: the error says who waited where, and torch.distributed is as before.
def test_nobody_comes():
    port = free_port()
    with pytest.raises(JoinError) as caught:
        join(rank=0, size=2, address="127.0.0.1", port=port, timeout=timedelta(seconds=1))
    assert str(caught.value).startswith(
        f"rank 0 of 2 on {socket.gethostname()} could not join at 127.0.0.1, port {port} "
        f"(rank=0 and size=2, of the call): "
    )
    assert not dist.is_initialized()


# Where the port is another's, the error says how to choose one.
def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(JoinError, match="another program has this port: set MASTER_PORT"):
            join(rank=0, size=1, address="127.0.0.1", port=port)
    assert not dist.is_initialized()


class FakeDevices:
    """A host that shows some devices, of which one is current."""

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
        self.current = device if isinstance(device, int) else device.index


@pytest.fixture
def four_gpus(monkeypatch):
    module = FakeDevices(4)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr("hypercomm.process_groups.torch_internals.why_unavailable", lambda _: None)
    monkeypatch.setattr("hypercomm.process_groups.torch_internals.why_not_here", lambda _: None)
    return module


# Where there are GPUs, a rank has the one of its local number, and WORLD both backends.
@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((None, None, 2, 4), ("cpu:gloo,cuda:nccl", "cuda:2")),
        ((None, "cuda:1", 2, 4), ("cpu:gloo,cuda:nccl", "cuda:1")),
        ((None, "cuda", 3, 4), ("cpu:gloo,cuda:nccl", "cuda:3")),
        ((None, 1, 3, 4), ("cpu:gloo,cuda:nccl", "cuda:1")),
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
    ("arguments", "sentence"),
    [
        (
            (None, "cuda:4", 2, 4),
            "device 'cuda:4' does not exist: torch sees 4 of them on this host; use 'cuda:3'",
        ),
        (
            ("nccl", "cpu", 2, 4),
            (
                "backend 'nccl' is for tensors on cuda, and device is 'cpu'; leave one of them "
                "out, or give backend 'cpu:gloo,cuda:nccl'"
            ),
        ),
        (
            (None, None, None, None),
            (
                "each rank needs a device of its own, and nothing tells which of the 4 of this "
                "host this rank is to have; set LOCAL_RANK, or give join() local_rank= or device="
            ),
        ),
        (
            (None, None, 7, 8),
            (
                "8 ranks on this host need a device each, and it shows 4 of 'cuda'; use backend "
                "'gloo', or fewer ranks"
            ),
        ),
        (
            (None, None, 5, 2),  # the launcher counts otherwise: this is the sixth here
            (
                "6 ranks on this host need a device each, and it shows 4 of 'cuda'; use backend "
                "'gloo', or fewer ranks"
            ),
        ),
    ],
)
def test_devices_that_are_not_there(arguments, sentence):
    with pytest.raises(LaunchError, match=f"^{re.escape(sentence)}$"):
        devices.choose(*arguments)


# A number alone is one of the devices that the host has, whichever kind torch names first.
def test_a_number_of_another_kind(monkeypatch):
    none, two = FakeDevices(0), FakeDevices(2)
    kinds = {"xpu": two}
    monkeypatch.setattr(torch, "get_device_module", lambda kind: kinds.get(kind, none))
    monkeypatch.setattr("hypercomm.process_groups.torch_internals.why_unavailable", lambda _: None)
    assert devices.choose(None, 1, 0, 2) == ("cpu:gloo,xpu:xccl", torch.device("xpu:1"))
    assert devices.choose(None, "xpu", 1, 2) == ("cpu:gloo,xpu:xccl", torch.device("xpu:1"))
    assert devices.choose(None, None, 1, 2) == ("cpu:gloo,xpu:xccl", torch.device("xpu:1"))
    with pytest.raises(LaunchError, match=r"^device 2 does not exist: torch sees 2 of them on"):
        devices.choose(None, 2, 0, 2)
    kinds.clear()
    with pytest.raises(LaunchError, match=r"^device 1 does not exist: torch sees none on"):
        devices.choose(None, 1, 0, 2)


# torch names a backend for Apple's GPUs that takes none of their tensors.
@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("device", ["mps", "mps:0", torch.device("mps")])
def test_a_device_without_a_backend(device):
    words = "torch.distributed moves no tensors that are on 'mps'|torch has no backend for 'mps'"
    with pytest.raises(LaunchError, match=words):
        devices.choose(None, device, 0, 1)


# In a live job a kind alone means the device that this rank has, where nothing tells its number.
@pytest.mark.usefixtures("four_gpus")
def test_the_kind_of_a_live_device(monkeypatch):
    monkeypatch.setattr(devices, "device_of_world", lambda _: torch.device("cuda:3"))
    with fake_world(4, rank=1):
        assert join(device="cuda").device == join(device="cuda:3").device == torch.device("cuda:3")
        with pytest.raises(
            LaunchError, match=r"device='cuda:2' contradicts what is there, 'cuda:3'"
        ):
            join(device="cuda:2")


# The device is made the current one, WORLD is bound to it, and a failure undoes that.
def test_the_current_device(four_gpus, monkeypatch):
    calls = []

    def init_process_group(*words, **options):
        calls.append((four_gpus.current, words, options["device_id"]))
        raise RuntimeError("no GPU\nhere")

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with pytest.raises(JoinError, match=r"^rank 0 of 1 on .* could not join .*: no GPU here$"):
        join(rank=0, size=1, local_rank=2)
    assert calls == [(2, ("cpu:gloo,cuda:nccl",), torch.device("cuda:2"))]
    assert four_gpus.current == 0


# What join() adds to torch's own initialisation, of four gloo ranks, in turns with it.
@pytest.mark.alone
@pytest.mark.slow
def test_what_it_costs():
    found = run_ranks(join_ranks.costs, 4, args=(free_port(), 6), timeout=120)
    by_hand, ours = (
        statistics.median(map(max, zip(*times, strict=True))) for times in zip(*found, strict=True)
    )
    print(f"torch {1e3 * by_hand:.1f} ms, join() {1e3 * ours:.1f} ms")
    assert ours - by_hand < 0.05
