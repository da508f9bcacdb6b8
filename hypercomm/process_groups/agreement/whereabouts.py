"""Whereabouts: where a rank is, and whom it waits for, left for those that wait for it.

Nothing is decided by it: it lets errors name the rank that is late, with its host, and not one
that waits itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs

from hypercomm.errors import CreationError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_coords
from hypercomm.process_groups.agreement.meeting import Meeting, Read, foreign
from hypercomm.process_groups.job import Job
from hypercomm.process_groups.torch_internals.gloo import host_in, world_address_key

_MOST_NAMED = 8
_LONGEST_CHAIN = 8


@attrs.frozen
class Whereabouts:
    """Where a rank is.

    Attributes:
        slot: The slot of the grid that it came to last.
        kind: What grids that look like it share in their names.
        host: Its host.
        waits_in: What it waits in, as a user knows it; "" where it does not wait for long.
        waits_for: Some of the ranks that it waits for there.
    """

    slot: str
    kind: str
    host: str
    waits_in: str = ""
    waits_for: tuple[int, ...] = ()

    def text(self) -> str:
        """Return what stands in the store."""
        return json.dumps(attrs.asdict(self), separators=(",", ":"))


def key_of(job: Job, rank: int) -> str:
    """Return the key under which a rank says where it is."""
    return f"{job.namespace}/rank {rank}"


def whereabouts(job: Job, rank: int) -> Meeting[Whereabouts | None]:
    """Return where a rank is; None where it has not said.

    Raises:
        CreationError: The key holds what this library did not write.
    """
    key = key_of(job, rank)
    text = yield Read(key)
    if text is None:
        return None
    try:
        fields = json.loads(text)
        found = Whereabouts(**{**fields, "waits_for": tuple(fields["waits_for"])})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise foreign(key, text) from error
    texts = (found.slot, found.kind, found.host, found.waits_in)
    if not (
        all(isinstance(part, str) for part in texts)
        and all(isinstance(one, int) for one in found.waits_for)
    ):
        raise foreign(key, text)
    return found


def name_late(
    job: Job, missing: Sequence[int], ranks: Sequence[int], layout: RankLayout
) -> Meeting[tuple[tuple[int, ...], str]]:
    """Say who is late, and name them; nothing that goes wrong with that is raised.

    Of ranks that wait themselves, those are late that they wait for; where those wait for each
    other, or for one of `ranks` that is not missing here, nobody can tell, and those are named that
    are missing. The first ones are named with their coordinates, hosts and what they wait in.
    """
    known, here = _Known(job), {*ranks, job.rank}.difference(missing)
    late: dict[int, None] = {}
    for rank in missing[:_MOST_NAMED]:
        late[(yield from known.end_of_chain(rank, here))] = None
    every = (*late, *missing[_MOST_NAMED:])
    words = [f"rank {rank}" for rank in every[: 2 * _MOST_NAMED]]
    for place, rank in enumerate(every[:_MOST_NAMED]):
        words[place] = yield from known.name(rank, layout)
    more = len(every) - len(words)
    return every, ", ".join(words) + (f" and {more} more" if more > 0 else "")


@attrs.define
class _Known:
    """What one knows of where ranks are: each is asked for once, and none after a failure."""

    job: Job
    where: dict[int, Whereabouts | None] = attrs.field(factory=dict)
    is_failing: bool = False

    def of(self, rank: int) -> Meeting[Whereabouts | None]:
        if rank not in self.where:
            self.where[rank] = None
            try:
                if not self.is_failing:
                    self.where[rank] = yield from whereabouts(self.job, rank)
            except CreationError:  # that of this rank
                pass
            except RuntimeError:
                self.is_failing = True
        return self.where[rank]

    def end_of_chain(self, rank: int, here: set[int]) -> Meeting[int]:
        """Return whom a rank waits for, who waits itself, and so on; not one of those here."""
        chain = [rank]
        while len(chain) < _LONGEST_CHAIN:
            where = yield from self.of(chain[-1])
            behind = () if where is None else where.waits_for
            if not behind:
                break
            if not here.union(chain).isdisjoint(behind):
                return rank
            chain.append(behind[0])
        return chain[-1]

    def name(self, rank: int, layout: RankLayout) -> Meeting[str]:
        where = yield from self.of(rank)
        host = where.host if where else (yield from self._host(rank))
        told = [f"host {host}"] if host else []
        if rank in layout:
            told.insert(0, format_coords(layout.coords(rank)))
        if where is not None and where.waits_in:
            others = ", ".join(map(str, where.waits_for[:_MOST_NAMED]))
            told.append(f"it waits in {where.waits_in} for rank {others}")
        return f"rank {rank} ({'; '.join(told)})" if told else f"rank {rank}"

    def _host(self, rank: int) -> Meeting[str | None]:
        """Return the host that a rank of a gloo WORLD has left with its address."""
        try:
            text = None if self.is_failing else (yield Read(world_address_key(rank)))
        except RuntimeError:
            self.is_failing = True
            return None
        return host_in(None if text is None else text.encode())
