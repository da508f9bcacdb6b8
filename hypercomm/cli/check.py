"""`hypercomm check`: run the probe on every rank, gather what they find, show one table."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import attrs
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hypercomm.cli.plan import combinations_of
from hypercomm.errors import HyperCommError, RankFailedError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.notation import format_coords

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

_MOST_LOCAL_RANKS = 64
_SHOWN_FAILURES = 8


class Row(TypedDict):
    """The groups over some dims, with the slowest rank's figures, in seconds and bytes/s."""

    dims: list[str]
    groups: int
    size: int
    creation_s: float
    latency_s: float | None
    bandwidth_bytes_per_s: float | None
    wrong: list[str]


def run(
    text: str,
    wanted: Sequence[tuple[str, ...]] | None,
    backend: str,
    timeout: float,
    *,
    as_json: bool,
) -> int:
    """Check a layout on local ranks, or in the job that torchrun started; return an exit code."""
    # torch reads it when it is loaded: its own reports of a dead peer would drown ours.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    launched = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)
    layout = RankLayout.parse(text, world_size=_launched_size() if launched else None)
    dims = [layout.order_dims(names) for names in wanted or combinations_of(layout)]
    display = _Display(layout, backend, dims, as_json)
    if launched:
        return _join(layout, dims, backend, timeout, display)
    if layout.size > _MOST_LOCAL_RANKS:
        raise WorldSizeError(
            f"{layout} needs {layout.size} ranks, and at most {_MOST_LOCAL_RANKS} are started on "
            f"one machine; start it with torchrun on several, or look at it with 'hypercomm plan'"
        )
    return _start(layout, dims, backend, timeout, display)


def _launched_size() -> int:
    text = os.environ["WORLD_SIZE"]
    if not text.isdecimal() or not int(text):
        raise WorldSizeError(f"the environment's WORLD_SIZE must be a positive int, got {text!r}")
    return int(text)


def _start(
    layout: RankLayout,
    dims: list[tuple[str, ...]],
    backend: str,
    timeout: float,
    display: _Display,
) -> int:
    """Run the probe on local ranks, and show what each tells as it comes."""
    from hypercomm.launch import run_ranks

    if backend != "gloo":
        _check_backend(backend, layout.size)
    with display:
        try:
            run_ranks(
                _local_probe,
                layout.size,
                args=(layout, dims, backend),
                backend=backend,
                timeout=timeout,
                on_message=lambda _, message: display.hear(message),
            )
        except RankFailedError as error:
            display.failed(error)
    return display.finish()


def _local_probe(layout: RankLayout, dims: list[tuple[str, ...]], backend: str) -> None:
    from hypercomm.cli.probe import probe, quieten
    from hypercomm.launch import report

    quieten()
    probe(layout, dims, backend, report)


def _check_backend(backend: str, local_ranks: int) -> None:
    from hypercomm.launch import check_devices
    from hypercomm.process_groups.options import check_backend  # loads torch

    check_backend(backend)
    check_devices(backend, local_ranks)


