"""Megatron's `hyper_comm_grid`: the core class, and the private spellings of Megatron's callers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch.distributed import ProcessGroup

from hypercomm import grid


class HyperCommGrid(grid.HyperCommGrid):
    """`hypercomm.HyperCommGrid`, whose groups can also be looked up under Megatron's joined names.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
        ...     group = grid.create_pg(["cp", "dp"])
        ...     list(grid._pgs)
        ['dp-cp']
    """

    @property
    def _pgs(self) -> Mapping[str, ProcessGroup | None]:
        """The groups over dims alone, by dims in reversed grid order; a read-only copy."""
        plain = {key: group for key, group in self.pgs.items() if key.name is None}
        return MappingProxyType({"-".join(key.dims[::-1]): group for key, group in plain.items()})
