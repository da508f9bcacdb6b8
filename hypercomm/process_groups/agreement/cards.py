"""What a rank publishes about its grid, how two grids differ, and the number of each grid.

A layout that lists many ranks is long: its card holds a digest of it, and the layout stands in the
store under that, once; whoever has the same layout never reads it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import socket
from collections.abc import Container
from itertools import count
from typing import Any

import attrs

import hypercomm
from hypercomm.errors import CreationError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import shown
from hypercomm.process_groups.agreement.meeting import (
    End,
    Meeting,
    Now,
    Publish,
    Read,
    Register,
    Said,
    Sleep,
    decide,
    enter,
    foreign,
    read_register,
    who,
    words_of,
)
from hypercomm.process_groups.agreement.whereabouts import Whereabouts


@attrs.frozen
class Card:
    """What a rank tells the others of its grid.

    Attributes:
        rank: The rank.
        host: Its host.
        kind: What grids that look like this one share in their names.
        label: The name that the grid was given, if any.
        layout: The grid's.
        backend: The grid's.
        version: Of this library.
    """

    rank: int
    host: str
    kind: str
    label: str | None
    layout: RankLayout
    backend: str | None
    version: str = hypercomm.__version__

    def facts(self) -> dict[str, object]:
        """Return what must be the same on all ranks of a grid."""
        return {
            "dims": "-".join(self.layout.dim_names),
            "shape": self.layout.shape,
            "rank_offset": self.layout.rank_offset,
            "strides": self.layout.strides,
            "ranks": _listed(self.layout),
            "backend": self.backend,
            "hypercomm": self.version,
        }

    def contradicts(self, other: Card) -> bool:
        """Tell whether two ranks with different grids wait for each other in vain.

        Ranks may have different grids: those beside each other, or an extra one for some of them.
        But where each expects the other in its own grid, they will not meet.
        """
        return self.is_in(other) and other.is_in(self)

    def has_gone_astray(self, other: Card) -> bool:
        """Tell whether this rank is outside its own grid, which is another's, moved elsewhere."""
        return not self.is_in(self) and _form(self.layout) == _form(other.layout)

    def is_in(self, other: Card) -> bool:
        """Tell whether this rank is in another's grid."""
        return self.rank in other.layout

    def difference(self, first: Card) -> str:
        """Say how two grids differ, and on which ranks and hosts."""
        own, others = self.facts(), first.facts()
        told = [name for name in own if own[name] != others[name]]
        if "ranks" in told and self.layout.size == first.layout.size:
            told = [name for name in told if name not in {"rank_offset", "strides"}]
            own["ranks"], others["ranks"] = _first_difference(self.layout, first.layout)
        if len(told) > 1 and "strides" in told:
            told.remove("strides")  # they follow from the shape
        fields = ((name, _say(own[name]), _say(others[name])) for name in told)
        return (
            f"{words_of(fields, who(self.rank, self.host), who(first.rank, first.host))}; ranks "
            f"mean different grids, {self.layout} and {first.layout}; every rank must build the "
            f"same grid, and grids that are meant to be different in the same order or each with "
            f"a name=... of its own"
        )

    def said(self) -> Said:
        """Return what the rank means, as a register holds it."""
        fields = attrs.asdict(self, recurse=False)
        fields["layout"] = self.digest or json.loads(self.long_text)
        del fields["rank"], fields["host"]  # which are not compared
        return Said(self.rank, self.host, (json.dumps(fields),))

    @property
    def long_text(self) -> str:
        """The layout, as it stands in the store beside cards that have its digest."""
        return self.layout.to_json()

    @property
    def digest(self) -> str | None:
        """What stands in the card for a layout that is long."""
        text = self.long_text
        return digest_of(text) if len(text) > _LONGEST_LAYOUT else None

    @classmethod
    def read(cls, key: str, said: Said, long_text: str | None = None) -> Card:
        """Read what `said` gave, on another rank.

        Args:
            key: Where it stood.
            said: What stood there.
            long_text: The layout, where the card has its digest.

        Raises:
            CreationError: It did not.
        """
        try:
            fields = _fields(said)
            text = json.dumps(fields["layout"]) if long_text is None else long_text
            layout = RankLayout.from_json(text)
            card = cls(**{**fields, "layout": layout}, rank=said.rank, host=said.host)
            card._check()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise foreign(key, "\n".join(said.entries)) from error
        return card

    def _check(self) -> None:
        for name, kinds in _KINDS.items():
            if not isinstance(getattr(self, name), kinds):
                raise TypeError(name)


_MOST_LISTED = 64

_LONGEST_LAYOUT = 1000
"""Characters of a layout that a card holds itself."""

_KINDS: dict[str, Any] = {
    "kind": str,
    "label": (str, type(None)),
    "backend": (str, type(None)),
    "version": str,
}


def digest_of(long_text: str) -> str:
    """Return what stands in a card for a layout that is long."""
    return hashlib.sha256(long_text.encode()).hexdigest()


