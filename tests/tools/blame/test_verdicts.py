"""Test the verdicts on dumps with known mistakes."""

import time

import pytest
from tools.blame.dumps import Dumps, blame, job

pytestmark = pytest.mark.torch_free


def found(verdict):
    """Return the kinds of the findings, with the ranks to blame."""
    return [(finding.kind, finding.culprits) for finding in verdict.findings]


# Rank 1 has not entered the second call over tp, in which rank 0 waits for rank 1. Rank 2 waits in
# dp for rank 0. The source line is known.
def test_chain_of_waits(tmp_path):
    dumps = job()
    dumps.call(0, "tp0", state="runs")
    dumps.call(2, "dp0", state="runs")
    verdict = blame(dumps.write(tmp_path), "tp=2,dp=2")
    assert found(verdict) == [("absent", (1,))]
    assert verdict.findings[0].waiting == (0, 2)
    assert str(verdict) == (
        "rank 1 (tp=1, dp=0) has not entered all_reduce number 2 of tp (ranks 0..1), in which "
        "rank 0 waits; rank 2 waits indirectly"
    )
    assert verdict.waits[0].call.where == "train.py:42 in step"


@pytest.mark.parametrize(
    ("more", "kind"),
    [({"sizes": (5,)}, "shape"), ({"dtype": "Half"}, "dtype"), ({"op": "broadcast"}, "order")],
)
def test_call_that_differs(tmp_path, more, kind):
    dumps = Dumps(4)
    for rank in range(4):
        dumps.call(rank, "WORLD", state="runs", **(more if rank == 2 else {}))
    assert found(blame(dumps.write(tmp_path))) == [(kind, (2,))]


# If a rank skips or repeats a call, its later calls pair with the wrong calls of other ranks, so
# the final wait shows nothing. The order of the rank's calls over all groups shows where the
# mistake is, even if older calls are lost.
@pytest.mark.parametrize(
    ("times", "own", "usual"),
    [
        (0, "all_reduce number 7 of tp (ranks 0..1)", "reduce_scatter_tensor over dp"),
        (2, "reduce_scatter_tensor number 7 of dp (ranks 1, 3)", "all_reduce over tp"),
    ],
)
@pytest.mark.parametrize("lost", [0, 7, 8])
def test_order_across_groups(tmp_path, times, own, usual, lost):
    dumps = job(calls=0)
    for rank in range(4):
        for step in range(10):
            dumps.call(rank, f"tp{rank // 2}")
            for _ in range(times if (rank, step) == (1, 5) else 1):
                dumps.call(rank, f"dp{rank % 2}", op="reduce_scatter_tensor")
    dumps.entries[1 if times else 3][-1]["state"] = "started"
    for entries in dumps.entries.values():
        del entries[:lost]  # as in a ring buffer
    verdict = blame(dumps.write(tmp_path), "tp=2,dp=2")
    assert found(verdict) == [("order", (1,))]
    assert f"rank 1 (tp=1, dp=0) calls {own} at train.py:47 in step right" in str(verdict)
    assert f"most ranks call {usual} (rank 0 at train.py:4" in str(verdict)


# If all ranks of a group make the same calls, they are right, even if other groups make other
# calls. Only rank 3, which is missing, is blamed.
def test_group_whose_ranks_agree_is_right(tmp_path):
    dumps = job(4, 2)
    for rank in range(8):
        for _ in range(2 if rank < 4 else 1):
            dumps.call(rank, f"tp{rank // 4}")
        if rank != 3:
            dumps.call(rank, f"dp{rank % 4}", state="runs" if rank == 7 else "done")
    assert found(blame(dumps.write(tmp_path))) == [("absent", (3,))]


# If two ranks differ, the other groups over the same dims decide which rank is right, if most of
# these groups agree.
@pytest.mark.parametrize(("others", "culprits"), [("all_reduce", (1,)), ("barrier", ())])
def test_sibling_groups_decide(tmp_path, others, culprits):
    dumps = job()
    for rank in range(4):
        op = "barrier" if rank == 1 else others if rank == 2 else "all_reduce"
        dumps.call(rank, f"dp{rank % 2}", op=op, state="runs")
    verdict = blame(dumps.write(tmp_path), "tp=2,dp=2")
    one = next(one for one in verdict.findings if set(one.involved) == {1, 3})
    assert (one.kind, one.culprits) == ("order", culprits)
    assert ("so do ranks 0, 2 in the other dp groups" in one.says) == bool(culprits)


