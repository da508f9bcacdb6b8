"""Implements Megatron's `process_groups_config`: the groups of one model in one object.

Source: names, signatures and behaviour follow `megatron.core.process_groups_config`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, fields
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.layouts import EXPERT, GTP
from hypercomm.compat.megatron import table, version
from hypercomm.compat.megatron.state import ParallelState, current
from hypercomm.errors import ConfigurationError, UnknownDimError, UnknownFieldError
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.view import GridView
from hypercomm.layout.checks import as_strings

logger = logging.getLogger(__name__)

Group = ProcessGroup | None
"""A group in a collection, or None if the group was not set or does not contain this rank."""


class ProcessGroupHelperMeta(type):
    """A metaclass that forbids assigning `virtual_pipeline_model_parallel_size`."""

    def __setattr__(cls, name: str, value: object) -> None:
        if name == "virtual_pipeline_model_parallel_size":
            raise UnknownFieldError(
                f"{name} of {cls.__name__} cannot be assigned; call set_{name}()"
            )
        super().__setattr__(name, value)


@dataclass(init=False, repr=False, eq=False)
class ProcessGroupCollection:
    """The process groups of one model. A field that was not set is None.

    With megatron-core 0.16, reading such a field raises AttributeError. Attributes that are not
    fields can also be set.

    Args:
        kwargs: Groups by field name.

    Raises:
        ValueError: A field is unknown.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
        ...     groups = ProcessGroupCollection(tp=grid.create_pg("tp"))
        ...     groups.dp = grid.create_pg("dp")
        ...     print(groups)
        ProcessGroupCollection(tp(2), dp(4))
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
    tp_ep_pp_with_egtp_remat: Group = field(init=False)
    tp_dp_cp: Group = field(init=False)
    dp: Group = field(init=False)
    dp_cp: Group = field(init=False)
    dp_cp_gtp_remat: Group = field(init=False)
    dp_cp_ag: Group = field(init=False)
    gtp_remat: Group = field(init=False)
    expt_gtp_remat: Group = field(init=False)
    expt_dp: Group = field(init=False)
    expt_dp_gtp_remat: Group = field(init=False)
    expt_dp_ag: Group = field(init=False)
    intra_dp_cp: Group = field(init=False)
    intra_expt_dp: Group = field(init=False)
    inter_dist_opt: Group = field(init=False)
    intra_dist_opt: Group = field(init=False)

    def __init__(self, **kwargs: Any) -> None:
        _check_fields(type(self), "Unknown attribute", *kwargs)
        for name, group in kwargs.items():
            setattr(self, name, group)

    def __getattr__(self, name: str) -> None:
        _check_fields(type(self), "Unknown attribute", name)
        if "unset_is_none" not in version.changes():
            raise UnknownFieldError(
                f"field {name!r} was not set, which is an error in megatron-core {version.get()}; "
                f"the collection has {list(vars(self)) or 'no fields'}"
            )

    def __repr__(self) -> str:
        groups = {item.name: vars(self).get(item.name) for item in fields(self)}
        shown = [f"{name}({_size(pg)})" for name, pg in groups.items() if pg is not None]
        return f"ProcessGroupCollection({', '.join(shown) or 'empty'})"

    @classmethod
    def use_mpu_process_groups(
        cls, required_pgs: Sequence[str] | None = None
    ) -> ProcessGroupCollection:
        """Return a collection of the groups of the current parallel state.

        Args:
            required_pgs: The fields to set. Default: all.

        Raises:
            ValueError: A field is unknown.
            StateError: A data parallel group is required, and the state is not initialised.
        """
        return cls.from_state(current.get(), required_pgs)

    @classmethod
    def from_state(
        cls, state: ParallelState, required_pgs: Sequence[str] | None = None
    ) -> ProcessGroupCollection:
        """Return a collection of a parallel state's groups. See `use_mpu_process_groups`."""
        wanted = table.FIELDS if required_pgs is None else as_strings(required_pgs, "required_pgs")
        _check_fields(cls, "Invalid process groups requested", *wanted)
        return cls(**{name: state.value_of(table.FIELDS[name], name in _NEEDED) for name in wanted})

    @classmethod
    def from_grid(cls, grid: GridView, expert: GridView | None = None) -> ProcessGroupCollection:
        """Return a collection of a grid's groups, which are found by the dims that they span.

        Args:
            grid: The dense grid, over some of the dims tp, gtp_remat, cp, dp and pp.
            expert: The expert grid, over some of the dims tp, ep, gtp_remat, dp and pp. The dims
                tp, gtp_remat and dp may also be called expt_tp, expt_gtp_remat and expt_dp.
                Default: the view "expert" of `grid`, if there is one. If `expert` is `grid`,
                experts have the layout of the dense layers, replicated along cp.

        Returns:
            A collection with every field whose group was created. Dims that a grid does not have
            count as dims of size 1, so without cp, `dp_cp` is the same group as `dp`. Two kinds of
            fields are set to the group with the name of the field: a field such as `cp` if the grid
            has none of its dims, and a field such as `embd`, whose group is derived.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     for dims in ("tp", "dp", ["tp", "dp"]):
            ...         _ = grid.create_pg(dims)
            ...     collection = ProcessGroupCollection.from_grid(grid)
            ...     print(collection.tp.size(), collection.dp_cp.size(), collection.tp_dp_cp.size())
            2 4 8
        """
        if expert is None and isinstance(grid, HyperCommGrid) and EXPERT in grid.views:
            expert = grid.view(EXPERT)
        held: dict[str, dict[Any, Group]] = {}
        used = []
        for row in table.FIELD_ROWS.values():
            source = grid if row.grid == "dense" else expert
            groups = {} if source is None else _groups_of(source, row)
            if groups:
                held[row.name] = groups
            elif row.gtp and source and table.own_dims(source.layout, GTP, row.grid):
                continue  # the group of the GTP peers was not created
            elif row.gtp and not row.otherwise:
                held[row.name] = {None: None}  # there are no GTP peers
            used.append(row)
        values = table.values_of(held, used)
        names = table.FIELDS.items()
        return cls(**{field: values[name] for field, name in names if name in values})

    @classmethod
    def setup_process_groups_for_optimizer(
        cls,
        pg_collection: ProcessGroupCollection | None,
        model_chunks: Sequence[Any],
        use_gloo_process_groups: bool = True,
    ) -> dict[str, Group]:
        """Return the groups that an optimizer needs, by name.

        Args:
            pg_collection: The collection of the groups. Default: the current parallel state.
            model_chunks: The model chunks. The configuration of the first chunk decides which
                groups are needed.
            use_gloo_process_groups: Whether to add gloo groups. With GTP, no gloo groups are added.

        Raises:
            ValueError: A needed group was not set, or a gloo group is missing.
            StateError: There is no `pg_collection`, and the parallel state is not initialised.
        """
        model = model_chunks[0]
        of_state = pg_collection is None
        given = _given(pg_collection)
        ddp_config = getattr(model, "ddp_config", None)
        groups = _data_groups(given, lambda: _config_of(model), ddp_config, of_state)
        is_sharded = of_state or getattr(ddp_config, "use_distributed_optimizer", False)
        is_cut = getattr(ddp_config, "num_distributed_optimizer_instances", 1) > 1
        whole = _take(given, "intra_dist_opt") if is_sharded or is_cut else None
        groups |= {
            "expt_dp": _take(given, "expt_dp"),
            "mp": _take(given, "mp"),
            "expt_tp_pp": _take(given, "tp_ep_pp"),
            "expt_tp_pp_with_egtp_remat": given.get("tp_ep_pp_with_egtp_remat", given["tp_ep_pp"]),
            "intra_dist_opt": whole if is_sharded else None,
        }
        if use_gloo_process_groups and not of_state:
            raise ConfigurationError(
                "Gloo process groups are not supported when pg_collection is provided; pass "
                "use_gloo_process_groups=False"
            )
        named = {f"{name}_group": group for name, group in groups.items()}
        has_gloo = use_gloo_process_groups and not cls.is_gtp_remat_active(named)
        for name in ("intra_dp_cp", "intra_expt_dp"):
            gloo = current.get().value_of(table.FIELDS[name] + table.GLOO) if has_gloo else None
            named[f"{name}_group_gloo"] = gloo
        return named

    @staticmethod
    def setup_process_groups_for_ddp(
        pg_collection: ProcessGroupCollection | None, config: Any, ddp_config: Any
    ) -> dict[str, Group]:
        """Return the groups that DistributedDataParallel needs, by name.

        Args:
            pg_collection: The collection of the groups. Default: the current parallel state.
            config: The configuration of the model. Its `context_parallel_size` decides which groups
                are needed.
            ddp_config: The configuration of DistributedDataParallel. Its
                `num_distributed_optimizer_instances` decides which groups are needed.

        Raises:
            ValueError: A needed group was not set.
            StateError: There is no `pg_collection`, and the parallel state is not initialised.
        """
        given = _given(pg_collection)
        of_state = pg_collection is None
        groups = _data_groups(given, lambda: config, ddp_config, of_state)
        groups |= {name: _take(given, name) for name in ("tp", "pp", "ep")}
        if of_state:
            is_sharded = ddp_config.use_distributed_optimizer
            groups["intra_dist_opt"] = given["intra_dist_opt"] if is_sharded else None
        if groups["expt_dp"] is None:
            logger.warning("no expt_dp group was given; creating a group of this rank alone")
            alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            groups["expt_dp"] = alone
            if ddp_config.num_distributed_optimizer_instances == 1:
                groups["intra_expt_dp"] = groups["expt_dp"]
        return {f"{name}_group": group for name, group in groups.items()}

    @staticmethod
    def is_gtp_remat_active(process_group_dict: Mapping[str, Group]) -> bool:
        """Return whether weights are shared among GTP peers.

        Args:
            process_group_dict: The result of `setup_process_groups_for_optimizer` or `..._for_ddp`.
        """
        found = [process_group_dict.get(f"{name}_group") for name in _PEERS]
        return any(group is not None and group.size() > 1 for group in found)


