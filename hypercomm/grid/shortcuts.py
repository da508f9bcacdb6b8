"""GridShortcuts: what is asked of a grid all day, in few letters."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import LayoutError, UnknownDimError
from hypercomm.grid.dims import GridDims
from hypercomm.grid.interface import GridInterface
from hypercomm.layout.checks import as_int
from hypercomm.layout.parsing import Dims
from hypercomm.layout.text import shown
from hypercomm.process_groups import world
from hypercomm.process_groups.spec import GroupKey

if TYPE_CHECKING:
    from torch.utils.data import Dataset, DistributedSampler


class GridShortcuts(GridInterface):
    """What is asked of a grid all day, in few letters; and what code written to DeviceMesh asks."""

    _by_dims: dict[Any, GridDims]
    """What was asked for before, by how it was spelled."""

    # ---- dims ---------------------------------------------------------------------------------

    def __getitem__(self, dims: Dims) -> GridDims:
        """Return some dims as the calling rank sees them: `grid["tp"]`, `grid["dp", "cp"]`.

        Raises:
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
        """
        try:
            return self._by_dims[dims]
        except (KeyError, TypeError, AttributeError):
            return self._slice(dims)

    def _slice(self, dims: Dims) -> GridDims:
        _, ordered = self._find(dims, None)
        known: dict[Any, GridDims] = self.__dict__.setdefault("_by_dims", {})
        found = known.get(ordered)
        if found is None:
            twin = object.__new__(type(self))  # or the grid would live until it is searched for
            twin.__dict__ = self.__dict__
            found = known.setdefault(ordered, GridDims(twin, ordered))
        if isinstance(dims, str) or (isinstance(dims, tuple) and {*map(type, dims)} == {str}):
            known[dims] = found
        return found

    def __contains__(self, dim: object) -> bool:
        """Tell whether the grid has a dim of this name, or a rank of this number."""
        return dim in self.layout.dim_names if isinstance(dim, str) else dim in self.layout

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.dim_names)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the dims: `dict(grid)` has what `grid[dim]` returns for each."""
        return self.layout.dim_names

    def _ipython_key_completions_(self) -> list[str]:
        return self.dim_names

    # ---- what code written to DeviceMesh asks -------------------------------------------------

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """The names of the dims in DeviceMesh's order, the last one varying fastest."""
        return tuple(reversed(self.layout.dim_names))

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the calling rank's process group of a dim, created on first use.

        Args:
            mesh_dim: Its name, or its position in `mesh_dim_names`; a grid of one dim needs none.
        """
        return self[self._mesh_dim(mesh_dim)].group

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the calling rank's coordinate along a dim, given as for `get_group`."""
        return self[self._mesh_dim(mesh_dim)].rank

    def get_coordinate(self) -> list[int] | None:
        """Return the calling rank's coordinates in the order of `mesh_dim_names`; None outside.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as grid:
            ...     print(grid.mesh_dim_names, grid.get_coordinate(), grid.get_local_rank("dp"))
            ('dp', 'tp') [2, 1] 2
        """
        if not self.is_current_rank_in_grid():
            return None
        return list(reversed(self.coords().values()))

    def _mesh_dim(self, mesh_dim: int | str | None) -> str:
        names = self.mesh_dim_names
        if mesh_dim is None:
            if len(names) > 1:
                raise LayoutError(f"mesh_dim is missing: the grid has the dims {names}; name one")
            return names[0]
        if isinstance(mesh_dim, str):
            return mesh_dim
        if not -len(names) <= as_int(mesh_dim, "mesh_dim") < len(names):
            raise UnknownDimError(f"mesh_dim {mesh_dim} is none of the {len(names)} dims {names}")
        return names[mesh_dim]

    # ---- logs ---------------------------------------------------------------------------------

    def find(self, group: ProcessGroup | None) -> GroupKey | None:
        """Return what a process group is known by in the grid; None where it is none of its own.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid("tp=2,dp=4") as grid:
            ...     print(grid.find(grid["dp"].group))
            dp
        """
        keys = (key for key, held in self.pgs.items() if held is group and group is not None)
        return next(keys, None)

    def log_filter(self) -> logging.Filter:
        """Return a filter that begins each message with the calling rank's coordinates.

        Add it to a handler: `handler.addFilter(grid.log_filter())`. Ranks outside the grid say
        their rank. Formats may ask for `%(coords)s` as well.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> record = logging.LogRecord("", logging.INFO, "", 0, "loss %.1f", (0.5,), None)
            >>> with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as grid:
            ...     _ = grid.log_filter().filter(record)
            ...     print(record.getMessage())
            [tp=1 dp=2] loss 0.5
        """
        return _Coords(self)

    def print_once(self, *values: object, **keywords: Any) -> None:
        """Print as `print` does, on the first rank of the grid alone."""
        if world.rank() == self.layout.ranks[0]:
            print(*values, **keywords)  # noqa: T201 - it is what is asked for

    # ---- work ---------------------------------------------------------------------------------

    def barrier(self, *dims: Dims) -> None:
        """Wait for the ranks of the calling rank's group over some dims; default: the whole grid.

        Every rank of the group must call this.

        Raises:
            RankOutsideError: The calling rank is not in the grid.
        """
        self[dims or self.layout.dim_names].barrier()

    def seed(self, base: int, *dims: Dims) -> int:
        """Return a seed that differs along some dims, and agrees along all others.

        Args:
            base: The seed of the run, at least 0.
            dims: Along which ranks are to draw differently, as along "tp" for dropout in layers
                that are split, and along "dp" for data; none: all ranks agree.

        Returns:
            63 bits, the same in every run and on every machine.

        Raises:
            RankOutsideError: The calling rank is not in the grid.
            LayoutError: `base` is no int of at least 0.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> def seed_of(rank, *dims):
            ...     with fake_world(8, rank=rank), HyperCommGrid("tp=2,dp=4") as grid:
            ...         return grid.seed(1234, *dims)
            >>> seed_of(0, "tp") == seed_of(2, "tp"), seed_of(0, "tp") == seed_of(1, "tp")
            (True, False)
        """
        if as_int(base, "base") < 0:
            raise LayoutError(f"base must be at least 0, got {base}")
        coords = self.coords()
        ordered = self.layout.order_dims(dims) if dims else ()
        told = [f"{dim}={coords[dim]}" for dim in ordered]
        words = np.frombuffer(",".join(told).encode(), np.uint8).tolist()
        state = np.random.SeedSequence([base, *words]).generate_state(1, np.uint64)
        return int(state[0]) >> 1

    def sampler(
        self, dataset: Dataset[Any] | Sequence[Any], *dims: Dims, **keywords: Any
    ) -> DistributedSampler[Any]:
        """Return a sampler that shares a dataset out along some dims, for a DataLoader.

        Ranks that differ only in other dims draw the same items.

        Args:
            dataset: What is sampled.
            dims: Such as "dp".
            keywords: As for `torch.utils.data.DistributedSampler`: shuffle, seed, drop_last.

        Raises:
            RankOutsideError: The calling rank is not in the grid.
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as grid:
            ...     print(list(grid.sampler(range(8), "dp", shuffle=False)))
            [2, 6]
        """
        from torch.utils.data import DistributedSampler

        given = [name for name in ("num_replicas", "rank") if name in keywords]
        if given:
            raise LayoutError(f"{given[0]}={shown(keywords[given[0]])} is what dims say; leave it")
        try:
            len(dataset)  # type: ignore[arg-type]
        except TypeError:
            found = f"dataset must have a length to be shared out, got {shown(dataset)}"
            raise LayoutError(found) from None
        except OverflowError:
            found = f"dataset must have a length that len() can tell, got {shown(dataset)}"
            raise LayoutError(found) from None
        here = self[dims]
        return DistributedSampler(dataset, num_replicas=here.size, rank=here.rank, **keywords)  # type: ignore[arg-type]


class _Coords(logging.Filter):
    """Begins each message with where the calling rank is."""

    def __init__(self, grid: GridInterface) -> None:
        super().__init__()
        self._grid = grid

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "coords"):  # several handlers may have it
            record.coords = coords = self._text()
            coords = coords.replace("%", "%%") if record.args else coords
            record.msg = f"{coords} {record.msg}"
        return True

    def _text(self) -> str:
        grid = self._grid
        if not dist.is_initialized():
            return "[no job]"
        if not grid.is_current_rank_in_grid():
            return f"[rank {world.rank()}]"
        return f"[{' '.join(f'{dim}={index}' for dim, index in grid.coords().items())}]"
