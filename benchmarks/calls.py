"""Count what one `create_pg` runs through in our own files before torch is asked for the group.

    python benchmarks/calls.py [--trace]

The job is one gloo process with a TCPStore on loopback, the grid a fresh one; a grid before it has
made the checks that a process makes once. Whatever enters a frame of ours on the calling thread
counts: a function, a comprehension, a generator that goes on. So Python 3.12, where comprehensions
have no frame, counts fewer.
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
    """A frame that was entered: where, in what, and under how many others of ours."""

    file: str
    line: int
    name: str
    depth: int

    def __str__(self) -> str:
        return f"{'  ' * self.depth}{self.name}  {self.file}:{self.line}"


def calls_before(
    ends: Collection[CodeType], action: Callable[[], object], folder: Path
) -> list[Call]:
    """Run an action; return its calls of what lies in a folder, until one of `ends` is entered."""
    calls: list[Call] = []
    ended = False
    inside = f"{folder}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal ended
        code = frame.f_code
        ended = ended or (event == "call" and code in ends)
        if event == "call" and not ended and code.co_filename.startswith(inside):
            name = getattr(code, "co_qualname", code.co_name)  # the longer one from Python 3.11 on
            depth = sum(outer.co_filename.startswith(inside) for outer in _around(frame))
            calls.append(Call(code.co_filename[len(inside) :], frame.f_lineno, name, depth))

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    if not ended:
        raise RuntimeError("the action never came to its end, so what led to it is not known")
    return calls


def _around(frame: FrameType) -> Iterator[CodeType]:
    while (frame := frame.f_back) and frame.f_code is not calls_before.__code__:
        yield frame.f_code


def counts(calls: list[Call]) -> dict[str, int]:
    """How many calls, of how many files, and how often the next is of another file."""
    files = [call.file for call in calls]
    changes = sum(one != other for one, other in pairwise(files))
    return {"calls": len(calls), "files": len(set(files)), "changes of file": changes}


def of_one_creation() -> list[Call]:
    """The calls of `create_pg("dp")` before torch makes the group, on a rank of a live job."""
    torchs = (dist.new_group, dist.new_subgroups_by_enumeration, dist.split_group)
    helper = getattr(dist.distributed_c10d, "_new_process_group_helper", dist.new_group)
    ends = {inspect.unwrap(function).__code__ for function in (*torchs, helper)}
    with HyperCommGrid([1, 1], ["tp", "dp"], name="first") as first:
        first.create_pg("dp")
        with HyperCommGrid([1, 1], ["tp", "dp"]) as grid:
            return calls_before(ends, lambda: grid.create_pg("dp"), PACKAGE)


def creation() -> Iterator[Table]:
    """What one creation comes to."""
    (calls,) = run_ranks(of_one_creation, 1)
    yield from tables(calls)


def tables(calls: list[Call]) -> Iterator[Table]:
    """One table for each goal."""
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
