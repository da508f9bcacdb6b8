"""Megatron's numbering of ranks: a layout from an order of dims, and `RankGenerator`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hypercomm.compat.megatron import version
from hypercomm.errors import ConfigurationError, LayoutError, UnknownDimError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_int, as_ordered, positive
from hypercomm.layout.parsing import parse_order
from hypercomm.layout.text import shown

GTP = "gtp_remat"
"""The dim of generalized tensor parallelism: peers share each weight and gather it to use it."""

DIMS = ("tp", "pp", "dp", "ep", "cp", GTP)
"""The dims that an order may name, in the order in which Megatron appends those that it omits."""


class Layouts(NamedTuple):
    """The two factorisations of one span of ranks."""

    dense: RankLayout
    expert: RankLayout


def order_layout(
    order: str, sizes: Mapping[str, int], rank_offset: int, anchor: str | None = None
) -> RankLayout:
    """Return the layout of sizes in an order of Megatron's dims, which may omit those of size 1.

    Args:
        order: The dims, the first one varying fastest.
        sizes: Their sizes; the dim gtp_remat exists only if it has a size here.
        rank_offset: The smallest rank.
        anchor: The dim after which gtp_remat is inserted if the order does not name it; default:
            the order must name it.

    Raises:
        UnknownDimError: The order names another dim.
        ConfigurationError: It omits a dim larger than 1.

    Example:
        >>> str(order_layout("pp-tp", dict(tp=2, pp=4, dp=1, ep=1, cp=1), 0))
        'pp=4,tp=2,dp=1,ep=1,cp=1'
    """
    named = inject_gtp(order, anchor) if GTP in sizes and anchor is not None else order
    names = parse_order(named.lower() if isinstance(named, str) else named)
    for name in names:
        if name not in DIMS:
            raise UnknownDimError(f"unknown dim {name!r} in order {order!r}; Megatron has {DIMS}")
    for name, size in sizes.items():
        if size > 1 and name not in names:
            where = f"order {order!r} does not name it; add it to the order"
            raise ConfigurationError(f"dim {name!r} has size {size}, but {where}")
    ordered = [name for name in dict.fromkeys((*names, *DIMS)) if name in sizes]
    return RankLayout({name: sizes[name] for name in ordered}, rank_offset=rank_offset)


def inject_gtp(order_str: str, after: str = "tp") -> str:
    """Return an order with `gtp_remat` inserted after a dim, else after tp, else first.

    >>> inject_gtp("tp-cp-ep-dp-pp"), inject_gtp("tp-cp-ep-dp-pp", after="ep"), inject_gtp("dp-pp")
    ('tp-gtp_remat-cp-ep-dp-pp', 'tp-cp-ep-gtp_remat-dp-pp', 'gtp_remat-dp-pp')
    """
    names = order_str.split("-") if isinstance(order_str, str) else []
    if not names or GTP in order_str.lower().split("-"):
        return order_str
    place = next((names.index(dim) + 1 for dim in (after, "tp") if dim in names), 0)
    return "-".join([*names[:place], GTP, *names[place:]])


# ---- Megatron's enumerations --------------------------------------------------------------------


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Enumerate the groups over the dims that a mask marks, the first dim varying fastest.

    Args:
        world_size: The number of ranks; if the sizes multiply to more, later groups are left out.
        parallel_size: The size of each dim.
        mask: For each dim, whether the groups span it.

    Returns:
        A list of the ranks of each group, ascending.

    Raises:
        LayoutError: A size is not a positive int, or the lengths differ.
        ConfigurationError: The sizes multiply to fewer ranks than `world_size`.

    Example:
        >>> generate_masked_orthogonal_rank_groups(8, [2, 2, 2], [False, False, True])
        [[0, 4], [1, 5], [2, 6], [3, 7]]
    """
    mask, sizes = as_ordered(mask, "mask"), as_ordered(parallel_size, "parallel_size")
    for marked in mask:
        if not isinstance(marked, (int, np.integer, np.bool_)):
            raise LayoutError(f"mask must hold booleans, got {shown(mask)}")
    names = [f"d{axis}" for axis in range(len(mask))]
    # A dim of size 1 more lets a mask mark no dim at all: then each rank is a group.
    layout = RankLayout([*sizes, 1], [*names, "one"])
    spanned = [name for name, marked in zip(names, mask, strict=True) if marked]
    groups = layout.groups(*spanned, "one")
    count = as_int(world_size, "world_size") // groups.group_size
    if count > len(groups):
        raise ConfigurationError(
            f"parallel_size {list(sizes)} multiplies to {layout.size} ranks, which do not "
            f"fill world_size {world_size}"
        )
    return groups.to_array()[: max(count, 0)].tolist()  # type: ignore[no-any-return]


