"""Assembly: the ranks of a grid meet, compare a plan, and go on when all are there.

A meeting ends for all of its ranks alike, by the first word that one of them leaves about that. One
that fails is over: who comes too late for it goes on to the next, where it meets those that try
again.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from datetime import timedelta

import attrs
import torch.distributed as dist

from hypercomm.errors import GroupCreationTimeout, PlanMismatchError
from hypercomm.layout import RankLayout
from hypercomm.process_groups import c10d
from hypercomm.process_groups.agreement import Agreement
from hypercomm.process_groups.c10d.gloo_store import wait_until
from hypercomm.process_groups.c10d.time_limits import answer
from hypercomm.process_groups.cards import foreign, name_ranks, parse


@attrs.frozen
class End:
    """How a meeting ended: ranks were missing, or something is wrong; else all is well."""

    missing: tuple[int, ...] = ()
    words: str | None = None

    def refuse(self, call: str) -> None:
        """Raise what the meeting ended by; not on a rank that was missing, and is late.

        Raises:
            PlanMismatchError: A rank had another plan, or could not come.
            GroupCreationTimeout: Ranks were missing.
        """
        if self.words is not None:
            raise PlanMismatchError(self.words)
        if self.missing and dist.get_rank() not in self.missing:
            raise GroupCreationTimeout(
                f"other ranks gave up {call}, as ranks {list(self.missing)} were missing; every "
                f"rank must call it",
                missing=self.missing,
            )


def limit_of(timeout: timedelta | None) -> float:
    """Return how many seconds ranks wait for each other; None stands for the timeout of WORLD."""
    timeout = timeout or c10d.world_timeout(c10d.default_backend())
    return timeout.total_seconds() if timeout else math.inf


class Assembly:
    """The meetings of the ranks of one grid, or of several.

    Args:
        agreement: What they have told each other.
        layout: The ranks.

    Attributes:
        rounds: The number of meetings that this rank has behind it.
    """

    def __init__(self, agreement: Agreement, layout: RankLayout) -> None:
        self.agreement = agreement
        self.rounds = 0
        self._layout = layout
        self._first_kept = 1

    def meet(self, plan: Sequence[str], timeout_s: float, call: str) -> None:
        """Compare a plan, such as all that was created so far, and wait until every rank has.

        Args:
            plan: An entry for each group, or whatever else must be the same.
            timeout_s: How long to wait.
            call: What every rank must call for it, for the error.

        Raises:
            PlanMismatchError: The plans of two ranks differ, or a rank has declined.
            GroupCreationTimeout: A rank did not call this in time.
        """
        begin = time.monotonic()
        while True:
            self.rounds += 1
            mine = self._key(f"here/{dist.get_rank()}")
            try:
                end = self._meet(mine, plan, begin + timeout_s)
            finally:
                with contextlib.suppress(RuntimeError):  # the store is gone
                    c10d.forget(mine)  # nobody needs it, or may find all ranks here
            if end.words is not None:
                self.agreement.hear(self._place())
                raise PlanMismatchError(end.words)
            if not end.missing:
                self._forget_meetings()
                return
            if dist.get_rank() not in end.missing:
                waited_s = time.monotonic() - begin
                raise GroupCreationTimeout(
                    f"{call} of the grid {self._layout} waited {waited_s:.1f} s for "
                    f"{name_ranks(end.missing, self._layout)}; every rank of the grid must call it",
                    missing=end.missing,
                    waited=timedelta(seconds=waited_s),
                )

    def decline(self, words: str) -> bool:
        """Let the next meeting end by an error on all ranks, as this one cannot come to it.

        Returns:
            Whether it does; not where the others gave up waiting, and nobody tries again so far.
        """
        while True:
            self.rounds += 1
            if dist.get_rank() not in self.end(End(words=words)).missing:
                return True
            if c10d.read_if_set(f"{self.agreement.name}/{self._place(1)}") is None:
                return False

    def next_end(self) -> End | None:
        """Return how the next meeting has ended, if it has."""
        if not c10d.is_set([self._key("end", 1)]):
            return None
        return self.end(ahead=1)

    def end(self, end: End | None = None, ahead: int = 0) -> End:
        """Say how this meeting ends, and return how it does: as the first rank has said."""
        key = self._key("end", ahead)
        text = json.dumps(attrs.asdict(end)) if end else ""
        found = answer(lambda: c10d.set_if_absent(key, text))
        value = parse(key, found)
        if not _is_end(value):
            raise foreign(key, found)
        return End(tuple(value["missing"]), value["words"])

    def _meet(self, mine: str, plan: Sequence[str], deadline: float) -> End:
        """Hold one meeting, and return how it ended."""
        words = self.agreement.difference(self._place(), plan)
        if words is not None:
            end = self.end(End(words=words))
            if end.words == words:
                self.agreement.tell(self._place(), words)  # also those that wait elsewhere
            return end
        rank, leader = dist.get_rank(), self._layout.rank_offset
        here = [self._key(f"here/{member}") for member in self._layout.ranks]
        done = [self._key("end")]
        c10d.set_keys([mine])

        def is_over() -> bool:  # no rank but one asks for all
            return (rank == leader and c10d.is_set(here)) or c10d.is_set(done)

        if wait_until(is_over, deadline - time.monotonic(), self.agreement.look) is None:
            return self.end(End()) if rank == leader else self.end()
        missing = [
            member
            for member, key in zip(self._layout.ranks, here, strict=True)
            if not c10d.is_set([key])
        ]
        return self.end(End(missing=tuple(missing or [leader])))  # it came, and left

    def _forget_meetings(self) -> None:
        """Leave nothing of meetings that all ranks have behind them, as they came to this one."""
        if dist.get_rank() == self._layout.rank_offset:
            for passed in range(self._first_kept - self.rounds, 0):
                c10d.forget(f"{self.agreement.name}/{self._place(passed)}")
                c10d.forget(self._key("end", passed))
            self._first_kept = self.rounds

    def _place(self, ahead: int = 0) -> str:
        return f"meeting {self.rounds + ahead}"

    def _key(self, word: str, ahead: int = 0) -> str:
        return f"{self.agreement.name}/{self._place(ahead)}/{word}"


def _is_end(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("missing"), list)
        and all(isinstance(rank, int) for rank in value["missing"])
        and isinstance(value.get("words"), (str, type(None)))
    )
