"""Real local ranks: what they return, how they fail, and that none is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from busy import late_s
from ranks import rank_functions

from hypercomm.errors import (
    LaunchError,
    LayoutError,
    MissingPackageError,
    NotInitializedError,
    RankFailedError,
)
from hypercomm.launch import report, run_ranks


def is_alive(pid):
    """Whether a process runs; one that ended and was not yet collected does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def assert_gone(pids, seconds=20):
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if is_alive(pid)]


# A function may begin by leaving, to which gloo would not connect the ranks that are late
# (three of 25 such jobs failed).
@pytest.mark.slow
def test_ranks_that_leave_at_once():
    for _ in range(12):
        assert run_ranks(rank_functions.leave_at_once, 20) == list(range(20))


# Results come back by rank, from as many processes, none of which is this one or outlives the call.
@pytest.mark.parametrize("nprocs", [1, 3, 8])
def test_results_and_processes(nprocs):
    assert run_ranks(dist.get_rank, nprocs) == list(range(nprocs))
    pids = run_ranks(rank_functions.pid, nprocs)
    assert len({*pids, os.getpid()}) == nprocs + 1
    assert_gone(pids)


# A rank sees the caller's environment of now, not of when the fork server was started.
def test_arguments_environment_and_reports(monkeypatch):
    monkeypatch.setenv("FROM_THE_CALLER", "yes")
    heard = []
    got = run_ranks(
        rank_functions.report_twice,
        2,
        args=("first", "second"),
        on_message=lambda rank, value: heard.append((rank, value)),
    )
    assert got == [("0", "2", "yes"), ("1", "2", "yes")]
    for rank in range(2):
        own = [value for sender, value in heard if sender == rank]
        assert own == [("first", rank), ("second", rank)]
    assert "RANK" not in os.environ


# The output of a rank reaches the caller's stdout and stderr, pytest's capture included.
def test_prints(capfd):
    run_ranks(rank_functions.print_something, 2)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["said by rank 0", "said by rank 1"]
    assert err.count("also on stderr") == 2


# The first rank that fails is named with its traceback, not those that fail because of it.
def test_a_rank_that_raises():
    with pytest.raises(RankFailedError, match="rank 2 failed: Traceback") as caught:
        run_ranks(rank_functions.raise_on, 4, args=(2,))
    assert caught.value.rank == 2
    assert caught.value.reason.endswith("ValueError: rank 2 has a reason")
    assert "in raise_on" in caught.value.reason
    assert "local_rank.py" not in caught.value.reason


# Functions that no other process can import travel by value: lambdas, closures, methods, and those
# of a program without a file.
def test_functions_without_a_name():
    offset = 10
    assert run_ranks(lambda more: offset + more + dist.get_rank(), 2, args=[5]) == [15, 16]

    class Adder:
        def __init__(self, number):
            self.number = number

        def add(self, adder):
            return self.number + adder.number

    assert run_ranks(Adder(1).add, 1, args=[Adder(2)]) == [3]
    assert [got(2) for got in run_ranks(lambda: lambda x: x * offset, 1)] == [20]


PROMPT = """
from hypercomm import run_ranks
import torch.distributed as dist

def work(more):
    return dist.get_rank() + more

print(run_ranks(work, 2, args=[1]))
"""


def test_a_program_without_a_file():
    done = subprocess.run(
        [sys.executable, "-c", PROMPT], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 2]\n", "")


# A result of 100 MiB arrives, and so do 5 MB of output.
@pytest.mark.long
def test_large_results_and_output(capfd):
    [first, second] = run_ranks(rank_functions.return_and_print, 2, args=(100 * 2**20, 5 * 10**6))
    assert first == bytes(100 * 2**20)
    assert second == b""
    assert capfd.readouterr().out.count("x") == 5 * 10**6


# An error that cannot be pickled, or that cannot even be formatted, is reported as text.
def test_an_error_that_cannot_be_pickled():
    with pytest.raises(RankFailedError, match=r"OddError: .*str\(\) failed") as caught:
        run_ranks(rank_functions.raise_odd_error, 2)
    assert caught.value.rank == 1


# A rank that dies is named with what ended it, within seconds, and the others are ended.
@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (rank_functions.die_on, (1, signal.SIGKILL), "killed by signal 9 (SIGKILL)"),
        (rank_functions.die_on, (0, signal.SIGSEGV), "killed by signal 11 (SIGSEGV)"),
        (rank_functions.die_on, (0, 40), "killed by signal 40 ("),  # a real-time signal
        (rank_functions.exit_on, (3, 7), "its process ended with exit code 7 before the function"),
    ],
)
def test_a_rank_that_dies(function, args, reason):
    pids, begin = [], time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        run_ranks(function, 4, args=args, on_message=lambda _, pid: pids.append(pid))
    assert time.monotonic() - begin < late_s(10)
    assert caught.value.rank == args[0]
    assert caught.value.reason.startswith(reason)
    assert_gone(pids)


# Ranks that do not return in time are ended, and the error has the stack of each.
@pytest.mark.long
def test_ranks_that_hang():
    pids = []
    with pytest.raises(RankFailedError) as caught:
        run_ranks(
            rank_functions.hang_on,
            3,
            args=(1,),
            timeout=3,
            on_message=lambda _, pid: pids.append(pid),
        )
    reason = caught.value.reason
    assert reason.startswith("it had not returned after 3 s\nranks [0, 2] are at\n")
    assert "in barrier" in reason.partition("ranks [1] are at")[0]
    assert "in hang_on" in reason.partition("ranks [1] are at")[2]
    assert "thread" not in reason  # nothing of what listens to the parent
    assert_gone(pids)


