"""`hypercomm check`: create every group of a layout on real ranks, and all-reduce over it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import click
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from hypercomm.cli import HostError, options
from hypercomm.cli.groups import Key, read_keys, read_views
from hypercomm.cli.printing import console, numbers, print_json, quiet, table
from hypercomm.cli.probe import Figures, Message, Request, probe, probe_local, use_device
from hypercomm.errors import HyperCommError, RankFailedError, WorldSizeError
from hypercomm.launch import run_ranks
from hypercomm.launch.launchers import FoundJob, find_job
from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_coords

_PROCESSES_PER_CORE = 4
_SHOWN_FAILURES = 8


# ---- the command ------------------------------------------------------------------------------


@click.command(short_help="Create every group on real processes and all-reduce over it.")
@options.sizes
@options.groups
@click.option(
    *("--nprocs", "--nproc", "--world-size", "ranks"),
    type=click.IntRange(min=1),
    help="The number of ranks; infers the one size that is -1.",
)
@options.views
@click.option(
    "--backend",
    default="gloo",
    show_default=True,
    help="Any that torch knows, as in nccl or cpu:gloo,cuda:nccl.",
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
    help=f"Start more than {_PROCESSES_PER_CORE} processes for each core of this machine.",
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
    """Create every group of a layout such as tp=2,cp=2,dp=2 and all-reduce over it.

    Starts the ranks on this machine, or joins the job when a launcher started it (torchrun, srun,
    mpirun):

    torchrun --nproc-per-node 8 -m hypercomm check tp=2,cp=2,dp=2
    """
    # torch reads it when it is loaded: its own reports of a dead peer would hide ours.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    job = _launched()
    layout = _read_layout(sizes, ranks, job)
    others = read_views(layout, views)
    outcome = Outcome(Request(layout, read_keys(layout, others, wanted), backend, others))
    if job is not None:
        is_shown = join(outcome, job, timeout)
    else:
        if not force:
            _check_cores(layout)
        start(outcome, timeout)
        is_shown = True
    return outcome.show(as_json=as_json) if is_shown else 0


def _launched() -> FoundJob | None:
    """Return the job that this process is a rank of; one of a single rank needs an address."""
    job = find_job(os.environ)
    if job is None or (job.size == 1 and not os.environ.get("MASTER_ADDR")):
        return None
    job.meeting_place()
    return job


def _read_layout(sizes: str, ranks: int | None, job: FoundJob | None) -> RankLayout:
    """Read the sizes, which must multiply to the number of ranks."""
    if job is None:
        room = "" if ranks is None else f"--nprocs is {ranks}"
        return options.read_layout(sizes, ranks, room)
    room = f"the job has {job.size} ({job.told()})"
    if ranks not in {None, job.size}:
        raise WorldSizeError(f"--nprocs is {ranks}, but {room}; leave --nprocs out")
    return options.read_layout(sizes, job.size, room)


def _check_cores(layout: RankLayout) -> None:
    """Raise an error for more processes than the cores of this machine can run well."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    most = max(8, _PROCESSES_PER_CORE * cores)
    if layout.size > most:
        raise WorldSizeError(
            f"{layout} would start {layout.size} processes on this machine, which has {cores} "
            f"cores: at most {most} are started without --force; use torchrun for several "
            f"machines, or 'hypercomm plan', which starts none"
        )


# ---- where it runs ----------------------------------------------------------------------------


def start(outcome: Outcome, timeout: float) -> None:
    """Run the probe on local ranks."""
    request = outcome.request
    if request.backend != "gloo":  # this process needs torch for no other reason
        from hypercomm.launch.run import check_devices
        from hypercomm.process_groups.options import check_backend

        check_backend(request.backend)
        check_devices(request.backend, request.layout.size)
    with outcome.progress():
        try:
            run_ranks(
                probe_local,
                request.layout.size,
                args=(request,),
                backend=request.backend,
                timeout=timeout,
                on_message=lambda _, message: outcome.record(message),
            )
        except RankFailedError as error:
            outcome.failed = error


