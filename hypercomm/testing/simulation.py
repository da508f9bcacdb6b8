"""Runs a program as every rank of a job in turn, and compares the calls of the ranks."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Generic, TypeVar
from unittest import mock

import attrs

from hypercomm.blame.analysis import ANSWERS, find_differences, find_waits
from hypercomm.blame.evidence import Evidence, LoggedCall, LoggedGroup, RankLog
from hypercomm.compat.ezpz import tp as ezpz
from hypercomm.compat.megatron import state as megatron
from hypercomm.errors import SimulationError
from hypercomm.job_environment import VARIABLES
from hypercomm.launch.failures import Place, explain, failure_of
from hypercomm.layout.checks import as_ranks, as_world_size, check_duration
from hypercomm.layout.text import first_n, pluralize
from hypercomm.process_groups.spec import check_known
from hypercomm.testing.recording import CREATION, Book, Collective, RecordedGroup, Step
from hypercomm.testing.simulated_job import SimulatedJob, replaced_job

Result = TypeVar("Result")


_NEVER = {CREATION: "never creates it", "send": "never receives it", "recv": "never sends it"}


@attrs.frozen
class Disagreement:
    """Calls of a process group that differ or never end. `str()` describes them.

    Attributes:
        group: The process group, as the lowest rank in `calls` creates it.
        number: The index of the collective in this group, or of the message between two ranks in
            this group, counted from 1. 0 for the creation of the group.
        calls: The calls by rank. For a creation, the group that each rank creates.
        absent: The reason why each other member is missing, by rank.
        differs: The difference between the calls, or "" if they are equal.
    """

    group: RecordedGroup
    number: int
    calls: Mapping[int, RecordedGroup | Collective]
    absent: Mapping[int, str]
    differs: str = ""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that made the call."""
        return tuple(self.calls)

    def __str__(self) -> str:
        what = f"call {self.number} on {self.group}" if self.number else str(self.group)
        if self.differs:
            return f"{what}: {self.differs}"
        if self.number:
            what += f", {self.calls[self.waiting[0]]}"
        rank, why = next(iter(self.absent.items()))
        more = f", and for {len(self.absent) - 1} more" if len(self.absent) > 1 else ""
        who = _ranks_that(self.waiting, "waits", "wait")
        return f"{what}: {who} for rank {rank}, which {why}{more}"


