"""Card: what a rank tells the others of its grid, as JSON in the store, parsed strictly."""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Sequence
from typing import Any

import attrs
import torch.distributed as dist

import hypercomm
from hypercomm.errors import CreationError
from hypercomm.layout import RankLayout
from hypercomm.layout.messages import shown
from hypercomm.layout.notation import format_coords
from hypercomm.process_groups import c10d
from hypercomm.process_groups.c10d.gloo import host_in, world_address_key


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
        return (
            f"ranks mean different grids: {_who(self.rank, self.host)} has {_say(own, told)}, but "
            f"{_who(first.rank, first.host)} has {_say(others, told)} (grids {self.layout} and "
            f"{first.layout}); every rank must build the same grid, and grids that are meant to "
            f"be different in the same order or each with a name=... of its own"
        )

    def to_fields(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {**attrs.asdict(self, recurse=False), "layout": json.loads(self.layout.to_json())}

    @classmethod
    def from_fields(cls, fields: Any) -> Card:
        """Read what `to_fields` gave; raises ValueError, TypeError or KeyError."""
        values = {**fields, "layout": RankLayout.from_json(json.dumps(fields["layout"]))}
        card = cls(**values)
        for name, kinds in _KINDS.items():
            value = getattr(card, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise TypeError(name)
        return card


_MOST_NAMED = 8
_MOST_LISTED = 64

_KINDS: dict[str, Any] = {
    "rank": int,
    "host": str,
    "kind": str,
    "label": (str, type(None)),
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


# ---- slots, where the first rank with a grid leaves its card ----------------------------------


@attrs.frozen
class Mismatch:
    """What ranks were found to differ about.

    Attributes:
        slot: The key of the slot whose grid another rank's contradicts: the same for all that
            find it.
        words: What they differ in.
    """

    slot: str
    words: str

    @classmethod
    def from_fields(cls, fields: Any) -> Mismatch | None:
        """Read what attrs.asdict gave, or null; raises TypeError."""
        if fields is None:
            return None
        mismatch = cls(**fields)
        if not isinstance(mismatch.slot, str) or not isinstance(mismatch.words, str):
            raise TypeError("slot, words")
        return mismatch


def slot_text(card: Card, void: Mismatch | None = None) -> str:
    """Return what a slot holds; it is void once ranks were found to differ about it."""
    return json.dumps({"card": card.to_fields(), "void": void and attrs.asdict(void)})


def read_slot(key: str, text: str) -> tuple[Card, Mismatch | None]:
    """Read what `slot_text` wrote.

    Raises:
        CreationError: It did not.
    """
    found = parse(key, text)
    try:
        return Card.from_fields(found["card"]), Mismatch.from_fields(found["void"])
    except (ValueError, TypeError, KeyError) as error:
        raise foreign(key, text) from error


# ---- what each rank leaves for those that will wait for it ------------------------------------


@attrs.frozen
class Latest:
    """The latest grid that a rank has joined.

    Attributes:
        card: What it says of it.
        place: Where such grids are compared.
        slot: Its number there.
        live: The names of all grids that the rank has.
        refused: Why it could not join this one, if so.
    """

    card: Card
    place: str
    slot: int
    live: list[str]
    refused: Mismatch | None = None

    @property
    def name(self) -> str:
        """The name that the grid has in this job."""
        return f"{self.card.kind}/{self.slot}"


def leave_latest(latest: Latest) -> None:
    """Leave in the store what this rank has joined."""
    fields = {**attrs.asdict(latest), "card": latest.card.to_fields()}
    if latest.refused is None and "ranks" in fields["card"]["layout"]:
        fields["card"]["layout"] = None  # the slot has the same list: one for all ranks
    c10d.set_value(_key_of(latest.card.rank), json.dumps(fields))


def latest_of(rank: int) -> Latest | None:
    """Return what a rank has left; None where it has no grid yet.

    Raises:
        CreationError: The key holds what this library did not write.
    """
    key = _key_of(rank)
    text = c10d.read_if_set(key)
    if text is None:
        return None
    found = parse(key, text)
    try:
        if found["card"]["layout"] is None:
            slot = f"{found['place']}/{found['slot']}"
            first, _ = read_slot(slot, c10d.read_if_set(slot) or "null")
            found["card"]["layout"] = first.to_fields()["layout"]
        card, refused = Card.from_fields(found["card"]), Mismatch.from_fields(found["refused"])
        latest = Latest(**{**found, "card": card, "refused": refused})
    except (ValueError, TypeError, KeyError) as error:
        raise foreign(key, text) from error
    if (
        not isinstance(latest.place, str)
        or not isinstance(latest.slot, int)
        or not isinstance(latest.live, list)
        or not all(isinstance(name, str) for name in latest.live)
    ):
        raise foreign(key, text)
    return latest


def _key_of(rank: int) -> str:
    return f"{namespace()}/rank {rank}"


def namespace() -> str:
    """Return what all keys of a job begin with.

    A job that is restarted with fewer ranks may find the keys of the one before in its store.
    """
    return f"hypercomm/{dist.get_world_size()}"


def whereabouts(rank: int, layout: RankLayout) -> str:
    """Name a rank with its coordinates in a layout, and its host where that is known."""
    try:
        left = latest_of(rank)
    except CreationError:
        left = None
    host = left.card.host if left else host_in(c10d.read_bytes(world_address_key(rank)))
    where = format_coords(layout.coords(rank))
    return f"rank {rank} ({where}{f'; host {host}' if host else ''})"


def name_ranks(ranks: Sequence[int], layout: RankLayout) -> str:
    """Name ranks with their coordinates, the first ones with their hosts."""
    named = [whereabouts(rank, layout) for rank in ranks[:_MOST_NAMED]]
    rest = [f"rank {rank}" for rank in ranks[_MOST_NAMED:]]
    return ", ".join(named + rest[:_MOST_NAMED]) + (
        f" and {len(rest) - _MOST_NAMED} more" if len(rest) > _MOST_NAMED else ""
    )


def _who(rank: int, host: str) -> str:
    return f"rank {rank} (host {host})"


def _say(facts: dict[str, object], names: list[str]) -> str:
    told = {name: facts[name] for name in names}
    return ", ".join(
        f"{name} {value if isinstance(value, str) else shown(value)}"
        for name, value in told.items()
    )


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
