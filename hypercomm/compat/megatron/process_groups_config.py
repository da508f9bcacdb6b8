"""Implements Megatron's `process_groups_config`: the groups of one model in one object.

Only Megatron's own code uses the other names of that module, such as
`MultiModuleProcessGroupCollection`. They are those of the installed release.

Source: names, signatures and behaviour follow `megatron.core.process_groups_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch.distributed import ProcessGroup

from hypercomm.compat.layouts import EXPERT, GTP
from hypercomm.compat.megatron import table, version
from hypercomm.compat.megatron.state import ParallelState, current
from hypercomm.errors import UnknownFieldError
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.view import GridView
from hypercomm.layout.checks import as_strings

Group = ProcessGroup | None
"""A group in a collection, or None if the group was not set or does not contain this rank."""


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
        values = {name: state.values.get(table.FIELDS[name]) for name in wanted}
        for name in wanted:
            if values[name] is None and name in _NEEDED:
                raise state.missing(table.FIELDS[name])
        return cls(**values)

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

    @staticmethod
    def setup_process_groups_for_optimizer(
        pg_collection: ProcessGroupCollection | None,
        model_chunks: Sequence[Any],
        use_gloo_process_groups: bool = True,
    ) -> dict[str, Group]:
        """Return the groups that Megatron's optimizer needs, as the installed release chooses them.

        Args:
            pg_collection: The collection of the groups. Default: the state of
                `megatron.core.parallel_state`, which `install()` replaces.
            model_chunks: The model chunks. The configuration of the first chunk decides which
                groups are needed.
            use_gloo_process_groups: Whether to add gloo groups.

        Raises:
            MissingPackageError: megatron-core is not installed.
        """
        theirs = version.original("process_groups_config").ProcessGroupCollection
        return theirs.setup_process_groups_for_optimizer(  # type: ignore[no-any-return]
            pg_collection, model_chunks, use_gloo_process_groups
        )

    @staticmethod
    def setup_process_groups_for_ddp(
        pg_collection: ProcessGroupCollection | None, config: Any, ddp_config: Any
    ) -> dict[str, Group]:
        """Return the groups that Megatron's DistributedDataParallel needs.

        See `setup_process_groups_for_optimizer`.
        """
        theirs = version.original("process_groups_config").ProcessGroupCollection
        return theirs.setup_process_groups_for_ddp(  # type: ignore[no-any-return]
            pg_collection, config, ddp_config
        )

    @staticmethod
    def is_gtp_remat_active(process_group_dict: Mapping[str, Group]) -> bool:
        """Return whether weights are shared among GTP peers.

        Args:
            process_group_dict: The result of `setup_process_groups_for_optimizer` or `..._for_ddp`.
        """
        found = map(process_group_dict.get, ("gtp_remat_group", "expt_gtp_remat_group"))
        return any(group is not None and group.size() > 1 for group in found)


_NEEDED = ("dp", "dp_cp", "dp_cp_gtp_remat", "intra_dp_cp")
"""The fields for which Megatron's `use_mpu_process_groups` raises if there is no group."""


def _check_fields(kind: type[ProcessGroupCollection], complaint: str, *names: str) -> None:
    known = [item.name for item in fields(kind)]
    if unknown := [name for name in names if name not in known]:
        raise UnknownFieldError(f"{complaint}: {unknown}; {kind.__name__} has {known}")


def _size(group: Any) -> object:
    return [item.size() for item in group] if isinstance(group, list) else group.size()


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


# ---- the installed release ----------------------------------------------------------------------


_THEIRS = (
    "MultiModuleProcessGroupCollection",
    "ProcessGroupHelperMeta",
    "resolve_gtp_remat_group",
)


def __getattr__(name: str) -> Any:
    """Return a name that only Megatron's own code uses."""
    if name in _THEIRS:
        return getattr(version.original("process_groups_config"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
