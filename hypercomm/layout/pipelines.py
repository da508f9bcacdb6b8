"""Pipeline stages of layouts: the first and the last one, and those of a chain of modules.

A module is pipelined along one dim of its layout. A dim that a layout lacks has size 1, so that
all of its ranks are the first stage, and the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_ordered, as_rank
from hypercomm.layout.layout import RankLayout
from hypercomm.layout.text import shown

Chain = Iterable[RankLayout] | Mapping[str, RankLayout]
"""The layouts of modules, in the order of the data; perhaps by name."""


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
    stages, before, rank = [], 0, as_rank(rank)
    for layout in _as_chain(chain):
        depth = _depth_of(layout, dim)
        if rank in layout:
            stages.append(before + layout.coords(rank).get(dim, 0))
        before += depth
    return tuple(stages)


def _stage(layout: RankLayout, dim: str, stage: int) -> tuple[int, ...]:
    """The ranks of one stage."""
    _depth_of(layout, dim)
    return layout.ranks_where(**({dim: stage} if dim in layout.dim_names else {}))


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
