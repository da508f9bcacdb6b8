"""join() and `hypercomm check` under the launchers themselves, where they are installed."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from one_node_slurm import one_node_slurm, program, why_not
from ports import free_port

from hypercomm.launchers import VARIABLES

pytestmark = pytest.mark.clients

PROGRAM = """
import json, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import hypercomm

def joined():
    with hypercomm.join(timeout=timedelta(seconds=60)) as job:
        tensors = {dim: torch.tensor([job.rank]) for dim in ("tp", "dp")}
        with hypercomm.HyperCommGrid("tp=2,dp=2") as grid:
            for dim, tensor in tensors.items():
                dist.all_reduce(tensor, group=grid.create_pg(dim))
        dist.barrier()  # nobody leaves while another, which is slow, still connects to it
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "1"))
        if "--die" in sys.argv and attempt == 0:
            os._exit(3) if job.rank == 1 else time.sleep(60)
    sums = [int(tensor) for tensor in tensors.values()]
    place = [job.launcher, job.rank, job.size, job.local_rank, job.local_size]
    return {"place": place, "at": [job.address, job.port], "sums": sums}

sys.stdout.write(json.dumps(joined()) + "\\n")  # in one piece: all ranks write here
sys.stdout.flush()
"""

RUN = [sys.executable, "-c", PROGRAM]
CHECK = [sys.executable, "-m", "hypercomm", "check", "tp=2,dp=2", "--json", "--groups", "tp,dp"]


def mpi(sign, *candidates):
    """The program that starts ranks for an MPI; skips where it is not installed."""
    for path in filter(None, map(shutil.which, candidates)):
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if sign in done.stdout:
            return path
    return pytest.skip(f"{candidates} is not installed")


@pytest.fixture
def open_mpi():
    path = mpi("Open", "mpirun.openmpi", "mpirun")
    return [path, "--allow-run-as-root", "--oversubscribe", "-n", "4"]


@pytest.fixture
def mpich():
    path = mpi("HYDRA", "mpiexec.hydra", "mpiexec")
    return [path, "-genv", "MASTER_PORT", str(free_port()), "-n", "4"]


@pytest.fixture
def torchrun(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["--standalone", "--max-restarts", "1", "--monitor-interval", "0.2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", *options]
    return [*command, str(tmp_path / "program.py")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with one_node_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def started(command, environment=None):
    """Run a launcher's command, in an environment that no other launcher has been in."""
    known = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    known |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    known |= {name: text for name, text in (environment or {}).items() if name == "SLURM_CONF"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=known
    )


def check_joined(done, launcher):
    """Four ranks of one host have met, and have summed over their groups."""
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = sorted(lines, key=lambda rank: rank["place"][1])
    places = [rank["place"] for rank in found]
    assert [place[:3] for place in places] == [[launcher, rank, 4] for rank in range(4)]
    assert sorted(place[3] for place in places) == [0, 1, 2, 3]  # Open MPI 5 orders by core
    assert {place[4] for place in places} == {None if launcher == "srun" else 4}
    # tp=2,dp=2: groups 0 1, 2 3 and 0 2, 1 3
    assert [rank["sums"] for rank in found] == [[1, 2], [1, 4], [5, 2], [5, 4]]
    assert len({tuple(rank["at"]) for rank in found}) == 1


def check_checked(done):
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["layout"], answer["ok"]) == ("tp=2,dp=2", True)


def test_open_mpi(open_mpi):
    check_joined(started([*open_mpi, *RUN]), "Open MPI")
    check_checked(started([*open_mpi, *CHECK]))


def test_mpich(mpich):
    check_joined(started([*mpich, *RUN]), "MPICH")
    check_checked(started([*mpich, *CHECK]))


# Ranks meet in the store of torchrun's agent, and again when a rank has died and torchrun starts
# all of them anew.
@pytest.mark.parametrize("words", [(), ("--die",)])
def test_torchrun(words, torchrun):
    check_joined(started([*torchrun, *words]), "torchrun")


# In a step, a grid that is built before the job is joined knows its size and its rank, too.
def test_slurm(slurm):
    srun = [program("srun"), "-n", "4"]
    check_joined(started([*srun, *RUN], slurm), "srun")
    check_checked(started([*srun, *CHECK], slurm))
    text = "from hypercomm import HyperCommGrid as G; print(G('tp=2,dp=-1').coords())"
    done = started([*srun, sys.executable, "-c", text], slurm)
    assert sorted(done.stdout.splitlines()) == sorted(
        str({"tp": rank % 2, "dp": rank // 2}) for rank in range(4)
    )


# Inside a SLURM job a launcher's own variables describe the ranks, and not those of SLURM.
def test_launchers_in_slurm(slurm, open_mpi, torchrun):
    check_joined(started([program("salloc"), "-n", "4", *open_mpi, *RUN], slurm), "Open MPI")
    check_joined(started([program("srun"), "-n", "1", *torchrun], slurm), "torchrun")


# In an allocation nothing was launched, and a world of one is an error; its steps, one after the
# other, use different ports.
def test_allocations(slurm, tmp_path):
    script, out, log = tmp_path / "batch.sh", tmp_path / "out", tmp_path / "log"
    (tmp_path / "program.py").write_text(PROGRAM)
    step = f"srun -n 4 {sys.executable} {tmp_path}/program.py"
    alone = f"{sys.executable} -c 'import hypercomm; hypercomm.join()'"
    script.write_text(f"#!/bin/sh\n{alone}\n{step}\n{step}\n")
    batch = ["-n", "4", "--wait", "-o", str(out), "-e", str(log), str(script)]
    started([program("sbatch"), *batch], slurm)
    assert "LaunchError: SLURM_NTASKS=4 is set, but srun did not start" in log.read_text()
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(rank["place"][1] for rank in found) == [0, 0, 1, 1, 2, 2, 3, 3], log.read_text()
    assert len({rank["at"][1] for rank in found}) == 2
