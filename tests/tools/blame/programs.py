"""Draws random programs of a job, runs them until no rank can continue, and records their calls.

The programs are data: lists of statements that every rank executes, some of them under a condition
of its coordinates. Groups, matching and waits are computed here, without the code under test.
"""

import itertools
import random
from collections import defaultdict

import attrs

from hypercomm.blame.evidence import Evidence, LoggedCall, LoggedGroup, RankLog

OPS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier")


@attrs.frozen
class Step:
    """One step of one rank. `way` is "call", "start", "end", "hidden", "send" or "recv"."""

    way: str
    group: LoggedGroup
    op: str
    where: str
    peer: int | None = None

    @property
    def lane(self):
        """The steps of a lane are matched by their numbers."""
        if self.way in {"send", "recv"}:
            return self.group, self.way, self.peer
        return self.group, "hidden" if self.way == "hidden" else "call", None


class Job:
    """The ranks, groups and statements of a random program."""

    def __init__(self, seed):
        self.random = rng = random.Random(seed)
        dims = rng.sample(["tp", "dp", "pp"], rng.choice([1, 2, 2, 3]))
        few, many = [2, 2, 3, 4], [3, 4, 6, 8]
        self.sizes = {dim: rng.choice(few if len(dims) > 1 else many) for dim in dims}
        every = itertools.product(*(range(size) for size in reversed(self.sizes.values())))
        self.coords = [dict(zip(self.sizes, reversed(index), strict=True)) for index in every]
        self.ranks = range(len(self.coords))
        self.groups = {("WORLD",): [LoggedGroup("0", tuple(self.ranks), "WORLD")]}
        for count in range(1, len(dims) + 1):
            for some in itertools.combinations(self.sizes, count):
                members = defaultdict(list)
                for rank, own in enumerate(self.coords):
                    members[tuple(own[dim] for dim in self.sizes if dim not in some)].append(rank)
                self.add_groups(some, "+".join(some), members.values())
        part = sorted(rng.sample(self.ranks, rng.randint(2, max(2, len(self.ranks) - 1))))
        self.add_groups(("part",), "group part", [part])
        self.add_groups(("alone",), "group alone", [[rank] for rank in self.ranks])
        self.hides = rng.random() < 0.05  # whether some collectives are not recorded
        self.lines = itertools.count(1)
        body = self.statements(rng.randint(2, 6), {})
        if rng.random() < 0.5:  # such as the mean of the loss
            body.append(self.collective(("WORLD",), "call"))
        once = self.statements(rng.randint(1, 2), {})
        at, steps = rng.randint(0, 3), rng.randint(2, 4)
        self.programs = {rank: [] for rank in self.ranks}
        for step in range(steps):
            for statement in [*body, *(once if step == at else [])]:
                for rank in self.ranks:
                    self.programs[rank] += statement(rank)

    def add_groups(self, dims, title, every):
        """Add the groups over dims."""
        self.groups[dims] = [
            LoggedGroup(f"{title} {index}", tuple(ranks), title)
            for index, ranks in enumerate(every)
        ]

    def group(self, dims, rank):
        """Return the group of a rank over dims, or None."""
        return next((one for one in self.groups[dims] if rank in one.ranks), None)

    def statements(self, count, fixed):
        """Draw statements for the ranks whose coordinates are `fixed`."""
        return [self.statement(fixed) for _ in range(count)]

    def statement(self, fixed):
        """Draw a statement. It takes a rank and returns its steps."""
        kind = self.random.choices(
            ["plain", "condition", "part", "alone", "hidden", "pipeline", "overlap"],
            [8, 4, 0 if fixed else 1, 0.5, 3 * self.hides, 0.8, 1],
        )[0]
        open_dims = [dim for dim in self.sizes if dim not in fixed]
        if not open_dims or kind == "alone":
            return self.collective(("alone",), "call")
        if kind == "condition":
            dim = self.random.choice(open_dims)
            value = self.random.randrange(self.sizes[dim])
            inner = self.statements(self.random.randint(1, 2), {**fixed, dim: value})
            return lambda rank: (
                [step for one in inner for step in one(rank)]
                if self.coords[rank][dim] == value
                else []
            )
        if kind == "part":
            return self.collective(("part",), "call")
        if kind == "pipeline":
            return self.pipeline(self.random.choice(open_dims), fixed)
        some = self.random.sample(open_dims, self.random.randint(1, len(open_dims)))
        dims = tuple(dim for dim in self.sizes if dim in some)
        if not fixed and self.random.random() < 0.2:
            dims = ("WORLD",)
        if kind == "overlap":
            start, end = self.collective(dims, "start", "end")
            inner = self.statements(self.random.randint(1, 2), fixed)
            return lambda rank: [
                *start(rank),
                *(step for one in inner for step in one(rank)),
                *end(rank),
            ]
        return self.collective(dims, "hidden" if kind == "hidden" else "call")

    def collective(self, dims, *ways):
        """Return a statement for a collective over dims, or several for the parts of one."""
        op = self.random.choice(OPS)
        where = f"train.py:{next(self.lines)} in step"
        made = []
        for way in ways:

            def statement(rank, way=way):
                group = self.group(dims, rank)
                return [] if group is None else [Step(way, group, op, where)]

            made.append(statement)
        return made[0] if len(made) == 1 else made

    def pipeline(self, dim, fixed):
        """Return a statement for a pipeline of one or more microbatches over a dim."""
        batches = self.random.randint(1, 3)
        inner = {
            stage: self.statements(self.random.randint(0, 2), {**fixed, dim: stage})
            for stage in range(self.sizes[dim])
        }
        lines = [f"pipe.py:{next(self.lines)} in {way}" for way in ("recv", "send")]
        is_eager = self.random.random() < 0.5  # 1F1B in place of GPipe

        def one_pass(rank, way):
            group = self.group((dim,), rank)
            stage = self.coords[rank][dim]
            found = []
            if 0 <= stage - way < len(group.ranks):
                found.append(Step("recv", group, "recv", lines[0], group.ranks[stage - way]))
            found += [step for one in inner[stage] for step in one(rank)]
            if 0 <= stage + way < len(group.ranks):
                found.append(Step("send", group, "send", lines[1], group.ranks[stage + way]))
            return found

        def statement(rank):
            ahead = self.sizes[dim] - self.coords[rank][dim] if is_eager else batches
            ways = [1] * min(ahead, batches)
            for _ in range(batches - len(ways)):
                ways += [-1, 1]
            ways += [-1] * (batches - ways.count(-1))
            return [step for way in ways for step in one_pass(rank, way)]

        return statement