class RankGenerator:
    """Enumerates the groups of ranks of one factorisation, by dims such as "tp-dp".

    Args:
        tp: Tensor parallel size.
        ep: Expert parallel size.
        dp: Data parallel size.
        pp: Pipeline parallel size.
        cp: Context parallel size; this or `ep` is 1.
        order: The dims, the first one varying fastest; those of size 1 may be left out.
        rank_offset: The smallest rank.
        gtp_remat: Number of GTP peers. It is a dim if it is larger than 1, and always from
            megatron-core 0.19 on.

    Raises:
        ConfigurationError: Both `ep` and `cp` are larger than 1, or the order leaves out a size.
        UnknownDimError: The order names an unknown dim.

    Example:
        >>> RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-dp-pp").get_ranks("tp-pp")
        [[0, 1, 4, 5], [2, 3, 6, 7]]

    Source: names, signatures and behaviour follow `megatron.core.parallel_state`.
    """

    def __init__(
        self,
        tp: int,
        ep: int,
        dp: int,
        pp: int,
        cp: int,
        order: str,
        rank_offset: int = 0,
        gtp_remat: int = 1,
    ) -> None:
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        if positive(gtp_remat, f"the size of dim {GTP!r}") != 1 or version.has("gtp_remat"):
            self.name_to_size[GTP] = gtp_remat
        for name, size in self.name_to_size.items():
            positive(size, f"the size of dim {name!r}")
        if ep > 1 and cp > 1:
            raise ConfigurationError(
                f"ep={ep} and cp={cp} cannot both be larger than 1 in one RankGenerator; make one "
                f"for the dense layers, with cp, and one for the experts, with ep"
            )
        self.tp, self.ep, self.dp, self.pp, self.cp, self.gtp_remat = tp, ep, dp, pp, cp, gtp_remat
        self.rank_offset = rank_offset
        self._layout = order_layout(order, self.name_to_size, rank_offset)
        self.world_size = math.prod(self.name_to_size.values())
        self.order = "-".join(self._layout.dim_names)
        self.ordered_size = list(self._layout.shape)

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return for each dim of `order` whether `token` names it.

        Raises:
            LayoutError: `order` or `token` is not a string.
            UnknownDimError: `token` names a dim that `order` does not.
        """
        dims, wanted = _split(order, "order"), _split(token, "token")
        unknown = [dim for dim in wanted if dim not in dims]
        if unknown:
            raise UnknownDimError(f"unknown dim {unknown[0]!r} in {token!r}; the order has {dims}")
        return [dim in wanted for dim in dims]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Enumerate the groups over the dims that `token` names, such as "tp-dp"."""
        self.get_mask(self.order, token)
        groups = self._layout.groups(*dict.fromkeys(token.split("-")))
        return groups.to_array().tolist()  # type: ignore[no-any-return]

    def get_gtp_ranks(self, gtp_remat_size: int) -> list[list[int]]:
        """Enumerate the groups of GTP peers; with a size of 1, each rank is a group.

        Raises:
            ConfigurationError: `gtp_remat_size` is not that of the generator.
            LayoutError: `gtp_remat_size` is not a positive int.
        """
        if positive(gtp_remat_size, "gtp_remat_size") != self.gtp_remat:
            raise ConfigurationError(
                f"gtp_remat_size must be that of the generator, {self.gtp_remat}, "
                f"got {shown(gtp_remat_size)}"
            )
        if GTP in self.name_to_size:
            return self.get_ranks(GTP)
        return [[rank] for rank in self._layout.ranks]


def _split(text: str, what: str) -> list[str]:
    if not isinstance(text, str):
        raise LayoutError(f"{what} must be a text like 'tp-dp', got {shown(text)}")
    return text.split("-")
