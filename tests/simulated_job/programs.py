"""Draws random programs for all ranks of a job. One rank may make a mistake."""

from __future__ import annotations

import random
from typing import Any

import attrs
import torch.distributed as dist

from hypercomm import GridSet, HyperCommGrid
from hypercomm.errors import GroupCreationTimeout
from simulated_job.cases import GRACE_S, T
from simulated_job.job import Job, Made, attempt, gate, simulate_job

SHAPES = {2: [2, 1], 3: [3, 1], 4: [2, 2]}
TARGETS = {2: "tp=1,dp=2", 3: "tp=1,dp=3", 4: "tp=4,dp=1"}
KINDS = ["create", "batch", "view", "set", "verify", "reshape", "create and destroy", "ensure"]
BY_ALL = {"batch", "set", "verify", "reshape"}
MISTAKES = ["skips", "repeats", "swaps", "another size", "another option"]


@attrs.frozen
class Step:
    """One call. `number` distinguishes calls of the same kind."""

    kind: str
    number: int
    dims: tuple[str, ...]
    name: str
    size: int

    def make(self, grid: HyperCommGrid, grids: GridSet) -> None:
        """Make the call."""
        if self.kind == "create":
            grid.create_pg(["tp", "dp", ["tp", "dp"]][self.number % 3], name=self.name)
        elif self.kind == "batch":
            names = enumerate(self.dims)
            grid.create_pgs([{"dims": dim, "name": f"{self.name} {at}"} for at, dim in names])
        elif self.kind == "view":
            grid.create_pg(["ep", "rest"], view="e", name=self.name)
        elif self.kind == "set":
            grids.create_pgs({key: [{"dims": dim, "name": self.name}] for key, dim in _OF_SET})
        elif self.kind == "verify":
            grid.verify()
        elif self.kind == "reshape":
            grid.reshape(str(grid.layout) if self.name == "mine" else TARGETS[self.size])
        elif self.kind == "ensure":
            grid.ensure_pg("dp", name="ensured")
        else:
            grid.create_pg("tp", name=self.name)
            grid.destroy_pg("tp", name=self.name)


_OF_SET = [("a", "tp"), ("b", "dp")]


@attrs.frozen
class Program:
    """The calls of every rank. `odd` is the mistake of one rank, as (rank, step, mistake)."""

    ranks: int
    steps: tuple[Step, ...]
    verify: bool
    odd: tuple[int, int, str] | None

    @classmethod
    def draw(cls, seed: int, *, odd: bool) -> Program:
        """Draw a program."""
        chance = random.Random(seed)
        count = chance.randint(1, 4)
        ranks = chance.randint(2, 4)
        steps = tuple(
            Step(
                chance.choice(KINDS),
                number,
                tuple(chance.choices(["tp", "dp"], k=chance.randint(1, 3))),
                f"{number}",
                ranks,
            )
            for number in range(count)
        )
        mistake = chance.randrange(ranks), chance.randrange(count), chance.choice(MISTAKES)
        return cls(ranks, steps, chance.random() < 0.5, mistake if odd else None)

    def steps_of(self, rank: int) -> list[Step]:
        """Return the steps of one rank."""
        steps = list(self.steps)
        if self.odd is None or self.odd[0] != rank:
            return steps
        _, at, mistake = self.odd
        if mistake == "skips":
            del steps[at]
        elif mistake == "repeats":
            steps.insert(at, steps[at])
        elif mistake == "swaps":
            steps[at - 1], steps[at] = steps[at], steps[at - 1]
        elif mistake == "another option":
            steps[at] = attrs.evolve(steps[at], name="mine")
        return steps

    def __call__(self) -> Any:
        """Make all calls up to the first error. Then all ranks create groups of another grid."""
        rank = dist.get_rank()
        shape = SHAPES[self.ranks]
        if self.odd is not None and self.odd[0] == rank and self.odd[2] == "another size":
            shape = [1, self.ranks]
        grid = HyperCommGrid(shape, ["tp", "dp"], verify=self.verify)
        grid.register_view("e", [1, self.ranks], ["ep", "rest"])
        grids = GridSet.colocated(self.ranks, a=f"tp={self.ranks}", b=f"dp={self.ranks}")
        made: list[tuple[int, Made]] = []
        for step in self.steps_of(rank):
            made.append((step.number, attempt(step.make, grid, grids)))
            if made[-1][1].error is not None:
                break
        gate("all have finished")
        grid.destroy()
        grids.destroy()
        gate("all have destroyed")
        with HyperCommGrid([self.ranks], ["dp"], name="second") as second:
            attempt(second.create_pg, "dp")
        return made

    def run(self, seed: int) -> Job:
        """Run the program in a simulated job."""
        return simulate_job(self, self.ranks, seed=seed, timeout_s=T)


def broken_by(program: Program, job: Job) -> list[str]:
    """Return the guarantees that a run of a program has broken."""
    culprit = -1 if program.odd is None else program.odd[0]
    broken = _unexpected_end(job)
    if broken:
        return broken
    ends: list[dict[int, Made]] = [dict(rank.value) for rank in job.ranks]
    for rank, made in enumerate(ends):
        for number, call in made.items():
            if call.took_s > T + GRACE_S:
                broken.append(f"rank {rank}: step {number} took {call.took_s:.1f} s")
            if call.error is not None and program.odd is None:
                broken.append(f"rank {rank}: {call.error!r}")
            if isinstance(call.error, GroupCreationTimeout) and rank != culprit:
                unjust = [
                    one
                    for one in call.error.missing
                    if one != culprit and number in ends[one] and _overlap(call, ends[one][number])
                ]
                if unjust or not call.error.missing:
                    broken.append(f"rank {rank} names {unjust} in step {number}")
    for step in program.steps:
        made_it = {
            made[step.number].error is None
            for rank, made in enumerate(ends)
            if rank != culprit and step.number in made
        }
        if step.kind in BY_ALL and len(made_it) > 1:
            broken.append(f"step {step.number} succeeded on some ranks only")
    return broken


def _unexpected_end(job: Job) -> list[str]:
    """Return why a run did not end, or why its ranks could not continue."""
    broken = [job.is_stuck] if job.is_stuck else []
    broken += [f"{rank} raised {rank.error!r}" for rank in job.ranks if rank.error is not None]
    if {*job.kinds(-1)} != {""}:
        broken.append(f"cannot continue: {job}")
    return broken


def _overlap(one: Made, other: Made) -> bool:
    """Return whether the calls of two ranks overlapped in time."""
    return one.began_s < other.began_s + other.took_s and other.began_s < one.began_s + one.took_s