class Run:
    """Runs the programs until no rank can continue.

    Args:
        programs: The steps of each rank.
        stops: Maps each rank that stops to the index of the step before which it stops.
    """

    def __init__(self, programs, stops):
        self.programs = programs
        self.at = dict.fromkeys(programs, 0)
        self.made = defaultdict(list)  # the calls that each rank has entered, with their steps
        self.numbers = defaultdict(int)
        self.entered = defaultdict(dict)  # maps lane and number to the op of each rank
        self.open = defaultdict(dict)  # the number of each started collective by its line
        self.is_in = dict.fromkeys(programs)  # the step in which a rank waits
        self.stops = stops
        while sum(map(self.advance, programs)):
            pass
        self.waiting = {
            rank for rank, step in self.is_in.items() if step and self.at[rank] != stops.get(rank)
        }

    def enter(self, rank, step):
        """Enter a call, and return its number."""
        lane = rank, step.lane
        self.numbers[lane] += 1
        self.entered[step.lane if step.peer is None else lane, self.numbers[lane]][rank] = step.op
        self.made[rank].append((step, self.numbers[lane]))
        return self.numbers[lane]

    def has_ended(self, rank, step, number):
        """Return whether a call that a rank has entered has ended."""
        if step.way == "send":
            return True
        if step.way == "recv":
            return ((step.peer, (step.group, "send", rank)), number) in self.entered
        ops = self.entered[step.lane, number]
        return len(ops) == len(step.group.ranks) and len(set(ops.values())) == 1

    def advance(self, rank):
        """Let a rank execute steps until it waits. Return whether it executed any."""
        begin = self.at[rank], self.is_in[rank]
        while self.at[rank] < len(self.programs[rank]) and self.at[rank] != self.stops.get(rank):
            step = self.programs[rank][self.at[rank]]
            if self.is_in[rank] is None:
                if step.way == "end":
                    number = self.open[rank].pop((step.group, step.where))
                else:
                    number = self.enter(rank, step)
                if step.way == "start":
                    self.open[rank][step.group, step.where] = number
                self.is_in[rank] = step, number
            if step.way != "start" and not self.has_ended(rank, *self.is_in[rank]):
                break
            self.is_in[rank] = None
            self.at[rank] += 1
        return (self.at[rank], self.is_in[rank]) != begin

    def is_stuck(self):
        """Return whether a rank that has not stopped waits."""
        return bool(self.waiting)

    def evidence(self, rng, job, stops, lost=()):
        """Return what the ranks record.

        Args:
            rng: The source of random numbers.
            job: The job.
            stops: How each rank that stops does so: "sleeps", "dies" or "raises".
            lost: The ranks whose dumps are lost.
        """
        is_watched = job.hides or rng.random() < 0.6
        keeps = 12 if rng.random() < 0.1 else None  # of a ring buffer
        records = {}
        for rank in job.ranks:
            if stops.get(rank) == "dies" or rank in lost:
                continue
            record = records[rank] = RankLog(rank)
            record.groups = [one for own in job.groups.values() for one in own if rank in one.ranks]
            calls = [
                self.logged(rank, step, number, order)
                for order, (step, number) in enumerate(self.made[rank])
                if step.way != "hidden"
            ]
            kept = calls if keeps is None else calls[-keeps:]
            for call in kept:
                record.add(call)
            record.is_whole = is_watched or len(kept) == len(calls)
            if is_watched:
                for call in calls:
                    record.counts[call.group, call.channel] = call.number
                self.describe(rng, record, stops.get(rank))
        return Evidence(records, len(job.ranks))

    def logged(self, rank, step, number, order):
        """Return the record of a call."""
        state = "finished" if self.has_ended(rank, step, number) else "started"
        call = LoggedCall(step.op, step.group, number, order, state, where=step.where)
        call.terms = (step.op, (), ())
        if step.peer is not None:
            ends = (rank, step.peer) if step.way == "send" else (step.peer, rank)
            route = "->".join(str(step.group.ranks.index(one)) for one in ends)
            call.channel = f"{step.way} {route}"
            call.peer = step.peer
            call.terms = ("message", (), ())
        return call

    def describe(self, rng, record, stop):
        """Add what only a watch knows: why the record was written, and where the rank is."""
        step = self.is_in[record.rank]
        record.why = "has not moved for 60 s"
        if stop == "raises":
            record.why = "raised ValueError: planted"
            record.place = ("train.py:99 in step",)
        elif stop is not None:
            record.place = ("data.py:7 in load", "train.py:99 in step")
            following = self.programs[record.rank][self.at[record.rank]]
            if following.way == "hidden" and rng.random() < 0.2:  # it has entered backward
                record.region = "backward"
        elif step is None:
            record.why = "left the watch"
            record.place = ("train.py:100 in main",)
        else:
            record.place = (step[0].where, "train.py:99 in main")
            record.region = "backward" if step[0].way == "hidden" else ""


