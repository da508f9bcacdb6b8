"""Connects the process groups of a grid before the first training step needs them.

All ranks meet, and compare their groups. Then each rank communicates once over each of its groups.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.meeting import Call, meet, refusing
from hypercomm.process_groups.spec import GroupSpec
from hypercomm.process_groups.table import Entry
from hypercomm.process_groups.world import Scope, World

CALL = "connect()"


@attrs.frozen
class Connection:
    """A communicator, or an edge of a pipeline, that the calling rank has connected.

    An edge is a pair of neighbouring stages, whose two ranks exchange messages.

    Attributes:
        title: The keys of the process group, such as "tp, tp (twin)", or "pp edge" for an edge.
        ranks: The ranks of the group, or the two ranks of the edge. An edge is connected in both
            directions.
        backend: The backend, such as "gloo". A group with several backends has one connection for
            each of them.
        seconds: The duration in seconds; 0 for a group of one rank.
    """

    title: str
    ranks: tuple[int, ...]
    backend: str
    seconds: float = 0.0


def connect(
    entries: Iterable[Entry], along: Sequence[str], scope: Scope, timeout: timedelta | None
) -> list[Connection]:
    """Connect the existing groups of a grid. See `HyperCommGrid.connect`.

    Args:
        entries: The groups of the grid, or of a view of it.
        along: The dims whose neighbours are connected.
        scope: All ranks of the grid.
        timeout: The limit for the call. Default: the timeout of WORLD.
    """
    with refusing(scope):
        groups = _in_order(entries)
        items = _items_of(groups, along, scope.world)
    lines = [f"{CALL} with edges along {', '.join(along) or 'no dim'}"]
    lines += [entry.spec.describe() for entry in groups]
    limit_s = scope.world.limit_s(timeout)
    with meet(scope, Call.of(CALL, lines), limit_s) as meeting:
        if not _is_live(scope.world):
            return [item.row for item in items]
        until = time.monotonic() + min(meeting.left_s, limit_s)
        return [item.connect(scope.world.rank, until) for item in items]


# ---- communicators and edges --------------------------------------------------------------------


@attrs.frozen
class _Item:
    """A communicator or an edge that the calling rank will connect. `row.seconds` is still 0."""

    group: ProcessGroup
    device: str
    row: Connection
    is_edge: bool = False

    def connect(self, rank: int, until: float) -> Connection:
        """Communicate until a time of `time.monotonic`. Return the row with the duration.

        Raises:
            CreationError: A collective failed.
        """
        if len(self.row.ranks) < 2:
            return self.row
        begin = time.perf_counter()
        try:
            self._communicate(rank, until)
        except RuntimeError as error:
            reason = str(error).partition(". This is typically")[0]
            failure = CreationError(
                f"{CALL} failed in {self.row.title} of ranks {self.row.ranks}, although all ranks "
                f"of the grid had arrived: {reason}"
            )
            failure.group = self.row.title
            raise failure from error
        return attrs.evolve(self.row, seconds=time.perf_counter() - begin)

    def _communicate(self, rank: int, until: float) -> None:
        device = torch.device(self.device)
        if device.type != "cpu":  # this rank has made its device the current one
            device = torch.device(self.device, getattr(torch, self.device).current_device())
        own = torch.zeros(1, dtype=torch.int32, device=device)
        if self.is_edge:
            (other,) = {*self.row.ranks} - {rank}
            receive = dist.P2POp(dist.irecv, torch.empty_like(own), other, self.group)
            send = dist.P2POp(dist.isend, own, other, self.group)
            works = dist.batch_isend_irecv([receive, send])
        else:
            works = [dist.all_reduce(own, group=self.group, async_op=True)]
        for work in works:
            work.wait(timedelta(seconds=max(0.001, min(until - time.monotonic(), 1e8))))
        own.item()  # waits until an accelerator has finished


def _in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return groups in an order that is the same on all ranks: small groups first."""
    in_order = sorted(entries, key=lambda entry: entry.spec.sort_key())
    return sorted(in_order, key=lambda entry: max(entry.spec.groups.sizes, default=0))


def _items_of(groups: Iterable[Entry], along: Iterable[str], world: World) -> list[_Item]:
    """Return the communicators and edges that the calling rank connects, in order.

    Keys that share a group have one item, at the position of the first of these keys.
    """
    keys: dict[ProcessGroup, dict[str, GroupSpec]] = {}
    for entry in groups:
        pg = entry.communicator.pg
        if pg is not None:
            keys.setdefault(pg, {})[str(entry.spec.key)] = entry.spec
    edged, rank = [(dim,) for dim in along], world.rank
    items: list[_Item] = []
    for pg, users in keys.items():
        title, specs, devices = ", ".join(users), [*users.values()], _devices_of(pg, world)
        ranks, last = specs[0].groups.of(rank), [*devices][-1]  # the accelerator comes last
        is_pipeline = any(one.request.derive is None and one.key.dims in edged for one in specs)
        for backend, device in devices.items():
            items.append(_Item(pg, device, Connection(title, ranks, backend)))
            if is_pipeline and backend == last:
                rows = [Connection(f"{title} edge", ends, backend) for ends in _edges(ranks)]
                items += [_Item(pg, device, row, is_edge=True) for row in rows if rank in row.ranks]
    return items


def _edges(ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the edges of a pipeline, in an order that lets many edges connect in parallel.

    Edges that share a rank cannot connect in parallel, so every second edge is first. Interleaved
    schedules send from the last stage to the first, so there is an edge between these stages.

    >>> _edges((0, 2, 4, 6))
    [(0, 2), (4, 6), (2, 4), (6, 0)]
    """
    edges = list(zip(ranks, (*ranks[1:], ranks[0]), strict=True))
    if len(ranks) < 3:  # two ranks have only one edge
        edges = edges[: len(ranks) - 1]
    return edges[::2] + edges[1::2]


def _devices_of(group: ProcessGroup, world: World) -> dict[str, str]:
    """Map each backend of a group to a device type that exists on this host."""
    pairs = [entry.split(":") for entry in dist.get_backend_config(group).split(",")]
    if len({backend for _, backend in pairs}) == 1:
        return {pairs[0][1]: torchdist.device_type(group)}
    found: dict[str, str] = {}
    for device, backend in pairs:
        module: Any = getattr(torch, device, None)
        is_here = device == "cpu" or (module is not None and module.is_available())
        if is_here or not _is_live(world):
            found.setdefault(backend, device)
    return found


def _is_live(world: World) -> bool:
    """Return whether this rank can communicate. In fake and simulated worlds it cannot."""
    return world.has_store and not torchdist.is_patched_world()
