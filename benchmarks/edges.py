"""Measures an interleaved 1F1B schedule on gloo processes, with one group and with edges.

With one group, all transfers between pipeline stages share the group. With edges, each pair of
neighbouring stages has a group for each direction.

NCCL runs the transfers of a communicator one after the other. gloo does not. Therefore each group
has a thread here, which runs sends and receives in the order in which the schedule issues them.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measure import Goal, Table
from torch.distributed import ProcessGroup

from hypercomm import HyperCommGrid, run_ranks

RANKS, CHUNKS = 4, 2
SECONDS = {"F": 0.010, "B": 0.020}
"""The seconds of a stage's computation. The process sleeps, as if an accelerator computed."""

NUMBERS = 1 << 18
"""The size of an activation or a gradient: 1 MiB."""

BLOCKED = timedelta(seconds=4)
SHARED, EDGES, PLANNED = "one group", "edges", "one group, order of an ideal run"


# ---- schedules ----------------------------------------------------------------------------------


class Step(NamedTuple):
    """The computation of one stage for one microbatch, forward ("F") or backward ("B")."""

    kind: str
    stage: int
    batch: int

    def before(self) -> Step | None:
        """Return the step whose result this step needs, or None."""
        return self._shifted(-1)

    def after(self) -> Step | None:
        """Return the step that needs the result of this step, or None."""
        return self._shifted(1)

    def _shifted(self, by: int) -> Step | None:
        stage = self.stage + (by if self.kind == "F" else -by)
        return self._replace(stage=stage) if 0 <= stage < RANKS * CHUNKS else None


Action = tuple[str, Step]
"""("compute", step), or ("send", step) or ("receive", step) for the result of the step."""


