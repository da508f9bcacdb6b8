"""The ground floor: numbers only. Nothing under here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypercomm.layout import pipelines as pipelines
from hypercomm.layout.groups.rank_groups import RankGroups as RankGroups
from hypercomm.layout.mapping.rank_mapping import RankMapping as RankMapping
from hypercomm.layout.rank_layout import RankLayout as RankLayout

if TYPE_CHECKING:
    from hypercomm.layout.placing import Card as Card
    from hypercomm.layout.placing import Placed as Placed
    from hypercomm.layout.placing import Proposal as Proposal
    from hypercomm.layout.placing import Spread as Spread
    from hypercomm.layout.placing import Traffic as Traffic
    from hypercomm.layout.placing import place as place

_PLACING = ("Card", "Placed", "Proposal", "Spread", "Traffic", "place")
__all__ = [
    "Card",
    "Placed",
    "Proposal",
    "RankGroups",
    "RankLayout",
    "RankMapping",
    "Spread",
    "Traffic",
    "place",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # When it is asked for: it stands on the topology room, which stands on rooms in here.
    from hypercomm.layout import placing

    return getattr(placing, name)