def stopped_job(seed):
    """Draw a job in which one to three ranks stop, and another rank waits.

    Returns:
        The recorded evidence, and the ranks that stopped.
    """
    for attempt in itertools.count():
        job = Job(f"{seed} {attempt}")
        rng = job.random
        assert not Run(job.programs, {}).is_stuck(), f"program {seed} {attempt} is not valid"
        busy = [rank for rank, steps in job.programs.items() if steps]
        count = min(rng.choice([1, 1, 2, 3]), max(1, len(job.ranks) // 4), len(busy))
        chosen = rng.sample(busy, count)
        at = {rank: rng.randrange(len(job.programs[rank])) for rank in chosen}
        run = Run(job.programs, at)
        stops = {rank: rng.choice(["sleeps", "sleeps", "sleeps", "raises", "dies"]) for rank in at}
        stops = {rank: how for rank, how in stops.items() if run.at[rank] == at[rank]}
        stops = {rank: how for rank, how in stops.items() if not run.is_in[rank]}
        if run.is_stuck():
            others = [rank for rank in job.ranks if rank not in stops]
            lost = [rng.choice(others)] if rng.random() < 0.03 else []
            return run.evidence(rng, job, stops, lost), set(stops)
    raise AssertionError


def mistaken_job(seed):
    """Draw a job in which one rank leaves out, repeats or swaps calls, and a rank waits.

    Returns:
        The recorded evidence, and the rank that makes the mistake.
    """
    for attempt in itertools.count():
        job = Job(f"mistake {seed} {attempt}")
        rng = job.random
        programs = dict(job.programs)
        rank = rng.choice([rank for rank, steps in programs.items() if steps])
        steps = list(programs[rank])
        at = rng.randrange(len(steps))
        if steps[at].way not in {"call", "send", "recv"} or len(steps[at].group.ranks) == 1:
            continue
        kind = rng.choice(["skip", "repeat", "swap"])
        if kind == "skip":
            del steps[at]
        elif kind == "repeat":
            steps.insert(at, steps[at])
        elif at + 1 < len(steps) and {steps[at].way, steps[at + 1].way} == {"call"}:
            steps[at : at + 2] = reversed(steps[at : at + 2])
        programs[rank] = steps
        run = Run(programs, {})
        if run.is_stuck():
            return run.evidence(rng, job, {}), {rank}
    raise AssertionError
