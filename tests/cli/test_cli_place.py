"""`hypercomm place` as a user meets it: arguments, two streams, files and an exit code."""

import importlib.util
import json
import os
import pty
import re
import subprocess
import sys

import pytest

from hypercomm import RankLayout

pytestmark = pytest.mark.torch_free

NO_JOB = (
    "torchrun --nproc-per-node 8 --no-python hypercomm place ...`, with srun or"
    if importlib.util.find_spec("torch")
    else "this needs torch"
)

MODEL = "hidden=8,layers=1,sequence=1,micro_batches=1,parameters=1"

NVL72 = ["place", "tp=4,dp=16,pp=4", "--on", "4,72", "--traffic", "tp=40G,dp=6G,pp=100M"]


def lines_of(done):
    """The lines that say something, each with one space between its words."""
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    return [line for line in lines if line.strip("─ ")]


# The table, what is proposed, and what changes by it.
def test_table(in_process):
    done = in_process(*NVL72)
    assert (done.returncode, done.stderr) == (0, "")
    lines = lines_of(done)
    assert lines[:2] == [
        "tp=4,dp=16,pp=4: 256 ranks on 64 hosts, 4 domains",
        "dims level across units of each bytes across",
    ]
    assert "dp domain 12 of 16 1..2 144 GB" in lines
    spare = next(number for number, line in enumerate(lines) if line.startswith("spare:"))
    assert lines[spare] == (
        "spare: 64 of the 72 GPUs of each domain, 32 of 288 left out, tp-dp-pp; steps wait for "
        "88 % less across units"
    )
    assert lines[spare + 2] == "dp domain 12 of 16 -> 0 of 16 1..2 -> 1 144 GB -> 0"


# --json prints one JSON object and nothing else.
def test_json(in_process):
    found = json.loads(in_process(*NVL72, "--json").stdout)
    assert found["proposals"][0]["kind"] == "spare"
    assert found["traffic"]["pp"]["pattern"] == "chain"


# What is taken is drawn, on the machine that it was placed on.
def test_draw(in_process, tmp_path):
    file = tmp_path / "placed.txt"
    done = in_process("place", "dp=4,tp=2", "--on", "2,4", "--draw", str(file))
    assert done.returncode == 0, done.stderr
    assert "tp: 4 groups of 2, each inside one host" in file.read_text()
    assert "on 4 hosts, 2 domains" in file.read_text()
    again = in_process("place", "dp=4,tp=2", "--on", "2,4", "--draw", str(file))
    assert (again.returncode, again.stdout) == (2, "")
    assert "exists, and is kept" in again.stderr


# Files for launchers are of the best placing, or of what is taken; those that exist are kept.
def test_write(in_process, tmp_path):
    order, script = str(tmp_path / "order"), str(tmp_path / "script")
    done = in_process(*NVL72, "--write", "order", order, "--write", "sbatch", script)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "order").read_text() == "tp-dp-pp\n"
    assert "--nodes=64\n" in (tmp_path / "script").read_text()
    again = in_process(*NVL72, "--write", "layout", order)
    assert (again.returncode, again.stdout) == (2, "")
    assert (
        again.stderr
        == f"hypercomm: {order} exists, and is kept; force=True (--force) replaces it\n"
    )
    assert (tmp_path / "order").read_text() == "tp-dp-pp\n"
    in_process(*NVL72, "--take", "sizes", "--write", "layout", order, "--force")
    taken = RankLayout.from_json((tmp_path / "order").read_text())
    assert taken == RankLayout.parse("tp=4,dp=18,pp=4")


# A hostfile says the order of hosts, topology.conf what they are connected to.
def test_files(in_process, tmp_path):
    (tmp_path / "hosts").write_text("".join(f"n{number} slots=2\n" for number in (1, 3, 2, 4)))
    (tmp_path / "topology.conf").write_text(
        "SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\nSwitchName=t Switches=a,b\n"
    )
    files = ["--on", str(tmp_path / "hosts"), "--on", str(tmp_path / "topology.conf")]
    call = ["place", "tp=2,dp=2,pp=2", *files, "--traffic", "tp=9G,dp=5G,pp=1M", "--json"]
    found = json.loads(in_process(*call).stdout)
    assert [row["across"] for row in found["groups"] if row["dims"] == ["dp"]] == [4, 4, 0]
    kinds = {proposal["kind"]: proposal for proposal in found["proposals"]}
    rows = kinds["order"]["groups"]
    assert [row["across"] for row in rows if row["dims"] == ["dp"]] == [4, 0, 0]


# A model's card, in place of the traffic.
@pytest.mark.parametrize("as_file", [False, True])
def test_model(in_process, tmp_path, as_file):
    given = "hidden=4096,layers=32,sequence=8k,micro_batches=8,parameters=7G,dtype=fp8"
    if as_file:
        fields = {"hidden": 4096, "layers": 32, "sequence": 8000, "micro_batches": 8}
        (tmp_path / "card").write_text(json.dumps(fields | {"parameters": 7e9, "dtype": "fp8"}))
        given = str(tmp_path / "card")
    done = in_process("place", "tp=8,pp=2,dp=2", "--on", "8", "--model", given, "--json")
    assert json.loads(done.stdout)["traffic"]["pp"]["bytes"] == 8 * 2 * 8000 * 4096 // 8


