"""Test the results, output and failures of run_ranks(), and that no process is left behind."""

import faulthandler
import functools
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver

import pytest
import torch.distributed as dist
from processes import is_alive
from time_limits import scaled_s, startup_timeout_s, wait_until

from hypercomm.errors import MissingPackageError, RankFailedError
from hypercomm.launch import report, run_ranks


def assert_gone(pids):
    wait_until(lambda: not any(map(is_alive, pids)))


# The results are in rank order, from as many processes as requested. No process outlives the call.
@pytest.mark.parametrize("nprocs", [1, 3, 8])
def test_results_and_processes(nprocs):
    found = run_ranks(lambda more: (dist.get_rank() + more, os.getpid()), nprocs, args=[5])
    ranks, pids = zip(*found, strict=True)
    assert ranks == tuple(range(5, 5 + nprocs))
    assert len({*pids, os.getpid()}) == nprocs + 1
    assert_gone(pids)


# Another thread may change the environment while the fork server starts. Its changes are kept.
def test_changes_of_the_environment_by_other_threads(monkeypatch):
    ensure_running = forkserver.ensure_running
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("FROM_A_THREAD", "before")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)

    def change_and_start():
        assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"
        os.environ["FROM_A_THREAD"] = "after"
        ensure_running()

    monkeypatch.setattr(forkserver, "ensure_running", change_and_start)
    assert run_ranks(lambda: os.environ["FROM_A_THREAD"], 1) == ["after"]
    assert os.environ["FROM_A_THREAD"] == "after"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "MKL_NUM_THREADS" not in os.environ


# A rank sees the caller's current environment, not the environment of the fork server. Reports
# arrive in order. 100 MiB of results arrive, and 5 MB of output on the caller's stdout and stderr.
@pytest.mark.full
def test_environment_reports_and_output(monkeypatch, capfd):
    run_ranks(dist.get_rank, 1)  # starts the fork server
    monkeypatch.setenv("FROM_THE_CALLER", "yes")
    monkeypatch.delenv("HOME")
    received = []

    def body():
        for value in ("first", "second"):
            report(value)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FROM_THE_CALLER")
        if dist.get_rank() == 0:
            sys.stdout.write("x" * 5 * 10**6)
            sys.stderr.write("on stderr\n")
        assert "HOME" not in os.environ
        return [os.environ[name] for name in names], bytes(100 * 2**20 * dist.get_rank())

    found = run_ranks(body, 2, on_message=lambda *message: received.append(message))
    for rank, (environment, data) in enumerate(found):
        assert environment == [str(rank), str(rank), "2", "2", "yes"]
        assert data == bytes(100 * 2**20 * rank)
        assert [value for sender, value in received if sender == rank] == ["first", "second"]
    out, err = capfd.readouterr()
    assert out.count("x") == 5 * 10**6
    assert "on stderr\n" in err
    assert "RANK" not in os.environ


# Functions that cannot be imported are pickled by value: closures, methods, returned lambdas.
def test_functions_are_pickled_by_value():
    offset = 10

    class Adder:
        def __init__(self, number):
            self.number = number

        def add(self, adder):
            return self.number + adder.number

    assert run_ranks(Adder(1).add, 1, args=[Adder(2)]) == [3]
    assert [got(2) for got in run_ranks(lambda: lambda x: x * offset, 1)] == [20]


def on(rank, act):
    """Return a body that reports its pid and calls `act` on one rank. The other ranks wait."""

    def body():
        report(os.getpid())
        if dist.get_rank() == rank:
            act()
        dist.barrier()

    return body


def fail():
    """Start a process that would outlive the rank, and raise."""
    report(subprocess.Popen(["sleep", "600"]).pid)
    raise ValueError("a reason")


class OddError(Exception):
    """An error that can be neither pickled nor printed."""

    def __reduce__(self):
        raise TypeError("no")

    __str__ = __reduce__


def raise_odd_error():
    raise OddError


full = functools.partial(pytest.param, marks=pytest.mark.full)


