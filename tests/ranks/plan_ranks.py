"""What real ranks have when they create all that a plan lists."""

import contextlib
import os
import socket
from pathlib import Path

import torch.distributed as dist

from hypercomm import HyperCommGrid
from ranks.common import sum_over


def connected_sockets():
    """The sockets of this process that are connected to others, by what Linux calls them."""
    found = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed by now, or connected to nobody
            name = str(entry.readlink())
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as own:
                    own.getpeername()
                found.add(name)
    return found


def what_is_created(sizes, views, keys, share):
    """Create groups; count those that differ, those of several ranks, and new connections.

    Args:
        sizes: The grid's.
        views: Name, sizes and shared dims of each view.
        keys: View and dims of each group.
        share: As for `HyperCommGrid`.
    """
    with HyperCommGrid(sizes, share=share) as grid:
        for name, view_sizes, shared in views:
            grid.register_view(name, view_sizes, shared_dims=shared)
        dist.barrier()
        before = connected_sockets()
        requests = [{"dims": dims, "view": view} for view, dims in keys]
        groups = [group for request in requests for group in grid.create_pgs([request])]
        distinct = {id(group): group for group in groups}.values()
        for group in distinct:
            sum_over(group)
        dist.barrier()
        after = connected_sockets()
        dist.barrier()  # who leaves closes the other ends, too
        return (
            len(distinct),
            sum(group.size() > 1 for group in distinct),
            len(after - before),
        )