# Different shapes with equally many elements are not a mistake. Uneven splits of an all-to-all are
# not a mistake either.
def test_allowed_differences(tmp_path):
    dumps = Dumps(2)
    for rank, sizes in enumerate([(2, 2), (4,)]):
        dumps.call(rank, "WORLD", sizes=sizes)
        dumps.call(rank, "WORLD", op="all_to_all", sizes=(rank + 1,))
    assert blame(dumps.write(tmp_path)).outcome == "clear"


# If two ranks differ, or each waits in a group that the other has not entered, neither is blamed.
def test_one_rank_against_another_is_unclear(tmp_path):
    dumps = Dumps(2)
    for rank in range(2):
        dumps.call(rank, "WORLD", sizes=(rank + 1,), state="runs")
    verdict = blame(dumps.write(tmp_path))
    assert verdict.outcome == "unclear"
    assert found(verdict) == [("shape", ())]
    dumps = Dumps(2)
    for rank in range(2):
        dumps.group(str(rank + 1), "ab"[rank], [0, 1])
        dumps.call(rank, str(rank + 1), state="runs")
    verdict = blame(dumps.write(tmp_path))
    assert found(verdict) == [("circle", ())]
    assert verdict.findings[0].involved == (0, 1)


# If all ranks are in a call that does not end, no rank is blamed, since the network may be broken.
# A rank whose device has not started the call is blamed.
@pytest.mark.parametrize(
    ("state", "expected"), [("runs", ("stuck", ())), ("queued", ("absent", (1,)))]
)
def test_call_that_does_not_end(tmp_path, state, expected):
    dumps = Dumps(2)
    dumps.call(0, "WORLD", state="runs")
    dumps.call(1, "WORLD", state=state)
    assert found(blame(dumps.write(tmp_path))) == [expected]


def test_missing_send_is_blamed(tmp_path):
    dumps = Dumps(4)
    for rank in (1, 2, 3):
        dumps.message(0, "WORLD", "send", rank)
        dumps.message(rank, "WORLD", "recv", 0)
        dumps.message(rank, "WORLD", "recv", 0, state="runs")
    verdict = blame(dumps.write(tmp_path))
    assert verdict.culprits == (0,)
    assert verdict.findings[0].waiting == (1, 2, 3)
    assert "rank 0 has not answered recv number 2 from rank 0 of WORLD" in str(verdict)
    assert [(list(wait.calls), wait.absent) for wait in verdict.waits] == [
        ([rank], (0,)) for rank in (1, 2, 3)
    ]


# In a pipeline, rank 3 skips a message, and ends its program.
def test_skipped_message_is_found(tmp_path):
    dumps = job(2, 4)
    for rank in range(8):
        if rank:
            dumps.message(rank, "WORLD", "recv", rank - 1, state="runs" if rank == 4 else "done")
        if rank < 3:
            dumps.message(rank, "WORLD", "send", rank + 1)
        if rank < 4:
            dumps.call(rank, f"tp{rank // 2}")
    for rank in (5, 6, 7):
        dumps.entries[rank][-1]["state"] = "started"
    assert found(blame(dumps.write(tmp_path))) == [("absent", (3,))]


# If a rank waits in a receive from any source, the dump does not show for which rank it waits. The
# rank is not blamed, even if other ranks wait for it.
@pytest.mark.parametrize("is_awaited", [False, True])
def test_receive_from_any_rank_is_unclear(tmp_path, is_awaited):
    dumps = Dumps(3)
    dumps.call(2, "WORLD", op="recv_anysource", state="runs")
    for rank in range(2) if is_awaited else ():
        dumps.call(rank, "WORLD", state="runs")
    verdict = blame(dumps.write(tmp_path))
    assert verdict.culprits == (), str(verdict)
    assert verdict.outcome == "unclear", str(verdict)
    assert "recv number 1 from any rank of WORLD (ranks 0..2) at " in str(verdict)


# If a rank's calls in a group have been overwritten in the ring buffer, the rank is not blamed.
def test_overwritten_calls_are_not_blamed(tmp_path):
    dumps = Dumps(2)
    dumps.group("1", "a", [0, 1])
    dumps.call(0, "1", state="runs")
    dumps.call(1, "WORLD", record_id=4000)
    assert blame(dumps.write(tmp_path)).culprits == ()


# A rank without a dump may have died, so it is reported. Even if another rank has no dump, rank 3
# is blamed for skipping a call over tp.
def test_rank_without_a_dump(tmp_path):
    dumps = Dumps(4)
    for rank in range(3):
        dumps.call(rank, "WORLD", state="runs")
    verdict = blame(dumps.write(tmp_path, but=[3]), "dp=4")
    assert found(verdict) == [("no dump", (3,))]
    assert verdict.to_dict()["no_dump"] == [3]
    dumps = job(2, 4)
    for rank in range(8):
        if rank not in {2, 3}:
            dumps.call(rank, f"tp{rank // 2}")
        dumps.call(rank, "tp1" if rank == 2 else "WORLD", state="runs")
    for file in tmp_path.iterdir():
        file.unlink()
    assert found(blame(dumps.write(tmp_path, but=[0]), "tp=2,dp=4")) == [("order", (3,))]


