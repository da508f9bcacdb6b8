"""join() and `hypercomm check` under the launchers themselves, where they are installed."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from one_node_slurm import one_node_slurm, program, why_not
from ports import free_port
from ranks import join_ranks

from hypercomm.launchers import VARIABLES

pytestmark = pytest.mark.clients

PROGRAM = str(join_ranks.__file__)

# tp=2,dp=2: groups 0 1, 2 3 and 0 2, 1 3
SUMS = [{"tp": 1, "dp": 2}, {"tp": 1, "dp": 4}, {"tp": 5, "dp": 2}, {"tp": 5, "dp": 4}]


def mpi(name, *words):
    """The program that starts ranks for an MPI; skips where it is not installed."""
    for candidate in words[1:]:
        path = shutil.which(candidate)
        if path is None:
            continue
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if words[0] in said.stdout:
            return path
    pytest.skip(f"{name} is not installed")


@pytest.fixture
def open_mpi():
    path = mpi("Open MPI", "Open", "mpirun.openmpi", "mpirun")
    return [path, "--allow-run-as-root", "--oversubscribe", "-n", "4"]


@pytest.fixture
def mpich():
    path = mpi("MPICH", "HYDRA", "mpiexec.hydra", "mpiexec")
    return [path, "-genv", "MASTER_PORT", str(free_port()), "-n", "4"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with one_node_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def started(command, environment=None, seconds=120):
    """Run a launcher's command, in an environment that no other launcher has been in."""
    known = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    paths = [str(Path(PROGRAM).parents[2]), str(Path(PROGRAM).parents[1])]
    known |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    known |= {name: text for name, text in (environment or {}).items() if name == "SLURM_CONF"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=seconds, env=known
    )


def ranks_of(done):
    """The JSON that the ranks have printed, by rank."""
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda rank: rank["rank"])


def check_joined(done, launcher):
    """Four ranks of one host have met, have summed over their groups, and have left."""
    found = ranks_of(done)
    assert [rank["sums"] for rank in found] == SUMS
    size = None if launcher == "srun" else 4  # srun does not set it
    assert [rank["local"] for rank in found] == [[number, size] for number in range(4)]
    assert {rank["launcher"] for rank in found} == {launcher}
    again = "torchrun" if launcher == "the call" else launcher
    assert [rank["again"] for rank in found] == [[again, rank, 4, "gloo"] for rank in range(4)]
    assert len({tuple(rank["place"]) for rank in found}) == 1
    assert all(rank["left"] for rank in found)


CHECK = [sys.executable, "-m", "hypercomm", "check", "tp=2,dp=2", "--json", "--groups", "tp,dp"]


def check_checked(done):
    """`hypercomm check` has looked at every group of the job, and found it as it should be."""
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["layout"], answer["ok"]) == ("tp=2,dp=2", True)


def test_open_mpi(open_mpi):
    check_joined(started([*open_mpi, sys.executable, PROGRAM]), "Open MPI")


def test_check_under_open_mpi(open_mpi):
    check_checked(started([*open_mpi, *CHECK]))


def test_mpich(mpich):
    check_joined(started([*mpich, sys.executable, PROGRAM]), "MPICH")


def test_check_under_mpich(mpich):
    check_checked(started([*mpich, *CHECK]))


def test_slurm(slurm):
    check_joined(started([program("srun"), "-n", "4", sys.executable, PROGRAM], slurm), "srun")


def test_check_under_slurm(slurm):
    check_checked(started([program("srun"), "-n", "4", *CHECK], slurm))


# Inside a SLURM job a launcher's own variables describe the ranks, and not those of SLURM.
def test_open_mpi_in_an_allocation(slurm, open_mpi):
    command = [program("salloc"), "-n", "4", *open_mpi, sys.executable, PROGRAM]
    check_joined(started(command, slurm), "Open MPI")


def test_torchrun_in_a_step(slurm):
    check_joined(started([program("srun"), "-n", "1", *torchrun(), PROGRAM], slurm), "torchrun")


# Consecutive steps of one allocation use different ports. Between them, and in a script of sbatch,
# nothing was launched, and a world of one is an error.
def test_allocations(slurm, tmp_path):
    alone = [sys.executable, "-c", "import hypercomm; hypercomm.join()"]
    done = started([program("salloc"), "-n", "4", *alone], slurm)
    assert done.returncode == 1
    assert "LaunchError: SLURM_NTASKS=4, and SLURM_STEP_ID names no step: this is inside" in (
        done.stderr
    )
    script = tmp_path / "batch.sh"
    step = f"srun -n 4 {sys.executable} {PROGRAM}"
    script.write_text(
        f"#!/bin/sh\n{sys.executable} -c 'import hypercomm; hypercomm.join()'\n{step}\n"
    )
    out, log = tmp_path / "out", tmp_path / "log"
    batch = ["-n", "4", "--wait", "-o", str(out), "-e", str(log), str(script)]
    done = started([program("sbatch"), *batch], slurm)
    assert "SLURM_NTASKS=4, and SLURM_STEP_ID names no step" in log.read_text()
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(rank["rank"] for rank in found) == [0, 1, 2, 3], done.stderr + log.read_text()


# In a step, a grid that is built before the job is joined knows its size and its rank.
def test_a_grid_before_the_job(slurm):
    text = "from hypercomm import HyperCommGrid as G; print(G('tp=2,dp=-1').coords())"
    done = started([program("srun"), "-n", "4", sys.executable, "-c", text], slurm)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(
        str({"tp": rank % 2, "dp": rank // 2}) for rank in range(4)
    )


def torchrun(*options):
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", *options]


# Ranks meet in the store of torchrun's agent, also if rank and size are arguments.
@pytest.mark.parametrize(("words", "by"), [((), "torchrun"), (("told",), "the call")])
def test_torchrun(words, by):
    check_joined(started([*torchrun(), PROGRAM, *words]), by)


# A rank dies; torchrun starts all of them again, and they meet in the store of that attempt.
def test_a_restart(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options = ("--standalone", "--max-restarts", "1", "--monitor-interval", "0.2")
    done = started([*torchrun(*options), PROGRAM, "restarted", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    for attempt in range(2):
        found = [json.loads((tmp_path / f"{attempt}-{rank}.json").read_text()) for rank in range(4)]
        assert found == SUMS


# Actors of Ray are given rank, size and the address of rank 0.
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_actors():
    done = started([sys.executable, str(Path(PROGRAM).with_name("ray_actors.py"))], seconds=240)
    assert done.returncode == 0, done.stderr
    joined = json.loads(done.stdout.splitlines()[-1])
    assert [rank["sums"] for rank in joined] == SUMS
    assert {rank["launcher"] for rank in joined} == {"the call"}
