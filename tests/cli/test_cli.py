"""The command line as a user meets it: a process with arguments, two streams and an exit code."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
from launched import rank_free
from ranks import rank_functions

from hypercomm import RankLayout, __version__
from hypercomm.cli.check import Outcome
from hypercomm.cli.groups import Key
from hypercomm.cli.probe import Request
from hypercomm.launch import run_ranks

SOON_S = 30
"""An interrupted check ends immediately; one that ignored it would continue for minutes."""


def hypercomm(*arguments, timeout=120):
    return subprocess.run(
        [sys.executable, "-m", "hypercomm", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=rank_free(),
        check=False,
    )


# The main job: every combination of dims is created, communicated over and right. A pipe gets no
# progress, and no line that ends with spaces.
def test_check():
    done = hypercomm("check", "tp=2,dp=3")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.rstrip().endswith("ok")]
    assert [(row[0], " ".join(row[1:4])) for row in rows] == [
        ("tp", "3 x 2"),
        ("dp", "2 x 3"),
        ("tp+dp", "1 x 6"),
    ]
    assert "right over every group, on 6 gloo ranks" in done.stdout
    assert done.stderr == ""
    assert not re.search(r" $", done.stdout, re.MULTILINE)


# torchrun starts the ranks, and the check joins them; an unspecified size is inferred.
@pytest.mark.long
def test_check_under_torchrun():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "-m",
            "hypercomm",
            "check",
            "dp=-1",
            "--json",
        ],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        env=rank_free(),
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["layout"], answer["ok"]) == ("dp=2", True)
    assert [row["dims"] for row in answer["groups"]] == [["dp"]]


# A rank whose numbers are wrong makes every group that it is in wrong, with ranks and coordinates.
def test_probe_finds_a_wrong_result():
    layout = RankLayout.parse("tp=2,dp=2")
    findings = run_ranks(
        rank_functions.check_with_a_broken_rank, 4, args=(layout, [("tp",), ("dp",)], 3)
    )
    wrong = {
        (rank, *dims) for found in findings for rank, dims, figures in found if figures["wrong"]
    }
    assert wrong == {(2, "tp"), (3, "tp"), (1, "dp"), (3, "dp")}
    # rank 2 holds 3 and 4, rank 3 holds 4 and 9, and adds 1 to both
    assert findings[2][0][2]["wrong"] == "all-reduce gave [8, 14], expected [7, 13]"


# The wrong group, its ranks and the rank's coordinates are on stdout, and the exit code is 1.
def test_wrong_results_are_shown(capsys):
    figures = {"creation": 0.001, "latency": 1e-4, "bandwidth": 1e8, "host": "a"}
    key = Key(None, ("tp",))
    outcome = Outcome(Request(RankLayout.parse("tp=2,dp=2"), [key]))
    with outcome.progress():
        for rank in range(4):
            wrong = "all-reduce gave [8], expected [7]" if rank == 3 else ""
            outcome.record((rank, key, figures | {"wrong": wrong}))
    assert outcome.show(as_json=False) == 1
    out = capsys.readouterr().out
    assert "rank 3 (tp=1, dp=1) in group tp of ranks [2, 3]: all-reduce gave [8], expected" in out
    assert "some results are wrong" in out


AT_WORK = """
import sys
from hypercomm.cli import main
from hypercomm.cli.check import Outcome

record = Outcome.record

def record_and_print(outcome, message):
    record(outcome, message)
    if outcome.rows():
        print("checked", file=sys.stderr, flush=True)

