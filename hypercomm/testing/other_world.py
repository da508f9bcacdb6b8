"""A job that torch.distributed sees in place of the real one: simulated, or fake."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hypercomm.errors import CreationError
from hypercomm.process_groups.torch_internals.backends import backend_config, default_timeout

Create = Callable[[str, tuple[int, ...], str, timedelta, str], Any]

_MESHES = "torch.distributed.device_mesh"
_TABLES = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"),
)


class OtherWorld:
    """Another job, as one of its ranks sees it: `create` makes what stands in for a group.

    torch keeps all that it knows of a job in one object, and lets tests of its own replace that.

    Args:
        make_world: Returns what stands in for WORLD: each job has one of its own.
        ranks: Maps each rank to itself.
        backend: The backend of WORLD.
        create: Called with the name, the ranks, the backend, the timeout and the description of
            each group of this rank.
        store: Where the ranks meet; None where there are no others.
        end: Called with each group that is destroyed.
        functions: What stands in for functions of torch.distributed, by name, when it is entered.
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
        self._torch: Any = type("OtherWorld", (type(_torchs_world()),), ours)()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be what torch.distributed sees within a `with` block, initialised from the beginning.

        Raises:
            CreationError: This torch keeps what it knows elsewhere.
        """
        with other_worlds(lambda: self, functions=self._functions):
            self.show()
            self.begin()
            yield

    def show(self) -> None:
        """Be the one that torch.distributed sees, of those of an `other_worlds` block."""
        c10d: Any = dist.distributed_c10d
        c10d._world = self._torch

    def groups(self) -> Iterator[tuple[Any, str, str]]:
        """List the groups of this rank, with their names and backends."""
        for group, (backend, _) in self._torch.pg_map.items():
            if group is not self._torch.default_pg:
                yield group, self._torch.pg_names[group], backend

    def begin(
        self, backend: str | None = None, *_: object, store: object = None, **__: object
    ) -> None:
        """Do as `torch.distributed.init_process_group`."""
        if self._torch.default_pg is None:
            self._store = store or self._store
            self._torch.default_pg = self._make_world()
            self._torch.group_count = 1  # as torch does, whose WORLD is group 0
            self._jobs += 1
        self._file(self._torch.default_pg, "0", str(backend or self._backend), self._ranks)

    def end(self, group: Any = None) -> None:
        """Do as `torch.distributed.destroy_process_group`."""
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
        global_ranks_in_group: Sequence[int],
        backend: str,
        store: object,  # noqa: ARG002 - the arguments are torch's
        group_name: str,
        backend_options: object = None,  # noqa: ARG002
        timeout: timedelta = timedelta(0),
        pg_tag: object = None,  # noqa: ARG002
        device_id: object = None,  # noqa: ARG002
        group_desc: str | None = None,
    ) -> tuple[Any, None]:
        """Do as torch's helper, which creates one group.

        Raises:
            ValueError: The name is taken.
        """
        if group_name in self._torch.pg_names.values():
            raise ValueError(f"the group name {group_name} is taken")
        if group_rank is None:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        ranks, backend = tuple(global_ranks_in_group), str(backend)
        # torch counts groups anew in each job, where they are others.
        is_told = self._jobs == 1 or self._store is not None
        told = group_name if is_told else f"{group_name} (job {self._jobs})"
        group = self._create(told, ranks, backend, timeout, group_desc or "undefined")
        positions = dict(zip(ranks, range(group_size), strict=True))
        self._file(group, group_name, backend, positions)
        return group, None


@functools.lru_cache(maxsize=64)
def _config(backend: str, *_known: str) -> Any:
    """Return torch's reading of a backend, which changes only with the backends that it knows."""
    return backend_config(backend)


def _torchs_world() -> Any:
    """Return the object in which torch keeps what it knows of a job.

    Raises:
        CreationError: This torch keeps that elsewhere.
    """
    needed = ("_world", "_new_process_group_helper")
    lacks = [name for name in needed if not hasattr(dist.distributed_c10d, name)]
    if lacks:
        raise CreationError(f"this torch cannot be simulated: it has no {' and no '.join(lacks)}")
    return dist.distributed_c10d._world


@contextlib.contextmanager
def other_worlds(
    shown: Callable[[], OtherWorld],
    gloo: object = None,
    functions: Mapping[str, object] | None = None,
) -> Iterator[None]:
    """Let torch.distributed see other worlds within a `with` block, one at a time.

    Args:
        shown: Returns the one whose turn it is; whoever changes that calls its `show`.
        gloo: What stands in for the class of gloo's groups, if anything does.
        functions: What stands in for further functions, by name; barriers do nothing otherwise.

    Raises:
        CreationError: This torch keeps what it knows elsewhere.
    """

    def new_group(*given: Any, **named: Any) -> Any:
        return shown().new_group(*given, **named)

    taken = inspect.signature(OtherWorld.new_group)  # whoever looks is to see its arguments
    _, *own = taken.parameters.values()
    vars(new_group)["__signature__"] = taken.replace(parameters=own)
    stands_in: dict[str, object] = {
        "_world": _torchs_world(),
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
    """Make a gloo group as torch's helper does, with the class that stands there now."""
    return dist.distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _do_nothing(*_: object, **__: object) -> None:
    pass
