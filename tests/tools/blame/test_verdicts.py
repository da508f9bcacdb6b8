"""Verdicts on dumps of torch's flight recorder, made here, so that all is known of them."""

import json
import pickle
import time

import pytest
from tools.blame.dumps import Dumps

from hypercomm import DumpError, RankLayout, WorldSizeError
from hypercomm.tools.blame.verdict import blame

pytestmark = pytest.mark.torch_free


def job(tp=2, dp=2):
    """tp=2,dp=2 with one all_reduce over each group, all of which have ended."""
    dumps, layout = Dumps(tp * dp), RankLayout([tp, dp], ["tp", "dp"])
    for dims in layout.dim_names:
        for index, ranks in enumerate(layout.groups(dims)):
            dumps.group(f"{dims}{index}", dims, ranks)
            for rank in ranks:
                dumps.call(rank, f"{dims}{index}")
    return dumps


def test_nobody(tmp_path):
    verdict = blame(job().write(tmp_path), "tp=2,dp=2")
    assert (verdict.outcome, verdict.findings) == ("clear", ())


# 1 is in no second call of tp; 0 waits there for it, and 2 in dp for 0. The place is known.
def test_chain(tmp_path):
    dumps = job()
    dumps.call(0, "tp0", state="runs")
    dumps.call(2, "dp0", state="runs")
    verdict = blame(dumps.write(tmp_path), "tp=2,dp=2")
    assert verdict.culprits == (1,)
    assert str(verdict) == (
        "rank 1 (tp=1, dp=0) has not entered all_reduce number 2 of tp (ranks 0..1), in which "
        "rank 0 waits; rank 2 waits indirectly"
    )
    assert verdict.findings[0].waits[0].call.where == "train.py:42 in step"


# Dims come from the layout where torch's names say nothing.
def test_dims_by_layout(tmp_path):
    dumps = Dumps(4)
    dumps.group("7", "undefined", [1, 3])
    dumps.call(1, "7", state="runs")
    folder = dumps.write(tmp_path)
    assert "of dp (ranks 1, 3)" in str(blame(folder, "tp=2,dp=2"))
    assert "of group 7 (ranks 1, 3)" in str(blame(folder))


@pytest.mark.parametrize(
    ("more", "kind"),
    [({"sizes": (5,)}, "shape"), ({"dtype": "Half"}, "dtype"), ({"op": "broadcast"}, "order")],
)
def test_differences(tmp_path, more, kind):
    dumps = Dumps(4)
    for rank in range(4):
        dumps.call(rank, "WORLD", state="runs", **(more if rank == 2 else {}))
    verdict = blame(dumps.write(tmp_path))
    assert [(f.kind, f.culprits) for f in verdict.findings] == [(kind, (2,))]


# Equal numbers of elements in other shapes are no mistake; nor are uneven parts of an all-to-all.
def test_no_differences(tmp_path):
    dumps = Dumps(2)
    for rank, sizes in enumerate([(2, 2), (4,)]):
        dumps.call(rank, "WORLD", sizes=sizes)
        dumps.call(rank, "WORLD", op="all_to_all", sizes=(rank + 1,))
    assert blame(dumps.write(tmp_path)).outcome == "clear"


# Two ranks that differ: neither is blamed.
def test_one_against_one(tmp_path):
    dumps = Dumps(2)
    for rank in range(2):
        dumps.call(rank, "WORLD", sizes=(rank + 1,), state="runs")
    verdict = blame(dumps.write(tmp_path))
    assert (verdict.outcome, verdict.culprits) == ("unclear", ())
    assert "the dumps do not show which is intended" in str(verdict)


def test_swapped_in_one_group_and_left_out(tmp_path):
    for folder, own in {"swap": "ba", "skip": "b"}.items():
        dumps = Dumps(3)
        for rank in range(3):
            for op in own if rank == 1 else "ab":
                dumps.call(rank, "WORLD", op={"a": "all_reduce", "b": "broadcast"}[op])
        (tmp_path / folder).mkdir()
        verdict = blame(dumps.write(tmp_path / folder))
        assert verdict.culprits == (1,)
        assert "2 of 3 ranks first call all_reduce over WORLD" in str(verdict)
        assert "at train.py:41 in step as its first call" in str(verdict)


