"""Test `hypercomm check`, on local ranks and as a rank of a launched job."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from processes import launcher_free
from time_limits import scaled_s, wait_until

from hypercomm.tools.check import probe_local

SOON_S = 30
"""An interrupted check ends within this time. A check that ignores Ctrl-C runs for minutes."""

CHECK = [sys.executable, "-m", "hypercomm", "check"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


# --groups selects groups, including groups of views, and --json prints one object. Groups of one
# rank have no timings.
def test_groups_and_views_as_json(in_process):
    arguments = ("--nproc", "4", "--view", "moe:ep=4,pp=1", "--groups", "dp,ep,cp", "--json")
    answer = json.loads(in_process("check", "tp=2,cp=1,dp=-1", *arguments).stdout)
    assert (answer["ok"], answer["ranks"], answer["failed"]) == (True, 4, None)
    rows = answer["groups"]
    assert [(row["view"], row["dims"], row["groups"], row["size"]) for row in rows] == [
        (None, ["dp"], 2, 2),
        ("moe", ["ep"], 1, 4),
        (None, ["cp"], 4, 1),
    ]
    assert all(0 < row["creation_s"] < 10 and row["wrong"] == [] for row in rows)
    assert all(row["bandwidth_bytes_per_s"] > 0 for row in rows[:2])
    assert rows[0]["slowest"]["host"] == socket.gethostname()
    assert rows[2]["slowest"] is None


@pytest.fixture
def all_reduce_on_ranks(monkeypatch):
    """Return a function that makes the ranks of a check call `act` before each all-reduce."""

    def replace(act):
        def probe(request):
            real_all_reduce = dist.all_reduce

            def all_reduce(tensor, **options):
                act(tensor, **options)
                return real_all_reduce(tensor, **options)

            dist.all_reduce = all_reduce
            probe_local(request)

        monkeypatch.setattr("hypercomm.tools.check.probe_local", probe)

    return replace


# A rank with wrong results is reported for each of its groups, with its coordinates and the group's
# ranks.
def test_wrong_results_are_reported(in_process, all_reduce_on_ranks):
    def falsify(tensor, **_):
        if dist.get_rank() == 3 and tensor.dtype == torch.int64:
            tensor += 1

    all_reduce_on_ranks(falsify)
    done = in_process("check", "tp=2,dp=2", "--groups", "tp,dp")
    assert (done.returncode, done.stderr) == (1, "")
    # rank 2 sends 3 and 4, rank 3 sends 4 and 9, and rank 3 adds 1 to both sums
    line = "rank {} in group tp of ranks [2, 3]: all-reduce gave [8, 14], expected [7, 13]"
    assert line.format("2 (tp=0, dp=1)") in done.stdout
    assert line.format("3 (tp=1, dp=1)") in done.stdout
    assert [int(rank) for rank in re.findall(r"wrong rank (\d)", done.stdout)] == [2, 3, 1, 3]


# At most 4 processes per core are started, but 8 are always allowed. --force starts any number.
def test_number_of_processes_is_limited(in_process, monkeypatch):
    started = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3), raising=False)
    monkeypatch.setattr(
        "hypercomm.tools.check.run_ranks", lambda _, ranks, **__: started.append(ranks)
    )
    done = in_process("check", "tp=13")
    assert done.returncode == 2
    assert re.search("would start 13 processes .* at most 12 are started", done.stderr)
    in_process("check", "tp=12")
    in_process("check", "tp=13", "--force")
    assert started == [12, 13]


# If a rank is killed, the check ends with the rank, its coordinates, its host and the group.
def test_killed_rank_is_reported(in_process, all_reduce_on_ranks):
    def die(_, group=None, **__):
        if dist.get_rank() == 3 and dist.get_process_group_ranks(group) == [1, 3]:
            os.kill(os.getpid(), signal.SIGKILL)

    all_reduce_on_ranks(die)
    done = in_process("check", "tp=2,dp=2", "--groups", "tp,dp")
    assert (done.returncode, done.stderr) == (1, "")
    place = r"rank 3 \(tp=1, dp=1\) in group dp of ranks \[1, 3\], in [\w-]+"
    reason = r"killed by signal 9 \(SIGKILL\)"
    assert re.search(rf"failed after 1 of 2 checks: {place}: {reason}", done.stdout)


def session_of(process):
    """Return the command lines of all processes in a session except its leader."""
    command = ["ps", "-ww", "-o", "pid=,args=", "-s", str(process.pid)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.split(maxsplit=1) for line in listed.stdout.splitlines()]
    return [args for pid, args in lines if int(pid) != process.pid]


# Ctrl-C ends the check and all of its processes, with exit code 130 and one line, long before the
# check would end. This also holds while torch is being imported.
@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 9], ids=["the fork server", "all ranks"])
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_all_processes(processes):
    command = [*CHECK, "tp=2,cp=2,dp=2"]
    process = subprocess.Popen(command, **PIPES, env=launcher_free(), start_new_session=True)
    wait_until(lambda: sum("forkserver" in each for each in session_of(process)) >= processes, 60)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=scaled_s(SOON_S))
    assert process.returncode == 130
    assert "hypercomm: interrupted; every rank that was started has been ended" in err
    assert "Traceback" not in err
    wait_until(lambda: not session_of(process))


JOB = {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


# If the launcher's variables describe a job that cannot be joined, nothing is started. An error
# that occurs on all ranks is printed by rank 0 only. An error that occurs on one host is printed by
# the ranks of that host.
@pytest.mark.parametrize(
    ("environment", "code", "message"),
    [
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, 2, "srun did not start this process"),
        ({"RANK": "0", "WORLD_SIZE": "8"}, 2, "MASTER_ADDR=None, MASTER_PORT=None"),
        ({**JOB, "RANK": "0", "WORLD_SIZE": "8"}, 2, "tp=2 needs 2 ranks; the job has 8 (RANK=0"),
        ({**JOB, "RANK": "1", "WORLD_SIZE": "8"}, 2, None),
        (
            {**JOB, "RANK": "1"},
            1,
            "rank 1 (tp=1): on HOST, or on a peer: backend 'gloo' is b",
        ),
    ],
)
def test_job_that_cannot_be_joined(environment, code, message, in_process, monkeypatch):
    for name, value in (environment | {"TORCH_CPP_LOG_LEVEL": "FATAL"}).items():
        monkeypatch.setenv(name, value)
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr(
        "hypercomm.process_groups.torch_internals.why_unavailable", lambda _: "is broken"
    )
    done = in_process("check", "tp=2")
    shown, silent = (done.stderr, done.stdout) if code == 2 else (done.stdout, done.stderr)
    assert done.returncode == code
    assert silent == ""
    if message is None:
        assert shown == ""
        assert sum(waited) == 3
    else:
        assert message in shown.replace(socket.gethostname(), "HOST")
