"""`--on live`: where the ranks of the job that runs are, and which of its processes speaks."""

from __future__ import annotations

from collections.abc import Sequence

from hypercomm.cli.printing import quiet
from hypercomm.errors import NotationError
from hypercomm.topology import Topology
from hypercomm.topology.reading import LIVE


def machine(on: Sequence[str]) -> Topology | Sequence[str] | None:
    """What `--on` tells of where ranks are.

    Args:
        on: What is given, in order.

    Returns:
        What is given; with `live`, what the ranks tell each other, on rank 0. None on the others,
        which print nothing.

    Raises:
        NotationError: Something stands beside `live`.
    """
    if LIVE not in on:
        return on
    if len(on) > 1:
        raise NotationError("--on live stands alone: the job tells where its ranks are")
    from hypercomm.joining import join, live_topology

    with quiet(), join(backend="gloo", need_launcher=True) as job:
        found = live_topology()
    return None if job.rank else found