# A stopped rank has no stack to show, and is ended all the same.
@pytest.mark.long
def test_a_rank_that_is_stopped():
    pids = []
    with pytest.raises(RankFailedError, match=r"ranks \[1\] are at\n  \(it does not answer\)"):
        run_ranks(
            rank_functions.stop_on,
            2,
            args=(1,),
            timeout=2,
            on_message=lambda _, pid: pids.append(pid),
        )
    assert_gone(pids)


# A rank that stands still for a second, as busy machines do, says afterwards where it is.
@pytest.mark.slow
@pytest.mark.alone
def test_a_rank_that_is_slow_to_say_where_it_is():
    run_ranks(os.getpid, 1)  # what starts ranks has loaded torch
    begin = time.monotonic()

    def stop(pid):
        time.sleep(begin + 3.7 - time.monotonic())
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.3)
        os.kill(pid, signal.SIGCONT)

    with pytest.raises(RankFailedError, match=r"ranks \[0\] are at\n.* in hang_on"):
        run_ranks(
            rank_functions.hang_on,
            1,
            args=(0,),
            timeout=4,
            on_message=lambda _, pid: threading.Thread(target=stop, args=[pid]).start(),
        )
    assert time.monotonic() - begin > 3.7 + 1.3


# Processes that a rank has started end with it.
def test_what_a_rank_started():
    pids = []
    with pytest.raises(RankFailedError, match="on purpose"):
        run_ranks(
            rank_functions.start_something_and_fail,
            2,
            on_message=lambda _, pid: pids.append(pid),
        )
    assert len(pids) == 2
    assert_gone(pids)


# A rank that ends after it has returned has returned.
def test_a_rank_that_dies_after_returning():
    assert run_ranks(rank_functions.die_after_returning, 2) == [0, 1]


# A rank that has returned and cannot leave is ended: what it returned counts.
@pytest.mark.long
def test_a_rank_that_does_not_leave():
    begun = time.monotonic()
    assert run_ranks(rank_functions.return_and_stay, 2, timeout=100) == [0, 1]
    assert time.monotonic() - begun < 50


# After any failure the next job runs as if nothing had been.
def test_after_a_failure():
    with pytest.raises(RankFailedError):
        run_ranks(rank_functions.raise_on, 2, args=(0,))
    assert run_ranks(dist.get_rank, 2) == [0, 1]


PROGRAM = """
import sys, rank_functions
from hypercomm.launch import run_ranks

if __name__ == "__main__":
    say = lambda _, pid: print(pid, flush=True)
    run_ranks(rank_functions.hang_on, 3, args=(1,), on_message=say)
"""


# Whatever ends the caller, its ranks and the fork server end with it.
@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
)
@pytest.mark.usefixtures("ctrl_c")
def test_a_caller_that_ends(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    here = str(Path(rank_functions.__file__).parent)
    with subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])},
        start_new_session=True,
    ) as caller:
        pids = [int(caller.stdout.readline()) for _ in range(3)]
        if number == signal.SIGINT:
            os.killpg(caller.pid, number)  # as a terminal does
        else:
            caller.send_signal(number)
        caller.communicate(timeout=30)
    assert_gone(pids)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(caller.pid, 0)  # fails once no process of the session is left
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a process of the caller's session is left")


# A wrong call raises an error with the argument and its value.
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: run_ranks(print, 2, args=[threading.Lock()]), LaunchError, "args cannot be sent"),
        (lambda: run_ranks("print", 2), LaunchError, "function must be callable, got 'print'"),
        (lambda: run_ranks(print, 0), LayoutError, "nprocs must be at least 1, got 0"),
        (lambda: run_ranks(print, 2.0), LayoutError, "nprocs must be an int, got 2.0"),
        (lambda: run_ranks(print, 2, timeout=0), LaunchError, "seconds larger than 0, got 0"),
        (lambda: run_ranks(print, 2, timeout="5"), LaunchError, "seconds larger than 0, got '5'"),
        (lambda: run_ranks(print, 2, args="ab"), LaunchError, "sequence of arguments, got 'ab'"),
        (lambda: run_ranks(print, 2, group_timeout=5), LaunchError, "a datetime.timedelta, got 5"),
        (lambda: run_ranks(print, 999, backend="nccl"), LaunchError, "a GPU for each of 999 ranks"),
        (lambda: run_ranks(print, 1, backend="bogus"), RankFailedError, "bogus"),
        (
            lambda: run_ranks(rank_functions.return_what_cannot_be_unpickled, 2),
            RankFailedError,
            "cannot be unpickled: ValueError",
        ),
        (lambda: run_ranks(threading.Lock, 2), RankFailedError, "the returned value cannot be"),
        (lambda: report(1), NotInitializedError, "only in a rank that run_ranks"),
    ],
)
def test_bad_calls(call, error, words):
    with pytest.raises(error, match=words):
        call()


# Without cloudpickle the error names the package to install, before a process is started.
def test_without_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingPackageError, match="pip install cloudpickle"):
        run_ranks(print, 1)


# The fork server has torch loaded: ranks that do nothing are done in a fraction of the time that
# loading torch in each of them takes. The bound is the issue's, on 2 cores, with a cold server.
@pytest.mark.slow
@pytest.mark.parametrize(("nprocs", "seconds"), [(8, 8), (16, 12)])
@pytest.mark.alone
def test_start_is_fast(tmp_path, nprocs, seconds):
    script = tmp_path / "script.py"
    script.write_text(
        "import time, torch.distributed as dist\n"
        "from hypercomm.launch import run_ranks\n"
        "if __name__ == '__main__':\n"
        "    begin = time.monotonic()\n"
        f"    run_ranks(dist.get_rank, {nprocs})\n"
        "    print(time.monotonic() - begin)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < seconds
