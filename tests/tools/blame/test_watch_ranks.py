"""Real gloo ranks with a planted mistake: each is found and named, and nobody else."""

import contextlib
import json
import pickle

import pytest
from ranks import blame_ranks
from ranks.mortal_ranks import exit_codes
from tools.blame.dumps import blame

from hypercomm import RankLayout, run_ranks
from hypercomm.errors import RankFailedError

pytestmark = pytest.mark.long

LAYOUT = RankLayout.parse(blame_ranks.SIZES)


def verdict_of(tmp_path, mistake):
    """What the records say of a program with a mistake, once all ranks stand still."""
    args = str(tmp_path / "records"), str(tmp_path / "kept"), mistake
    if mistake == "die":
        exit_codes(blame_ranks.mortal, blame_ranks.RANKS, *args, seconds=60)
    else:
        with contextlib.suppress(RankFailedError):  # they end themselves once all is kept
            run_ranks(blame_ranks.job, blame_ranks.RANKS, args=args, timeout=60)
    return blame(tmp_path / "kept")


# mistake: who makes it, what it is, who must wait (all others but those who wait for nobody),
# and what is said of it: with the coordinates, the call, its group's ranks, and the place.
MISTAKES = {
    "skip": (3, "order", ["all_reduce number 2 of dp", "right after all_reduce number 1 of WORLD"]),
    "swap": (
        2,
        "order",
        ["all_reduce number 2 of WORLD", "most ranks call all_reduce over tp"],
    ),
    "message": (3, "order", ["all_reduce number 3 of tp", "most ranks call send over WORLD"]),
    "shape": (6, "shape", ["(12,) float32", "(8,) float32", "number 2 of dp (ranks 0, 2, 4, 6)"]),
    "dtype": (5, "dtype", ["(8,) int32", "(8,) float32", "number 2 of dp (ranks 1, 3, 5, 7)"]),
    "loop": (5, "absent", ["all_reduce number 3 of tp (ranks 4..5)", "in endless_loop"]),
    "raise": (5, "absent", ["number 3 of tp", "it raised ValueError: a planted mistake"]),
    "leave": (5, "absent", ["number 3 of tp", "it left the watch"]),
    "late": (0, "absent", ["number 3 of tp (ranks 0..1), in which rank 1 waits", "endless_loop"]),
    "die": (5, "no dump", ["number 3 of tp (ranks 4..5), in which rank 4 waits", "left no dump"]),
}


SLOW = {"raise", "leave", "pipe"}
"""Programs that others are much like."""


def each(names):
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


@pytest.mark.parametrize("mistake", each(MISTAKES))
def test_mistakes(tmp_path, mistake):
    culprit, kind, words = MISTAKES[mistake]
    verdict = verdict_of(tmp_path, mistake)
    assert (verdict.culprits, verdict.outcome) == ((culprit,), "blamed"), str(verdict)
    (finding,) = verdict.findings
    assert finding.kind == kind
    assert str(verdict).startswith(f"rank {culprit} (")
    coords = LAYOUT.coords(culprit)
    assert all(word in str(verdict) for word in [*words, f"tp={coords['tp']}, dp={coords['dp']}"])
    if kind not in {"shape", "dtype"}:  # gloo does not mind those, and goes on
        assert set(finding.waiting) == {*range(8)} - {culprit}


# A job without a mistake: nobody is blamed, and the files know it.
@pytest.mark.parametrize("program", each(["none", "pipe"]))
def test_nobody(tmp_path, program):
    verdict = verdict_of(tmp_path, program)
    assert (verdict.culprits, verdict.outcome) == ((), "clear")
    assert len(verdict.evidence.ranks) == 8
    record = verdict.evidence.ranks[5]
    tp = next(group for group in record.groups if group.title == "tp")
    assert tp.ranks == (4, 5)
    assert [call.state for call in record.lanes[tp, ""]] == ["finished"] * 4


# Of messages only the last are kept, and some may come from anybody: nobody is blamed for that.
def test_many_messages(tmp_path):
    run_ranks(blame_ranks.messages, 2, args=(str(tmp_path),), timeout=60)
    verdict = blame(tmp_path)
    assert (verdict.culprits, verdict.outcome) == ((), "clear"), str(verdict)


# A message that was posted, and that nobody waits for so far, excuses nobody.
def test_posted_early(tmp_path):
    args = str(tmp_path / "records"), str(tmp_path / "kept")
    with contextlib.suppress(RankFailedError):
        run_ranks(blame_ranks.posted_early, 2, args=args, timeout=60)
    verdict = blame(tmp_path / "kept")
    assert (verdict.culprits, verdict.outcome) == ((1,), "blamed"), str(verdict)
    assert "in endless_loop" in str(verdict)


# A rank that takes a message from anybody, and gets none, waits: for whom, nothing tells. So it is
# not to blame either where others wait for it.
@pytest.mark.parametrize("is_awaited", [False, True])
def test_from_anybody(tmp_path, is_awaited):
    args = str(tmp_path / "records"), str(tmp_path / "kept"), is_awaited
    with contextlib.suppress(RankFailedError):
        run_ranks(blame_ranks.from_anybody, 3, args=args, timeout=60)
    verdict = blame(tmp_path / "kept")
    assert (verdict.culprits, verdict.outcome) == ((), "unclear"), str(verdict)
    assert "recv number 1 from any rank of WORLD (ranks 0..2) at " in str(verdict)
    assert "in takes_from_anybody has not ended on rank 2" in str(verdict)


# The tool of torch finds no mistake in the collectives. That of torch 2.10 knows only the names
# that NCCL gives them, so the records get those.
def test_torchfrtrace(tmp_path):
    fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    (tmp_path / "pickles").mkdir()
    run_ranks(blame_ranks.each_kind, 4, args=(str(tmp_path),), timeout=60)
    for rank in range(4):
        text = (tmp_path / f"hypercomm_watch_{rank}.json").read_text()
        record = json.loads(
            text.replace('"gloo:', '"nccl:').replace(":barrier", ":all_reduce_barrier")
        )
        assert record["entries"]
        assert all(entry["profiling_name"].startswith("nccl:") for entry in record["entries"])
        (tmp_path / "pickles" / f"trace_{rank}").write_bytes(pickle.dumps(record))
    fr_trace.main([str(tmp_path / "pickles"), "-p", "trace_", "-o", str(tmp_path / "found")])
    _, found = pickle.loads((tmp_path / "found").read_bytes())
    assert {call.pg_desc.rpartition(":")[2] for call in found.collectives} == {"tp", "dp"}
    assert len(found.collectives) == 12
    assert all(call.pass_check for call in found.collectives)
