"""Connecting the process groups of grids before the first step of a training needs them.

All ranks agree that they have the same groups. Then each rank communicates once over all groups
that it is in, as one call of all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    CreationError,
    GroupCreationTimeout,
    HyperCommError,
    UnknownDimError,
)
from hypercomm.layout.checks import as_names
from hypercomm.layout.text import aligned, counted, did_you_mean, format_ranks, shown
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

if TYPE_CHECKING:
    from hypercomm.grid.grid import GridView

CALL = "connect()"
PIPELINES = ("pp",)
"""The default dims whose neighbours are connected, if a grid has them."""


# ---- results ------------------------------------------------------------------------------------


@attrs.frozen
class Connection:
    """One communicator, or one edge of a pipeline, that the calling rank has connected.

    Attributes:
        keys: The keys of the process group, such as "dp+cp"; "llm: tp" in a set of grids.
        ranks: The members, or the two ends of the edge.
        backend: Such as "gloo". A group with several backends has one connection for each.
        seconds: How long it took; 0 for a group of one rank.
        is_edge: Whether it is an edge, connected both ways.
    """

    keys: tuple[str, ...]
    ranks: tuple[int, ...]
    backend: str
    seconds: float = 0.0
    is_edge: bool = False

    @property
    def title(self) -> str:
        """The keys, followed by "edge" for an edge."""
        return f"{', '.join(self.keys)}{' edge' if self.is_edge else ''}"


@attrs.frozen(repr=False)
class Connections:
    """The result of `connect()` on the calling rank, in the order of connecting.

    Attributes:
        rows: One for each communicator and each edge of the rank.
        meeting_seconds: How long the calling rank waited for the others before.
    """

    rows: tuple[Connection, ...] = ()
    meeting_seconds: float = 0.0

    def __iter__(self) -> Iterator[Connection]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> Connection:
        return self.rows[position]

    @property
    def seconds(self) -> float:
        """The sum of the rows' seconds: the time of the connecting itself."""
        return sum(row.seconds for row in self.rows)

    def __repr__(self) -> str:
        return f"<Connections: {self._summary()}>"

    def __str__(self) -> str:
        table = [("connected", "ranks", "backend", "seconds")] if self.rows else []
        for row in self.rows:
            ranks = " <-> ".join(map(str, row.ranks)) if row.is_edge else format_ranks(row.ranks)
            table.append((row.title, ranks, row.backend, f"{row.seconds:.6f}"))
        return "\n".join([self._summary(), *aligned(table)])

    def _summary(self) -> str:
        edges = sum(row.is_edge for row in self.rows)
        groups = counted(len(self.rows) - edges, "communicator")
        more = f" and {counted(edges, 'edge')}" if edges else ""
        waited = f"{self.meeting_seconds:.3f} s"
        return f"{groups}{more} in {self.seconds:.3f} s, after {waited} of waiting for all ranks"


# ---- the call -----------------------------------------------------------------------------------


def connect(
    grids: Mapping[str, GridView],
    scope: Scope,
    pipelines: str | Iterable[str] = PIPELINES,
    timeout: timedelta | None = None,
) -> Connections:
    """Connect the groups of grids that exist, as `HyperCommGrid.connect` documents.

    Args:
        grids: By the prefix of the titles of their groups; "" for a grid alone.
        scope: All ranks of the grids.
        pipelines: The dims whose neighbours are connected.
        timeout: For the whole call; default: the timeout of WORLD.
    """
    for grid in grids.values():
        grid._owner.check_alive()
    check_timeout(timeout)
    along, limit_s = _read_pipelines(pipelines, grids.values()), limit_of(timeout, scope.world)
    job, begin = scope.world, time.monotonic()
    with refusing(scope):
        groups = _in_order(grids)
        items = _items_of(groups, [(dim,) for dim in along], job.rank)

    def entries() -> list[str]:
        described = [f"{CALL} with edges along {', '.join(along) or 'no dim'}"]
        for title, (spec, _) in groups.items():
            described.append(title.removesuffix(str(spec.key)) + spec.describe())
        return described

    rows: list[Connection] = []
    left: list[_Item] = []
    try:
        met = agree(scope, CALL, entries, limit_s)
        met_s = time.monotonic() - begin
        if job.rank not in scope.ranks:
            return Connections()
        if not _is_live():
            met.get()
            return Connections(tuple(item.row for item in items), met_s)
        left_s = max(1.0, limit_s - met_s)
        left = items
        second = attrs.evolve(scope, path=f"{scope.path} connect")
        title = f"{CALL} of each group"
        try:
            done = together(
                second, title, lambda: [CALL], left_s, lambda call: _connect_all(call, items, rows)
            )
        finally:
            met.get()  # raises what interrupted this rank then: the others had its consent
        return Connections(done.get(), met_s)
    except GroupCreationTimeout as error:
        specs = {title: spec for title, (spec, _) in groups.items()}
        at = left[len(rows)].title if len(rows) < len(left) else ""
        raise _with_groups(error, specs, job.rank, at) from error


