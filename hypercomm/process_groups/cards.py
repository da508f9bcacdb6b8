"""Card: what a rank tells the others of its grid, as JSON in the store, parsed strictly."""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Iterable
from typing import Any

import attrs

import hypercomm
from hypercomm.errors import CreationError
from hypercomm.layout import RankLayout
from hypercomm.layout.notation import format_coords
from hypercomm.process_groups import c10d
from hypercomm.process_groups.gloo import host_in, world_address_key


@attrs.frozen
class Card:
    """What a rank tells the others of its grid.

    Attributes:
        rank: The rank.
        host: Its host.
        grid: The name that the grid has in this job.
        number: How many grids of this kind came before, on this rank.
        layout: The grid's.
        backend: The grid's.
        version: Of this library.
    """

    rank: int
    host: str
    grid: str
    number: int
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
            "backend": self.backend,
            "hypercomm": self.version,
            "such grids before it": self.number,
        }

    def contradicts(self, other: Card) -> bool:
        """Tell whether one of two ranks, which have different grids, waits for the other in vain.

        Ranks may have different grids: those beside each other, or an extra one for some of them.
        But if each expects the other in its own grid, they will not meet; nor if one does, and
        the other's grid is the same moved elsewhere, or leaves the other rank itself out.
        """
        expects = [(one, two) for one, two in ((self, other), (other, self)) if two.is_in(one)]
        moved = _at_0(self.layout) == _at_0(other.layout)
        return len(expects) == 2 or any(moved or not two.is_in(two) for _, two in expects)

    def is_in(self, other: Card) -> bool:
        """Tell whether this rank is in another's grid."""
        return self.rank in other.layout

    def difference(self, first: Card) -> str:
        """Say how two grids differ, and on which ranks and hosts."""
        own, others = self.facts(), first.facts()
        told = [name for name in own if own[name] != others[name]]
        for follows in ("strides", "such grids before it"):
            if told[0] != follows and follows in told:
                told.remove(follows)
        return (
            f"ranks mean different grids: {_who(self.rank, self.host)} has {_say(own, told)}, but "
            f"{_who(first.rank, first.host)} has {_say(others, told)} (grids {self.layout} and "
            f"{first.layout}); every rank must build the same grid, and grids that are meant to "
            f"be different in the same order or each with a name=... of its own"
        )

    def to_json(self) -> str:
        """Write the card as JSON."""
        fields = {**attrs.asdict(self, recurse=False), "layout": json.loads(self.layout.to_json())}
        return json.dumps(fields)

    @classmethod
    def from_fields(cls, fields: Any) -> Card:
        """Read what `to_json` wrote; raises ValueError, TypeError or KeyError."""
        values = {**fields, "layout": RankLayout.from_json(json.dumps(fields["layout"]))}
        card = cls(**values)
        for name, kinds in _KINDS.items():
            value = getattr(card, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise TypeError(name)
        return card


_KINDS: dict[str, Any] = {
    "rank": int,
    "host": str,
    "grid": str,
    "number": int,
    "backend": (str, type(None)),
    "version": str,
}


@functools.cache
def this_host() -> str:
    """Return the name of the machine that this process runs on."""
    return socket.gethostname()


def parse(key: str, text: str) -> Any:
    """Read JSON from the store.

    Raises:
        CreationError: It is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise foreign(key, text) from error


def foreign(key: str, text: str) -> CreationError:
    """Return the error about a key of ours that holds what this library did not write."""
    return CreationError(
        f"the store's key {key!r} holds {text[:80]!r}, which hypercomm did not write; something "
        f"else writes there, or the ranks have different versions of hypercomm"
    )


def read_card(key: str, text: str) -> Card:
    """Read a card from the store.

    Raises:
        CreationError: It is none.
    """
    fields = parse(key, text)
    try:
        return Card.from_fields(fields)
    except (ValueError, TypeError, KeyError) as error:
        raise foreign(key, text) from error


# ---- what each rank leaves for those that will wait for it ------------------------------------


def _key_of(rank: int) -> str:
    return f"hypercomm/rank {rank}"


def leave_card(card: Card, live: Iterable[str]) -> None:
    """Leave this rank's latest card in the store, with the names of all grids that it has."""
    c10d.set_value(_key_of(card.rank), json.dumps([json.loads(card.to_json()), list(live)]))


def card_of(rank: int) -> tuple[Card, list[str]] | None:
    """Return what a rank has left; None where it has no grid yet, or the store is gone.

    Raises:
        CreationError: The key holds what this library did not write.
    """
    key = _key_of(rank)
    text = c10d.read_if_set(key)
    if text is None:
        return None
    found = parse(key, text)
    try:
        fields, live = found
        card = Card.from_fields(fields)
    except (ValueError, TypeError, KeyError) as error:
        raise foreign(key, text) from error
    if not isinstance(live, list) or not all(isinstance(name, str) for name in live):
        raise foreign(key, text)
    return card, live


def whereabouts(rank: int, layout: RankLayout) -> str:
    """Name a rank with its coordinates in a layout, and its host where that is known."""
    try:
        left = card_of(rank)
    except CreationError:
        left = None
    host = left[0].host if left else host_in(c10d.read_bytes(world_address_key(rank)))
    where = f"{format_coords(layout.coords(rank))}"
    return f"rank {rank} ({where}{f'; host {host}' if host else ''})"


def _who(rank: int, host: str) -> str:
    return f"rank {rank} (host {host})"


def _say(facts: dict[str, object], names: list[str]) -> str:
    return ", ".join(f"{name} {facts[name]}" for name in names)


def _at_0(layout: RankLayout) -> RankLayout:
    return attrs.evolve(layout, rank_offset=0)
