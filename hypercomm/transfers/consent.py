"""Check before a transfer that all its ranks propose the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from hypercomm.errors import CreationError, OutcomeUnknownError
from hypercomm.layout import RankMapping
from hypercomm.process_groups.agreement.calls import Scope, agree, limit_of, refuse
from hypercomm.process_groups.world import World


def consent(
    world: World,
    mapping: RankMapping,
    tensor: str,
    refusal: BaseException | None = None,
    *,
    entries: Sequence[str] = (),
    effect: str = "nothing was sent",
) -> BaseException | None:
    """Wait until all ranks of a transfer have joined and propose the same one.

    Args:
        world: The world whose ranks the mapping has.
        mapping: The mapping of the transfer.
        tensor: A description of the data that is identical on all ranks.
        refusal: The error that keeps this rank from taking part. The other ranks raise it, and
            this rank does not wait.
        entries: Further descriptions that must be equal on all ranks.
        effect: The consequence of a failure for the data, as the error states it.

    Returns:
        An interrupt that reached this rank although all ranks continue. The caller raises it after
        the transfer.

    Raises:
        PlanMismatchError: Ranks propose different transfers.
        GroupCreationTimeout: Some are missing.
        CreationError: One has failed.
        OutcomeUnknownError: The store is gone, and the other ranks may have continued.
    """
    ranks = _ranks(mapping)
    digest = hashlib.sha256(str(ranks).encode()).hexdigest()[:12]
    scope = Scope(world, f"transfers/{digest}", ranks)
    title = f"transfer of {tensor} by {mapping}" if tensor else f"transfer by {mapping}"
    if refusal is not None:
        refuse(scope, refusal)
        return None
    every = [f"{tensor} by {mapping}", _details(mapping), *entries]
    try:
        return agree(scope, title, lambda: every, limit_of(None, world)).pending
    except CreationError as error:
        if not isinstance(error, OutcomeUnknownError):
            error.args = (f"{effect}: {error}",)
        raise


@lru_cache(maxsize=128)
def _ranks(mapping: RankMapping) -> tuple[int, ...]:
    """Return the ranks of both stages."""
    return tuple(sorted({*mapping.source_ranks, *mapping.target_ranks}))


@lru_cache(maxsize=128)
def _details(mapping: RankMapping) -> str:
    """Return the properties of a mapping that its text leaves out."""
    layouts = hashlib.sha256(f"{mapping.source.to_json()} {mapping.target.to_json()}".encode())
    return (
        f"along={mapping.along!r}, batch_axis={mapping.batch_axis}, shards={mapping.shards}, "
        f"pipeline={mapping.pipeline!r}, layouts {layouts.hexdigest()[:12]}"
    )