def digest_in(key: str, said: Said) -> str | None:
    """Return the digest that a card has in place of its layout; None where it has that itself.

    Raises:
        CreationError: It is no card.
    """
    try:
        found = _fields(said)["layout"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise foreign(key, "\n".join(said.entries)) from error
    return found if isinstance(found, str) else None


def _fields(said: Said) -> Any:
    (text,) = said.entries
    return json.loads(text)


@functools.cache
def this_host() -> str:
    """Return the name of the machine that this process runs on."""
    return socket.gethostname()


def _say(value: object) -> str:
    return value if isinstance(value, str) else shown(value)


def _form(layout: RankLayout) -> tuple[object, ...]:
    """What stays the same when a layout is moved."""
    return layout.shape, layout.dim_names, layout.strides, _listed(layout)


def _first_difference(one: RankLayout, other: RankLayout) -> tuple[str, str]:
    """Say which ranks two layouts have, or where long lists of them begin to differ."""
    if one.size <= _MOST_LISTED:
        return str(list(one.ranks)), str(list(other.ranks))
    pairs = enumerate(zip(one.ranks, other.ranks, strict=True))
    position, (mine, theirs) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    return f"with {mine} at position {position}", f"with {theirs} at position {position}"


def _listed(layout: RankLayout) -> object:
    """The ranks of a layout that lists them."""
    return json.loads(layout.to_json()).get("ranks")


# ---- which grid of its kind one is --------------------------------------------------------------


_PUBLISHING_S = 2.0
"""How long a rank that has said which layout it has may take to publish it."""


def take_slot(
    place: str, card: Card, passed: Container[str], heard: Container[str]
) -> Meeting[tuple[str, End | None]]:
    """Take the first slot whose grid is this one, or that is free.

    Args:
        place: Where such grids are compared.
        card: What this rank says of its grid.
        passed: The slots that this rank has taken, or whose end it has obeyed.
        heard: What it has been told already, by the place that it is about.

    Returns:
        The slot, and how it has ended, where ranks differ about it.
    """
    said = card.said()
    for number in count():
        slot = f"{place}/{number}"
        if slot in passed:
            continue
        register = yield from enter(slot, said)
        if register.first is None:
            continue
        if register.first == said and card.digest:
            yield Publish({_long_key(slot, card.digest): card.long_text})
        end = register.end
        if register.first.entries != said.entries:  # else its card need not be read
            first = yield from _card(slot, register.first, card)
            is_same = first.facts() == card.facts()
            if not is_same and not first.contradicts(card):
                continue
            if end is None and not is_same:
                differs = End("differs", words=card.difference(first), about=slot)
                end = yield from decide(slot, differs)
        if end is None or end.about not in heard:
            return slot, end
    raise AssertionError("unreachable")


def compare_with(
    slot: str,
    card: Card,
    where: Whereabouts,
    rank: int,
    heard: Container[str],
    *,
    may_be_astray: bool,
) -> Meeting[End | None]:
    """Compare a grid with that of a rank that is waited for, and has another slot.

    Args:
        slot: This rank's slot.
        card: What it says of its grid.
        where: Where the one is that is waited for.
        rank: That one.
        heard: As for `take_slot`.
        may_be_astray: Whether a rank may count as lost that is outside a grid of its own.

    Returns:
        How both slots have ended, if the two wait for each other in vain.
    """
    other = where.slot
    text = yield Read(other)
    register = Register() if text is None else read_register(other, text)
    if register.first is None:
        return None
    first = yield from _card(other, register.first, card)
    theirs = attrs.evolve(first, rank=rank, host=where.host)
    end = register.end
    if theirs.label != card.label:
        return None
    if end is not None:
        is_news = where.kind == card.kind and end.about not in heard
        return (yield from decide(slot, end)) if is_news else None
    is_lost = theirs.contradicts(card) or (may_be_astray and theirs.has_gone_astray(card))
    if where.kind == card.kind or not is_lost:
        return None
    words = theirs.difference(card)
    end = yield from decide(other, End("differs", words=words, about=other))
    return (yield from decide(slot, end))


def _card(slot: str, said: Said, own: Card) -> Meeting[Card]:
    """Read a card; a long layout is read where it is another one than this rank's own."""
    digest = digest_in(slot, said)
    if digest is None or digest == own.digest:
        return Card.read(slot, said, digest and own.long_text)
    key, begin = _long_key(slot, digest), (yield Now())
    while True:
        text = yield Read(key)
        if text is not None:
            break
        if (yield Now()) > begin + _PUBLISHING_S:
            raise CreationError(
                f"rank {said.rank} (host {said.host}) has a layout that it has not published; "
                f"it may have died: restart the job"
            )
        yield Sleep(0.05)
    if digest_of(text) != digest:
        raise foreign(key, text)
    return Card.read(slot, said, text)


def _long_key(slot: str, digest: str) -> str:
    """Where the long layouts stand of the cards in some slots."""
    return f"{slot.rpartition('/')[0]}/layout {digest[:16]}"
