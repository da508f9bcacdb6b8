"""One rank's cost of creating five groups in a large world, beside the peers, in one run.

    pip install '.[test]' && python benchmarks/create_groups.py

Every peer builds a grid of the same shape on torch's fake backend and creates the process groups
over tp, cp, dp, pp and dp+cp (DeviceMesh: the mesh over all four dims, and dp+cp flattened). The
runs of the peers are interleaved. A fake world shows what a rank computes and registers; it shows
no network, no store and no NCCL.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid, RankLayout
from hypercomm.testing import fake_world

DIMS = ("tp", "cp", "dp", "pp")
WANTED = ("tp", "cp", "dp", "pp", ["dp", "cp"])
SHAPES = {131_072: (8, 2, 1024, 8), 1_048_576: (8, 2, 8192, 8)}


def ours(shape: tuple[int, ...]) -> None:
    grid = HyperCommGrid(shape, DIMS)
    for dims in WANTED:
        grid.create_pg(dims)


def megatron(shape: tuple[int, ...]) -> None:
    from megatron.core.hyper_comm_grid import HyperCommGrid as MegatronGrid

    grid = MegatronGrid(list(shape), list(DIMS))
    for dims in WANTED:
        grid.create_pg(dims)


def device_mesh(shape: tuple[int, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    # DeviceMesh numbers the other way round: its last dim varies fastest.
    mesh = init_device_mesh("cpu", shape[::-1], mesh_dim_names=DIMS[::-1])
    mesh["dp", "cp"]._flatten("dp_cp")


PEERS: dict[str, Callable[[tuple[int, ...]], None]] = {
    "hypercomm": ours,
    "megatron-core HyperCommGrid": megatron,
    "torch DeviceMesh": device_mesh,
}


def seconds(peer: Callable[[tuple[int, ...]], None], world_size: int) -> float:
    """Time one peer in a world of its own; the world itself is not counted."""
    os.environ["WORLD_SIZE"] = str(world_size)  # Megatron reads it
    with fake_world(world_size, rank=world_size // 3):
        begin = time.perf_counter()
        peer(SHAPES[world_size])
        return time.perf_counter() - begin


def one_rank_arithmetic() -> None:
    """Print what a rank pays for its own members over each dims, at 2**20 ranks."""
    layout = RankLayout(SHAPES[1_048_576], DIMS)
    rank = layout.size // 3
    for dims in [("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp")]:
        rounds = []
        for _ in range(200):
            begin = time.perf_counter()
            group = layout.groups(*dims).of(rank)
            rounds.append(time.perf_counter() - begin)
        median = statistics.median(rounds) * 1e6
        print(f"  {'+'.join(dims):6} {len(group):6} members  {median:8.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, choices=SHAPES, default=131_072)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    print("the group of one rank at 1,048,576 ranks, as arithmetic:")
    one_rank_arithmetic()
    times: dict[str, list[float]] = {name: [] for name in PEERS}
    for run in range(options.runs + 1):
        for name, peer in PEERS.items():
            taken = seconds(peer, options.world_size)
            if run:  # the first one loads modules
                times[name].append(taken)
    print(f"five groups at {options.world_size:,} ranks, fake backend, {options.runs} runs:")
    own = statistics.median(times["hypercomm"])
    for name, taken in times.items():
        median = statistics.median(taken)
        print(
            f"  {name:28} {median * 1e3:9.2f} ms  ({min(taken) * 1e3:.2f} .. "
            f"{max(taken) * 1e3:.2f}), {median / own:,.0f}x"
        )
    assert not dist.is_initialized()  # noqa: S101 - every world was left


if __name__ == "__main__":
    main()
