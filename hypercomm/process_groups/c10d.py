"""The only file that touches private names of torch: most are of torch.distributed.

It probes what the installed torch has, says what is missing, and offers what is left under plain
names. Everything is looked up at call time, so that a patched torch.distributed is respected.
Checked against the sources of torch 2.6, 2.8, 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from inspect import signature
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from hypercomm.errors import NotInitializedError
from hypercomm.process_groups.gloo import lazy_init, making
from hypercomm.process_groups.meeting import ENDLESS, Patience

_store_words: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The identity of each store, which is asked for once."""

_kept: WeakKeyDictionary[ProcessGroup, object] = WeakKeyDictionary()
"""What lives as long as a group."""

_HELPER_ARGUMENTS = {"store", "group_name", "backend_options", "timeout", "device_id", "group_desc"}


def _private() -> ModuleType:
    return dist.distributed_c10d


def missing() -> list[str]:
    """Name what the installed torch lacks for creating a group under a name of our own."""
    c10d = _private()
    needed = ("_new_process_group_helper", "_get_default_store", "_get_default_timeout")
    lacks = [name for name in needed if not hasattr(c10d, name)]
    if lacks:
        return lacks
    lacks = sorted(_HELPER_ARGUMENTS - _arguments_of(c10d._new_process_group_helper))
    return [f"_new_process_group_helper({name}=)" for name in lacks]


@functools.lru_cache(maxsize=2)
def _arguments_of(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


def replaces_new_group() -> str | None:
    """Name what makes this world create groups in a way of its own, if anything does."""
    torchcomms = getattr(_private(), "_use_torchcomms_enabled", None)
    if torchcomms is not None and torchcomms():
        return "torch creates groups through TorchComms here"
    if callable(getattr(dist.group.WORLD, "new_group", None)):
        return "the default process group has a new_group() of its own"
    return None


def world_group() -> ProcessGroup:
    """Return WORLD.

    Raises:
        NotInitializedError: torch.distributed is not initialised.
    """
    world = dist.group.WORLD
    if world is None:
        raise NotInitializedError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group()"
        )
    return world


def default_backend() -> str:
    """Return the backend that torch gives a group when none is named: that of WORLD."""
    return backend_of(world_group())


def backend_of(group: ProcessGroup) -> str:
    """Return the backend of a group.

    Where WORLD was made without one, torch calls it "undefined"; its parts have names.
    """
    name = str(_private()._world.pg_map[group][0])
    return dist.get_backend_config(group) if name == dist.Backend.UNDEFINED else name


@functools.lru_cache(maxsize=64)
def single_backends(backend: str) -> tuple[str, ...]:
    """List the backends in a backend string: "gloo", or "cpu:gloo,cuda:nccl"."""
    return tuple(part.rpartition(":")[2].strip() for part in backend.lower().split(","))


def devices_of(backend: str) -> tuple[str, ...] | None:
    """List the devices in a backend string such as "cpu:gloo,cuda:nccl"; None for "gloo"."""
    if not {":", ","} & set(backend):
        return None
    return tuple(part.rpartition(":")[0].strip() for part in backend.lower().split(","))


def known_backends() -> list[str]:
    """List the backends that the installed torch knows by name, plugins included."""
    return [str(name) for name in dist.Backend.backend_list if name != "undefined"]


def is_available(backend: str) -> bool:
    """Tell whether this build of torch can run a single backend."""
    if _is_other_world:
        return True  # it is to be run elsewhere
    # "fake" registers itself only when its module is loaded, so the probe must ask the registry.
    if backend == "fake":
        return "FAKE" in dist.Backend._plugins
    return bool(dist.is_backend_available(backend))


_NCCL = {"nccl", "nccl2", "nccl-lazy", "nccl-legacy"}
"""torch's names for NCCL, as of 2.15."""


def takes_options(backend: str) -> bool:
    """Tell whether torch hands `pg_options` to a single backend, rather than dropping them.

    Since torch 2.14 its own backends are plugins, too, which are all handed them; but those that
    are no NCCL leave them aside.
    """
    if backend in _NCCL:
        return True
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None or not plugin.extended_api:
        return False
    return getattr(plugin.creator_fn, "__module__", None) != _private().__name__