def resolve_gtp_remat_group(pg_collection: ProcessGroupCollection | None, is_expert: bool) -> Group:
    """Return the group of GTP peers that share the weights of a module.

    Args:
        pg_collection: The groups of the module. If this is None, or if the field of the GTP peers
            was not set, the current parallel state is used.
        is_expert: Whether the weights belong to experts.

    Source: name, signature and behaviour follow `megatron.core.process_groups_config`.
    """
    name = "expt_gtp_remat" if is_expert else "gtp_remat"
    if pg_collection is not None and name in vars(pg_collection):
        return vars(pg_collection)[name]  # type: ignore[no-any-return]
    return current.get().read(table.FIELDS[name])  # type: ignore[no-any-return]


_NEEDED = ("dp", "dp_cp", "dp_cp_gtp_remat", "intra_dp_cp")
"""The fields for which Megatron's `use_mpu_process_groups` raises if there is no group."""


def _check_fields(kind: type[ProcessGroupCollection], complaint: str, *names: str) -> None:
    known = [item.name for item in fields(kind)]
    if unknown := [name for name in names if name not in known]:
        raise UnknownFieldError(f"{complaint}: {unknown}; {kind.__name__} has {known}")


def _size(group: Any) -> object:
    return [item.size() for item in group] if isinstance(group, list) else group.size()


