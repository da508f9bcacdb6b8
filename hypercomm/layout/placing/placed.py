"""Placed: a layout on a machine: which groups lie inside which units, and what would be better."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from hypercomm.draw import Drawing
from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import check_choice
from hypercomm.layout.placing import writing
from hypercomm.layout.placing.search import MOST_DIMS, Cost, Dims
from hypercomm.layout.placing.spread import Spread
from hypercomm.layout.placing.traffic import Traffic
from hypercomm.layout.text import aligned, as_html, counted
from hypercomm.topology import Topology

COLUMNS = ("dims", "level", "across", "units of each", "bytes across")
"""What the cells of a `Spread` are."""

TAKEN = ("best", "given", "order", "hosts", "spare", "split", "sizes")
"""What can be taken of a report."""


@attrs.frozen(repr=False)
class Placed:
    """A layout on a machine; made by `place`, and `str()` is a table.

    Attributes:
        layout: The layout.
        topology: The machine: rank r of the layout is its rank r.
        traffic: What is sent over which dims in a step.
        weights: What a byte costs that crosses each level.
        is_assumed: Whether nothing told the traffic, and dims are taken to matter as they usually
            do; no bytes are shown then.
        spreads: How the groups of each dim, and of all dims with traffic, lie on each level.
        cost: What all traffic costs.
        warnings: Of groups of tp or ep that leave their domain, or their host where there is none.
        proposals: What would cost less, the best first.
        gpus: The machine's GPU of each rank, where hosts are in another order or left out.

    Example:
        >>> from hypercomm.layout.placing import place
        >>> traffic = "tp=40G,dp=6G,pp=0.1G"
        >>> placed = place("tp=4,dp=16,pp=4", on="host=4,domain=72", traffic=traffic)
        >>> [(one.dims, one.across, one.groups) for one in placed.on("domain")]
        [(('tp',), 0, 64), (('dp',), 12, 16), (('pp',), 64, 64)]
        >>> placed.proposals[0].kind, placed.best.find("dp", "domain").across
        ('spare', 0)
    """

    layout: RankLayout
    topology: Topology
    traffic: Mapping[Dims, Traffic]
    weights: Mapping[str, float]
    is_assumed: bool
    spreads: tuple[Spread, ...]
    cost: Cost
    warnings: tuple[str, ...] = ()
    proposals: tuple[Proposal, ...] = ()
    gpus: tuple[int, ...] = ()

    @property
    def best(self) -> Placed:
        """The best of what is proposed for these dims and sizes; this, where nothing is better."""
        same = [one.placed for one in self.proposals if one.kind in {"order", "hosts", "spare"}]
        return min([self, *same], key=lambda one: one.cost)

    def take(self, kind: str) -> Placed:
        """Return what is proposed of a kind.

        Args:
            kind: As of `Proposal`; "given": this one; "best": the best for these dims and sizes.

        Raises:
            LayoutError: There is no such kind, or nothing of it is proposed.

        Example:
            >>> from hypercomm.layout.placing import place
            >>> str(place("dp=4,tp=2", on=2).take("order").layout)
            'tp=2,dp=4'
        """
        check_choice("the kind to take", kind, TAKEN, LayoutError)
        if kind in {"given", "best"}:
            return self if kind == "given" else self.best
        for proposal in self.proposals:
            if proposal.kind == kind:
                return proposal.placed
        there = ", ".join(proposal.kind for proposal in self.proposals) or "none"
        raise LayoutError(
            f"nothing of kind {kind!r} is proposed for {self.layout}; there is {there}"
        )

    def on(self, level: str) -> tuple[Spread, ...]:
        """Return how groups lie on a level.

        Raises:
            TopologyError: There is no such level.
        """
        self.topology.level(level)
        return tuple(spread for spread in self.spreads if spread.level == level)

    def find(self, dims: str | Iterable[str], level: str) -> Spread:
        """Return how the groups over some dims lie on a level.

        Raises:
            LayoutError: These dims were not looked at.
            TopologyError: There is no such level.
        """
        wanted = self.layout.order_dims(dims)
        for spread in self.on(level):
            if spread.dims == wanted:
                return spread
        known = ", ".join("+".join(spread.dims) for spread in self.on(level))
        raise LayoutError(f"{'+'.join(wanted)} was not looked at, but {known}; ask for it: groups=")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict of texts, lists and numbers, which JSON can hold."""
        levels = self.topology.levels
        return {
            "layout": str(self.layout),
            "ranks": self.layout.size,
            "levels": {level.name: level.units for level in levels},
            "traffic": None if self.is_assumed else _traffic_form(self.traffic),
            "groups": [spread.to_dict() for spread in self.spreads],
            "cost": self.cost._asdict(),
            "warnings": list(self.warnings),
            "proposals": [one.to_dict() for one in self.proposals],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def write(self, kind: str, path: str | os.PathLike[str], force: bool = False) -> None:
        """Write what a launcher or a framework takes, for this layout as it is.

        Args:
            kind: "order", "layout", "rankfile", "slurm-hostfile", "hostfile", "sbatch" or
                "nvlink-domain", as in `text_for`.
            path: A file.
            force: Whether one that exists is replaced.

        Raises:
            LayoutError: The kind is unknown, or cannot be written for this machine.
            FileKeptError: The file exists, and is kept.
        """
        writing.save(self.text_for(kind), path, force)

    def text_for(self, kind: str) -> str:
        r"""Return what `write` writes.

        Args:
            kind: "order": Megatron's order of dims; "layout": the layout as JSON; "rankfile": Open
                MPI's; "slurm-hostfile": what SLURM_HOSTFILE names; "hostfile": hosts with slots;
                "sbatch": the options for SLURM's blocks; "nvlink-domain": NVLINK_DOMAIN_SIZE.

        Raises:
            LayoutError: The kind is unknown, or cannot be written for this machine.

        Example:
            >>> from hypercomm.layout.placing import place
            >>> place("tp=4,dp=2,pp=2", on=4).text_for("order")
            'tp-dp-pp\n'
        """
        return writing.text_for(kind, self.layout, self.topology)

    def draw(self, dims: str | Iterable[str] | None = None) -> Drawing:
        """Return a picture of the layout on the hosts, domains and switches of the machine.

        Args:
            dims: As of `RankLayout.draw`.

        Raises:
            UnknownDimError: The layout has no such dim.

        Example:
            >>> from hypercomm.layout.placing import place
            >>> print(place("dp=2,tp=2", on=2).best.draw().text(width=60).splitlines()[-2])
            tp: 2 groups of 2, each inside one host
        """
        return self.layout.draw(on=self.topology, dims=dims)

    @property
    def headline(self) -> str:
        """The layout and its machine in one sentence."""
        units = self.topology.select(self.layout.ranks).levels
        told = ", ".join(counted(one.units, one.name) for one in units)
        return f"{self.layout}: {self.layout.size:,} ranks on {told}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What else there is to say of the table."""
        order = "; the first dim varies fastest"
        if self.is_assumed:
            told = f"no traffic is given: tp matters most, then cp and ep, pp, and dp{order}"
            return (told, *self._unsearched)
        beside = []
        for dims, one in self.traffic.items():
            waits = [part.overlapped for part in one.parts]
            if any(waits):
                beside.append(("" if all(waits) else "part of ") + "+".join(dims))
        told = f"no step waits for {', '.join(beside)}{order}" if beside else order[2:]
        return (f"bytes across: of all groups in a step; {told}", *self._unsearched)

    @property
    def is_searched(self) -> bool:
        """Whether a layout like this is compared with others: one of up to 8 dims larger than 1."""
        return sum(size > 1 for size in self.layout.shape) <= MOST_DIMS

    @property
    def _unsearched(self) -> tuple[str, ...]:
        if self.is_searched:
            return ()
        return (f"nothing better was looked for, as more than {MOST_DIMS} dims are larger than 1",)

    def __str__(self) -> str:
        columns = COLUMNS[:4] if self.is_assumed else COLUMNS
        rows = [columns, *(spread.cells[: len(columns)] for spread in self.spreads)]
        lines = [self.headline, *aligned(rows), *self.notes]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [str(proposal) for proposal in self.proposals]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Placed: {self.headline}; {len(self.proposals)} proposals>"

    def _repr_html_(self) -> str:
        rows = [spread.cells for spread in self.spreads]
        lines = [*self.notes, *self.warnings, *(one.headline for one in self.proposals)]
        return as_html(self.headline, COLUMNS, rows, lines)


@attrs.frozen(repr=False)
class Proposal:
    """What would cost less; `str()` is what changes.

    Attributes:
        kind: "order", "hosts", "split", "spare", or of another number of ranks: "sizes".
        words: What to do.
        placed: How it lies then.
        before: How it lies now.
    """

    kind: str
    words: str
    placed: Placed
    before: Placed

    @property
    def saving(self) -> str:
        """What is saved, in words.

        Example:
            >>> from hypercomm.layout.placing import place
            >>> place("dp=4,tp=2", on=2, traffic="tp=3,dp=1").proposals[0].saving
            'steps wait for 71 % less across units'
        """
        if self.kind == "sizes":
            return "no groups of a dim lie partly inside"
        if self.before.is_assumed:
            return "groups that matter more lie inside"
        for name, words in (
            ("waited", "steps wait for {} less across units"),
            ("beside", "{} less crosses units beside the computation"),
            ("minor", "{} less crosses hosts within domains"),
        ):
            was, now = getattr(self.before.cost, name), getattr(self.placed.cost, name)
            if now != was:
                share = 100 * (was - now) / was
                return words.format(f"{share:.0f} %" if 1 <= share < 99 else f"{share:.3g} %")
        return "nothing is saved"

    @property
    def headline(self) -> str:
        """What to do, and what it saves."""
        return f"{self.kind}: {self.words}; {self.saving}"

    @property
    def changes(self) -> list[tuple[str, ...]]:
        """What changes: dims, level, groups across, units of each and bytes, before and after."""
        was = {(one.dims, one.level): one.cells for one in self.before.spreads}
        partly = {(one.dims, one.level) for one in self.before.spreads if one.is_partly}
        rows = []
        for after in self.placed.spreads:
            own = self.before.layout.dim_names
            # Groups over a dim that was not there before have nothing to be compared with.
            is_known = {*after.dims} <= {*own}
            dims = tuple(dim for dim in own if dim in after.dims) if is_known else ()
            if self.kind == "sizes" and (dims, after.level) not in partly:
                continue
            before = was.get((dims, after.level), after.cells)
            pairs = zip(before[2:], after.cells[2:], strict=True)
            moved = [one if one == two else f"{one} -> {two}" for one, two in pairs]
            if before[2:] != after.cells[2:] or not dims:
                rows.append((*after.cells[:2], *moved[: 2 if self.before.is_assumed else 3]))
        return rows

    @property
    def _hosts(self) -> list[str] | None:
        """The hosts in the order of ranks, where they are chosen."""
        topology = self.placed.topology
        chosen = bool(self.placed.gpus) and "host" in topology.names
        return list(topology.level("host").names) if chosen else None

    def to_dict(self) -> dict[str, Any]:
        """Return the proposal as a dict, which JSON can hold.

        `gpus` are the machine's, in the order of ranks, as in "8..11, 0..3"; `hosts` likewise.
        """
        placed = self.placed.to_dict()
        del placed["proposals"], placed["levels"], placed["traffic"]
        return {
            "kind": self.kind,
            "words": self.words,
            "saving": self.saving,
            "gpus": _runs(self.placed.gpus) if self.placed.gpus else None,
            "hosts": self._hosts,
            **placed,
        }

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"  {line}" for line in aligned(self.changes))])

    def __repr__(self) -> str:
        return f"<Proposal: {self.headline}>"


def _runs(gpus: tuple[int, ...]) -> str:
    """Write numbers in their order, those that count up by one as a run."""
    cuts = [at for at in range(1, len(gpus)) if gpus[at] != gpus[at - 1] + 1]
    runs = [gpus[start:end] for start, end in zip([0, *cuts], [*cuts, len(gpus)], strict=True)]
    return ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _traffic_form(traffic: Mapping[Dims, Traffic]) -> dict[str, Any]:
    return {"+".join(dims): attrs.asdict(one) for dims, one in traffic.items()}
