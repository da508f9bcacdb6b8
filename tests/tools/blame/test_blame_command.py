"""`hypercomm blame` as a user meets it."""

import json

import pytest
from tools.blame.dumps import Dumps

pytestmark = pytest.mark.torch_free


@pytest.fixture
def folder(tmp_path):
    """Four ranks, of which 2 is not in the second all_reduce."""
    dumps = Dumps(4)
    for rank in range(4):
        dumps.call(rank, "WORLD")
        if rank != 2:
            dumps.call(rank, "WORLD", state="runs")
    return dumps.write(tmp_path)


# The rank to blame is named with its coordinates, and every wait is in the table and in JSON.
def test_a_late_rank(in_process, folder):
    done = in_process("blame", str(folder), "--layout", "tp=2,dp=2")
    assert (done.returncode, done.stderr) == (1, "")
    lines = [line.split() for line in done.stdout.splitlines() if line.strip(" ─")]
    assert lines[0][:4] == ["rank", "2", "(tp=0,", "dp=1)"]
    assert lines[2] == ["WORLD", "0..3", "all_reduce", "2", "0..1,", "3", "2"]
    done = in_process("blame", str(folder), "--json", "--layout", "tp=2,dp=2")
    found = json.loads(done.stdout)
    assert (done.returncode, found["outcome"], found["world_size"]) == (1, "blamed", 4)
    [finding] = found["findings"]
    [culprit] = finding["culprits"]
    assert (finding["kind"], finding["waiting"]) == ("absent", [0, 1, 3])
    assert (culprit["rank"], culprit["coords"]) == (2, {"tp": 0, "dp": 1})
    [wait] = found["waits"]
    assert (wait["group"], wait["members"], wait["number"]) == ("WORLD", [0, 1, 2, 3], 2)
    assert (wait["waiting"], wait["absent"]) == ([0, 1, 3], [2])


# Nobody waits; but one finished rank of two is no proof of that.
@pytest.mark.parametrize(
    ("missing", "code", "words"),
    [([], 0, "no rank waits: the calls of 2 ranks agree"), ([1], 1, "rank 1 has no dump")],
)
def test_nobody(missing, code, words, in_process, tmp_path):
    done = in_process("blame", str(Dumps(2).write(tmp_path, but=missing)))
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(words)
