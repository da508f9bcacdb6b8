"""`hypercomm check` on clusters: in a launched job, and with views."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
from launched import rank_free
from ports import free_port
from test_cli import hypercomm

from hypercomm import RankLayout
from hypercomm.cli import main
from hypercomm.cli.check import Outcome
from hypercomm.cli.groups import Key
from hypercomm.cli.probe import Request


# --groups chooses, of views too; --json prints one object. Groups of one have no figures.
@pytest.mark.long
def test_views():
    arguments = ("--nproc", "4", "--view", "moe:ep=4,pp=1", "--groups", "dp,ep,cp", "--json")
    done = hypercomm("check", "tp=2,cp=1,dp=-1", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert (answer["ok"], answer["ranks"], answer["failed"]) == (True, 4, None)
    assert answer["views"] == {"moe": "ep=4,pp=1"}
    *rows, alone = answer["groups"]
    shape = [(row["view"], row["dims"], row["groups"], row["size"]) for row in rows]
    assert shape == [(None, ["dp"], 2, 2), ("moe", ["ep"], 1, 4)]
    for row in rows:
        assert 0 < row["creation_s"] < 10
        assert 0 < row["latency_s"] < 10
        assert row["bandwidth_bytes_per_s"] > 0
        assert row["slowest"]["host"] == socket.gethostname()
        assert row["wrong"] == []
    assert (alone["dims"], alone["size"], alone["latency_s"]) == (["cp"], 1, None)


def figures(rank, seconds):
    usual = {"creation": 0.001, "latency": 1e-4, "bandwidth": 1e6 / seconds, "host": f"h{rank}"}
    return usual | {"wrong": ""}


# The table shows the slowest rank, with its host if there are several.
def test_the_slowest_rank(capsys):
    key = Key(None, ("tp",))
    outcome = Outcome(Request(RankLayout.parse("tp=2"), [key]))
    with outcome.progress():
        for rank, found in enumerate([figures(0, 1e-3), figures(1, 4e-3)]):
            outcome.record((rank, key, "creation"))
            outcome.record((rank, key, found))
    assert outcome.show(as_json=False) == 0
    assert re.search(r"250 MB/s +rank 1 on h1 +ok\n", capsys.readouterr().out)


JOB = {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
BROKEN = "cannot be loaded (no such device)"


# If a launcher's variables describe a job that cannot be joined, nothing is started. Of ranks
# that would say the same, rank 0 does.
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, "inside an allocation, not in a step of it"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is missing"),
        ({"RANK": "0", "WORLD_SIZE": "8"}, "unknown MASTER_ADDR and MASTER_PORT"),
        (
            {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "tp=2 needs 2 ranks; the job has 8 (RANK=0 and WORLD_SIZE=8 of the environment)",
        ),
        ({"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "8"}, None),
        # what is wrong with a host is said by the first rank on it
        (JOB | {"RANK": "0"}, "rank 0 on HOST: backend 'gloo' cannot be loaded (no such device)"),
        (JOB | {"RANK": "1"}, "rank 1 on HOST: backend 'gloo' cannot be"),
        (JOB | {"RANK": "1", "LOCAL_RANK": "0"}, "rank 1 on HOST: backend 'gloo' cannot be"),
        (JOB | {"RANK": "1", "LOCAL_RANK": "1"}, None),
    ],
)
def test_a_job_that_cannot_be_joined(environment, message, monkeypatch, capsys):
    for name in set(rank_free()) ^ set(os.environ):
        monkeypatch.delenv(name)
    for name, value in (environment | {"TORCH_CPP_LOG_LEVEL": "FATAL"}).items():
        monkeypatch.setenv(name, value)
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr(
        "hypercomm.process_groups.torch_internals.why_unavailable", lambda _: BROKEN
    )
    assert main(["check", "tp=2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert (message in err.replace(socket.gethostname(), "HOST")) if message else err == ""
    assert message or sum(waited) > 1


def job_of(ranks, *arguments):
    """Start the ranks of a job as a launcher would, each with its variables."""
    command = [sys.executable, "-m", "hypercomm", "check", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen(command, env=rank_free() | {"GLOO_SOCKET_IFNAME": "lo"} | rank, **pipes)
        for rank in ranks
    ]
    return [(*process.communicate(timeout=60), process.wait()) for process in started]


# Ranks of mpirun and of srun join their job; rank 0 shows the result, the others are silent.
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_joining(launcher):
    port = str(free_port())
    if launcher == "mpirun":
        ranks = [
            {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for rank in range(2)
        ]
    else:
        ranks = [
            {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
            | {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost"}
            | {"MASTER_PORT": port}
            for rank in range(2)
        ]
    (out, err, code), (silent, silent_err, other) = job_of(ranks, "tp=-1", "--json")
    assert (code, other) == (0, 0), err + silent_err
    answer = json.loads(out)
    assert (answer["layout"], answer["ok"], silent) == ("tp=2", True, "")


# A rank that never comes is waited for as long as --timeout says, and the address is named.
@pytest.mark.slow
def test_a_rank_that_never_joins():
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    [(out, err, code)] = job_of(
        [rank | {"MASTER_PORT": str(free_port())}], "tp=2", "--timeout", "2"
    )
    assert code == 1, err
    assert "failed after 0 of 1: rank 1 of 2 on " in out
    assert " at 127.0.0.1, port " in out
    assert "Traceback" not in err


# Under torchrun a wrong size is said once, by rank 0.
@pytest.mark.clients
def test_a_wrong_size_under_torchrun():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "3",
            "-m",
            "hypercomm",
            "check",
            "tp=2",
        ],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        env=rank_free(),
    )
    assert done.returncode != 0
    assert done.stderr.count("tp=2 needs 2 ranks; the job has 3 (RANK=0 and WORLD_SIZE=3") == 1
    assert done.stderr.count("hypercomm: ") == 1