# Rank 1 passes another dtype in a call, which has no effect. This mistake does not hide that rank 2
# is missing later.
def test_two_mistakes_are_found(tmp_path):
    dumps = Dumps(4)
    for rank in range(4):
        dumps.call(rank, "WORLD", dtype="Int" if rank == 1 else "Float")
        if rank != 2:
            dumps.call(rank, "WORLD", state="queued" if rank == 1 else "runs")
    assert set(found(blame(dumps.write(tmp_path)))) == {("dtype", (1,)), ("absent", (2,))}


# The first replica of tp=2,dp=3 gathers over tp before the next all_reduce over dp, as for a
# checkpoint. Rank 1 stops before it. Rank 0, which makes another call than most ranks, waits for
# rank 1, and so do all other ranks in the end.
def test_call_of_some_replicas(tmp_path):
    dumps = job(2, 3, calls=3)
    for rank in (0, 2, 3, 4, 5):
        own = ("tp0", "all_gather") if rank == 0 else (f"dp{rank % 2}", "all_reduce")
        dumps.call(rank, own[0], op=own[1], state="runs")
    verdict = blame(dumps.write(tmp_path), "tp=2,dp=3")
    assert found(verdict) == [("absent", (1,))]
    assert str(verdict) == (
        "rank 1 (tp=1, dp=0) has not entered all_gather number 4 of tp (ranks 0..1), in which rank "
        "0 waits; ranks 2..5 wait indirectly"
    )


# A rank of one sibling group decides which call is right.
def test_one_sibling_decides(tmp_path):
    dumps = job(2, 2)
    for rank in range(3):
        op = "barrier" if rank == 0 else "all_reduce"
        dumps.call(rank, "tp0" if rank < 2 else "tp1", op=op, state="runs")
    verdict = blame(dumps.write(tmp_path), "tp=2,dp=2")
    one = next(one for one in verdict.findings if one.kind == "order")
    assert one.culprits == (0,)
    assert one.says.endswith("; so does rank 2 in the other tp groups")


TRAIN = ("/x/train.py", "step")
TORCH = "/env/site-packages/torch"
BACKWARD = [(f"{TORCH}/autograd/graph.py", "_engine_run_backward"), (f"{TORCH}/_tensor.py", "b")]
FUNCTIONAL = [(f"{TORCH}/_ops.py", "__call__")]
FUNCTIONAL += [(f"{TORCH}/distributed/_functional_collectives.py", "wait_tensor")]
COMPILED = [(f"/tmp/torchinductor_me/ab/c{'a2' * 25}b.py", "call")]
COMPILED += [(f"{TORCH}/_inductor/output_code.py", "__call__")]
CREATION = [("/env/site-packages/hypercomm/process_groups/table.py", "create")]


# Collectives in some parts of torch are not recorded. A rank that is there may wait in one, so it
# is not blamed. A rank in the program's own code is, also if backward or compiled code called it.
@pytest.mark.parametrize(
    ("stack", "region"),
    [
        (BACKWARD, "backward"),
        (FUNCTIONAL, "DTensor or a functional collective"),
        (COMPILED, "compiled code"),
        (CREATION, "the creation of a group"),
        ([(f"{TORCH}/nn/parallel/distributed.py", "_sync_buffers")], "DistributedDataParallel"),
        (
            [(f"{TORCH}/nn/modules/linear.py", "f"), (f"{TORCH}/nn/parallel/distributed.py", "_f")],
            "",
        ),
        ([("/x/hook.py", "hook"), *BACKWARD], ""),
        ([("/x/model.py", "forward"), *COMPILED], ""),
        ([], ""),
    ],
)
def test_collectives_without_a_record(tmp_path, stack, region):
    dumps = Dumps(4)
    dumps.call(2, "WORLD", op="barrier", state="runs")
    stacks = [[TRAIN] if rank == 2 else [*stack, TRAIN] for rank in range(4)]
    states = dict.fromkeys(range(4), "has not moved for 60 s")
    verdict = blame(dumps.write_watched(tmp_path, "dp=4", states, stacks))
    assert verdict.culprits == (() if region else (0, 1, 3))
    if region:
        assert str(verdict) == (
            f"ranks 0..1, 3 are in {region}, whose collectives are not recorded; rank 2 waits "
            f"in barrier number 1 of WORLD (ranks 0..3) at train.py:41 in step"
        )
    # Rank 2 has left the watch, and no recorded call shows that the others wait for it.
    dumps.entries[2].clear()
    states[2] = "left the watch"
    verdict = blame(dumps.write_watched(tmp_path, "dp=4", states, stacks))
    assert verdict.outcome == ("unclear" if region else "clear")
    assert str(verdict).endswith("; rank 2 makes no call: it left the watch") == bool(region)


