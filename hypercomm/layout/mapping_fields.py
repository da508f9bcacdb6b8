"""The fields of a RankMapping: what they may be, and how both layouts hold the tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import attrs

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_int
from hypercomm.layout.exchange import Exchange
from hypercomm.layout.messages import shown
from hypercomm.layout.parts import Cut
from hypercomm.layout.rank_layout import RankLayout
from hypercomm.layout.roles import (
    as_dim,
    as_flag,
    as_shards,
    check_batch,
    check_roles,
    dims_of_axes,
)
from hypercomm.layout.spread import Spread
from hypercomm.layout.wording import describe

Kind = Literal["equal", "fan-in", "fan-out"]
"""Whether the batch has as many shards on the target as on the source, fewer, or more."""


@attrs.frozen(repr=False, init=False)
class MappingFields:
    """The fields of a `RankMapping`, whose docstring tells of them, and what follows at once.

    Example:
        >>> fields = MappingFields(RankLayout.parse("tp=2,dp=4"), RankLayout.parse("dp=2"))
        >>> fields.kind, fields.cuts, fields.source_ranks
        ('fan-in', (Cut(axis=0, source=4, target=2),), (0, 1, 2, 3, 4, 5, 6, 7))
    """

    source: RankLayout
    target: RankLayout
    along: str | None
    batch_axis: int
    shards: tuple[tuple[str, int], ...]
    pipeline: str | None
    leaders: bool
    backward: bool
    _exchange: Exchange = attrs.field(init=False, eq=False)

    def __init__(
        self,
        source: RankLayout,
        target: RankLayout,
        along: str | None = "dp",
        *,
        batch_axis: int = 0,
        shards: Mapping[str, int] | Iterable[tuple[str, int]] | None = None,
        pipeline: str | None = "pp",
        leaders: bool = False,
        backward: bool = False,
    ) -> None:
        for layout, what in ((source, "source"), (target, "target")):
            if not isinstance(layout, RankLayout):
                raise LayoutError(f"{what} must be a RankLayout, got {shown(layout)}")
        along = None if along is None else as_dim(along, "along")
        pipeline = None if pipeline is None else as_dim(pipeline, "pipeline")
        batch_axis = as_int(batch_axis, "batch_axis")
        if shards is None:
            dims = {*source.dim_names, *target.dim_names} - {along, pipeline}
            has_sequence = along is not None and "cp" in dims
            shards = {"cp": 0 if batch_axis == 1 else 1} if has_sequence else {}
        pairs = as_shards(shards)
        flags = as_flag(leaders, "leaders"), as_flag(backward, "backward")
        self.__attrs_init__(source, target, along, batch_axis, pairs, pipeline, *flags)
        check_roles(source, target, along, pairs, pipeline)
        if along is not None:
            check_batch(along, *self._sizes(along))
        object.__setattr__(self, "_exchange", self._make_exchange())

    def _make_exchange(self) -> Exchange:
        """Work out, once, how both layouts hold the tensor."""
        axes = dims_of_axes(self.along, self.batch_axis, self.shards)
        cuts = {  # an axis that neither layout cuts is left alone
            axis: dims for axis, dims in axes.items() if max(map(max, map(self._sizes, dims))) > 1
        }
        dims = tuple(cuts.values())
        before = Spread(self.source, dims, self._stage(self.source, last=not self.backward))
        after = Spread(self.target, dims, self._stage(self.target, last=self.backward))
        numbers = zip(cuts, before.shards, after.shards, strict=True)
        return Exchange(before, after, tuple(Cut(*number) for number in numbers), self.leaders)

    def _sizes(self, dim: str) -> tuple[int, int]:
        return self.source.size_of(dim, 1), self.target.size_of(dim, 1)

    def _stage(self, layout: RankLayout, *, last: bool) -> tuple[str, int] | None:
        if self.pipeline is None or self.pipeline not in layout.dim_names:
            return None
        return self.pipeline, layout.size_of(self.pipeline) - 1 if last else 0

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The tensor axes that are cut, the batch's first if it is."""
        return self._exchange.cuts

    @property
    def kind(self) -> Kind:
        """Whether the batch keeps its number of shards ("equal") or has fewer or more after it.

        These are the shards along `along`; without one there is one shard, and it stays so.
        """
        before, after = (1, 1) if self.along is None else self._sizes(self.along)
        return "equal" if before == after else "fan-in" if before > after else "fan-out"

    @property
    def _batch(self) -> Cut | None:
        """How the batch is cut, if it is."""
        cut = next(iter(self.cuts), None)
        return cut if cut and self.along is not None and cut.axis == self.batch_axis else None

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The ranks that the tensor leaves, in the order of the layout."""
        return self._exchange.before.ranks

    @property
    def target_ranks(self) -> tuple[int, ...]:
        """The ranks that the tensor enters, in the order of the layout."""
        return self._exchange.after.ranks

    def __str__(self) -> str:
        return describe(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"
