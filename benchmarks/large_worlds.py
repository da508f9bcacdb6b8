"""Measures one rank in large worlds: the arithmetic alone, and torch's fake backend."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from measure import Goal, Table, interleaved
from peers import PEERS, REFERENCE, Wanted, enumerated

from hypercomm import HyperCommGrid, RankLayout
from hypercomm.layout.layout import groups_over
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.world import current
from hypercomm.testing import fake_world, simulate

NAMES = ("tp", "cp", "dp", "pp")
FIVE: Wanted = (("tp",), ("cp",), ("dp",), ("pp",), ("cp", "dp"))
SLOW_LOOP = 16_384
"""The largest world in which a loop that calls new_group for all groups ends within seconds."""


def shape_of(world_size: int) -> tuple[int, ...]:
    """Return the sizes tp=8, cp=2 and pp=8, and the dp that fills the world."""
    return (8, 2, world_size // 128, 8)


def arithmetic(runs: int, world_size: int) -> Iterator[Table]:
    """Compute the members of one rank's groups over tp, cp, dp, pp and cp+dp."""
    from megatron.core.parallel_state import RankGenerator

    shape, rank = shape_of(world_size), world_size // 3
    layout = RankLayout(shape, NAMES)
    members = sum(len(layout.groups(*dims).of(rank)) for dims in FIVE)

    def ours() -> list[tuple[int, ...]]:
        return [layout.groups(*dims).of(rank) for dims in FIVE]

    def numpy() -> list[list[int]]:
        found = []
        for groups in enumerated(shape, NAMES, FIVE):
            row = np.nonzero((groups == rank).any(axis=1))[0][0]
            found.append(groups[row].tolist())
        return found

    def generator() -> list[list[int]]:
        tp, cp, dp, pp = shape
        ranks = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-dp-pp")
        tokens = ("tp", "cp", "dp", "pp", "dp-cp")
        return [
            next(group for group in ranks.get_ranks(token) if rank in group) for token in tokens
        ]

    ways: dict[str, Callable[[], object]] = {
        "hypercomm": ours,
        "numpy enumeration": numpy,
        "megatron-core RankGenerator": generator,
    }
    seen = interleaved({who: _timed(way, 1e6) for who, way in ways.items()}, runs)
    limit = 100 + 0.1 * members
    what = f"ranks of one rank's five groups, {world_size:,} ranks ({members:,} members)"
    yield Table(what, "us", seen, "numpy enumeration", {"hypercomm": Goal(limit)})
    yield from _layouts(runs, world_size)


