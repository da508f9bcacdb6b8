"""Verdicts on dumps of torch's flight recorder, made here, so that all is known of them."""

import time

import pytest
from tools.blame.dumps import Dumps, blame, job

pytestmark = pytest.mark.torch_free


def test_nobody(tmp_path):
    verdict = blame(job().write(tmp_path), "tp=2,dp=2")
    assert (verdict.outcome, verdict.findings) == ("clear", [])


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
    assert verdict.waits[0].call.where == "train.py:42 in step"


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


def alternating(steps, change):
    """tp=2,dp=2 whose ranks call tp, dp in turn, but for rank 1 in step 5; one waits at the end."""
    dumps = job(calls=0)
    for rank in range(4):
        for step in range(steps):
            dumps.call(rank, f"tp{rank // 2}")
            times = {"skip": 0, "twice": 2}[change] if (rank, step) == (1, 5) else 1
            for _ in range(times):
                dumps.call(rank, f"dp{rank % 2}", op="reduce_scatter_tensor")
    dumps.entries[3 if change == "skip" else 1][-1]["state"] = "started"
    return dumps


# A call that is left out, or made twice, pairs with the next one, so that the wait at the end says
# nothing; the order across the groups of the rank has the place.
@pytest.mark.parametrize(
    ("change", "own", "usual"),
    [
        ("skip", "all_reduce number 7 of tp (ranks 0..1)", "reduce_scatter_tensor over dp"),
        ("twice", "reduce_scatter_tensor number 7 of dp (ranks 1, 3)", "all_reduce over tp"),
    ],
)
@pytest.mark.parametrize("lost", [0, 7, 8])
def test_order_across_groups(tmp_path, change, own, usual, lost):
    dumps = alternating(10, change)
    for entries in dumps.entries.values():
        del entries[:lost]  # as from a ring
    verdict = blame(dumps.write(tmp_path), "tp=2,dp=2")
    (finding,) = verdict.findings
    assert (finding.kind, verdict.culprits) == ("order", (1,))
    assert finding.says.startswith(f"rank 1 (tp=1, dp=0) calls {own} at train.py:47 in step right")
    assert f"most ranks call {usual} (rank 0 at train.py:4" in finding.says


# Ranks whose whole group does otherwise are right: rank 3 is missing in the end, and that is all.
def test_a_group_that_does_otherwise(tmp_path):
    dumps = job(4, 2)
    for rank in range(8):
        for _ in range(2 if rank < 4 else 1):
            dumps.call(rank, f"tp{rank // 4}")
        if rank != 3:
            dumps.call(rank, f"dp{rank % 4}", state="runs" if rank == 7 else "done")
    verdict = blame(dumps.write(tmp_path))
    assert [(f.kind, f.culprits) for f in verdict.findings] == [("absent", (3,))]


# Two against each other: the groups over the same dims decide, if most of them agree.
@pytest.mark.parametrize(("others", "culprits"), [("all_reduce", (1,)), ("barrier", ())])
def test_sibling_groups(tmp_path, others, culprits):
    dumps = job()
    for rank in range(4):
        op = "barrier" if rank == 1 else others if rank == 2 else "all_reduce"
        dumps.call(rank, f"dp{rank % 2}", op=op, state="runs")
    verdict = blame(dumps.write(tmp_path), "tp=2,dp=2")
    found = next(f for f in verdict.findings if set(f.involved) == {1, 3})
    assert (found.kind, found.culprits) == ("order", culprits)
    if culprits:
        words = "rank 1 (tp=1, dp=0) calls barrier number 2 of dp (ranks 1, 3) with (4,) Float at "
        assert found.says.startswith(words + "train.py:42 in step, but rank 3 calls all_reduce")
        assert "so do ranks 0, 2 in the other dp groups" in found.says


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
        assert "rank 1 calls broadcast number 1 of WORLD" in str(verdict)
        assert "ranks 0, 2 call all_reduce with (4,) Float at train.py:41 in step" in str(verdict)


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
    assert "rank 0 has not answered recv number 2 from rank 0 of WORLD" in str(verdict)


# Each receiver of one rank is listed.
def test_two_receivers(tmp_path):
    dumps = Dumps(4)
    dumps.message(3, "WORLD", "recv", 0)
    dumps.message(0, "WORLD", "send", 3)
    for rank in (1, 2, 3):
        dumps.message(rank, "WORLD", "recv", 0, state="runs")
    verdict = blame(dumps.write(tmp_path))
    assert (verdict.culprits, verdict.findings[0].waiting) == ((0,), (1, 2, 3))
    assert [(list(wait.calls), wait.absent) for wait in verdict.waits] == [
        ([rank], (0,)) for rank in (1, 2, 3)
    ]


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
