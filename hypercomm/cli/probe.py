"""The part of `hypercomm check` that every rank runs: create groups, all-reduce, compare sums.

torch is imported inside the functions, as the process that starts the ranks does not need it.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import attrs

from hypercomm.cli.groups import AskedViews, Key
from hypercomm.layout import RankLayout

if TYPE_CHECKING:
    import torch

_ROUNDS = 3
_BYTES = 4 * 1024 * 1024


@attrs.frozen
class Request:
    """The arguments of the probe.

    Attributes:
        layout: The layout of all ranks.
        keys: The groups to check, in this order.
        backend: Backend of the groups.
        views: Other factorisations of the layout.
    """

    layout: RankLayout
    keys: Sequence[Key]
    backend: str = "gloo"
    views: AskedViews = ()

    def layout_of(self, key: Key | None) -> RankLayout:
        """Return the layout that the dims of a key belong to."""
        views = (view for name, view, _ in self.views if key is not None and name == key.view)
        return next(views, self.layout)


class Figures(TypedDict):
    """The measurements of one rank over its group of some dims, in seconds and bytes/s.

    `wrong` describes a wrong result; it is empty if the result is right.
    """

    host: str
    creation: float
    bandwidth: float
    wrong: str


Message = tuple[int, Key, str | Figures]
"""A report of one rank about some groups: the step that it begins, or in the end its figures."""


def probe_local(request: Request) -> None:
    """Run the probe as one of the ranks that `run_ranks` started."""
    from hypercomm.launch import join, report

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the parent prints the result, maybe as JSON
    probe(request, report, join().device)


def probe(
    request: Request, send: Callable[[Message], None], device: torch.device | None = None
) -> None:
    """Create all requested groups, one after another, and report the figures of each.

    Args:
        request: The groups; the layout must fill the world.
        send: Called with each step that begins, and with the figures.
        device: The device of the tensors; default: the CPU.
    """
    import torch
    import torch.distributed as dist

    from hypercomm.grid import HyperCommGrid

    rank, host = dist.get_rank(), socket.gethostname()
    with HyperCommGrid.from_layout(request.layout, backend=request.backend, cover="exact") as grid:
        for name, view, shared in request.views:
            grid.register_view(name, view.shape, view.dim_names, shared)
        for key in request.keys:
            send((rank, key, "creation"))
            dist.barrier()
            begin = time.perf_counter()
            owner: Any = grid if key.view is None else grid.view(key.view)
            group = owner.create_pg(key.dims)
            creation = time.perf_counter() - begin
            send((rank, key, "all-reduce"))
            ranks = owner.group_ranks(key.dims)
            total = torch.tensor([rank + 1, rank * rank], dtype=torch.int64, device=device)
            dist.all_reduce(total, group=group)
            got, expected = total.tolist(), [sum(r + 1 for r in ranks), sum(r * r for r in ranks)]
            wrong = "" if got == expected else f"all-reduce gave {got}, expected {expected}"
            bandwidth = _bandwidth(group, device)
            send(
                (rank, key, Figures(host=host, creation=creation, bandwidth=bandwidth, wrong=wrong))
            )


def _bandwidth(group: Any, device: torch.device | None) -> float:
    """Return 4 MiB over the median time of an all-reduce of them; the first one connects."""
    import torch
    import torch.distributed as dist

    data = torch.zeros(_BYTES // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        dist.all_reduce(data, group=group)
        if data.device.type != "cpu":
            torch.get_device_module(data.device).synchronize()
        seconds.append(time.perf_counter() - begin)
    return _BYTES / statistics.median(seconds[1:])
