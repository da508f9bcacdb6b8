"""Test the jobs that the variables of launchers describe."""

import random

import pytest

from hypercomm.errors import LaunchError
from hypercomm.job_environment import VARIABLES, find_job, find_number

pytestmark = pytest.mark.torch_free

ELASTIC = {"TORCHELASTIC_RUN_ID": "none"}
PLACE = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-2]"}


def by_hand(rank, size, local=None):
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local}
    return {name: str(value) for name, value in names.items() if value is not None}


def open_mpi(rank, size, local, **more):
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | more


def pmi(rank, size, **more):
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), **more}


def step(rank, size, local, **more):
    numbers = {"SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_LOCALID": local}
    job = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1234567", "SLURM_STEP_NODELIST": "gpu[07-08]"}
    return {name: str(value) for name, value in numbers.items()} | job | more


MPIRUN = open_mpi(2, 4, 2, OMPI_COMM_WORLD_LOCAL_SIZE="4", PMIX_NAMESPACE="12")
NODE7 = ("node7", 29500)


# The first launcher with complete variables is used. If launchers agree, the variables of one
# launcher can complete the variables of another launcher.
@pytest.mark.parametrize(
    ("environment", "name", "rank", "size", "local", "place"),
    [
        (ELASTIC | by_hand(2, 4, 1) | PLACE, "torchrun", 2, 4, 1, NODE7),
        (by_hand(2, 4) | PLACE, "the environment", 2, 4, None, NODE7),
        (open_mpi(2, 4, 1) | PLACE, "Open MPI", 2, 4, 1, NODE7),
        (pmi(2, 4, MPI_LOCALRANKID="1") | PLACE, "MPICH", 2, 4, 1, NODE7),
        # 1234567 % 10000 = 4567
        (step(2, 4, 1), "srun", 2, 4, 1, ("gpu07", 24567)),
        (step(2, 4, 1) | PLACE, "srun", 2, 4, 1, NODE7),
        (step(2, 4, 1, SLURM_STEP_ID="3"), "srun", 2, 4, 1, ("gpu07", 28324)),
        (step(2, 9, 1, SLURM_STEP_NUM_TASKS="4"), "srun", 2, 4, 1, ("gpu07", 24567)),
        (by_hand(2, 4) | step(2, 4, 1), "the environment", 2, 4, 1, ("gpu07", 24567)),
        (pmi(2, 4) | step(2, 4, 1), "MPICH", 2, 4, 1, ("gpu07", 24567)),  # srun --mpi=pmi2
        # srun starts the daemons of the launcher, so SLURM's variables describe these daemons
        (ELASTIC | by_hand(9, 16, 1) | PLACE | step(1, 2, 0), "torchrun", 9, 16, 1, NODE7),
        (open_mpi(9, 16, 1) | PLACE | step(1, 2, 0), "Open MPI", 9, 16, 1, NODE7),
        (pmi(9, 16) | PLACE | step(1, 2, 0), "MPICH", 9, 16, None, NODE7),
        (by_hand(5, 8, 5) | PLACE | step(0, 1, 0), "the environment", 5, 8, 5, NODE7),
        # On one host, rank 0 is local. The port is derived from the name of this mpirun:
        # crc32(b"12") = 1330857165
        (MPIRUN, "Open MPI", 2, 4, 2, ("127.0.0.1", 27165)),
        ({"RANK": " "} | open_mpi(2, 4, 1) | PLACE, "Open MPI", 2, 4, 1, NODE7),
    ],
)
def test_jobs_of_launchers(environment, name, rank, size, local, place):
    job = find_job(environment)
    assert (job.launcher, job.rank, job.size, job.local_rank) == (name, rank, size, local)
    assert job.rendezvous() == place


