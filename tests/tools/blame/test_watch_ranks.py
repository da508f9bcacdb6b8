"""Test that a real gloo rank with a mistake is blamed, with its source line."""

import contextlib
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from time_limits import scaled_s
from tools.blame.dumps import blame
from torch.nn.parallel import DistributedDataParallel

from hypercomm import HyperCommGrid
from hypercomm.errors import ToolError
from hypercomm.process_groups import torch_internals as torchdist

pytestmark = [pytest.mark.full, pytest.mark.ranks(4)]


def watched(folder, program):
    """Run a program on tp=2,dp=2 with a watch, until it ends or times out. Return the verdict."""
    rank = dist.get_rank()
    grid = HyperCommGrid("tp=2,dp=2")
    groups = dict(
        zip(("tp", "dp", "whole"), grid.create_pgs(["tp", "dp", ["tp", "dp"]]), strict=True)
    )
    for group in groups.values():
        torchdist.set_timeout(timedelta(seconds=4), group)
    dist.barrier()
    # A rank whose call times out raises RuntimeError, and so does its peer.
    with contextlib.suppress(RuntimeError, ValueError), grid.watch(0.3, folder) as watch:
        program(rank, groups, watch)
    dist.barrier()
    return blame(folder)


def endless_loop(folder):
    """Loop until all other ranks have timed out. Rank 1 calls this function."""
    raised = set()
    while len(raised) < 3:
        for file in folder.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # the watch removed its file
                if '"why": "raised' in file.read_text():
                    raised.add(file.name)
        time.sleep(0.05)


USUAL = [("tp", "all_reduce"), ("dp", "all_reduce")] * 4


def call(groups, dims, op, size=8, dtype=torch.float32):
    group = groups[dims]
    tensor = torch.ones(size, dtype=dtype)
    if op == "all_reduce":
        dist.all_reduce(tensor, group=group)
    else:
        dist.broadcast(tensor, group_src=0, group=group)


# Steps of rank 3 that differ from the other ranks.
ODD = {
    "shape": {5: ("dp", "broadcast", 12)},  # larger, because gloo aborts if it receives too much
    "dtype": {4: ("tp", "all_reduce", 8, torch.int32)},
}


def make_a_mistake(mistake, rank, groups, _watch):
    """Make the usual calls, with one mistake on rank 3."""
    changes = {5: ("dp", "broadcast")} if mistake == "shape" else {}
    if rank == 3:
        changes |= ODD.get(mistake, {})
    steps = [changes.get(place, step) for place, step in enumerate(USUAL)]
    if rank == 3 and mistake not in ODD:
        del steps[5 : 6 if mistake == "skip" else None]
    for step in steps:
        call(groups, *step)
    if rank == 3 and mistake == "raise":
        raise ValueError("a planted mistake")


# Each mistake is found with the right kind and description.
@pytest.mark.parametrize(
    ("mistake", "kind", "parts"),
    [
        ("skip", "order", ["calls all_reduce number 4 of tp", "call all_reduce over dp (rank 0"]),
        ("shape", "shape", ["(12,) float32", "so do ranks 0, 2 in the other dp groups"]),
        ("dtype", "dtype", ["(8,) int32", "so do ranks 0..1 in the other tp groups"]),
        ("leave", "absent", ["it left the watch"]),
        pytest.param("raise", "absent", ["it raised ValueError: a pla"], marks=pytest.mark.slow),
    ],
)
def test_mistakes_are_blamed(tmp_path, mistake, kind, parts):
    verdict = watched(tmp_path, lambda *args: make_a_mistake(mistake, *args))
    assert (verdict.culprits, verdict.outcome) == ((3,), "blamed"), str(verdict)
    (finding,) = verdict.findings
    assert finding.kind == kind
    assert finding.says.startswith("rank 3 (tp=1, dp=1")
    assert all(part in finding.says for part in parts), finding.says
    if kind == "order":
        line = call.__code__.co_firstlineno + 4
        assert f" at {__file__}:{line} in call right after" in finding.says


# Rank 2 has fewer batches than the other ranks, which wait for it in the backward pass of
# DistributedDataParallel. These collectives are not recorded, so no rank is blamed. Rank 2 is
# described, both while it waits and after all calls have timed out.
def test_uneven_inputs_of_ddp(tmp_path):
    said = (
        "ranks 0..1, 3 are in backward, whose collectives are not recorded; rank 2 waits in "
        "barrier number 1 of tp+dp (ranks 0..3) at "
    )

    def look(verdicts):
        deadline = time.monotonic() + scaled_s(6)
        while time.monotonic() < deadline and said not in verdicts[-1]:
            with contextlib.suppress(ToolError):  # before the first rank hangs
                verdicts.append(str(blame(tmp_path)))

    def train(rank, groups, _watch):
        torchdist.set_timeout(timedelta(seconds=scaled_s(8)), groups["whole"])
        replicas = dist.new_group(range(4), timeout=timedelta(seconds=scaled_s(8)))
        model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=replicas)
        for _ in range(4 if rank == 2 else 6):
            model(torch.ones(2, 4)).sum().backward()
        verdicts = [""]
        observer = threading.Thread(target=look, args=[verdicts])
        if rank == 2:
            observer.start()
        try:
            dist.barrier(group=groups["whole"])
        finally:
            if rank == 2:
                observer.join()
                assert verdicts[-1].startswith(said), verdicts[-1]

    verdict = watched(tmp_path, train)
    assert verdict.culprits == ()
    assert str(verdict).startswith(said), str(verdict)


# For messages and collectives without a mistake, no rank is blamed.
def test_no_mistake(tmp_path):
    def pass_on(rank, groups, _watch):
        call(groups, "tp", "all_reduce")
        if rank:
            dist.recv(torch.ones(3), rank - 1, group=groups["whole"])
        if rank < 3:
            dist.send(torch.ones(3), rank + 1, group=groups["whole"])
        call(groups, "dp", "broadcast")

    verdict = watched(tmp_path, pass_on)
    assert (verdict.culprits, verdict.outcome) == ((), "clear"), str(verdict)
    assert sorted(verdict.evidence.ranks) == [0, 1, 2, 3]


# A rank that loops is blamed with the line of the loop, although it has posted a receive that no
# rank waits for.
def test_looping_rank_is_blamed(tmp_path):
    def loop(rank, groups, _watch):
        call(groups, "dp", "all_reduce")
        if rank == 1:
            dist.irecv(torch.ones(1), 0, group=groups["whole"])
            endless_loop(tmp_path)
            verdict = blame(tmp_path)
            assert (verdict.culprits, verdict.outcome) == ((1,), "blamed"), str(verdict)
            assert f"it is at {__file__}:" in str(verdict)
            assert " in endless_loop" in str(verdict)
            return
        if rank == 0:
            dist.isend(torch.ones(1), 1, group=groups["whole"])
        call(groups, "tp", "all_reduce")
        call(groups, "dp", "all_reduce")

    watched(tmp_path, loop)
