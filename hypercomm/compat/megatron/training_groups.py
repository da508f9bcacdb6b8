"""The groups that an optimizer and DistributedDataParallel need, of a collection or a state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.megatron.groups.of_a_grid import TWIN
from hypercomm.compat.megatron.groups.table import FIELDS, GLOO
from hypercomm.compat.megatron.releases import version
from hypercomm.compat.megatron.state.state import current
from hypercomm.errors import ConfigurationError
from hypercomm.layout.checks import as_ordered, positive
from hypercomm.layout.text import shown
from hypercomm.process_groups import torch_internals as c10d

logger = logging.getLogger(__name__)

Group = ProcessGroup | None
"""What is held of a group; None where it was not set, and on a rank that is in none of them."""

_PARTS = ("intra_dp_cp", "intra_expt_dp")
_GTP = ("gtp_remat", "expt_gtp_remat")


def for_optimizer(
    collection: Any, model_chunks: Sequence[Any], use_gloo_process_groups: bool
) -> dict[str, Group]:
    """Return the groups that an optimizer needs, by name.

    Args:
        collection: Where to take them from; None for the current parallel state.
        model_chunks: The first one's configuration tells what is needed.
        use_gloo_process_groups: Whether to add gloo twins. With GTP the state has none.

    Raises:
        ConfigurationError: A group that is needed was not set, or a gloo twin.
        StateError: The parallel state is needed and not initialised.
    """
    chunks = as_ordered(model_chunks, "model_chunks")
    if not chunks:
        raise ConfigurationError("model_chunks is empty; give the parts of a model")
    ddp_config = getattr(chunks[0], "ddp_config", None)
    instances = 1 if ddp_config is None else _instances_of(ddp_config)
    take = _of_state if collection is None else partial(_take, collection)
    if collection is None:
        groups = _named(take, "dp", "dp_cp", "expt_dp", *_PARTS, "intra_dist_opt")
        groups["inter_dist_opt_group"] = take("inter_dist_opt") if instances > 1 else None
    else:
        groups = _data_parallel(collection, lambda: _config_of(chunks[0]))
        groups |= _named(take, "expt_dp")
        groups |= _instance_groups(collection, groups, instances)
        is_sharded = ddp_config is not None and _setting(ddp_config, "use_distributed_optimizer")
        whole = take("intra_dist_opt") if is_sharded or instances > 1 else None
        groups["intra_dist_opt_group"] = whole if is_sharded else None
    groups |= {**_named(take, "mp"), "expt_tp_pp_group": take("tp_ep_pp")}
    groups |= _gtp_groups(collection)
    if groups.keys() >= {f"{name}_group" for name in _GTP}:
        name = "tp_ep_pp_with_egtp_remat"
        is_there = collection is None or _is_set(collection, name)
        merged = take(name) if is_there else groups["expt_tp_pp_group"]
        groups["expt_tp_pp_with_egtp_remat_group"] = merged
    return groups | _twins(collection, use_gloo_process_groups, groups)


def for_ddp(collection: Any, config: Any, ddp_config: Any) -> dict[str, Group]:
    """Return the groups that DistributedDataParallel needs, by name.

    Args:
        collection: Where to take them from; None for the current parallel state.
        config: The model's configuration: its `context_parallel_size` tells what is needed.
        ddp_config: So does its `num_distributed_optimizer_instances`.

    Raises:
        ConfigurationError: A group that is needed was not set.
        StateError: The parallel state is needed and not initialised.
    """
    instances = _instances_of(ddp_config)
    take = _of_state if collection is None else partial(_take, collection)
    if collection is None:
        groups = _named(take, "dp", "dp_cp", "expt_dp", *_PARTS)
        is_sharded = _setting(ddp_config, "use_distributed_optimizer")
        groups["inter_dist_opt_group"] = take("inter_dist_opt") if instances > 1 else None
        groups["intra_dist_opt_group"] = take("intra_dist_opt") if is_sharded else None
    else:
        groups = _data_parallel(collection, lambda: config)
        groups["expt_dp_group"] = getattr(collection, "expt_dp", None)
        groups |= _instance_groups(collection, groups, instances)
    groups |= {**_named(take, "tp", "pp", "ep"), **_gtp_groups(collection)}
    if groups["expt_dp_group"] is None:
        logger.warning("no expt_dp group was given; creating one of this rank alone")
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        names = ["expt_dp_group", *(["intra_expt_dp_group"] * (instances == 1))]
        groups |= dict.fromkeys(names, c10d.as_member(alone))
    return groups


def has_peers(groups: Mapping[str, Group]) -> bool:
    """Tell whether there are GTP peers among groups that one of the functions above answered."""
    found = [groups.get(f"{name}_group") for name in _GTP]
    return any(group is not None and group.size() > 1 for group in found)


def _named(take: Callable[[str], Group], *names: str) -> dict[str, Group]:
    return {f"{name}_group": take(name) for name in names}


def _of_state(name: str) -> Any:
    return current.get().require(FIELDS[name])


def _take(collection: Any, name: str) -> Any:
    """Return a group that must have been set, perhaps to None."""
    if not _is_set(collection, name):
        raise ConfigurationError(
            f"the process group {name!r} is needed, but the collection has only {collection!r}; "
            f"set it, to None if it is not used"
        )
    return getattr(collection, name)


def _is_set(collection: Any, name: str) -> bool:
    """Tell whether a collection, or what stands in for one, has a group that was not left out."""
    held = getattr(collection, "__dict__", {})
    # What has None for whatever was not set has set what it holds itself.
    return name in held or getattr(collection, name, None) is not None


def _data_parallel(collection: Any, config: Callable[[], Any]) -> dict[str, Group]:
    """Return dp and dp_cp; without context parallel they are the same."""
    dp = _take(collection, "dp")
    needs_cp = _is_set(collection, "dp_cp") or getattr(config(), "context_parallel_size", 1) != 1
    return {"dp_group": dp, "dp_cp_group": _take(collection, "dp_cp") if needs_cp else dp}


def _instance_groups(
    collection: Any, groups: Mapping[str, Group], instances: int
) -> dict[str, Group]:
    """Return the groups within and across optimizer instances; with one, there is no across."""
    if instances > 1:
        return _named(partial(_take, collection), *_PARTS, "inter_dist_opt")
    return {
        "intra_dp_cp_group": groups["dp_cp_group"],
        "intra_expt_dp_group": groups["expt_dp_group"],
        "inter_dist_opt_group": None,
    }


def _gtp_groups(collection: Any) -> dict[str, Group]:
    """Return the GTP peers, where the state, or whoever made the collection, knows of them."""
    if collection is None:
        state = current.get()
        return _named(lambda name: state.read(FIELDS[name]), *_GTP) if state.answers_gtp else {}
    is_known = version.has("gtp_remat") or any(_is_set(collection, name) for name in _GTP)
    return {f"{name}_group": getattr(collection, name, None) for name in _GTP if is_known}


def _twins(collection: Any, are_wanted: bool, groups: Mapping[str, Group]) -> dict[str, Group]:
    """Return the gloo twins that an optimizer needs, which some collections have."""
    if collection is None:
        require = current.get().require
        are_wanted = are_wanted and not has_peers(groups)
        held = {name: require(FIELDS[name] + GLOO) if are_wanted else None for name in _PARTS}
        return {f"{name}_group_gloo": twin for name, twin in held.items()}
    if not are_wanted:
        return {f"{name}_group_gloo": None for name in _PARTS}
    missing = [name + TWIN for name in _PARTS if name + TWIN not in vars(collection)]
    if missing:
        raise ConfigurationError(
            f"Gloo process groups are not supported when pg_collection is provided without them: "
            f"it has no {' and no '.join(missing)}; give use_gloo_process_groups=False, or let "
            f"create_megatron_pgs make them with create_gloo_process_groups=True (not with GTP)"
        )
    return {f"{name}_group_gloo": vars(collection)[name + TWIN] for name in _PARTS}


def _instances_of(ddp_config: Any) -> int:
    name = "num_distributed_optimizer_instances"
    return positive(_setting(ddp_config, name), name)


def _setting(config: Any, name: str) -> Any:
    """Return an attribute of a configuration that was given."""
    if not hasattr(config, name):
        raise ConfigurationError(f"the configuration {shown(config)} has no {name}")
    return getattr(config, name)


def _config_of(model: Any) -> Any:
    """Return the configuration of a model, under all that it is wrapped in."""
    while getattr(model, "config", None) is None:
        if not hasattr(model, "module"):
            raise ConfigurationError(
                f"model_chunks[0] has no config, nor has what it wraps: {model!r}"
            )
        model = model.module
    return model.config