def _connect_all(
    call: Call[Any], items: list[_Item], rows: list[Connection]
) -> tuple[Connection, ...]:
    """Connect items one after the other, in a thread that may hang in a collective.

    Args:
        call: The call.
        items: What to connect.
        rows: Receives what is connected, so that the caller knows where a thread hangs.

    Raises:
        ConnectionFailedError: A collective failed.
    """
    device = c10d.current_device()

    def connect_each() -> tuple[Connection, ...]:
        with c10d.on_device(device):  # each thread has its own current device
            rows.extend(item.connect(call.scope.world.rank) for item in items)
        return tuple(rows)

    if call.scope.is_alone:
        return connect_each()
    task = Task(connect_each)
    try:
        return call.wait(task.poll)
    except HyperCommError:
        raise
    except RuntimeError as error:
        item, reason = items[len(rows)], str(error).partition(". This is typically")[0]
        failure = RuntimeError(f"{CALL} failed in {item.title}: {reason}")
        raise ConnectionFailedError(failure, item.row.ranks) from error


def _read_pipelines(pipelines: str | Iterable[str], grids: Iterable[GridView]) -> tuple[str, ...]:
    """Return the names of the dims; a default one is left out if no grid has it."""
    names = as_names((pipelines,) if isinstance(pipelines, str) else pipelines, "pipeline")
    layouts = [layout for grid in grids for layout in (grid.layout, *grid.views.values())]
    known = list(dict.fromkeys(dim for layout in layouts for dim in layout.dim_names))
    for name in names:
        if name not in known and name not in PIPELINES:
            raise UnknownDimError(
                f"unknown dim {shown(name)} in pipelines; the grid has {shown(known)}"
                f"{did_you_mean(name, known)}"
            )
    return tuple(name for name in names if name in known)


def _with_groups(
    error: GroupCreationTimeout, specs: Mapping[str, GroupSpec], rank: int, at: str
) -> GroupCreationTimeout:
    """Add the groups of the first missing rank, and where this rank waited, to an error."""
    missing = error.missing[0] if error.missing else -1
    groups = {
        title: spec.groups.of(missing)
        for title, spec in specs.items()
        if spec.groups.group_size > 1 and spec.groups.has_member(missing)
    }
    listed = ", ".join(f"{title} of ranks {ranks}" for title, ranks in groups.items())
    common = [title for title, ranks in groups.items() if rank in ranks]
    text = f"{error}; rank {missing} is in {listed}" if listed else str(error)
    text += f"; rank {rank} was connecting {at}" if at else ""
    return GroupCreationTimeout(
        text,
        missing=error.missing,
        absent=error.absent,
        waited=error.waited,
        group="".join(common[:1]),
    )


# ---- communicators and edges --------------------------------------------------------------------


