"""Megatron's parallel_state on grids beside megatron-core's own, in one run.

    pip install '.[test]' && python benchmarks/megatron_state.py

Three tables: each getter of a size, a rank, a group or a stage; one rank's initialisation in large
fake worlds; and initialisation on real gloo processes, with threads and files. Runs of the two are
interleaved. A fake world shows what a rank computes and registers; no network, no NCCL.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import statistics
import time
import timeit
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hypercomm.launch import run_ranks
from hypercomm.testing import fake_world

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
VARIANTS: dict[str, dict[str, Any]] = {
    "megatron-core": {},
    "hypercomm": {},
    "hypercomm, share='identical'": {"share": "identical"},
    "hypercomm, lazy=True": {"lazy": True},
}


def state_module(name: str) -> ModuleType:
    if name == "megatron-core":
        from megatron.core import parallel_state as theirs

        return theirs
    from hypercomm.compat.megatron import parallel_state as ours

    return ours


def forget(module: ModuleType) -> None:
    """Destroy a state; for Megatron's also the groups and names that its teardown leaves."""
    if module.__name__.startswith("megatron"):
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    module.destroy_model_parallel()
    if module.__name__.startswith("megatron"):
        for name in vars(module):
            if name.startswith("_") and name.isupper():
                setattr(module, name, {} if name == "_HYBRID_DP_CP_GROUPS" else None)


def nanoseconds(function: Any) -> float:
    calls = 100_000
    return min(timeit.repeat(function, number=calls, repeat=5)) / calls * 1e9


def getters() -> None:
    """Print the time of each getter that answers in both modules without an argument."""
    modules = [state_module("hypercomm"), state_module("megatron-core")]
    rows = []
    with fake_world(1024, rank=341):
        for module in modules:
            module.initialize_model_parallel(**LARGE)
        for name, function in sorted(inspect.getmembers(modules[1], inspect.isfunction)):
            if not name.startswith(("get_", "is_")) or function.__module__ != modules[1].__name__:
                continue
            pair = [getattr(modules[0], name), function]
            try:
                for getter in pair:
                    getter()
            except (AssertionError, KeyError, TypeError):
                continue  # needs arguments, or a group that this configuration does not have
            rows.append((name, *map(nanoseconds, pair)))
        for module in modules:
            forget(module)
    print(f"{'getter':52} {'hypercomm':>10} {'megatron':>10}   ratio")
    for name, own, theirs in rows:
        print(f"{name:52} {own:7.0f} ns {theirs:7.0f} ns {theirs / own:6.1f}x")


def fake_initialisation(world_sizes: list[int], runs: int) -> None:
    """Print what one rank of a fake world needs to initialise."""
    print(f"\n{'ranks, fake backend':22} {'hypercomm':>18} {'megatron-core':>22}   ratio")
    for world_size in world_sizes:
        times: dict[str, list[float]] = {"hypercomm": [], "megatron-core": []}
        for _ in range(runs):
            for name, taken in times.items():
                module = state_module(name)
                with fake_world(world_size, rank=world_size // 3):
                    begin = time.perf_counter()
                    module.initialize_model_parallel(**LARGE)
                    taken.append(time.perf_counter() - begin)
                    forget(module)
        own, theirs = (statistics.median(taken) * 1e3 for taken in times.values())
        (low, high), (low2, high2) = ((min(t) * 1e3, max(t) * 1e3) for t in times.values())
        print(
            f"{world_size:<22,} {own:6.1f} ms ({low:.1f}..{high:.1f}) "
            f"{theirs:8.0f} ms ({low2:.0f}..{high2:.0f}) {theirs / own:6.0f}x"
        )


def real_initialisation(name: str, cycles: int) -> list[tuple[float, int, int, int]]:
    """What a real rank sees: seconds until all are initialised, groups, threads, files."""
    warnings.simplefilter("ignore")
    module, seen = state_module(name), []
    for _ in range(cycles + 1):
        dist.barrier()
        begin = time.perf_counter()
        module.initialize_model_parallel(**SMALL, **VARIANTS[name])
        dist.barrier()
        seconds = time.perf_counter() - begin
        groups = len(dist.distributed_c10d._world.pg_map)
        files, threads = (len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task"))
        seen.append((seconds, groups, threads, files))
        forget(module)
    return seen[1:]  # the first one loads modules


def gloo(nprocs: int, runs: int, cycles: int) -> None:
    """Print initialisation with gloo twins on real processes; the slowest rank counts."""
    print(f"\n{f'{nprocs} gloo processes':30} {'median':>9} {'spread':>16}  groups threads files")
    seen: dict[str, list[tuple[float, int, int, int]]] = {name: [] for name in VARIANTS}
    for _ in range(runs):
        for name, taken in seen.items():
            ranks = run_ranks(functools.partial(real_initialisation, name, cycles), nprocs)
            taken += [max(cycle) for cycle in zip(*ranks, strict=True)]
    reference = statistics.median(seconds for seconds, *_ in seen["megatron-core"])
    for name, taken in seen.items():
        times = [seconds * 1e3 for seconds, *_ in taken]
        median = statistics.median(times)
        groups, threads, files = (max(column) for column in list(zip(*taken, strict=True))[1:])
        print(
            f"{name:30} {median:6.1f} ms {f'{min(times):.0f}..{max(times):.0f}':>16} "
            f"{groups:6} {threads:7} {files:5}   {median / reference / 1e3:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=["getters", "fake", "gloo"])
    parser.add_argument("--nprocs", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    if "getters" in options.tables:
        getters()
    if "fake" in options.tables:
        fake_initialisation([1024, 4096, 16_384], options.runs)
        fake_initialisation([131_072], 1)
    for nprocs in options.nprocs if "gloo" in options.tables else []:
        gloo(nprocs, options.runs, options.cycles)


if __name__ == "__main__":
    main()
