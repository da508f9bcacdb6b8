"""Compares Megatron's parallel_state built on grids with the original in megatron-core."""

from __future__ import annotations

import functools
import gc
import inspect
import time
import timeit
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from measure import Goal, Table, interleaved

from hypercomm.testing import fake_world, run_ranks

LARGE = {
    "tensor_model_parallel_size": 8,
    "pipeline_model_parallel_size": 8,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "create_gloo_process_groups": False,
}
SMALL = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
}
REFERENCE = "megatron-core parallel_state"
VARIANTS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "hypercomm": {},
    "hypercomm, share='identical'": {"share": "identical"},
}


def module_of(name: str) -> ModuleType:
    if name == REFERENCE:
        from megatron.core import parallel_state as theirs

        return theirs
    from hypercomm.compat.megatron import parallel_state as ours

    return ours


def forget(module: ModuleType) -> None:
    """Destroy a state, and for Megatron also the groups and globals that its teardown leaves."""
    if module.__name__.startswith("megatron"):
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    module.destroy_model_parallel()
    if module.__name__.startswith("megatron"):
        for name in vars(module):
            if name.startswith("_") and name.isupper():
                setattr(module, name, {} if name == "_HYBRID_DP_CP_GROUPS" else None)


def getters(runs: int) -> Iterator[Table]:
    """Time each getter that needs no argument and returns a value in both modules."""
    ours, theirs = module_of("hypercomm"), module_of(REFERENCE)
    with fake_world(1024, rank=341):
        for module in (ours, theirs):
            module.initialize_model_parallel(**LARGE)
        for name, function in sorted(inspect.getmembers(theirs, inspect.isfunction)):
            if not name.startswith(("get_", "is_")) or function.__module__ != theirs.__name__:
                continue
            pair = {"hypercomm": getattr(ours, name), REFERENCE: function}
            try:
                for getter in pair.values():
                    getter()
            except (AssertionError, KeyError, TypeError):
                continue  # needs arguments, or a group that this configuration does not have
            ways = {who: functools.partial(_nanoseconds, getter) for who, getter in pair.items()}
            yield Table(name, "ns", interleaved(ways, runs), REFERENCE)
        for module in (ours, theirs):
            forget(module)


def _nanoseconds(function: Any) -> float:
    calls = 50_000
    return timeit.timeit(function, number=calls) / calls * 1e9


def large_worlds(world_size: int, runs: int, goal: float | None) -> Iterator[Table]:
    """Time the initialisation of one rank on the fake backend."""

    def measure(name: str) -> float:
        module = module_of(name)
        with fake_world(world_size, rank=world_size // 3):
            begin = time.perf_counter()
            module.initialize_model_parallel(**LARGE)
            taken = (time.perf_counter() - begin) * 1e3
            forget(module)
        return taken

    ways = {name: functools.partial(measure, name) for name in ("hypercomm", REFERENCE)}
    what = f"initialize_model_parallel, fake backend, {world_size:,} ranks"
    goals = {"hypercomm": Goal(goal, REFERENCE)} if goal else {}
    yield Table(what, "ms", interleaved(ways, runs), REFERENCE, goals)


def _on_a_rank(cycles: int) -> dict[str, list[tuple[float, int, int]]]:
    """Measure each variant on a rank: milliseconds until all ranks are ready, threads, files."""
    warnings.simplefilter("ignore")
    seen: dict[str, list[tuple[float, int, int]]] = {name: [] for name in VARIANTS}
    for cycle in range(cycles + 1):
        for name, options in VARIANTS.items():
            module = module_of(name)
            dist.barrier()
            begin = time.perf_counter()
            module.initialize_model_parallel(**SMALL, **options)
            dist.barrier()
            taken = (time.perf_counter() - begin) * 1e3
            threads, files = (
                len(list(Path("/proc/self", what).iterdir())) for what in ("task", "fd")
            )
            if cycle:  # the first cycle also loads modules
                seen[name].append((taken, threads, files))
            forget(module)
            gc.collect()
        if not cycle:
            gc.freeze()  # later collections skip the objects of torch and Megatron
    return seen


def real_ranks(nprocs: int, runs: int, cycles: int) -> Iterator[Table]:
    """Time initialisation with gloo twins on real processes. The slowest rank counts."""
    seen: dict[str, list[tuple[float, int, int]]] = {name: [] for name in VARIANTS}
    for _ in range(runs):
        ranks = run_ranks(functools.partial(_on_a_rank, cycles), nprocs, timeout=900)
        for name, cycles_seen in seen.items():
            cycles_seen += [max(cycle) for cycle in zip(*(r[name] for r in ranks), strict=True)]
    what = f"initialize_model_parallel, {nprocs} gloo processes"
    goals = {
        "hypercomm": Goal(1, REFERENCE),
        "hypercomm, share='identical'": Goal(0.6, REFERENCE),
    }
    for column, unit in enumerate(("ms", "threads", "files")):
        samples = {name: [float(cycle[column]) for cycle in found] for name, found in seen.items()}
        named = what if unit == "ms" else f"{unit} of a rank: {what}"
        yield Table(named, unit, samples, REFERENCE, goals if unit == "ms" else {})