def join(outcome: Outcome, job: FoundJob, timeout: float) -> bool:
    """Run the probe as one rank of a launched job.

    Returns:
        Whether this rank shows the outcome: rank 0 does, and a rank that failed.

    Raises:
        HyperCommError: The job cannot be joined, or not on this host.
    """
    from datetime import timedelta

    import torch.distributed as dist

    from hypercomm.process_groups.options import check_backend

    request, rank = outcome.request, job.rank
    address, port = job.meeting_place()
    host = f"[{address}]" if ":" in address else address
    try:
        check_backend(request.backend)
        device = use_device(request.backend, job.local_rank, job.local_size)
    except HyperCommError as error:
        raise HostError(f"rank {rank} on {socket.gethostname()}: {error}") from error

    def send(message: Message) -> None:
        if isinstance(message[2], str):  # only figures are gathered
            outcome.record(message)
            return
        everyone: list[Any] = [None] * job.size
        dist.all_gather_object(everyone, message)
        if rank == 0:
            for each in everyone:
                outcome.record(each)

    joining: str | None = f"rank {rank}, which was joining {job.size} at {address}, port {port}"
    with quiet(), outcome.progress() if rank == 0 else contextlib.nullcontext():
        try:
            dist.init_process_group(
                request.backend,
                init_method=f"tcp://{host}:{port}",
                rank=rank,
                world_size=job.size,
                timeout=timedelta(seconds=timeout),
            )
            joining = None
            probe(request, send, device)
        except HyperCommError:
            raise
        except RuntimeError as error:  # torch raises it when a peer dies
            reason = " ".join(str(error).split())
            who = joining or outcome.place_of(rank)
            outcome.seen = f"{who}, saw a failure, its own or a peer's: {reason}"
        else:
            dist.destroy_process_group()
    return rank == 0 or bool(outcome.seen)


# ---- the outcome ------------------------------------------------------------------------------


@attrs.frozen
class Rank:
    """A rank and the host that it runs on."""

    rank: int
    host: str


@attrs.frozen
class Row:
    """The groups over some dims, with the slowest rank's figures, in seconds and bytes/s."""

    view: str | None
    dims: tuple[str, ...]
    groups: int
    size: int
    creation_s: float
    latency_s: float | None
    bandwidth_bytes_per_s: float | None
    slowest: Rank | None
    wrong: list[str]

    @classmethod
    def of(cls, layout: RankLayout, key: Key, found: Mapping[int, Figures]) -> Row:
        """Make a row from the figures of all ranks; `layout` is that of the key."""
        groups = layout.groups(*key.dims)
        alone = groups.group_size == 1
        slowest = min(sorted(found), key=lambda rank: found[rank]["bandwidth"])
        return cls(
            key.view,
            key.dims,
            len(groups),
            groups.group_size,
            creation_s=max(figures["creation"] for figures in found.values()),
            latency_s=None if alone else max(figures["latency"] for figures in found.values()),
            bandwidth_bytes_per_s=None if alone else found[slowest]["bandwidth"],
            slowest=None if alone else Rank(slowest, found[slowest]["host"]),
            wrong=[
                f"{_place_of(layout, rank, key)}: {found[rank]['wrong']}"
                for rank in sorted(found)
                if found[rank]["wrong"]
            ],
        )