# An error of communication may end a collective that is not recorded, so it shows nothing. Another
# error is the fault of the rank that raised it.
@pytest.mark.parametrize(("error", "culprits"), [("RuntimeError", ()), ("OutOfMemoryError", (1,))])
def test_error_in_backward(tmp_path, error, culprits):
    dumps = Dumps(2)
    dumps.call(0, "WORLD", state="runs")
    states = {0: "has not moved for 60 s", 1: f"raised {error}: planted"}
    stacks = [[TRAIN], [*BACKWARD, TRAIN]]
    assert blame(dumps.write_watched(tmp_path, "dp=2", states, stacks)).culprits == culprits


# Ranks 0 and 1 leave no dump, because they still make calls over tp, such as a validation. Neither
# is blamed, as either may wait for the other. If all other ranks wait for one rank, it is blamed.
def test_ranks_that_are_alive_without_a_dump(tmp_path):
    dumps = job()
    for rank in (2, 3):
        dumps.call(rank, f"dp{rank % 2}", state="runs")
    verdict = blame(dumps.write(tmp_path, but=[0, 1]), "tp=2,dp=2")
    assert found(verdict) == [("no dump", ())]
    assert str(verdict) == (
        "ranks 0..1 have left no dump: each has died, still makes calls elsewhere, or wrote its "
        "dump to another place; rank 2 waits in all_reduce number 2 of dp (ranks 0, 2) for rank 0; "
        "rank 3 waits indirectly"
    )


# Each rank has a plain group of its own, without dims.
def test_groups_of_one_rank(tmp_path):
    dumps = Dumps(4)
    for rank in range(4):
        dumps.group(str(7 + rank), "undefined", [rank])
        dumps.call(rank, str(7 + rank))
        if rank != 2:
            dumps.call(rank, "WORLD", state="runs")
    states = dict.fromkeys(range(4), "has not moved for 60 s")
    dumps.write_watched(tmp_path, "tp=2,dp=2", states, [[TRAIN]] * 4)
    assert found(blame(tmp_path)) == [("absent", (2,))]
    for file in tmp_path.iterdir():
        file.unlink()
    assert found(blame(dumps.write(tmp_path), "tp=2,dp=2")) == [("absent", (2,))]


# If most ranks of a group have left the watch, the rank that waits may make a call too many.
@pytest.mark.parametrize(("left", "culprits"), [([0], (0,)), ([0, 1, 3], ())])
def test_uneven_inputs(tmp_path, left, culprits):
    dumps = Dumps(4)
    states = dict.fromkeys(range(4), "has not moved for 60 s")
    for rank in range(4):
        dumps.call(rank, "WORLD")
        if rank in left:
            states[rank] = "left the watch"
        else:
            dumps.call(rank, "WORLD", state="runs")
    verdict = blame(dumps.write_watched(tmp_path, "dp=4", states, [[TRAIN]] * 4))
    assert (verdict.culprits, verdict.findings[0].involved) == (culprits, tuple(left))


# Of 20,000 ranks, only rank 0 left a dump. The limit of 2 seconds is of CPU time.
@pytest.mark.alone
def test_speed_with_one_dump(tmp_path):
    dumps = Dumps(20_000)
    dumps.call(0, "WORLD", state="runs")
    dumps.write(tmp_path, but=range(1, 20_000))
    begin = time.process_time()
    verdict = blame(tmp_path)
    assert len(str(verdict) + str(verdict.to_dict())) > 0
    assert time.process_time() - begin < 2
    assert verdict.findings[0].involved == tuple(range(1, 20_000))


# Of 1,024 ranks of tp=8,dp=128, one is missing in the last of 100 calls. Finding it takes less than
# 5 seconds on a quiet machine. The limit is 20 seconds of CPU time.
@pytest.mark.full
@pytest.mark.parametrize("size", [256, pytest.param(1024, marks=pytest.mark.slow)])
def test_speed_of_many_ranks(tmp_path, size):
    dumps = job(8, size // 8)
    missing = size * 3 // 4 + 9
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
    assert seconds < 20
