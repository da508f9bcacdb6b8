"""Pipeline stages of layouts: the first and the last one, their leaders, and chains of modules.

A module is pipelined along one dim of its layout. A dim that a layout lacks has size 1, so that
all of its ranks are the first stage, and the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_ordered, as_rank
from hypercomm.layout.groups import RankGroups
from hypercomm.layout.layout import RankLayout
from hypercomm.layout.text import shown

Chain = Iterable[RankLayout] | Mapping[str, RankLayout]
"""The layouts of modules, in the order of the data; perhaps by name."""


class Boundary(NamedTuple):
    """The ranks on both sides of the edge between two modules.

    Attributes:
        senders: The ranks of the last stage of the module before.
        receivers: The ranks of the first stage of the next module.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]


def first_stage(layout: RankLayout, dim: str = "pp") -> tuple[int, ...]:
    """Return the ranks of the first stage: those whose coordinate along a dim is 0.

    Args:
        layout: The layout of a module.
        dim: The dim that it is pipelined along; all ranks, where the layout lacks it.

    Returns:
        The ranks, in the order of `RankLayout.ranks_where`.

    Raises:
        LayoutError: `layout` is not a RankLayout.

    Example:
        >>> first_stage(RankLayout.parse("tp=2,pp=3", rank_offset=4))
        (4, 5)
    """
    return _stage(layout, dim, 0)


def last_stage(layout: RankLayout, dim: str = "pp") -> tuple[int, ...]:
    """Return the ranks of the last stage; arguments and errors as for `first_stage`.

    Example:
        >>> last_stage(RankLayout.parse("tp=2,pp=3", rank_offset=4))
        (8, 9)
        >>> last_stage(RankLayout.parse("tp=2"))
        (0, 1)
    """
    return _stage(layout, dim, _depth_of(layout, dim) - 1)


def is_in_first_stage(layout: RankLayout, rank: int, dim: str = "pp") -> bool:
    """Return whether a rank is in the first stage, in O(dims); False outside the layout.

    Raises:
        LayoutError: `layout` is not a RankLayout, or `rank` is not an int.

    Example:
        >>> layout = RankLayout.parse("tp=2,pp=3")
        >>> [rank for rank in range(9) if is_in_first_stage(layout, rank)]
        [0, 1]
    """
    _depth_of(layout, dim)
    return _stage_of(layout, rank, dim) == 0


def is_in_last_stage(layout: RankLayout, rank: int, dim: str = "pp") -> bool:
    """Return whether a rank is in the last stage; arguments and errors as for `is_in_first_stage`.

    Example:
        >>> layout = RankLayout.parse("tp=2,pp=3")
        >>> [rank for rank in range(9) if is_in_last_stage(layout, rank)]
        [4, 5]
    """
    depth = _depth_of(layout, dim)
    return _stage_of(layout, rank, dim) == depth - 1


def leaders(groups: RankGroups) -> tuple[int, ...]:
    """Return the leader of each group, its first member, in the order of the groups.

    Example:
        >>> leaders(RankLayout.parse("tp=2,dp=3").groups("tp"))
        (0, 2, 4)
    """
    return tuple(groups.to_array()[:, 0].tolist())


def leader_of(groups: RankGroups, rank: int) -> int:
    """Return the leader of the group that a rank is a member of, in O(dims).

    Raises:
        RankOutsideError: `rank` is a member of no group.

    Example:
        >>> leader_of(RankLayout.parse("tp=2,dp=3").groups("tp"), 3)
        2
    """
    return groups.members(groups.index_of(rank), range(1))[0]


def boundary(source: RankLayout, target: RankLayout, dim: str = "pp") -> Boundary:
    """Return the ranks that send and receive where one pipelined module follows another.

    Args:
        source: The layout of the module before.
        target: The layout of the next module.
        dim: The dim that both are pipelined along.

    Raises:
        LayoutError: `source` or `target` is not a RankLayout.

    Example:
        >>> encoder = RankLayout.parse("tp=1,pp=2")
        >>> boundary(encoder, RankLayout.parse("tp=2,pp=2", rank_offset=2))
        Boundary(senders=(1,), receivers=(2, 3))
    """
    return Boundary(last_stage(source, dim), first_stage(target, dim))


def pipeline_depth(chain: Chain, dim: str = "pp") -> int:
    """Return how many stages a chain of modules has, one module after the other.

    Args:
        chain: The layouts of the modules, in the order of the data; perhaps by
            name, as in `GridSet.layouts`.
        dim: The dim that they are pipelined along.

    Raises:
        LayoutError: `chain` is not a sequence of layouts, or empty.

    Example:
        >>> pipeline_depth([RankLayout.parse("tp=2"), RankLayout.parse("tp=2,pp=3")])
        4
    """
    return sum(_depth_of(layout, dim) for layout in _as_chain(chain))


def pipeline_stages(chain: Chain, rank: int, dim: str = "pp") -> tuple[int, ...]:
    """Return the stages of a chain of modules that a rank works on, counted over the whole chain.

    The stages of a module follow those of all modules before it. Costs O(dims) for each.

    Args:
        chain: The layouts of the modules, in the order of the data; perhaps by
            name, as in `GridSet.layouts`.
        rank: Any rank.
        dim: The dim that they are pipelined along.

    Returns:
        The stages, ascending, one for each module that is on the rank: none outside all of them,
        several where modules share ranks.

    Raises:
        LayoutError: `chain` is not a sequence of layouts, or empty, or `rank` is not an int.

    Example:
        >>> encoder = RankLayout.parse("tp=1,pp=2")
        >>> llm = RankLayout.parse("tp=2,pp=2", rank_offset=2)
        >>> [pipeline_stages([encoder, llm], rank) for rank in (0, 1, 2, 5, 6)]
        [(0,), (1,), (2,), (3,), ()]
    """
    stages, before = [], 0
    for layout in _as_chain(chain):
        depth, stage = _depth_of(layout, dim), _stage_of(layout, rank, dim)
        stages += [] if stage is None else [before + stage]
        before += depth
    return tuple(stages)


def _stage(layout: RankLayout, dim: str, stage: int) -> tuple[int, ...]:
    """The ranks of one stage."""
    _depth_of(layout, dim)
    return layout.ranks_where(**({dim: stage} if dim in layout.dim_names else {}))


def _stage_of(layout: RankLayout, rank: int, dim: str) -> int | None:
    """The stage of a rank; None outside the layout."""
    rank = as_rank(rank)
    return layout.coords(rank).get(dim, 0) if rank in layout else None


def _depth_of(layout: RankLayout, dim: str) -> int:
    """The number of stages of one module, after checking both."""
    if not isinstance(layout, RankLayout):
        raise LayoutError(f"a module has a RankLayout, got {shown(layout)}")
    return layout.size_of(dim, default=1)


def _as_chain(chain: Chain) -> tuple[RankLayout, ...]:
    every = tuple(chain.values()) if isinstance(chain, Mapping) else chain
    layouts = as_ordered(every, "the chain of layouts")
    if not layouts:
        raise LayoutError("the chain of layouts is empty; give that of one module at least")
    return layouts