# 0 is in a and not in b, 1 the other way round; without other ranks nobody can tell who is right.
def test_circle(tmp_path):
    dumps = Dumps(2)
    dumps.group("1", "a", [0, 1])
    dumps.group("2", "b", [0, 1])
    dumps.call(0, "1", state="runs")
    dumps.call(1, "2", state="runs")
    verdict = blame(dumps.write(tmp_path))
    assert [(f.kind, f.culprits, f.involved) for f in verdict.findings] == [("circle", (), (0, 1))]
    for words in ("rank 0 is in all_reduce number 1 of a", "rank 1 is in all_reduce number 1 of b"):
        assert words in str(verdict)


# The device of rank 1 has not started what that of rank 0 has, though it was called.
def test_queued(tmp_path):
    dumps = Dumps(2)
    dumps.call(0, "WORLD", state="runs")
    dumps.call(1, "WORLD", state="queued")
    assert blame(dumps.write(tmp_path)).culprits == (1,)


# All are in it, and it does not end: no rank is blamed for the network.
def test_stuck(tmp_path):
    dumps = Dumps(2)
    for rank in range(2):
        dumps.call(rank, "WORLD", state="runs")
    verdict = blame(dumps.write(tmp_path))
    assert (verdict.outcome, verdict.culprits, verdict.findings[0].kind) == ("unclear", (), "stuck")


def test_messages(tmp_path):
    dumps = Dumps(3)
    for number in range(2):
        dumps.message(0, "WORLD", "send", 1)
        dumps.message(1, "WORLD", "recv", 0, state="runs" if number else "done")
    dumps.entries[0].pop()
    verdict = blame(dumps.write(tmp_path))
    assert verdict.culprits == (0,)
    assert "rank 0 has not sent what rank 1 waits for in recv number 2 from rank 0" in str(verdict)


# Each receiver of one rank is listed; those who wait for as much are named together.
def test_two_receivers(tmp_path):
    dumps = Dumps(4)
    dumps.message(3, "WORLD", "recv", 0)
    dumps.message(0, "WORLD", "send", 3)
    for rank in (1, 2, 3):
        dumps.message(rank, "WORLD", "recv", 0, state="runs")
    verdict = blame(dumps.write(tmp_path))
    assert verdict.culprits == (0,)
    assert str(verdict) == (
        "rank 0 has not sent what ranks 1..2 wait for in recv number 1 from rank 0 in WORLD "
        "(ranks 0..3); rank 3 waits indirectly"
    )
    (calls,) = verdict.by_group().values()
    assert [[wait.rank for wait in waits] for waits in calls] == [[1], [2], [3]]
    assert [wait["rank"] for wait in verdict.to_dict()["groups"][0]["waits"]] == [1, 2, 3]


# A ring that has turned: what a rank did in a group is lost, so that it is not blamed.
def test_turned_ring(tmp_path):
    dumps = Dumps(2)
    dumps.group("1", "a", [0, 1])
    dumps.call(0, "1", state="runs")
    dumps.call(1, "WORLD", record_id=4000)
    assert blame(dumps.write(tmp_path)).culprits == ()


def test_dead(tmp_path):
    dumps = Dumps(4)
    for rank in range(3):
        dumps.call(rank, "WORLD", state="runs")
    verdict = blame(dumps.write(tmp_path, but=[3]), "dp=4")
    assert [(f.kind, f.culprits) for f in verdict.findings] == [("no dump", (3,))]
    assert verdict.to_dict()["no_dump"] == [3]


# 3 has skipped a call of its tp; that rank 0 left no dump does not hide it, nor is 0 blamed for it.
def test_dump_that_was_not_collected(tmp_path):
    dumps = job(2, 4)
    for rank in range(8):
        if rank == 2:
            dumps.call(rank, "tp1", state="runs")
        else:
            dumps.call(rank, "WORLD", state="runs")
            dumps.entries[rank][-1]["record_id"] = 9
            if rank != 3:
                dumps.call(rank, f"tp{rank // 2}")
                dumps.entries[rank][-1]["record_id"] = 8
    verdict = blame(dumps.write(tmp_path, but=[0]), "tp=2,dp=4")
    assert [(f.kind, f.culprits) for f in verdict.findings] == [("order", (3,))]
    assert "rank 0 left no dump" in verdict.evidence.notes[0]


# A dtype that differs, which hindered nobody, does not hide that another member is missing later.
def test_two_mistakes(tmp_path):
    dumps = Dumps(4)
    for rank in range(4):
        dumps.call(rank, "WORLD", dtype="Int" if rank == 1 else "Float")
        if rank != 2:
            dumps.call(rank, "WORLD", state="queued" if rank == 1 else "runs")
    verdict = blame(dumps.write(tmp_path))
    assert {(f.kind, f.culprits) for f in verdict.findings} == {("dtype", (1,)), ("absent", (2,))}


