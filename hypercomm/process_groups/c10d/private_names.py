"""The private names of torch that hypercomm uses, each behind a check that is made once.

None is needed: where one cannot be used, the public way is taken, and the log says once what is
lost. Each row says what a name gives, how it is checked and what happens without it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hypercomm.process_groups.c10d.self_checks import PrivateName, PrivateNames, since

Check = Callable[[Any], str | None]


def is_other_world() -> bool:
    """Tell whether what torch.distributed sees is a job that is simulated."""
    return hasattr(getattr(dist.distributed_c10d, "_world", None), "is_of_another_world")


def has_other_ranks() -> bool:
    """Tell whether other ranks of the job can be met: not where each is simulated alone."""
    return getattr(getattr(dist.distributed_c10d, "_world", None), "has_other_ranks", True)


# ---- checks of any name -----------------------------------------------------------------------


def has(*attributes: str) -> Check:
    """Check for attributes."""

    def check(found: Any) -> str | None:
        missing = [name for name in attributes if not hasattr(found, name)]
        return f"has no {', '.join(missing)}" if missing else None

    return check


def takes(*parameters: str) -> Check:
    """Check for the very parameters of a function."""

    def check(function: Any) -> str | None:
        taken = tuple(signature_of(function))
        return None if taken == parameters else f"takes {', '.join(taken)}"

    return check


def answers(kind: type, *args: Any) -> Check:
    """Check for what a function answers."""

    def check(function: Any) -> str | None:
        return None if isinstance(function(*args), kind) else f"answers no {kind.__name__}"

    return check


@functools.lru_cache(maxsize=8)
def signature_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function."""
    return inspect.signature(function).parameters


# ---- checks of one name -----------------------------------------------------------------------


def _check_helper(helper: Any) -> str | None:
    """Ask for a group by the name of WORLD: every torch refuses that before anything else."""
    taken = signature_of(helper)
    lacks = [name for name in _HELPER_ARGUMENTS if name not in taken]
    if lacks:
        return f"takes no {', '.join(f'{name}=' for name in lacks)}"
    world: Any = dist.group.WORLD
    if world is None:
        return None
    name = getattr(world, "group_name", None) or private.get(WORLD_TABLES).pg_names[world]
    try:
        helper(1, 0, [0], "gloo", None, group_name=name)
    except ValueError as error:
        return None if "name" in str(error) else f"raises {error!r}"
    return "takes a name for a group that is taken"


def _check_store(get_store: Any) -> str | None:
    # A simulated job has no store, and what it lacks says nothing of torch.
    is_real = dist.is_initialized() and not is_other_world()
    return _is_store(get_store() if is_real else dist.Store)  # type: ignore[attr-defined]


def _check_tables(world: Any) -> str | None:
    lacks = _has_tables(world)
    if lacks is None and dist.is_initialized() and dist.group.WORLD not in world.pg_map:
        return "does not know the default process group"
    return lacks


def _check_get_backend(get_backend: Any) -> str | None:
    world = dist.group.WORLD
    if not isinstance(world, dist.ProcessGroup) or is_other_world():
        return None
    device = dist.get_backend_config().split(":")[0]
    return has("supports_splitting")(get_backend(world, torch.device(device)))


def _check_plugins(plugins: Any) -> str | None:
    return next(filter(None, map(has("creator_fn", "extended_api"), plugins.values())), None)


def _check_naming(name_group: Any) -> str | None:
    if (reason := takes("ranks", "use_hashed_name")(name_group)) is not None:
        return reason
    tables = private.get(WORLD_TABLES)
    count = getattr(tables, "group_count", None)
    reason = answers(str, [0], True)(name_group)
    if count is not None and tables.group_count == count + 1:
        tables.group_count = count  # newer ones count what they name
    return reason


def _check_dispatcher(dispatcher: Any) -> str | None:
    remembered = dispatcher.sharding_propagator.propagate_op_sharding
    return has("cache_clear")(getattr(remembered, "cache", remembered))


