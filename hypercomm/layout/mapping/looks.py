"""MappingLooks: what a mapping is given, and how it looks, as text, as HTML, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.mapping.cuts import Cut
from hypercomm.layout.mapping.dim_roles import (
    Shards,
    as_dim,
    dims_of_axes,
    replicating,
    zigzag_dims,
)
from hypercomm.layout.rank_layout import RankLayout
from hypercomm.layout.reading.shown import shown
from hypercomm.layout.reading.tables import as_frame, as_html


class HasLayout(Protocol):
    """What has a layout, as a grid does."""

    @property
    def layout(self) -> RankLayout:
        """The numbering of its ranks."""


AnyLayout = RankLayout | HasLayout | str
"""A layout, a grid that has one, or sizes as text."""


def as_layout(given: AnyLayout, what: str) -> RankLayout:
    """Read a layout: one, that of a grid, or that of sizes as text.

    Raises:
        LayoutError: It is none of them; `what` begins the sentence.
    """
    if isinstance(given, str):
        return RankLayout.parse(given)
    layout = given if isinstance(given, RankLayout) else getattr(given, "layout", None)
    if not isinstance(layout, RankLayout):
        raise LayoutError(
            f"{what} must be a RankLayout, a grid, or sizes as text, got {shown(given)}"
        )
    return layout


def part_of(given: AnyLayout, at: Mapping[str, int] | None, what: str) -> RankLayout:
    """Read a layout, or of it the ranks with some coordinates.

    Raises:
        LayoutError, UnknownDimError: As for `as_layout` and `RankLayout.select`.
    """
    layout = as_layout(given, what)
    if at is not None and not isinstance(at, Mapping):
        raise LayoutError(f"at must be a mapping such as {{'pp': 1}}, got {shown(at)}")
    return (
        layout.select(**{as_dim(dim, "at"): index for dim, index in at.items()}) if at else layout
    )


@attrs.frozen(repr=False, init=False)
class MappingLooks:
    """The fields of a `RankMapping`, whose docstring tells of them, and how it looks."""

    source: RankLayout
    target: RankLayout
    along: str | None
    batch_axis: int
    shards: Shards
    pipeline: str | None
    leaders: bool
    backward: bool

    if TYPE_CHECKING:  # RankMapping has these

        @property
        def cuts(self) -> tuple[Cut, ...]: ...
        @property
        def kind(self) -> str: ...
        @property
        def source_ranks(self) -> tuple[int, ...]: ...
        @property
        def target_ranks(self) -> tuple[int, ...]: ...
        def table(self) -> NDArray[np.void]: ...
        def _sizes(self, dim: str) -> tuple[int, int]: ...

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping and its messages as a dict which JSON can hold.

        Raises:
            LayoutError: There are too many messages to list.

        Example:
            >>> from hypercomm import RankMapping
            >>> RankMapping("dp=2", "dp=1").to_dict()["messages"][1]
            {'source': 1, 'target': 0, 'start': [1], 'stop': [2]}
        """
        roles = ("along", "batch_axis", "pipeline", "leaders", "backward")
        table = self.table()
        return {
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            **{name: getattr(self, name) for name in roles},
            "shards": dict(self.shards),
            "messages": [
                {name: row[name].tolist() for name in table.dtype.names or ()} for row in table
            ],
        }

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each message, in units of each cut axis.

        Raises:
            LayoutError: There are too many messages to list.
            MissingPackageError: pandas is not installed; says how to install it.
        """
        table = self.table()
        columns = {name: table[name] for name in ("source", "target")}
        for position, cut in enumerate(self.cuts):
            for name in ("start", "stop"):
                columns[f"{name}_{cut.axis}"] = table[name][:, position]
        return as_frame(columns, "message", range(len(table)))

    def _repr_html_(self) -> str:
        return as_html(str(self), (), ())

    def __str__(self) -> str:
        axes = dims_of_axes(self.along, self.batch_axis, self.shards)
        words = []
        if self.along is not None:
            before, after = self._sizes(self.along)
            words = [f"{self.kind} {before} -> {after} along {self.along}"]
        cut = [
            f"{cut.sources} -> {cut.targets} on axis {cut.axis}"
            + " in zigzag" * any(dim in zigzag_dims(self.shards) for dim in axes[cut.axis])
            for cut in self.cuts
            if axes[cut.axis] != (self.along,)
        ]
        words += cut or ["whole"] * (self.along is None)
        words += ["leaders only"] * self.leaders + ["backward"] * self.backward
        idle = replicating(
            self.source, self.target, {self.along, self.pipeline, *dict(self.shards)}
        )
        copies = f"; {', '.join(idle)} {'replicates' if len(idle) == 1 else 'replicate'}"
        ends = f"{_with_ranks(self.source)} -> {_with_ranks(self.target)}"
        return f"{ends}: {', '.join(words)}{copies if idle else ''}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


def _with_ranks(layout: RankLayout) -> str:
    listing = layout._listing
    return (
        f"{layout} at {layout.rank_offset}" if listing is None else f"{layout} on ranks {listing}"
    )
