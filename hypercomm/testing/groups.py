"""What process groups a process has: for tests that nothing is left behind."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from hypercomm.process_groups import torch_internals as c10d


def registered_groups() -> set[ProcessGroup]:
    """Return every process group that torch has registered in this process, WORLD included.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(4):
        ...     before = registered_groups()
        ...     with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        ...         group = grid.create_pg("tp")
        ...         registered_groups() - before == {group}
        ...     registered_groups() == before
        True
        True
    """
    return c10d.registered()
