"""The rows of a check: what came of each set of groups, as the slowest rank has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from rich.markup import escape
from rich.table import Column, Table

from hypercomm.cli.check.request import Figures, Timing
from hypercomm.cli.plan.keys import Key
from hypercomm.cli.printing import numbers, table
from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_coords


@attrs.frozen
class Rank:
    """A rank and the host that it runs on."""

    rank: int
    host: str


@attrs.frozen
class SweepRow:
    """One collective with messages of one size, as the slowest rank has it.

    Attributes:
        algbw_bytes_per_s: The size over the time, as in nccl-tests.
        busbw_bytes_per_s: That times a factor, as in nccl-tests: it compares with the links.
        slowest: Who took longest.
    """

    collective: str
    bytes: int
    seconds: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    slowest: Rank


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
    lacking: list[str]
    sweep: list[SweepRow]


def bus_factor(collective: str, ranks: int) -> float:
    """Return what algbw is multiplied by to have busbw, as in nccl-tests.

    Example:
        >>> bus_factor("all-reduce", 4), bus_factor("all-gather", 4), bus_factor("broadcast", 4)
        (1.5, 0.75, 1.0)
    """
    if collective == "all-reduce":
        return 2 * (ranks - 1) / ranks
    return (
        (ranks - 1) / ranks if collective in {"all-gather", "reduce-scatter", "all-to-all"} else 1.0
    )


def place_of(layout: RankLayout, rank: int, key: Key | None = None) -> str:
    """Name a rank with its coordinates, and its group.

    Example:
        >>> place_of(RankLayout.parse("tp=2,dp=2"), 3, Key(None, ("dp",)))
        'rank 3 (tp=1, dp=1) in group dp of ranks [1, 3]'
    """
    place = f"rank {rank} ({format_coords(layout.coords(rank))})"
    if key is None:
        return place
    return f"{place} in group {key} of ranks {list(layout.groups(*key.dims).of(rank))}"


def make_row(layout: RankLayout, key: Key, told: Mapping[int, Figures]) -> Row:
    """Make the row of some groups from what all ranks found; `layout` is that of the key."""
    groups = layout.groups(*key.dims)
    alone = groups.group_size == 1
    slowest = min(sorted(told), key=lambda rank: told[rank]["bandwidth"])
    return Row(
        key.view,
        key.dims,
        len(groups),
        groups.group_size,
        creation_s=max(figures["creation"] for figures in told.values()),
        latency_s=None if alone else max(figures["latency"] for figures in told.values()),
        bandwidth_bytes_per_s=None if alone else told[slowest]["bandwidth"],
        slowest=None if alone else Rank(slowest, told[slowest]["host"]),
        wrong=[
            f"{place_of(layout, rank, key)}: {what}"
            for rank in sorted(told)
            for what in told[rank]["wrong"]
        ],
        lacking=sorted({name for figures in told.values() for name in figures["lacking"]}),
        sweep=_sweep(told, groups.group_size),
    )


def _sweep(told: Mapping[int, Figures], ranks: int) -> list[SweepRow]:
    """Take of each message the slowest rank; all ranks time the same ones in the same order."""
    rows = []
    for timings in zip(*(told[rank]["sweep"] for rank in sorted(told)), strict=True):
        of_rank: dict[int, Timing] = dict(zip(sorted(told), timings, strict=True))
        slowest = max(of_rank, key=lambda rank: of_rank[rank]["seconds"])
        name, size = of_rank[slowest]["collective"], of_rank[slowest]["bytes"]
        seconds = of_rank[slowest]["seconds"]
        algbw = size / seconds
        busbw = algbw * bus_factor(name, ranks)
        rows.append(
            SweepRow(name, size, seconds, algbw, busbw, Rank(slowest, told[slowest]["host"]))
        )
    return rows


def groups_table(rows: Sequence[Row], backend: str, *, with_hosts: bool) -> Table:
    """Make the table of all groups; the slowest ranks with their hosts where there are several."""
    titles = map(numbers, ("groups x size", "create", "latency", "bandwidth"))
    shown = table("dims", *titles, _words("slowest"), _words("result"), pad_edge=True)
    for row in rows:
        latency, bandwidth = row.latency_s, row.bandwidth_bytes_per_s
        lacking = f", {' and '.join(row.lacking)} not by {backend}" if row.lacking else ""
        shown.add_row(
            escape(str(Key(row.view, row.dims))),
            f"{row.groups} x {row.size}",
            f"{row.creation_s * 1e3:.1f} ms",
            "-" if latency is None else f"{latency * 1e6:.0f} us",
            "-" if bandwidth is None else f"{bandwidth / 1e6:,.0f} MB/s",
            _shown(row.slowest, with_host=with_hosts),
            ("[red]wrong[/]" if row.wrong else "[green]ok[/]") + escape(lacking),
        )
    return shown


def sweep_table(rows: Sequence[Row], *, with_hosts: bool) -> Table:
    """Make the table of all messages, in the words and units of nccl-tests."""
    titles = map(numbers, ("size (B)", "time (us)", "algbw (GB/s)", "busbw (GB/s)"))
    shown = table("dims", _words("collective"), *titles, _words("slowest"), pad_edge=True)
    for row in rows:
        for number, each in enumerate(row.sweep):
            same = number > 0 and row.sweep[number - 1].collective == each.collective
            shown.add_row(
                "" if number else escape(str(Key(row.view, row.dims))),
                "" if same else each.collective,
                str(each.bytes),
                f"{each.seconds * 1e6:.1f}",
                f"{each.algbw_bytes_per_s / 1e9:.3g}",
                f"{each.busbw_bytes_per_s / 1e9:.3g}",
                _shown(each.slowest, with_host=with_hosts),
            )
    return shown


def _words(title: str) -> Column:
    return Column(title, no_wrap=True)


def _shown(slowest: Rank | None, *, with_host: bool) -> str:
    if slowest is None:
        return "-"
    return f"rank {slowest.rank}" + (f" on {escape(slowest.host)}" if with_host else "")
