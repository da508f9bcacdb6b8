"""Connecting the process groups of grids before the first step of a training needs them.

All ranks wait for each other and compare their groups. Then each rank communicates once over all
groups that it is in. A rank that waits for long in a group publishes a key, so that the other
members can name the ranks without one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    ConnectTimeout,
    CreationError,
    GroupCreationTimeout,
    HyperCommError,
    OutcomeUnknownError,
    PlanMismatchError,
    UnknownDimError,
)
from hypercomm.layout.checks import as_names
from hypercomm.layout.text import aligned, counted, did_you_mean, format_ranks, shown
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.arrival import absent
from hypercomm.process_groups.agreement.driver import hold
from hypercomm.process_groups.agreement.steps import (
    NOTHING,
    Step,
    Steps,
    all_or_none,
    limit_of,
    refusing,
)
from hypercomm.process_groups.agreement.whereabouts import name_late
from hypercomm.process_groups.job import Job, current
from hypercomm.process_groups.options import check_timeout
from hypercomm.process_groups.owner import only_call
from hypercomm.process_groups.planned import PlannedGroup
from hypercomm.process_groups.torch_internals.store import LateError, in_time

if TYPE_CHECKING:
    from hypercomm.grid.grid import GridView

CALL = "connect()"
PIPELINES = ("pp",)
"""The default dims whose neighbours are connected, if a grid has them."""

_GRACE_S = 2.0
"""Seconds to wait for the keys of the other members after a collective has failed."""

_NAMING_S = 1.0
"""Seconds that the store may take to name the missing ranks."""

_POLL_S = 0.1


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
        meeting_seconds: How long the ranks waited for each other before.
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
        """How long all rows took, without `meeting_seconds`."""
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
    steps: Steps,
    pipelines: str | Iterable[str] = PIPELINES,
    timeout: timedelta | None = None,
) -> Connections:
    """Connect the groups of grids that exist, as `HyperCommGrid.connect` documents.

    Args:
        grids: By the prefix of the titles of their groups; "" for a grid alone.
        steps: The agreement of all ranks of the grids.
        pipelines: The dims whose neighbours are connected.
        timeout: For the whole call; default: the timeout of WORLD.
    """
    for grid in grids.values():
        grid._owner.check_alive()
    along = _read_pipelines(pipelines, grids.values())
    check_timeout(timeout)
    with contextlib.ExitStack() as stack:
        for grid in grids.values():
            stack.enter_context(only_call(grid._owner))
        return _connect(grids, steps, along, limit_of(timeout))


def _connect(
    grids: Mapping[str, GridView], steps: Steps, along: tuple[str, ...], limit_s: float
) -> Connections:
    job, begin = current(), time.monotonic()
    with refusing(steps, CALL):
        plans = _in_order(grids)
        items = _items_of(plans, [(dim,) for dim in along], job.rank)
        entries = [f"{CALL} with edges along {', '.join(along) or 'no dim'}"]
        for title, planned in plans.items():
            entries.append(title.removesuffix(str(planned.key)) + planned.describe())
    try:
        all_or_none(steps, entries, limit_s, CALL, *NOTHING).get()
        met_s = time.monotonic() - begin
        if job.rank not in steps.agreement.layout:
            return Connections()
        if not _is_live():
            return Connections(tuple(item.row for item in items), met_s)
        run = _Run(steps, job, items, begin)
        left_s, work = max(0.0, limit_s - met_s), (run.connect_all, run.stop)
        done = all_or_none(steps, [f"{CALL} of each group"], left_s, CALL, *work, follows=True)
        return Connections(done.get(), met_s)
    except ConnectTimeout:
        raise
    except PlanMismatchError as error:
        if f" failed in {CALL}: " not in str(error):
            raise
        is_late = f" {ConnectTimeout.__name__}: " in str(error)  # the groups are the same
        raise (ConnectTimeout if is_late else CreationError)(str(error)) from error
    except GroupCreationTimeout as error:
        raise _as_connect_timeout(error, plans, job.rank) from error


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


def _as_connect_timeout(
    error: GroupCreationTimeout, plans: Mapping[str, PlannedGroup], rank: int
) -> ConnectTimeout:
    """Add the groups of the first missing rank to an error of the agreement."""
    missing = error.missing[0] if error.missing else -1
    groups = {
        title: planned.groups.of(missing)
        for title, planned in plans.items()
        if planned.groups.group_size > 1 and planned.groups.has_member(missing)
    }
    listed = ", ".join(f"{title} of ranks {ranks}" for title, ranks in groups.items())
    common = [title for title, ranks in groups.items() if rank in ranks]
    text = f"{error}; rank {missing} is in {listed}" if listed else str(error)
    return ConnectTimeout(
        text, missing=error.missing, waited=error.waited, group="".join(common[:1])
    )


# ---- communicators and edges --------------------------------------------------------------------


@attrs.frozen
class _Item:
    """One communicator, or one edge, that the calling rank connects; `row` has no seconds yet."""

    planned: PlannedGroup
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


def _in_order(grids: Mapping[str, GridView]) -> dict[str, PlannedGroup]:
    """Return the groups of grids by title, in an order that all ranks have: small ones first."""

    def place(planned: PlannedGroup) -> tuple[int, str, tuple[int, ...], str]:
        key, names = planned.key, planned.spec.layout.dim_names
        at = tuple(names.index(dim) for dim in key.dims)
        return planned.groups.group_size, key.view or "", at, key.name or ""

    ordered: dict[str, PlannedGroup] = {}
    for name, grid in grids.items():
        prefix = f"{name}: " if name else ""
        with grid._owner.pool.lock:
            grid._owner.check_steady()
            plans = sorted(grid._plans.values(), key=place)
        ordered |= {f"{prefix}{planned.key}": planned for planned in plans}
    return ordered


def _items_of(
    plans: Mapping[str, PlannedGroup], along: Collection[tuple[str, ...]], rank: int
) -> list[_Item]:
    """Return what the calling rank connects, in the order of the plans.

    Keys that share a group make one item, at the position of the first of them.
    """
    titles: dict[ProcessGroup, dict[str, PlannedGroup]] = {}
    for title, planned in plans.items():
        if planned.group is not None:
            titles.setdefault(planned.group, {})[title] = planned
    items: list[_Item] = []
    for group, users in titles.items():
        planned = next(iter(users.values()))
        ranks, devices = planned.groups.of(rank), _devices_of(group)
        rows = {backend: [Connection((*users,), ranks, backend)] for backend in devices}
        if any(one.spec.derive is None and one.key.dims in along for one in users.values()):
            backend = [*devices][-1]  # that of the accelerator
            edges = [Connection((*users,), ends, backend, is_edge=True) for ends in _edges(ranks)]
            rows[backend] += [row for row in edges if rank in row.ranks]
        for backend, device in devices.items():
            items += [_Item(planned, group, device, row) for row in rows[backend]]
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


# ---- one run ------------------------------------------------------------------------------------


@attrs.define
class _Run:
    """The part of the calling rank, in a thread that may hang."""

    steps: Steps
    job: Job
    items: list[_Item]
    begin: float
    at: int = 0
    is_stopped: bool = False

    def connect_all(self, step: Step) -> tuple[Connection, ...]:
        """Connect all items, if there are any, at a step that all ranks are at.

        Raises:
            ConnectTimeout: It did not end in time, or a member is missing.
            CreationError: A collective failed.
        """
        if not self.items:
            return ()
        check_others = self.steps.lookout(self.job, CALL, is_met=True)  # raises if one has failed

        def while_waiting() -> None:
            self._publish(step)
            check_others((), time.monotonic() - self.begin)

        try:
            left_s = max(0.0, step.deadline - time.monotonic())
            return in_time(self._connect, left_s, while_waiting)
        except dist.DistNetworkError as error:
            raise OutcomeUnknownError(
                f"{CALL} failed: the job's store is gone ({str(error).splitlines()[0]}); restart "
                f"the job"
            ) from error
        except HyperCommError:
            raise
        except RuntimeError as error:
            raise self._error(step, error) from error

    def stop(self) -> None:
        """Start no further item."""
        self.is_stopped = True

    def _connect(self) -> tuple[Connection, ...]:
        rows: list[Connection] = []
        while self.at < len(self.items) and not self.is_stopped:
            rows.append(self.items[self.at].connect(self.job.rank))
            self.at += 1
        return tuple(rows)

    @property
    def _item(self) -> _Item:
        """The current item, or the last one if all are connected."""
        return self.items[min(self.at, len(self.items) - 1)]

    def _publish(self, step: Step) -> None:
        """Publish that this rank is in its current item."""
        key = f"{_place(step, self._item)}/here/{self.job.rank}"
        if step.register and key not in self.steps.agreement.registers:
            c10d.answer(partial(c10d.set_all, {key: "1"}))
            self.steps.agreement.registers.add(key)  # it is deleted with them

    def _error(self, step: Step, error: Exception) -> CreationError:
        """Return an error that names the members that have not entered the current item."""
        item, is_late = self._item, isinstance(error, LateError)
        others = [rank for rank in item.row.ranks if rank != self.job.rank]
        missing, named = tuple[int, ...](), ""
        with contextlib.suppress(dist.DistNetworkError):
            self._publish(step)
            until = time.monotonic() + (0.0 if is_late else _GRACE_S)
            while step.register and (missing := hold(absent(_place(step, item), others))):
                if time.monotonic() >= until:
                    break
                time.sleep(_POLL_S)
            late = name_late(self.job, missing, item.row.ranks, item.planned.spec.layout)
            missing, named = hold(late, _NAMING_S)
        cause = str(error).partition(". This is typically")[0]
        if not missing and not is_late:
            return CreationError(f"{CALL} failed in {item.title}: {cause}")
        waited = timedelta(seconds=time.monotonic() - self.begin)
        text = (
            f"{CALL} of the grid {self.steps.agreement.layout} waited "
            f"{waited.total_seconds():.1f} s in {item.title}"
        )
        if missing:
            text += f" for {named}; check whether they are alive{'' if is_late else f': {cause}'}"
        else:
            text += ", which all members have entered; check whether they can reach each other"
        return ConnectTimeout(text, missing=missing, waited=waited, group=item.row.keys[0])


def _place(step: Step, item: _Item) -> str:
    """Return the prefix of the keys of the members that have entered an item."""
    row = item.row
    return f"{step.register}/{row.title} {row.backend} of {','.join(map(str, row.ranks))}"
