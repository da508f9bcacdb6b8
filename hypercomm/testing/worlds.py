"""A fake world on torch's fake backend, and a job that replaces the state of torch.distributed."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from unittest import mock

import attrs
import torch.distributed as dist

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_int, as_world_size
from hypercomm.layout.text import short_repr
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.options import check_timeout
from hypercomm.process_groups.world import World, current, note

_c10d: Any = dist.distributed_c10d
_TABLES = ["pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"]


class OtherWorld(_c10d._World):  # type: ignore[misc]
    """A job in place of the real one, as one of its ranks sees it.

    torch keeps the state of a job in one object of its class `_World`, which this replaces.

    Args:
        make_world: Returns a replacement for WORLD, a new one for each job.
        ranks: Maps each rank to itself.
        backend: The backend of WORLD.
        create: Returns a replacement for a group, given its name, ranks, backend, timeout and
            description.
        store: The store that the ranks share; None if each rank is simulated alone.
        end: Called with each group that is destroyed.
    """

    is_of_another_world = True
    default_pg: Any = None
    group_count = 0
    # Plain attributes in place of properties of torch's class, whose state is global.
    pg_map = pg_names = pg_group_ranks = pg_backend_config = tags_to_pg = pg_to_tag = default_pg

    def __init__(
        self,
        make_world: Callable[[], Any],
        ranks: Mapping[int, int],
        backend: str,
        create: Callable[[str, tuple[int, ...], str, timedelta, str], Any],
        store: object = None,
        end: Callable[[Any], None] = lambda _group: None,
    ) -> None:
        super().__init__()
        self.has_other_ranks = store is not None
        self._make_world, self._create, self._end_group = make_world, create, end
        self._ranks, self._backend, self._store = ranks, backend, store
        self._jobs = 0
        for table in _TABLES:
            setattr(self, table, {})

    def show(self) -> None:
        """Show this job to torch.distributed, within an `other_worlds` block."""
        _c10d._world = self

    def begin(
        self, backend: str | None = None, *_: object, store: object = None, **__: object
    ) -> None:
        """Replace `torch.distributed.init_process_group`."""
        if self.default_pg is None:
            self._store = store or self._store
            self.default_pg = self._make_world()
            self.group_count = 1  # as torch does, whose WORLD is group 0
            self._jobs += 1
        self._register(self.default_pg, "0", str(backend or self._backend), self._ranks)

    def end(self, group: Any = None) -> None:
        """Replace `torch.distributed.destroy_process_group`."""
        is_whole = group is None or group is self.default_pg
        for known in list(self.pg_map) if is_whole else [group]:
            self._end_group(known)
            self.tags_to_pg.pop(self.pg_to_tag.get(known), None)
            for table in _TABLES:
                getattr(self, table).pop(known, None)
        if is_whole:
            self.default_pg, self.group_count = None, 0

    def group_named(self, name: str) -> Any:
        """Return the group of a name."""
        return next(group for group, known in self.pg_names.items() if known == name)

    def _register(self, group: Any, name: str, backend: str, ranks: Mapping[int, int]) -> None:
        self.pg_map[group] = (backend, self._store)
        self.pg_names[group] = name
        self.pg_group_ranks[group] = ranks
        self.pg_backend_config[group] = torchdist.backend_config(backend)
        self.pg_to_tag[group] = f"ptd:{name}"
        self.tags_to_pg[f"ptd:{name}"] = [group]

    def new_group(self, *args: Any, **options: Any) -> tuple[Any, None]:
        """Create one group; the arguments are those of torch's `_new_process_group_helper`.

        Raises:
            ValueError: The name is taken.
        """
        _, position, ranks, backend, *more = args
        name = options["group_name"] if "group_name" in options else more[1]
        if name in self.pg_names.values():
            raise ValueError(f"the group name {name} is taken")
        if position is None:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        members, positions = _members(tuple(ranks))
        # torch counts groups anew in each job, so a second job has other groups of the same names.
        is_unique = self._jobs == 1 or self._store is not None
        unique = name if is_unique else f"{name} (job {self._jobs})"
        timeout, description = options.get("timeout", timedelta(0)), options.get("group_desc")
        group = self._create(unique, members, str(backend), timeout, description or "undefined")
        self._register(group, name, str(backend), positions)
        return group, None


@functools.cache
def _members(ranks: tuple[int, ...]) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return the members with their positions; all simulated members share one tuple and dict."""
    return ranks, {rank: position for position, rank in enumerate(ranks)}