def _check_flattened(_: Any) -> str | None:
    meshes: Any = importlib.import_module("torch.distributed.device_mesh")
    if "_flatten_mapping" not in meshes.DeviceMesh.__annotations__:  # one table for all meshes
        known = getattr(meshes, "_mesh_resources", None)
        return has("child_to_root_mapping", "root_to_flatten_mapping", "flatten_name_to_root_dims")(
            known
        )
    taken = signature_of(meshes.DeviceMesh.__init__)
    lacks = [name for name in ("_layout", "_rank_map", "_root_mesh") if name not in taken]
    return f"takes no {', '.join(lacks)}" if lacks else has("collapse")(meshes._MeshLayout)


def _keeps_keys(replaced: str) -> Check:
    """Check one of the three functions for what threads know, with the help of the other two."""

    def check(function: Any) -> str | None:
        key = "hypercomm/self-check"
        stash, is_stashed, remove = (
            function if name == replaced else getattr(torch._C, name) for name in _OF_THREADS
        )
        stash(key, None)
        was_there = is_stashed(key)
        remove(key)
        return None if was_there and not is_stashed(key) else "does not keep a key until its end"

    return check


# ---- the table --------------------------------------------------------------------------------

_C10D = "distributed.distributed_c10d"
_HELPER_ARGUMENTS = (
    *("store", "group_name", "backend_options", "timeout", "device_id", "group_desc"),
)
_is_store = has("check", "compare_set", "delete_key", "get", "set", "has_extended_api")
_has_tables = has(
    *("pg_map", "pg_names", "pg_group_ranks", "pg_to_tag", "tags_to_pg", "default_pg"),
)

