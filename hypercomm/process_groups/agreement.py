"""Agreement: whether all ranks mean the same grid and the same plan.

Each rank compares with the first that came: one operation of the store, and no barrier. The first
leaves what it does, as JSON, and each later one gets that in return. A rank that differs raises at
once, and leaves word for those that wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, zip_longest
from typing import Any, NoReturn

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    GridMismatchError,
    PlanMismatchError,
)
from hypercomm.layout import RankLayout
from hypercomm.layout.views import View
from hypercomm.process_groups import c10d
from hypercomm.process_groups.c10d.time_limits import answer
from hypercomm.process_groups.cards import (
    Card,
    Latest,
    Mismatch,
    foreign,
    latest_of,
    leave_latest,
    namespace,
    parse,
    read_slot,
    slot_text,
    this_host,
)
from hypercomm.process_groups.world import process_wide

_ASTRAY_S = 2.0
"""How long a rank may have business with a grid that it is outside of, before it is asked about."""

_MOST_ASKED = 8
"""Of how many missing ranks a waiting one reads the cards, each time that it looks."""


class KnownGrids:
    """What this process knows of the grids of its job, for each store.

    A process that takes part in a new job begins from 0 like those that are new with it, and a
    store that serves several worlds never sees a name twice.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, int] = defaultdict(int)
        self.passed: dict[tuple[str, str], set[int]] = defaultdict(set)
        self.live: weakref.WeakSet[Agreement] = weakref.WeakSet()
        self.heard: set[str] = set()
        self.lock = threading.RLock()

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
    """The name that a grid has in a job, and where it was compared."""

    job: weakref.ref[ProcessGroup]
    name: str
    card: Card
    place: str = ""
    slot: int = 0