@attrs.frozen(repr=False)
class Simulation(Generic[Result]):
    """The result of a simulated job. `str()` summarises it.

    Attributes:
        world_size: The number of ranks of the job.
        returned: The return values of the function, by simulated rank.
        creations: The process groups that each rank would create as a member, in order.
        collectives: The collectives, sends and receives that each rank called, in order.
        disagreements: The group creations, collectives, sends and receives that differ or never
            end, with the ranks that wait and the ranks that are missing.
    """

    world_size: int
    returned: Mapping[int, Result]
    creations: Mapping[int, Sequence[RecordedGroup]]
    collectives: Mapping[int, Sequence[Collective]]
    disagreements: tuple[Disagreement, ...]

    def check(self) -> None:
        """Raise unless all simulated ranks agree.

        Raises:
            SimulationError: Some ranks disagree. The error is an AssertionError with the first
                disagreements.
        """
        if self.disagreements:
            raise SimulationError(str(self))

    def __repr__(self) -> str:
        return f"<Simulation: {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        groups = {creation.name for made in self.creations.values() for creation in made}
        headline = (
            f"{len(self.creations):,} of {self.world_size:,} ranks: {len(groups):,} process "
            f"groups, {_range(self.creations)} on each rank"
        )
        if any(self.collectives.values()):
            headline += f"; {_range(self.collectives)} collectives on each"
        found = self.disagreements
        verdict = f"{pluralize(len(found), 'disagreement')}:" if found else "all ranks agree"
        more = [f"  and {len(found) - 5:,} more"] if len(found) > 5 else []
        return "\n".join([headline, verdict, *(f"  {one}" for one in found[:5]), *more])


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
    """Run a function for every rank of a job, one rank after another, in this process.

    While the function runs, torch.distributed returns the values of the simulated rank.
    `init_process_group` returns immediately if it is called as an attribute of torch.distributed,
    but not under a name that was imported before. No process group of torch is created. Groups that
    `new_group` and DeviceMesh create are recorded like groups of a grid. The global state of
    Megatron and ezpz (`hypercomm.compat`) is empty at the start of each rank. Other global
    variables are shared. Other threads see the simulated job, too.

    All collectives, sends and receives are recorded and return immediately. Their results, which
    never depend on ranks that run later, are:

    - all_reduce, reduce: the tensor is unchanged.
    - all_gather, gather: every slot has this rank's values.
    - reduce_scatter: the output is this rank's part of its input.
    - all_to_all: the output is this rank's input, if the shapes are equal.
    - broadcast, scatter, recv: the tensor has the values of the root or sender if that rank ran
      before. Otherwise it is unchanged.
    - Collectives of objects work like these collectives, with copies of the objects. An object of
      a rank that runs later is None.

    Then the calls of the ranks are compared. The members of a group must make the same calls in the
    same order, with equal op, shapes, dtype, reduction and root. torch makes the same checks with
    TORCH_DISTRIBUTED_DEBUG=DETAIL. The parts of an all-to-all may differ, because they often depend
    on received values. A rank waits in a collective for all members, and in a receive for the send.
    With `async_op=True`, the rank waits in `wait()` of the work. A send does not wait. Sends and
    receives are matched by tag, although NCCL ignores tags. Only the first difference of each group
    is reported. Functional collectives (DTensor) and code that passes a group to C++
    (DistributedDataParallel) cannot be simulated.

    Args:
        function: The function to call with `args`. The environment variables RANK and WORLD_SIZE
            are set.
        world_size: The number of ranks of the job, at most 2**24.
        ranks: The ranks to simulate and compare. Default: all.
        args: The arguments of the function.
        backend: The backend of WORLD, which need not be available on this machine.
        timeout: The timeout of WORLD.

    Returns:
        The return values, group creations and calls of each rank, and the disagreements. The
        disagreements are groups with different backends, timeouts or descriptions, groups that a
        member does not create, collectives that differ or that a member does not call, messages
        without a send or receive, and calls that wait for each other.

    Raises:
        RankFailedError: The function raised. The error contains the rank and the traceback.
        LayoutError: `world_size` or a rank is not an int, or is out of range.
        GroupOptionsError: torch does not know the backend, or `timeout` is not a positive
            timedelta.

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

        Rank 3 calls a collective with another shape.

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
    check_duration(timeout)
    wanted: Sequence[int] = range(world_size)
    if ranks is not None:
        wanted = as_ranks(sorted(set(ranks)), "ranks", world_size)
    check_known(backend)
    book = Book(set(wanted))
    everyone = {rank: rank for rank in range(world_size)}
    returned: dict[int, Result] = {}
    with replaced_job(), mock.patch.dict(os.environ):
        for name in VARIABLES:  # a launcher may have set them
            os.environ.pop(name, None)
        for rank in wanted:
            book.begin(rank)
            job = SimulatedJob(rank, everyone, backend, timeout, book)
            job.show()
            job.begin()
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
            with ezpz.current.fresh(), megatron.current.fresh():
                try:
                    returned[rank] = function(*args)
                except (Exception, SystemExit) as error:
                    left = [later for later in wanted if later > rank]
                    places = [Place(left, "had not run yet", "", is_waiting=True)] if left else []
                    raise explain([failure_of(rank, error)], returned, places, "") from error
    creations: dict[int, list[RecordedGroup]] = {}
    collectives: dict[int, list[Collective]] = {}
    for rank, steps in book.programs.items():
        made = [call.source for does_wait, call in steps if not does_wait]
        creations[rank] = [each for each in made if isinstance(each, RecordedGroup)]
        collectives[rank] = [each for each in made if isinstance(each, Collective)]
    return Simulation(world_size, returned, creations, collectives, judge(book.programs))


# ---- the comparison of the ranks ---------------------------------------------------------------

# The steps of each rank.
Programs = Mapping[int, Sequence[Step]]

# The group, channel and number of a call. Calls that belong together have the same point.
Point = tuple[LoggedGroup, str, int]


def judge(programs: Programs) -> tuple[Disagreement, ...]:
    """Find the calls that differ, and the calls that never end.

    A rank waits in a group creation or a collective until all members have called it, and in a
    receive until the message is sent. A rank waits for an asynchronous call in `wait()` of its
    work. A send never waits. Once calls of a group differ, no rank is assumed to wait in that
    group, because later differences are consequences.

    Args:
        programs: The steps of each simulated rank. Other ranks are assumed to make the right calls.

    Returns:
        The differences, followed by the waits. Waits for a call that a member never makes precede
        the other waits.
    """
    known = {None, *programs}  # messages from and to ranks that are not simulated are ignored
    steps = {}
    for rank, own in programs.items():
        steps[rank] = [step for step in own if not step[1].channel or step[1].peer in known]
    evidence = _evidence(steps)
    different = find_differences(evidence)
    every = [call for calls in different for call in calls.values()]
    first = {(call.group, call.channel): call.number for call in every}
    at = _advance(steps, first)
    stuck = list(_stuck(steps, evidence, at))
    stuck.sort(key=lambda one: (not any(map(_is_never, one.absent.values())), one.waiting))
    return (*(_disagreement(calls, {}, _describe(calls)) for calls in different), *stuck)


def _evidence(steps: Programs) -> Evidence:
    records = {rank: RankLog(rank) for rank in steps}
    for rank, own in steps.items():
        for does_wait, call in own:
            if not does_wait:
                records[rank].add(call)
    return Evidence(records, len(records))


def _other_end(call: LoggedCall) -> Point:
    """Return the point of the matching send or receive, or a collective's own point."""
    way, _, route = call.channel.partition(" ")
    other = f"{ANSWERS[way]} {route}" if way in ANSWERS else call.channel
    return call.group, other, call.number