def steps_of(rank: int, batches: int) -> list[Step]:
    """Return the steps of a rank, in the order of the interleaved 1F1B schedule."""
    rounds = [divmod(number, RANKS * CHUNKS) for number in range(CHUNKS * batches)]
    places = [(within // RANKS, turn * RANKS + within % RANKS) for turn, within in rounds]
    forward = [Step("F", chunk * RANKS + rank, batch) for chunk, batch in places]
    backward = [Step("B", (CHUNKS - 1 - chunk) * RANKS + rank, batch) for chunk, batch in places]
    first = min(len(forward), (RANKS - rank - 1) * 2 + (CHUNKS - 1) * RANKS)
    steps = forward[:first]
    for pair in zip(forward[first:], backward, strict=False):
        steps += pair
    return steps + backward[len(forward) - first :]


def when_needed(rank: int, batches: int) -> list[Action]:
    """Return actions that receive just before the step that needs the data, and send just after."""
    actions: list[Action] = []
    for step in steps_of(rank, batches):
        if before := step.before():
            actions.append(("receive", before))
        actions.append(("compute", step))
        if step.after():
            actions.append(("send", step))
    return actions


def as_in_torch(rank: int, batches: int, *, planned: bool = False) -> list[Action]:
    """Return actions that receive when the neighbour sends.

    torch's `_PipelineScheduleRuntime` uses this order.

    The ranks take turns: at each turn, a rank computes its next step if it has the data.

    Args:
        rank: The rank.
        batches: The number of microbatches.
        planned: Whether steps are in the order in which they would end if transfers took no time.
    """
    left = {each: steps_of(each, batches) for each in range(RANKS)}
    actions: dict[int, list[Action]] = {each: [] for each in left}
    ends: dict[Step | None, float] = {None: 0.0}
    free = dict.fromkeys(left, 0.0)

    def end_of(each: int) -> float:
        step = left[each][0]
        return max(free[each], ends[step.before()]) + SECONDS[step.kind]

    while any(left.values()):
        for turn in range(RANKS):
            ready = [each for each in left if left[each] and left[each][0].before() in ends]
            each = min(ready, key=end_of, default=turn) if planned else turn
            if each not in ready:
                continue
            free[each] = end_of(each)
            step = left[each].pop(0)
            ends[step] = free[each]
            actions[each].append(("compute", step))
            if after := step.after():
                actions[each].append(("send", step))
                actions[after.stage % RANKS].append(("receive", step))
    return actions[rank]


# ---- on a rank ----------------------------------------------------------------------------------


class Pipeline:
    """The transfers of a rank, each in the thread of its group.

    Attributes:
        groups: The group for each direction ("send" or "receive") and kind of step ("F" or "B").
        computed: How many steps have been computed.
    """

    def __init__(self, groups: Sequence[ProcessGroup | None]) -> None:
        ways = [("send", "F"), ("receive", "F"), ("send", "B"), ("receive", "B")]
        self.groups = dict(zip(ways, groups, strict=True))
        self.threads = {group: ThreadPoolExecutor(1) for group in groups}
        self.computed = 0

    def run(self, actions: list[Action]) -> None:
        """Run actions, and wait for the transfers.

        Raises:
            RuntimeError: A transfer waited longer than the timeout of its group.
        """
        received: dict[Step, Future[None]] = {}
        sent: list[Future[None]] = []
        for what, step in actions:
            if what == "compute":
                if before := step.before():
                    received[before].result()
                time.sleep(SECONDS[step.kind])
                self.computed += 1
                continue
            group = self.groups[what, step.kind]
            future = self.threads[group].submit(transfer, what, step, group)
            if what == "send":
                sent.append(future)
            else:
                received[step] = future
        for future in sent:
            future.result()

    def end(self) -> None:
        """End the threads. Transfers that have not begun are cancelled."""
        for thread in self.threads.values():
            thread.shutdown(cancel_futures=True)


def transfer(what: str, step: Step, group: ProcessGroup | None) -> None:
    """Send the result of a step, or receive and check it."""
    number = step.stage * 1000 + step.batch
    tensor = torch.full((NUMBERS,), number if what == "send" else -1, dtype=torch.int32)
    if what == "send":
        dist.send(tensor, (step.after() or step).stage % RANKS, group=group)
        return
    dist.recv(tensor, step.stage % RANKS, group=group)
    if tensor[0] != number:
        raise ValueError(step, tensor[0])


def pipeline_over(name: str, grid: HyperCommGrid, timeout: timedelta | None = None) -> Pipeline:
    """Return a pipeline whose transfers use one group, or edges."""
    if name != EDGES:
        return Pipeline([grid.ensure_pg("pp", timeout=timeout)] * 4)
    edges = grid.edges("pp", wrap=True)
    return Pipeline([edges.to_next, edges.from_previous, edges.to_previous, edges.from_next])


def computed(name: str) -> int:
    """Count the steps that this rank computes until the schedule ends or blocks."""
    with HyperCommGrid(pp=RANKS) as grid:
        pipeline = pipeline_over(name, grid, BLOCKED)
        with contextlib.suppress(RuntimeError):  # a transfer has timed out
            pipeline.run(when_needed(dist.get_rank(), 2 * RANKS))
        pipeline.end()
    return pipeline.computed


def seconds(batches: int, cycles: int) -> dict[str, list[float]]:
    """Return the seconds that the schedule takes on this rank, for each way and cycle."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    actions = {name: as_in_torch(rank, batches) for name in (SHARED, EDGES)}
    actions[PLANNED] = as_in_torch(rank, batches, planned=True)
    seen: dict[str, list[float]] = {name: [] for name in actions}
    with HyperCommGrid(pp=RANKS) as grid:
        ways = {name: pipeline_over(name, grid) for name in actions}
        for cycle in range(cycles + 1):
            for name, pipeline in ways.items():
                dist.barrier()
                begin = time.perf_counter()
                pipeline.run(actions[name])
                dist.barrier()
                if cycle:  # the first cycle also connects
                    seen[name].append(time.perf_counter() - begin)
        for pipeline in ways.values():
            pipeline.end()
    return seen


# ---- tables -------------------------------------------------------------------------------------


def edges(runs: int, cycles: int) -> Iterator[Table]:
    """Count the steps until a schedule blocks, and time the schedules that end."""
    call: Any = {name: functools.partial(computed, name) for name in (SHARED, EDGES)}
    total = sum(len(steps_of(rank, 2 * RANKS)) for rank in range(RANKS))
    samples = {name: [float(sum(run_ranks(one, RANKS, timeout=60)))] for name, one in call.items()}
    what = f"interleaved 1F1B, receives when needed: steps until it ends or blocks, of {total}"
    yield Table(what, "steps", samples, EDGES)
    for batches in (RANKS, 2 * RANKS):
        every: dict[str, list[float]] = {}
        for _ in range(runs):
            ranks = run_ranks(functools.partial(seconds, batches, cycles), RANKS, timeout=300)
            for name in ranks[0]:
                slowest = zip(*(rank[name] for rank in ranks), strict=True)
                every.setdefault(name, []).extend(max(cycle) * 1e3 for cycle in slowest)
        what = f"interleaved 1F1B, torch's order, {batches} microbatches, {RANKS} gloo processes"
        yield Table(what, "ms", every, SHARED, {EDGES: Goal(round(1 / 1.3, 3), SHARED)})
