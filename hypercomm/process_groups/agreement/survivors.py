"""The ranks that a grid continues with: without ranks that are lost, or with more that joined.

They agree among themselves, under a name that each derives from the grid's and from their ranks, so
that nobody asks or waits for a rank that is lost. Whoever waits for a rank looks whether that one
goes on with other ranks.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs

from hypercomm.errors import CreationError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_ranks
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.agreement import Agreement, Joined
from hypercomm.process_groups.agreement.arrival import absent
from hypercomm.process_groups.agreement.cards import Card, this_host
from hypercomm.process_groups.agreement.meeting import (
    End,
    Meeting,
    Publish,
    Read,
    decide,
    end_of,
    foreign,
    who,
)
from hypercomm.process_groups.agreement.steps import Steps, error_of
from hypercomm.process_groups.agreement.whereabouts import Whereabouts, key_of
from hypercomm.process_groups.job import Job, current, current_or_none
from hypercomm.process_groups.torch_internals.store import answer

_MOST_ASKED = 8
"""Missing ranks that one look asks about at most."""

_FORGETTING_S = 0.5
"""How long the store may take to answer when something has failed."""


@attrs.frozen
class Choice:
    """Which ranks one rank goes on with.

    Attributes:
        host: The host of that rank.
        digest: Of the ranks that it goes on with.
        ranks: Those, in words.
        register: Where it waits for them; "" where it does not.
    """

    host: str
    digest: str
    ranks: str
    register: str

    @classmethod
    def read(cls, key: str, text: str) -> Choice:
        """Read what stands in the store.

        Raises:
            CreationError: This library did not write it.
        """
        try:
            choice = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise foreign(key, text) from error
        if not all(isinstance(value, str) for value in attrs.astuple(choice)):
            raise foreign(key, text)
        return choice


class Heirs(Agreement):
    """What the ranks tell each other that a grid goes on with.

    Args:
        before: What the ranks of the grid have told each other so far.
        ranks: Those that it goes on with, ascending.
    """

    def __init__(self, before: Agreement, ranks: Sequence[int]) -> None:
        super().__init__(RankLayout([len(ranks)], ["rank"], ranks=ranks), None, None)
        self._before = before
        self._ranks = format_ranks(ranks)
        self._digest = hashlib.sha256(json.dumps(list(ranks)).encode()).hexdigest()[:16]
        self._place = ""
        self._asked = 0

    def _join(self, job: Job) -> Joined:
        """Derive the grid's name, on ranks that it goes on with and on others; asks nobody."""
        before = self._before.join(job).name
        self._place = f"{before}/goes on"
        digest = hashlib.sha256(f"{before} {self._digest}".encode()).hexdigest()
        kind = f"{job.namespace}/{digest[:12]}"
        card = Card(job.rank, this_host(), kind, None, self.layout, None)
        slot = f"{kind}/heirs" if job.has_store else ""
        joined = Joined(job, f"{kind}/0", card, slot, self._has_others(job))
        if slot:
            job.grids.passed.add(slot)
            job.grids.latest = slot
            here = {key_of(job, job.rank): Whereabouts(slot, kind, this_host()).text()}
            answer(lambda: c10d.set_all({**here, joined.mark(job.rank): "1"}))
        return joined

    # ---- which ranks others go on with ----------------------------------------------------------

    def publish(self, register: str) -> None:
        """Let the store say which ranks this one goes on with, and where it waits for them."""
        if self.join().has_others:
            text, key = self._text(register), self._key(current().rank)
            answer(lambda: c10d.set_all({key: text}))

    def take_back(self) -> None:
        """Let the store say no longer which ranks this one goes on with: nothing came of it."""
        if self.join().has_others:
            key = self._key(current().rank)
            answer(lambda: c10d.forget([key]), _FORGETTING_S)

    def elsewhere(self, joined: Joined, register: str) -> Meeting[End | None]:
        """Look, from a place where this rank waits, whether a missing one goes on with others."""
        rank = joined.job.rank
        end = yield from end_of(joined.slot)
        if end is not None:
            return end
        yield Publish({self._key(rank): self._text(register)})
        missing = yield from absent(register, self.layout.ranks)
        first = self._asked % max(1, len(missing))  # the first ones may be dead, and say nothing
        self._asked += _MOST_ASKED
        for other in (*missing[first:], *missing[:first])[:_MOST_ASKED]:
            key = self._key(other)
            text = yield Read(key)
            choice = None if text is None else Choice.read(key, text)
            if choice is None or choice.digest == self._digest:
                continue
            if choice.register:  # a late rank may say so where all others have heard it long ago
                decided = yield from end_of(choice.register)
                if decided is not None and decided.kind != "agreed":
                    continue
            words = (
                f"ranks: {self._ranks} on {who(rank, this_host())}, {choice.ranks} on "
                f"{who(other, choice.host)}; ranks differ in which of them the grid goes on with; "
                f"every rank must give reshape() the same ranks"
            )
            mine = End("differs", words=words, about=register)
            end = yield from decide(register, mine)
            if choice.register and end == mine:  # else the other may have heard it, and gone on
                yield from decide(choice.register, end)
            return end
        return None

    def _key(self, rank: int) -> str:
        return f"{self._place}/{rank}"

    def _text(self, register: str) -> str:
        choice = Choice(this_host(), self._digest, self._ranks, register)
        return json.dumps(attrs.asdict(choice), separators=(",", ":"))


class Successions:
    """What the ranks of one grid may go on as: the steps of each set of ranks that was tried.

    Who tries again with the same ranks makes the next step.

    Args:
        before: The agreement of the grid.
        are_all: Whether all that the grid creates is compared.
    """

    def __init__(self, before: Agreement, *, are_all: bool) -> None:
        self._before = before
        self._are_all = are_all
        self._known: dict[Hashable, tuple[Heirs, Steps]] = {}

    def of(self, ranks: Sequence[int]) -> tuple[Heirs, Steps]:
        """Return what some ranks tell each other, and the steps that they make."""
        asked: Any = current_or_none(), tuple(sorted(ranks))
        if asked not in self._known:
            heirs = Heirs(self._before, asked[1])
            self._known[asked] = heirs, Steps(heirs, are_all=self._are_all)
        return self._known[asked]


# ---- who is left --------------------------------------------------------------------------------


_CALL = "survivors()"


def call_the_roll(
    steps: Steps, of: Callable[[tuple[int, ...]], Steps], limit_s: float
) -> tuple[int, ...]:
    """Wait for the ranks of a grid; return those that have come, as all of them are told.

    Who has not come is found a few at a time (`MOST_NAMED` of arrival.py), so those that are left
    meet again, until nobody is missing.

    Args:
        steps: Those of all its ranks.
        of: Returns the steps of some of them.
        limit_s: How long to wait for the ranks that do not come; at each meeting anew.

    Raises:
        CreationError: The others have gone on without this rank.
        PlanMismatchError: A rank calls something else.
        OutcomeUnknownError: The store is gone.
    """
    ranks = steps.agreement.layout.ranks
    while True:
        step = steps.enter([_CALL])
        end, pending = steps.meet(step, time.monotonic() + limit_s, _CALL)
        if pending is not None:
            raise pending
        if end.kind == "agreed":
            return tuple(ranks)
        rank = steps.agreement.said.rank
        if rank in end.ranks:
            raise CreationError(
                f"the other ranks have gone on without rank {rank}, which came to survivors() too "
                f"late; end this process, or start the job again"
            )
        left = tuple(one for one in ranks if one not in end.ranks)
        if end.kind != "missing" or len(left) == len(ranks):
            raise error_of(end)
        ranks, steps = left, of(left)
