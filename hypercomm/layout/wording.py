"""How a mapping between layouts is written in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypercomm.layout.rank_layout import RankLayout
from hypercomm.layout.roles import dims_of_axes, replicating

if TYPE_CHECKING:
    from hypercomm.layout.mapping_fields import MappingFields


def describe(mapping: MappingFields) -> str:
    """Say what is where, what becomes of each axis that is cut, and which dims replicate.

    Example:
        >>> from hypercomm import RankMapping
        >>> source, target = RankLayout.parse("tp=2,dp=2"), RankLayout([4], ["dp"], 4)
        >>> describe(RankMapping(source, target, shards={"tp": -1}))
        'tp=2,dp=2 at 0 -> dp=4 at 4: fan-out 2 -> 4 along dp, 2 -> 1 on axis -1'
    """
    along, axes = mapping.along, dims_of_axes(mapping.along, mapping.batch_axis, mapping.shards)
    words = [str(mapping.kind)]
    if along is not None:
        before, after = mapping.source.size_of(along, 1), mapping.target.size_of(along, 1)
        words[0] += f" {before} -> {after} along {along}"
    words += [
        f"{cut.source} -> {cut.target} on axis {cut.axis}"
        for cut in mapping.cuts
        if axes[cut.axis] != (along,)
    ]
    words += ["leaders only"] * mapping.leaders + ["backward"] * mapping.backward
    roles = {along, mapping.pipeline, *dict(mapping.shards)}
    idle = replicating(mapping.source, mapping.target, roles)
    copies = f"; {', '.join(idle)} {'replicates' if len(idle) == 1 else 'replicate'}"
    ends = f"{with_ranks(mapping.source)} -> {with_ranks(mapping.target)}"
    return f"{ends}: {', '.join(words)}{copies if idle else ''}"


def with_ranks(layout: RankLayout) -> str:
    """Write a layout with its ranks: where they begin, or which they are if they are listed.

    Example:
        >>> with_ranks(RankLayout([2], ["dp"], 4))
        'dp=2 at 4'
        >>> with_ranks(RankLayout([2], ["dp"], ranks=[3, 1]))
        'dp=2 on ranks 3, 1'
    """
    listing = layout._listing
    place = f"at {layout.rank_offset}" if listing is None else f"on ranks {listing}"
    return f"{layout} {place}"
