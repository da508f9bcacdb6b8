"""Before a transfer, its ranks agree that all of them make the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from hypercomm.errors import CreationError, OutcomeUnknownError, TransferMismatchError
from hypercomm.layout import RankMapping
from hypercomm.process_groups.agreement.calls import Scope, agree, limit_of, refuse
from hypercomm.process_groups.job import current


def consent(
    mapping: RankMapping,
    tensor: str,
    refusal: BaseException | None = None,
    *,
    entries: Sequence[str] = (),
    effect: str = "nothing was sent",
) -> BaseException | None:
    """Wait until all ranks of a transfer have joined, and propose the same one.

    Args:
        mapping: The mapping of the transfer.
        tensor: What it moves, as all ranks describe it alike.
        refusal: Why this rank cannot take part; the others raise it, and nobody is waited for.
        entries: What else must be equal on all ranks.
        effect: What a failure means for the data, for the error.

    Returns:
        What interrupted this rank although all continue: to be raised after the transfer.

    Raises:
        TransferMismatchError: Ranks make different transfers, one refuses, or ranks are missing.
        OutcomeUnknownError: The store is gone, and the other ranks may have continued.
    """
    job, ranks = current(), _ranks(mapping)
    digest = hashlib.sha256(str(ranks).encode()).hexdigest()[:12]
    scope = Scope(job, f"transfers/{digest}", ranks)
    title = f"transfer of {tensor} by {mapping}" if tensor else f"transfer by {mapping}"
    if refusal is not None:
        refuse(scope, refusal)
        return None
    every = [f"{tensor} by {mapping}", _details(mapping), *entries]
    try:
        return agree(scope, title, lambda: every, limit_of(None)).pending
    except OutcomeUnknownError:
        raise
    except CreationError as error:
        raise TransferMismatchError(f"{effect}: {error}") from error


@lru_cache(maxsize=128)
def _ranks(mapping: RankMapping) -> tuple[int, ...]:
    """Return the ranks of both stages."""
    return tuple(sorted({*mapping.source_ranks, *mapping.target_ranks}))


@lru_cache(maxsize=128)
def _details(mapping: RankMapping) -> str:
    """Return what the text of a mapping leaves out."""
    layouts = hashlib.sha256(f"{mapping.source.to_json()} {mapping.target.to_json()}".encode())
    return (
        f"along={mapping.along!r}, batch_axis={mapping.batch_axis}, shards={mapping.shards}, "
        f"pipeline={mapping.pipeline!r}, layouts {layouts.hexdigest()[:12]}"
    )