_PEERS = ("gtp_remat", "expt_gtp_remat")
"""The fields of the groups of GTP peers."""

# ---- the groups of a grid -----------------------------------------------------------------------


def _groups_of(grid: GridView, row: table.Row) -> dict[Any, Group]:
    """Return the created groups of a table row. The dict may be empty.

    The key of a single group is None. If the row has several groups, the keys are their names. A
    group over the dims of the row needs no name. A derived group has the name of the field.
    """
    dims = table.own_dims(grid.layout, row.dims, row.grid)
    is_grid = isinstance(grid, HyperCommGrid)
    created = {key: group for key, group in grid.pgs.items() if not (is_grid and key.view)}
    if row.part is None:
        name = row.name_in_grid(dims)
        fits = [key for key in created if key.name == name and (name or key.dims == dims)]
        return {None: created[fits[-1]]} if fits else {}
    named = {key.name: group for key, group in created.items()}
    names = [row.name_in_grid(dims, part) for part in range(len(named))]
    return {name: named[name] for name in names if named.get(name) is not None}


# ---- the groups for training --------------------------------------------------------------------


def _given(collection: ProcessGroupCollection | None) -> Mapping[str, Group]:
    """Return the groups set in `collection`, or in the current state if `collection` is None."""
    if collection is not None:
        return vars(collection)
    held = vars(ProcessGroupCollection.use_mpu_process_groups())
    return {name: group for name, group in held.items() if group is not None}


