"""The simulated job: real code on every rank, one at a time; the store and gloo are ours."""

from __future__ import annotations

import gc
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import attrs
import torch.distributed as dist

from hypercomm.errors import SimulationError
from hypercomm.testing.other_world import other_worlds
from simulated_job.faults import Fault, RankFault, StoreGoes, StoreIsSlow
from simulated_job.gloo import Network, SimulatedGloo, place
from simulated_job.process import Call, JobState, ModuleState, RankProcess
from simulated_job.scheduler import Choices, EndedError, Scheduler
from simulated_job.schedules import AtRandom, ByPriority, Given
from simulated_job.store import Client, Server
from simulated_job.substitutes import Thread, running

Schedule: TypeAlias = Literal["random", "pct", "first"] | Choices

_SLACK_S = 0.001

_REPLACED: dict[str, object] = {
    "ProcessGroupGloo": SimulatedGloo,
    "barrier": lambda *_, **__: None,
    "monitored_barrier": lambda *_, **__: None,
}
"""What programs find in torch.distributed in place of its own."""


@attrs.frozen
class HeldGroup:
    """A process group as one rank holds it at the end."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    timeout: timedelta
    description: str


@attrs.frozen
class Outcome:
    """What became of one rank.

    Attributes:
        value: What its program returned.
        error: What it raised, if it did.
        is_dead: Whether it died.
        calls: What it called by `attempt`.
        groups: The process groups that it holds at the end.
        asked: How often it asked the store each question.
        points: How often it could be stopped.
    """

    value: Any
    error: BaseException | None
    is_dead: bool
    calls: tuple[Call, ...]
    groups: tuple[HeldGroup, ...]
    asked: Counter[str]
    points: int


@attrs.frozen(repr=False)
class JobRun:
    """What a simulated job did.

    Attributes:
        ranks: What became of each rank.
        digest: The same for the same seed, program and faults.
        trace: What was done, in order: the virtual time, the task, what.
        store: What the store holds at the end; may serve another job.
        took_s: How long it took, in virtual time.
        steps: How often it was decided who runs.
        is_stuck: Why the run was given up, if it was.
        faults: What has happened.
    """

    ranks: tuple[Outcome, ...]
    digest: str
    trace: list[tuple[float, int, str]]
    store: Server
    took_s: float
    steps: int
    is_stuck: str | None
    faults: tuple[object, ...]

    def calls(self, number: int) -> list[Call]:
        """Return the n-th call of each rank that made so many."""
        return [rank.calls[number] for rank in self.ranks if len(rank.calls) > number]

    def values(self) -> list[Any]:
        """Return what the ranks returned.

        Raises:
            SimulationError: A rank raised or died, or the run was given up.
        """
        for number, rank in enumerate(self.ranks):
            if rank.error is not None or rank.is_dead or self.is_stuck:
                raise SimulationError(
                    f"rank {number} did not return: {rank.error!r} {self.is_stuck or ''}\n{self}"
                ) from rank.error
        return [rank.value for rank in self.ranks]

    def __str__(self) -> str:
        lines = [f"{len(self.ranks)} ranks, {self.steps} steps, {self.took_s:.3f} s, {self.digest}"]
        lines += [f"stuck: {self.is_stuck}"] if self.is_stuck else []
        lines += [f"fault: {fault}" for fault in self.faults]
        for number, rank in enumerate(self.ranks):
            end = "died" if rank.is_dead else reprlib.repr(rank.error or rank.value)
            lines.append(f"rank {number}: {end}")
            for call in rank.calls:
                how = repr(call.error) if call.error is not None else "returned"
                lines.append(f"  {call.began_s:.3f} +{call.took_s:.3f} {call.label}: {how}")
        return "\n".join(lines)

    __repr__ = __str__


def simulate_job(
    program: Callable[..., Any],
    nprocs: int,
    *,
    args: Sequence[object] = (),
    seed: int = 0,
    schedule: Schedule = "random",
    faults: Iterable[Fault] = (),
    timeout: timedelta = timedelta(seconds=10),
    backend: str = "gloo",
    store: Server | None = None,
    most_steps: int = 100_000,
) -> JobRun:
    """Run a program on all ranks of a job at once, in this process, on a virtual clock.

    All that the library does is real, down to what gloo asks its store; the store, the network,
    clocks, locks and threads are simulated. One rank runs at a time, and each question to the
    store and each pause may let another go on. The same arguments make the same run.

    Args:
        program: Called with `args` on every rank; collectives cannot be simulated.
        nprocs: The number of ranks.
        args: Arguments of the program.
        seed: Draws the schedule.
        schedule: "random", "pct" (by priorities), "first" (who began first goes on), or choices.
        faults: What happens to ranks and to the store.
        timeout: The timeout of WORLD.
        backend: The backend of WORLD.
        store: One that a job before has left.
        most_steps: After how many decisions the run is given up.

    Returns:
        What each rank returned or raised, and all that was done.

    Raises:
        SimulationError: A simulated job starts another one.

    Example:
        >>> import torch.distributed as dist
        >>> from hypercomm import HyperCommGrid
        >>> from simulated_job import simulate_job
        >>> def program():
        ...     with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        ...         return dist.get_process_group_ranks(grid.create_pg("tp"))
        >>> simulate_job(program, 4, seed=7).values()
        [[0, 1], [0, 1], [2, 3], [2, 3]]
    """
    if running.scheduler is not None:
        raise SimulationError("simulate_job() was called by a program that it runs; leave it out")
    faults = list(faults)
    scheduler = Scheduler(_choices(schedule, seed), most_steps, _slack(schedule))
    job = JobState(
        scheduler,
        {rank: rank for rank in range(nprocs)},
        backend,
        timeout,
        [fault for fault in faults if isinstance(fault, RankFault)],
        ModuleState(seed),
        Network(scheduler),
        {"": Server(dict(store.held)) if store is not None else Server()},
    )
    was_collecting = gc.isenabled()
    gc.disable()
    running.scheduler = scheduler
    place.find = lambda: (job.network, _alive(_process()))
    try:
        with job.state.in_place():
            processes = [RankProcess(rank, job) for rank in range(nprocs)]
            _plan_store_faults(faults, job, processes)
            return _run(program, args, job, processes)
    finally:
        running.scheduler, place.find = None, None
        if was_collecting:
            gc.enable()
        gc.collect(0)  # not during a run, which must be repeatable; and no more than that run's


def _choices(schedule: Schedule, seed: int) -> Choices:
    if schedule == "random":
        return AtRandom(seed)
    if schedule == "pct":
        return ByPriority(seed, depth=1 + seed % 3)
    if schedule == "first":
        return Given([], 0)
    return schedule


def _slack(schedule: Schedule) -> float:
    return _SLACK_S if isinstance(schedule, str) and schedule != "first" else 0.0


def _plan_store_faults(
    faults: Sequence[Fault], job: JobState, processes: Sequence[RankProcess]
) -> None:
    def slow_down(seconds: float) -> Callable[[], None]:
        def act() -> None:
            for process in processes:
                for client in process.clients.values():
                    client.late_s = seconds

        return act

    for fault in faults:
        if isinstance(fault, StoreGoes):
            job.servers[""].gone_s = fault.from_s
        elif isinstance(fault, StoreIsSlow):
            job.scheduler.at(fault.from_s, slow_down(fault.seconds))
            job.scheduler.at(fault.until_s, slow_down(0.0))


def _run(
    program: Callable[..., Any],
    args: Sequence[object],
    job: JobState,
    processes: Sequence[RankProcess],
) -> JobRun:
    ends: dict[int, tuple[Any, BaseException | None, tuple[HeldGroup, ...]]] = {}

    def main(process: RankProcess) -> Callable[[], None]:
        def act() -> None:
            value, error = None, None
            process.world.begin()
            try:
                value = program(*args)
            except EndedError:
                raise
            except BaseException as raised:  # noqa: BLE001 - it is what the rank ends by
                error = raised
            ends[process.rank] = value, error, tuple(_held(process))
            process.is_gone()

        return act

    with other_worlds(lambda: _process().world, _REPLACED):
        for process in processes:
            process.main = job.scheduler.spawn(process, main(process), is_main=True)
        job.scheduler.run()
    outcomes = []
    for process in processes:
        value, error, groups = ends.get(process.rank, (None, None, ()))
        asked = sum((client.asked for client in process.clients.values()), Counter[str]())
        calls, is_dead = tuple(process.calls), not process.is_alive
        outcomes.append(Outcome(value, error, is_dead, calls, groups, asked, process.points))
    scheduler = job.scheduler
    return JobRun(
        tuple(outcomes),
        scheduler.digest(),
        scheduler.trace,
        job.servers[""],
        scheduler.now_s,
        scheduler.steps,
        scheduler.is_stuck,
        tuple(job.happened),
    )


def _held(process: RankProcess) -> Iterable[HeldGroup]:
    world = process.world
    for group, (backend, _) in world.pg_map.items():
        if group is world.default_pg:
            continue
        name = world.pg_names[group]
        ranks = tuple(dist.get_process_group_ranks(group))
        yield HeldGroup(name, ranks, backend, group.options._timeout, group.group_desc)


def _process() -> RankProcess:
    scheduler = running.now
    if scheduler is None or scheduler.current is None:
        raise SimulationError("no job is simulated now; call this in a program of simulate_job()")
    process = scheduler.current.process
    if not isinstance(process, RankProcess):
        raise SimulationError("this is no rank of a simulated job")
    return process


def _alive(process: RankProcess) -> Callable[[], bool]:
    return lambda: process.is_alive


# ---- what programs call -----------------------------------------------------------------------


def now() -> float:
    """Return the virtual time, in seconds."""
    return _process().job.scheduler.now_s


def sleep(seconds: float) -> None:
    """Let this rank do nothing for so long, in virtual time."""
    scheduler = _process().job.scheduler
    scheduler.arrive("sleep of the program", scheduler.now_s + seconds)


def attempt(function: Callable[..., Any], *args: object, **keywords: object) -> Call:
    """Call something, and return what came of it and how long it took; `JobRun` keeps it, too.

    Errors are kept, and KeyboardInterrupt.
    """
    process, began_s = _process(), now()
    value, error = None, None
    try:
        value = function(*args, **keywords)
    except EndedError:
        raise
    except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001 - the program looks at it
        error = raised
    label = getattr(function, "__qualname__", repr(function))
    shown = ", ".join([*map(repr, args), *(f"{key}={given!r}" for key, given in keywords.items())])
    call = Call(f"{label}({shown})", value, error, began_s, now() - began_s)
    process.calls.append(call)
    return call


def gate(name: str) -> None:
    """Wait until all ranks have called this, but for those that have ended; asks no store."""
    process = _process()
    job, key = process.job, f"gate {name}"
    job.gates[key].add(process.rank)
    job.scheduler.notify(job.gates)
    job.scheduler.arrive(key)
    while not job.everyone.keys() <= job.gates[key] | job.gone:
        if not job.scheduler.wait(job.gates, math.inf):
            raise SimulationError(f"nobody comes to {key}")


def thread(action: Callable[[], object]) -> Thread:
    """Start another thread of this rank; `join` it."""
    started = Thread(target=action)
    started.start()
    return started


def new_store(name: str) -> Client:
    """Return another store of the job, for `torch.distributed.init_process_group(store=...)`."""
    return _process().client(name)


def interrupt_in(seconds: float) -> None:
    """Raise KeyboardInterrupt in the main thread of this rank after so long."""
    process = _process()
    scheduler, main = process.job.scheduler, process.main
    if main is not None:
        scheduler.at(scheduler.now_s + seconds, lambda: scheduler.throw(main, KeyboardInterrupt()))
