"""What the ranks of one grid agree on, and the keys of the store that they do so with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property

import hypercomm
from hypercomm.layout import RankLayout
from hypercomm.process_groups.agreement.calls import Scope
from hypercomm.process_groups.world import World

_MOST_LISTED = 64


class GridAgreement:
    """The identity of one grid, and the scopes of the calls that its ranks make together.

    Ranks that build the same grid derive the same name. Grids of one layout and name share their
    records, also one after the other: their calls meet those of other ranks in order. So the store
    holds one record for each group, however often a grid is built.

    Args:
        layout: The grid's.
        label: The name that the grid was given, if any.
        backend: The backend that it was given, if any.
    """

    def __init__(self, layout: RankLayout, label: str | None, backend: str | None) -> None:
        self.layout = layout
        self._label = label
        self._backend = backend

    @cached_property
    def text(self) -> str:
        """What must be equal on all ranks of the grid, as JSON."""
        layout = self.layout
        listed = layout.to_dict().get("ranks")
        if listed is not None and len(listed) > _MOST_LISTED:
            digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:12]
            listed = f"{len(listed)} ranks with digest {digest}"
        facts = {
            "dims": "-".join(layout.dim_names),
            "shape": list(layout.shape),
            "rank_offset": layout.rank_offset,
            "ranks": listed,
            "name": self._label,
            "backend": self._backend,
            "hypercomm": hypercomm.__version__,
        }
        return json.dumps(facts)

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    def scope(
        self,
        world: World,
        record: str,
        ranks: Sequence[int] | None = None,
        *,
        is_fenced: bool = False,
    ) -> Scope:
        """Return the scope of calls at one record, by all ranks of the grid or by some."""
        label = f".{self._label}" if self._label else ""
        path = f"{self._digest}{label}/{record}"
        ranks = self.layout.ranks if ranks is None else ranks
        return Scope(world, path, ranks, self.layout, self.text, is_fenced)