HELPER = PrivateName(
    f"{_C10D}._new_process_group_helper",
    "groups under names that all members derive alike, created by their members alone",
    "its arguments; a name that is taken is refused",
    "every rank walks every group of the world (creation='enumerate'), under torch's names",
    _check_helper,
)
STORE = PrivateName(
    f"{_C10D}._get_default_store",
    "the job's store: ranks compare their grids, and name those that are missing",
    "it is called, and the calls of what it answers",
    "nothing is compared, nobody is named, and every rank walks every group of the world",
    _check_store,
)
WORLD_TABLES = PrivateName(
    f"{_C10D}._world",
    "what torch has registered: a failed creation leaves nothing there",
    "its tables, which have the default process group",
    "every rank walks every group of the world, and what fails may leave a group behind",
    _check_tables,
)
GET_BACKEND = PrivateName(
    "distributed.ProcessGroup._get_backend",
    "the timeout of WORLD for each group, and splits of WORLD",
    "it is called for a device of WORLD",
    "groups have torch's own default timeout, and WORLD is not split",
    _check_get_backend,
)
PLUGINS = PrivateName(
    "distributed.Backend._plugins",
    "pg_options for backends of third parties",
    "the fields of each entry",
    "pg_options are refused for all backends but NCCL's",
    _check_plugins,
)
OPTIONS_TIMEOUT = PrivateName(
    "_C._distributed_c10d.Backend.Options._timeout",
    "the timeout that pg_options hold",
    "it is there",
    "the timeout in pg_options is not compared with timeout=",
    has("__get__"),
)
GLOO = PrivateName(
    f"{_C10D}.ProcessGroupGloo",
    "gloo groups of one call share what they listen at; missing members are named early; Ctrl-C",
    "options and devices; a group of one is created when a first group is",
    "gloo groups are created as torch does it: those of one call share no devices, and neither "
    "news of other ranks nor Ctrl-C ends a wait for missing ranks before its timeout",
    has("_Options", "create_default_device", "create_device"),
)
NAME_GROUP = PrivateName(
    f"{_C10D}._process_group_name",
    "groups that are split off WORLD have names that all members derive alike",
    "its arguments; it is called",
    "torch names them, before 2.14 by a count that may differ between ranks: leave the grids "
    "before destroy_process_group(), which may hang otherwise",
    _check_naming,
)
COLOR = PrivateName(
    f"{_C10D}._process_group_color",
    "groups that torch would mistake for each other are split off WORLD in turns",
    "it is called",
    "WORLD is not split",
    answers(int, [0, 1]),
    is_due=lambda: not hasattr(dist.ProcessGroup, "split_group"),
)
TORCHCOMMS = PrivateName(
    f"{_C10D}._use_torchcomms_enabled",
    "groups are left to TorchComms where that is on",
    "it is called",
    "TorchComms is taken to be off",
    answers(bool),
    is_due=lambda: hasattr(dist.distributed_c10d, "_use_torchcomms_enabled"),
)
SET_TIMEOUT = PrivateName(
    f"{_C10D}._set_pg_timeout",
    "the timeout of a group can be changed",
    "its arguments",
    "timeouts stay as they are",
    takes("timeout", "group"),
    is_due=lambda: not hasattr(dist, "set_timeout"),
)
ABORT = PrivateName(
    f"{_C10D}._abort_process_group",
    "abort() ends NCCL groups at once",
    "its arguments",
    "abort() destroys them, which waits for what is under way",
    takes("group"),
)
DISPATCHER = PrivateName(
    "distributed.tensor._api.DTensor._op_dispatcher",
    "DTensor forgets the meshes of a grid that ends",
    "the cache in it",
    "give grids that follow each other on the same ranks other dim names",
    _check_dispatcher,
    module="torch.distributed.tensor._api",
)
CLEAR_CACHE = PrivateName(
    "_C._clear_DTensor_sharding_propagator_cache",
    "the same for DTensor's cache in C++",
    "it is called",
    "give grids that follow each other on the same ranks other dim names",
    answers(object),
    is_due=lambda: since("2.10"),
)
BASES = PrivateName(
    "distributed.ProcessGroup._allgather_base",
    "grid.watch() sees all_gather_into_tensor and reduce_scatter_tensor",
    "the other of the two is there",
    "grid.watch() does not see them",
    lambda _: has("_reduce_scatter_base")(dist.ProcessGroup),
    is_due=lambda: not hasattr(dist.ProcessGroup, "all_gather_single"),
)
_OF_THREADS = {
    "_stash_obj_in_tls": "a `use` block reaches the threads of the backward passes that it starts",
    "_is_key_in_tls": "threads of a backward pass know the `use` block that started it",
    "_remove_obj_from_tls": "a `use` block ends for those threads, too",
}
STASH, IS_STASHED, UNSTASH = OF_THREADS = tuple(
    PrivateName(
        f"_C.{name}",
        gives,
        "a key is stashed, found and removed",
        "a `use` block is for its own thread alone",
        _keeps_keys(name),
        is_due=lambda: since("2.13"),  # an older torch would keep each key for ever
    )
    for name, gives in _OF_THREADS.items()
)
MESH_ORDER = PrivateName(
    "distributed.device_mesh.DeviceMesh.__annotations__",
    "a DeviceMesh made with preserve_rank_order=True is read, and one of listed ranks says so",
    "it has _preserve_rank_order",
    "a permuted DeviceMesh that hypercomm has not made is refused",
    lambda known: None if "_preserve_rank_order" in known else "does not have it",
    is_due=lambda: since("2.15"),
    module="torch.distributed.device_mesh",
)
SYMMETRIC = PrivateName(
    "distributed._symmetric_memory",
    "buffers in symmetric memory, for Megatron's inference",
    "its functions",
    "no symmetric memory: the ordinary collectives are used",
    has("empty", "rendezvous"),
    module="torch.distributed._symmetric_memory",
)
MESH_FLATTENED = PrivateName(
    "distributed.device_mesh.DeviceMesh._flatten",
    "groups that exist are a mesh's flattened dims: grid.device_mesh(flatten=)",
    "what makes a mesh of a part of another, and where flattened dims are remembered",
    "grid.device_mesh(flatten=) is refused",
    _check_flattened,
    module="torch.distributed.device_mesh",
)
FAKE = PrivateName(
    "testing._internal.distributed.fake_pg",
    "fake worlds",
    "its store",
    "no fake worlds",
    has("FakeStore"),
    module="torch.testing._internal.distributed.fake_pg",
)
PRIVATE_NAMES = tuple(row for row in list(globals().values()) if isinstance(row, PrivateName))

private = PrivateNames(torch, PRIVATE_NAMES)
"""Those of this process."""
