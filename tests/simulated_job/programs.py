"""Programs of ranks, drawn by hypothesis: what they call, and what one of them does otherwise."""

import random
from datetime import timedelta

import attrs
import torch.distributed as dist
from hypothesis import strategies as st

from hypercomm import GridSet, HyperCommGrid
from hypercomm.errors import GroupCreationTimeout
from simulated_job import attempt, gate, simulate_job
from simulated_job.invariants import (
    late_calls,
    partial_groups,
    unlike_groups,
)

T = 10.0
SHAPES = {2: "tp=2,dp=1", 3: "tp=3,dp=1", 4: "tp=2,dp=2"}
TARGETS = {2: ["tp=1,dp=2"], 3: ["tp=1,dp=3"], 4: ["tp=4,dp=1", "tp=1,dp=4"]}
DIMS = ["tp", "dp", ["tp", "dp"]]
DEEDS = ["skips", "repeats", "swaps", "another size", "another option"]


@attrs.frozen
class Step:
    """One call: what it is, and of what."""

    kind: str
    number: int = 0
    dims: tuple = ()
    name: str | None = None


@attrs.frozen
class End:
    """What became of a rank: which steps succeeded, and whether it could go on afterwards."""

    steps: dict
    can_go_on: bool


@attrs.frozen
class Oddity:
    """What one rank does otherwise, at one of the steps."""

    rank: int
    step: int
    deed: str


@attrs.frozen
class Program:
    """What every rank calls, in order, and who does otherwise."""

    ranks: int
    steps: tuple
    verify: bool
    oddity: Oddity | None = None

    @property
    def culprits(self):
        return set() if self.oddity is None else {self.oddity.rank}

    def of(self, rank):
        """The steps of one rank."""
        odd, steps = self.oddity, list(self.steps)
        if odd is None or odd.rank != rank:
            return steps
        at = odd.step % len(steps)
        if odd.deed == "skips":
            del steps[at]
        elif odd.deed == "repeats":
            steps.insert(at, steps[at])
        elif odd.deed == "swaps":
            steps[at - 1], steps[at] = steps[at], steps[at - 1]
        elif odd.deed == "another option":
            steps[at] = attrs.evolve(steps[at], name="mine")
        return steps

    def __call__(self):
        """Call all, and stop at the first error; then all build a grid anew, which must work."""
        rank = dist.get_rank()
        is_odd = self.oddity is not None and self.oddity.rank == rank
        shape = SHAPES[self.ranks]
        if is_odd and self.oddity.deed == "another size":
            shape = TARGETS[self.ranks][0]
        sizes, dims = zip(*[part.split("=")[::-1] for part in shape.split(",")], strict=True)
        grid = HyperCommGrid(map(int, sizes), dims, verify=self.verify)
        grid.register_view("e", [1, self.ranks], ["ep", "rest"])
        grids = GridSet.colocated(a=f"tp={self.ranks}", b="dp")
        ends = {}
        for step in self.of(rank):
            made = attempt(call, grid, grids, step)
            ends.setdefault(step.number, made.is_ok)
            if not made.is_ok:
                break
        gate("all have stopped")
        grid.destroy()
        grids.destroy()
        gate("all is destroyed")
        with HyperCommGrid([self.ranks], ["dp"], name="anew") as anew:
            return End(ends, attempt(anew.create_pg, "dp").is_ok)


def call(grid, grids, step):
    """Make one call; names tell calls of the same kind apart."""
    name = step.name or f"of step {step.number}"
    options = [{"dims": dims, "name": f"{name} {at}"} for at, dims in enumerate(step.dims)]
    if step.kind == "create":
        grid.create_pg(DIMS[step.number % 3], name=name)
    elif step.kind == "batch":
        grid.create_pgs(options)
    elif step.kind == "view":
        grid.create_pg(["ep", "rest"], view="e", name=name)
    elif step.kind == "set":
        dims = [{"dims": "dp", "name": name}]
        grids.create_pgs({"a": [{"dims": "tp", "name": name}], "b": dims})
    elif step.kind == "verify":
        grid.verify()
    elif step.kind == "create and destroy":
        grid.create_pg("tp", name=name)
        grid.destroy_pg("tp", name=name)
    elif step.kind == "ensure":
        grid.ensure_pg("dp", name="ensured")
    elif step.kind == "reshape":
        grid.reshape(TARGETS[len(grid.layout.ranks)][-1] if step.name is None else str(grid.layout))


