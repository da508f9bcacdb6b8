"""The identity of a grid, and the agreement on the survivors after ranks are lost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property

import hypercomm
from hypercomm.errors import CreationError, GroupCreationTimeout, LateRankError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_ranks
from hypercomm.process_groups.agreement.driver import agree, ask
from hypercomm.process_groups.agreement.protocol import read_record
from hypercomm.process_groups.agreement.records import Record, Steps
from hypercomm.process_groups.agreement.scope import Scope
from hypercomm.process_groups.world import World

_MOST_LISTED = 64


class GridAgreement:
    """The identity of one grid, and the scopes of the calls that its ranks make together.

    Ranks that build the same grid derive the same keys. Grids with the same layout, name and
    backend use the same records, which are keys of the store. The n-th call of one rank joins the
    n-th call of the other ranks. The store therefore has only one record for each group, even if
    a program builds the grid many times.

    Args:
        layout: The layout of the grid.
        label: The name of the grid, if the user has given one.
        backend: The backend of the grid, if the user has given one.
    """

    def __init__(self, layout: RankLayout, label: str | None, backend: str | None) -> None:
        self.layout = layout
        self._label = label
        self._backend = backend

    @cached_property
    def text(self) -> str:
        """The properties of the grid that must be equal on all ranks, as JSON."""
        layout = self.layout
        given = layout.to_dict()
        listed = given.get("ranks")
        if listed is not None and len(listed) > _MOST_LISTED:
            digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:12]
            listed = f"{len(listed)} ranks with digest {digest}"
        facts = {
            "dims": "-".join(layout.dim_names),
            "shape": list(layout.shape),
            "rank_offset": layout.rank_offset,
            "strides": given.get("strides"),
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
        """Return the scope of the calls that use one record.

        Args:
            world: The world of the grid.
            record: The name of the record.
            ranks: The ranks that make the calls; default: all ranks of the grid.
            is_fenced: See `Scope`.
        """
        label = f".{self._label}" if self._label else ""
        path = f"{self._digest}{label}/{record}"
        ranks = self.layout.ranks if ranks is None else ranks
        return Scope(world, path, ranks, self.layout, self.text, is_fenced)

    def find_survivors(
        self, world: World | None, limit_s: float, min_ranks: int
    ) -> tuple[int, ...]:
        """Return the ranks of the grid that arrive in time. All these ranks get the same result.

        The first rank that times out writes the missing ranks into the outcome of the round. The
        remaining ranks then confirm in another round that all of them are present.

        Args:
            world: The world of the grid, or None before there is one.
            limit_s: The limit of each round, in seconds.
            min_ranks: The smallest number of ranks that may continue.

        Raises:
            CreationError: The other ranks continue without this rank, or fewer than `min_ranks`
                ranks are left.
        """
        ranks = tuple(self.layout.ranks)
        while world is not None:
            digest = hashlib.sha256(json.dumps(sorted(ranks)).encode()).hexdigest()[:12]
            scope = self.scope(world, f"survivors {digest}", ranks)
            if scope.is_alone:
                break
            found = ask(world, "survivors()", _read_record(scope), limit_s)
            if found is not None and found.outcome and world.rank in found.outcome.absent:
                raise _too_late(world)
            try:
                agree(scope, "survivors()", lambda: ["survivors()"], limit_s).get()
                break
            except GroupCreationTimeout as error:
                if world.rank in error.absent:
                    raise _too_late(world) from error
                ranks = tuple(rank for rank in ranks if rank not in error.absent)
            except LateRankError as error:
                raise _too_late(world) from error
        if len(ranks) < min_ranks:
            raise CreationError(
                f"survivors() found only {len(ranks)} ranks, {format_ranks(sorted(ranks))}, fewer "
                f"than min_ranks={min_ranks}; restart the job, or pass a smaller min_ranks="
            )
        return ranks


def _read_record(scope: Scope) -> Steps[Record | None]:
    return (yield from read_record((yield from scope.read_key())))


def _too_late(world: World) -> CreationError:
    return CreationError(
        f"the other ranks have continued without {world.title(world.rank)}, which arrived "
        f"too late in survivors(); end this process, or start the job again"
    )
