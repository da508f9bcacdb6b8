"""Runs a program as every rank of a job, one after the other, and compares the ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import attrs

from hypercomm.compat.ezpz import tp as ezpz
from hypercomm.compat.megatron import state as megatron
from hypercomm.errors import LaunchError, LayoutError, RankFailedError, SimulationError
from hypercomm.launchers import VARIABLES
from hypercomm.layout.checks import as_int, as_tuple, as_world_size
from hypercomm.layout.text import counted, shown
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.options import check_given_timeout, check_known
from hypercomm.testing.other_world import OtherWorld, other_worlds
from hypercomm.testing.simulation.group import RecordingGroup
from hypercomm.testing.simulation.judging import Disagreement, judge
from hypercomm.testing.simulation.records import Book, Collective, Creation

Result = TypeVar("Result")

_SHOWN = 5
"""Disagreements that a simulation shows as text."""


@attrs.frozen(repr=False)
class Simulation(Generic[Result]):
    """The result of a simulated job; str() summarises it.

    Attributes:
        world_size: The number of ranks of the job.
        returned: The return values of the function, by simulated rank.
        creations: The process groups that each rank would create as a member, in its order.
        collectives: The collectives, sends and receives that each rank called, in its order.
        disagreements: The creations, collectives, sends and receives that differ or never end,
            with the ranks that wait and those that are missing.
    """

    world_size: int
    returned: Mapping[int, Result]
    creations: Mapping[int, Sequence[Creation]]
    collectives: Mapping[int, Sequence[Collective]]
    disagreements: tuple[Disagreement, ...]

    def check(self) -> None:
        """Raise unless all simulated ranks agree.

        Raises:
            SimulationError: They do not agree (an AssertionError); shows the first disagreements.
        """
        if self.disagreements:
            raise SimulationError("\n".join(self._lines()))

    def to_dict(self) -> dict[str, Any]:
        """Return the groups and disagreements as a dict for JSON, without the return values.

        Returns:
            A dict with the keys "world_size", "ranks", "groups" and "disagreements".

        Example:
            >>> from hypercomm.testing import simulate
            >>> simulate(int, 2).to_dict()
            {'world_size': 2, 'ranks': [0, 1], 'groups': [], 'disagreements': []}
        """
        groups = {made.name: made for every in self.creations.values() for made in every}
        return {
            "world_size": self.world_size,
            "ranks": list(self.creations),
            "groups": [
                {
                    "name": made.name,
                    "ranks": list(made.ranks),
                    "backend": made.backend,
                    "timeout_s": made.timeout.total_seconds(),
                    "description": made.called,
                }
                for made in groups.values()
            ],
            "disagreements": [str(disagreement) for disagreement in self.disagreements],
        }

    def _lines(self) -> Iterator[str]:
        yield f"{counted(len(self.disagreements), 'disagreement')}:"
        yield from (f"  {one}" for one in self.disagreements[:_SHOWN])
        if len(self.disagreements) > _SHOWN:
            yield f"  and {len(self.disagreements) - _SHOWN:,} more"

    @property
    def _headline(self) -> str:
        groups = {creation.name for made in self.creations.values() for creation in made}
        calls = _range(self.collectives)
        return (
            f"{len(self.creations):,} of {self.world_size:,} ranks: {len(groups):,} process "
            f"groups, {_range(self.creations)} on each rank"
        ) + (f"; {calls} collectives on each" if calls != "0" else "")

    def __repr__(self) -> str:
        agree = f"{len(self.disagreements):,} disagreements" if self.disagreements else "all agree"
        return f"<Simulation of {self._headline}; {agree}>"

    def __str__(self) -> str:
        return "\n".join(
            [self._headline, *(self._lines() if self.disagreements else ["all ranks agree"])]
        )


def _range(every: Mapping[int, Sequence[object]]) -> str:
    counts = [len(each) for each in every.values()] or [0]
    few, many = min(counts), max(counts)
    return f"{few}" if few == many else f"{few} to {many}"


def simulate(
    function: Callable[..., Result],
    world_size: int,
    *,
    ranks: Iterable[int] | None = None,
    args: Sequence[object] = (),
    backend: str = "nccl",
    timeout: timedelta = timedelta(minutes=10),
) -> Simulation[Result]:
    """Run a function once for every rank of a job, one after the other, in this process.

    torch.distributed returns the values of that rank. `torch.distributed.init_process_group`
    returns immediately (if called like this, not by a name that was imported before). No process
    group of torch is made. Groups of `torch.distributed.new_group` and DeviceMesh are recorded
    like those of a grid. The global state of Megatron and ezpz (`hypercomm.compat`) is empty at
    the start of each rank; other global variables are shared. Other threads see the simulated job
    too.

    All collectives of torch.distributed, sends and receives are recorded and return immediately.
    They move values of ranks that ran before, and never those of later ranks:

    - all_reduce, reduce: the tensor keeps this rank's values.
    - all_gather, gather: this rank's values in every slot; reduce_scatter: this rank's part of its
      tensor; all_to_all: its own tensor, if the shapes are equal.
    - broadcast, scatter, recv: the values of the root or sender if it ran before; otherwise the
      tensor is unchanged.
    - Collectives of objects do the same with copies; an object of a later root or sender is None.

    Then the ranks are compared. The members of a group must make the same calls in the same order:
    op, shapes, dtype, reduction and root, as with TORCH_DISTRIBUTED_DEBUG=DETAIL; of an all-to-all,
    the sizes that each member sends to each other. A rank waits in a collective for all members
    (with `async_op=True`, where it waits for the work), and in a receive for the send. A send does
    not wait. Messages match by tag, which NCCL ignores. Only the first difference of each group is
    reported. Functional collectives (DTensor) and code that passes a group to C++
    (DistributedDataParallel) cannot be simulated.

    Args:
        function: Called with `args`; environment variables RANK and WORLD_SIZE are set.
        world_size: The number of ranks of the job, at most 2**24.
        ranks: The ranks to simulate; default: all. Members among them are compared.
        args: The arguments of the function.
        backend: The backend of WORLD; it need not be available on this machine.
        timeout: The timeout of WORLD.

    Returns:
        The return values, creations and calls of each rank, and the disagreements: a group with
        another backend, timeout or description, one that a member does not create, collectives
        that differ or that a member does not call, messages without their other end, and any of
        these in orders that wait for each other.

    Raises:
        RankFailedError: The function raised; names the rank, and holds the traceback.
        LayoutError: `world_size` or a rank is not an int, or is out of range.
        GroupOptionsError: torch does not know the backend, or `timeout` is not a duration.
        LaunchError: `function` cannot be called, or `args` is not a sequence.

    Example:
        >>> import torch.distributed as dist
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import simulate
        >>> def program(odd=None):
        ...     grid = HyperCommGrid([4, 4], ["tp", "dp"])
        ...     order = ["tp", ["tp", "dp"]]
        ...     for dims in reversed(order) if dist.get_rank() == odd else order:
        ...         grid.create_pg(dims)
        >>> print(simulate(program, 16))
        16 of 16 ranks: 5 process groups, 2 on each rank
        all ranks agree
        >>> print(simulate(program, 16, args=(7,)).disagreements[1])
        tp of ranks (4, 5, 6, 7): ranks 4, 5, 6 wait for rank 7, which waits in tp+dp

        Rank 3 calls a collective of another shape.

        >>> import torch
        >>> def start(odd=None):
        ...     dist.barrier()
        ...     dist.all_reduce(torch.zeros(5 if dist.get_rank() == odd else 4))
        >>> print(simulate(start, 8))
        8 of 8 ranks: 0 process groups, 0 on each rank; 2 collectives on each
        all ranks agree
        >>> one, = simulate(start, 8, args=(3,)).disagreements
        >>> one.number, one.calls[3].op, one.calls[3].shapes, one.calls[0].shapes
        (2, 'all_reduce', ((5,),), ((4,),))
    """
    as_world_size(world_size)
    if not callable(function) or not isinstance(args, Sequence) or isinstance(args, str):
        raise LaunchError(
            f"function must be callable, and args a sequence of arguments, got {shown(function)} "
            f"and {shown(args)}"
        )
    check_given_timeout(timeout)
    wanted: Sequence[int] = range(world_size)
    if ranks is not None:
        wanted = sorted({as_int(rank, "rank") for rank in as_tuple(ranks, "ranks")})
    outside = [rank for rank in wanted if not 0 <= rank < world_size]
    if outside:
        raise LayoutError(f"ranks must be in range({world_size}), got {outside[0]}")
    check_known(backend)
    if c10d.is_other_world():
        raise LaunchError("simulate() was called by a function that it runs; leave it out there")
    book, everyone = Book(), _Everyone(world_size)
    returned: dict[int, Result] = {}
    job = OtherWorld(lambda: None, everyone, backend, lambda *_: None)
    with other_worlds(lambda: job), _environment():
        for rank in wanted:
            job = _job(rank, everyone, book, backend, timeout)
            job.show()
            job.begin()
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
            with ezpz.current.fresh(), megatron.current.fresh():
                try:
                    returned[rank] = function(*args)
                except Exception as error:
                    raise RankFailedError(rank, traceback.format_exc()) from error
    creations: dict[int, list[Creation]] = {}
    collectives: dict[int, list[Collective]] = {}
    for rank, steps in book.programs.items():
        creations[rank] = [step for step in steps if isinstance(step, Creation)]
        collectives[rank] = [step for step in steps if isinstance(step, Collective)]
    return Simulation(world_size, returned, creations, collectives, judge(book.programs))


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Hide the variables of a launcher, and restore all variables afterwards."""
    before = dict(os.environ)
    for name in VARIABLES:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _job(
    rank: int, everyone: Mapping[int, int], book: Book, backend: str, timeout: timedelta
) -> OtherWorld:
    """Return the job as a rank sees it, whose groups record their creations and calls."""
    jobs = itertools.count(1)

    def make_world() -> RecordingGroup:
        number = next(jobs)
        name = "WORLD" if number == 1 else f"WORLD (job {number})"
        whole = Creation(name, range(len(everyone)), backend, timeout, name)
        return RecordingGroup(whole, rank, book, "0")

    def create(
        name: str, ranks: tuple[int, ...], backend: str, timeout: timedelta, description: str
    ) -> RecordingGroup:
        made = Creation(name, ranks, backend, timeout, description)
        book.steps.append(made)
        return RecordingGroup(made, rank, book, name)

    book.begin(rank)
    return OtherWorld(make_world, everyone, backend, create)


class _Everyone(Mapping[int, int]):
    """Maps each rank of a world to itself."""

    def __init__(self, world_size: int) -> None:
        self._ranks = range(world_size)

    def __getitem__(self, rank: int) -> int:
        if rank not in self._ranks:
            raise KeyError(rank)
        return rank

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)
