"""Compares a refit from 4 gloo processes to 2 others with gathering and broadcasting DTensors."""

from __future__ import annotations

import functools
import resource
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from measure import Goal, Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hypercomm import RankLayout, RankMapping, run_ranks, transfer_state
from hypercomm.transfers import state as module

BROADCAST = "full_tensor() and broadcast"
TENSORS, COLUMNS, BUCKET = 300, 1024, 16 << 20


def refits(runs: int, megabytes: int) -> Iterator[Table]:
    """Move from fsdp=2, tp=2 to tp=2 on other ranks. A run takes as long as its slowest rank."""
    ranks = run_ranks(functools.partial(_seconds, runs, megabytes), 6, timeout=900)
    seen = {
        who: [max(one) * 1e3 for one in zip(*(rank[0][who] for rank in ranks), strict=True)]
        for who in ranks[0][0]
    }
    what = f"a refit of {megabytes:,} MB in {TENSORS} DTensors, 4 gloo processes to 2"
    yield Table(what, "ms", seen, BROADCAST, {"hypercomm": Goal(0.5, BROADCAST)})
    most = {"hypercomm": [max(rank[1] for rank in ranks)], "two buckets": [2 * BUCKET / 1e6]}
    what = f"memory beyond the state in a refit of {megabytes:,} MB, the most of a rank"
    yield Table(what, "MB", most, "two buckets", {"hypercomm": Goal(1.1, "two buckets")})
    shares = {"hypercomm": [max(one) for one in zip(*(rank[2] for rank in ranks), strict=True)]}
    what = f"planning and agreement, of a second refit of {megabytes:,} MB in {TENSORS} DTensors"
    yield Table(what, "%", shares, "hypercomm", {"hypercomm": Goal(5)})


def _shard(mesh: DeviceMesh, rows: int, axis: int) -> DTensor:
    """Return a trainer rank's shard. fsdp splits the rows, and tp then splits rows or columns."""
    shape = (rows // 2, COLUMNS // 2) if axis else (rows // 4, COLUMNS)
    local = torch.full(shape, float(dist.get_rank()))
    return DTensor.from_local(local, mesh, [Shard(0), Shard(axis)], run_check=False)


def _part(rows: int, axis: int) -> torch.Tensor:
    """Return an engine rank's buffer. tp splits the rows or columns."""
    return torch.full((rows, COLUMNS // 2) if axis else (rows // 2, COLUMNS), -1.0)


def _broadcast(
    mine: dict[str, Any], axes: dict[str, int], rows: int, group: dist.ProcessGroup
) -> None:
    """Gather each tensor on the trainer, broadcast it, and copy each engine rank's shard."""
    rank = dist.get_rank()
    for name, axis in axes.items():
        whole = mine[name].full_tensor() if rank < 4 else torch.empty(rows, COLUMNS)
        if rank in (0, 4, 5):
            dist.broadcast(whole, 0, group=group)
        if rank > 3:
            mine[name].copy_(whole.chunk(2, axis)[rank - 4])


def _noting(begun: list[float]) -> Any:
    """Return a patch that records when a refit begins to move data, after the agreement."""
    move = module.Mover.move

    def moving(mover: module.Mover, start: int) -> None:
        begun.append(time.perf_counter())
        move(mover, start)

    return mock.patch.object(module.Mover, "move", moving)


def _seconds(runs: int, megabytes: int) -> tuple[dict[str, list[float]], float, list[float]]:
    """Measure on a rank.

    Returns:
        The seconds of each way in each run, by way.
        The growth of the peak memory in the first transfer of hypercomm, in MB.
        For each run, the percentage of the transfer that passes before data is moved.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("fsdp", "tp"))
    mapping = RankMapping.weights("tp=2,fsdp=2", RankLayout([2], ["tp"], 4))
    rows = megabytes * 10**6 // 4 // COLUMNS // TENSORS // 4 * 4
    axes = {f"{number}.weight": number % 2 for number in range(TENSORS)}
    make = functools.partial(_shard, mesh) if rank < 4 else _part
    mine = {name: make(rows, axis) for name, axis in axes.items()}
    shards = {name: {"tp": axis} for name, axis in axes.items()}
    begun: list[float] = []
    given = {"state": mine} if rank < 4 else {"into": mine, "shards": shards}

    def ours() -> None:
        with _noting(begun):
            transfer_state(mapping, **given, bucket_bytes=BUCKET)

    broadcast = functools.partial(_broadcast, mine, axes, rows, dist.new_group([0, 4, 5]))
    ways = {BROADCAST: broadcast, "hypercomm": ours}
    seen: dict[str, list[float]] = {who: [] for who in ways}
    shares, grown = [], 0.0
    for run in range(runs + 1):
        for who, way in reversed(ways.items()):  # hypercomm first: its peak is lower
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            dist.barrier()
            begin = time.perf_counter()
            way()
            took = time.perf_counter() - begin
            dist.barrier()
            if run:
                seen[who].append(time.perf_counter() - begin)
                if who == "hypercomm":
                    shares.append(100 * (begun[-1] - begin) / took)
            elif who == "hypercomm":
                grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6
    return seen, grown, shares
