"""`hypercomm check`: create every group of a layout on real ranks, and all-reduce over it."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import attrs
import click
from rich.console import Console
from rich.markup import escape

from hypercomm.cli import options
from hypercomm.cli.options import Key, format_views, read_keys, read_layout, read_views
from hypercomm.cli.printing import print_json, print_lines, quiet
from hypercomm.errors import HyperCommError, LayoutError, RankFailedError, WorldSizeError
from hypercomm.job_environment import FoundJob, find_job
from hypercomm.launch import run_ranks
from hypercomm.launch.run import most_ranks, preloads
from hypercomm.layout import RankLayout
from hypercomm.layout.text import aligned, format_coords, short_repr
from hypercomm.layout.views import Views
from hypercomm.tools.launch_files.source import is_launch_file

if TYPE_CHECKING:
    import torch

_SHOWN_FAILURES = 8
_ROUNDS = 3
_BYTES = 4 * 1024 * 1024

preloads.append(__name__)  # the ranks import this module; only its functions import torch


@click.command()
@options.sizes
@options.groups
@click.option(
    "--nprocs",
    "--nproc",
    "--world-size",
    "ranks",
    type=click.IntRange(min=1),
    help="The number of ranks. The one size that is -1 is inferred from it.",
)
@options.views
@click.option(
    "--backend",
    default="gloo",
    show_default=True,
    help="A backend that torch knows, such as nccl or cpu:gloo,cuda:nccl.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, max=1e6, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds until a hanging check is ended.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Start more than 4 processes for each core of this machine.",
)
@options.as_json
def check(
    sizes: str,
    wanted: Sequence[tuple[str, ...]] | None,
    ranks: int | None,
    views: Sequence[str],
    backend: str,
    timeout: float,
    force: bool,
    as_json: bool,
) -> int:
    """Run every group of a layout on real ranks.

    Create every group of a layout such as tp=2,cp=2,dp=2, and all-reduce over it. Starts the ranks
    on this machine. In a job that torchrun, srun or mpirun started, it uses the ranks of the job:

    torchrun --nproc-per-node 8 -m hypercomm check tp=2,cp=2,dp=2
    """
    if problem := _launch_file(sizes, ranks):
        raise LayoutError(problem)
    # torch reads this variable when it is loaded. Without it, torch's reports of a dead peer would
    # hide the error of this command.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    job = find_job(os.environ)
    if job is not None and job.size == 1:  # in a job of one rank, start the ranks here
        job = None
    room = ""
    if job is not None:
        job.rendezvous()
        room = f"the job has {job.size} ({job.source})"
        if ranks not in {None, job.size}:
            raise WorldSizeError(f"--nprocs is {ranks}, but {room}; leave --nprocs out")
        ranks = job.size
    layout = read_layout(sizes, ranks, "--nprocs", room)
    others = read_views(layout, views)
    outcome = CheckResult(Request(layout, read_keys(others, wanted), others, backend))
    if job is None and not force and layout.size > most_ranks():
        raise WorldSizeError(
            f"{layout} would start {layout.size} processes on this machine: at most {most_ranks()} "
            f"are started without --force; use torchrun for several machines, or 'hypercomm plan', "
            f"which starts no process"
        )
    is_first = job is None or job.rank == 0
    what = f"checking {layout} on {layout.size} {backend} ranks"
    with Console(stderr=True).status(escape(what)) if is_first else contextlib.nullcontext():
        if job is None:
            outcome.start(timeout)
        else:
            outcome.join(job, timeout)
    if is_first or outcome.failed is not None:
        return outcome.show(as_json=as_json)
    return 0


def _launch_file(text: str, ranks: int | None) -> str:
    """Return the error if the argument is a launch file in place of sizes, or "" if it is not.

    The error shows the calls that check the layouts of the file.
    """
    if not is_launch_file(text):
        return ""
    from hypercomm.tools.launch_files import read_config

    name = short_repr(text)
    if not Path(text).is_file():
        what = f"{name} is a folder" if Path(text).is_dir() else f"there is no file {name}"
        return f"{what}, and check takes sizes, as in hypercomm check tp=2,dp=4"
    calls = []
    config = read_config(Path(text), ranks)
    for views in config.views.values():
        others = [f" --view {text}" for text in format_views(views)]
        calls.append("".join([f"hypercomm check {views.base}", *others]))
    if not calls:
        return (
            f"check takes sizes, and no layout can be read from {name}; 'hypercomm plan {text}' "
            f"shows its problems"
        )
    problems = f"; 'hypercomm plan {text}' shows problems of the file" if config.problems else ""
    return f"check takes sizes, and {name} is a launch file; write {' or '.join(calls)}{problems}"


@attrs.frozen
class Request:
    """The arguments of `probe`.

    Attributes:
        layout: The layout of all ranks.
        keys: The groups to check, in this order.
        views: Other factorisations of the layout.
        backend: Backend of the groups.
    """

    layout: RankLayout
    keys: Sequence[Key]
    views: Views
    backend: str


class Figures(TypedDict):
    """The measurements of one rank over one group, in seconds and bytes per second.

    `wrong` describes a wrong result. It is empty if the result is right.
    """

    host: str
    creation: float
    bandwidth: float
    wrong: str


Message = tuple[int, Key, str | Figures]
"""A rank, the dims of its group, and the name of the step that begins.