# Without a launcher, or in an allocation for one rank, there is no job.
def test_environment_without_a_job():
    assert (
        find_job({"MASTER_PORT": "29500", "LOCAL_RANK": "0", "RANK": "", "WORLD_SIZE": " "}) is None
    )
    assert find_job(ALLOCATION | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


# The error of an unusable environment names the variables with their values, and is short.
@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE is missing", "RANK='0'"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_RANK is missing"]),
        ({"MASTER_ADDR": "a"}, ["RANK and WORLD_SIZE are missing", "MASTER_ADDR='a'"]),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, ["SLURM_NTASKS=8", "start it with srun"]),
        (
            ALLOCATION | {"SLURM_JOB_NUM_NODES": "2"},
            ["SLURM_JOB_NUM_NODES=2", "start it with srun"],
        ),
        # the interactive step of salloc
        (step(0, 8, 0, SLURM_STEP_ID=str(2**32 - 6)), ["SLURM_NTASKS=8", "start it with srun"]),
        (by_hand(0, 8) | open_mpi(1, 4, 1), ["WORLD_SIZE=8", "OMPI_COMM_WORLD_SIZE=4", "unset"]),
        (by_hand(0, 1) | step(3, 8, 3), ["WORLD_SIZE=1", "SLURM_NTASKS=8", "unset"]),
        (by_hand(4, 4), ["RANK=4 and WORLD_SIZE=4", "a job of 4 ranks has ranks 0 to 3"]),
        (by_hand(-1, 4), ["RANK must be an integer", "'-1'"]),
        (by_hand("9" * 5000, 4), ["RANK must be an integer", "'999"]),
        (step(0, 1, 0, SLURM_STEP_ID="9" * 5000), ["SLURM_STEP_ID must be an integer"]),
        (step(0, 1, 0, SLURM_JOB_ID="9" * 5000), ["SLURM_JOB_ID must be an integer"]),
        # the address of rank 0 is unknown
        (by_hand(1, 4) | {"MASTER_ADDR": "a"}, ["MASTER_ADDR=a, MASTER_PORT=None", "rank 1 of 4"]),
        (step(1, 4, 1, SLURM_DISTRIBUTION="arbitrary"), ["MASTER_ADDR=None"]),
        (by_hand(0, 4) | {"MASTER_PORT": "70000"}, ["MASTER_PORT", "1 to 65535", "'70000'"]),
    ],
)
def test_unusable_environments(environment, parts):
    with pytest.raises(LaunchError) as caught:
        find_job(environment).rendezvous()
    assert [part for part in parts if part not in str(caught.value)] == []
    assert len(str(caught.value)) < 400


# For any values, there is a job, no job, or a LaunchError that names a variable.
def test_random_values_give_a_job_or_an_error():
    names = sorted(VARIABLES)
    values = ["", "0", "1", "1", "8", "8", "8", "-1", "x", "²", "[", "4294967290", "a[1-"]
    draw = random.Random(3)
    jobs = 0
    for _ in range(2000):
        chosen = draw.sample(names, draw.randrange(1, 9))
        try:
            job = find_job({name: draw.choice(values) for name in chosen})
            if job is not None:
                jobs += 1
                assert 0 <= job.rank < job.size
                job.rendezvous()
        except LaunchError as error:
            assert any(name in str(error) for name in names)  # noqa: PT017
    assert jobs > 5


# find_number() returns the world size or the rank of a process that has not joined yet. If only
# WORLD_SIZE or RANK is set, that value is used, even inside a SLURM step (srun --pty bash).
@pytest.mark.parametrize(
    ("environment", "size", "rank"),
    [
        ({}, None, None),
        ({"WORLD_SIZE": "4096"}, 4096, None),
        ({"RANK": "3"}, None, 3),
        (by_hand(2, 4), 4, 2),
        (step(2, 4, 1) | {"WORLD_SIZE": "4"}, 4, 2),
        (step(0, 1, 0) | {"WORLD_SIZE": "64"}, 64, 0),
        (ELASTIC | {"WORLD_SIZE": "4"}, 4, None),
    ],
)
def test_world_size_and_rank_before_joining(environment, size, rank):
    found = [find_number(variable, environment) for variable in ("WORLD_SIZE", "RANK")]
    assert [one and one[0] for one in found] == [size, rank]


# The address is the first host of a node list, in each form that srun writes.
def test_first_host_of_a_node_list():
    lists = ["n1", "gpu-a-01,gpu-a-02", "n[001-128]", "n[7,9-12]-ib,m1", "r[1-2]n[3-4]"]
    found = [find_job(step(1, 4, 1, SLURM_STEP_NODELIST=hosts)).address for hosts in lists]
    assert found == ["n1", "gpu-a-01", "n001", "n7-ib", "r1n3"]


# All ranks of a step derive the same port, below the range that Linux assigns. Different steps
# derive different ports.
@pytest.mark.parametrize("job", ["0", "9999", "2147483648"])
def test_port_of_a_step(job):
    steps = [step(1, 4, 1, SLURM_JOB_ID=job, SLURM_STEP_ID=str(number)) for number in range(200)]
    ports = {find_job(environment).port for environment in steps}
    assert len(ports) == 200
    assert all(20_000 <= one < 30_000 for one in ports)
