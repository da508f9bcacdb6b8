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
from hypercomm.cli.probe import Figures, Message, Request, probe, probe_local
from hypercomm.errors import HyperCommError, JoinError, RankFailedError, WorldSizeError
from hypercomm.launch import run_ranks
from hypercomm.launchers import FoundJob, find_job
from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_coords

_PROCESSES_PER_CORE = 4
_SHOWN_FAILURES = 8


# ---- the command --------------------------------------------------------------------------------


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
    room = "" if ranks is None else f"--nprocs is {ranks}"
    if job is not None:
        room = f"the job has {job.size} ({job.source})"
        if ranks not in {None, job.size}:
            raise WorldSizeError(f"--nprocs is {ranks}, but {room}; leave --nprocs out")
        ranks = job.size
    layout = options.read_layout(sizes, ranks, room)
    others = read_views(layout, views)
    outcome = Outcome(Request(layout, read_keys(layout, others, wanted), backend, others))
    if job is None:
        if not force:
            _check_cores(layout)
        outcome.start(timeout)
    elif not outcome.join(job, timeout):
        return 0
    return outcome.show(as_json=as_json)


def _launched() -> FoundJob | None:
    """Return the job that this process is a rank of; one of a single rank needs an address."""
    job = find_job(os.environ)
    if job is None or (job.size == 1 and not os.environ.get("MASTER_ADDR")):
        return None
    job.rendezvous()
    return job


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


# ---- the outcome --------------------------------------------------------------------------------


