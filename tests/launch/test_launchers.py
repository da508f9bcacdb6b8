"""What a launcher leaves in the environment, and the job that is read from it."""

import random

import pytest

from hypercomm.errors import LaunchError
from hypercomm.launch.launchers import LAUNCHERS, VARIABLES, find_job
from hypercomm.launch.slurm import first_host, port_of_step
from hypercomm.launch.worlds import told, why_not_told

ELASTIC = {"TORCHELASTIC_RUN_ID": "none"}
PLACE = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


def by_hand(rank, size, local=None):
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local}
    return {name: str(value) for name, value in names.items() if value is not None}


def open_mpi(rank, size, local):
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}


def pmi(rank, size, **more):
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), **more}


def step(rank, size, local, **more):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "1234567",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        **more,
    }


MV2 = {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
FLUX = {"FLUX_TASK_RANK": "2", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"}
JSM = {"JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1"}
PALS = {"PALS_RANKID": "2", "PALS_LOCAL_RANKID": "1"}

MPIRUN = open_mpi(2, 4, 2) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "12"}

JOBS = [
    (ELASTIC | by_hand(2, 4, 1) | PLACE, "torchrun", 2, 4, 1, ("node7", 29500)),
    (by_hand(2, 4) | PLACE, "the environment", 2, 4, None, ("node7", 29500)),
    (open_mpi(2, 4, 1) | PLACE | {"PMIX_RANK": "2"}, "Open MPI", 2, 4, 1, ("node7", 29500)),
    (pmi(2, 4, MPI_LOCALRANKID="1") | PLACE, "MPICH", 2, 4, 1, ("node7", 29500)),
    (pmi(2, 4) | PALS | PLACE, "MPICH", 2, 4, 1, ("node7", 29500)),
    (MV2 | PLACE, "MVAPICH2", 2, 4, 1, ("node7", 29500)),
    (FLUX | PLACE, "Flux", 2, 4, 1, ("node7", 29500)),
    (JSM | PLACE, "jsrun", 2, 4, 1, ("node7", 29500)),
    # 1234567 % 10000 = 4567
    (step(2, 4, 1), "srun", 2, 4, 1, ("gpu07", 24567)),
    (step(2, 4, 1) | PLACE, "srun", 2, 4, 1, ("node7", 29500)),
    (step(2, 4, 1, PMIX_RANK="2", SLURM_STEP_ID="3"), "srun", 2, 4, 1, ("gpu07", 28324)),
    (step(2, 9, 1, SLURM_STEP_NUM_TASKS="4"), "srun", 2, 4, 1, ("gpu07", 24567)),
    (by_hand(2, 4) | step(2, 4, 1), "the environment", 2, 4, 1, ("gpu07", 24567)),
    (pmi(2, 4) | step(2, 4, 1), "MPICH", 2, 4, 1, ("gpu07", 24567)),  # srun --mpi=pmi2
    # what started the inner launcher tells of its daemons
    (ELASTIC | by_hand(9, 16, 1) | PLACE | step(1, 2, 0), "torchrun", 9, 16, 1, ("node7", 29500)),
    (ELASTIC | by_hand(9, 16, 1) | PLACE | {"PMI_SIZE": "2"}, "torchrun", 9, 16, 1, None),
    (open_mpi(9, 16, 1) | PLACE | step(1, 2, 0), "Open MPI", 9, 16, 1, ("node7", 29500)),
    (pmi(9, 16, PMIX_RANK="1") | PLACE | step(1, 2, 0), "MPICH", 9, 16, None, ("node7", 29500)),
    (ELASTIC | by_hand(3, 4, 3) | PLACE | {"PET_NNODES": "2"}, "torchrun", 3, 4, 3, None),
    (by_hand(1, 2) | PLACE | {"PET_NNODES": "2"}, "Kubeflow", 1, 2, None, ("node7", 29500)),
    (by_hand(5, 8, 5) | PLACE | step(0, 1, 0), "the environment", 5, 8, 5, ("node7", 29500)),
    (by_hand(0, 1), "the environment", 0, 1, None, None),
    (step(0, 1, 0), "srun", 0, 1, 0, ("gpu07", 24567)),
    # on one host rank 0 is here; what mpirun calls this run gives a port: crc32(b"12") = 1330857165
    (MPIRUN, "Open MPI", 2, 4, 2, ("127.0.0.1", 27165)),
    (MPIRUN | PLACE, "Open MPI", 2, 4, 2, ("node7", 29500)),
    (by_hand(2, 4) | {"OMPI_COMM_WORLD_RANK": " "} | PLACE, "the environment", 2, 4, None, None),
]


@pytest.mark.torch_free
@pytest.mark.parametrize(("environment", "name", "rank", "size", "local", "place"), JOBS)
def test_jobs(environment, name, rank, size, local, place):
    job = find_job(environment)
    assert (job.launcher.name, job.rank, job.size, job.local_rank) == (name, rank, size, local)
    if place is not None:
        assert job.meeting_place() == place


ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-2]"}


