"""Megatron's `process_groups_config`: the groups of one model as one object.

Source: names, signatures and behaviour follow `megatron.core.process_groups_config`.
"""

from __future__ import annotations

import logging
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, fields
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.megatron.grid_groups import EXPERT, ROW_OF, held_by, levels_of
from hypercomm.compat.megatron.groups import TABLE
from hypercomm.compat.megatron.state import ParallelState, current
from hypercomm.errors import ConfigurationError, GroupMissingError, UnknownFieldError
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.interface import GridInterface
from hypercomm.layout.checks import as_ordered, as_strings, positive
from hypercomm.layout.messages import shown
from hypercomm.process_groups import c10d

logger = logging.getLogger(__name__)

Group = ProcessGroup | None
"""What a field holds; None where it was not set, and on a rank that is in none of the groups."""


class ProcessGroupHelperMeta(type):
    """Keeps `virtual_pipeline_model_parallel_size` of a class from being assigned.

    Example:
        >>> class Helper(metaclass=ProcessGroupHelperMeta): pass
        >>> Helper.virtual_pipeline_model_parallel_size = 2
        Traceback (most recent call last):
            ...
        AttributeError: call set_virtual_pipeline_model_parallel_size() instead of assigning 2
    """

    def __setattr__(cls, name: str, value: object) -> None:
        if name == "virtual_pipeline_model_parallel_size":
            raise AttributeError(f"call set_{name}() instead of assigning {value!r}")
        super().__setattr__(name, value)