@attrs.define
class Outcome:
    """Gathers the messages of all ranks, and shows the result.

    Attributes:
        request: The layout and the groups.
        failed: The rank that failed, if one did.
        seen: The error of this rank of a launched job, which may be caused by another rank.
    """

    request: Request
    failed: RankFailedError | None = None
    seen: str = ""
    rows: list[Row] = attrs.field(factory=list)
    _started: float = attrs.field(factory=time.monotonic)
    _at: dict[int, tuple[Key, str]] = attrs.field(factory=dict)
    _found: dict[Key, dict[int, Figures]] = attrs.field(factory=dict)
    _status: Status | None = None

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """Show the progress in one line of a terminal within a `with` block."""
        request = self.request
        with Console(stderr=True).status(
            f"starting {request.layout.size} {request.backend} ranks"
        ) as self._status:
            yield

    def record(self, message: Message) -> None:
        """Record a message of one rank."""
        rank, key, what = message
        if isinstance(what, str):
            self._at[rank] = key, what
            if self._status is not None:
                done = f"{len(self.rows)} of {len(self.request.keys)} checked"
                self._status.update(escape(f"{done}, now {key}: {what}"))
            return
        found = self._found.setdefault(key, {})
        found[rank] = what
        if len(found) == self.request.layout.size:
            self.rows.append(Row.of(self.request.layout_of(key), key, found))

    def place_of(self, rank: int) -> str:
        """Return a rank's coordinates, its group, and its step."""
        key, step = self._at.get(rank, (None, ""))
        layout = self.request.layout if key is None else self.request.layout_of(key)
        return _place_of(layout, rank, key) + (f", in {step}" if step else "")

    def show(self, *, as_json: bool) -> int:
        """Print the result and return the exit code."""
        wrong = [line for row in self.rows for line in row.wrong]
        complete = len(self.rows) == len(self.request.keys)
        ok = complete and not (wrong or self.failed or self.seen)
        if as_json:
            print_json(self._json_form(ok))
            return 0 if ok else 1
        out = console()
        if self.rows:
            self._show_rows(out)
        for line in wrong[:_SHOWN_FAILURES]:
            out.print(f"[red]wrong[/] {escape(line)}", soft_wrap=True)
        if len(wrong) > _SHOWN_FAILURES:
            out.print(f"... and {len(wrong) - _SHOWN_FAILURES} more")
        out.print(self._verdict(ok), markup=False, soft_wrap=True)
        return 0 if ok else 1

    def _show_rows(self, out: Console) -> None:
        several = len({found["host"] for key in self._found.values() for found in key.values()}) > 1
        titles = map(numbers, ("groups x size", "create", "latency", "bandwidth"))
        shown = table("dims", *titles, "slowest", "result", show_edge=False)
        for row in self.rows:
            latency, bandwidth, slowest = row.latency_s, row.bandwidth_bytes_per_s, row.slowest
            host = f" on {escape(slowest.host)}" if slowest and several else ""
            shown.add_row(
                escape(str(Key(row.view, row.dims))),
                f"{row.groups} x {row.size}",
                f"{row.creation_s * 1e3:.1f} ms",
                "-" if latency is None else f"{latency * 1e6:.0f} us",
                "-" if bandwidth is None else f"{bandwidth / 1e6:,.0f} MB/s",
                "-" if slowest is None else f"rank {slowest.rank}{host}",
                "[red]wrong[/]" if row.wrong else "[green]ok[/]",
            )
        out.print(shown)

    def _json_form(self, ok: bool) -> dict[str, object]:
        request, failed = self.request, self.failed
        key, step = self._at.get(failed.rank, (None, None)) if failed else (None, None)
        return {
            "layout": str(request.layout),
            "views": {name: str(view) for name, view, _ in request.views},
            "ranks": request.layout.size,
            "backend": request.backend,
            "ok": ok,
            "seconds": time.monotonic() - self._started,
            "groups": list(map(attrs.asdict, self.rows)),
            "failed": failed
            and {
                "rank": failed.rank,
                "view": key and key.view,
                "dims": key and key.dims,
                "step": step,
                "reason": failed.reason,
            },
            "seen": self.seen,
        }

    def _verdict(self, ok: bool) -> str:
        layout = self.request.layout
        if ok:
            return (
                f"{layout}: all-reduce is right over every group, on {layout.size} "
                f"{self.request.backend} ranks, in {time.monotonic() - self._started:.1f} s"
            )
        if self.seen:
            return f"failed after {len(self.rows)} of {len(self.request.keys)}: {self.seen}"
        if self.failed is None:
            return f"{layout}: some results are wrong, see above"
        return f"failed: {self.place_of(self.failed.rank)}: {self.failed.reason}"


def _place_of(layout: RankLayout, rank: int, key: Key | None) -> str:
    """Name a rank with its coordinates, and its group.

    Example:
        >>> _place_of(RankLayout.parse("tp=2,dp=2"), 3, Key(None, ("dp",)))
        'rank 3 (tp=1, dp=1) in group dp of ranks [1, 3]'
    """
    place = f"rank {rank} ({format_coords(layout.coords(rank))})"
    if key is None:
        return place
    return f"{place} in group {key} of ranks {list(layout.groups(*key.dims).of(rank))}"
