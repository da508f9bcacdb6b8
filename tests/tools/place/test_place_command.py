"""`hypercomm place`: its arguments, output, files and exit code."""

import importlib.util
import json

import pytest

pytestmark = pytest.mark.torch_free

NO_JOB = "torchrun --no-python" if importlib.util.find_spec("torch") else "needs torch: pip install"
NVL72 = ["place", "tp=4,dp=16,pp=4", "--on", "4,72", "--traffic", "tp=40G,dp=6G,pp=100M"]
SWAPPED = ["place", "dp=4,tp=2", "--on", "2"]


def lines_of(done):
    """The lines with words, with one space between words."""
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    return [line for line in lines if line.strip("─ ")]


# The table, and that no order is better.
def test_table(in_process):
    done = in_process(*NVL72)
    assert (done.returncode, done.stderr) == (0, "")
    lines = lines_of(done)
    assert lines[:2] == [
        "tp=4,dp=16,pp=4: 256 ranks on 64 hosts, 4 domains",
        "dims level across units per group bytes across",
    ]
    assert "dp domain 12 of 16 1..2 144 GB" in lines
    assert [line for line in lines if line.startswith("no order")] == lines[-1:]


# A better order, and what changes.
def test_better_order(in_process):
    lines = lines_of(in_process(*SWAPPED, "--traffic", "tp=40,dp=1"))
    assert any("tp-dp in place of dp-tp" in line for line in lines)
    assert "tp host 4 of 4 -> 0 of 4 2 -> 1 320 B -> 0" in lines


# --json prints one JSON object and nothing else.
def test_json(in_process):
    found = json.loads(in_process(*NVL72, "--json", "--overlap", "dp").stdout)
    assert found["traffic"]["pp"]["pattern"] == "chain"
    assert found["traffic"]["dp"]["overlapped"] is True
    assert json.loads(in_process(*SWAPPED, "--json").stdout)["better"]["layout"] == "tp=2,dp=4"
    more = json.loads(in_process(*SWAPPED, "--json", "--groups", "dp+tp").stdout)
    assert ["dp", "tp"] in [row["dims"] for row in more["groups"]]


# Files that exist are kept, and then nothing is printed.
def test_write(in_process, tmp_path):
    path = tmp_path / "ranks"
    call = [*SWAPPED, "--write", "rankfile", str(path)]
    assert in_process(*call).returncode == 0
    assert path.read_text().startswith("rank 0=host0 slot=0\nrank 1=host0 slot=1\n")
    again = in_process(*call)
    assert (again.returncode, again.stdout) == (2, "")
    assert "exists, and is kept" in again.stderr
    path.write_text("")
    assert in_process(*call, "--force").returncode == 0
    assert path.read_text().count("\n") == 8


# Bad calls end with 2 and one message, without a table.
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["tp=2", "--on", "nope"], "--on"),
        (["tp", "--on", "n1,n2"], "--gpus-per-node"),
        (["tp=2,dp=2", "--on", "8", "--traffic", "tp=1", "--overlap", "dp"], "--overlap"),
        (["tp=2", "--on", "8", "--traffic", "tp"], "--traffic"),
        (["tp=2", "--on", "8", "--weights", "host=a"], "domain=1,leaf=7"),
        (["tp=2", "--on", "hots=2"], "did you mean 'host'"),
        (["tp=2", "--on", "8", "--on", "live"], "--on live"),
        (["tp=2", "--on", "live"], NO_JOB),
        (["tp", "--on", "8"], "size of dim 'tp'"),
        (["tp=4,dp", "--on", "n[1-3]", "--gpus-per-node", "2"], "6"),
        (["tp=2", "--on", "8", "--write", "order", "x"], "rankfile"),
        (["tp=2", "--on", "8", "--write", "rankfile", "/no/x"], "/no/x"),
    ],
)
def test_bad_calls(in_process, arguments, part):
    done = in_process("place", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert part in done.stderr