def _join(
    layout: RankLayout,
    dims: list[tuple[str, ...]],
    backend: str,
    timeout: float,
    display: _Display,
) -> int:
    """Run the probe as one rank of a launched job; rank 0 shows what all of them tell."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from hypercomm.cli.probe import probe, quieten

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    _check_backend(backend, local_rank + 1)
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    output = os.fdopen(os.dup(1), "w")
    quieten()
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    rank = dist.get_rank()

    def tell(message: Any) -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, message)
        if rank == 0:
            for each in everyone:
                display.hear(each)

    display.output = output
    with display if rank == 0 else contextlib.nullcontext():
        try:
            probe(layout, dims, backend, tell)
        except HyperCommError:
            raise
        except RuntimeError as error:  # a peer that died shows as torch's RuntimeError
            display.saw(rank, " ".join(str(error).split()))
        else:
            dist.destroy_process_group()
    return display.finish() if rank == 0 or display.seen else 0


@attrs.define
class _Display:
    """Gathers what the ranks tell, shows progress on stderr and the result on stdout."""

    layout: RankLayout
    backend: str
    dims: list[tuple[str, ...]]
    as_json: bool
    output: Any = attrs.field(factory=lambda: sys.stdout)
    rows: list[Row] = attrs.field(factory=list)
    error: RankFailedError | None = None
    seen: str = ""
    _started: float = attrs.field(factory=time.monotonic)
    _at: dict[int, list[str]] = attrs.field(factory=dict)
    _heard: dict[tuple[str, ...], list[Any]] = attrs.field(factory=dict)
    _progress: Console = attrs.field(factory=lambda: Console(stderr=True, highlight=False))
    _status: Any = None

    def __enter__(self) -> Self:
        self._status = self._progress.status(f"starting {self.layout.size} {self.backend} ranks")
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def hear(self, message: Any) -> None:
        """Take in a `Start` or a `Finding` of one rank."""
        if "starting" in message:
            self._at[message["rank"]] = message["dims"]
            return
        dims = tuple(message["dims"])
        heard = self._heard.setdefault(dims, [])
        heard.append(message)
        if len(heard) == self.layout.size:
            self.rows.append(self._row(dims, heard))
            self._tick(dims)

    def failed(self, error: RankFailedError) -> None:
        """Take in that a rank failed."""
        self.error = error

    def saw(self, rank: int, reason: str) -> None:
        """Take in what one rank of a launched job saw, when it may be another that failed."""
        self.seen = f"rank {rank} saw a failure, its own or a peer's: {reason}"

    def finish(self) -> int:
        """Print the result and return the exit code."""
        wrong = [line for row in self.rows for line in row["wrong"]]
        ok = not wrong and not (self.error or self.seen) and len(self.rows) == len(self.dims)
        if self.as_json:
            self._print_json(ok)
        else:
            self._print_table()
            console = Console(file=self.output, highlight=False, soft_wrap=True)
            for line in wrong[:_SHOWN_FAILURES]:
                console.print(f"[red]wrong[/] {escape(line)}", markup=True)
            if len(wrong) > _SHOWN_FAILURES:
                console.print(f"... and {len(wrong) - _SHOWN_FAILURES} more")
            console.print(self._verdict(ok), markup=False)
        self.output.flush()
        return 0 if ok else 1

    def _row(self, dims: tuple[str, ...], heard: list[Any]) -> Row:
        groups = self.layout.groups(*dims)
        latencies = [finding["latency"] for finding in heard if finding["latency"] is not None]
        bandwidths = [finding["bandwidth"] for finding in heard if finding["bandwidth"] is not None]
        return Row(
            dims=list(dims),
            groups=len(groups),
            size=groups.group_size,
            creation_s=max(finding["creation"] for finding in heard),
            latency_s=max(latencies, default=None),
            bandwidth_bytes_per_s=min(bandwidths, default=None),
            wrong=[
                f"{self._place(finding['rank'], dims)}: {what}"
                for finding in sorted(heard, key=lambda finding: int(finding["rank"]))
                for what in finding["wrong"]
            ],
        )

    def _place(self, rank: int, dims: Sequence[str] | None) -> str:
        at = format_coords(self.layout.coords(rank))
        if dims is None:
            return f"rank {rank} ({at})"
        ranks = list(self.layout.groups(*dims).of(rank))
        return f"rank {rank} ({at}) in group {'+'.join(dims)} of ranks {ranks}"

    def _tick(self, dims: tuple[str, ...]) -> None:
        done = f"{len(self.rows)} of {len(self.dims)} checked, last {'+'.join(dims)}"
        if self._progress.is_terminal:
            self._status.update(done)
        else:
            self._progress.print(done)

    def _print_json(self, ok: bool) -> None:
        failed = None
        if self.error is not None:
            dims = self._at.get(self.error.rank)
            failed = {"rank": self.error.rank, "dims": dims, "reason": self.error.reason}
        answer = {
            "layout": str(self.layout),
            "ranks": self.layout.size,
            "backend": self.backend,
            "ok": ok,
            "seconds": time.monotonic() - self._started,
            "groups": self.rows,
            "failed": failed,
            "seen": self.seen,
        }
        print(json.dumps(answer), file=self.output)

    def _print_table(self) -> None:
        if not self.rows:
            return
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("dims")
        for title in ("groups x size", "create", "latency", "bandwidth"):
            table.add_column(title, justify="right")
        table.add_column("result")
        for row in self.rows:
            bandwidth = row["bandwidth_bytes_per_s"]
            table.add_row(
                escape("+".join(row["dims"])),
                f"{row['groups']} x {row['size']}",
                f"{row['creation_s'] * 1e3:.1f} ms",
                "-" if row["latency_s"] is None else f"{row['latency_s'] * 1e6:.0f} us",
                "-" if bandwidth is None else f"{bandwidth / 1e6:,.0f} MB/s",
                "[red]wrong[/]" if row["wrong"] else "[green]ok[/]",
            )
        Console(file=self.output, highlight=False).print(table)

    def _verdict(self, ok: bool) -> str:
        seconds = f"{time.monotonic() - self._started:.1f} s"
        if ok:
            return (
                f"{self.layout}: all-reduce, all-gather and broadcast are right over every group, "
                f"on {self.layout.size} {self.backend} ranks, in {seconds}"
            )
        if self.seen:
            return f"failed after {len(self.rows)} of {len(self.dims)}: {self.seen}"
        if self.error is None:
            return f"{self.layout}: some results are wrong, see above"
        place = self._place(self.error.rank, self._at.get(self.error.rank))
        return f"failed: {place}: {self.error.reason}"
