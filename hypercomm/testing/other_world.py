"""A job that torch.distributed sees in place of the real one: simulated, or fake."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hypercomm.process_groups.torch_internals.backends import backend_config, default_timeout

Create = Callable[[str, tuple[int, ...], str, timedelta, str], Any]

_MESHES = "torch.distributed.device_mesh"
_TABLES = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"),
)


class OtherWorld:
    """A job in place of the real one, as one of its ranks sees it.

    torch keeps the state of a job in one object, which this replaces.

    Args:
        make_world: Returns a stand-in for WORLD, a new one for each job.
        ranks: Maps each rank to itself.
        backend: The backend of WORLD.
        create: Returns a stand-in for a group, given its name, ranks, backend, timeout and
            description.
        store: The store that the ranks share; None where each rank is simulated alone.
        end: Called with each group that is destroyed.
        functions: Replacements for functions of torch.distributed, by name.
    """

    def __init__(
        self,
        make_world: Callable[[], Any],
        ranks: Mapping[int, int],
        backend: str,
        create: Create,
        store: object = None,
        end: Callable[[Any], None] = lambda _group: None,
        functions: Mapping[str, object] | None = None,
    ) -> None:
        self._make_world = make_world
        self._ranks = ranks
        self._backend = backend
        self._create = create
        self._store = store
        self._end_group = end
        self._functions = functions
        self._jobs = 0
        tables: dict[str, Any] = {table: {} for table in _TABLES}
        marks = {"is_of_another_world": True, "has_other_ranks": store is not None}
        ours = {"group_count": 0, **marks, **tables}
        self._torch: Any = type("OtherWorld", (type(dist.distributed_c10d._world),), ours)()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Show this job to torch.distributed within a `with` block, already initialised."""
        with other_worlds(lambda: self, functions=self._functions):
            self.show()
            self.begin()
            yield

    def show(self) -> None:
        """Show this job to torch.distributed, within an `other_worlds` block."""
        c10d: Any = dist.distributed_c10d
        c10d._world = self._torch

    def groups(self) -> Iterator[tuple[Any, str, str]]:
        """Yield the groups of this rank, with their names and backends."""
        for group, (backend, _) in self._torch.pg_map.items():
            if group is not self._torch.default_pg:
                yield group, self._torch.pg_names[group], backend

    def begin(
        self, backend: str | None = None, *_: object, store: object = None, **__: object
    ) -> None:
        """Replace `torch.distributed.init_process_group`."""
        if self._torch.default_pg is None:
            self._store = store or self._store
            self._torch.default_pg = self._make_world()
            self._torch.group_count = 1  # as torch does, whose WORLD is group 0
            self._jobs += 1
        self._file(self._torch.default_pg, "0", str(backend or self._backend), self._ranks)

    def end(self, group: Any = None) -> None:
        """Replace `torch.distributed.destroy_process_group`."""
        whole = group is None or group is self._torch.default_pg
        for known in list(self._torch.pg_map) if whole else [group]:
            self._end_group(known)
            self._torch.tags_to_pg.pop(self._torch.pg_to_tag.get(known), None)
            for table in _TABLES:
                getattr(self._torch, table).pop(known, None)
        if whole:
            self._torch.default_pg = None
            self._torch.group_count = 0

    def group_named(self, name: str) -> Any:
        """Return the group of a name."""
        return next(group for group, known in self._torch.pg_names.items() if known == name)

    def _file(self, group: Any, name: str, backend: str, ranks: Mapping[int, int]) -> None:
        self._torch.pg_map[group] = (backend, self._store)
        self._torch.pg_names[group] = name
        self._torch.pg_group_ranks[group] = ranks
        self._torch.pg_backend_config[group] = _config(backend, *dist.Backend.backend_list)
        self._torch.pg_to_tag[group] = f"ptd:{name}"
        self._torch.tags_to_pg[f"ptd:{name}"] = [group]

    def new_group(
        self,
        group_size: int,
        group_rank: int | None,
        members: Sequence[int],
        backend: str,
        _store: object,
        group_name: str,
        *,
        timeout: timedelta = timedelta(0),
        group_desc: str | None = None,
        **_: object,
    ) -> tuple[Any, None]:
        """Create one group; the arguments are those of torch's helper.

        Raises:
            ValueError: The name is taken.
        """
        if group_name in self._torch.pg_names.values():
            raise ValueError(f"the group name {group_name} is taken")
        if group_rank is None:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        ranks, backend = tuple(members), str(backend)
        # torch counts groups anew in each job, where they are others.
        is_told = self._jobs == 1 or self._store is not None
        told = group_name if is_told else f"{group_name} (job {self._jobs})"
        group = self._create(told, ranks, backend, timeout, group_desc or "undefined")
        positions = dict(zip(ranks, range(group_size), strict=True))
        self._file(group, group_name, backend, positions)
        return group, None


@functools.lru_cache(maxsize=64)
def _config(backend: str, *_known: str) -> Any:
    """Return the config of a backend, which depends on the registered backends."""
    return backend_config(backend)


@contextlib.contextmanager
def other_worlds(
    shown: Callable[[], OtherWorld],
    gloo: object = None,
    functions: Mapping[str, object] | None = None,
) -> Iterator[None]:
    """Show other jobs to torch.distributed within a `with` block, one at a time.

    Args:
        shown: Returns the current job; a caller that changes it calls its `show`.
        gloo: A replacement for torch's gloo class; None leaves it.
        functions: Replacements for further functions, by name; by default barriers do nothing.
    """

    def new_group(*given: Any, **named: Any) -> Any:
        return shown().new_group(*given, **named)

    stands_in: dict[str, object] = {
        "_world": dist.distributed_c10d._world,
        "_new_process_group_helper": new_group,
        "_store_based_barrier": _do_nothing,
        "_get_default_timeout": default_timeout,  # which warns of no backend that is not built
        "init_process_group": lambda *given, **named: shown().begin(*given, **named),
        "destroy_process_group": lambda group=None: shown().end(group),
        "barrier": _do_nothing,
        "monitored_barrier": _do_nothing,
        "_resolve_process_group": lambda name: shown().group_named(name),
        "_get_msg_dict": lambda *_, **__: {},  # of a logger, which would ask NCCL's version
    }
    stands_in.update(functions or {})
    if gloo is not None:
        stands_in["ProcessGroupGloo"] = gloo
    c10d, meshes = dist.distributed_c10d, importlib.import_module(_MESHES)
    with contextlib.ExitStack() as stack:
        for module in (c10d, dist, dist.c10d_logger, meshes):
            for name, value in stands_in.items():
                if hasattr(module, name):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, value)
        yield


def new_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Create a gloo group as torch's helper does, with the current class."""
    return dist.distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _do_nothing(*_: object, **__: object) -> None:
    pass