# No launcher, or one that has started nothing of several ranks.
@pytest.mark.torch_free
@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PATH": "/bin", "MASTER_PORT": "29500", "LOCAL_RANK": "0"},
        ALLOCATION | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"},
        {"RANK": "", "WORLD_SIZE": " "},
    ],
)
def test_no_job(environment):
    assert find_job(environment) is None


# What cannot be right is refused with the variables and their values.
@pytest.mark.torch_free
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is missing, and RANK=0 says that a launcher has started"),
        ({"WORLD_SIZE": "8"}, "RANK is missing, and WORLD_SIZE=8 says"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is missing, and OMPI_COMM_WORLD_"),
        ({"PMI_RANK": "2"}, "PMI_SIZE is missing, and PMI_RANK=2 says"),
        ({"PMIX_RANK": "2"}, "RANK and WORLD_SIZE are missing, and PMIX_RANK=2 says"),
        ({"MASTER_ADDR": "a"}, "RANK and WORLD_SIZE are missing, and MASTER_ADDR=a says"),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, "SLURM_NTASKS=8, and SLURM_STEP_ID names no"),
        (
            ALLOCATION | {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
            "this is inside an allocation, not in a step of it; start with srun, or unset SLURM_",
        ),
        (ALLOCATION | {"SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_NUM_NODES=2, and SLURM_STEP_ID"),
        (
            step(0, 8, 0, SLURM_STEP_ID=str(2**32 - 6)),  # the interactive step of salloc
            "SLURM_NTASKS=8, and SLURM_STEP_ID names no step",
        ),
        ({"PET_NNODES": "4"}, "PET_NNODES=4, and there is no RANK: this is a pod of a PyTorchJob"),
        (
            by_hand(0, 8) | open_mpi(1, 4, 1),
            (
                "RANK=0 and WORLD_SIZE=8, of the environment, contradict OMPI_COMM_WORLD_RANK=1 "
                "and OMPI_COMM_WORLD_SIZE=4, of Open MPI; unset those that are left from another"
            ),
        ),
        (by_hand(0, 1) | step(3, 8, 3), "WORLD_SIZE=1, of the environment, contradict SLURM_"),
        (open_mpi(1, 4, 1) | pmi(2, 4), "of Open MPI, contradict PMI_RANK=2 and PMI_SIZE=4, "),
        (open_mpi(1, 4, 1) | {"PMIX_RANK": "2"}, "contradict PMIX_RANK=2; unset those that are"),
        (
            by_hand(1, 2) | {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"},
            "RANK=1 and WORLD_SIZE=2 count pods of a PyTorchJob, and PET_NPROC_PER_NODE=8 ranks",
        ),
        ({"RANK": 0, "WORLD_SIZE": "4"}, "RANK must be a string, as in os.environ, got 0"),
        (by_hand(4, 4), "RANK=4 and WORLD_SIZE=4 contradict each other: the last rank would be 3"),
        (by_hand(-1, 4), "the environment's RANK must be an integer of at least 0, got '-1'"),
        (by_hand("x", 4), "RANK must be an integer of at least 0, got 'x'"),
        (by_hand(0, 0), "WORLD_SIZE must be an integer of at least 1, got '0'"),
        (by_hand("9" * 5000, 4), "RANK must be an integer of at least 0, got '999"),
        (by_hand(0, 4, "gpu0"), "LOCAL_RANK must be an integer of at least 0, got 'gpu0'"),
        (
            by_hand(0, 4, 4) | {"LOCAL_WORLD_SIZE": "4"},
            "LOCAL_RANK=4 and LOCAL_WORLD_SIZE=4 contradict each other: the last rank of the host",
        ),
        (
            by_hand(0, 4) | {"LOCAL_WORLD_SIZE": "0"},
            "LOCAL_WORLD_SIZE must be an integer of at least 1, got '0'",
        ),
        (by_hand(0, 4) | {"MASTER_PORT": "0"}, "MASTER_PORT must be an integer of 1 to 65535"),
        (by_hand(0, 4) | {"MASTER_PORT": "70000"}, "of 1 to 65535, got '70000'"),
    ],
)
def test_refused(environment, message):
    with pytest.raises(LaunchError) as caught:
        find_job(environment)
    assert message in str(caught.value)


# Where rank 0 is not known, the error says what is missing and how this launcher is given it.
@pytest.mark.torch_free
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            by_hand(1, 4),
            "MASTER_ADDR and MASTER_PORT are missing: RANK=1 and WORLD_SIZE=4 say that",
        ),
        (by_hand(1, 4) | {"MASTER_ADDR": "a"}, "MASTER_PORT is missing: RANK=1 and"),
        (open_mpi(1, 4, 1), "give mpirun -x MASTER_ADDR=HOST"),
        (pmi(1, 4), "give mpiexec -genv MASTER_ADDR HOST"),
        (by_hand(1, 4) | {"PET_NNODES": "4"}, "its ranks are pods: start torchrun in each"),
        (step(1, 4, 1, SLURM_DISTRIBUTION="arbitrary"), "MASTER_ADDR is missing: SLURM_PROCID=1"),
    ],
)
def test_no_meeting_place(environment, message):
    job = find_job(environment)
    with pytest.raises(LaunchError) as caught:
        job.meeting_place()
    assert message in str(caught.value)
    assert f"this is rank 1 of {job.size} ranks" in str(caught.value)