# Bad calls end with 2, one sentence that says what would do, and no table.
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tp=2", "--on", "nope"], "'nope' is no file; --on must be GPUs for each host"),
        (["tp=2", "--on", ""], ": --on is empty; give GPUs for each host"),
        (["tp", "--on", "n1,n2"], "n1, n2 have; give --gpus-per-node, or write 'name slots=8' for"),
        (["tp=2", "--on", "8", "--on", "host=4"], "host=8 and host=4 of --on 'host=4' contradict"),
        (
            ["tp=2", "--on", "8", "--traffic", "tp=1", "--model", MODEL],
            ": give --traffic or --model, not both: the traffic follows from the model",
        ),
        (
            ["tp=2,dp=2", "--on", "8", "--traffic", "tp=1", "--overlap", "dp"],
            ": --overlap names dp, whose traffic is not given; there is tp",
        ),
        (["tp=2", "--on", "8", "--traffic", "tp"], "'tp' in the traffic 'tp' cannot be read"),
        (["tp=2", "--on", "8", "--weights", "host=x"], "--weights gives 'host' 'x', which is no"),
        (["tp=2", "--on", "8", "--weights", "host"], "'host' in --weights 'host' is no name=value"),
        (["tp=2", "--on", "8", "--model", "nope"], "--model 'nope' is no file of JSON"),
        (["tp=2", "--on", "8", "--model", "hiden=3"], "did you mean 'hidden'?"),
        (["tp=2", "--on", "8", "--on", "live"], "--on live stands alone"),
        (
            ["tp=2", "--on", "8", "--gpus-per-node", "0"],
            ": --gpus-per-node must be at least 1, got",
        ),
        (["tp=2", "--on", "8", "--overlap", "tp"], ": --overlap says of traffic what goes on besi"),
        (
            ["tp", "--on", "8"],
            "but --on '8' says how large units are, but not how many; give the ",
        ),
        (
            ["tp=2", "--on", "8", "--weights", "leaf=1"],
            ": --weights names no level of this machine",
        ),
        (
            ["tp=2", "--on", "8", "--traffic", "tp=" + "9" * 400],
            "0 or more, and up to 2**60, got 9",
        ),
        (
            [
                "tp=2",
                "--on",
                "8",
                "--model",
                f"hidden={'9' * 400},layers=1,sequence=1,micro_batches=1,parameters=1",
            ],
            "must be an int of 64 bits",
        ),
        (
            ["tp=2", "--on", "8", "--write", "order", "x", "--draw", "./x"],
            "--write order and --draw both name './x'; give each a file of its own",
        ),
        (
            ["tp=2", "--on", "8", "--write", "order", "x", "--write", "order", "x"],
            "--write order and --write order both name 'x'; give each a file of its own",
        ),
        (
            ["tp=2", "--on", "8", "--take", "given"],
            "what is written and drawn, and nothing is: give --write KIND FILE or --draw FILE, too",
        ),
        (["tp=2", "--on", "8", "--take", "best", "--json"], "--take best says what is written"),
        (["tp=2", "--on", "8", "--write", "ordre", "x"], "did you mean 'order'?"),
        (["tp=2", "--on", "8", "--write", "order", "/no/x"], "'/no/x' cannot be written"),
        (["tp=2", "--on", "live"], NO_JOB),
        (["tp=2"], "Missing option '--on'"),
        (
            ["tp=4,dp", "--on", "n[1-3]", "--gpus-per-node", "2"],
            "but the machine has 6 GPUs, no multiple of 4",
        ),
    ],
)
def test_bad_calls(in_process, arguments, says):
    done = in_process("place", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    if "/no/x" not in arguments:
        assert done.stdout == ""


# Of more than 8 dims nothing is said to be best.
def test_more_than_8_dims(in_process):
    done = in_process("place", ",".join(f"{dim}=2" for dim in "abcdefghi"), "--on", "2")
    assert "nothing better was looked for, as more than 8 dims" in done.stdout
    assert "nothing better is known" not in done.stdout


# In a terminal of 40 columns nothing is wider, and without colour nothing is lost.
@pytest.mark.parametrize("colour", [False, True])
def test_narrow_terminal(colour):
    ours, theirs = pty.openpty()
    setting = {"COLUMNS": "40", "TERM": "xterm"} | ({} if colour else {"NO_COLOR": "1"})
    with subprocess.Popen(
        [sys.executable, "-m", "hypercomm", *NVL72], stdout=theirs, env=os.environ | setting
    ) as process:
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 65536):
                parts.append(part)
        except OSError:  # what Linux says at the end of a terminal
            pass
    os.close(ours)
    assert process.returncode == 0
    text = b"".join(parts).decode()
    assert ("\x1b[32m" in text) == colour
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = plain.replace("\r", "").split("\n")
    assert max(map(len, lines[1:])) <= 40  # the headline wraps where the terminal does
    words = " ".join(plain.split())
    for cell in ("domain", "12 of 16", "144 GB", "spare:"):
        assert cell in words
