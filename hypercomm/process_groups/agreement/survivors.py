"""The ranks that a grid continues with: without ranks that are lost, or with more that joined."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial

from hypercomm.errors import CreationError, GroupCreationTimeout, LateRankError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_ranks
from hypercomm.process_groups.agreement.calls import Scope, agree, ask
from hypercomm.process_groups.agreement.driver import run
from hypercomm.process_groups.agreement.grid import GridAgreement
from hypercomm.process_groups.agreement.protocol import Record, read_record
from hypercomm.process_groups.world import World


def find_survivors(
    world: World | None,
    agreement: GridAgreement,
    layout: RankLayout,
    limit_s: float,
    min_ranks: int,
) -> tuple[int, ...]:
    """Return the ranks of a grid that arrive within a time; the same on all of them.

    The first rank whose time is over decides, by the outcome of a round of all ranks. The ranks
    that it names confirm with each other that they are there.

    Args:
        world: The world of the grid; None before there is one.
        agreement: Of the grid.
        layout: The grid's.
        limit_s: How long to wait, for the first and for each further round.
        min_ranks: The fewest ranks that may continue.

    Raises:
        CreationError: The others continue without this rank, or too few are left.
    """
    ranks = tuple(layout.ranks)
    while world is not None:
        digest = hashlib.sha256(json.dumps(sorted(ranks)).encode()).hexdigest()[:12]
        scope = agreement.scope(world, f"survivors {digest}", ranks)
        if scope.is_alone:
            break
        found = ask(world, "survivors()", partial(_read, scope), limit_s)
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
            f"survivors() found {len(ranks)} ranks, {format_ranks(sorted(ranks))}, and "
            f"min_ranks={min_ranks}; restart the job, or pass a smaller min_ranks"
        )
    return ranks


def _read(scope: Scope) -> Record | None:
    return run(read_record(scope.key), scope.world.store)


def _too_late(world: World) -> CreationError:
    return CreationError(
        f"the other ranks have continued without {world.title(world.rank)}, which arrived "
        f"too late in survivors(); end this process, or start the job again"
    )


def continuing_scope(agreement: GridAgreement, world: World, ranks: Sequence[int]) -> Scope:
    """Return the scope of the ranks that a grid continues with.

    All such calls of a grid use one record, so that ranks with other lists see the difference, and
    the first list that ranks agree on excludes all others.
    """
    return agreement.scope(world, "continues", tuple(ranks), is_fenced=True)