def world_timeout(backend: str) -> timedelta | None:
    """Return the timeout of WORLD, preferring that of its part that runs `backend`.

    None where torch does not tell: the fake backend has no options, and gloo shows its own only
    in recent versions.
    """
    timeouts = {
        single: _timeout_of(world_group()._get_backend(torch.device(device)))
        for device, single in _world_parts().items()
    }
    wanted = [timeouts.get(single) for single in single_backends(backend)]
    return next((timeout for timeout in [*wanted, *timeouts.values()] if timeout), None)


def _timeout_of(part: Any) -> timedelta | None:
    try:
        return getattr(part.options, "_timeout", None)
    except (AttributeError, RuntimeError):  # this version of torch does not show them
        return None


def _world_parts() -> dict[str, str]:
    """Name the backend that WORLD runs on each device, by the name of the device."""
    pairs = (part.split(":") for part in dist.get_backend_config().split(","))
    return {device.strip(): single.strip() for device, single in pairs}


def split_device() -> torch.device | None:
    """Return the device that WORLD is bound to, if its backend there can be split."""
    device: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    if device is None:
        return None
    return device if world_group()._get_backend(device).supports_splitting else None


def device_backend(device: torch.device) -> str:
    """Return the name of the backend that WORLD runs on a device."""
    return _world_parts()[device.type]


def split_colors(groups: NDArray[np.int64]) -> list[int]:
    """Return the colour that torch gives each group, a row of ranks, when it splits WORLD.

    Until torch 2.8 it is a hash that Python makes of the ranks, since then one that C++ makes; that
    adds up ranks as boost's `hash_combine` does.
    """
    if not hasattr(ProcessGroup, "split_group"):
        return [_private()._process_group_color(ranks) for ranks in groups.tolist()]
    colors = np.zeros(len(groups), np.uint64)
    for ranks in groups.astype(np.uint64).T:
        colors ^= (
            ranks + np.uint64(0x9E3779B9) + (colors << np.uint64(6)) + (colors >> np.uint64(2))
        )
    return (np.abs(colors.view(np.int64)) % (2**31 - 1)).tolist()  # type: ignore[no-any-return]


def can_init_lazily() -> bool:
    """Tell whether gloo in this torch can connect a pair of ranks at their first message."""
    gloo = getattr(dist, "ProcessGroupGloo", None)
    return "lazy_init" in (gloo.create_default_device.__doc__ or "") if gloo else False


def new_group(
    name: str,
    ranks: Sequence[int],
    *,
    backend: str,
    timeout: timedelta | None,
    pg_options: Any,
    group_desc: str,
    lazily: bool | None,
    patience: Patience = ENDLESS,
) -> ProcessGroup:
    """Create the group of the calling rank, under `name`; only its members call this.

    torch's public functions name a group after a count that each rank keeps for itself; this
    one is the same on every member whatever else a rank has created.
    """
    c10d = _private()
    backend = dist.Backend(backend)
    if timeout is None:
        timeout = c10d._get_default_timeout(backend)
    members = list(ranks)
    with connecting(backend, lazily, patience) as kept:
        group, _ = c10d._new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            members,
            backend,
            c10d._get_default_store(),
            group_name=name,
            backend_options=pg_options,
            timeout=timeout,
            group_desc=group_desc,
        )
    _kept[group] = kept
    c10d._world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(members)}
    return group  # type: ignore[no-any-return]


@contextlib.contextmanager
def connecting(backend: str, lazily: bool | None, patience: Patience) -> Iterator[object]:
    """Choose how gloo connects the group that is created within a `with` block.

    Args:
        backend: The group's.
        lazily: Whether each pair of members connects at its first message.
        patience: For how long members are waited for.

    Yields:
        What must live as long as the group.
    """
    if "gloo" not in single_backends(backend) or not has_store():
        yield None
        return
    with lazy_init.set_to(lazily), making.met(patience) as meetings:
        yield meetings


def device_type(group: ProcessGroup) -> str:
    """Return the type of the devices whose tensors a group is made for: "cuda" with nccl."""
    parts = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if len(parts) == 1:
        return next(iter(parts))
    backends = set(parts.values()) - {"fake"}  # it is for all devices
    defaults: dict[str, str] = dist.Backend.default_device_backend_map
    made_for = [device for device, backend in defaults.items() if backend in backends]
    return next((device for device in made_for if device not in {"cpu", "mps"}), "cpu")