# 1,024 ranks of tp=8,dp=128, of which one is missing in the last of 100 calls: under 5 seconds on a
# quiet machine, four times that of the processor here.
@pytest.mark.long
@pytest.mark.parametrize("size", [256, pytest.param(1024, marks=pytest.mark.slow)])
def test_many_ranks(tmp_path, size):
    dumps, missing = job(8, size // 8), size * 3 // 4 + 9
    for rank in dumps.ranks:
        own = f"tp{rank // 8}"
        for number in range(96):
            dumps.call(rank, own if number % 2 else "WORLD")
        if rank // 8 != missing // 8:
            dumps.call(rank, own)
            dumps.call(rank, "WORLD", state="runs")
        elif rank != missing:
            dumps.call(rank, own, state="runs")
    dumps.write(tmp_path)
    begin = time.process_time()
    verdict = blame(tmp_path, f"tp=8,dp={size // 8}")
    seconds = time.process_time() - begin
    assert verdict.culprits == (missing,)
    assert len(verdict.findings[0].waiting) == size - 1
    print(f"{size:,} dumps of {len(dumps.entries[0])} calls: {seconds:.1f} s")
    assert seconds < 20


# ---- bad input ----------------------------------------------------------------------------------


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
        assert "nccl_trace_rank_2 cannot be read: " in str(verdict)
        assert verdict.evidence.notes[0].startswith("nccl_trace_rank_2 cannot be read: ")


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
    assert all("no dump has a name like it" in note for note in verdict.evidence.notes)
    (folder / "nccl_trace_rank_1").unlink()
    assert [(f.kind, f.culprits) for f in blame(folder).findings] == [("no dump", (1,))]


# What has ended on one rank of four says nothing of the others.
def test_one_of_four(tmp_path):
    folder = job().write(tmp_path, but=[0, 1, 3])
    verdict = blame(folder)
    assert (verdict.outcome, verdict.culprits) == ("unclear", ())
    assert str(verdict) == (
        "the calls of 1 of 4 ranks agree and have ended; ranks 0..1, 3 have no dump that can be "
        "read, so it is unknown whether anything waits"
    )
    for rank in (0, 1, 3):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(b"{")
    assert "ranks 0..1, 3 have no dump that can be read" in str(blame(folder))


class Evil:
    def __reduce__(self):
        return print, ("it ran",)


def test_pickle_that_wants_to_run_code(tmp_path, capsys):
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DumpError, match=r"a dump holds only numbers, texts, lists and dicts, and n"):
        blame(tmp_path)
    assert capsys.readouterr().out == ""


def test_two_jobs(tmp_path):
    folder = job(2, 2).write(tmp_path)
    other = Dumps(8)
    (folder / "nccl_trace_rank_7").write_bytes(pickle.dumps(other.content(7)))
    with pytest.raises(DumpError, match=r"nccl_trace_rank_0 .* nccl_trace_rank_7 are of two jobs"):
        blame(folder)


def test_versions(tmp_path):
    folder = job().write(tmp_path)
    older = {**job().content(3), "version": "2.4"}
    (folder / "nccl_trace_rank_3").write_bytes(pickle.dumps(older))
    (note,) = blame(folder).evidence.notes
    assert "nccl_trace_rank_3 has version 2.4 of the flight recorder, others 2.10" in note


def test_rank_twice(tmp_path):
    folder = job().write(tmp_path)
    (folder / "other_1.json").write_text(json.dumps(job().content(1)))
    with pytest.raises(DumpError, match=r"rank 1 has two dumps, \S+_1 and other_1\.json"):
        blame(folder)


def test_folders(tmp_path):
    with pytest.raises(DumpError, match=r"cannot read the folder '.*/none': No such file"):
        blame(tmp_path / "none")
    with pytest.raises(DumpError, match="is empty; dumps come from"):
        blame(tmp_path)
    (tmp_path / "log.txt").write_text("")
    with pytest.raises(DumpError, match="is 1 files, none of them a dump"):
        blame(tmp_path)


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,dp=4"])
def test_layout_that_does_not_fit(tmp_path, layout):
    folder = job().write(tmp_path)
    with pytest.raises(WorldSizeError, match=r"--layout .* ranks, but the job has "):
        blame(folder, layout)
