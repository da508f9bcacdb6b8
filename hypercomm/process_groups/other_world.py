"""OtherWorld: what torch.distributed sees of a rank that is simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hypercomm.process_groups import c10d

Create = Callable[[str, tuple[int, ...], str, timedelta, str], Any]

_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "tags_to_pg",
    "pg_to_tag",
)


class OtherWorld:
    """A job with neither a store nor a process group: `create` makes what stands in for a group.

    Args:
        world: Stands in for WORLD.
        ranks: Maps each rank to itself.
        backend: The backend of WORLD.
        create: Called with the name, the ranks, the backend, the timeout and the description of
            each group of this rank.
    """

    def __init__(self, world: Any, ranks: Mapping[int, int], backend: str, create: Create) -> None:
        self._world = world
        self._ranks = ranks
        self._backend = backend
        self._create = create
        self._torch: Any = None
        self._jobs = 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be what torch.distributed sees within a `with` block, initialised from the beginning."""
        with c10d.other_world(
            _TABLES, self._new_group, self._begin, self._end, c10d.default_timeout
        ) as self._torch:
            self._begin()
            yield

    def _begin(self, backend: str | None = None, *_: object, **__: object) -> None:
        if self._torch.default_pg is None:
            self._torch.default_pg = self._world
            self._torch.group_count = 1  # as torch does, whose WORLD is group 0
            self._jobs += 1
        self._file(self._world, "0", str(backend or self._backend), self._ranks)

    def _end(self, group: Any = None) -> None:
        whole = group is None or group is self._torch.default_pg
        for known in list(self._torch.pg_map) if whole else [group]:
            self._torch.tags_to_pg.pop(self._torch.pg_to_tag.get(known), None)
            for table in _TABLES:
                getattr(self._torch, table).pop(known, None)
        if whole:
            self._torch.default_pg = None
            self._torch.group_count = 0

    def _file(self, group: Any, name: str, backend: str, ranks: Mapping[int, int]) -> None:
        self._torch.pg_map[group] = (backend, None)
        self._torch.pg_names[group] = name
        self._torch.pg_group_ranks[group] = ranks
        self._torch.pg_backend_config[group] = c10d.backend_config(backend)
        self._torch.pg_to_tag[group] = f"ptd:{name}"
        self._torch.tags_to_pg[f"ptd:{name}"] = [group]

    def _new_group(
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
        if group_name in self._torch.pg_names.values():
            raise ValueError(f"the group name {group_name} is taken")
        if group_rank is None:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        ranks, backend = tuple(global_ranks_in_group), str(backend)
        # torch counts groups anew in each job, where they are others.
        told = group_name if self._jobs == 1 else f"{group_name} (job {self._jobs})"
        group = self._create(told, ranks, backend, timeout, group_desc or "undefined")
        positions = dict(zip(ranks, range(group_size), strict=True))
        self._file(group, group_name, backend, positions)
        return group, None
