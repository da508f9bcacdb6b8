"""Schedules: who runs next, at random, by priorities, or in all ways, one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator

from simulated_job.scheduler import Task


class AtRandom:
    """Anybody may run next.

    Args:
        seed: The same one makes the same run.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, current: Task | None, ready: list[Task]) -> Task:  # noqa: ARG002
        """Return any."""
        return ready[int(self._random.random() * len(ready))]


class ByPriority:
    """Who has the highest priority runs; a few times that one comes to have the lowest (PCT).

    Args:
        seed: The same one makes the same run.
        depth: One more than the times that a priority changes.
        steps: In how many steps these times lie.

    Source: Burckhardt, Kothari, Musuvathi, Nagarakatte, "A Randomized Scheduler with Probabilistic
    Guarantees of Finding Bugs", ASPLOS 2010.
    """

    def __init__(self, seed: int, depth: int = 3, steps: int = 400) -> None:
        self._random = random.Random(seed)
        self._changes = sorted(self._random.randrange(steps) for _ in range(depth - 1))
        self._priorities: dict[int, float] = {}
        self._step = 0

    def choose(self, current: Task | None, ready: list[Task]) -> Task:  # noqa: ARG002
        """Return the one of the highest priority."""
        for task in ready:
            if task.number not in self._priorities:
                self._priorities[task.number] = self._random.random()
        chosen = max(ready, key=lambda task: self._priorities[task.number])
        if self._changes and self._step >= self._changes[0]:
            self._changes.pop(0)
            self._priorities[chosen.number] = -1.0 - self._step
            chosen = max(ready, key=lambda task: self._priorities[task.number])
        self._step += 1
        return chosen


class Given:
    """The choices of a list, and then the first of those that there are.

    A task goes on if it can; another one in its place is a preemption, of which there are few.

    Args:
        prefix: The number of the choice at each fork.
        preemptions: How often a task that could go on may be stopped.
    """

    def __init__(self, prefix: list[int], preemptions: int) -> None:
        self.taken: list[tuple[int, int]] = []
        self._prefix = prefix
        self._left = preemptions

    def choose(self, current: Task | None, ready: list[Task]) -> Task:
        """Return the one that the list says."""
        options = ready
        if current is not None and current in ready:
            others = [task for task in ready if task is not current]
            options = [current, *(others if self._left else [])]
        number = self._prefix[len(self.taken)] if len(self.taken) < len(self._prefix) else 0
        self.taken.append((number, len(options)))
        if number and options[0] is current:
            self._left -= 1
        return options[number]


def every_schedule(preemptions: int = 2, most: int = 10_000) -> Iterator[Given]:
    """Give every schedule with few preemptions; each must have been run before the next is given.

    Args:
        preemptions: How often a task that could go on may be stopped.
        most: After how many to stop.

    Source: Musuvathi, Qadeer, "Iterative Context Bounding for Systematic Testing of Multithreaded
    Programs", PLDI 2007.
    """
    prefix: list[int] | None = []
    for _ in range(most):
        if prefix is None:
            return
        given = Given(prefix, preemptions)
        yield given
        prefix = None
        for place in reversed(range(len(given.taken))):
            number, count = given.taken[place]
            if number + 1 < count:
                prefix = [taken for taken, _ in given.taken[:place]] + [number + 1]
                break