@dataclass(init=False, repr=False, eq=False)
class ProcessGroupCollection:
    """The process groups of one model; a field that was not set is None, an unknown name an error.

    Args:
        kwargs: Groups by field name.

    Raises:
        ValueError: There is no such field.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
        ...     groups = ProcessGroupCollection(tp=grid.create_pg("tp"))
        ...     groups.dp = grid.create_pg("dp")
        ...     print(groups, groups.pp)
        ProcessGroupCollection(tp(2), dp(4)) None
    """

    tp: Group = field(init=False)
    pp: Group = field(init=False)
    mp: Group = field(init=False)
    embd: Group = field(init=False)
    pos_embd: Group = field(init=False)
    cp: Group = field(init=False)
    tp_cp: Group = field(init=False)
    hcp: list[ProcessGroup] | None = field(init=False)
    ep: Group = field(init=False)
    expt_tp: Group = field(init=False)
    tp_ep: Group = field(init=False)
    tp_ep_pp: Group = field(init=False)
    tp_dp_cp: Group = field(init=False)
    dp: Group = field(init=False)
    dp_cp: Group = field(init=False)
    expt_dp: Group = field(init=False)
    intra_dp_cp: Group = field(init=False)
    intra_expt_dp: Group = field(init=False)
    inter_dist_opt: Group = field(init=False)
    intra_dist_opt: Group = field(init=False)
    dp_cp_ag: Group = field(init=False)
    expt_dp_ag: Group = field(init=False)

    def __init__(self, **kwargs: Any) -> None:
        for name, group in kwargs.items():
            setattr(self, name, group)

    def __getattr__(self, name: str) -> None:
        _check_fields(type(self), name)

    def __setattr__(self, name: str, group: object) -> None:
        if type(self) is ProcessGroupCollection:  # a class derived from it has what it likes
            _check_fields(type(self), name)
        super().__setattr__(name, group)

    def __repr__(self) -> str:
        names = [item.name for item in fields(self) if item.name in vars(self)]
        shown = [f"{name}({_size(vars(self)[name])})" for name in names]
        return f"ProcessGroupCollection({', '.join(shown) or 'empty'})"

    @classmethod
    def use_mpu_process_groups(
        cls, required_pgs: Sequence[str] | None = None
    ) -> ProcessGroupCollection:
        """Return the groups of the current parallel state.

        Args:
            required_pgs: The fields to set; default: all.

        Raises:
            ValueError: There is no such field.
            StateError: A data parallel group is asked for, and the state is not initialised.
        """
        return cls.from_state(current.get(), required_pgs)

    @classmethod
    def from_state(
        cls, state: ParallelState, required_pgs: Sequence[str] | None = None
    ) -> ProcessGroupCollection:
        """Return the groups of a parallel state; arguments and errors as above."""
        if not isinstance(state, ParallelState):
            raise ConfigurationError(f"state must be a ParallelState, got {shown(state)}")
        wanted = list(_SOURCES)
        if required_pgs is not None:
            wanted = list(as_strings(required_pgs, "required_pgs"))
        _check_fields(cls, *wanted)
        collection = cls()
        for name in wanted:
            group = None
            if name in _SOURCES:
                group = (state.require if name in _NEEDED else state.read)(_SOURCES[name])
            if group is None and name in _TWINS and state.grids:
                group = _named(state.grids[_TWINS[name]], name)
            setattr(collection, name, group)
        return collection

    @classmethod
    def from_grid(
        cls, grid: HyperCommGrid, expert: HyperCommGrid | None = None
    ) -> ProcessGroupCollection:
        """Return the groups that grids hold, by the dims that they span.

        Args:
            grid: The dense grid, over some of the dims tp, cp, dp and pp.
            expert: The expert grid, over some of tp, ep, dp and pp; default: the view "expert" of
                `grid`, if it has one. Either may call tp and dp expt_tp and expt_dp. It may be
                `grid` itself: then experts are laid out as the dense layers, and copied along cp.

        Returns:
            A collection with every field whose group was created. A dim that a grid does not have
            adds no ranks, so `dp_cp` is then `dp`; a field all of whose dims it lacks, such as
            `cp`, is filled by the group that is filed under the field's name. So are the fields of
            groups that are derived from those over dims, such as `embd` and `pos_embd`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     for dims in ("tp", "dp", ["tp", "dp"]):
            ...         _ = grid.create_pg(dims)
            ...     print(ProcessGroupCollection.from_grid(grid))
            ProcessGroupCollection(tp(2), mp(2), tp_cp(2), tp_dp_cp(8), dp(4), dp_cp(4), intra_dp_cp(4))
        """  # noqa: E501
        for name, given in [("grid", grid), ("expert", expert)]:
            if not isinstance(given, HyperCommGrid) and (name == "grid" or given is not None):
                raise ConfigurationError(f"{name} must be a HyperCommGrid, got {shown(given)}")
        of_experts: GridInterface | None = expert
        if expert is None and EXPERT in grid.views:
            of_experts = grid.view(EXPERT)
        collection = cls()
        for row in TABLE:
            source = grid if row.grid == "dense" else of_experts
            if row.field is None or source is None:
                continue
            group: object = held_by(source, row)
            if row.field == "hcp":
                group = levels_of(source) or None
            if group is None and row.otherwise is not None:
                group = getattr(collection, ROW_OF[row.otherwise].field or "")
            if group is not None:
                setattr(collection, row.field, group)
        return collection

    @staticmethod
    def setup_process_groups_for_optimizer(
        pg_collection: ProcessGroupCollection | None,
        model_chunks: Sequence[Any],
        use_gloo_process_groups: bool = True,
    ) -> dict[str, Group]:
        """Return the groups that an optimizer needs, by name.

        Args:
            pg_collection: Where to take them from; default: the current parallel state.
            model_chunks: The first one's configuration tells what is needed.
            use_gloo_process_groups: Whether to add gloo twins, which only the state has.

        Raises:
            ValueError: A group that is needed was not set, or gloo twins were asked for.
            StateError: The parallel state is needed and not initialised.
        """
        chunks = as_ordered(model_chunks, "model_chunks")
        if not chunks:
            raise ConfigurationError("model_chunks is empty; give the parts of a model")
        ddp_config = getattr(chunks[0], "ddp_config", None)
        instances = 1 if ddp_config is None else _instances_of(ddp_config)
        groups: dict[str, Group]
        if pg_collection is None:
            require = current.get().require
            groups = _from_state(require, "dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")
            groups |= _from_state(require, "intra_dist_opt", "mp")
            groups["expt_tp_pp_group"] = require(_SOURCES["tp_ep_pp"])
            inter = require(_SOURCES["inter_dist_opt"]) if instances > 1 else None
            groups["inter_dist_opt_group"] = inter
            for name in ("intra_dp_cp", "intra_expt_dp"):
                twin = require(f"{_SOURCES[name]}_GLOO") if use_gloo_process_groups else None
                groups[f"{name}_group_gloo"] = twin
            return groups
        groups = _data_parallel(pg_collection, lambda: _config_of(chunks[0]))
        groups["expt_dp_group"] = _take(pg_collection, "expt_dp")
        groups |= _instance_groups(pg_collection, groups, instances)
        groups["intra_dist_opt_group"] = None
        if instances > 1:
            _take(pg_collection, "intra_dist_opt")
        if ddp_config is not None and _setting(ddp_config, "use_distributed_optimizer"):
            groups["intra_dist_opt_group"] = _take(pg_collection, "intra_dist_opt")
        groups["mp_group"] = _take(pg_collection, "mp")
        groups["expt_tp_pp_group"] = _take(pg_collection, "tp_ep_pp")
        if use_gloo_process_groups:
            raise ConfigurationError(
                "a ProcessGroupCollection has no gloo twins; give use_gloo_process_groups=False"
            )
        return groups | {"intra_dp_cp_group_gloo": None, "intra_expt_dp_group_gloo": None}

    @staticmethod
    def setup_process_groups_for_ddp(
        pg_collection: ProcessGroupCollection | None, config: Any, ddp_config: Any
    ) -> dict[str, Group]:
        """Return the groups that DistributedDataParallel needs, by name.

        Args:
            pg_collection: Where to take them from; default: the current parallel state.
            config: The model's configuration: its `context_parallel_size` tells what is needed.
            ddp_config: So does its `num_distributed_optimizer_instances`.

        Raises:
            ValueError: A group that is needed was not set.
            StateError: The parallel state is needed and not initialised.
        """
        instances = _instances_of(ddp_config)
        groups: dict[str, Group]
        if pg_collection is None:
            require = current.get().require
            groups = _from_state(require, "dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")
            groups |= _from_state(require, "tp", "pp", "ep")
            for name, needed in [
                ("inter_dist_opt", instances > 1),
                ("intra_dist_opt", _setting(ddp_config, "use_distributed_optimizer")),
            ]:
                groups[f"{name}_group"] = require(_SOURCES[name]) if needed else None
            return groups
        groups = _data_parallel(pg_collection, lambda: config)
        groups |= {f"{name}_group": _take(pg_collection, name) for name in ("tp", "pp", "ep")}
        groups["expt_dp_group"] = getattr(pg_collection, "expt_dp", None)
        groups |= _instance_groups(pg_collection, groups, instances)
        if groups["expt_dp_group"] is None:
            logger.warning("no expt_dp group was given; creating one of this rank alone")
            alone = c10d.as_member(
                dist.new_group([dist.get_rank()], use_local_synchronization=True)
            )
            groups["expt_dp_group"] = alone
            if instances == 1:
                groups["intra_expt_dp_group"] = alone
        return groups