Outcome.record = record_and_print
sys.exit(main(["check", *sys.argv[1:]]))
"""


def start_check(*arguments):
    """A check that is at work: it has checked its first groups."""
    process = subprocess.Popen(
        [sys.executable, "-c", AT_WORK, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=rank_free(),
        start_new_session=True,
    )
    assert "checked" in process.stderr.readline()
    return process


def session_of(process):
    """The processes of a session by pid, as (parent, arguments), without its leader."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,ppid=,args=", "-s", str(process.pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    return {int(pid): (int(parent), args) for pid, parent, args in lines if int(pid) != process.pid}


def a_rank_of(process):
    """The pid of a rank: a child of the fork server (the largest pid may be any, as pids wrap)."""
    found = session_of(process)
    servers = {
        pid for pid, (parent, args) in found.items() if "forkserver" in args and parent not in found
    }
    return next(pid for pid, (parent, _) in found.items() if parent in servers)


def assert_session_is_empty(process):
    deadline = time.monotonic() + SOON_S
    while session_of(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not session_of(process)


# Ctrl-C ends the check and all of its processes, with exit code 130 and one line, long before it
# would have finished or timed out.
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c():
    process = start_check("tp=2,cp=2,dp=2")
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=SOON_S)
    assert process.returncode == 130
    assert "hypercomm: interrupted; every rank that was started has been ended" in err
    assert "Traceback" not in err
    assert_session_is_empty(process)


# Ctrl-C while torch is still being loaded ends it as well, without a traceback from anywhere.
@pytest.mark.long
@pytest.mark.parametrize("seconds", [pytest.param(0.1, marks=pytest.mark.slow), 0.4])
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_at_the_start(seconds):
    with subprocess.Popen(
        [sys.executable, "-m", "hypercomm", "check", "tp=2,cp=2,dp=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=rank_free(),
        start_new_session=True,
    ) as process:
        while not any("forkserver" in args for _, args in session_of(process).values()):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=SOON_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert_session_is_empty(process)


# A killed rank ends the check: which rank, where it was, and in which group.
@pytest.mark.long
def test_a_killed_rank():
    process = start_check("tp=2,cp=2,dp=2")
    os.kill(a_rank_of(process), signal.SIGKILL)
    out, err = process.communicate(timeout=SOON_S)
    assert process.returncode == 1
    pattern = r"failed: rank \d \(tp=\d, cp=\d, dp=\d\) in group \S+ of ranks \[[\d, ]+\], "
    assert re.search(pattern + r"in [\w-]+: killed by signal 9 \(SIGKILL\)", out), out
    assert "Traceback" not in out + err
    assert_session_is_empty(process)


# A check that hangs ends after --timeout with the stack of each rank.
@pytest.mark.slow
def test_a_check_that_hangs():
    process = start_check("tp=2,cp=2,dp=2", "--timeout", "8")
    os.kill(a_rank_of(process), signal.SIGSTOP)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "it had not returned after 8 s" in out
    assert "(it does not answer)" in out
    assert_session_is_empty(process)


# The plan's numbers are those of the layout, also in JSON.
def test_plan():
    done = hypercomm("plan", "tp=8,cp=2,dp=64,pp=8", "--rank", "37", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["ranks"], plan["hosts"], plan["rank"]) == (8192, 1024, 37)
    # 37 = 5 + 8 * 0 + 16 * 2
    assert plan["coords"] == {"tp": 5, "cp": 0, "dp": 2, "pp": 0}
    assert len(plan["groups"]) == 15
    rows = {"+".join(row["dims"]): row for row in plan["groups"]}
    assert rows["dp"]["groups"] == 128
    assert rows["dp"]["strides"] == [16]
    assert rows["dp"]["hosts_per_group"] == [64, 64]
    assert rows["dp"]["example"] == list(range(5, 5 + 16 * 16, 16))
    assert rows["tp+cp"]["hosts_per_group"] == [2, 2]
    text = hypercomm("plan", "tp=8,cp=2,dp=64,pp=8", "--rank", "37").stdout
    assert "rank 37 is at tp=5, cp=0, dp=2, pp=0" in text
    assert re.search(r"dp +128 +64 +16 +64 +5 21 \.\. 1013", text)


def seconds_of_children():
    """The processor time of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# A million ranks are planned in under a second on a quiet machine, process start included: twice
# that of the processor here, as other tests run. torch is not loaded for it.
def test_plan_of_a_million_ranks():
    begin = seconds_of_children()
    done = hypercomm("plan", "tp=8,cp=2,dp=1024,pp=64")
    assert seconds_of_children() - begin < 2
    assert "1,048,576 ranks" in done.stdout
    program = (
        "import sys; from hypercomm.cli import main\n"
        "code = main(['plan', 'tp=8,dp=4', '--json']); assert code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)


# A size that is unspecified is that of the job whose rank this is; a size that is given needs none.
@pytest.mark.parametrize(
    ("environment", "arguments", "layout"),
    [
        ({"WORLD_SIZE": "64"}, ("tp=2,dp=-1",), "tp=2,dp=32"),
        ({"WORLD_SIZE": "64"}, ("tp=2,dp=-1", "--world-size", "8"), "tp=2,dp=4"),
        ({"WORLD_SIZE": "64"}, ("tp=2,dp=5",), "tp=2,dp=5"),
        ({"WORLD_SIZE": "many"}, ("tp=2,dp=5",), "tp=2,dp=5"),
        (
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"},
            ("tp=2,dp=-1",),
            "tp=2,dp=4",
        ),
    ],
)
def test_plan_in_a_job(environment, arguments, layout, in_process, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = in_process("plan", *arguments, "--json")
    assert json.loads(done.stdout)["layout"] == layout


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("9", "the job has 9 (WORLD_SIZE=9)"),
        ("many", "WORLD_SIZE must be an integer of at least 1, got 'many'"),
    ],
)
def test_plan_in_another_job(size, message, in_process, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", size)
    done = in_process("plan", "tp=2,dp=-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


# 4 processes are started for each core, 8 at least; --force starts any number.
def test_the_bound_by_cores(in_process, monkeypatch):
    started = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3), raising=False)
    monkeypatch.setattr(
        "hypercomm.cli.check.run_ranks", lambda _, ranks, **__: started.append(ranks)
    )
    assert in_process("check", "tp=13").returncode == 2
    assert started == []
    in_process("check", "tp=12")
    in_process("check", "tp=13", "--force")
    assert started == [12, 13]


# A reader that closes the pipe, as head does, is no error.
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_closed_pipe(form):
    with subprocess.Popen(
        [sys.executable, "-m", "hypercomm", "plan", "tp=2,dp=9999", "--ranks", "all", *form],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=rank_free(),
    ) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


# Every mistake in a call ends with exit code 2, nothing on stdout, and the offending part.
@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "tp=2,,dp"), "'tp=2,,dp'"),
        (("plan", "tp=x"), "the size in 'tp=x' must be a positive integer"),
        (("plan", "tp=2,dp=2,tp=4"), "dim 'tp' is given twice in 'tp=2,dp=2,tp=4'"),
        (("plan", "=2"), "'=2' cannot be read as a size"),
        (("plan", "tp=0"), "the size in 'tp=0' must be a positive integer"),
        (
            ("plan", "tp=3,dp=-1", "--world-size", "8"),
            "multiple of 3 ranks, as 6 and 9; --world-size is 8",
        ),
        (("plan", "tp=2", "--rank", "2"), "rank 2 is not in layout tp=2, which holds ranks 0..1"),
        (("plan", "tp=2", "--gpus-per-node", "0"), "0 is not in the range x>=1"),
        (("plan", "tp=2", "--rank-offset", "-1"), "-1 is not in the range x>=0"),
        (("plan", "tp=2,dp=-1"), "the size of dim 'dp' is unspecified; give it, or world_size"),
        (("plan", "tp8"), "did you mean 'tp=8'?"),
        (("plan", "tp=2", "dp=4"), "separate sizes with commas: tp=2,dp=4"),
        (("check", "tp=2,", "dp=4", "--json"), "separate sizes with commas: tp=2,dp=4"),
        (("plan", "tp:8"), "as in 'tp=8'"),
        (("check", "tp2dp4"), "as in 'tp=2,dp=4'"),
        (("check", "tp=2,dp=-1"), "the size of dim 'dp' is unspecified"),
        (("check", "tp=3", "--nprocs", "0"), "0 is not in the range x>=1"),
        (("check", "tp=3", "--nprocs", "4"), "tp=3 needs 3 ranks; --nprocs is 4"),
        (("diff", "tp=2", "tp=2", "--world-size", "0"), "0 is not in the range x>=1"),
        (("diff", "tp=2", "tp=2", "--after-offset", "-1"), "-1 is not in the range x>=0"),
        (("diff", "tp=2", "dp", "--world-size", "3"), "needs 2 ranks; --world-size is 3"),
        (("check", "tp=2", "--view", "ep=3"), "ep=3 needs 3 ranks; the layout tp=2 has 2"),
        (("check", "tp=2", "--view", "base:ep=2"), "View 'base' is that of the grid's own dims"),
        (("check", "tp=2", "--groups", "tp,pp"), "unknown dim 'pp'; this layout has dims ('tp',)"),
        (("check", "tp=2", "--groups", "tp,,pp"), "lacks a dim name"),
        (("check", "tp=2", "--groups", "tp+tp"), "dim 'tp' comes twice"),
        (("check", "tp=2,cp=2", "--groups", "tp+cp,cp+tp"), "come twice in 'tp+cp,cp+tp'"),
        (("check", "tp=8,dp=64"), "tp=8,dp=64 would start 512 processes on this machine"),
        (("check", "tp=2", "--backend", "nccl"), "backend 'nccl' "),  # not built in, or no GPU
        (("check", "tp=2", "--backend", "bogus"), "unknown backend 'bogus'; this torch knows ["),
        (("plan", "tp=99999999999"), "torch numbers them up to 2147483647"),
        (("plan", "tp=2000000000"), "has 2,000,000,000 ranks; plan shows up to 16,777,216"),
        (("check", "tp=2", "--timeout", "inf"), "is not in the range"),
        (("check",), "Missing argument"),
        (("chekc",), "No such command"),
    ],
)
def test_mistakes(arguments, message, in_process):
    done = in_process(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# The version, the help, and the script that the package installs.
def test_version_and_help():
    assert hypercomm("--version").stdout.split()[-1] == __version__
    for command in ((), ("plan",), ("check",)):
        assert hypercomm(*command, "--help").stdout.startswith("Usage: hypercomm")


# Without click or rich the command line names the package to install.
@pytest.mark.parametrize("lacking", ["click", "rich"])
def test_without_the_extra(lacking):
    program = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = (\n"
        f"    lambda name, *rest: None if name == {lacking!r} else find(name, *rest)\n"
        ")\n"
        "from hypercomm.cli import main\n"
        "sys.exit(main(['plan', 'tp=2']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"hypercomm: the command line needs {lacking}: pip install 'hypercomm[cli]'\n"
    )


# Without torch a command that needs it prints an error, and the others work.
def test_without_torch():
    program = "import sys; sys.modules['torch'] = None; from hypercomm.cli import main\n"
    program += (
        "print(main(['place', 'tp=2', '--on', '2']), main(['place', 'tp=2', '--on', 'live']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=rank_free(),
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "0 2"
    assert re.fullmatch("hypercomm: .* needs torch: pip install torch\n", done.stderr)
