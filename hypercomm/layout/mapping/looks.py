"""MappingLooks: what a mapping is given, and how it looks, as text, as HTML, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.mapping.cuts import Cut, as_lengths, resolve_axes
from hypercomm.layout.mapping.dim_roles import (
    Shards,
    as_dim,
    dims_of_axes,
    replicating,
    zigzag_dims,
)
from hypercomm.layout.rank_layout import RankLayout
from hypercomm.layout.reading.checks import positive
from hypercomm.layout.reading.shown import shown
from hypercomm.layout.reading.tables import as_frame, as_html

if TYPE_CHECKING:  # they read the layouts of this package, and are wanted by few
    from hypercomm.draw.drawing import Drawing
    from hypercomm.tools.place import On


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

    def draw(
        self,
        shape: Sequence[int] | None = None,
        itemsize: int | None = None,
        *,
        on: On | None = None,
    ) -> Drawing:
        """Return a picture of the mapping: a matrix of source and target ranks.

        Args:
            shape: The whole tensor's, in elements; default: amounts are parts of it.
            itemsize: The bytes of an element; default: amounts are elements.
            on: Where the ranks are, as for `RankLayout.draw`: rows and columns are hosts, or
                domains, where there are too many ranks.

        Raises:
            LayoutError: There are too many messages to list, or `shape` cannot be cut evenly.
            TopologyError: `on` cannot be read, or holds fewer ranks.

        Example:
            >>> from hypercomm import RankMapping
            >>> mapping = RankMapping("dp=2", "dp=1")
            >>> print(mapping.draw([8, 256], 4).text(width=70, color=False))
            dp=2 at 0 -> dp=1 at 0: fan-in 2 -> 1 along dp
            4 KiB move in 1 message, 4 KiB stay on their rank
            rank 1 sends most: 4 KiB
            <BLANKLINE>
            to rank
            from │     0
            0    │  (4K)
            1    │    4K
            (in brackets: stays on its rank)
        """
        from hypercomm.draw.making import drawing_of_mapping

        table = self.table()
        amounts, unit, whole = self._amounts(table, shape, itemsize)
        cells = np.stack([table["source"], table["target"], amounts], axis=1)
        return drawing_of_mapping(self, cells, unit, whole, on)

    def _amounts(
        self, table: NDArray[np.void], shape: Sequence[int] | None, itemsize: int | None
    ) -> tuple[NDArray[np.int64], str, int]:
        """How much each message holds, in which unit, and how much the whole tensor does."""
        amounts = np.ones(len(table), dtype=np.int64)
        each = 1 if itemsize is None else positive(itemsize, "itemsize")
        if shape is None:
            if itemsize is not None:
                raise LayoutError(f"itemsize {itemsize} needs the shape of the tensor; give shape=")
            for position in range(len(self.cuts)):
                amounts *= table["stop"][:, position] - table["start"][:, position]
            return amounts, "parts", math.prod(cut.units for cut in self.cuts)
        lengths = as_lengths(shape)
        whole = math.prod(lengths) * each
        if whole > np.iinfo(np.int64).max:
            raise LayoutError(f"a tensor of shape {shown(lengths)} is too large to count its parts")
        axes = resolve_axes(self.cuts, len(lengths))
        for position, (cut, axis) in enumerate(zip(self.cuts, axes, strict=True)):
            cut.part(0, 0).slice_of(lengths[axis], 1)  # refuses lengths that cannot be cut evenly
            stop, start = table["stop"][:, position], table["start"][:, position]
            amounts *= (stop - start) * (lengths[axis] // cut.units)
        left = math.prod(length for axis, length in enumerate(lengths) if axis not in axes)
        return amounts * (left * each), "elements" if itemsize is None else "B", whole

    def _repr_html_(self) -> str:
        try:
            return self.draw()._repr_html_()
        except LayoutError as error:
            return as_html(str(self), (), (), [str(error)])

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
