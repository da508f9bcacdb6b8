"""`hypercomm blame`: output, JSON and exit codes."""

import json

import pytest
from tools.blame.dumps import Dumps

pytestmark = pytest.mark.torch_free


@pytest.fixture
def folder(tmp_path):
    """Write the dumps of four ranks, of which rank 2 has not entered the second all_reduce."""
    dumps = Dumps(4)
    for rank in range(4):
        dumps.call(rank, "WORLD")
        if rank != 2:
            dumps.call(rank, "WORLD", state="runs")
    return dumps.write(tmp_path)


# The rank to blame is named with its coordinates. Every wait is in the table and in the JSON.
def test_absent_rank_is_blamed(in_process, folder):
    done = in_process("blame", str(folder), "--layout", "tp=2,dp=2")
    assert (done.returncode, done.stderr) == (1, "")
    lines = [line.split() for line in done.stdout.splitlines() if line.strip(" ─")]
    assert lines[0][:4] == ["rank", "2", "(tp=0,", "dp=1)"]
    assert lines[2] == ["WORLD", "0..3", "all_reduce", "2", "0..1,", "3", "2"]
    done = in_process("blame", str(folder), "--json", "--layout", "tp=2,dp=2")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert (found["outcome"], found["world_size"]) == ("blamed", 4)
    [finding] = found["findings"]
    [culprit] = finding["culprits"]
    assert (finding["kind"], finding["waiting"]) == ("absent", [0, 1, 3])
    assert (culprit["rank"], culprit["coords"]) == (2, {"tp": 0, "dp": 1})
    [wait] = found["waits"]
    assert (wait["group"], wait["members"], wait["number"]) == ("WORLD", [0, 1, 2, 3], 2)
    assert (wait["waiting"], wait["absent"]) == ([0, 1, 3], [2])
    assert wait["where"] == "train.py:42 in step"


# If no rank waits, the exit code is 0. If a dump is missing, the exit code is 1, because the rank
# of this dump may wait.
@pytest.mark.parametrize(
    ("missing", "code", "message"),
    [([], 0, "no rank waits: the calls of 2 ranks agree"), ([1], 1, "rank 1 has no dump")],
)
def test_no_rank_waits(missing, code, message, in_process, tmp_path):
    done = in_process("blame", str(Dumps(2).write(tmp_path, but=missing)))
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(message)
