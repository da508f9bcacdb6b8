"""Connecting the process groups of a grid before the first step of a training needs them.

All ranks agree that they have the same groups. Then each rank communicates once over all groups
that it is in, as one call of all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import GroupCreationTimeout, HyperCommError
from hypercomm.layout.parsing import Dims
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.calls import (
    Call,
    Scope,
    agree,
    limit_of,
    refusing,
    together,
)
from hypercomm.process_groups.options import check_timeout
from hypercomm.process_groups.owner import Group
from hypercomm.process_groups.spec import GroupSpec
from hypercomm.process_groups.torch_internals.gloo import ConnectionFailedError
from hypercomm.process_groups.torch_internals.store import Task
from hypercomm.process_groups.world import World

if TYPE_CHECKING:
    from hypercomm.grid.grid import GridView

CALL = "connect()"
_Titled = Mapping[str, tuple[GroupSpec, Group]]
"""Groups by title, such as "dp+cp"."""


@attrs.frozen
class Connection:
    """One communicator, or one edge of a pipeline, that the calling rank has connected.

    Attributes:
        title: The keys of the process group, such as "tp, tp (twin)", or "pp edge" for an edge.
        ranks: The members, or the two ends of the edge, which is connected both ways.
        backend: Such as "gloo". A group with several backends has one connection for each.
        seconds: How long it took; 0 for a group of one rank.
    """

    title: str
    ranks: tuple[int, ...]
    backend: str
    seconds: float = 0.0


def connect(
    grid: GridView, scope: Scope, pipelines: Dims | None, timeout: timedelta | None
) -> list[Connection]:
    """Connect the groups of a grid that exist, as `HyperCommGrid.connect` documents.

    Args:
        grid: The grid, or a view of it.
        scope: All ranks of the grid.
        pipelines: The dims whose neighbours are connected.
        timeout: For the whole call; default: the timeout of WORLD.
    """
    check_timeout(timeout)
    limit_s = limit_of(timeout, scope.world)
    along: tuple[str, ...] = ("pp",)
    if pipelines is not None:
        along = grid._order(pipelines) if pipelines else ()
    rank, begin = scope.world.rank, time.monotonic()
    with refusing(scope):
        groups = _in_order(grid)
        items = _items_of(groups, along, scope.world)

    def entries() -> list[str]:
        edges = f"{CALL} with edges along {', '.join(along) or 'no dim'}"
        return [edges, *(spec.describe() for spec, _ in groups.values())]

    rows: list[Connection] = []
    met = agree(scope, CALL, entries, limit_s)
    if rank not in scope.ranks:
        return rows
    if not _is_live(scope.world):
        met.get()
        return [item.row for item in items]
    left_s = max(1.0, limit_s - (time.monotonic() - begin))
    second = attrs.evolve(scope, path=f"{scope.path} connect")
    title = f"{CALL} of each group"
    try:
        done = together(
            second, title, lambda: [CALL], left_s, lambda call: _connect_all(call, items, rows)
        )
    except GroupCreationTimeout as error:
        if len(rows) < len(items):
            error.group = items[len(rows)].row.title
            error.args = (f"{error}; rank {rank} was connecting {error.group}",)
        raise
    finally:
        met.get()  # raises what interrupted this rank then: the others had its consent
    return done.get()


# ---- communicators and edges --------------------------------------------------------------------


@attrs.frozen
class _Item:
    """One communicator, or one edge, that the calling rank connects; `row` has no seconds yet."""

    group: ProcessGroup
    device: str
    row: Connection
    is_edge: bool = False

    def connect(self, rank: int) -> Connection:
        """Communicate, and return the row with the seconds that it took."""
        ranks, begin = self.row.ranks, time.perf_counter()
        if len(ranks) < 2:
            return self.row
        device = torch.device(self.device)
        if device.type != "cpu":  # the current device is the rank's
            device = torch.device(self.device, getattr(torch, self.device).current_device())
        own = torch.zeros(1, dtype=torch.int32, device=device)
        if self.is_edge:
            (other,) = {*ranks} - {rank}
            receive = dist.P2POp(dist.irecv, torch.empty_like(own), other, self.group)
            send = dist.P2POp(dist.isend, own, other, self.group)
            for work in dist.batch_isend_irecv([receive, send]):
                work.wait()
        else:
            dist.all_reduce(own, group=self.group)
        own.item()  # waits for an accelerator
        return attrs.evolve(self.row, seconds=time.perf_counter() - begin)


def _connect_all(call: Call[Any], items: list[_Item], rows: list[Connection]) -> list[Connection]:
    """Connect items one after the other, in a thread that may hang in a collective.

    Args:
        call: The call.
        items: What to connect.
        rows: Receives what is connected, so that the caller knows where a thread hangs.

    Raises:
        ConnectionFailedError: A collective failed.
    """
    device = c10d.current_device()

    def connect_each() -> list[Connection]:
        with c10d.on_device(device):  # each thread has its own current device
            rows.extend(item.connect(call.scope.world.rank) for item in items)
        return rows

    if call.scope.is_alone:
        return connect_each()
    task = Task(connect_each)
    try:
        return call.wait(task.poll)
    except HyperCommError:
        raise
    except RuntimeError as error:
        row, reason = items[len(rows)].row, str(error).partition(". This is typically")[0]
        failure = RuntimeError(f"{CALL} failed in {row.title} of ranks {row.ranks}: {reason}")
        raise ConnectionFailedError(failure, row.ranks) from error


def _in_order(grid: GridView) -> _Titled:
    """Return the groups of a grid in an order that all ranks have: small ones first."""
    owner = grid._owner
    with owner.pool.lock:
        owner.check_steady()
        specs = sorted((owner.specs[key] for key in grid._created), key=GroupSpec.place)
        specs.sort(key=lambda spec: max(spec.groups.sizes, default=0))
        return {str(spec.key): (spec, owner.created[spec.key]) for spec in specs}


def _items_of(groups: _Titled, along: Iterable[str], world: World) -> list[_Item]:
    """Return what the calling rank connects, in order.

    Keys that share a group make one item, at the position of the first of them.
    """
    keys: dict[ProcessGroup, dict[str, GroupSpec]] = {}
    for title, (spec, group) in groups.items():
        if group.pg is not None:
            keys.setdefault(group.pg, {})[title] = spec
    edged, rank = [(dim,) for dim in along], world.rank
    items: list[_Item] = []
    for pg, users in keys.items():
        title, specs, devices = ", ".join(users), [*users.values()], _devices_of(pg, world)
        ranks, last = specs[0].groups.of(rank), [*devices][-1]  # the accelerator comes last
        is_pipeline = any(one.derive is None and one.key.dims in edged for one in specs)
        for backend, device in devices.items():
            items.append(_Item(pg, device, Connection(title, ranks, backend)))
            if is_pipeline and backend == last:
                rows = [Connection(f"{title} edge", ends, backend) for ends in _edges(ranks)]
                items += [_Item(pg, device, row, is_edge=True) for row in rows if rank in row.ranks]
    return items


def _edges(ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the edges of a pipeline, every second one first, so that neighbours do not wait.

    Interleaved schedules send from the last stage to the first, so that is an edge too.

    >>> _edges((0, 2, 4, 6))
    [(0, 2), (4, 6), (2, 4), (6, 0)]
    """
    edges = list(zip(ranks, (*ranks[1:], ranks[0]), strict=True))
    if len(ranks) < 3:  # both directions are one edge
        edges = edges[: len(ranks) - 1]
    return edges[::2] + edges[1::2]


def _devices_of(group: ProcessGroup, world: World) -> dict[str, str]:
    """Return a type of device of this host for each backend of a group."""
    pairs = [entry.split(":") for entry in dist.get_backend_config(group).split(",")]
    if len({backend for _, backend in pairs}) == 1:
        return {pairs[0][1]: c10d.device_type(group)}
    found: dict[str, str] = {}
    for device, backend in pairs:
        module: Any = getattr(torch, device, None)
        is_here = device == "cpu" or (module is not None and module.is_available())
        if is_here or not _is_live(world):
            found.setdefault(backend, device)
    return found


def _is_live(world: World) -> bool:
    """Return whether there are ranks to communicate with: not in fake and simulated worlds."""
    return world.has_store and not c10d.is_other_world()