class Agreement:
    """What the ranks of one grid have told each other.

    Args:
        layout: The grid's.
        label: The name that the grid was given, if any.
        backend: The backend that it was given, if any.

    Attributes:
        listeners: What else a rank that waits listens to, which raises what it hears.
    """

    def __init__(self, layout: RankLayout, label: str | None, backend: str | None) -> None:
        self._layout = layout
        self._label = label
        self._backend = backend
        self._joined: _Joined | None = None
        self._heard: set[str] = set()
        self.listeners: list[Callable[[], None]] = []
        self._told: str | None = None
        self._same_views: set[tuple[str, View]] = set()

    @property
    def name(self) -> str:
        """The name that all ranks of this job know the grid by; compared when it is first used.

        Raises:
            GridMismatchError: Another rank means another grid.
            CreationError: A key of the store holds what this library did not write.
        """
        return self._join().name

    # ---- the grid -------------------------------------------------------------------------------

    def _join(self) -> _Joined:
        """Compare the grid with those that other ranks have left, and leave it if it is the first.

        Grids of one label that begin at the same rank are compared, each in a slot, which holds
        the first rank's card. Its number makes the grid's name. A slot that this rank has passed,
        or that does not concern it, is skipped.
        """
        job = c10d.world_group()
        if self._joined is None or self._joined.job() is not job:
            with known_grids.lock:
                if self._joined is None or self._joined.job() is not job:
                    self._joined = self._join_job(weakref.ref(job))
        return self._joined

    def _join_job(self, job: weakref.ref[ProcessGroup]) -> _Joined:
        digest = hashlib.sha256(f"{self._layout.to_json()} {self._label!r}".encode()).hexdigest()
        label = f".{self._label}" if self._label else ""
        kind = f"{namespace()}/{digest[:12]}{label}"
        card = Card(dist.get_rank(), this_host(), kind, self._label, self._layout, self._backend)
        if not c10d.has_store():
            number = known_grids.numbers[kind]
            known_grids.numbers[kind] += 1
            return _Joined(job, f"{kind}/{number}", card)
        place = f"{namespace()}/grids{label} from {self._layout.rank_offset}"
        slot = answer(lambda: self._take_slot(place, card))
        known_grids.live.add(self)
        return _Joined(job, f"{kind}/{slot}", card, place, slot)

    def _take_slot(self, place: str, card: Card) -> int:
        passed = known_grids.passed[c10d.store_identity(), place]
        slots = (slot for slot in count() if slot not in passed)
        mine = slot_text(card)
        for slot in slots:
            key = f"{place}/{slot}"
            found = c10d.set_if_absent(key, mine)
            first, void = (card, None) if found == mine else read_slot(key, found)
            is_same = first.facts() == card.facts()
            if is_same and void is None:
                passed.add(slot)
                leave_latest(Latest(card, place, slot, [*_live(), f"{card.kind}/{slot}"]))
                break
            if is_same or first.contradicts(card):
                passed.add(slot)
                mismatch = void or Mismatch(key, card.difference(first))
                if void is None:
                    _void(key, first, mismatch, f"{first.kind}/{slot}")
                if mismatch.slot not in known_grids.heard:
                    _refuse(card, place, slot, mismatch)
        return slot

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
        words = self.difference(place, plan, first_position)
        if words is not None:
            self._differ(place, words)

    def difference(self, place: str, plan: Sequence[str], first_position: int = 0) -> str | None:
        """Say where a plan differs from that of the rank that came first, if it does.

        Raises:
            CreationError: The key holds what this library did not write.
        """
        key, rank = f"{self.name}/{place}", dist.get_rank()
        mine = json.dumps({"rank": rank, "host": this_host(), "plan": list(plan)})
        first = self._first(key, mine)
        if first is None:
            return None
        pairs = zip_longest(plan, first["plan"])
        for position, (own, theirs) in enumerate(pairs, start=first_position):
            if own != theirs:
                return (
                    f"ranks differ in what they create at position {position}: rank {rank} "
                    f"(host {this_host()}) creates {own or 'nothing more'}, but rank "
                    f"{first['rank']} (host {first['host']}), which came first, creates "
                    f"{theirs or 'nothing more'}; every rank must make the same calls, in one order"
                )
        return None

    def compare_view(self, view: View) -> None:
        """Compare a view with that of the rank that came first to it; asked once for each view.

        Raises:
            PlanMismatchError: The ranks have registered different views under this name.
            CreationError: The key holds what this library did not write.
        """
        if (self.name, view) in self._same_views or not c10d.has_store():
            return
        place, rank = f"view {view.name}", dist.get_rank()
        key = f"{self.name}/{place}"
        mine = json.dumps({"rank": rank, "host": this_host(), "plan": [str(view)]})
        first = self._first(key, mine)
        if first is not None and first["plan"] != [str(view)]:
            self._differ(
                place,
                f"ranks differ in view {view.name!r}: rank {rank} (host {this_host()}) has "
                f"registered {view}, but rank {first['rank']} (host {first['host']}), which came "
                f"first, has {', '.join(first['plan'])}; every rank must register the same view",
            )
        self._same_views.add((self.name, view))

    def _first(self, key: str, mine: str) -> dict[str, Any] | None:
        """Leave what this rank has to say, or return what the rank said that came first."""
        found = answer(lambda: c10d.set_if_absent(key, mine))
        if found == mine:
            return None
        first = parse(key, found)
        if not _is_plan(first):
            raise foreign(key, found)
        return first  # type: ignore[no-any-return]

    def _differ(self, place: str, words: str) -> NoReturn:
        self.tell(place, words)
        raise PlanMismatchError(words)

    def tell(self, place: str, words: str) -> None:
        """Leave word for the ranks that wait at a place, where they will raise it."""
        self.hear(place)
        _tell("plan", words, self.name, place)
        self._told = f"{self.name}/differs"

    def hear(self, place: str) -> None:
        """Raise no more what ranks say about a place: this one has heard."""
        self._heard.add(place)

    def forget(self, place: str) -> None:
        """Remove what ranks have said at a place."""
        answer(lambda: c10d.forget(f"{self.name}/{place}"))

    def retract(self) -> None:
        """Take back the word that this rank has left about its plan: it has another one now."""
        key, self._told = self._told, None
        if key is not None:
            answer(lambda: c10d.forget(key))

    # ---- word of a difference -------------------------------------------------------------------

    def look(self, missing: Sequence[int] = (), waited_s: float = 0.0) -> None:
        """Raise if another rank has left word that it differs, or if a missing one does.

        Args:
            missing: Ranks of the grid that are waited for.
            waited_s: How long that has been.

        Raises:
            GridMismatchError, PlanMismatchError: Each word once.
            CreationError: A key holds what this library did not write.
        """
        for listen in self.listeners:
            listen()
        joined = self._join()
        key = f"{joined.name}/differs"
        text = c10d.read_if_set(key)
        told = None if text is None else parse(key, text)
        if text is not None and not _is_word(told):
            raise foreign(key, text)
        if told is not None and (about := _about(told)) not in self._heard:
            self._heard.add(about)
            if told["kind"] == "plan":
                raise PlanMismatchError(told["words"])
            self._leave(joined, Mismatch(told["slot"], told["words"]))
        for rank in missing[:_MOST_ASKED]:
            self._compare_with(rank, joined, waited_s)

    def _compare_with(self, rank: int, joined: _Joined, waited_s: float) -> None:
        """Compare with the latest grid of a missing rank, which may be in no slot that is ours."""
        latest = latest_of(rank)
        if latest is None or joined.name in latest.live or latest.card.label != self._label:
            return  # it may come yet
        if latest.refused is not None and latest.card.kind == joined.card.kind:
            if latest.refused.slot not in known_grids.heard:
                self._leave(joined, latest.refused)
            return  # it will try again, as this rank does
        passed = known_grids.passed[c10d.store_identity(), latest.place]
        astray = latest.card.has_gone_astray(joined.card) and waited_s > _ASTRAY_S
        if latest.slot not in passed and (astray or latest.card.contradicts(joined.card)):
            key = f"{latest.place}/{latest.slot}"
            mismatch = Mismatch(key, latest.card.difference(joined.card))
            _void(key, latest.card, mismatch, latest.name)
            passed.add(latest.slot)
            self._leave(joined, mismatch)

    def _leave(self, joined: _Joined, mismatch: Mismatch) -> NoReturn:
        """Raise what ranks differ in; the grid is compared anew when it is used again."""
        _void(f"{joined.place}/{joined.slot}", joined.card, mismatch, joined.name)
        self._joined = None
        known_grids.live.discard(self)
        _refuse(joined.card, joined.place, joined.slot, mismatch)