@attrs.define
class Outcome:
    """Runs the probe, gathers the messages of all ranks, and shows the result.

    Attributes:
        request: The layout and the groups.
        found: The figures of each rank, by the groups.
        failed: The local rank that failed, if one did.
        seen: The error of this rank of a launched job, which another rank may have caused.
    """

    request: Request
    found: dict[Key, dict[int, Figures]] = attrs.field(factory=dict)
    failed: RankFailedError | None = None
    seen: str = ""
    _started: float = attrs.field(factory=time.monotonic)
    _at: dict[int, tuple[Key, str]] = attrs.field(factory=dict)
    _status: Status | None = None

    def start(self, timeout: float) -> None:
        """Run the probe on local ranks."""
        request = self.request
        if request.backend != "gloo":  # this process needs torch for no other reason
            from hypercomm.process_groups.options import check_backend

            check_backend(request.backend)
        with self.progress():
            try:
                run_ranks(
                    probe_local,
                    request.layout.size,
                    args=(request,),
                    backend=request.backend,
                    timeout=timeout,
                    on_message=lambda _, message: self.record(message),
                )
            except RankFailedError as error:
                self.failed = error

    def join(self, job: FoundJob, timeout: float) -> bool:
        """Run the probe as one rank of a launched job.

        Returns:
            Whether this rank shows the outcome: rank 0 does, and a rank that failed.

        Raises:
            HyperCommError: The job cannot be joined on this host.
        """
        from datetime import timedelta

        import torch.distributed as dist

        from hypercomm.launch import join

        def send(message: Message) -> None:
            if isinstance(message[2], str):  # only figures are gathered
                self.record(message)
                return
            everyone: list[Any] = [None] * job.size
            dist.all_gather_object(everyone, message)
            for each in everyone if job.rank == 0 else ():
                self.record(each)

        with quiet(), self.progress() if job.rank == 0 else contextlib.nullcontext():
            try:
                joined = join(backend=self.request.backend, timeout=timedelta(seconds=timeout))
            except JoinError as error:
                self.seen = str(error)
                return True
            except HyperCommError as error:
                host = socket.gethostname()
                raise HostError(f"rank {job.rank} on {host}: {error}") from error
            try:
                probe(self.request, send, joined.device)
                joined.leave()
            except HyperCommError:
                raise
            except RuntimeError as error:  # torch raises it when a peer dies
                reason = " ".join(str(error).split())
                self.seen = f"{self.place_of(job.rank)}, or a peer of it: {reason}"
        return job.rank == 0 or bool(self.seen)

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """Show the progress in one line of a terminal within a `with` block."""
        what = f"starting {self.request.layout.size} {self.request.backend} ranks"
        with Console(stderr=True).status(what) as self._status:
            yield

    def record(self, message: Message) -> None:
        """Record a message of one rank."""
        rank, key, what = message
        if not isinstance(what, str):
            self.found.setdefault(key, {})[rank] = what
            return
        self._at[rank] = key, what
        if self._status is not None:
            done = f"{len(self.found)} of {len(self.request.keys)}"
            self._status.update(escape(f"{done}, now {key}: {what}"))

    def rows(self) -> list[dict[str, Any]]:
        """Return the facts of the groups for which all ranks have reported."""
        size = self.request.layout.size
        return [
            _row(self.request.layout_of(key), key, found)
            for key, found in self.found.items()
            if len(found) == size
        ]

    def place_of(self, rank: int) -> str:
        """Return a rank's coordinates, its group, and its step."""
        key, step = self._at.get(rank, (None, ""))
        layout = self.request.layout if key is None else self.request.layout_of(key)
        return _place_of(layout, rank, key) + (f", in {step}" if step else "")

    def show(self, *, as_json: bool) -> int:
        """Print the result and return the exit code."""
        rows = self.rows()
        wrong = [line for row in rows for line in row["wrong"]]
        complete = len(rows) == len(self.request.keys)
        ok = complete and not (wrong or self.failed or self.seen)
        if as_json:
            print_json(self._json_form(rows, ok))
            return 0 if ok else 1
        out = console()
        if rows:
            out.print(self._table(rows))
        for line in wrong[:_SHOWN_FAILURES]:
            out.print(f"[red]wrong[/] {escape(line)}", soft_wrap=True)
        if len(wrong) > _SHOWN_FAILURES:
            out.print(f"... and {len(wrong) - _SHOWN_FAILURES} more")
        out.print(self._verdict(ok, len(rows)), markup=False, soft_wrap=True)
        return 0 if ok else 1

    def _table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        several = (
            len({each["host"] for found in self.found.values() for each in found.values()}) > 1
        )
        titles = map(numbers, ("groups x size", "create", "latency", "bandwidth"))
        shown = table("dims", *titles, "slowest", "result", show_edge=False)
        for row in rows:
            latency, bandwidth, slowest = "-", "-", "-"
            if row["slowest"] is not None:
                latency = f"{row['latency_s'] * 1e6:.0f} us"
                bandwidth = f"{row['bandwidth_bytes_per_s'] / 1e6:,.0f} MB/s"
                host = f" on {escape(row['slowest']['host'])}" if several else ""
                slowest = f"rank {row['slowest']['rank']}{host}"
            shown.add_row(
                escape(str(Key(row["view"], row["dims"]))),
                f"{row['groups']} x {row['size']}",
                f"{row['creation_s'] * 1e3:.1f} ms",
                *(latency, bandwidth, slowest),
                "[red]wrong[/]" if row["wrong"] else "[green]ok[/]",
            )
        return shown

    def _json_form(self, rows: list[dict[str, Any]], ok: bool) -> dict[str, Any]:
        failed = None
        if self.failed:
            key, step = self._at.get(self.failed.rank, (None, None))
            failed = {"rank": self.failed.rank, "view": key and key.view, "dims": key and key.dims}
            failed |= {"step": step, "reason": self.failed.reason}
        return {
            "layout": str(self.request.layout),
            "views": {name: str(view) for name, view, _ in self.request.views},
            "ranks": self.request.layout.size,
            "backend": self.request.backend,
            "ok": ok,
            "seconds": time.monotonic() - self._started,
            "groups": rows,
            "failed": failed,
            "seen": self.seen,
        }

    def _verdict(self, ok: bool, done: int) -> str:
        layout = self.request.layout
        if ok:
            return (
                f"{layout}: all-reduce is right over every group, on {layout.size} "
                f"{self.request.backend} ranks, in {time.monotonic() - self._started:.1f} s"
            )
        if self.seen:
            return f"failed after {done} of {len(self.request.keys)}: {self.seen}"
        if self.failed is None:
            return f"{layout}: some results are wrong, see above"
        return f"failed: {self.place_of(self.failed.rank)}: {self.failed.reason}"


def _row(layout: RankLayout, key: Key, found: Mapping[int, Figures]) -> dict[str, Any]:
    """Return the facts of the groups over some dims, with the slowest rank's figures."""
    groups = layout.groups(*key.dims)
    slowest = min(sorted(found), key=lambda rank: found[rank]["bandwidth"])
    facts: dict[str, Any] = {"latency_s": None, "bandwidth_bytes_per_s": None, "slowest": None}
    if groups.group_size > 1:
        facts = {
            "latency_s": max(figures["latency"] for figures in found.values()),
            "bandwidth_bytes_per_s": found[slowest]["bandwidth"],
            "slowest": {"rank": slowest, "host": found[slowest]["host"]},
        }
    return {
        "view": key.view,
        "dims": key.dims,
        "groups": len(groups),
        "size": groups.group_size,
        "creation_s": max(figures["creation"] for figures in found.values()),
        **facts,
        "wrong": [
            f"{_place_of(layout, rank, key)}: {found[rank]['wrong']}"
            for rank in sorted(found)
            if found[rank]["wrong"]
        ],
    }


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
