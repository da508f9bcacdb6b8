"""Test files that are not dumps, broken or malicious dumps, and dumps of several jobs."""

import json
import pickle

import pytest
from tools.blame.dumps import Dumps, blame, job

from hypercomm.errors import ToolError, WorldSizeError

pytestmark = pytest.mark.torch_free


class Evil:
    def __reduce__(self):
        return print, ("it ran",)


def waiting(folder):
    """Write the dumps of three ranks that wait, and return them."""
    dumps = Dumps(3)
    for rank in range(3):
        dumps.call(rank, "WORLD", state="runs")
    dumps.write(folder)
    return dumps


# The verdict names a dump that cannot be read, and analyses the other dumps. An unreadable dump is
# no reason to blame its rank. Code in a dump does not run.
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"what is this",
        b"[1]",
        b"\x80\x02].",
        pickle.dumps({"entries": []})[:9],
        pickle.dumps(Evil()),
        b"[" * 100_000 + b"]" * 100_000,
    ],
    ids=range(8),
)
def test_unreadable_dumps(tmp_path, capsys, content):
    waiting(tmp_path)
    (tmp_path / "nccl_trace_rank_2").write_bytes(content)
    verdict = blame(tmp_path)
    assert verdict.culprits == ()
    assert verdict.findings[0].kind == "unreadable"
    assert "nccl_trace_rank_2 cannot be read as a dump: " in str(verdict)
    assert verdict.evidence.unreadable.keys() == {2}
    assert capsys.readouterr().out == ""


def changed(content, field, value):
    """Return a dump with another value in one field, wherever the field is."""
    if isinstance(content, dict):
        return {
            key: value if key == field else changed(inner, field, value)
            for key, inner in content.items()
        }
    return [changed(inner, field, value) for inner in content] if type(content) is list else content


# A dump in which a field has a wrong type is also unreadable.
@pytest.mark.parametrize("value", [10**5000, [["a"]], None], ids=range(3))
def test_fields_of_wrong_types(tmp_path, value):
    dumps = waiting(tmp_path)
    for field in (
        "pg_config",
        "name",
        "desc",
        "ranks",
        "entries",
        "record_id",
        "process_group",
        "collective_seq_id",
        "profiling_name",
        "input_sizes",
        "input_dtypes",
        "state",
        "line",
    ):
        content = changed(dumps.content(1), field, value)
        (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps(content))
        verdict = blame(tmp_path)
        assert len(str(verdict) + json.dumps(verdict.to_dict())) < 5000
        assert list(verdict.evidence.unreadable) == [1], field


def test_missing_field_is_named(tmp_path):
    waiting(tmp_path)
    (tmp_path / "nccl_trace_rank_1").write_text("{}")
    unreadable = blame(tmp_path).evidence.unreadable
    assert unreadable == {1: "nccl_trace_rank_1 cannot be read as a dump: it has no 'entries'"}


# If a group has another description on one rank, it is still the same group, because its name and
# ranks are equal.
def test_group_with_another_description(tmp_path):
    dumps = job()
    for rank in (0, 1):
        dumps.call(rank, "tp0", state="runs")
    dumps.write(tmp_path)
    content = changed(dumps.content(1), "desc", "other")
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps(content))
    assert [one.kind for one in blame(tmp_path).findings] == ["stuck"]


def test_large_files_are_not_read(tmp_path):
    waiting(tmp_path)
    with (tmp_path / "nccl_trace_rank_2").open("wb") as file:
        file.truncate(10**9)
    assert "it is larger than 64 MiB" in blame(tmp_path).evidence.unreadable[2]


# Control characters are not printed.
def test_control_characters_are_replaced(tmp_path):
    dumps = Dumps(2)
    for rank in range(2):
        dumps.call(rank, "WORLD", op="all\x1b[31mreduce", state="runs")
    assert "all?[31mreduce" in str(blame(dumps.write(tmp_path)))


# A file that is not named like a dump is ignored. Calls that are complete on some ranks show
# nothing about ranks without a dump.
def test_missing_dumps_are_unclear(tmp_path):
    folder = job().write(tmp_path, but=[0, 1, 3])
    for name in ("core.1", "core.4711", "stderr.1"):
        (folder / name).write_bytes(b"\x7fELF")
    verdict = blame(folder)
    (finding,) = verdict.findings
    assert verdict.outcome == "unclear"
    assert verdict.culprits == ()
    assert (finding.kind, finding.involved) == ("no dump", (0, 1, 3))
    assert (verdict.evidence.world_size, verdict.evidence.unreadable) == (4, {})


# If a folder cannot be analysed, the error names the files or the folder.
def test_invalid_folders(tmp_path):
    with pytest.raises(ToolError, match=r"cannot read the folder '.*/none': .*No such file"):
        blame(tmp_path / "none")
    (tmp_path / "log.txt").write_text("")
    with pytest.raises(ToolError, match="no dump"):
        blame(tmp_path)
    (tmp_path / "nccl_trace_rank_0").write_bytes(b"{")
    with pytest.raises(ToolError, match="nccl_trace_rank_0 cannot be read as a dump"):
        blame(tmp_path)
    folder = job().write(tmp_path)
    for layout in ("tp=2", "tp=2,dp=4"):
        with pytest.raises(WorldSizeError, match=f"--layout {layout} has . ranks, but the job has"):
            blame(folder, layout)
    (folder / "nccl_trace_rank_7").write_bytes(pickle.dumps(Dumps(8).content(7)))
    with pytest.raises(ToolError, match="trace_rank_3 and nccl_trace_rank_7 belong to two jobs"):
        blame(folder)
    (folder / "other_1.json").write_text(json.dumps(job().content(1)))
    with pytest.raises(ToolError, match=r"rank 1 has two dumps, \S+_1 and other_1\.json"):
        blame(folder)
