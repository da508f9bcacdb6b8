"""What the ranks of one grid agree on, and the keys of the store that they do so with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property

import hypercomm
from hypercomm.layout import RankLayout
from hypercomm.process_groups.agreement.calls import Scope, run_one
from hypercomm.process_groups.agreement.protocol import Add, Delete, Read, Record, Ticket
from hypercomm.process_groups.job import Job
from hypercomm.process_groups.torch_internals.store import answer

_MOST_LISTED = 64
_LEAVING_S = 1.0
"""How long the store may take to delete the keys of a grid."""


class GridAgreement:
    """The identity of one grid, and the scopes of the calls that its ranks make together.

    Ranks that build the same grid derive the same name. Two grids of one layout and name on a rank
    share their records: their calls meet those of other ranks in order.

    Args:
        layout: The grid's.
        label: The name that the grid was given, if any.
        backend: The backend that it was given, if any.
    """

    def __init__(self, layout: RankLayout, label: str | None, backend: str | None) -> None:
        self.layout = layout
        self._label = label
        self._backend = backend
        self._job: Job | None = None
        """The job that this grid has records in."""

    @cached_property
    def text(self) -> str:
        """What must be equal on all ranks of the grid, as JSON."""
        layout = self.layout
        listed = json.loads(layout.to_json()).get("ranks")
        if listed is not None and len(listed) > _MOST_LISTED:
            digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:12]
            listed = f"{len(listed)} ranks with digest {digest}"
        facts = {
            "dims": "-".join(layout.dim_names),
            "shape": list(layout.shape),
            "rank_offset": layout.rank_offset,
            "ranks": listed,
            "name": self._label,
            "backend": self._backend,
            "hypercomm": hypercomm.__version__,
        }
        return json.dumps(facts)

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    def name(self, job: Job) -> str:
        """Return the prefix of all keys and group names of the grid in a job."""
        label = f".{self._label}" if self._label else ""
        name = f"{job.namespace}/{self._digest}{label}"
        if self._job is not job:
            self._job = job
            job.grids[name] += 1
        return name

    def scope(self, job: Job, record: str, ranks: Sequence[int] | None = None) -> Scope:
        """Return the scope of calls at one record, by all ranks of the grid or by some."""
        name = self.name(job)
        ranks = self.layout.ranks if ranks is None else ranks
        return Scope(job, f"{name}/{record}", ranks, self.layout, self.text, f"{name}/records")

    def leave(self) -> None:
        """Delete the records of the grid; the last of its ranks to leave does so."""
        job = self._job
        if job is None or not job.is_current() or not job.has_store:
            return
        name = self.name(job)
        self._job = None
        job.grids[name] -= 1
        if job.grids[name] or self.layout.size < 2 or job.rank not in self.layout:
            return
        answer(lambda: _delete(name, self.layout.size), _LEAVING_S, is_needed=False)


def _delete(name: str, size: int) -> None:
    """Delete the records of a grid, if all of its ranks have left."""
    left = f"{name}/left"
    if run_one(Add(left)) < size:
        return
    keys = [f"{name}/records", left]
    for key in dict.fromkeys((run_one(Read(keys[0])) or "").split("\n")):
        text = run_one(Read(key)) if key else None
        if text is not None:
            ticket = Ticket(key, Record.parse(key, text))
            keys += [key, ticket.arrivals, ticket.count]
    run_one(Delete(keys))
