"""Megatron's `process_groups_config`: the groups of one model as one object.

Source: names, signatures and behaviour follow `megatron.core.process_groups_config`.
"""

from __future__ import annotations

import logging
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, fields
from typing import Any

from torch.distributed import ProcessGroup

from hypercomm.compat.megatron import training_groups
from hypercomm.compat.megatron.groups.of_a_grid import EXPERT, fields_of
from hypercomm.compat.megatron.groups.table import FIELDS, ROWS
from hypercomm.compat.megatron.releases import version
from hypercomm.compat.megatron.state.state import ParallelState, current
from hypercomm.compat.megatron.training_groups import Group
from hypercomm.errors import ConfigurationError, GroupMissingError, UnknownFieldError
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.grid import GridView
from hypercomm.layout.checks import as_strings
from hypercomm.layout.text import shown

logger = logging.getLogger(__name__)


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
    """The process groups of one model; a field that was not set is None.

    With megatron-core 0.16 it is an AttributeError, as there. Any other attribute can be set, too.

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
        vars(self).update(kwargs)

    def __getattr__(self, name: str) -> None:
        _check_fields(type(self), "Unknown attribute", name)
        if not version.has("unset_is_none"):
            raise UnknownFieldError(
                f"field {name!r} was not set, which is an error in megatron-core {version.get()}; "
                f"the collection has {list(vars(self)) or 'nothing'}"
            )

    def __repr__(self) -> str:
        groups = {item.name: vars(self).get(item.name, self) for item in fields(self)}
        hidden = (self, None) if version.has("unset_is_none") else (self,)
        shown = [f"{name}({_size(pg)})" for name, pg in groups.items() if pg not in hidden]
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
        wanted = [name for name in FIELDS if state.answers_gtp or not _is_gtp(name)]
        if required_pgs is not None:
            wanted = list(as_strings(required_pgs, "required_pgs"))
        _check_fields(cls, "Invalid process groups requested", *wanted)
        collection = cls()
        for name in wanted:
            group = None
            if name in FIELDS:
                group = (state.require if name in _NEEDED else state.read)(FIELDS[name])
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
            grid: The dense grid, over some of the dims tp, gtp_remat, cp, dp and pp.
            expert: The expert grid, over some of tp, ep, gtp_remat, dp and pp; default: the view
                "expert" of `grid`, if it has one. Either may call tp, gtp_remat and dp expt_tp and
                so on. It may be `grid` itself: then experts are laid out as the dense layers, and
                copied along cp.

        Returns:
            A collection with every field whose group was created. A dim that a grid does not have
            adds no ranks, so `dp_cp` is then `dp`; a field all of whose dims it lacks, such as
            `cp`, is filled by the group that is filed under the field's name. So are the fields of
            groups that are derived from those over dims, such as `embd` and `pos_embd`. Gloo twins
            and hybrid context parallel groups, which have no field, are attributes such as
            `intra_dp_cp_gloo`, and the dict `hybrid_dp_cp`.

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
        for name, given in [("grid", grid), ("expert", expert)]:
            if not isinstance(given, HyperCommGrid) and (name == "grid" or given is not None):
                raise ConfigurationError(f"{name} must be a HyperCommGrid, got {shown(given)}")
        of_experts: GridView | None = expert
        if expert is None and EXPERT in grid.views:
            of_experts = grid.view(EXPERT)
        collection = cls()
        vars(collection).update(fields_of(grid, of_experts))
        return collection

    @classmethod
    def setup_process_groups_for_optimizer(
        cls,
        pg_collection: ProcessGroupCollection | None,
        model_chunks: Sequence[Any],
        use_gloo_process_groups: bool = True,
    ) -> dict[str, Group]:
        """Return the groups that an optimizer needs, by name.

        Args:
            pg_collection: Where to take them from; default: the current parallel state.
            model_chunks: The first one's configuration tells what is needed.
            use_gloo_process_groups: Whether to add gloo twins. With GTP the state has none.

        Raises:
            ValueError: A group that is needed was not set, or a gloo twin.
            StateError: The parallel state is needed and not initialised.
        """
        return training_groups.for_optimizer(pg_collection, model_chunks, use_gloo_process_groups)

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
        return training_groups.for_ddp(pg_collection, config, ddp_config)

    @staticmethod
    def is_gtp_remat_active(process_group_dict: Mapping[str, Group]) -> bool:
        """Tell whether weights are shared among GTP peers.

        Args:
            process_group_dict: What one of the `setup_process_groups_for_...` answered.

        Raises:
            ConfigurationError: It is no mapping.
        """
        if not isinstance(process_group_dict, Mapping):
            raise ConfigurationError(
                f"process_group_dict must map names to groups, got {shown(process_group_dict)}"
            )
        return training_groups.has_peers(process_group_dict)


def resolve_gtp_remat_group(pg_collection: ProcessGroupCollection | None, is_expert: bool) -> Group:
    """Return the GTP peers of a module that owns weights.

    Args:
        pg_collection: The module's groups; without one, or where it does not have this field, the
            current parallel state answers.
        is_expert: Whether the weights are those of experts.

    Source: name, signature and behaviour follow `megatron.core.process_groups_config`.
    """
    name = "expt_gtp_remat" if is_expert else "gtp_remat"
    if pg_collection is not None and name in vars(pg_collection):
        return vars(pg_collection)[name]  # type: ignore[no-any-return]
    return current.get().read(FIELDS[name])  # type: ignore[no-any-return]


_NEEDED = ("dp", "dp_cp", "dp_cp_gtp_remat", "intra_dp_cp")
"""The fields that Megatron's `use_mpu_process_groups` does not leave at None."""
_TWINS = {"dp_cp_ag": "dense", "expt_dp_ag": "expert"}
"""The grid that holds what `create_all_gather_groups` creates, by field."""


def _is_gtp(name: str) -> bool:
    return ROWS[FIELDS[name]].gtp


def _check_fields(kind: type[ProcessGroupCollection], complaint: str, *names: str) -> None:
    known = [item.name for item in fields(kind)]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownFieldError(f"{complaint}: {unknown}; {kind.__name__} has {known}")


def _named(grid: HyperCommGrid, name: str) -> Group:
    """Return the group that is filed under a name of its own."""
    return next((pg for key, pg in grid.pgs.items() if key.name == name), None)


def _size(group: Any) -> object:
    if group is None:
        return None
    return [item.size() for item in group] if isinstance(group, list) else group.size()


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
