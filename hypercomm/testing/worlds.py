"""A fake world on torch's fake backend, and jobs that replace the state of torch.distributed."""

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
    """The state of torch.distributed on one rank of another job.

    torch keeps the state of a job in a global object of its class `_World`. An `OtherWorld` takes
    the place of that object.

    Args:
        make_world: A function that returns a replacement for WORLD. It is called once for each
            `init_process_group`.
        ranks: A dict that maps each rank of the job to itself.
        backend: The backend of WORLD.
        create: A function that returns a replacement for a group, from its name, ranks, backend,
            timeout and description.
        store: The store that the ranks share, or None if each rank is simulated alone.
        end: A function to call with each group that is destroyed.
    """

    is_of_another_world = True
    default_pg: Any = None
    group_count = 0
    # In torch's class, these are properties with global state. Plain attributes replace them.
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
        self._make_world = make_world
        self._create = create
        self._end_group = end
        self._ranks = ranks
        self._backend = backend
        self._store = store
        self._jobs = 0
        for table in _TABLES:
            setattr(self, table, {})

    def show(self) -> None:
        """Make this the current job of torch.distributed, within an `other_worlds` block."""
        _c10d._world = self

    def begin(
        self, backend: str | None = None, *_: object, store: object = None, **__: object
    ) -> None:
        """Replace `torch.distributed.init_process_group`."""
        if self.default_pg is None:
            self._store = store or self._store
            self.default_pg = self._make_world()
            self.group_count = 1  # torch counts WORLD as group 0
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
            self.default_pg = None
            self.group_count = 0

    def group_named(self, name: str) -> Any:
        """Return the group with a name."""
        return next(group for group, known in self.pg_names.items() if known == name)

    def _register(self, group: Any, name: str, backend: str, ranks: Mapping[int, int]) -> None:
        self.pg_map[group] = (backend, self._store)
        self.pg_names[group] = name
        self.pg_group_ranks[group] = ranks
        self.pg_backend_config[group] = torchdist.backend_config(backend)
        self.pg_to_tag[group] = f"ptd:{name}"
        self.tags_to_pg[f"ptd:{name}"] = [group]

    def new_group(self, *args: Any, **options: Any) -> tuple[Any, None]:
        """Create one group, with the arguments of torch's `_new_process_group_helper`.

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
        # torch restarts its count of groups in each job, so names repeat in a second job.
        is_unique = self._jobs == 1 or self._store is not None
        unique = name if is_unique else f"{name} (job {self._jobs})"
        timeout = options.get("timeout", timedelta(0))
        description = options.get("group_desc") or "undefined"
        group = self._create(unique, members, str(backend), timeout, description)
        self._register(group, name, str(backend), positions)
        return group, None


@functools.cache
def _members(ranks: tuple[int, ...]) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return the members and their positions. The result is cached, so simulated ranks share it."""
    return ranks, {rank: position for position, rank in enumerate(ranks)}


@contextlib.contextmanager
def other_worlds(
    shown: Callable[[], OtherWorld], functions: Mapping[str, object] | None = None
) -> Iterator[None]:
    """Replace the job of torch.distributed within a `with` block by other jobs, one at a time.

    Args:
        shown: A function that returns the current job. A caller that changes the job must call
            the `show` method of the new job.
        functions: Replacements for further names of torch.distributed.
    """
    replaced: dict[str, object] = {
        "_world": _c10d._world,
        "_new_process_group_helper": lambda *args, **named: shown().new_group(*args, **named),
        "_store_based_barrier": lambda *_, **__: None,
        # torch's function warns about backends that are not built.
        "_get_default_timeout": torchdist.default_timeout,
        "init_process_group": lambda *args, **named: shown().begin(*args, **named),
        "destroy_process_group": lambda group=None: shown().end(group),
        "_resolve_process_group": lambda name: shown().group_named(name),
        "_get_msg_dict": lambda *_, **__: {},  # torch's logger would need NCCL's version
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

    All groups of a grid are fake in the block, whatever their backend is. Collectives on the fake
    backend return immediately and do not move data, so a fake world can show the groups of a rank,
    but not whether ranks can communicate. The fake job and its groups end with the block.

    Args:
        world_size: The number of ranks of the job, at most 2**24.
        rank: The rank of this process.
        parts: The number of ranks of each part, by name, if the job consists of joined jobs, as in
            `join_world`.
        timeout: The timeout of the job. Default: torch's.

    Yields:
        The world.

    Raises:
        LayoutError: `world_size` or `rank` is not an int, or is out of range, or the sizes of the
            parts do not add up to `world_size`.
        GroupOptionsError: `timeout` is not a positive timedelta.
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
        raise LayoutError(
            f"parts={short_repr(parts)} contains {sum(parts.values())} ranks, but world_size is "
            f"{world_size}"
        )
    if dist.is_initialized():  # a simulated job would ignore the fake job
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
    """Return the process groups that torch has registered in this process, including WORLD.

    Tests can check with this function that no group is left over.

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