def _needed(call: LoggedCall) -> int:
    return 1 if call.channel else len(call.group.ranks)


def _advance(steps: Programs, first: Mapping[tuple[LoggedGroup, str], int]) -> dict[int, int]:
    """Return the index of the step in which each rank waits forever, and mark the ended calls.

    If a rank does not wait forever, the index is the number of its steps.
    """
    at = dict.fromkeys(steps, 0)
    entered: Counter[Point] = Counter()
    waiting: dict[Point, list[int]] = {}

    def has_ended(call: LoggedCall) -> bool:
        is_free = call.number >= first.get((call.group, call.channel), math.inf)
        return is_free or entered[_other_end(call)] >= _needed(call)

    ready = sorted(steps, reverse=True)
    while ready:
        rank = ready.pop()
        while at[rank] < len(steps[rank]):
            does_wait, call = steps[rank][at[rank]]
            if not does_wait:
                point = (call.group, call.channel, call.number)
                entered[point] += 1
                if entered[point] >= _needed(call):
                    ready += waiting.pop(point, ())
            elif call.state != "finished" and call.op[:4] != "send" and not has_ended(call):
                waiting.setdefault(_other_end(call), []).append(rank)
                break
            at[rank] += 1
    for own in steps.values():
        for does_wait, call in own:
            if not does_wait and has_ended(call):
                call.state = "finished"
    return at


def _stuck(steps: Programs, every: Evidence, at: Mapping[int, int]) -> Iterator[Disagreement]:
    """For each group and channel, yield the first call that never ends."""
    reached = _evidence({rank: own[: at[rank]] for rank, own in steps.items()})
    seen = set()
    for wait in sorted(find_waits(reached), key=lambda wait: wait.call.number):
        call = wait.call
        if (call.group, call.channel) in seen:
            continue
        seen.add((call.group, call.channel))
        absent = {}
        for rank in wait.absent:
            absent[rank] = _NEVER.get(call.channel[:4] or call.op, "never calls it")
            group, channel, number = _other_end(call)
            if len(every.lanes.get((group, channel), {}).get(rank, ())) >= number:
                absent[rank] = f"waits in {steps[rank][at[rank]][1].source.called}"
        is_send = call.channel.startswith("send")
        if absent and (not is_send or all(map(_is_never, absent.values()))):
            yield _disagreement(wait.calls, absent)


def _is_never(why: str) -> bool:
    return why.startswith("never")


def _disagreement(
    calls: Mapping[int, LoggedCall], absent: Mapping[int, str], differs: str = ""
) -> Disagreement:
    sources = {rank: calls[rank].source for rank in sorted(calls)}
    call = next(iter(calls.values()))
    if call.op == CREATION:
        return Disagreement(next(iter(sources.values())), 0, sources, absent, differs)
    return Disagreement(call.source.group, call.number, sources, absent, differs)


def _describe(calls: Mapping[int, LoggedCall]) -> str:
    """Describe calls that differ. The calls that the fewest ranks made are first."""
    kinds: dict[object, list[int]] = {}
    for rank in sorted(calls):
        kinds.setdefault(calls[rank].terms, []).append(rank)
    texts = []
    for ranks in sorted(kinds.values(), key=lambda ranks: (len(ranks), ranks)):
        made = calls[ranks[0]].source
        if isinstance(made, RecordedGroup):
            who = _ranks_that(ranks, "creates", "create")
            texts.append(f"{who} {made} with {made.backend} and a timeout of {made.timeout}")
        else:
            texts.append(f"{_ranks_that(ranks, 'calls', 'call')} {made}")
    more = [f"and {len(texts) - 3} more calls"] if len(texts) > 3 else []
    return "; ".join([*texts[:3], *more])


def _ranks_that(ranks: Sequence[int], one: str, many: str) -> str:
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {first_n(ranks, 4)} {many}"