def _refuse(card: Card, place: str, slot: int, mismatch: Mismatch) -> NoReturn:
    """Raise what ranks differ in, and let those know that will wait for this one."""
    known_grids.heard.add(mismatch.slot)
    leave_latest(Latest(card, place, slot, _live(), mismatch))
    raise GridMismatchError(mismatch.words)


def _void(key: str, first: Card, mismatch: Mismatch, name: str) -> None:
    """Let nobody join a grid any more that ranks differ about; who has joined it will hear."""
    c10d.set_value(key, slot_text(first, mismatch))
    _tell("grid", mismatch.words, name, mismatch.slot)


def _tell(kind: str, words: str, grid: str, slot: str = "") -> None:
    c10d.set_value(f"{grid}/differs", json.dumps({"kind": kind, "words": words, "slot": slot}))


def _live() -> list[str]:
    return [one._joined.name for one in known_grids.live if one._joined is not None]


def _is_plan(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("rank"), int)
        and isinstance(value.get("host"), str)
        and isinstance(value.get("plan"), list)
        and all(isinstance(entry, str) for entry in value["plan"])
    )


def _about(told: dict[str, str]) -> str:
    """What a word is about: the place of a plan, or all that is said of a grid."""
    return told["slot"] if told["kind"] == "plan" else f"{told['slot']} {told['words']}"


def _is_word(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.get("kind") in ("grid", "plan")
        and isinstance(value.get("words"), str)
        and isinstance(value.get("slot"), str)
    )