def _data_groups(
    given: Mapping[str, Group], config: Callable[[], Any], ddp_config: Any, of_state: bool
) -> dict[str, Group]:
    """Return the groups of data parallel ranks, of optimizer instances and of GTP peers.

    Args:
        given: The groups that were set.
        config: A function that returns the configuration of the model.
        ddp_config: The configuration of DistributedDataParallel, or None for one optimizer
            instance.
        of_state: Whether the groups were taken from the parallel state.
    """
    instances = getattr(ddp_config, "num_distributed_optimizer_instances", 1)
    has_cp = "dp_cp" in given or getattr(config(), "context_parallel_size", 1) != 1
    dp = _take(given, "dp")
    expert = given.get("expt_dp")
    dp_cp = _take(given, "dp_cp") if has_cp else dp
    has_parts = of_state or instances > 1
    return {
        "dp": dp,
        "expt_dp": expert,
        "dp_cp": dp_cp,
        "intra_dp_cp": _take(given, "intra_dp_cp") if has_parts else dp_cp,
        "intra_expt_dp": _take(given, "intra_expt_dp") if has_parts else expert,
        "inter_dist_opt": _take(given, "inter_dist_opt") if instances > 1 else None,
        **{name: given.get(name) for name in _PEERS},
    }


def _take(given: Mapping[str, Group], name: str) -> Group:
    """Return a group that must have been set, possibly to None."""
    if name not in given:
        raise ConfigurationError(
            f"the process group {name!r} is needed, but only {list(given)} were set; set it, or "
            f"set it to None if it is not used"
        )
    return given[name]


def _config_of(model: Any) -> Any:
    """Call Megatron's `get_model_config`, which also finds the configuration of a wrapped model."""
    return importlib.import_module("megatron.core.utils").get_model_config(model)


# ---- several modules ----------------------------------------------------------------------------


@dataclass
class MultiModuleProcessGroupCollection:
    """The collections of several modules that share ranks, such as an encoder and a language model.

    Args:
        module_pgs: The collection of each module, by name.
        language_model_module_name: The name of the language model, or None if no module is a
            language model.

    Raises:
        ValueError: There are no modules, or the language model is not one of the modules.

    Example:
        >>> encoder, llm = ProcessGroupCollection(), ProcessGroupCollection()
        >>> modules = MultiModuleProcessGroupCollection({"encoder": encoder, "llm": llm}, "llm")
        >>> modules["encoder"] is encoder, modules.get_language_model_collection() is llm
        (True, True)
    """

    module_pgs: dict[str, ProcessGroupCollection]
    language_model_module_name: str | None = None

    def __post_init__(self) -> None:
        if not self.module_pgs:
            raise ConfigurationError("module_pgs is empty; give the collection of each module")
        if self.language_model_module_name is not None:
            self.get_module_collection(self.language_model_module_name)

    def get_language_model_collection(self) -> ProcessGroupCollection:
        """Return the collection of the language model.

        Raises:
            ValueError: No module is a language model.
        """
        if self.language_model_module_name is None:
            raise ConfigurationError(
                f"language_model_module_name is None: none of {list(self.keys())} is a language "
                f"model"
            )
        return self.module_pgs[self.language_model_module_name]

    def get_language_model_cp_size(self) -> int:
        """Return the context parallel size of the language model.

        Raises:
            ValueError: No module is a language model, or the cp group of the language model was not
            set.
        """
        group = self.get_language_model_collection().cp
        if group is None:
            raise ConfigurationError("the cp group of the language model was not set")
        return group.size()

    def has_language_model(self) -> bool:
        """Return whether one of the modules is the language model."""
        return self.language_model_module_name is not None

    def get_module_collection(self, module_name: str) -> ProcessGroupCollection:
        """Return the collection of a module, like `collection[module_name]`.

        Raises:
            UnknownDimError: The module is unknown (a ValueError and a KeyError).
        """
        if module_name not in self.module_pgs:
            known = list(self.keys())
            raise UnknownDimError(f"unknown module {module_name!r}; the modules are {known}")
        return self.module_pgs[module_name]

    __getitem__ = get_module_collection

    def __len__(self) -> int:
        return len(self.module_pgs)

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
