"""Calls every function of Megatron's or hypercomm's parallel state, so that tests can compare."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from megatron_oracle import core, parallel_state as theirs, process_groups_config

from hypercomm.compat.megatron import (
    parallel_state as ours,
    process_groups_config as our_config,
    version,
)
from hypercomm.testing import fake_world

NOT_COMPARED = {
    "get_nccl_options",  # not a getter
    "get_hybrid_data_context_parallel_groups",  # takes a size; `ask` calls it separately
}
TheirCollection = process_groups_config.ProcessGroupCollection
TWINS = ("dp_cp_ag", "expt_dp_ag")
THEIR_FIELDS = [field.name for field in dataclasses.fields(TheirCollection)]
THEIR_FIELDS = [name for name in THEIR_FIELDS if name not in TWINS]
"""The fields of the installed Megatron that a state fills."""

TAKEN = set(inspect.signature(theirs.initialize_model_parallel).parameters)
"""The arguments of the installed Megatron."""


def taken_by(module, arguments):
    """Return the arguments without those that the installed Megatron does not have."""
    if module is not theirs:
        return arguments
    moved = {"create_all_gather_group", "hybrid_context_parallel", "sharp_enabled_group"} - TAKEN
    return {name: value for name, value in arguments.items() if name not in moved}


GETTERS = [
    name
    for name, value in vars(theirs).items()
    if name.startswith(("get_", "is_", "has_", "model_parallel_is")) and inspect.isfunction(value)
    if name not in NOT_COMPARED and value.__module__ == theirs.__name__
]
GLOBALS = [
    name
    for name, value in vars(theirs).items()
    if name.startswith("_") and (name.isupper() or name == "_global_process_group_list")
]


_followed: list[str | None] = [None]


@contextmanager
def following(release):
    """Follow another release of Megatron during a block."""
    version.set(release)
    _followed.append(release)
    try:
        yield
    finally:
        _followed.pop()
        version.set(_followed[-1])


@contextmanager
def gloo_made_fake(module):
    """Make Megatron create fake groups, because a fake world cannot connect gloo groups."""
    with with_create_group(module) if module is theirs else contextlib.nullcontext():
        yield


def with_create_group(module):
    """Replace `create_group` by a function that creates fake groups."""
    real_create_group = module.create_group

    def create_group(*args, **kwargs):
        return real_create_group(*args, **{**kwargs, "backend": None})

    return mock.patch.object(module, "create_group", create_group)


def plain(value):
    """Replace process groups in a value by their ranks, so that values can be compared."""
    if isinstance(value, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(value))
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if value is None or isinstance(value, int | str):
        return value
    return type(value).__name__


def calls_of(name):
    """Yield the arguments of all calls of a getter: every combination of its flags."""
    parameters = [
        parameter.name
        for parameter in inspect.signature(getattr(theirs, name)).parameters.values()
        if isinstance(parameter.default, bool)
    ]
    for flags in itertools.product([False, True], repeat=len(parameters)):
        yield dict(zip(parameters, flags, strict=True))
    if "vp_stage" in inspect.signature(getattr(theirs, name)).parameters:
        yield from ({"ignore_virtual": False, "vp_stage": stage} for stage in range(3))


def ask(module):
    """Return the result of every call, or the builtin type of its error."""
    answers = {}
    for name in GETTERS:
        for arguments in calls_of(name):
            call = f"{name}({arguments})"
            try:
                answers[call] = plain(getattr(module, name)(**arguments))
            except (AssertionError, KeyError, ValueError, TypeError) as error:
                answers[call] = builtin_of(error)
    for size in (2, 4, 8, 16):
        name = f"hybrid({size})"
        try:
            answers[name] = plain(module.get_hybrid_data_context_parallel_groups(True, size))
        except (AssertionError, KeyError) as error:
            answers[name] = builtin_of(error)
    return answers


def ask_collections(module):
    """Return each field of the state's collection, and the groups for an optimizer and for DDP."""
    kind = our_config.ProcessGroupCollection if module is ours else TheirCollection
    collection = kind.use_mpu_process_groups()
    answers = {f"field {name}": plain(getattr(collection, name, None)) for name in THEIR_FIELDS}
    for instances, sharded in itertools.product([1, 2], [False, True]):
        config = ddp_config(instances, sharded)
        for what, gloo in (("ddp", False), ("optimizer", False), ("optimizer", True)):
            found = set_up(kind, what, None, 1, config, gloo)
            if isinstance(found, Exception):
                found = "error"
            elif "gtp_remat_size" not in TAKEN:
                found = {key: group for key, group in found.items() if "gtp_remat" not in key}
            answers[f"{what} {instances} {sharded} {gloo}"] = found
    return answers


