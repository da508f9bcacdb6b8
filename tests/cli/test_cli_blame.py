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


def test_words(in_process, folder):
    done = in_process("blame", str(folder), "--layout", "tp=2,dp=2")
    assert (done.returncode, done.stderr) == (1, "")
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip(" ─")]
    assert lines == [
        (
            "rank 2 (tp=0, dp=1) has not entered all_reduce number 2 of WORLD (ranks 0..3), in "
            "which ranks 0..1, 3 wait"
        ),
        "group   ranks   call           waiting in it   not entered by",
        "WORLD   0..3    all_reduce 2   0..1, 3         2",
        "4 dumps of 4 ranks",
    ]


def test_json(in_process, folder):
    done = in_process("blame", str(folder), "--json", "--layout", "tp=2,dp=2")
    found = json.loads(done.stdout)
    assert (done.returncode, found["outcome"], found["world_size"]) == (1, "blamed", 4)
    (finding,) = found["findings"]
    assert finding["kind"] == "absent"
    assert [(one["rank"], one["coords"]) for one in finding["culprits"]] == [
        (2, {"tp": 0, "dp": 1})
    ]
    assert finding["waiting"] == [0, 1, 3]
    (wait,) = found["waits"]
    assert (wait["group"], wait["members"], wait["number"]) == ("WORLD", [0, 1, 2, 3], 2)
    assert (wait["waiting"], wait["absent"]) == ([0, 1, 3], [2])


def test_nobody(in_process, tmp_path):
    done = in_process("blame", str(Dumps(2).write(tmp_path)))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no rank waits: the calls of 2 ranks agree and have ended")


# One finished rank of two is no proof that nobody waits.
def test_a_dump_is_missing(in_process, tmp_path):
    done = in_process("blame", str(Dumps(2).write(tmp_path, but=[1])))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("rank 1 has no dump that can be read")


def test_bad_calls(in_process, folder, tmp_path):
    for arguments, words in [
        ([str(tmp_path / "none")], "cannot read the folder"),
        (
            [str(folder), "--layout", "tp=2"],
            "--layout tp=2 has 2 ranks, but the job has 4",
        ),
        ([str(folder), "--layout", "tp=2,dp"], "the size of dim 'dp' is unspecified; give it"),
        ([str(folder), "--layout", "tp"], "unspecified"),
        ([], "Missing argument 'FOLDER'"),
    ]:
        done = in_process("blame", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
