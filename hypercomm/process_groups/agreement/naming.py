"""Naming: which grid of its kind one is, so that all ranks know it by the same name.

Grids of one label that begin at the same rank are compared, each in a slot: a register that holds
the card of the first rank that came. A slot's number makes the grid's name. Ranks may have
different grids, beside each other or for some of them only: a slot whose grid is another one that
this rank need not be in is passed by.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import count

import attrs

from hypercomm.errors import CreationError
from hypercomm.process_groups.agreement.cards import Card, digest_in, digest_of
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
)
from hypercomm.process_groups.agreement.whereabouts import Whereabouts

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
