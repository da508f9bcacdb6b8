"""The checked arguments of `initialize_model_parallel`, their layouts, and `RankGenerator`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import attrs

from hypercomm.compat.megatron import version
from hypercomm.errors import ConfigurationError, UnknownDimError, WorldSizeError
from hypercomm.grid.arguments import SHARES, Share
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_world_size, check_choice, positive
from hypercomm.layout.parsing import misfit, parse_order
from hypercomm.process_groups.options import check_given_timeout

GTP = "gtp_remat"
"""The dim of generalized tensor parallelism: peers share each weight and gather it to use it."""

DIMS = ("tp", "pp", "dp", "ep", "cp", GTP)
"""The dims that an order may name, in the order in which Megatron appends those that it omits."""


class Layouts(NamedTuple):
    """The two factorisations of one span of ranks."""

    dense: RankLayout
    expert: RankLayout


RanksFunction = Callable[[list[int]], Sequence[int]]

_DENSE = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    GTP: "gtp_remat_size",
}
_EXPERT = {
    "tp": "expert_tensor_parallel_size",
    "ep": "expert_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    GTP: "expert_gtp_remat_size",
}
"""The argument with the size of each dim, except dp, which gets the remaining ranks."""


@attrs.frozen
class Configuration:
    """One Megatron configuration; `initialize_model_parallel` documents the arguments.

    Example:
        >>> layouts = Configuration(2, expert_model_parallel_size=4).layouts(16)
        >>> str(layouts.dense), str(layouts.expert)
        ('tp=2,cp=1,ep=1,dp=8,pp=1', 'tp=2,cp=1,ep=4,dp=2,pp=1')
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_comm_backend: str | None = None
    use_sharp: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: Sequence[int] | None = None
    expert_model_parallel_size: int = 1
    num_distributed_optimizer_instances: int = 1
    expert_tensor_parallel_size: int | None = None
    nccl_communicator_config_path: str | None = None
    distributed_timeout_minutes: float = 30
    order: str = "tp-cp-ep-dp-pp"
    get_embedding_ranks: RanksFunction | None = None
    get_position_embedding_ranks: RanksFunction | None = None
    create_gloo_process_groups: bool = True
    high_priority_stream_groups: Sequence[str] | None = None
    sharp_enabled_group: str | None = None
    hybrid_context_parallel: bool = attrs.field(default=False, converter=bool, kw_only=True)
    create_all_gather_group: bool = attrs.field(default=False, converter=bool, kw_only=True)
    gtp_remat_size: int = attrs.field(default=1, kw_only=True)
    expert_gtp_remat_size: int = attrs.field(default=1, kw_only=True)
    rank_offset: int = attrs.field(default=0, kw_only=True)
    local_world_size: int | None = attrs.field(default=None, kw_only=True)
    share: Share = attrs.field(default="never", kw_only=True)
    strict: bool = attrs.field(default=False, kw_only=True)
    changes: frozenset[str] = attrs.field(factory=version.changes, init=False)

    def __attrs_post_init__(self) -> None:
        name = "num_distributed_optimizer_instances"
        instances = positive(self.num_distributed_optimizer_instances, name)
        check_given_timeout(self.timeout)
        check_choice("share", self.share, SHARES)
        if instances > 1 and self.has_gtp:
            raise ConfigurationError(
                f"gtp_remat_size={self.gtp_remat_size} and expert_gtp_remat_size="
                f"{self.expert_gtp_remat_size} above 1 work with one optimizer instance only, got "
                f"{name}={instances}"
            )

    def has(self, option: str) -> bool:
        """Return whether an argument was given another value than its default."""
        return bool(getattr(self, option) != _DEFAULTS[option])

    @property
    def has_gtp(self) -> bool:
        """Whether dense layers or experts have GTP peers."""
        return self.gtp_remat_size > 1 or self.expert_gtp_remat_size > 1

    @property
    def answers_gtp(self) -> bool:
        """Whether data parallel getters return groups with GTP peers by default."""
        return self.has_gtp or "gtp_remat" in self.changes

    def creates_gloo(self, grid: str) -> bool:
        """Whether the "dense" or "expert" layers have gloo groups; with GTP there are none."""
        with_gtp = self.gtp_remat_size > 1 or (grid == "expert" and self.has_gtp)
        return bool(self.create_gloo_process_groups) and not with_gtp

    @property
    def timeout(self) -> timedelta:
        """The timeout of every group."""
        return timedelta(minutes=self.distributed_timeout_minutes)

    def layouts(self, world_size: int, names: Mapping[str, str] | None = None) -> Layouts:
        """Check all arguments, and return the dense and the expert layout.

        Args:
            world_size: The number of ranks.
            names: The names of sizes in error messages, if they are not those of the arguments.

        Raises:
            LayoutError: A size is not a positive int, or the order cannot be read.
            WorldSizeError: The sizes do not divide the world; names sizes that would.
            ConfigurationError, UnknownDimError: The order omits a dim, or names an unknown one.
            ConfigurationError: Two choices contradict each other.
        """
        self._check_sharp()
        if self.local_world_size is not None:
            world_size = as_world_size(self.local_world_size, "local_world_size")
        dense = self._sizes(_DENSE, names or {}, world_size)
        expert = self._sizes(_EXPERT, names or {}, world_size)
        if (stages := self.virtual_pipeline_model_parallel_size) is not None:
            positive(stages, "virtual_pipeline_model_parallel_size")
            if dense["pp"] == 1:
                raise ConfigurationError(
                    f"virtual_pipeline_model_parallel_size={stages} needs a "
                    f"pipeline_model_parallel_size of at least 2, got 1"
                )
        anchor = "cp" if "cp_before_gtp_remat" in self.changes else "tp"
        layouts = Layouts(
            order_layout(self.order, {**dense, "ep": 1}, self.rank_offset, anchor),
            order_layout(self.order, {**expert, "cp": 1}, self.rank_offset, "ep"),
        )
        self._check_pipelines(layouts)
        if (backend := self.pipeline_model_parallel_comm_backend) is not None:
            name = "pipeline_model_parallel_comm_backend"
            check_choice(name, backend, ("nccl", "ucc"), ConfigurationError)
        return layouts

    def _sizes(
        self, arguments: Mapping[str, str], names: Mapping[str, str], world_size: int
    ) -> dict[str, int]:
        """Return the sizes by dim, which must divide the world; dp gets the remaining ranks."""
        sizes, called = {}, {}
        for dim, argument in arguments.items():
            given, name = getattr(self, argument), names.get(argument, argument)
            if given is None and dim == "tp":
                given = self.tensor_model_parallel_size
            size = positive(given, name)
            if size > 1 or dim != GTP:
                sizes[dim] = called[name] = size
        problem = misfit(called, world_size)
        if problem is not None:
            raise WorldSizeError(problem)
        return {**sizes, "dp": world_size // math.prod(sizes.values())}

    def _check_pipelines(self, layouts: Layouts) -> None:
        """Raise unless dense and expert layers have the same pipelines, as Megatron requires.

        If pp is not last in the order, their data parallel sizes must be equal too.
        """
        dense, expert = layouts
        is_last = self.order.lower().endswith("pp") or dense.size_of("pp") == 1
        have_same_dp = is_last or dense.size_of("dp") == expert.size_of("dp")
        if dense.groups("pp") != expert.groups("pp") or not have_same_dp:
            inner = dense.size_of("tp", "cp", GTP, default=1)
            raise ConfigurationError(
                f"with order {self.order!r} the dense layers ({dense}) and the expert layers "
                f"({expert}) must have the same pipelines and data parallel size; put pp last in "
                f"the order, or choose sizes of tp, ep and {GTP} for the experts that multiply to "
                f"{inner}"
            )

    def _check_sharp(self) -> None:
        group, instances = self.sharp_enabled_group, self.num_distributed_optimizer_instances
        if group is None:
            return
        if not self.use_sharp:
            raise ConfigurationError(f"sharp_enabled_group={group!r} needs use_sharp=True")
        check_choice("sharp_enabled_group", group, ("dp", "dp_replica"), ConfigurationError)
        if group == "dp_replica" and instances < 2:
            raise ConfigurationError(
                f"sharp_enabled_group='dp_replica' needs num_distributed_optimizer_instances of at "
                f"least 2, got {instances}"
            )


_DEFAULTS = {field.name: field.default for field in attrs.fields(Configuration)}

# A TypeError names the function that the arguments were given to.
Configuration.__init__.__qualname__ = "initialize_model_parallel"


def hybrid_sizes(replicas: int) -> list[int]:
    """List the group sizes of hybrid context parallelism: powers of 2 from 2 on.

    >>> hybrid_sizes(16)
    [2, 4, 8]
    """
    return [2**power for power in range(1, int(math.log2(replicas)))]


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


# ---- Megatron's enumerations of groups -----------------------------------------------------------


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


@attrs.define(slots=False, eq=False)
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

    tp: int
    ep: int
    dp: int
    pp: int
    cp: int
    order: str
    rank_offset: int = 0
    gtp_remat: int = 1

    def __attrs_post_init__(self) -> None:
        self.name_to_size = {
            dim: positive(getattr(self, dim), f"the size of dim {dim!r}") for dim in DIMS
        }
        if self.gtp_remat == 1 and not version.has("gtp_remat"):
            del self.name_to_size[GTP]
        if self.ep > 1 and self.cp > 1:
            raise ConfigurationError(
                f"ep={self.ep} and cp={self.cp} cannot both be larger than 1 in one RankGenerator; "
                f"make one for the dense layers, with cp, and one for the experts, with ep"
            )
        self._layout = order_layout(self.order, self.name_to_size, self.rank_offset)
        self.world_size, self.ordered_size = self._layout.size, list(self._layout.shape)
        self.order = "-".join(self._layout.dim_names)

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
