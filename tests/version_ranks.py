"""What the real ranks of test_torch_versions.py do."""

import logging
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo as Gloo

from hypercomm import HyperCommGrid

novelties = []
"""What the groups of this rank were given."""


class Call(type(Gloo)):
    """torch's own call of its gloo class, as a later torch may make it."""

    def __call__(cls, *given, **named):
        return super().__call__(*given, **(cls.call(named) if "timeout" in named else named))


class Later(Gloo, metaclass=Call):
    """A gloo class that takes a `novelty`, and says which it was given."""

    @staticmethod
    def call(named):
        return {"novelty": 7, **named}

    def __init__(self, store, rank, size, options=None, novelty=None, **named):
        if options is None:
            super().__init__(store, rank, size, **named)
        else:
            super().__init__(store, rank, size, options)
            novelty = getattr(options, "novelty", None)
        if size > 1:
            novelties.append(novelty)


class WithOption(Later):
    """The novelty is one of its options, too."""

    class _Options(Gloo._Options):
        novelty = None


class WithoutOptions(Later):
    """There are no options."""

    _Options = None


class Renamed(Later):
    """What was called timeout has another name."""

    @staticmethod
    def call(named):
        named = {"novelty": 7, **named}
        return {"limit": named.pop("timeout"), **named}

    def __init__(self, store, rank, size, limit, **named):
        super().__init__(store, rank, size, timeout=limit, **named)


KINDS = {kind.__name__: kind for kind in (Later, WithOption, WithoutOptions, Renamed)}


class Heard(logging.Handler):
    """Keeps what hypercomm logs."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []
        logging.getLogger("hypercomm").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def sum_over(group):
    value = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(value, group=group)
    return int(value)


def gloo_of_a_later_torch(kind):
    """All-reduce over groups that are created one by one and in a batch."""
    heard = Heard()
    dist.distributed_c10d.ProcessGroupGloo = KINDS[kind]
    with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        sums = [sum_over(grid.create_pg(dims)) for dims in ("tp", "dp")]
        batch = [{"dims": dims, "name": "twin"} for dims in ("tp", "dp", ("tp", "dp"))]
        sums += [sum_over(group) for group in grid.create_pgs(batch)]
    is_restored = dist.distributed_c10d.ProcessGroupGloo is KINDS[kind]
    return sums, novelties, heard.lines, is_restored


def a_rank_is_missing(kind):
    """Rank 2 does not come to a creation, and the others say so; then all come."""
    dist.distributed_c10d.ProcessGroupGloo = KINDS[kind]
    grid, said, begin = HyperCommGrid([3], ["dp"]), None, time.monotonic()
    if dist.get_rank() != 2:
        try:
            grid.create_pg("dp", timeout=timedelta(seconds=1))
        except RuntimeError as error:
            said = f"{type(error).__name__}: {error}"
    waited = time.monotonic() - begin
    dist.barrier()
    with grid:
        return said, waited, sum_over(grid.create_pg("dp"))


def refused_options():
    """Options that gloo would leave aside, and what is left after they were refused."""
    before, said = set(dist.distributed_c10d._world.pg_map), []
    grid = HyperCommGrid([2], ["dp"])
    for options in (Gloo._Options(), object(), 7):
        try:
            grid.create_pg("dp", pg_options=options)
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said, set(dist.distributed_c10d._world.pg_map) == before, dict(grid.pgs)
