"""Test the verdicts on dumps with known mistakes."""

import sys
import time
from pathlib import Path

import pytest
from tools.blame.dumps import Dumps, blame, job

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.torch_free

TABLE = tomllib.loads(Path(__file__).with_name("verdicts.toml").read_text(encoding="utf-8"))
STUCK = "has not moved for 60 s"
TRAIN = ("/x/train.py", "step")


def found(verdict):
    """Return the kinds of the findings, with the ranks to blame."""
    return [(finding.kind, finding.culprits) for finding in verdict.findings]


def add_calls(dumps, text):
    """Add the calls that a line of the table describes."""
    spans, name, *words = text.split()
    for span in spans.split(","):
        first, _, last = span.partition("-")
        for rank in range(int(first), int(last or first) + 1):
            more = dict(word.split("=") for word in words if "=" in word)
            more["state"] = words[-1] if words and "=" not in words[-1] else "done"
            if "size" in more:
                more["sizes"] = [int(size) for size in more.pop("size").split("x")]
            if "record" in more:
                more["record_id"] = int(more.pop("record"))
            group = name if name in dumps.groups else dumps.group_over(name, rank)
            way = next((way for way in ("send", "recv") if way in more), "")
            if way:
                dumps.message(rank, group, way, int(more.pop(way)), **more)
            else:
                dumps.call(rank, group, **more)


# The comments of the table describe each case.
@pytest.mark.parametrize("row", TABLE["verdict"], ids=lambda row: "; ".join(row["calls"])[:70])
def test_verdicts(row, tmp_path):
    if "job" in row:
        dumps = job(*(int(size[-1]) for size in row["job"].split(",")), row.get("before", 1))
    else:
        dumps = Dumps(row["ranks"])
    for name, (dims, ranks) in row.get("groups", {}).items():
        dumps.group(name, dims, ranks)
    for text in row["calls"]:
        add_calls(dumps, text)
    layout = row.get("layout")
    if "watched" in row:
        states = {rank: row["watched"].get(str(rank), STUCK) for rank in dumps.ranks}
        stacks = [[TRAIN]] * len(dumps.ranks)
        verdict = blame(dumps.write_watched(tmp_path, layout, states, stacks))
    else:
        verdict = blame(dumps.write(tmp_path, row.get("but", ())), layout)
    findings = sorted((kind, tuple(ranks)) for kind, ranks in row["findings"])
    assert sorted(found(verdict)) == findings, str(verdict)
    is_blamed = any(ranks for _, ranks in findings)
    assert verdict.outcome == ("blamed" if is_blamed else "unclear" if findings else "clear")
    assert str(verdict) == row.get("says", str(verdict))
    assert [part for part in row.get("has", ()) if part not in str(verdict)] == []
    assert verdict.to_dict()["no_dump"] == row.get("but", [])
    waits = [[list(wait.calls), list(wait.absent)] for wait in verdict.waits]
    assert waits == row.get("waits", waits)
    for field in ("waiting", "involved"):
        if field in row:
            assert list(getattr(verdict.findings[0], field)) == row[field]


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
    states = dict.fromkeys(range(4), STUCK)
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
    states = {0: STUCK, 1: f"raised {error}: planted"}
    stacks = [[TRAIN], [*BACKWARD, TRAIN]]
    assert blame(dumps.write_watched(tmp_path, "dp=2", states, stacks)).culprits == culprits


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
