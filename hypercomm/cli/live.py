"""`--on live`: where the ranks of the job that runs are, and which of its processes speaks."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from hypercomm.cli.printing import quiet
from hypercomm.errors import LaunchError, NotationError
from hypercomm.launch.launchers import find_job, none_found
from hypercomm.topology import Topology
from hypercomm.topology.reading import LIVE

_ADVICE = (
    "--on live asks the ranks of a job: start the command as all of them, as in `torchrun "
    "--nproc-per-node 8 --no-python hypercomm {} ...`, with srun or mpirun, or with RANK, "
    "WORLD_SIZE, MASTER_ADDR and MASTER_PORT set on each; or give --on a file, a node list or GPUs "
    "for each host"
)


def machine(on: Sequence[str]) -> Topology | Sequence[str] | None:
    """What `--on` tells of where ranks are.

    Args:
        on: What is given, in order.

    Returns:
        What is given; with `live`, what the ranks tell each other, on rank 0. None on the others,
        which print nothing.

    Raises:
        NotationError: Something stands beside `live`.
        LaunchError: This is no job, or it contradicts itself.
    """
    if LIVE not in on:
        return on
    if len(on) > 1:
        raise NotationError("--on live stands alone: the job tells where its ranks are")
    from hypercomm.joining import join, live_topology

    if find_job(os.environ) is None:
        raise LaunchError(none_found(_ADVICE.format(click.get_current_context().info_name)))
    with quiet(), join(backend="gloo") as job:
        found = live_topology()
    return None if job.rank else found