In the message after the last step, the rank's `Figures` replace the name.
"""


@attrs.define
class CheckResult:
    """Runs the probe, gathers the messages of all ranks, and shows the result.

    Attributes:
        request: The layout and the groups.
        found: The measurements of each rank, by the dims of the groups.
        failed: The rank that failed and the reason, or None. In a launched job this is always the
            rank of this process, even if another rank caused the error.
    """

    request: Request
    found: dict[Key, dict[int, Figures]] = attrs.field(factory=dict)
    failed: tuple[int, str] | None = None
    _started: float = attrs.field(factory=time.monotonic)
    _at: dict[int, tuple[Key, str]] = attrs.field(factory=dict)

    def start(self, timeout: float) -> None:
        """Run the probe on local ranks."""
        request = self.request
        if request.backend != "gloo":  # check_backend loads torch, which is slow
            from hypercomm.process_groups.spec import check_backend

            check_backend(request.backend)
        try:
            run_ranks(
                probe_local,
                request.layout.size,
                args=(request,),
                backend=request.backend,
                timeout=timeout,
                max_ranks=request.layout.size,  # check() has compared it
                on_message=lambda _, message: self.record(message),
            )
        except RankFailedError as error:
            self.failed = error.rank, error.reason

    def join(self, job: FoundJob, timeout: float) -> None:
        """Run the probe as one rank of a launched job. Rank 0 gathers the measurements."""
        from datetime import timedelta

        import torch.distributed as dist

        from hypercomm.launch import join

        def send(message: Message) -> None:
            if isinstance(message[2], str):  # the name of a step stays on this rank
                self.record(message)
                return
            everyone: list[Any] = [None] * job.size
            dist.all_gather_object(everyone, message)
            for each in everyone if job.rank == 0 else ():
                self.record(each)

        with quiet():
            try:
                joined = join(backend=self.request.backend, timeout=timedelta(seconds=timeout))
                probe(self.request, send, joined.device)
                joined.leave()
            except (HyperCommError, RuntimeError) as error:  # RuntimeError: a peer has died
                reason = " ".join(str(error).split())
                self.failed = job.rank, f"on {socket.gethostname()}, or on a peer: {reason}"

    def record(self, message: Message) -> None:
        """Record a message of one rank."""
        rank, key, what = message
        if isinstance(what, str):
            self._at[rank] = key, what
        else:
            self.found.setdefault(key, {})[rank] = what

    def show(self, *, as_json: bool) -> int:
        """Print the result and return the exit code."""
        layout = self.request.layout
        rows = [
            self._row(key, found) for key, found in self.found.items() if len(found) == layout.size
        ]
        wrong = [line for row in rows for line in row["wrong"]]
        requested = len(self.request.keys)
        ok = len(rows) == requested and not wrong and self.failed is None
        seconds = time.monotonic() - self._started
        if as_json:
            print_json(
                {
                    "layout": str(layout),
                    "views": {name: str(view.layout) for name, view in self.request.views.items()},
                    "ranks": layout.size,
                    "backend": self.request.backend,
                    "ok": ok,
                    "seconds": seconds,
                    "groups": rows,
                    "failed": self._failure(),
                }
            )
            return 0 if ok else 1
        lines = _table(rows) if rows else []
        lines += [f"wrong {line}" for line in wrong[:_SHOWN_FAILURES]]
        if len(wrong) > _SHOWN_FAILURES:
            lines.append(f"... and {len(wrong) - _SHOWN_FAILURES} more")
        verdict = f"{layout}: some results are wrong, see above"
        if ok:
            verdict = (
                f"{layout}: all-reduce is right over every group, on {layout.size} "
                f"{self.request.backend} ranks, in {seconds:.1f} s"
            )
        elif self.failed is not None:
            rank, reason = self.failed
            key, step = self._at.get(rank, (None, ""))
            place = self._place_of(rank, key) + (f", in {step}" if step else "")
            verdict = f"failed after {len(rows)} of {requested} checks: {place}: {reason}"
        print_lines([*lines, verdict])
        return 0 if ok else 1

    def _failure(self) -> dict[str, Any] | None:
        if self.failed is None:
            return None
        rank, reason = self.failed
        key, step = self._at.get(rank, (None, None))
        place = {"rank": rank, "view": key and key.view, "dims": key and key.dims}
        return {**place, "step": step, "reason": reason}

    def _row(self, key: Key, found: Mapping[int, Figures]) -> dict[str, Any]:
        """Return the table row of the groups over some dims.

        The creation time is the longest of all ranks. The bandwidth is the lowest of all ranks.
        """
        groups = self.request.views.layout_of(key.view).groups(*key.dims)
        slowest = min(sorted(found), key=lambda rank: found[rank]["bandwidth"])
        alone = groups.group_size == 1
        return {
            "view": key.view,
            "dims": key.dims,
            "groups": len(groups),
            "size": groups.group_size,
            "creation_s": max(figures["creation"] for figures in found.values()),
            "bandwidth_bytes_per_s": None if alone else found[slowest]["bandwidth"],
            "slowest": None if alone else {"rank": slowest, "host": found[slowest]["host"]},
            "wrong": [
                f"{self._place_of(rank, key)}: {found[rank]['wrong']}"
                for rank in sorted(found)
                if found[rank]["wrong"]
            ],
        }

    def _place_of(self, rank: int, key: Key | None) -> str:
        """Return a rank as text, with its coordinates and its group."""
        layout = self.request.layout
        group = ""
        if key is not None:
            layout = self.request.views.layout_of(key.view)
            group = f" in group {key} of ranks {[*layout.groups(*key.dims).of(rank)]}"
        return f"rank {rank} ({format_coords(layout.coords(rank))}){group}"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    shown = [("dims", "groups x size", "create", "bandwidth", "slowest", "result")]
    several = len({row["slowest"]["host"] for row in rows if row["slowest"]}) > 1
    for row in rows:
        bandwidth = slowest = "-"
        if row["slowest"] is not None:
            bandwidth = f"{row['bandwidth_bytes_per_s'] / 1e6:,.0f} MB/s"
            host = f" on {row['slowest']['host']}" if several else ""
            slowest = f"rank {row['slowest']['rank']}{host}"
        shown.append(
            (
                str(Key(row["view"], row["dims"])),
                f"{row['groups']} x {row['size']}",
                f"{row['creation_s'] * 1e3:.1f} ms",
                bandwidth,
                slowest,
                "wrong" if row["wrong"] else "ok",
            )
        )
    return aligned(shown)


# ---- on each rank -------------------------------------------------------------------------------


def probe_local(request: Request) -> None:
    """Run the probe on a rank that `run_ranks` started."""
    from hypercomm.launch import join, report

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # only the parent prints
    probe(request, report, join().device)


def probe(
    request: Request, send: Callable[[Message], None], device: torch.device | None = None
) -> None:
    """Create all requested groups, one after another, and send the measurements of each.

    Args:
        request: The groups. The layout must fill the world.
        send: A function that is called with the name of each step when the step begins, and with
            the measurements of each group.
        device: The device of the tensors. Default: the CPU.
    """
    import torch
    import torch.distributed as dist

    from hypercomm.grid import HyperCommGrid

    rank = dist.get_rank()
    with HyperCommGrid(request.layout, backend=request.backend, cover="exact") as grid:
        for name, view in request.views.items():
            grid.register_view(name, view.layout.sizes, shared_dims=view.shared_dims)
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
            got = total.tolist()
            expected = [sum(r + 1 for r in ranks), sum(r * r for r in ranks)]
            figures = Figures(
                host=socket.gethostname(),
                creation=creation,
                bandwidth=_bandwidth(group, device),
                wrong="" if got == expected else f"all-reduce gave {got}, expected {expected}",
            )
            send((rank, key, figures))


def _bandwidth(group: Any, device: torch.device | None) -> float:
    """Return 4 MiB divided by the median time of an all-reduce of 4 MiB.

    The first all-reduce is not timed, because it connects the ranks.
    """
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