# Whatever the variables hold, there is a job, none, or a refusal.
@pytest.mark.torch_free
def test_any_values():
    names = sorted(VARIABLES)
    assert {name for row in LAUNCHERS for name in row.variables()} < set(names)
    values = ["", "0", "1", "8", "-1", "x", "²", "[", "4294967290", "a[1-"]
    draw = random.Random(3)
    for _ in range(2000):
        chosen = draw.sample(names, draw.randrange(1, 9))
        try:
            job = find_job({name: draw.choice(values) for name in chosen})
            if job is not None:
                assert 0 <= job.rank < job.size
                job.meeting_place()
        except LaunchError as error:
            assert any(name in str(error) for name in names)  # noqa: PT017


# How many ranks the host of a step has, as its variables say.
@pytest.mark.torch_free
@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ({"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"}, 4),
        ({"SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "8(x2),3"}, 3),
        ({"SLURM_NODEID": "1", "SLURM_TASKS_PER_NODE": "8(x2),3"}, 8),
        ({"SLURM_NODEID": "3", "SLURM_TASKS_PER_NODE": "8(x2),3"}, None),
        ({"SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "eight"}, None),
        ({"SLURM_TASKS_PER_NODE": "8"}, None),
    ],
)
def test_ranks_on_a_host(more, ranks):
    assert find_job(step(2, 19, 1, **more)).local_size == ranks


# A world size, or a rank, of a process that has not joined yet: one may be set without the other.
@pytest.mark.torch_free
@pytest.mark.parametrize(
    ("environment", "size", "rank"),
    [
        ({}, None, None),
        ({"WORLD_SIZE": "4096"}, 4096, None),
        ({"RANK": "3"}, None, 3),
        (by_hand(2, 4), 4, 2),
        (MPIRUN, 4, 2),
        (step(2, 4, 1), 4, 2),
        (step(2, 4, 1) | {"WORLD_SIZE": "4"}, 4, 2),
        (step(0, 1, 0) | {"WORLD_SIZE": "64"}, 64, 0),  # srun --pty bash, and a plan in there
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}, 4, None),
        (ALLOCATION | {"SLURM_NTASKS": "8"}, None, None),
    ],
)
def test_told(environment, size, rank):
    found = [told(variable, environment) for variable in ("WORLD_SIZE", "RANK")]
    assert [one and one.number for one in found] == [size, rank]


@pytest.mark.torch_free
def test_told_otherwise():
    with pytest.raises(LaunchError) as caught:
        told("WORLD_SIZE", step(2, 4, 1) | {"WORLD_SIZE": "8"})
    assert str(caught.value) == (
        "WORLD_SIZE=8, of the environment, contradicts SLURM_PROCID=2 and SLURM_NTASKS=4, of srun; "
        "unset those that are left from another job"
    )
    assert "inside an allocation" in why_not_told(ALLOCATION | {"SLURM_NTASKS": "8"})
    assert why_not_told({"MASTER_ADDR": "a", "WORLD_SIZE": "8"}) is None


# A step id that is no number of a step is an error of the launch, however long it is.
def test_long_step_id():
    with pytest.raises(LaunchError, match="SLURM_STEP_ID"):
        find_job(step(0, 1, 0, SLURM_STEP_ID="9" * 5000))


# The first host of a list in each form that srun writes.
@pytest.mark.torch_free
@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[001-128]", "n001"),
        ("n[7,9-12]-ib,m1", "n7-ib"),
        ("r[1-2]n[3-4]", "r1n3"),
        ("gpu-a-01,gpu-a-02", "gpu-a-01"),
        ("", ""),
    ],
)
def test_first_host(hosts, first):
    assert first_host(hosts) == first


# All ranks of a step work out one port, below those that Linux gives out; other steps another.
@pytest.mark.torch_free
def test_ports():
    ports = [port_of_step(job, number) for job in (0, 9999, 2**31) for number in range(40)]
    assert all(20_000 <= port < 30_000 for port in ports)
    for job in (5, 12345):
        assert len({port_of_step(job, number) for number in range(200)}) == 200