def _layouts(runs: int, world_size: int) -> Iterator[Table]:
    """Measure creating a layout and one rank's group over each dim, for two kinds of strides."""
    shape, dims = (8, 4, 8, 4, world_size // 1024), ("tp", "cp", "ep", "dp", "pp")
    turned = (world_size // 8, 4, world_size // 64, 1, 16)

    def with_strides(strides: tuple[int, ...] | None) -> list[tuple[int, ...]]:
        groups_over.cache_clear()
        layout = RankLayout(shape, dims, strides=strides)
        return [layout.groups(dim).of(world_size // 3) for dim in dims]

    ways: dict[str, Callable[[], object]] = {
        "dense": lambda: with_strides(None),
        "strides in another order": lambda: with_strides(turned),
    }
    seen = interleaved({who: _timed(way, 1e6) for who, way in ways.items()}, 20 * runs)
    what = f"a new layout and five groups of one rank, {world_size:,} ranks"
    yield Table(what, "us", seen, "dense", {"strides in another order": Goal(500)})


def creation(runs: int, world_size: int, limit_ms: float) -> Iterator[Table]:
    """Create the five process groups of one rank on torch's fake backend."""
    ways = {
        who: _in_fake_world(world_size, lambda peer=peer: peer(shape_of(world_size), NAMES, FIVE))
        for who, peer in PEERS.items()
        if who != "new_group loop" or world_size <= SLOW_LOOP
    }
    what = f"five process groups, fake backend, {world_size:,} ranks"
    goals = {"hypercomm": Goal(limit_ms)}
    yield Table(what, "ms", interleaved(ways, runs), REFERENCE, goals)


def growth(runs: int, sizes: list[int]) -> Iterator[Table]:
    """Create five process groups of constant size in larger and larger worlds.

    DeviceMesh also creates a sixth group, over the dim that grows.
    """
    names = (*NAMES, "replica")
    seen: dict[int, dict[str, list[float]]] = {}
    for world_size in sizes:
        shape = (8, 2, 4, 8, world_size // 512)
        ways = {
            who: _in_fake_world(world_size, lambda peer=peer, shape=shape: peer(shape, names, FIVE))
            for who, peer in PEERS.items()
            if who != "new_group loop" or world_size <= SLOW_LOOP
        }
        seen[world_size] = interleaved(ways, runs)
        what = f"growth: five groups of constant size, fake backend, {world_size:,} ranks"
        yield Table(what, "ms", seen[world_size], REFERENCE)
    first = 4096 if sizes[0] < 4096 < sizes[-1] else sizes[0]
    last = sizes[-1]
    growths = {
        who: [statistics.median(seen[last][who]) / statistics.median(seen[first][who])]
        for who in (REFERENCE, "torch DeviceMesh")
    }
    # hypercomm takes so few milliseconds that it needs more runs. The two sizes alternate.
    both = {
        str(size): _in_fake_world(
            size, lambda size=size: PEERS["hypercomm"]((8, 2, 4, 8, size // 512), names, FIVE)
        )
        for size in (first, last)
    }
    small, large = interleaved(both, 20 * runs).values()
    growths["hypercomm"] = [statistics.median(large) / statistics.median(small)]
    what = f"growth from {first:,} to {last:,} ranks (hypercomm: {20 * runs} runs of each)"
    yield Table(what, "x", growths, REFERENCE, {"hypercomm": Goal(1.5)})


def memory(world_size: int) -> Iterator[Table]:
    """Measure the memory of a grid without the memory of torch's groups."""
    shape, rank = shape_of(world_size), world_size // 3
    layout = RankLayout(shape, NAMES)

    def held(make: Callable[[], object]) -> float:
        with fake_world(world_size, rank):
            tracemalloc.start()
            kept = make()
            size = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            del kept
        return size / 2**20

    def torch_alone() -> object:
        world = current()
        return [
            torchdist.new_group(
                str(dims),
                layout.groups(*dims).of(rank),
                rank=world.rank,
                backend="fake",
                store=world.store,
                group_desc="alone",
                stale=[],
            )
            for dims in FIVE
        ]

    def ours() -> HyperCommGrid:
        grid = HyperCommGrid(shape, NAMES)
        grid.create_pgs(FIVE)
        return grid

    held(ours)  # loads modules that are imported on first use
    bare = held(torch_alone)
    what = f"memory held with five groups, {world_size:,} ranks, beyond what torch holds for them"
    yield Table(what, "MB", {"hypercomm": [held(ours) - bare]}, "hypercomm", {"hypercomm": Goal(1)})


def splits(world_size: int) -> Iterator[Table]:
    """Count how often one rank splits a device-bound WORLD for tp. The backend is a stub."""
    shape, counts = shape_of(world_size), {}
    with (
        fake_world(world_size, world_size // 3),
        mock.patch.multiple(
            "hypercomm.process_groups.torch_internals.split",
            split_device=lambda: torch.device("cuda", 0),
            _can_split=lambda _device_type: True,
        ),
    ):
        with mock.patch.object(dist, "split_group", return_value=None) as split_group:
            HyperCommGrid(shape, NAMES).create_pg("tp")
        counts["hypercomm"] = [float(split_group.call_count)]
    helper = dist.distributed_c10d._new_process_group_helper
    with (
        fake_world(world_size, world_size // 3),
        mock.patch.object(
            dist.distributed_c10d, "_new_process_group_helper", side_effect=helper
        ) as new_group,
    ):  # each call of new_group would split a bound WORLD
        PEERS[REFERENCE](shape, NAMES, [("tp",)])
        counts[REFERENCE] = [float(new_group.call_count)]
    what = f"splits of a bound WORLD for tp=8, {world_size:,} ranks (counted)"
    yield Table(what, "calls", counts, REFERENCE, {"hypercomm": Goal(1)})


def imports(runs: int) -> Iterator[Table]:
    """Measure imports, without the time in which Python starts."""

    def import_of(statement: str) -> Callable[[], float]:
        def measure() -> float:
            begin = time.perf_counter()
            command = [sys.executable, "-c", statement]
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - our own
            return (time.perf_counter() - begin) * 1e3

        return measure

    no_torch = "import sys, hypercomm; sys.exit('torch' in sys.modules)"
    ways = {
        "python alone": import_of("pass"),
        "hypercomm": import_of(no_torch),
        "torch": import_of("import torch"),
        "torch, then megatron.core": import_of("import torch, megatron.core"),
    }
    seen = interleaved(ways, runs)
    start = sorted(seen.pop("python alone"))[runs // 2]
    seen = {who: [value - start for value in values] for who, values in seen.items()}
    yield Table("import, beyond Python's own start", "ms", seen, "torch", {"hypercomm": Goal(150)})


def _initialise() -> None:
    from hypercomm.compat.megatron import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=8,
        context_parallel_size=2,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
    )


def _start_up() -> None:
    """Do what a training script does before its first step."""
    from hypercomm.compat.megatron import parallel_state

    arguments = [{"lr": 1e-4} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(arguments, src=0)
    dist.barrier()
    _initialise()
    first, whole = torch.zeros(1), torch.arange(8)
    tp = parallel_state.get_tensor_model_parallel_group()
    for group in (
        tp,
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
    ):
        dist.all_reduce(first, group=group)
    dist.broadcast(whole, parallel_state.get_tensor_model_parallel_src_rank(), group=tp)
    dist.all_reduce(whole, op=dist.ReduceOp.MAX)
    dist.barrier()


def simulation(world_size: int) -> Iterator[Table]:
    """Simulate all ranks of a Megatron initialisation, and compare what they create."""
    for name, program in [("initialisation", _initialise), ("start-up", _start_up)]:
        begin = time.perf_counter()
        simulate(program, world_size).check()
        seen = {"hypercomm": [time.perf_counter() - begin]}
        what = f"simulate a Megatron {name}, all of {world_size:,} ranks"
        yield Table(what, "s", seen, "hypercomm", {"hypercomm": Goal(30)})


def _timed(function: Callable[[], object], scale: float) -> Callable[[], float]:
    def measure() -> float:
        begin = time.perf_counter()
        function()
        return (time.perf_counter() - begin) * scale

    return measure


def _in_fake_world(world_size: int, create: Callable[[], object]) -> Callable[[], float]:
    """Return a function that measures a creation in milliseconds, each time in a new world.

    The time excludes starting the world, destroying the groups, and the garbage of earlier runs.
    """

    def measure() -> float:
        os.environ["WORLD_SIZE"] = str(world_size)  # Megatron's grid reads it
        gc.collect()  # the start of the world then warms up the caches again
        with fake_world(world_size, world_size // 3):
            begin = time.perf_counter()
            kept = create()
            took = (time.perf_counter() - begin) * 1e3
            del kept
            return took

    return measure
