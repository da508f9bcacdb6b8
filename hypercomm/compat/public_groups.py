"""Process groups by torch's public functions alone, where torch has no default group.

Unit tests of legacy code mock `torch.distributed`: its functions answer, and there is no job that
anything else could be asked of. They are called as that code calls them, for every group.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.layout import RankGroups


def is_all_there_is() -> bool:
    """Tell whether torch has no default group."""
    return dist.group.WORLD is None


def is_mocked() -> bool:
    """Tell whether `new_subgroups_by_enumeration` is another function than when this was loaded."""
    return dist.new_subgroups_by_enumeration is not _TORCHS


_TORCHS = dist.new_subgroups_by_enumeration


def create(
    groups: RankGroups, backend: str | None, timeout: timedelta | None
) -> ProcessGroup | None:
    """Create groups by `torch.distributed.new_group`, one after the other.

    Args:
        groups: Their ranks.
        backend: As the caller gave it, None included.
        timeout: The same.

    Returns:
        The calling rank's.
    """
    own, rank = None, dist.get_rank()
    for ranks in groups:
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        own = group if rank in ranks else own
    return own
