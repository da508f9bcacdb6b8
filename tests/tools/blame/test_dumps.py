"""Files that are no dumps, broken, hostile, or of several jobs; of several versions."""

import json
import pickle
import time

import pytest
from tools.blame.dumps import Dumps, blame, job

from hypercomm.errors import ToolError, WorldSizeError

pytestmark = pytest.mark.torch_free


# One that is cut off is named, and the others are judged: nobody is blamed for it.
def test_cut_off(tmp_path):
    dumps = Dumps(3)
    for rank in range(3):
        dumps.call(rank, "WORLD", state="runs")
    folder = dumps.write(tmp_path)
    file = folder / "nccl_trace_rank_2"
    for content in (file.read_bytes()[:200], b"", b"{", b"what is this", b"[1]", b"\x80\x02]."):
        file.write_bytes(content)
        verdict = blame(folder)
        assert (verdict.culprits, verdict.findings[0].kind) == ((), "unreadable")
        assert "nccl_trace_rank_2 cannot be read as a dump: " in str(verdict)
        assert verdict.evidence.unreadable.keys() == {2}


# A file that is no dump, and is not named as one, is nobody's; without any other, it is said.
def test_files_of_others(tmp_path):
    dumps = Dumps(3)
    for rank in (0, 2):
        dumps.call(rank, "WORLD", state="runs")
    folder = dumps.write(tmp_path)
    for name in ("core.1", "core.4711", "stderr.1"):
        (folder / name).write_bytes(b"\x7fELF")
    verdict = blame(folder)
    assert [(f.kind, f.culprits) for f in verdict.findings] == [("absent", (1,))]
    assert (verdict.evidence.world_size, verdict.evidence.unreadable) == (3, {})
    (folder / "nccl_trace_rank_1").unlink()
    assert [(f.kind, f.culprits) for f in blame(folder).findings] == [("no dump", (1,))]


# What has ended on one rank of four says nothing of the others.
def test_one_of_four(tmp_path):
    folder = job().write(tmp_path, but=[0, 1, 3])
    verdict = blame(folder)
    assert (verdict.outcome, verdict.culprits) == ("unclear", ())
    for content in (None, b"{"):
        for rank in (0, 1, 3) if content else ():
            (folder / f"nccl_trace_rank_{rank}").write_bytes(content)
        (finding,) = blame(folder).findings
        assert (finding.kind, finding.involved) == ("no dump", (0, 1, 3))


class Evil:
    def __reduce__(self):
        return print, ("it ran",)


def test_pickle_that_wants_to_run_code(tmp_path, capsys):
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(
        ToolError, match="none of them a dump: nccl_trace_rank_0 cannot be read as a dump"
    ):
        blame(tmp_path)
    assert capsys.readouterr().out == ""


def nested(kind):
    """2**40 lists or tuples in less than a kilobyte of a pickle."""
    value = kind(["a"])
    for _ in range(40):
        value = kind([value, value])
    return value


def changed(content, field, value):
    """A dump with another value in one field, wherever the field is."""
    if isinstance(content, dict):
        return {
            key: value if key == field else changed(inner, field, value)
            for key, inner in content.items()
        }
    return [changed(inner, field, value) for inner in content] if type(content) is list else content


FIELDS = [
    *("pg_config", "name", "desc", "ranks", "entries", "record_id", "process_group"),
    *("collective_seq_id", "profiling_name", "input_sizes", "input_dtypes", "state", "frames"),
    *("filename", "line"),
]
KEY = b"\x80\x02})q\x00" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(60))
HOSTILE = {
    "lists": lambda content, field: pickle.dumps(changed(content, field, nested(list))),
    "tuples": lambda content, field: pickle.dumps(changed(content, field, nested(tuple))),
    "digits": lambda content, field: pickle.dumps(changed(content, field, 10**5000)),
    "digits of JSON": lambda content, field: (
        json.dumps(changed(content, field, "?")).replace('"?"', "9" * 5000).encode()
    ),
    "brackets": lambda content, field: (
        json.dumps(changed(content, field, "?"))
        .replace('"?"', "[" * 100_000 + "]" * 100_000)
        .encode()
    ),
}


# Any field of any kind: the dump is noted as unreadable within a second, and others are judged.
@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_fields(tmp_path, how):
    dumps = Dumps(3)
    for rank in range(3):
        dumps.call(rank, "WORLD", state="runs")
    folder = dumps.write(tmp_path)
    for field in FIELDS:
        content = HOSTILE[how](dumps.content(1), field)
        (folder / "nccl_trace_rank_1").write_bytes(content)
        begin = time.process_time()
        verdict = blame(folder)
        text = str(verdict) + json.dumps(verdict.to_dict())
        assert time.process_time() - begin < 1, field
        assert len(text) < 5000
        assert list(verdict.evidence.unreadable) == [1], field


# Neither is a key hashed that has 2**60 parts, nor is one that is a million deep.
@pytest.mark.parametrize("key", [KEY + b"h%c" % 60, b"\x80\x02})" + b"\x85" * 10**6])
def test_hostile_keys(tmp_path, key):
    (tmp_path / "nccl_trace_rank_0").write_bytes(key + b"K\x01s.")
    with pytest.raises(ToolError, match="none of them a dump: nccl_trace_rank_0 cannot be read"):
        blame(tmp_path)


def test_large_files(tmp_path):
    folder = job().write(tmp_path)
    with (folder / "nccl_trace_rank_3").open("wb") as file:
        file.truncate(10**9)
    assert "it is larger than 64 MiB" in blame(folder).evidence.unreadable[3]


# What a terminal would obey is not printed.
def test_control_characters(tmp_path):
    dumps = Dumps(2)
    for rank in range(2):
        dumps.call(rank, "WORLD", op="all\x1b[31mreduce", state="runs")
    verdict = str(blame(dumps.write(tmp_path)))
    assert "all?[31mreduce" in verdict
    assert "\x1b" not in verdict


def test_two_jobs(tmp_path):
    folder = job(2, 2).write(tmp_path)
    other = Dumps(8)
    (folder / "nccl_trace_rank_7").write_bytes(pickle.dumps(other.content(7)))
    with pytest.raises(ToolError, match=r"nccl_trace_rank_3 and nccl_trace_rank_7 are of two jobs"):
        blame(folder)


def test_rank_twice(tmp_path):
    folder = job().write(tmp_path)
    (folder / "other_1.json").write_text(json.dumps(job().content(1)))
    with pytest.raises(ToolError, match=r"rank 1 has two dumps, \S+_1 and other_1\.json"):
        blame(folder)


def test_folders(tmp_path):
    with pytest.raises(ToolError, match=r"cannot read the folder '.*/none': No such file"):
        blame(tmp_path / "none")
    with pytest.raises(ToolError, match="is empty; dumps come from"):
        blame(tmp_path)
    (tmp_path / "log.txt").write_text("")
    with pytest.raises(ToolError, match="is 1 files, none of them a dump"):
        blame(tmp_path)


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,dp=4"])
def test_layout_that_does_not_fit(tmp_path, layout):
    folder = job().write(tmp_path)
    with pytest.raises(WorldSizeError, match=r"--layout .* ranks, but the job has "):
        blame(folder, layout)
