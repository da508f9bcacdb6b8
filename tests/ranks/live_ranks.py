"""What ranks of a job find of where they are."""

import os
import socket

import torch.distributed as dist

from hypercomm import live_topology


def topologies(hosts, *jobs):
    """The topologies that each rank finds, on a host and at addresses that stand in for its own."""
    rank = dist.get_rank()
    socket.gethostname = lambda: hosts[rank]
    found = []
    for addresses in jobs:
        os.environ.pop("SLURM_TOPOLOGY_ADDR", None)
        os.environ["SLURM_TOPOLOGY_ADDR_PATTERN"] = "switch.switch.node"
        if addresses[rank] is not None:
            os.environ["SLURM_TOPOLOGY_ADDR"] = addresses[rank]
        found.append(live_topology().to_dict()["levels"])
    return found