_SOURCES = {row.field: row.name for row in TABLE if row.field is not None}
"""The global of each field; the expert twin for all-gathers has none."""
_NEEDED = ("dp", "dp_cp", "intra_dp_cp")
"""The fields that Megatron's `use_mpu_process_groups` does not leave at None."""
_TWINS = {"dp_cp_ag": "dense", "expt_dp_ag": "expert"}
"""The grid that holds what `create_all_gather_groups` creates, by field."""


def _check_fields(kind: type[ProcessGroupCollection], *names: str) -> None:
    known = [item.name for item in fields(kind)]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownFieldError(f"{kind.__name__} has no field {unknown[0]!r}; it has {known}")


def _instances_of(ddp_config: Any) -> int:
    name = "num_distributed_optimizer_instances"
    return positive(_setting(ddp_config, name), name)


def _setting(config: Any, name: str) -> Any:
    """Return an attribute of a configuration that was given."""
    if not hasattr(config, name):
        raise ConfigurationError(f"the configuration {shown(config)} has no {name}")
    return getattr(config, name)


def _named(grid: HyperCommGrid, name: str) -> Group:
    """Return the group that is filed under a name of its own."""
    return next((pg for key, pg in grid.pgs.items() if key.name == name), None)


def _size(group: Any) -> object:
    if group is None:
        return None
    return [item.size() for item in group] if isinstance(group, list) else group.size()


def _from_state(require: Any, *names: str) -> dict[str, Group]:
    return {f"{name}_group": require(_SOURCES[name]) for name in names}


def _take(collection: ProcessGroupCollection, name: str) -> Any:
    """Return a group that must have been set, perhaps to None."""
    if not _is_set(collection, name):
        raise ConfigurationError(
            f"the process group {name!r} is needed, but the collection has only {collection!r}; "
            f"set it, to None if it is not used"
        )
    return getattr(collection, name)


def _is_set(collection: Any, name: str) -> bool:
    """Tell whether a collection, or what stands in for one, has a group that was not left out."""
    if isinstance(collection, ProcessGroupCollection):
        return name in vars(collection) or hasattr(type(collection), name)
    return hasattr(collection, name)


def _data_parallel(collection: ProcessGroupCollection, config: Any) -> dict[str, Group]:
    """Return dp and dp_cp; without context parallel they are the same."""
    groups = {"dp_group": _take(collection, "dp")}
    if _is_set(collection, "dp_cp") or getattr(config(), "context_parallel_size", 1) != 1:
        return groups | {"dp_cp_group": _take(collection, "dp_cp")}
    return groups | {"dp_cp_group": groups["dp_group"]}


