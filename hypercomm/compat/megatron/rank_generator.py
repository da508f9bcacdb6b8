"""Megatron's enumerations of the groups of ranks: `RankGenerator`, and groups by a mask."""

from __future__ import annotations

from collections.abc import Sequence

from hypercomm.compat.megatron import version
from hypercomm.compat.megatron.configuration import GTP, order_layout
from hypercomm.errors import ConfigurationError, UnknownDimError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import positive


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
    names = [f"d{axis}" for axis in range(len(mask))]
    # A dim of size 1 more lets a mask mark no dim at all: then each rank is a group.
    layout = RankLayout([*parallel_size, 1], [*names, "one"])
    spanned = [name for name, marked in zip(names, mask, strict=True) if marked]
    groups = layout.groups(*spanned, "one")
    count = world_size // groups.group_size
    if count > len(groups):
        raise ConfigurationError(
            f"parallel_size {list(parallel_size)} multiplies to {layout.size} ranks, which do not "
            f"fill world_size {world_size}"
        )
    return groups.to_array()[:count].tolist()  # type: ignore[no-any-return]


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
        self.world_size = self._layout.size
        self.order = "-".join(self._layout.dim_names)
        self.ordered_size = list(self._layout.shape)

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return for each dim of `order` whether `token` names it.

        Raises:
            UnknownDimError: `token` names a dim that `order` does not.
        """
        dims, wanted = order.split("-"), token.split("-")
        for dim in wanted:
            if dim not in dims:
                raise UnknownDimError(f"unknown dim {dim!r} in {token!r}; the order has {dims}")
        return [dim in wanted for dim in dims]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Enumerate the groups over the dims that `token` names, such as "tp-dp"."""
        self.get_mask(self.order, token)
        return self._layout.groups(*dict.fromkeys(token.split("-"))).to_lists()

    def get_gtp_ranks(self, gtp_remat_size: int) -> list[list[int]]:
        """Enumerate the groups of GTP peers; with a size of 1, each rank is a group.

        Raises:
            ConfigurationError: `gtp_remat_size` is not that of the generator.
        """
        if gtp_remat_size != self.gtp_remat:
            raise ConfigurationError(
                f"gtp_remat_size must be that of the generator, {self.gtp_remat}, "
                f"got {gtp_remat_size}"
            )
        if GTP in self.name_to_size:
            return self.get_ranks(GTP)
        return [[rank] for rank in self._layout.ranks]
