"""Count the calls of hypercomm's functions in one `create_pg`, before torch creates the group.

    python benchmarks/calls.py [--trace]

The job is one gloo process with a TCPStore on loopback. The grid is new. An earlier grid has made
the checks that a process makes only once. Each entry into a frame of hypercomm on the calling
thread counts: a function, a comprehension, or a generator that continues. In Python 3.12,
comprehensions have no frame, so the count is lower.
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
GOALS = {"calls": Goal(60), "files": Goal(10), "changes of file": Goal(25)}


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
    """Run an action. Return its calls of functions in a folder before it calls one of `ends`."""
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
    if not ended:
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


def of_one_creation() -> list[Call]:
    """Return the calls that `create_pg("dp")` makes in a live job before torch makes the group."""
    torchs = (dist.new_group, dist.new_subgroups_by_enumeration, dist.split_group)
    helper = getattr(dist.distributed_c10d, "_new_process_group_helper", dist.new_group)
    ends = {inspect.unwrap(function).__code__ for function in (*torchs, helper)}
    with HyperCommGrid([1, 1], ["tp", "dp"], name="first") as first:
        first.create_pg("dp")
        with HyperCommGrid([1, 1], ["tp", "dp"]) as grid:
            return calls_before(ends, lambda: grid.create_pg("dp"), PACKAGE)


def creation() -> Iterator[Table]:
    """Count the calls that create one group."""
    (calls,) = run_ranks(of_one_creation, 1)
    yield from tables(calls)


def tables(calls: list[Call]) -> Iterator[Table]:
    """Make one table for each goal."""
    for what, count in counts(calls).items():
        yield Table(
            f"one create_pg before torch: {what}",
            what.partition(" ")[0],
            {"hypercomm": [count]},
            "hypercomm",
            {"hypercomm": GOALS[what]},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="store_true", help="print the calls, in order")
    options = parser.parse_args()
    (calls,) = run_ranks(of_one_creation, 1)
    if options.trace:
        print(*calls, "", sep="\n")
    print(as_text([row for table in tables(calls) for row in table.rows()]))


if __name__ == "__main__":
    main()
