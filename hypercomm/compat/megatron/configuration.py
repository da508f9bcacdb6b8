"""Configuration: the arguments of `initialize_model_parallel`, and what they mean for a world."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import attrs

from hypercomm.errors import (
    ConfigurationError,
    GroupOptionsError,
    UnknownDimError,
    WorldSizeError,
)
from hypercomm.grid.arguments import Share
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_few, as_ordered, as_world_size, positive
from hypercomm.layout.messages import shown
from hypercomm.layout.notation import parse_order
from hypercomm.layout.sizes import misfit, nearest_divisors

DIMS = ("tp", "pp", "dp", "ep", "cp")
"""The dims that an order may name, in the order in which Megatron adds those that it does not."""

RanksFunction = Callable[[list[int]], Sequence[int]]

_LONGEST_MINUTES = timedelta.max / timedelta(minutes=1)


def _as_levels(value: object) -> tuple[int, ...]:
    name = "hierarchical_context_parallel_sizes"
    return tuple(positive(size, name) for size in as_few(() if value is None else value, name))


def _as_keys(value: object) -> tuple[str, ...]:
    return as_ordered(() if value is None else value, "high_priority_stream_groups")


class Layouts(NamedTuple):
    """The two factorisations of one span of ranks."""

    dense: RankLayout
    expert: RankLayout


@attrs.frozen(kw_only=True)
class Configuration:
    """One Megatron configuration, as given; `initialize_model_parallel` explains the arguments.

    Example:
        >>> layouts = Configuration(
        ...     tensor_model_parallel_size=2, expert_model_parallel_size=4
        ... ).layouts(16)
        >>> str(layouts.dense), str(layouts.expert)
        ('tp=2,cp=1,ep=1,dp=8,pp=1', 'tp=2,cp=1,ep=4,dp=2,pp=1')
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_comm_backend: str | None = None
    use_sharp: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: tuple[int, ...] = attrs.field(
        default=None, converter=_as_levels
    )
    expert_model_parallel_size: int = 1
    num_distributed_optimizer_instances: int = 1
    expert_tensor_parallel_size: int | None = None
    nccl_communicator_config_path: str | None = None
    distributed_timeout_minutes: float = 30
    order: str = "tp-cp-ep-dp-pp"
    get_embedding_ranks: RanksFunction | None = None
    get_position_embedding_ranks: RanksFunction | None = None
    create_gloo_process_groups: bool = True
    high_priority_stream_groups: tuple[str, ...] = attrs.field(default=None, converter=_as_keys)
    sharp_enabled_group: str | None = None
    hybrid_context_parallel: bool = False
    create_all_gather_group: bool = False
    rank_offset: int = 0
    local_world_size: int | None = None
    share: Share = "never"
    lazy: bool = False

    @property
    def timeout(self) -> timedelta:
        """The timeout of every group."""
        return timedelta(minutes=self.distributed_timeout_minutes)

    @property
    def sharp_group(self) -> str | None:
        """The group whose communicator uses SHARP: "dp", "dp_replica" or none."""
        return (self.sharp_enabled_group or "dp") if self.use_sharp else None

    def layouts(self, world_size: int) -> Layouts:
        """Check everything, and lay the dense and the expert dims out over the world.

        Raises:
            LayoutError: A size is not a positive int, or the order cannot be read.
            WorldSizeError: The sizes do not divide the world; names those that would.
            OrderError, UnknownDimError: The order leaves out a size, or names an unknown dim.
            ConfigurationError: Two choices contradict each other.
        """
        self._check_sharp()
        if self.local_world_size is not None:
            world_size = as_world_size(self.local_world_size, "local_world_size")
        tp, pp, cp = self._sizes("tensor_model", "pipeline_model", "context")
        dp = world_size // self._product(world_size, "tensor_model", "pipeline_model", "context")
        self._check_virtual_pipeline()
        dense = self._layout(tp=tp, cp=cp, ep=1, dp=dp, pp=pp)
        ep = positive(self.expert_model_parallel_size, "expert_model_parallel_size")
        etp = tp
        if self.expert_tensor_parallel_size is not None:
            etp = positive(self.expert_tensor_parallel_size, "expert_tensor_parallel_size")
        edp = world_size // self._product(
            world_size, "expert_tensor", "expert_model", "pipeline_model"
        )
        expert = self._layout(tp=etp, cp=1, ep=ep, dp=edp, pp=pp)
        self._check_pipelines(dense, expert)
        self._check_derived(dense, expert)
        self._check_options()
        return Layouts(dense, expert)

    def _sizes(self, *names: str) -> tuple[int, ...]:
        """Read sizes by the first part of their names; the expert tensor size may be open."""
        sizes = []
        for name in names:
            argument = f"{name}_parallel_size"
            value = getattr(self, argument)
            if name == "expert_tensor" and value is None:
                argument, value = "tensor_model_parallel_size", self.tensor_model_parallel_size
            sizes.append(positive(value, argument))
        return tuple(sizes)

    def _product(self, world_size: int, *names: str) -> int:
        """Multiply sizes that must divide the world."""
        sizes = dict(
            zip((f"{name}_parallel_size" for name in names), self._sizes(*names), strict=True)
        )
        problem = misfit(sizes, world_size)
        if problem is not None:
            raise WorldSizeError(problem)
        return math.prod(sizes.values())

    def _layout(self, **sizes: int) -> RankLayout:
        return order_layout(self.order, sizes, self.rank_offset)

    def _check_sharp(self) -> None:
        group = self.sharp_enabled_group
        if not self.use_sharp and group is not None:
            raise ConfigurationError(
                f"sharp_enabled_group={group!r} needs use_sharp=True; leave it out, or use SHARP"
            )
        if not _is_choice(group, "dp", "dp_replica"):
            raise ConfigurationError(
                f"sharp_enabled_group must be 'dp' or 'dp_replica', got {group!r}"
            )
        name = "num_distributed_optimizer_instances"
        if group == "dp_replica" and positive(self.num_distributed_optimizer_instances, name) < 2:
            raise ConfigurationError(
                f"sharp_enabled_group='dp_replica' needs {name} of at least 2, "
                f"got {self.num_distributed_optimizer_instances}"
            )
        if self.use_sharp and self.lazy:
            raise ConfigurationError(
                "use_sharp=True needs its group before all others, and lazy=True creates none; "
                "give one of them"
            )

    def _check_virtual_pipeline(self) -> None:
        if self.virtual_pipeline_model_parallel_size is None:
            return
        positive(self.virtual_pipeline_model_parallel_size, "virtual_pipeline_model_parallel_size")
        if self.pipeline_model_parallel_size == 1:
            raise ConfigurationError(
                f"virtual_pipeline_model_parallel_size="
                f"{self.virtual_pipeline_model_parallel_size} interleaves pipeline stages, but "
                f"pipeline_model_parallel_size is 1; make it at least 2"
            )

    def _check_pipelines(self, dense: RankLayout, expert: RankLayout) -> None:
        if have_same_pipelines(dense, expert):
            return
        raise ConfigurationError(
            f"with order {self.order!r} the dense layers ({dense}) and the expert layers ({expert})"
            f" must have the same pipelines and data parallel size, but their pipelines are "
            f"{dense.groups('pp')!r} and {expert.groups('pp')!r}; put pp last in the order, or "
            f"choose expert sizes with expert_tensor_parallel_size * expert_model_parallel_size = "
            f"{dense.size_of('tp') * dense.size_of('cp')}"
        )

    def _check_derived(self, dense: RankLayout, expert: RankLayout) -> None:
        """Check what is made of groups: instances, levels, hybrid groups."""
        name = "num_distributed_optimizer_instances"
        instances = positive(self.num_distributed_optimizer_instances, name)
        replicas = dense.size_of("dp") * dense.size_of("cp")
        for what, size in [("dp * cp", replicas), ("expert dp", expert.size_of("dp"))]:
            if size % instances:
                raise ConfigurationError(
                    f"{name}={instances} does not divide the {what} size {size}; "
                    f"use {nearest_divisors(size, instances)}"
                )
        levels = self.hierarchical_context_parallel_sizes
        if levels and math.prod(levels) != dense.size_of("cp"):
            raise ConfigurationError(
                f"hierarchical_context_parallel_sizes {list(levels)} multiply to "
                f"{math.prod(levels)}, but context_parallel_size is {dense.size_of('cp')}"
            )
        if self.hybrid_context_parallel:
            uneven = [size for size in hybrid_sizes(replicas) if replicas % size]
            if replicas % 2 or uneven:
                raise ConfigurationError(
                    f"hybrid_context_parallel=True cuts the {replicas} ranks of dp * cp into "
                    f"groups of {hybrid_sizes(replicas) or 2}, and they must come out even; "
                    f"choose sizes that make dp * cp a power of 2"
                )

    def _check_options(self) -> None:
        minutes = self.distributed_timeout_minutes
        is_number = isinstance(minutes, (int, float)) and not isinstance(minutes, bool)
        if not is_number or not minutes > 0:
            raise GroupOptionsError(
                f"distributed_timeout_minutes must be a number above 0, got {shown(minutes)}"
            )
        if minutes >= _LONGEST_MINUTES:
            raise GroupOptionsError(
                f"distributed_timeout_minutes must be below {_LONGEST_MINUTES:.3g}, "
                f"got {shown(minutes)}"
            )
        for name in ("get_embedding_ranks", "get_position_embedding_ranks"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise GroupOptionsError(
                    f"{name} must be a function of the ranks of a pipeline, got {function!r}"
                )
        backend = self.pipeline_model_parallel_comm_backend
        if not _is_choice(backend, "nccl", "ucc"):
            raise ConfigurationError(
                f"pipeline_model_parallel_comm_backend must be None, 'nccl' or 'ucc', "
                f"got {backend!r}"
            )


def _is_choice(value: object, *choices: str) -> bool:
    return value is None or (isinstance(value, str) and value in choices)


def order_layout(order: str, sizes: Mapping[str, int], rank_offset: int) -> RankLayout:
    """Lay sizes out in an order of Megatron's dims, which may leave out those of size 1.

    Raises:
        UnknownDimError: The order names another dim.
        OrderError: It leaves out a larger one.

    Example:
        >>> str(order_layout("pp-tp", dict(tp=2, pp=4, dp=1, ep=1, cp=1), 0))
        'pp=4,tp=2,dp=1,ep=1,cp=1'
    """
    order = order.lower() if isinstance(order, str) else order
    for name in parse_order(order):
        if name not in DIMS:
            raise UnknownDimError(f"unknown dim {name!r} in order {order!r}; Megatron has {DIMS}")
    ordered = {name: sizes[name] for name in DIMS}
    return RankLayout.from_order(order, rank_offset=rank_offset, **ordered)


def have_same_pipelines(dense: RankLayout, expert: RankLayout) -> bool:
    """Tell whether dense and expert layers have the same pipelines, as Megatron demands.

    Where pp is not last, the order of stages and replicas must be the same too.

    Example:
        >>> dense = order_layout("tp-pp-dp", dict(tp=2, pp=2, dp=2, ep=1, cp=1), 0)
        >>> expert = order_layout("tp-pp-dp", dict(tp=4, pp=2, dp=1, ep=1, cp=1), 0)
        >>> have_same_pipelines(dense, expert)
        False
    """
    if dense.groups("pp") != expert.groups("pp"):
        return False
    is_last = dense.dim_names[-1] == "pp" or dense.size_of("pp") == 1
    return is_last or dense.size_of("dp") == expert.size_of("dp")


def hybrid_sizes(replicas: int) -> list[int]:
    """List the powers of 2 from 2 on that hybrid context parallelism makes groups of.

    >>> hybrid_sizes(16)
    [2, 4, 8]
    """
    return [2**power for power in range(1, int(math.log2(replicas)))]
