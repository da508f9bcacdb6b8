"""Worlds without a world: the same program as every rank of a large job, in one process."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import attrs
from torch.distributed import ProcessGroup

# Their globals are among what each rank begins without; they must be known before a rank begins.
import hypercomm.compat.ezpz.state
import hypercomm.compat.megatron.state  # noqa: F401
from hypercomm.errors import (
    DisagreementError,
    LayoutError,
    RankFailedError,
    SimulationError,
)
from hypercomm.launch import check_call
from hypercomm.layout.checks import as_int, as_tuple, as_world_size
from hypercomm.process_groups import c10d, world
from hypercomm.process_groups.options import check_given_timeout, check_known
from hypercomm.process_groups.other_world import OtherWorld
from hypercomm.testing.rendezvous import Creation, Disagreement, find_disagreements

Result = TypeVar("Result")

_SHOWN = 5
"""Disagreements that a simulation shows as text."""


@attrs.frozen(repr=False)
class Simulation(Generic[Result]):
    """What the ranks of a simulated job did; str() sums it up.

    Attributes:
        world_size: The number of ranks of the job.
        returned: What the function returned, by rank; its keys are the ranks that were simulated.
        creations: The process groups that each rank would create as a member, in its order.
        disagreements: The groups that would not come about, each with who waits in it for whom.
    """

    world_size: int
    returned: Mapping[int, Result]
    creations: Mapping[int, tuple[Creation, ...]]
    disagreements: tuple[Disagreement, ...]

    def check(self) -> None:
        """Do nothing if all simulated ranks agree.

        Raises:
            DisagreementError: They do not (an AssertionError); shows the first disagreements.
        """
        if self.disagreements:
            raise DisagreementError("\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        shown = self.disagreements[:_SHOWN]
        count = len(self.disagreements)
        yield f"{count:,} process group{'s' * (count != 1)} would not come about:"
        yield from (f"  {disagreement}" for disagreement in shown)
        if len(shown) < count:
            yield f"  and {count - len(shown):,} more"

    def __str__(self) -> str:
        counts = [len(made) for made in self.creations.values()]
        groups = {creation.name for made in self.creations.values() for creation in made}
        few, many = (min(counts), max(counts)) if counts else (0, 0)
        each = f"{few}" if few == many else f"{few} to {many}"
        told = (
            f"{len(counts):,} of {self.world_size:,} ranks: {len(groups):,} process groups, "
            f"{each} on each rank"
        )
        return "\n".join([told, *(self._lines() if self.disagreements else ["all ranks agree"])])

    __repr__ = __str__


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

    torch.distributed answers as on that rank, `torch.distributed.init_process_group` and barriers
    return at once (called like this, not as names that were imported), and groups are stand-ins
    that know their ranks: no process group of torch is made. `torch.distributed.new_group` and
    DeviceMesh are recorded like a grid's own creations. What communicates raises
    `SimulationError`, and who comes to a barrier is not compared. Globals of Megatron and ezpz
    (`hypercomm.compat`) begin empty for each rank; other globals are the function's own concern.
    Other threads see the simulated job too.

    Args:
        function: Called with `args`; environment variables RANK and WORLD_SIZE are set.
        world_size: The number of ranks of the job, at most 2**24.
        ranks: Those to simulate; default: all. Then only members among them are compared.
        args: Arguments of the function.
        backend: The backend of WORLD, available here or not.
        timeout: The timeout of WORLD.

    Returns:
        What each rank returned and would create, and where the ranks disagree: a group with
        another backend, timeout or description, one that a member does not create, or groups in
        orders that wait for each other.

    Raises:
        RankFailedError: The function raised; names the rank, and holds the traceback.
        LayoutError: `world_size` or a rank is no int, or out of range.
        GroupOptionsError: torch does not know the backend, or `timeout` is no length of time.
        LaunchError: `function` cannot be called, or `args` is no sequence.

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
    """
    as_world_size(world_size)
    check_call(function, args)
    check_given_timeout(timeout)
    wanted: Sequence[int] = range(world_size)
    if ranks is not None:
        wanted = sorted({as_int(rank, "rank") for rank in as_tuple(ranks, "ranks")})
    outside = [rank for rank in wanted if not 0 <= rank < world_size]
    if outside:
        raise LayoutError(f"ranks must be in range({world_size}), got {outside[0]}")
    check_known(backend)
    if c10d.is_other_world():
        raise SimulationError(
            "simulate() was called by a function that it runs; leave it out there"
        )
    job, returned, creations = _Job(world_size, backend, timeout), {}, {}
    for rank in wanted:
        with job.as_rank(rank) as created, world.new_process():
            try:
                returned[rank] = function(*args)
            except Exception as error:
                raise RankFailedError(rank, traceback.format_exc()) from error
        creations[rank] = tuple(created)
    return Simulation(world_size, returned, creations, find_disagreements(creations))


class _Job:
    """A job whose ranks are simulated one after the other."""

    def __init__(self, world_size: int, backend: str, timeout: timedelta) -> None:
        self._everyone = _Everyone(world_size)
        self._backend = backend
        self._timeout = timeout
        self._known: dict[str, tuple[int, ...]] = {}

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[list[Creation]]:
        """Let torch.distributed answer as on a rank, and yield what it creates."""
        created: list[Creation] = []

        def create(
            name: str, ranks: tuple[int, ...], backend: str, timeout: timedelta, description: str
        ) -> SimulatedGroup:
            # The members of a group hold one tuple, or a large job would not fit into memory.
            known = self._known.setdefault(name, ranks)
            ranks = known if known == ranks else ranks
            created.append(Creation(name, ranks, backend, timeout, description))
            return SimulatedGroup(name, ranks.index(rank), len(ranks), timeout, description)

        size = len(self._everyone)
        everyone = SimulatedGroup("0", rank, size, self._timeout, "default_pg")
        job = OtherWorld(everyone, self._everyone, self._backend, create)
        with job.entered(), _environment(RANK=str(rank), WORLD_SIZE=str(size)):
            yield created


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class SimulatedGroup:
    """Stands in for a process group of the calling rank: knows all but how to communicate."""

    bound_device_id = None

    def __init__(
        self, name: str, rank: int, size: int, timeout: timedelta, description: str
    ) -> None:
        self.group_name = name
        self.group_desc = description
        self.options = SimpleNamespace(_timeout=timeout)
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """Return the position of the calling rank among the members."""
        return self._rank

    def size(self) -> int:
        """Return the number of members."""
        return self._size

    def name(self) -> str:
        """Return what kind of backend this is."""
        return "simulated"

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What DeviceMesh asks for, though this is none."""
        return ProcessGroup

    def _get_backend(self, _device: object) -> SimulatedGroup:
        return self

    def __getattr__(self, name: str) -> Any:
        raise SimulationError(
            f"a simulated process group has no {name!r}: no rank is there to communicate with; "
            f"leave communication out of what is simulated, or start ranks with run_ranks()"
        )

    def __repr__(self) -> str:
        return f"<simulated group {self.group_name}: rank {self._rank} of {self._size}>"


class _Everyone(Mapping[int, int]):
    """Each rank of the world, mapped to itself."""

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
