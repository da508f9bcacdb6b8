"""Compares the transfer of a state from 4 gloo processes to 4 others with one plain batch."""

from __future__ import annotations

import functools
import resource
import time
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from measure import Goal, Table

from hypercomm import RankLayout, RankMapping, run_ranks, transfer_state

BATCH = "one batch_isend_irecv"
LAYERS = 16
BUCKET = 16 << 20


def states(runs: int, megabytes: int) -> Iterator[Table]:
    """Move tp=2, dp=2 to the same sizes on other ranks. A run takes as long as its slowest rank."""
    ranks = run_ranks(functools.partial(_seconds, runs, megabytes), 8, timeout=900)
    seen = {
        who: [max(one) * 1e3 for one in zip(*(rank[0][who] for rank in ranks), strict=True)]
        for who in ranks[0][0]
    }
    what = f"a state of {megabytes:,} MB to 4 gloo processes from 4"
    yield Table(what, "ms", seen, BATCH, {"hypercomm": Goal(1.25, BATCH)})
    most = {"hypercomm": [max(rank[1] for rank in ranks)], "two buckets": [2 * BUCKET / 1e6]}
    what = f"memory beyond both states of {megabytes:,} MB, the most of a rank"
    yield Table(what, "MB", most, "two buckets", {"hypercomm": Goal(1.1, "two buckets")})


def _seconds(runs: int, megabytes: int) -> tuple[dict[str, list[float]], float]:
    """Measure on a rank the seconds of each way in each run, and the growth of its peak memory."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    source, target = RankLayout("tp=2,dp=2"), RankLayout("tp=2,dp=2", rank_offset=4)
    mapping = RankMapping(source, target, along=None)
    # `megabytes` counts the parts of all four targets: each half of the state is on two of them.
    rows = megabytes * 10**6 // 4 // 4 // LAYERS // 1024
    mine = {f"{layer}.weight": torch.full((rows, 1024), float(rank)) for layer in range(LAYERS)}
    flat = torch.full((rows * 1024 * LAYERS,), float(rank))

    def ours() -> None:
        given = {"state": mine} if rank < 4 else {"into": mine}
        transfer_state(mapping, **given, shards={"*": {"tp": 0}}, bucket_bytes=BUCKET)

    def batch() -> None:
        op = dist.P2POp(dist.isend, flat, rank + 4) if rank < 4 else None
        op = op or dist.P2POp(dist.irecv, flat, rank - 4)
        for work in dist.batch_isend_irecv([op]):
            work.wait()

    ways = {BATCH: batch, "hypercomm": ours}
    seen: dict[str, list[float]] = {who: [] for who in ways}
    grown = 0.0
    for run in range(runs + 1):
        for who, way in ways.items():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            dist.barrier()
            begin = time.perf_counter()
            way()
            dist.barrier()
            if run:
                seen[who].append(time.perf_counter() - begin)
            elif who == "hypercomm":
                grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6
    return seen, grown