def ddp_config(instances, sharded):
    return SimpleNamespace(
        num_distributed_optimizer_instances=instances, use_distributed_optimizer=sharded
    )


def set_up(kind, what, collection, cp_size, ddp_config, gloo=False):
    """Return the ranks of the groups that an optimizer or DDP needs, by key, or the error."""
    collection = None if collection is None else kind(**collection)
    config = (
        SimpleNamespace() if cp_size is None else SimpleNamespace(context_parallel_size=cp_size)
    )
    model = SimpleNamespace(module=SimpleNamespace(module=SimpleNamespace(config=config)))
    if ddp_config is not None:
        model.ddp_config = ddp_config
    module = theirs if kind is TheirCollection else ours
    with mock.patch.object(core, "parallel_state", module):  # as install() does
        return _groups_for(kind, what, collection, model, config, ddp_config, gloo)


def _groups_for(kind, what, collection, model, config, ddp_config, gloo):
    try:
        if what == "optimizer":
            found = kind.setup_process_groups_for_optimizer(collection, [model], gloo)
        else:
            found = kind.setup_process_groups_for_ddp(collection, config, ddp_config)
    except Exception as error:  # noqa: BLE001 - whatever Megatron raises
        return error
    return {key: plain(group) for key, group in found.items()}


def builtin_of(error):
    """Return the name of the first builtin type in the MRO of an error."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


def read_globals(module):
    """Return every global. The list of groups becomes a set, because its order may differ."""
    values = {name: plain(getattr(module, name)) for name in GLOBALS}
    groups = values.pop("_global_process_group_list")
    return values | {"groups": groups and {tuple(group) for group in groups if group}}


def state_of(module, world_size, rank, arguments):
    """Initialise, ask and destroy as one rank of a fake world. Return the answers or the error."""
    with fake_world(world_size, rank), gloo_made_fake(module), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            module.initialize_model_parallel(**taken_by(module, arguments))
        except Exception as error:  # noqa: BLE001 - whatever Megatron raises
            return error
        else:
            collections = ask_collections(module) if module.is_initialized() else {}
            return {**ask(module), **read_globals(module), **collections}
        finally:
            forget(module)


def forget(module):
    """Destroy a state, and reset the globals that Megatron's own teardown leaves."""
    module.destroy_model_parallel()
    if module is theirs:
        for name in GLOBALS:
            setattr(theirs, name, {} if name == "_HYBRID_DP_CP_GROUPS" else None)


__all__ = ["ours", "state_of", "theirs"]


FIELDS = (
    "tp",
    "pp",
    "mp",
    "embd",
    "pos_embd",
    "cp",
    "tp_cp",
    "ep",
    "expt_tp",
    "tp_ep",
    "tp_ep_pp",
    "tp_dp_cp",
    "dp",
    "dp_cp",
    "expt_dp",
    "intra_dp_cp",
    "intra_expt_dp",
    "intra_dist_opt",
)
"""The fields that Megatron's and hypercomm's collections have with one optimizer instance."""

LONG = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "expt_tp": "expert_tensor_parallel_size",
    "order": "order",
}


@functools.cache
def megatrons_fields(world_size, rank, **arguments):
    """Return the ranks of each group of Megatron's collection, or None if Megatron fails."""
    named = {LONG[name]: value for name, value in arguments.items() if value is not None}
    with fake_world(world_size, rank), gloo_made_fake(theirs):
        try:
            theirs.initialize_model_parallel(**named)
        except (AssertionError, RuntimeError):
            return None
        else:
            collection = TheirCollection.use_mpu_process_groups()
            return {name: plain(getattr(collection, name, None)) for name in FIELDS}
        finally:
            forget(theirs)
