"""All ranks of a small job at once, in one process, with numbers: on torch's LocalTensorMode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import LayoutError, SimulationError
from hypercomm.launch.run import check_call
from hypercomm.layout.checks import as_world_size
from hypercomm.layout.text import shown
from hypercomm.process_groups import c10d
from hypercomm.process_groups.planned import plans_of
from hypercomm.testing.fake import fake_world

_MOST = 4096
"""Ranks: each has a shard of every tensor, 5 KB of random state and its turn in each operation."""


@attrs.frozen(repr=False)
class LocalRanks:
    """The ranks of a `local_ranks` block: takes tensors apart into shards, and makes them of such.

    Attributes:
        world_size: The number of ranks.
    """

    world_size: int
    _tensors: c10d.LocalTensors

    def each(self, function: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Make a tensor whose shard of each rank is what a function returns for that rank.

        Args:
            function: Called with each rank; returns a tensor, which is copied without its past, or
                one with shards, of which that rank's is copied.

        Raises:
            LaunchError: `function` cannot be called.
            SimulationError: It returns no tensor, or tensors of different dtypes, devices or
                numbers of axes.

        Example:
            >>> with local_ranks(3) as ranks:
            ...     tensor = ranks.each(lambda rank: torch.tensor([rank, 10]))
            ...     print({rank: shard.tolist() for rank, shard in ranks.shards(tensor).items()})
            {0: [0, 10], 1: [1, 10], 2: [2, 10]}
        """
        check_call(function, ())
        with self._tensors.paused():
            made = [function(rank) for rank in range(self.world_size)]
        shards: dict[int, torch.Tensor] = {}
        kinds: dict[str, int] = {}
        for rank, returned in enumerate(made):
            of_all = self._tensors.shards_of(returned)
            shard = returned if of_all is None else of_all.get(rank)
            if shard is None or type(shard) not in {torch.Tensor, torch.nn.Parameter}:
                raise SimulationError(
                    f"function must return a plain torch.Tensor for each rank, or one of local "
                    f"ranks, got {shown(shard)} for rank {rank}"
                )
            with self._tensors.paused():
                shards[rank] = shard.detach().clone()  # else ranks could share one storage
            kind = f"{shard.dtype} on {shard.device} with {shard.dim()} axes"
            kinds.setdefault(kind, rank)
        if len(kinds) > 1:
            (one, first), (other, second) = list(kinds.items())[:2]
            raise SimulationError(
                f"function must return tensors of one dtype, device and number of axes, got "
                f"{one} for rank {first} and {other} for rank {second}"
            )
        return self._tensors.join(shards)

    def shards(self, tensor: torch.Tensor) -> Mapping[int, torch.Tensor]:
        """Return the shards of a tensor, by rank: they themselves, not copies.

        Raises:
            SimulationError: `tensor` has none.
        """
        shards = self._tensors.shards_of(tensor)
        if shards is None:
            raise SimulationError(
                f"tensor must have a shard for each rank, got {shown(tensor)}; make it in the "
                f"local_ranks() block, or with each()"
            )
        return shards

    def __repr__(self) -> str:
        return f"<{self.world_size} local ranks>"


@contextlib.contextmanager
def local_ranks(world_size: int, rank: int = 0) -> Iterator[LocalRanks]:
    """Be all ranks of a fake world at once: collectives over groups of grids give real numbers.

    Every tensor that is made in the block has a shard for each rank, and an operation is done to
    all of them. A collective over a process group, which is that of `rank` as in any fake world,
    is done for every group of its kind: for all "tp" groups of its grid, say, views' groups and
    derived ones as well. Ranks in none of them keep what they have. All groups and grids are as in
    `fake_world`, and gone in the end; the random numbers of torch on the CPU are then as before.

    What works, over WORLD and the groups of grids: all_reduce, all_gather, all_gather_into_tensor,
    reduce, reduce_scatter, reduce_scatter_tensor, broadcast, scatter from `rank`, all_to_all,
    all_to_all_single with equal splits, barrier, functional collectives without autograd, and so
    DTensor on a grid's mesh. What does not, and raises: point-to-point calls, gather, collectives
    of objects or of tensors that were made outside of the block, and groups that no grid has.
    What a program does otherwise on each rank (`dist.get_rank()`, `grid.coords()`), it does as on
    `rank` alone: use `each`. Operations are done rank by rank, so that this is slow.

    Args:
        world_size: The number of ranks of the job, at most 4096.
        rank: The rank whose groups `create_pg` and `get_pg` return.

    Yields:
        The ranks, which make tensors and read them.

    Raises:
        LayoutError: `world_size` or `rank` is no int, or out of range.
        WorldSizeError: torch.distributed is initialised already, as it is in another such block.
        CreationError: This torch has no local ranks; 2.10 and newer have.
        SimulationError: torch's LocalTensorMode is entered already; and, within the block, from a
            collective that would not give what real ranks get.

    Example:
        The ranks of a tp=2,dp=2 grid each have their number; dp groups are (0, 2) and (1, 3).

        >>> import torch.distributed as dist
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import local_ranks
        >>> with local_ranks(4) as ranks, HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        ...     tensor = ranks.each(lambda rank: torch.tensor([float(rank)]))
        ...     dist.all_reduce(tensor, group=grid.create_pg("dp"))
        ...     print([shard.item() for shard in ranks.shards(tensor).values()])
        [2.0, 4.0, 2.0, 4.0]
    """
    world_size = as_world_size(world_size)
    if world_size > _MOST:
        raise LayoutError(
            f"world_size must be at most {_MOST}, got {world_size}; hypercomm.testing's "
            f"fake_world() and simulate() stand for larger jobs, without numbers"
        )
    with (
        fake_world(world_size, rank),
        torch.random.fork_rng(devices=[]),
        c10d.local_tensors(world_size, _groups_like) as tensors,
    ):
        yield LocalRanks(world_size, tensors)


def _groups_like(group: ProcessGroup) -> Sequence[Sequence[int]]:
    """Find the groups of a process group's kind."""
    if group is dist.group.WORLD:
        return [range(dist.get_world_size())]
    plans = plans_of(group)
    if not plans:
        raise SimulationError(
            f"no grid has the process group of ranks {shown(dist.get_process_group_ranks(group))}, "
            f"so nothing tells which ones other ranks have in its place: create it by a grid, or "
            f"give its DeviceMesh to HyperCommGrid.from_device_mesh() and keep that grid"
        )
    kinds = {frozenset(planned.groups): planned for planned in plans}
    if len(kinds) > 1:
        one, other = list(kinds.values())[:2]
        raise SimulationError(
            f"this rank has one process group over {one.key.in_words()} and over "
            f"{other.key.in_words()}, where other ranks have two; create them with share='never'"
        )
    return list(plans[0].groups)
