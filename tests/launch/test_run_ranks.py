"""Test the results, output and failures of run_ranks(), and that no process is left behind."""

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver

import pytest
import torch.distributed as dist
from processes import is_alive, run_python
from time_limits import scaled_s, startup_timeout_s, wait_until

from hypercomm.errors import LaunchError, LayoutError, MissingPackageError, RankFailedError
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
# contains the class and the text of the rank's error, so that pytest's summary shows them. All
# ranks and their child processes end within seconds. The next job works.
@pytest.mark.parametrize(
    ("rank", "act", "begin", "end"),
    [
        (2, fail, "ValueError: a reason\nTraceback", "in fail\n[^\n]*\nValueError: a reason"),
        full(1, raise_odd_error, r"\S*OddError: <.*\nTraceback", r"OddError: .*str\(\) failed.*"),
        (
            1,
            os.abort,
            r"killed by signal 6 \(SIGABRT\); its last messages are on stderr; gloo aborts",
            r"\nrank 1 ran body at \S*/test_run_ranks.py:\d+",
        ),
        (1, lambda: os.kill(os.getpid(), signal.SIGKILL), r"killed by signal 9 \(SIGKILL\)", ""),
        full(0, lambda: os.kill(os.getpid(), 40), r"killed by signal 40 \(", ".*"),
        full(3, lambda: os._exit(7), "its process ended with exit code 7 before the fun", ".*"),
    ],
)
def test_first_failing_rank_is_named(rank, act, begin, end):
    pids = []
    with pytest.raises(RankFailedError, match=rf"(?s)rank {rank} failed: {begin}") as caught:
        run_ranks(on(rank, act), 4, on_message=lambda _, pid: pids.append(pid), timeout=1000)
    assert caught.value.rank == rank
    assert re.search(f"(?s){end}$", caught.value.reason)
    assert "run.py" not in caught.value.reason
    assert_gone(pids)
    assert run_ranks(dist.get_rank, 2) == [0, 1]


# Ranks that do not return in time are ended. The error names the ranks that have returned, then
# those that do not wait for others, and shows a stack of each. A stopped rank has no stack to show.
# Reports in a loop do not defer the end.
@pytest.mark.full
def test_timeout_shows_stacks():
    pids = set()
    timeout = startup_timeout_s(5)

    def body():
        report(os.getpid())
        rank = dist.get_rank()
        while rank == 1:
            report(os.getpid())
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank != 3:
            dist.barrier()

    begun = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        run_ranks(body, 5, timeout=timeout, on_message=lambda _, pid: pids.add(pid))
    assert time.monotonic() - begun < timeout + scaled_s(5)
    lines = caught.value.reason.splitlines()
    at = rf"{re.escape(__file__)}:\d+"
    for line, pattern in zip(
        [line for line in lines if not line.startswith("  ")],
        [
            f"it had not returned after {timeout:g} s",
            "rank 3 had returned",
            rf"rank 1 (called report at {at} in body|ran body at {at})",
            "rank 2 did not respond",
            rf"ranks 0, 4 waited in barrier at {at} in body",
        ],
        strict=True,
    ):
        assert re.fullmatch(pattern, line)
    assert caught.value.rank == 1
    assert lines[-1].endswith("in body")  # without the frames of hypercomm
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
@pytest.mark.full
@pytest.mark.parametrize("sent", ["", "80049515"], ids=["nothing sent", "half of a pickle sent"])
def test_interrupted_start_has_no_traceback(sent):
    command = [sys.executable, "-c", INTERRUPTED_START, sent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_without_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingPackageError, match="needs cloudpickle: pip install"):
        run_ranks(print, 1)


# More ranks than this machine can run are rejected before a rank starts, by processors and memory.
# `max_ranks` allows them.
@pytest.mark.parametrize(("processors", "gib", "most"), [(1, 64, 8), (16, 64, 64), (64, 10, 102)])
def test_number_of_ranks_is_limited(processors, gib, most, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": gib * 2**18}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    with pytest.raises(LayoutError, match=f"more than {most} .* pass max_ranks={most + 1}$"):
        run_ranks(int, most + 1)
    with pytest.raises(LayoutError, match=r"more than 1 processes .* pass max_ranks=2$"):
        run_ranks(int, 2, max_ranks=1)
    if most == 8:
        assert run_ranks(int, 9, max_ranks=9) == [0] * 9


def test_without_loopback(monkeypatch):
    def create_server(*_, **__):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", create_server)
    with pytest.raises(LaunchError, match=r"127\.0\.0\.1, .* lacks: .*Cannot assign .*lo up`$"):
        run_ranks(int, 1)


# A result that cannot be sent names the rank and the type.
def test_results_that_cannot_be_sent():
    with pytest.raises(RankFailedError, match=r"^rank 1 failed: it returned a builtins.list that"):
        run_ranks(lambda: [threading.Lock()] if dist.get_rank() else None, 2)


PLAIN = """
import torch.distributed as dist
from hypercomm import run_ranks
print(run_ranks(dist.get_rank, 2))
"""


# A script without `if __name__ == "__main__"` gets one sentence, and no traceback of a rank. A
# program from stdin, which ranks cannot import, works.
@pytest.mark.full
def test_programs_without_a_guard(tmp_path):
    (tmp_path / "program.py").write_text(PLAIN)
    done = run_python("program.py", folder=tmp_path)
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1].endswith(
        "call run_ranks() under if __name__ == '__main__':"
    )
    done = subprocess.run(
        [sys.executable], input=PLAIN, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[0, 1]\n", "")
