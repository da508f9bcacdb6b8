"""Agreement: whether all ranks mean the same grid, and what they tell each other in it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import attrs

from hypercomm.errors import GridMismatchError
from hypercomm.layout import RankLayout
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.cards import Card, compare_with, take_slot, this_host
from hypercomm.process_groups.agreement.driver import hold
from hypercomm.process_groups.agreement.meeting import (
    End,
    Meeting,
    Said,
    end_of,
    seen_here,
)
from hypercomm.process_groups.agreement.whereabouts import Whereabouts, key_of, whereabouts
from hypercomm.process_groups.job import Job, current, current_or_none
from hypercomm.process_groups.torch_internals.store import answer

_ASTRAY_S = 2.0
"""Seconds a rank may use a grid that it is no member of before waiting ranks report it."""

_LEAVING_S = 5.0
"""How long the store may take to answer when a grid is destroyed."""

_MOST_ASKED = 8
"""Missing ranks that one look asks about at most."""


@attrs.frozen
class Joined:
    """A grid that was compared, in one job.

    Attributes:
        job: The job.
        name: What all ranks know the grid by.
        card: What this rank says of it.
        slot: The register where that was compared; "" where there is no store.
        has_others: Whether this rank has others to compare with: it is in the grid, not alone.
    """

    job: Job
    name: str
    card: Card
    slot: str = ""
    has_others: bool = False

    def mark(self, rank: int) -> str:
        """Return the key under which a rank says that it has joined."""
        return f"{self.slot}/at/{rank}"


class Agreement:
    """What the ranks of one grid have told each other.

    Args:
        layout: The grid's.
        label: The name that the grid was given, if any.
        backend: The backend that it was given, if any.

    Attributes:
        registers: The registers of this grid that this rank knows, but for its slot.
    """

    def __init__(self, layout: RankLayout, label: str | None, backend: str | None) -> None:
        self.layout = layout
        self.registers: set[str] = set()
        self._label = label
        self._backend = backend
        self._joined: Joined | None = None

    @property
    def name(self) -> str:
        """The name that all ranks of this job know the grid by; compared when it is first used."""
        return self.join().name

    @property
    def said(self) -> Said:
        """What this rank has to say, before it says anything."""
        return Said(current().rank, this_host(), ())

    # ---- the grid -------------------------------------------------------------------------------

    def join(self, job: Job | None = None) -> Joined:
        """Compare the grid with those of other ranks, unless that was done in this job.

        Args:
            job: The job, if whoever asks knows it.

        Raises:
            GridMismatchError: Another rank means another grid.
            CreationError: A key of the store holds what this library did not write.
        """
        job = job or current()
        if self._joined is None or self._joined.job is not job:
            with job.grids.lock:
                if self._joined is None or self._joined.job is not job:
                    self._joined = self._join(job)
        return self._joined

    def _join(self, job: Job) -> Joined:
        digest = hashlib.sha256(f"{self.layout.to_json()} {self._label!r}".encode()).hexdigest()
        label = f".{self._label}" if self._label else ""
        kind = f"{job.namespace}/{digest[:12]}{label}"
        card = Card(job.rank, this_host(), kind, self._label, self.layout, self._backend)
        grids = job.grids
        if not job.has_store:
            number = grids.numbers[kind]
            grids.numbers[kind] += 1
            return Joined(job, f"{kind}/{number}", card)
        place = f"{job.namespace}/grids{label} from {self.layout.rank_offset}"
        slot, end = hold(take_slot(place, card, grids.passed, grids.heard))
        grids.passed.add(slot)
        name = f"{kind}/{slot.rpartition('/')[2]}"
        joined = Joined(job, name, card, slot, self._has_others(job))
        grids.latest = slot
        here = {key_of(job, job.rank): Whereabouts(slot, kind, this_host()).text()}
        if end is not None:
            answer(lambda: c10d.set_all(here))
            self._leave(joined, end)
        answer(lambda: c10d.set_all({**here, joined.mark(job.rank): "1"}))
        return joined

    def _leave(self, joined: Joined, end: End) -> NoReturn:
        """Raise what ranks differ in; the grid is compared anew when it is used again."""
        joined.job.grids.heard.add(end.about)
        if self._joined is joined:
            self._joined = None
        raise GridMismatchError(seen_here(end.words, joined.job.rank))

    def leave(self) -> None:
        """Remove what the grid has left in the store; the last of its ranks removes what all have.

        A slot stays, as ranks that have not come yet must not take it.
        """
        joined, self._joined = self._joined, None
        if joined is None or not joined.slot or not joined.job.is_current():
            return
        job, mine = joined.job, [joined.mark(joined.job.rank)]
        is_member = job.rank in self.layout
        if job.grids.latest == joined.slot and is_member:  # else it may be missed elsewhere
            mine.append(key_of(job, job.rank))

        def remove() -> None:
            left = f"{joined.slot}/left"
            if self.registers and is_member and c10d.count_up(left) == self.layout.size:
                mine.extend([left, *self.registers])
            c10d.forget(mine)

        answer(remove, _LEAVING_S, is_needed=False)

    # ---- others ---------------------------------------------------------------------------------

    def elsewhere(self, joined: Joined, register: str) -> Meeting[End | None]:  # noqa: ARG002
        """Look, from a place where this rank waits, whether ranks differ about the grid."""
        return end_of(joined.slot)

    def compares(self) -> bool:
        """Tell whether this rank has others to compare with: it is in the grid, and not alone."""
        job = current_or_none()
        return job is not None and self._has_others(job)

    def _has_others(self, job: Job) -> bool:
        return job.has_store and self.layout.size > 1 and job.rank in self.layout

    def publish_whereabouts(self, waits_in: str = "", waits_for: Sequence[int] = ()) -> None:
        """Let the store say where this rank is, and whom it waits for."""
        joined = self.join()
        job = joined.job
        here = Whereabouts(joined.slot, joined.card.kind, this_host(), waits_in, tuple(waits_for))
        answer(lambda: c10d.set_all({key_of(job, job.rank): here.text()}))
        job.grids.waits = bool(waits_in)

    def stop_waiting(self) -> None:
        """Let the store say no longer that this rank waits; after a failure it says so for a while.

        So ranks that fail together find the one that none of them has seen.
        """
        if self._joined is not None and self._joined.job.grids.waits:
            self.publish_whereabouts()

    def look(self, joined: Joined, missing: Sequence[int], waited_s: float) -> None:
        """Look whether ranks differ about the grid, or a missing one means another one.

        Args:
            joined: What the grid was known by when the wait began.
            missing: Ranks that are waited for.
            waited_s: How long that has been.

        Raises:
            GridMismatchError: They do.
            CreationError: A key holds what this library did not write.
        """
        job = joined.job
        end = hold(end_of(joined.slot))
        if end is not None:
            self._leave(joined, end)
        for rank in missing[:_MOST_ASKED]:
            if answer(partial(c10d.is_set, [joined.mark(rank)])):
                continue  # it may come yet
            where = hold(whereabouts(job, rank))
            if where is None or where.slot in job.grids.passed:
                continue
            end = hold(
                compare_with(
                    joined.slot,
                    joined.card,
                    where,
                    rank,
                    job.grids.heard,
                    may_be_astray=waited_s > _ASTRAY_S,
                )
            )
            if end is not None:
                self._leave(joined, end)
