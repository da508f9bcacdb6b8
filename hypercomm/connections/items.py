"""What is connected: the communicators of the calling rank, and the edges of its pipelines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.connections.connections import Connection
from hypercomm.errors import CreationError
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.job import Job
from hypercomm.process_groups.planned import PlannedGroup
from hypercomm.process_groups.torch_internals.store import in_time

_BREAKING_S = 1.0
"""How long it may take to end what waits in a group for ever."""

Plans = Mapping[str, PlannedGroup]
"""The groups that are connected, by what users know them by; in an order that all ranks share."""


def in_order(plans: Iterable[PlannedGroup], prefix: str = "") -> dict[str, PlannedGroup]:
    """Sort groups as all ranks do, small ones first, whatever order each has created them in.

    Args:
        plans: Those of one grid.
        prefix: What their titles begin with.
    """

    def place(planned: PlannedGroup) -> tuple[int, str, tuple[int, ...], str]:
        key, names = planned.key, planned.spec.layout.dim_names
        at = tuple(names.index(dim) for dim in key.dims)
        return planned.groups.group_size, key.view or "", at, key.name or ""

    return {f"{prefix}{planned.key}": planned for planned in sorted(plans, key=place)}


@attrs.frozen
class Item:
    """One thing that the calling rank connects: a communicator, or an edge both ways.

    Attributes:
        planned: A key that has the group.
        group: The group.
        device: Where the tensor of one element is.
        blank: What the table says of it, without what it took.
    """

    planned: PlannedGroup
    group: ProcessGroup
    device: torch.device
    blank: Connection

    @property
    def title(self) -> str:
        """What users know it by."""
        return f"{self.blank.title} of ranks {self.blank.ranks}"

    def connect(self, rank: int) -> Connection:
        """Communicate, and say what it took.

        Raises:
            CreationError: What came back is wrong.
            RuntimeError: As torch raises.
        """
        if len(self.blank.ranks) < 2:
            return self.blank
        before, begin = _free_bytes(self.device), time.perf_counter()
        if self.blank.is_edge:
            self._greet(rank)
        else:
            self._count()
        seconds, after = time.perf_counter() - begin, _free_bytes(self.device)
        took = None if before is None or after is None else before - after
        return attrs.evolve(self.blank, seconds=seconds, bytes=took)

    def _count(self) -> None:
        """All-reduce ones: as many as there are members."""
        ones = torch.ones(1, dtype=torch.int32, device=self.device)
        dist.all_reduce(ones, group=self.group)
        self._check(int(ones.item()), len(self.blank.ranks), "an all-reduce of ones")

    def _greet(self, rank: int) -> None:
        """Send this rank's number to the other end, and receive that one's."""
        (other,) = {*self.blank.ranks} - {rank}
        own = torch.full((1,), rank, dtype=torch.int32, device=self.device)
        theirs = torch.full_like(own, -1)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, theirs, other, self.group),
                dist.P2POp(dist.isend, own, other, self.group),
            ]
        ):
            work.wait()
        self._check(int(theirs.item()), other, "what the other end sent as its rank")

    def _check(self, got: int, wanted: int, what: str) -> None:
        if got != wanted:
            raise CreationError(
                f"{self.title} is connected wrongly: {what} gave {got}, and not {wanted}; another "
                f"collective was under way in this group: call connect() before any"
            )

    def give_up(self) -> None:
        """End what still waits in the group, where torch can, so that it can be destroyed.

        A gloo group that waits for ever keeps its process from ending. A message that is not in
        time closes it, in every torch; before it is connected, where that is lazy, nothing does.
        """
        others = [rank for rank in self.blank.ranks if rank != dist.get_rank()]
        if self.device.type != "cpu" or self.planned.options.lazy_init or not others:
            return

        def send() -> None:
            work = dist.irecv(torch.zeros(1), others[0], self.group, tag=_UNUSED_TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))

        with contextlib.suppress(Exception):  # as it should be
            in_time(send, _BREAKING_S)


_UNUSED_TAG = 20_011


def items_of(plans: Plans, pipelines: tuple[str, ...], job: Job) -> list[Item]:
    """List what the calling rank connects, in the order of the plans.

    Keys that share a group count once, and come where the first of them is; all members of a group
    find the same keys there.
    """
    titles: dict[ProcessGroup, list[str]] = {}
    first: dict[ProcessGroup, PlannedGroup] = {}
    edges: set[ProcessGroup] = set()
    along = {(dim,) for dim in pipelines}
    for title, planned in plans.items():
        group = planned.group
        if group is None:
            continue
        titles.setdefault(group, []).append(title)
        first.setdefault(group, planned)
        if planned.spec.derive is None and planned.key.dims in along:
            edges.add(group)
    items: list[Item] = []
    for group, planned in first.items():
        ranks = planned.groups.of(job.rank)
        for backend, device in _parts(group):
            blank = Connection(tuple(titles[group]), ranks, backend)
            items.append(Item(planned, group, device, blank))
        backend, device = _parts(group)[-1]
        if group in edges:
            for ends in _edges(ranks):
                if job.rank in ends:
                    blank = Connection(tuple(titles[group]), ends, backend, is_edge=True)
                    items.append(Item(planned, group, device, blank))
    return items


def is_live() -> bool:
    """Tell whether there are ranks to communicate with: those of fake and other worlds are not."""
    return c10d.has_ranks() and not c10d.is_other_world()


def _edges(ranks: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """List the edges of a pipeline: every second one first, so that neighbours do not wait.

    The last stage sends to the first one where schedules interleave, so that is an edge, too.

    >>> list(_edges((0, 2, 4, 6)))
    [(0, 2), (4, 6), (2, 4), (6, 0)]
    """
    every = list(zip(ranks, (*ranks[1:], ranks[0]), strict=True))
    if len(ranks) < 3:  # both ways are one edge
        every = every[: len(ranks) - 1]
    yield from every[::2]
    yield from every[1::2]


def _parts(group: ProcessGroup) -> list[tuple[str, torch.device]]:
    """The backends of a group, each with a device that it is for: each has a communicator."""
    pairs = [entry.split(":") for entry in dist.get_backend_config(group).split(",")]
    backends = dict.fromkeys(backend for _, backend in pairs)
    if len(backends) == 1:
        return [(next(iter(backends)), _device(c10d.device_type(group)))]
    found: dict[str, str] = {}
    for device, backend in pairs:
        if not is_live() or device == "cpu" or _is_here(device):
            found.setdefault(backend, device)
    return [(backend, _device(device)) for backend, device in found.items()]


def _is_here(kind: str) -> bool:
    """Tell whether this host has a device of a kind; not of one that torch has no module for."""
    module: Any = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def _device(kind: str) -> torch.device:
    """Return the device of a kind that the calling thread is on; others would be on the first."""
    module: Any = getattr(torch, kind, None)
    if not is_live() or kind == "cpu" or not hasattr(module, "current_device"):
        return torch.device(kind)
    return torch.device(kind, module.current_device())


def _free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device; None where torch does not tell."""
    ask = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    return None if device.type == "cpu" or ask is None else int(ask(device)[0])