@contextlib.contextmanager
def other_worlds(
    shown: Callable[[], OtherWorld], functions: Mapping[str, object] | None = None
) -> Iterator[None]:
    """Show other jobs to torch.distributed within a `with` block, one at a time.

    Args:
        shown: Returns the current job; a caller that changes it calls its `show`.
        functions: Replacements for further names of torch.distributed.
    """
    replaced: dict[str, object] = {
        "_world": _c10d._world,
        "_new_process_group_helper": lambda *args, **named: shown().new_group(*args, **named),
        "_store_based_barrier": lambda *_, **__: None,
        # torch's function warns of backends that are not built.
        "_get_default_timeout": torchdist.default_timeout,
        "init_process_group": lambda *args, **named: shown().begin(*args, **named),
        "destroy_process_group": lambda group=None: shown().end(group),
        "_resolve_process_group": lambda name: shown().group_named(name),
        "_get_msg_dict": lambda *_, **__: {},  # of a logger, which asks for NCCL's version
        **(functions or {}),
    }
    meshes = importlib.import_module("torch.distributed.device_mesh")
    with contextlib.ExitStack() as stack:
        stack.callback(_members.cache_clear)
        for module in (_c10d, dist, dist.c10d_logger, meshes):
            for name, value in replaced.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield


# ---- a fake world -------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_world(
    world_size: int,
    rank: int = 0,
    *,
    parts: Mapping[str, int] | None = None,
    timeout: timedelta | None = None,
) -> Iterator[World]:
    """Make torch.distributed act as one rank of a large job within a `with` block.

    All groups of a grid are fake in it, whatever backend they ask for. Collectives on the fake
    backend return immediately and move nothing: a fake world shows which groups a rank is a
    member of, not that the ranks can communicate. The fake job and its groups end with the block.

    Args:
        world_size: The number of ranks of the job, at most 2**24.
        rank: The rank of this process.
        parts: The number of ranks of each part, by its name, as `join_world` takes them.
        timeout: The timeout of the job; default: torch's.

    Yields:
        The world.

    Raises:
        LayoutError: `world_size` or `rank` is not an int, or is out of range, or the parts have
            other ranks.
        GroupOptionsError: `timeout` is not a duration.
        ValueError: torch.distributed is already initialised.
        ImportError: The installed torch has no fake backend.

    Example:
        >>> import torch.distributed as dist
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(4096, rank=7):
        ...     dist.get_rank(), dist.get_world_size()
        (7, 4096)
        >>> dist.is_initialized()
        False
        >>> from hypercomm import GridSet
        >>> with fake_world(12, rank=9, parts={"trainer": 8, "engine": 4}) as world:
        ...     with GridSet({"trainer": "tp=4,dp=2", "engine": "tp=4"}, world=world) as grids:
        ...         print(world.title(9), grids["engine"].coords())
        engine rank 1 of 4 {'tp': 1}
    """
    as_world_size(world_size)
    check_timeout(timeout)
    as_int(rank, "rank", 0, world_size - 1)
    if parts is not None and sum(parts.values()) != world_size:
        raise LayoutError(f"parts {short_repr(parts)} have not the {world_size} ranks of the world")
    if dist.is_initialized():  # a simulated job would ignore that another one begins
        raise ValueError("torch.distributed is already initialised; call fake_world() before that")
    fake: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    store = fake.FakeStore()  # importing the module has registered the backend
    dist.init_process_group("fake", store=store, world_size=world_size, rank=rank, timeout=timeout)
    world = attrs.evolve(current(), parts=dict(parts or {}))
    note(world, torchdist.world_group())
    try:
        yield world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def registered_groups() -> set[dist.ProcessGroup]:
    """Return the process groups of this process, WORLD included; tests check that none is left.

    Returns:
        The groups that torch has registered.

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
    return torchdist.registered()