def _instance_groups(
    collection: ProcessGroupCollection, groups: Mapping[str, Group], instances: int
) -> dict[str, Group]:
    """Return the groups within and across optimizer instances; with one, there is no across."""
    if instances == 1:
        return {
            "intra_dp_cp_group": groups["dp_cp_group"],
            "intra_expt_dp_group": groups["expt_dp_group"],
            "inter_dist_opt_group": None,
        }
    names = ("intra_dp_cp", "intra_expt_dp", "inter_dist_opt")
    return {f"{name}_group": _take(collection, name) for name in names}


def _config_of(model: Any) -> Any:
    """Return the configuration of a model, under all that it is wrapped in."""
    while getattr(model, "config", None) is None:
        if not hasattr(model, "module"):
            raise ConfigurationError(
                f"model_chunks[0] has no config, nor has what it wraps: {model!r}"
            )
        model = model.module
    return model.config


@dataclass
class MultiModuleProcessGroupCollection:
    """The collections of several modules that share ranks, such as an encoder and a language model.

    Args:
        module_pgs: The collection of each module, by name.
        language_model_module_name: Which of them is the language model; None without one.

    Raises:
        ValueError: There is no module, or the language model is none of them.

    Example:
        >>> encoder, llm = ProcessGroupCollection(), ProcessGroupCollection()
        >>> modules = MultiModuleProcessGroupCollection({"encoder": encoder, "llm": llm}, "llm")
        >>> modules["encoder"] is encoder, modules.get_language_model_collection() is llm
        (True, True)
    """

    module_pgs: dict[str, ProcessGroupCollection]
    language_model_module_name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.module_pgs, Mapping) or not self.module_pgs:
            raise ConfigurationError(
                f"module_pgs must map names of modules, one at least, to their collections, "
                f"got {shown(self.module_pgs)}"
            )
        for name, collection in self.module_pgs.items():
            if not isinstance(name, str) or not isinstance(collection, ProcessGroupCollection):
                raise ConfigurationError(
                    f"module_pgs must map names of modules to a ProcessGroupCollection each, "
                    f"got {shown(name)}: {shown(collection)}"
                )
        if self.language_model_module_name is not None:
            self.get_module_collection(self.language_model_module_name)

    def get_language_model_collection(self) -> ProcessGroupCollection:
        """Return the collection of the language model.

        Raises:
            ValueError: There is none on this rank.
        """
        if self.language_model_module_name is None:
            raise ConfigurationError(f"there is no language model among {list(self.keys())}")
        return self.get_module_collection(self.language_model_module_name)

    def get_language_model_cp_size(self) -> int:
        """Return the context parallel size of the language model.

        Raises:
            ValueError: There is none on this rank, or its cp group was not set.
        """
        group = self.get_language_model_collection().cp
        if group is None:
            raise ConfigurationError("the cp group of the language model was not set")
        return group.size()

    def has_language_model(self) -> bool:
        """Tell whether one of the modules is the language model."""
        return self.language_model_module_name is not None

    def get_module_collection(self, module_name: str) -> ProcessGroupCollection:
        """Return the collection of a module.

        Raises:
            ValueError: There is no such module.
        """
        try:
            return self[module_name]
        except GroupMissingError as error:
            raise ConfigurationError(str(error)) from None

    def __len__(self) -> int:
        return len(self.module_pgs)

    def __getitem__(self, module_name: str) -> ProcessGroupCollection:
        if not isinstance(module_name, str) or module_name not in self.module_pgs:
            known = list(self.keys())
            raise GroupMissingError(f"there is no module {shown(module_name)}; there are {known}")
        return self.module_pgs[module_name]

    def __iter__(self) -> Iterator[ProcessGroupCollection]:
        return iter(self.module_pgs.values())

    def keys(self) -> KeysView[str]:
        """Return the names of the modules."""
        return self.module_pgs.keys()

    def values(self) -> ValuesView[ProcessGroupCollection]:
        """Return the collections."""
        return self.module_pgs.values()

    def items(self) -> ItemsView[str, ProcessGroupCollection]:
        """Return pairs of name and collection."""
        return self.module_pgs.items()

    def __repr__(self) -> str:
        modules = ", ".join(f"{name}={pgs!r}" for name, pgs in self.items())
        llm = self.language_model_module_name
        return f"MultiModuleProcessGroupCollection({modules}, language_model={llm!r})"