def forget_meshes() -> None:
    """Let DTensor forget the meshes that it has seen.

    It remembers what operations give, with the mesh of their first time, and takes meshes with
    equal ranks and names for one: after the groups of that mesh are gone, none works. It remembers
    for each thread apart, so that threads other than the calling one do not forget.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    api = importlib.import_module("torch.distributed.tensor._api")
    remembered = api.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    getattr(remembered, "cache", remembered).cache_clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):  # not in torch 2.6
        torch._C._clear_DTensor_sharding_propagator_cache()


def store_identity() -> str:
    """Return a word that all ranks of this job's store share, and that no other store has."""
    if not has_store():
        return ""
    own = store()
    if own not in _store_words:
        _store_words[own] = set_if_absent("hypercomm/store", uuid.uuid4().hex)
    return _store_words[own]


def has_store() -> bool:
    """Tell whether the ranks of this world can meet in a store; those of a fake one cannot."""
    if _is_other_world or not is_live():
        return False
    return "fake" not in single_backends(default_backend())


def store() -> Any:
    """Return the store that WORLD was made with."""
    return _private()._get_default_store()


def set_if_absent(key: str, text: str) -> str:
    """Set a key of the store that nobody has set, and return what it holds then."""
    found: bytes = store().compare_set(key, "", text)
    return found.decode(errors="replace")


def read_if_set(key: str) -> str | None:
    """Return what a key of the store holds; None where nobody has set it."""
    found = read_bytes(key)
    return None if found is None else found.decode(errors="replace")


def read_bytes(key: str) -> bytes | None:
    """Do as `read_if_set`, for what is no text."""
    return store().get(key) if is_set([key]) else None


def is_set(keys: Sequence[str]) -> bool:
    """Tell whether all of some keys of the store are set."""
    return bool(store().check(list(keys)))


def set_value(key: str, value: str | bytes) -> None:
    """Set a key in the store; waits for no answer."""
    store().set(key, value)


def set_keys(keys: Sequence[str]) -> None:
    """Set keys in the store, in one message where it can; waits for no answer."""
    if len(keys) > 1 and store().has_extended_api():
        store().multi_set(list(keys), ["1"] * len(keys))
        return
    for key in keys:
        set_value(key, "1")


def forget(key: str) -> None:
    """Delete a key of the store, if it is there."""
    store().delete_key(key)


def is_live() -> bool:
    """Tell whether torch.distributed is initialised, in a quarter of the time that torch takes."""
    return dist.distributed_c10d._world._default_pg is not None


def set_timeout(timeout: timedelta, group: ProcessGroup | None) -> None:
    """Change the timeout of a group, or of WORLD, from now on."""
    if hasattr(dist, "set_timeout"):  # torch 2.14
        dist.set_timeout(timeout, group)
    else:
        _private()._set_pg_timeout(timeout, group)


def symmetric_memory(size: int, group: ProcessGroup) -> tuple[torch.Tensor | None, Any]:
    """Allocate `size` bytes that every rank of a group can read, with the handle of their meeting.

    (None, None) where this torch or this device cannot do it.
    """
    try:
        from torch.distributed import _symmetric_memory as symmetric

        if not torch.cuda.is_available():
            return None, None
        enable = getattr(symmetric, "enable_symm_mem_for_group", None)
        if enable is not None and not hasattr(enable, "__deprecated__"):  # newer ones need it not
            enable(group.group_name)
        buffer = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda"))
        return buffer, symmetric.rendezvous(buffer, group)
    except (ImportError, RuntimeError):  # no such module; the ranks do not share NVLink
        return None, None


def kept() -> set[ProcessGroup]:
    """Return the process groups that were created under names of our own."""
    return set(_kept)


def registered_as(name: str) -> set[ProcessGroup]:
    """Return the process group that torch has registered under a name, if there is one."""
    return {group for group, known in _private()._world.pg_names.items() if known == name}


def registered() -> set[ProcessGroup]:
    """Return every process group that torch has registered in this process."""
    return set(_private()._world.pg_map)


def as_member(group: ProcessGroup | int | None) -> ProcessGroup | None:
    """Return a group; None in place of torch's number for "not a member"."""
    return None if isinstance(group, int) else group


def forget_non_members() -> None:
    """Remove what torch files under its marker for "not a member", as if it were a group."""
    _private()._world.pg_group_ranks.pop(dist.GroupMember.NON_GROUP_MEMBER, None)