KINDS = ["create", "batch", "view", "set", "verify", "reshape", "create and destroy", "ensure"]
kinds = st.sampled_from(KINDS)
batches = st.lists(st.sampled_from(["tp", "dp"]), min_size=1, max_size=3).map(tuple)


@st.composite
def programs(draw, *, odd=False):
    """Draw programs; with an oddity, one rank does otherwise at one step."""
    ranks = draw(st.integers(2, 4))
    drawn = draw(st.lists(st.tuples(kinds, batches), min_size=1, max_size=4))
    steps = tuple(Step(kind, number, dims) for number, (kind, dims) in enumerate(drawn))
    oddity = None
    if odd:
        rank, step = draw(st.integers(0, ranks - 1)), draw(st.integers(0, len(steps) - 1))
        oddity = Oddity(rank, step, draw(st.sampled_from(DEEDS)))
    return Program(ranks, steps, draw(st.booleans()), oddity)


def drawn(seed, *, odd=False):
    """Do as `programs`, by a seed alone."""
    chance = random.Random(seed)
    count, ranks = chance.randint(1, 4), chance.randint(2, 4)
    dims = [tuple(chance.choices(["tp", "dp"], k=chance.randint(1, 3))) for _ in range(count)]
    steps = tuple(Step(chance.choice(KINDS), at, each) for at, each in enumerate(dims))
    deed = Oddity(chance.randrange(ranks), chance.randrange(count), chance.choice(DEEDS))
    return Program(ranks, steps, chance.random() < 0.5, deed if odd else None)


def run(program, seed, schedule="random", faults=()):
    return simulate_job(
        program,
        program.ranks,
        seed=seed,
        schedule=schedule,
        faults=faults,
        timeout=timedelta(seconds=T),
    )


def all_or_none(program, job, but=()):
    """Steps that wait for all, and succeeded on some of those ranks only that came to them."""
    ends = [job.ranks[rank].value for rank in range(program.ranks) if rank not in but]
    return [
        step
        for step in program.steps
        if step.kind in {"set", "reshape", "verify"}
        if len({end.steps[step.number] for end in ends if end and step.number in end.steps}) > 1
    ]


MEETINGS = {"batch", "set", "verify", "reshape"}


def accused(program, job, culprits):
    """Ranks that a timeout blames though they are no culprits, and are where they should be.

    A rank that has stopped before, as it has heard of a failure or waits elsewhere for the culprit,
    is late: it may be blamed. So may be one that the culprit waits for in vain, who seems late to
    all that wait for the culprit; and one that waits in a meeting, which it does not say.
    """
    awaited = {
        one
        for rank in culprits
        for call in job.ranks[rank].calls
        if isinstance(call.error, GroupCreationTimeout)
        for one in call.error.missing
    }
    ends = {rank: outcome.value for rank, outcome in enumerate(job.ranks) if outcome.value}

    def is_just(one, stopped):
        if one in culprits or one not in ends or one in awaited:
            return one in culprits or one in awaited
        last, how = list(ends[one].steps)[-1], ends[one].steps.get(stopped)
        waits = program.steps[last].kind in MEETINGS and not ends[one].steps[last]
        return how is None or waits

    words = []
    for rank in ends.keys() - set(culprits):
        steps = list(ends[rank].steps)
        error = job.ranks[rank].calls[len(steps) - 1].error
        if isinstance(error, GroupCreationTimeout):
            unjust = [one for one in error.missing if not is_just(one, steps[-1])]
            if unjust or not error.missing:
                words.append(f"rank {rank} blames {unjust} at step {steps[-1]}: {error}")
    return words


def violations(job, but=()):
    """What does not hold of a run, of all that must hold of every run."""
    return [
        *([job.is_stuck] if job.is_stuck else []),
        *unlike_groups(job),
        *(partial_groups(job) if not but else []),
        *late_calls(job, T, but),
    ]
