"""What a check is asked for: layout, views, groups, messages; and what ranks tell of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import TypedDict

import attrs

from hypercomm.cli.options import read_layout
from hypercomm.cli.plan import combinations_of
from hypercomm.errors import NotationError
from hypercomm.layout import RankLayout
from hypercomm.layout.views import Views

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "broadcast",
    "reduce-scatter",
    "all-to-all",
    "send/receive",
)
"""What is tried over every group."""

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_LARGEST = 2**34


@attrs.frozen
class Key:
    """The groups over some dims, of a view or of the layout itself (None)."""

    view: str | None
    dims: tuple[str, ...]

    def __str__(self) -> str:
        """Write it as tables show it.

        >>> str(Key(None, ("tp", "dp"))), str(Key("expert", ("ep",)))
        ('tp+dp', 'expert:ep')
        """
        return f"{self.view}:" * (self.view is not None) + "+".join(self.dims)


@attrs.frozen
class Sweep:
    """Sizes of messages in bytes, and how often each is sent."""

    sizes: tuple[int, ...] = ()
    rounds: int = 5


@attrs.frozen
class Request:
    """What every rank does.

    Attributes:
        layout: The layout of all ranks.
        views: Other factorisations of it.
        keys: The groups to check, in this order.
        backend: Backend of the groups.
        sweep: The messages to time.
    """

    layout: RankLayout
    keys: Sequence[Key]
    backend: str = "gloo"
    views: Sequence[tuple[str, RankLayout, tuple[str, ...]]] = ()
    sweep: Sweep = Sweep()

    def layout_of(self, key: Key) -> RankLayout:
        """Return the layout that the dims of a key belong to."""
        return next((view for name, view, _ in self.views if name == key.view), self.layout)


class Timing(TypedDict):
    """How long one rank took for a collective of some bytes."""

    collective: str
    bytes: int
    seconds: float


class Figures(TypedDict):
    """What one rank found over its group of some dims, in seconds and bytes/s."""

    host: str
    creation: float
    latency: float
    bandwidth: float
    wrong: Sequence[str]
    lacking: Sequence[str]
    sweep: Sequence[Timing]


Message = tuple[int, Key, str | Figures]
"""What a rank tells of some groups: what it begins with, or what it found in the end."""


def read_views(
    layout: RankLayout, texts: Sequence[str]
) -> list[tuple[str, RankLayout, tuple[str, ...]]]:
    """Read views such as "expert:ep=2,rest=-1"; the second without a name is "view2".

    Dims that make the same groups in the layout and the view are shared.

    Raises:
        NotationError: A text cannot be read.
        LayoutError, WorldSizeError: The sizes do not fit.

    Example:
        >>> dense = RankLayout.parse("tp=2,dp=2,pp=2")
        >>> [(name, str(view), shared) for name, view, shared in read_views(dense, ["ep=4,pp=2"])]
        [('view1', 'ep=4,pp=2', ('pp',))]
    """
    views = Views(layout)
    for number, text in enumerate(texts, 1):
        name, colon, sizes = text.partition(":")
        if not colon:
            name, sizes = f"view{number}", text
        room = f"the layout {layout} has {layout.size}"
        other = read_layout(sizes, layout.size, "--view", room=room)
        both = [dim for dim in layout.dim_names if dim in other.dim_names]
        shared = [dim for dim in both if layout.groups(dim) == other.groups(dim)]
        if shared and layout.groups(*shared) != other.groups(*shared):
            shared = shared[:1]
        views.register(name.strip(), other.shape, other.dim_names, shared)
    return [(view.name, view.layout, view.shared_dims) for view in views.values()]


def read_keys(
    layout: RankLayout,
    views: Sequence[tuple[str, RankLayout, tuple[str, ...]]],
    wanted: Sequence[tuple[str, ...]] | None,
) -> list[Key]:
    """Find the view of each set of dims; by default every combination, of the views what is new.

    Raises:
        UnknownDimError: Neither the layout nor a view has the dims.

    Example:
        >>> dense = RankLayout.parse("tp=2,pp=2")
        >>> views = read_views(dense, ["e:ep=2,pp=2"])
        >>> print(*read_keys(dense, views, None))
        tp pp tp+pp e:ep e:ep+pp
    """
    if wanted is None:
        own = (Key(None, layout.order_dims(dims)) for dims in combinations_of(layout))
        others = (
            Key(name, view.order_dims(dims))
            for name, view, shared in views
            for dims in combinations_of(view)
            if not set(dims) <= set(shared)
        )
        return list(chain(own, others))
    keys = []
    for dims in wanted:
        having = ((name, view) for name, view, _ in views if set(dims) <= set(view.dim_names))
        name, owner = (
            (None, layout) if set(dims) <= set(layout.dim_names) else next(having, (None, layout))
        )
        keys.append(Key(name, owner.order_dims(dims)))
    return keys


def read_sizes(text: str, factor: int) -> tuple[int, ...]:
    """Read sizes of messages: "1K..64M", each `factor` times the one before, or "8,1M".

    Raises:
        NotationError: A size is no number of bytes from 4 to 16G, or the last is not the largest.

    Example:
        >>> read_sizes("1K..64K", 4), read_sizes("8,1M", 4)
        ((1024, 4096, 16384, 65536), (8, 1048576))
    """
    first, dots, last = text.partition("..")
    if not dots:
        return tuple(map(_bytes, text.split(",")))
    size, most = _bytes(first), _bytes(last)
    if most < size:
        raise NotationError(f"{text!r} ends before it begins; write it like '1K..64M'")
    sizes = []
    while size <= most:
        sizes.append(size)
        size *= factor
    return tuple(sizes)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12})([KMG]?)", text.strip().upper())
    size = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 4 <= size <= _LARGEST:
        raise NotationError(
            f"{text.strip()!r} is no size of a message, which has 4 bytes to 16G; write sizes like "
            f"'1K..64M' or '8,1M'"
        )
    return size