def is_registered(group: ProcessGroup) -> bool:
    """Tell whether torch knows a group; it forgets all of them when WORLD is destroyed."""
    return group in _private()._world.pg_map


def destroy(group: ProcessGroup) -> None:
    """Destroy a group, and what torch forgets to clean up."""
    world = _private()._world
    tag = world.pg_to_tag.get(group)
    dist.destroy_process_group(group)
    if not world.tags_to_pg.get(tag, True):
        del world.tags_to_pg[tag]  # torch leaves an empty list for every group that ever was


def abort(group: ProcessGroup) -> None:
    """End a group without waiting for anybody: abort it where its backend can, else destroy it."""
    if "nccl" in single_backends(backend_of(group)):
        _private()._abort_process_group(group)
    else:
        destroy(group)


def tell_backward(key: str) -> None:
    """Let the threads of the backward passes that this thread starts from now on know a key."""
    if _can_stop_telling_backward():
        torch._C._stash_obj_in_tls(key, None)


def stop_telling_backward(key: str) -> None:
    """End what `tell_backward` began, if that was in this thread."""
    if _can_stop_telling_backward() and was_told_backward(key):
        torch._C._remove_obj_from_tls(key)


def was_told_backward(key: str) -> bool:
    """Tell whether this thread, or the one that started its backward pass, knows a key."""
    return torch._C._is_key_in_tls(key)


def _can_stop_telling_backward() -> bool:
    return hasattr(torch._C, "_remove_obj_from_tls")  # torch 2.6 would keep each key for ever


def let_threads_finish() -> None:
    """Let gloo's threads drop their last tensors before their groups go, where that can deadlock.

    Before torch 2.8 a group joins its threads while it holds the interpreter lock, for which a
    thread may be waiting to drop a tensor (pytorch pull request 154976).
    """
    if torch.torch_version.TorchVersion(torch.__version__) < "2.8":
        time.sleep(0.02)


@contextlib.contextmanager
def other_world(
    tables: Sequence[str],
    create: Callable[..., tuple[Any, None]],
    begin: Callable[..., None],
    end: Callable[..., None],
) -> Iterator[Any]:
    """Let torch.distributed see another job within a `with` block: no store, no process group.

    torch keeps all that it knows of a job in one object, and lets tests of its own replace that.

    Args:
        tables: Names of the dicts that the object holds.
        create: Makes the groups of a rank, with the arguments of torch's own helper.
        begin: Takes the place of `init_process_group`.
        end: Takes the place of `destroy_process_group`.
    """
    names = (*tables, "group_count")
    world = type("OtherWorld", (type(_private()._world),), dict.fromkeys(names))()
    world.group_count = 0
    for table in tables:
        setattr(world, table, {})
    stands_in = {
        "_world": world,
        "_new_process_group_helper": create,
        "_store_based_barrier": _do_nothing,
        "_get_default_timeout": _default_timeout,
        "init_process_group": begin,
        "destroy_process_group": end,
        "barrier": _do_nothing,
        "monitored_barrier": _do_nothing,
        "_resolve_process_group": lambda name: next(
            group for group, known in world.pg_names.items() if known == name
        ),
        "_get_msg_dict": lambda *_, **__: {},  # of a logger, which would ask NCCL for its version
    }
    global _is_other_world  # noqa: PLW0603 - as torch's own state, it is the process's
    with contextlib.ExitStack() as stack:
        for module in (_private(), dist, dist.c10d_logger, importlib.import_module(_MESHES)):
            for name, value in stands_in.items():
                if hasattr(module, name):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, value)
        _is_other_world = True
        try:
            yield world
        finally:
            _is_other_world = False


_MESHES = "torch.distributed.device_mesh"


def is_other_world() -> bool:
    """Tell whether `other_world` is entered."""
    return _is_other_world


_is_other_world = False


def backend_config(backend: str) -> str:
    """Return what torch makes of a backend string: the backend of each device."""
    return str(_private().BackendConfig(dist.Backend(backend)))


def _default_timeout(backend: str) -> timedelta:
    """What torch gives a group, without the warning of a build that lacks the backend."""
    nccl: timedelta | None = _private().default_pg_nccl_timeout
    default: timedelta = _private().default_pg_timeout
    return nccl or timedelta(minutes=10) if backend == "nccl" else default


def _do_nothing(*_: object, **__: object) -> None:
    pass


def fake_store() -> Any:
    """Make the store of a fake world; the module also registers torch's fake backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
