"""Ranks on hosts: which groups cross from one host to another."""

from __future__ import annotations

import numpy as np

from hypercomm.layout.groups.rank_groups import RankGroups
from hypercomm.layout.reading.checks import positive


def hosts_touched(groups: RankGroups, ranks_per_host: int) -> tuple[int, int]:
    """Count the hosts that a group reaches, host k holding ranks k*n .. (k+1)*n - 1.

    Args:
        groups: The groups to look at.
        ranks_per_host: The number n of ranks on each host.

    Returns:
        The smallest and the largest number of hosts, over all groups.

    Example:
        >>> from hypercomm import RankLayout
        >>> layout = RankLayout.parse("tp=4,dp=6")
        >>> hosts_touched(layout.groups("tp"), 8), hosts_touched(layout.groups("dp"), 8)
        ((1, 1), (3, 3))
    """
    positive(ranks_per_host, "ranks_per_host")
    hosts = groups.to_array() // ranks_per_host
    if not groups.is_sorted:
        hosts.sort(axis=1)
    counts = 1 + np.count_nonzero(np.diff(hosts, axis=1), axis=1)
    return int(counts.min()), int(counts.max())
