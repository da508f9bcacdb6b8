"""Agreement: whether all ranks mean the same grid and the same plan.

Each rank compares with the first that came: one operation of the store, and no barrier. The first
leaves what it does, as JSON, and each later one gets that in return. A rank that differs raises at
once, and leaves word for those that wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count, zip_longest

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    GridMismatchError,
    GroupCreationTimeout,
    PlanMismatchError,
)
from hypercomm.layout import RankLayout
from hypercomm.process_groups import c10d
from hypercomm.process_groups.cards import (
    Card,
    card_of,
    foreign,
    leave_card,
    parse,
    read_card,
    this_host,
    whereabouts,
)
from hypercomm.process_groups.meeting import wait_until
from hypercomm.process_groups.world import process_wide

_KINDS = {"grid": GridMismatchError, "plan": PlanMismatchError}

_MOST_ASKED = 8
"""Of how many missing ranks a waiting one reads the cards, each time that it looks."""


class KnownGrids:
    """What this process knows of the grids of its job, for each store.

    A process that takes part in a new job counts from 0 like those that are new with it, and a
    store that serves several worlds never sees a name twice.
    """

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, str], int] = defaultdict(int)
        self.matched: dict[tuple[str, str], set[int]] = defaultdict(set)
        self.live: weakref.WeakSet[Agreement] = weakref.WeakSet()
        self.told: set[str] = set()

    @contextlib.contextmanager
    def fresh(self) -> Iterator[None]:
        """Know nothing for a while: a fake world has no store, and each of its ranks is alike."""
        before = vars(self).copy()
        KnownGrids.__init__(self)
        try:
            yield
        finally:
            vars(self).update(before)


known_grids = KnownGrids()
process_wide.add(known_grids)


@attrs.frozen
class _Joined:
    """How a grid came to its name."""

    job: weakref.ref[ProcessGroup]
    store: str
    kind: str
    card: Card
    place: str = ""
    slot: int = 0
    posted: bool = False


class Agreement:
    """What the ranks of one grid have told each other.

    Args:
        layout: The grid's.
        label: The name that the grid was given, if any.
        backend: The backend that it was given, if any.
    """

    def __init__(self, layout: RankLayout, label: str | None, backend: str | None) -> None:
        self._layout = layout
        self._label = label
        self._backend = backend
        self._joined: _Joined | None = None
        self._heard: set[str] = set()
        self._rounds = 0

    @property
    def name(self) -> str:
        """The name that all ranks of this job know the grid by; compared when it is first used.

        Raises:
            GridMismatchError: Another rank means another grid.
            CreationError: A key of the store holds what this library did not write.
        """
        job = c10d.world_group()
        if self._joined is None or self._joined.job() is not job:
            self._joined = self._join(job)
        return self._joined.card.grid

    # ---- the grid -------------------------------------------------------------------------------

    def _join(self, job: ProcessGroup) -> _Joined:
        """Compare the grid with those that other ranks have left, and leave it if it is the first.

        Grids are compared that have the same smallest rank: in slots, each with the first rank's
        card. A grid that this rank has matched before, or is not concerned by, is passed over.
        """
        text = f"{self._layout.to_json()} {self._label!r}"
        label = f".{self._label}" if self._label else ""
        kind = f"hypercomm/{hashlib.sha256(text.encode()).hexdigest()[:12]}{label}"
        store = c10d.store_identity()
        number = known_grids.numbers[store, kind]
        card = Card(
            dist.get_rank(), this_host(), f"{kind}/{number}", number, self._layout, self._backend
        )
        joined = _Joined(weakref.ref(job), store, kind, card)
        if c10d.has_store():
            place = f"hypercomm/grids{label} from {self._layout.rank_offset}"
            matched = known_grids.matched[store, place]
            slot, posted = self._find_slot(place, card, matched)
            joined = attrs.evolve(joined, place=place, slot=slot, posted=posted)
            matched.add(slot)
            for key in known_grids.told:
                c10d.forget(key)
            known_grids.told.clear()
            known_grids.live.add(self)
            self._joined = joined
            leave_card(card, [one._joined.card.grid for one in known_grids.live if one._joined])
        known_grids.numbers[store, kind] += 1
        return joined

    def _find_slot(self, place: str, card: Card, matched: set[int]) -> tuple[int, bool]:
        text = card.to_json()
        for slot in count():
            if slot in matched:
                continue
            key = f"{place}/{slot}"
            found = c10d.set_if_absent(key, text)
            if found == text:
                return slot, True
            first = read_card(key, found)
            if first.facts() == card.facts():
                return slot, False
            if first.contradicts(card):
                words = card.difference(first)
                self._tell("grid", words, first.grid, card.grid)
                raise GridMismatchError(words)
        raise AssertionError  # never: there is always a next slot

    def leave(self) -> None:
        """Take back that this grid was joined, once it is known that the ranks mean different ones.

        So the next one that is built, or this one again, is compared anew.
        """
        joined, self._joined = self._joined, None
        known_grids.live.discard(self)
        if joined is None or not joined.place:
            return
        known_grids.matched[joined.store, joined.place].discard(joined.slot)
        if known_grids.numbers[joined.store, joined.kind] == joined.card.number + 1:
            known_grids.numbers[joined.store, joined.kind] -= 1
        if joined.posted:
            c10d.forget(f"{joined.place}/{joined.slot}")

    # ---- the plan -------------------------------------------------------------------------------

    def compare(self, place: str, plan: Sequence[str], first_position: int = 0) -> None:
        """Compare what this rank is about to create with what the rank that came first does.

        Args:
            place: Where, within the grid; the same on all ranks.
            plan: An entry for each group, in order.
            first_position: Where the first of them stands among all that the grid creates.

        Raises:
            PlanMismatchError: The plans differ; names the first entry that does.
            CreationError: The key holds what this library did not write.
        """
        key, rank = f"{self.name}/{place}", dist.get_rank()
        mine = json.dumps({"rank": rank, "host": this_host(), "plan": list(plan)})
        found = c10d.set_if_absent(key, mine)
        if found == mine:
            return
        first = parse(key, found)
        if not _is_plan(first):
            raise foreign(key, found)
        pairs = zip_longest(plan, first["plan"])
        for position, (own, theirs) in enumerate(pairs, start=first_position):
            if own != theirs:
                words = (
                    f"ranks differ in what they create at position {position}: rank {rank} "
                    f"(host {this_host()}) creates {own or 'nothing more'}, but rank "
                    f"{first['rank']} (host {first['host']}), which came first, creates "
                    f"{theirs or 'nothing more'}; every rank must make the same calls, in one order"
                )
                self._tell("plan", words, self.name)
                raise PlanMismatchError(words)

    def meet(self, plan: Sequence[str], timeout_s: float) -> None:
        """Compare all that was created so far, and wait until every rank of the grid has.

        Raises:
            PlanMismatchError: The plans of two ranks differ.
            GroupCreationTimeout: A rank did not call this in time.
        """
        self._rounds += 1
        place = f"verify {self._rounds}"
        self.compare(place, plan)
        rank, leader = dist.get_rank(), self._layout.rank_offset
        here = [f"{self.name}/{place}/here/{member}" for member in self._layout.ranks]
        done = f"{self.name}/{place}/done"
        c10d.set_keys([f"{self.name}/{place}/here/{rank}"])
        wanted = here if rank == leader else [done]  # so that no rank but one asks for all
        waited = wait_until(lambda: c10d.is_set(wanted), timeout_s, self.look)
        if waited is not None:
            missing = [
                whereabouts(member, self._layout)
                for member, key in zip(self._layout.ranks, here, strict=True)
                if not c10d.is_set([key])
            ]
            raise GroupCreationTimeout(
                f"verify() of the grid {self._layout} waited {waited:.1f} s for "
                f"{', '.join(missing[:_MOST_ASKED])}; every rank of the grid must call it"
            )
        if rank == leader:
            c10d.set_keys([done])

    # ---- word of a difference -------------------------------------------------------------------

    def _tell(self, kind: str, words: str, *grids: str) -> None:
        for grid in grids:
            key = f"{grid}/differs"
            c10d.set_value(key, json.dumps({"kind": kind, "words": words}))
            known_grids.told.add(key)

    def look(self, missing: Sequence[int] = ()) -> None:
        """Raise if another rank has left word that it differs, or if a missing one does.

        Args:
            missing: Ranks of the grid that are waited for.

        Raises:
            GridMismatchError, PlanMismatchError: Each word once.
            CreationError: A key holds what this library did not write.
        """
        key = f"{self.name}/differs"
        text = c10d.read_if_set(key)
        if text is not None and text not in self._heard:
            told = parse(key, text)
            if not _is_word(told):
                raise foreign(key, text)
            self._heard.add(text)
            self._raise(told["kind"], told["words"])
        for rank in missing[:_MOST_ASKED]:
            self._compare_with(rank)

    def _compare_with(self, rank: int) -> None:
        left, joined = card_of(rank), self._joined
        if left is None or joined is None:
            return
        card, grids = left
        own = {one._joined.card.grid for one in known_grids.live if one._joined}
        if joined.card.grid in grids or card.grid in own or not card.contradicts(joined.card):
            return  # it is on its way here
        words = card.difference(joined.card)
        self._tell("grid", words, card.grid, joined.card.grid)
        self._heard.add(json.dumps({"kind": "grid", "words": words}))
        self._raise("grid", words)

    def _raise(self, kind: str, words: str) -> None:
        if kind == "grid":
            self.leave()
        raise _KINDS[kind](words)


def _is_plan(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("rank"), int)
        and isinstance(value.get("host"), str)
        and isinstance(value.get("plan"), list)
        and all(isinstance(entry, str) for entry in value["plan"])
    )


def _is_word(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.get("kind") in _KINDS
        and isinstance(value.get("words"), str)
    )
