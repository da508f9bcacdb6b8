"""Simulates every call that ranks make together, and checks the runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hypercomm import GridSet, HyperCommGrid, RankLayout, RankMapping
from hypercomm.launch.worlds import JoinedWorld, join_world
from hypercomm.process_groups.world import World, current
from hypercomm.transfers.exchange import consent
from hypercomm.transfers.state import transfer_state
from hypercomm.transfers.transfer import transfer
from simulated_job.job import Job, Made, attempt, gate, mark, simulate_job, sleep, this_rank

T = 10.0
GRACE_S = 2.0
"""The time after its timeout within which a call must end, in seconds."""


class Call(NamedTuple):
    """A call of one rank. `seen` returns the state that the call changes equally on all ranks."""

    make: Callable[[], object]
    seen: Callable[[], object]
    keep: object = None


def of_grid(grid: HyperCommGrid, make: Callable[[HyperCommGrid], object]) -> Call:
    """Return a call of a grid."""
    return Call(lambda: make(grid), lambda: (str(grid.layout), sorted(map(str, grid.pgs))), grid)


def square(**options: Any) -> HyperCommGrid:
    """Return a grid of four ranks."""
    return HyperCommGrid([2, 2], ["tp", "dp"], **options)


def with_groups() -> HyperCommGrid:
    """Return a grid that has groups."""
    grid = square()
    grid.create_pgs(["tp", ["tp", "dp"]])
    return grid


def a_set() -> Call:
    """Return a call that creates groups of two grids with the same ranks."""
    grids = GridSet.colocated(3, a="tp=3", b="dp=3")
    return Call(
        lambda: grids.create_pgs({"a": ["tp"], "b": ["dp"]}),
        lambda: [sorted(map(str, grid.pgs)) for grid in grids.values()],
        grids,
    )


def a_transfer() -> Call:
    """Return a call that transfers a tensor from rank 0 to ranks 1 and 2."""
    mapping = RankMapping(RankLayout([1], ["tp"]), RankLayout([2], ["dp"], 1))

    def make() -> None:
        tensor = torch.arange(4.0).reshape(4, 1) if dist.get_rank() == 0 else torch.zeros(2, 1)
        received = transfer(mapping, tensor, verify=True)
        first = 2.0 * (dist.get_rank() - 1)
        assert received is None or received.flatten().tolist() == [first, first + 1.0]

    return Call(make, lambda: None)


def a_consent(world: World | None = None) -> Call:
    """Return the call in which ranks agree before a transfer."""
    mapping = RankMapping(RankLayout([1], ["tp"]), RankLayout([2], ["dp"], 1))
    return Call(lambda: consent(world or current(), mapping, "all"), lambda: None, world)


def a_state(world: World | None = None) -> Call:
    """Return a call that transfers a state from two ranks to another rank."""
    mapping = RankMapping(RankLayout([2], ["tp"]), RankLayout([1], ["tp"], 2), along=None)

    def make() -> None:
        rank = dist.get_rank()
        into = {"w": torch.zeros(4)}
        sent = {"w": torch.arange(4.0)[2 * rank : 2 * rank + 2]}
        ends: Any = {"into": into} if rank == 2 else {"state": sent}
        transfer_state(mapping, **ends, shards={"w": {"tp": 0}}, verify=True, world=world)
        assert rank != 2 or into["w"].tolist() == [0.0, 1.0, 2.0, 3.0]

    return Call(make, lambda: None, world)


PARTS = {"trainer": 2, "engine": 1}


def joined(number: int | None = None, **options: Any) -> JoinedWorld:
    """Join a world of two trainers and an engine, as process `number` or as the calling rank."""
    part, rank = [("trainer", 0), ("trainer", 1), ("engine", 0)][
        dist.get_rank() if number is None else number
    ]
    facts: dict[str, Any] = {"name": "weights", "parts": PARTS, **options}
    timeout = timedelta(seconds=T)
    return join_world(this_rank().store, part=part, rank=rank, timeout=timeout, **facts)


def worlds() -> object:
    """Return the names of the groups of joined worlds that this rank has."""
    sleep(0.1)  # a thread may still undo what a failed call has done
    return [group.name for group in this_rank().groups() if "/worlds/" in group.name]


def a_rejoin() -> Call:
    """Return the call of this rank when the engine joins again. The trainers call `rejoin`."""
    world = joined()
    gate("all have joined")
    if dist.get_rank() < 2:
        return Call(world.rejoin, worlds, world)
    world.leave()
    return Call(joined, worlds)


class Case(NamedTuple):
    """A call to simulate.

    Attributes:
        size: The number of ranks.
        set_up: Returns the call.
        retries: Whether the call can be repeated after any fault. A transfer cannot, because data
            in flight is lost and torch cannot undo a collective.
        is_notified: Whether a rank raises the error of a call that failed just before the rank
            arrived. A rank that joins a world again raises no error, but waits until the other
            ranks call again.
    """

    size: int
    set_up: Callable[[], Call]
    retries: bool = True
    is_notified: bool = True


def grid_case(
    size: int, build: Callable[[], HyperCommGrid], make: Callable[[HyperCommGrid], object]
) -> Case:
    """Return a case in which every rank builds a grid and calls `make` on it."""
    return Case(size, lambda: of_grid(build(), make))


CASES = {
    "create_pg": grid_case(
        3, lambda: HyperCommGrid([3], ["tp"]), lambda grid: grid.create_pg("tp")
    ),
    "create_pg verified": grid_case(
        4, lambda: square(verify=True), lambda grid: grid.create_pg("tp")
    ),
    "create_pg lazy": grid_case(
        3,
        lambda: HyperCommGrid([3], ["tp"], lazy_init=True),
        lambda grid: grid.create_pg("tp"),
    ),
    "create_pgs": grid_case(4, square, lambda grid: grid.create_pgs(["tp", "dp"])),
    "set": Case(3, a_set),
    "verify": grid_case(4, with_groups, lambda grid: grid.verify()),
    "reshape": grid_case(4, with_groups, lambda grid: grid.reshape("tp=4,dp=1")),
    "connect": grid_case(4, with_groups, lambda grid: grid.connect(pipelines=()))._replace(
        retries=False
    ),
    "transfer": Case(3, a_transfer, retries=False),
    "transfer_state": Case(3, a_state, retries=False),
    "consent": Case(3, a_consent),
    "join_world": Case(3, lambda: Call(joined, worlds)),
    "rejoin": Case(3, a_rejoin, is_notified=False),
    "create_pg in a joined world": grid_case(
        3, lambda: HyperCommGrid([3], ["tp"], world=joined()), lambda grid: grid.create_pg("tp")
    ),
    "transfer_state in a joined world": Case(3, lambda: a_state(joined()), retries=False),
    "consent in a joined world": Case(3, lambda: a_consent(joined())),
}


def program(case: str) -> Any:
    """Make the call of a case. All living ranks repeat the call until it succeeds."""
    _, set_up, retries, _ = CASES[case]
    call = set_up()
    gate("is set up")
    mark()
    seen = [call.seen()]
    groups = [this_rank().groups()]
    for turn in range(3 if retries else 1):
        attempt(call.make)
        seen.append(call.seen())
        gate(f"turn {turn}")
        sleep(0.1)  # a thread may still undo what a failed call has done
        groups.append(this_rank().groups())
        if "" in this_rank().job.kinds(turn):
            break  # the error of an interrupted rank does not show whether the call succeeded
    return seen, groups, call


# ---- checks of each run -------------------------------------------------------------------------


def broken(
    job: Job, timeout_s: float = T, extra_s: float = 0.0, *, is_notified: bool = True
) -> list[str]:
    """Return the guarantees of all cases that a run has broken.

    Args:
        job: The run.
        timeout_s: The timeout of each call.
        extra_s: The additional time for ranks that had a fault.
        is_notified: See `Case`.
    """
    odd = {fault.rank for fault in job.happened}
    broken_ones = [job.is_stuck] if job.is_stuck else []
    for rank in job.living():
        if rank.error is not None:
            broken_ones.append(f"{rank} raised {rank.error!r}")
        limit_s = timeout_s + GRACE_S + (extra_s if rank.number in odd else 0.0)
        for call in rank.calls:
            named = getattr(call.error, "missing", None)
            if call.took_s > limit_s:
                broken_ones.append(f"{rank}: {call.label} took {call.took_s:.1f} s")
            may_be_named = odd if is_notified else odd | _failed_earlier(job, call)
            if named is not None and (not named or not {*named} <= may_be_named):
                broken_ones.append(f"{rank} names {named}")
    return broken_ones + _differing_groups(job)


def _failed_earlier(job: Job, call: Made) -> set[int]:
    """Return the ranks whose call failed long before the call of another rank ended."""
    long_before_s = call.began_s + call.took_s - 1.0
    return {
        rank.number
        for rank in job.living()
        for one in rank.calls
        if one.error is not None and call.began_s < one.began_s + one.took_s < long_before_s
    }


def _differing_groups(job: Job) -> list[str]:
    """Describe groups that differ between their members."""
    living = {rank.number: {group.name: group for group in rank.held} for rank in job.living()}
    return [
        f"rank {rank} has {group}, and rank {other} {living[other].get(group.name)}"
        for rank, held in living.items()
        for group in held.values()
        for other in (*group.ranks, rank)
        if other in living and (living[other].get(group.name) != group or rank not in group.ranks)
    ]


def broken_by_fault(job: Job, case: str) -> list[str]:
    """Return the guarantees that a run of `program` with one fault has broken."""
    limit_s = T if CASES[case].retries else 2 * T  # T for the agreement, T for the transfer
    extra_s = sum(fault.seconds for fault in job.happened)
    broken_ones = broken(job, limit_s, extra_s, is_notified=CASES[case].is_notified)
    ends = [rank.value for rank in job.living() if rank.value is not None]
    for turn in range(max((len(rank.calls) for rank in job.living()), default=0)):
        ok = {kind == "" for kind in job.kinds(turn) if kind not in _UNKNOWN}
        if len(ok) > 1:
            broken_ones.append(f"only some ranks have failed: {job.kinds(turn)}")
        if len({str(seen[turn + 1]) for seen, *_ in ends if len(seen) > turn + 1}) > 1:
            broken_ones.append(f"ranks differ after call {turn}: {[seen for seen, *_ in ends]}")
    for seen, groups, _ in ends:
        for turn in range(1, len(seen)):
            if seen[turn] == seen[0] and groups[turn] != groups[0]:
                broken_ones.append(f"a call left {groups[turn]} of {groups[0]}")
    if CASES[case].retries and not any(rank.is_dead for rank in job.ranks):
        if max(len(rank.calls) for rank in job.ranks) > 2:
            broken_ones.append("one retry was not enough")
        if "" not in job.kinds(-1) or not {*job.kinds(-1)} <= {"", "KeyboardInterrupt"}:
            broken_ones.append("no call succeeded")
    return broken_ones


_UNKNOWN = {"KeyboardInterrupt", "RuntimeError"}
"""Errors that do not show whether the call succeeded. torch raises RuntimeError after the call."""


def points_of(case: str) -> int:
    """Return how many steps the busiest rank takes in a call without a fault."""
    job = simulate_job(program, CASES[case].size, args=(case,), timeout_s=T)
    assert broken(job) == [], job
    assert all(call.error is None for rank in job.ranks for call in rank.calls), job
    return max(int(rank.points) for rank in job.ranks)
