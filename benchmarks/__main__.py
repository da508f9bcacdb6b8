"""Compare hypercomm with other libraries: one command, one table, with ratios and goals.

    pip install '.[test,viz]' && python benchmarks

Writes results.json and growth.png into --out. README.md lists what the measurements do not show.
With --merge, the measured tables replace the same tables in results.json and on the page, which is
README.md. With --compare, a few ratios are measured and compared with the ratios on the page, and
nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import calls
import connecting
import edges
import large_worlds
import mappings
import megatron_state
import page
import real_ranks
import refits
import staleness
import states
from chart import draw
from measure import Table, as_text

import hypercomm

PAGE = Path(__file__).parent
SIZES = [1024, 4096, 16_384, 65_536, 262_144, 1_048_576]
Tables = dict[str, Callable[[], Iterator[Table]]]


def every(runs: int, nprocs: list[int]) -> Tables:
    """Return the functions that measure, by the names that --only accepts."""
    return {
        "imports": lambda: large_worlds.imports(runs),
        "arithmetic": lambda: large_worlds.arithmetic(runs, 1_048_576),
        "creation": lambda: _chain(
            large_worlds.creation(runs, 16_384, 2),
            large_worlds.creation(runs, 131_072, 2),
            large_worlds.creation(runs, 1_048_576, 10),
        ),
        "growth": lambda: large_worlds.growth(runs, SIZES),
        "memory": lambda: large_worlds.memory(1_048_576),
        "splits": lambda: large_worlds.splits(16_384),
        "simulate": lambda: large_worlds.simulation(4096),
        "gloo": lambda: real_ranks.creation(nprocs, runs, 5),
        "sharing": lambda: real_ranks.sharing(nprocs, runs, 5),
        "connecting": lambda: connecting.connecting([n for n in nprocs if n <= 8], runs, 5),
        "edges": lambda: edges.edges(runs, 5),
        "state": lambda: _chain(
            megatron_state.large_worlds(4096, runs, None),
            megatron_state.large_worlds(16_384, runs, 1 / 20),
            megatron_state.large_worlds(131_072, 1, 1 / 100),
            *(megatron_state.real_ranks(count, runs, 5) for count in nprocs if 8 <= count <= 16),
        ),
        "getters": lambda: megatron_state.getters(runs),
        "calls": calls.creation,
        "mapping": lambda: mappings.mapping(runs, 16_384),
        "states": lambda: states.states(runs, 1000),
        "refits": lambda: refits.refits(runs, 1000),
    }


def quick() -> Tables:
    """Return the same functions at a small scale, which shows within a minute that all run."""
    return {
        "imports": lambda: large_worlds.imports(1),
        "arithmetic": lambda: large_worlds.arithmetic(1, 4096),
        "creation": lambda: large_worlds.creation(1, 1024, 2),
        "growth": lambda: large_worlds.growth(1, SIZES[:2]),
        "memory": lambda: large_worlds.memory(4096),
        "splits": lambda: large_worlds.splits(1024),
        "simulate": lambda: large_worlds.simulation(128),
        "gloo": lambda: real_ranks.creation([4], 1, 1),
        "sharing": lambda: real_ranks.sharing([4], 1, 1),
        "connecting": lambda: connecting.connecting([4], 1, 1),
        "edges": lambda: edges.edges(1, 1),
        "state": lambda: _chain(
            megatron_state.large_worlds(1024, 1, None), megatron_state.real_ranks(8, 1, 1)
        ),
        "getters": lambda: megatron_state.getters(1),
        "calls": calls.creation,
        "mapping": lambda: mappings.mapping(1, 1024),
        "states": lambda: states.states(1, 64),
        "refits": lambda: refits.refits(1, 64),
    }


def _chain(*tables: Iterator[Table]) -> Iterator[Table]:
    for part in tables:
        yield from part


def machine() -> dict[str, Any]:
    """Return the machine, the versions and the commit that are measured."""
    packages = ("torch", "numpy", "megatron-core")
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "hypercomm": hypercomm.__version__,
        "commit": commit(),
        "load_before": os.getloadavg()[0],
    }


def commit() -> str:
    """Return the measured commit, with a "+" if the tree has changes, or "unknown" without git."""
    command = ["git", "-C", str(PAGE), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*every(1, [])], help="measure only these")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of each way")
    parser.add_argument(
        "--nprocs", nargs="+", type=int, choices=real_ranks.SHAPES, default=[*real_ranks.SHAPES]
    )
    parser.add_argument("--quick", action="store_true", help="show only that all runs")
    parser.add_argument("--compare", action="store_true", help="show what became worse")
    parser.add_argument("--merge", action="store_true", help="replace tables in the last results")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    told, rows = machine(), []
    print(", ".join(f"{name} {value}" for name, value in told.items()), file=sys.stderr)
    if options.compare:
        worse = staleness.worse_than(PAGE / "results.json")
        sys.exit("\n".join(["worse than on the page:", *worse]) if worse else 0)
    if options.merge and options.quick and options.out == PAGE:
        parser.error("--quick measures on another scale than the page; give another --out")
    if options.merge:
        page.read(options.out)  # raise before minutes are spent on measuring
    tables = quick() if options.quick else every(options.runs, options.nprocs)
    for name in options.only or tables:
        begin = time.perf_counter()
        for table in tables[name]():
            rows += table.rows()
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    print(as_text(rows))
    if options.merge:
        page.write(options.out, rows, told)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"machine": told, "rows": rows}
    (options.out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    if not options.only or "growth" in options.only:
        draw(rows, options.out / "growth.png")


if __name__ == "__main__":
    main()
