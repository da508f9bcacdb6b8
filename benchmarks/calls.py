"""Count the calls of hypercomm's functions that build a grid, create groups, and look one up.

    python benchmarks/calls.py [--trace]

The job is two gloo processes with a TCPStore on loopback. An earlier grid has made the checks that
a process makes only once. Each entry into a frame of hypercomm on the calling thread counts: a
function, a comprehension, or a generator that continues. A creation is counted until it calls
torch, the meeting of the ranks included. In Python 3.12, comprehensions have no frame, so the count
is lower.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import attrs
import torch.distributed as dist
from measure import Goal, Table, as_text

import hypercomm
from hypercomm import HyperCommGrid
from hypercomm.testing import run_ranks

PACKAGE = Path(hypercomm.__file__).parent
GOALS = {
    "a new grid": (30, 8),
    "its first create_pg": (60, 10),
    "its second create_pg": (60, 9),
    "a lookup of a group": (5, 3),
}
"""The most calls and files that each action should make."""


@attrs.frozen
class Call:
    """A frame of hypercomm that was entered. `depth` counts the frames of hypercomm around it."""

    file: str
    line: int
    name: str
    depth: int

    def __str__(self) -> str:
        return f"{'  ' * self.depth}{self.name}  {self.file}:{self.line}"


def calls_before(
    ends: Collection[CodeType], action: Callable[[], object], folder: Path
) -> list[Call]:
    """Run an action. Return its calls of functions in a folder before it calls one of `ends`.

    If there are no `ends`, all calls are returned.
    """
    calls: list[Call] = []
    ended = False
    inside = f"{folder}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal ended
        code = frame.f_code
        ended = ended or (event == "call" and code in ends)
        if event == "call" and not ended and code.co_filename.startswith(inside):
            name = getattr(code, "co_qualname", code.co_name)  # co_qualname is new in Python 3.11
            depth = sum(outer.co_filename.startswith(inside) for outer in _around(frame))
            calls.append(Call(code.co_filename[len(inside) :], frame.f_lineno, name, depth))

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    if ends and not ended:
        raise RuntimeError("the action called none of the functions at which the count ends")
    return calls


def _around(frame: FrameType) -> Iterator[CodeType]:
    while (frame := frame.f_back) and frame.f_code is not calls_before.__code__:
        yield frame.f_code


def counts(calls: list[Call]) -> dict[str, int]:
    """Count the calls, their files, and how often the file changes from one call to the next."""
    files = [call.file for call in calls]
    changes = sum(one != other for one, other in pairwise(files))
    return {"calls": len(calls), "files": len(set(files)), "changes of file": changes}


def of_each_action() -> dict[str, list[Call]]:
    """Return the calls of each action in a live job."""
    torchs = (dist.new_group, dist.new_subgroups_by_enumeration, dist.split_group)
    helper = getattr(dist.distributed_c10d, "_new_process_group_helper", dist.new_group)
    ends = {inspect.unwrap(function).__code__ for function in (*torchs, helper)}
    sizes = [dist.get_world_size(), 1]
    grids: list[HyperCommGrid] = []
    with HyperCommGrid(sizes, ["tp", "dp"], name="first") as first:
        first.create_pg("tp")
        first.create_pg("tp", "dp")
        made = {
            "a new grid": calls_before(
                (), lambda: grids.append(HyperCommGrid(sizes, ["tp", "dp"])), PACKAGE
            )
        }
        with grids[0] as grid:
            made |= {
                "its first create_pg": calls_before(ends, lambda: grid.create_pg("tp"), PACKAGE),
                "its second create_pg": calls_before(
                    ends, lambda: grid.create_pg("tp", name="b"), PACKAGE
                ),
            }
            _ = grid["tp"].group
            made["a lookup of a group"] = calls_before((), lambda: grid["tp"].group, PACKAGE)
    return made


def creation() -> Iterator[Table]:
    """Count the calls of each action."""
    yield from tables(run_ranks(of_each_action, 2)[0])


def tables(made: dict[str, list[Call]]) -> Iterator[Table]:
    """Make two tables for each action."""
    for action, goals in GOALS.items():
        found = counts(made[action])
        for what, goal in zip(("calls", "files"), goals, strict=True):
            yield Table(
                f"{action}: {what}",
                what,
                {"hypercomm": [found[what]]},
                "hypercomm",
                {"hypercomm": Goal(goal)},
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="store_true", help="print the calls, in order")
    options = parser.parse_args()
    made = run_ranks(of_each_action, 2)[0]
    if options.trace:
        for action, calls in made.items():
            print(action, *calls, "", sep="\n")
    print(as_text([row for table in tables(made) for row in table.rows()]))


if __name__ == "__main__":
    main()