@attrs.frozen
class _Item:
    """One communicator, or one edge, that the calling rank connects; `row` has no seconds yet."""

    group: ProcessGroup
    device: str
    row: Connection

    @property
    def title(self) -> str:
        return f"{self.row.title} of ranks {self.row.ranks}"

    def connect(self, rank: int) -> Connection:
        """Communicate, and return the row with the seconds that it took."""
        ranks, begin = self.row.ranks, time.perf_counter()
        if len(ranks) < 2:
            return self.row
        device = torch.device(self.device)
        if device.type != "cpu":  # the current device is the rank's
            device = torch.device(self.device, getattr(torch, self.device).current_device())
        wanted, total = len(ranks), torch.ones(1, dtype=torch.int32, device=device)
        if self.row.is_edge:
            wanted, own, theirs = sum(ranks), total * rank, torch.zeros_like(total)
            (other,) = {*ranks} - {rank}
            receive = dist.P2POp(dist.irecv, theirs, other, self.group)
            send = dist.P2POp(dist.isend, own, other, self.group)
            for work in dist.batch_isend_irecv([receive, send]):
                work.wait()
            total = own + theirs
        else:
            dist.all_reduce(total, group=self.group)
        if total.item() != wanted:
            raise CreationError(
                f"{self.title} is connected wrongly: the sum is {total.item()}, and not {wanted}; "
                f"another collective was under way in this group: call connect() before any"
            )
        return attrs.evolve(self.row, seconds=time.perf_counter() - begin)


def _in_order(grids: Mapping[str, GridView]) -> dict[str, tuple[GroupSpec, Group]]:
    """Return the groups of grids by title, in an order that all ranks have: small ones first."""

    def place(spec: GroupSpec) -> tuple[int, str, tuple[int, ...], str]:
        key, names = spec.key, spec.layout.dim_names
        at = tuple(names.index(dim) for dim in key.dims)
        return spec.groups.group_size, key.view or "", at, key.name or ""

    ordered: dict[str, tuple[GroupSpec, Group]] = {}
    for name, grid in grids.items():
        prefix, owner = f"{name}: " if name else "", grid._owner
        with owner.pool.lock:
            owner.check_steady()
            specs = sorted((owner.specs[key] for key in grid._created), key=place)
            ordered |= {f"{prefix}{spec.key}": (spec, owner.created[spec.key]) for spec in specs}
    return ordered


def _items_of(
    groups: Mapping[str, tuple[GroupSpec, Group]], along: Collection[tuple[str, ...]], rank: int
) -> list[_Item]:
    """Return what the calling rank connects, in order.

    Keys that share a group make one item, at the position of the first of them.
    """
    titles: dict[ProcessGroup, dict[str, GroupSpec]] = {}
    for title, (spec, group) in groups.items():
        if group.pg is not None:
            titles.setdefault(group.pg, {})[title] = spec
    items: list[_Item] = []
    for pg, users in titles.items():
        spec = next(iter(users.values()))
        ranks, devices = spec.groups.of(rank), _devices_of(pg)
        rows = {backend: [Connection((*users,), ranks, backend)] for backend in devices}
        if any(one.derive is None and one.key.dims in along for one in users.values()):
            backend = [*devices][-1]  # that of the accelerator
            edges = [Connection((*users,), ends, backend, is_edge=True) for ends in _edges(ranks)]
            rows[backend] += [row for row in edges if rank in row.ranks]
        for backend, device in devices.items():
            items += [_Item(pg, device, row) for row in rows[backend]]
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


def _devices_of(group: ProcessGroup) -> dict[str, str]:
    """Return a type of device of this host for each backend of a group."""
    pairs = [entry.split(":") for entry in dist.get_backend_config(group).split(",")]
    if len({backend for _, backend in pairs}) == 1:
        return {pairs[0][1]: c10d.device_type(group)}
    found: dict[str, str] = {}
    for device, backend in pairs:
        module: Any = getattr(torch, device, None)
        if device == "cpu" or not _is_live() or (module is not None and module.is_available()):
            found.setdefault(backend, device)
    return found


def _is_live() -> bool:
    """Return whether there are ranks to communicate with: not in fake and simulated worlds."""
    return c10d.has_ranks() and not c10d.is_other_world()