# The error names the first rank that fails, with its traceback, signal or exit code. The first line
# contains the class and the text of the rank's error, so that pytest's summary shows them. The
# error does not name ranks that fail as a consequence. All ranks and their child processes end
# within seconds. The next job works.
@pytest.mark.parametrize(
    ("rank", "act", "begin", "end"),
    [
        (2, fail, "ValueError: a reason\nTraceback", "in fail\n[^\n]*\nValueError: a reason"),
        full(1, raise_odd_error, r"\S*OddError: <.*\nTraceback", r"OddError: .*str\(\) failed.*"),
        (
            1,
            os.abort,
            r"killed by signal 6 \(SIGABRT\); its last messages are on stderr; for example, gloo",
            ".*",
        ),
        (1, lambda: os.kill(os.getpid(), signal.SIGKILL), r"killed by signal 9 \(SIGKILL\)", ""),
        full(0, lambda: os.kill(os.getpid(), 40), r"killed by signal 40 \(", ".*"),
        full(3, lambda: os._exit(7), "its process ended with exit code 7 before the fun", ".*"),
    ],
)
def test_first_failing_rank_is_named(rank, act, begin, end):
    pids = []
    with pytest.raises(
        RankFailedError, match=rf"(?s)rank {rank} failed: {begin}.*{end}$"
    ) as caught:
        run_ranks(on(rank, act), 4, on_message=lambda _, pid: pids.append(pid), timeout=1000)
    assert caught.value.rank == rank
    assert "run.py" not in caught.value.reason
    assert_gone(pids)
    assert run_ranks(dist.get_rank, 2) == [0, 1]


# Ranks that do not return in time are ended, and the error contains the stack of each rank. A
# stopped rank has no stack to show.
@pytest.mark.full
def test_timeout_shows_stacks():
    pids = []
    timeout = startup_timeout_s(3)

    def body():
        report(os.getpid())
        if dist.get_rank() == 1:
            time.sleep(600)
        if dist.get_rank() == 2:
            faulthandler.cancel_dump_traceback_later()  # in case the process receives SIGCONT
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    with pytest.raises(RankFailedError) as caught:
        run_ranks(body, 3, timeout=timeout, on_message=lambda _, pid: pids.append(pid))
    heads = [
        f"it had not returned after {timeout:g} s",
        *(f"ranks [{rank}] are at" for rank in range(3)),
    ]
    reason = caught.value.reason
    assert [line for line in reason.splitlines() if not line.startswith("  ")] == heads
    first, second, third = (reason.partition(head)[2] for head in heads[1:])
    assert "in barrier" in first.partition(heads[2])[0]
    assert "in body" in second
    assert third == "\n  (it does not respond)"
    assert "thread" not in reason  # not the stack of the thread that waits for the parent
    assert_gone(pids)


# The result of a rank counts even if the rank then dies, hangs while leaving, or leaves before
# others have connected to it.
@pytest.mark.full
def test_result_counts_whatever_follows():
    def body():
        rank = dist.get_rank()
        if rank == 0:
            dist.destroy_process_group = lambda: time.sleep(400)
        elif rank == 1:
            dist.destroy_process_group = lambda: os._exit(3)
        else:
            dist.destroy_process_group()
        return rank

    begun = time.monotonic()
    assert run_ranks(body, 8, timeout=500) == list(range(8))
    assert time.monotonic() - begun < scaled_s(50)


def has_processes(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


PROGRAM = """
import os, time
from hypercomm.launch import report, run_ranks

def body():
    report(os.getpid())
    time.sleep(600)

run_ranks(body, 3, on_message=lambda _, pid: print(pid, flush=True))
"""


# However the caller ends, its ranks and the fork server end, too.
@pytest.mark.full
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
)
@pytest.mark.usefixtures("ctrl_c")
def test_ranks_end_with_the_caller(number):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as caller:
        pids = [int(caller.stdout.readline()) for _ in range(3)]
        if number == signal.SIGINT:
            os.killpg(caller.pid, number)  # as a terminal does
        else:
            caller.send_signal(number)
        caller.communicate(timeout=30)
    assert_gone(pids)
    wait_until(lambda: not has_processes(caller.pid))


INTERRUPTED_START = """
import os
import sys
from multiprocessing import forkserver
from hypercomm import run_ranks

connect = forkserver.connect_to_new_process

def connect_and_stop(fds):
    _, pipe = connect(fds)
    os.write(pipe, bytes.fromhex(sys.argv[1]))
    raise KeyboardInterrupt

forkserver.connect_to_new_process = connect_and_stop
try:
    run_ranks(print, 1)
except KeyboardInterrupt:
    print("interrupted")
"""


# If Ctrl-C interrupts the caller while it starts a rank, that rank ends without a traceback.
@pytest.mark.parametrize("sent", ["", "80049515"], ids=["nothing sent", "half of a pickle sent"])
def test_interrupted_start_has_no_traceback(sent):
    command = [sys.executable, "-c", INTERRUPTED_START, sent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_without_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingPackageError, match="needs cloudpickle: pip install"):
        run_ranks(print, 1)
