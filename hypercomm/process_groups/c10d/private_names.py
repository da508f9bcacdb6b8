"""The private names of torch that hypercomm uses, each behind a check that is made once.

None is needed: where one cannot be used, the public way is taken, and the log says once what is
lost. `PRIVATE_NAMES` says of each what it gives, how it is checked and what happens without it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist

from hypercomm.process_groups.c10d.oldest import release_of
from hypercomm.process_groups.c10d.stand_in_world import is_other_world

logger = logging.getLogger(__name__)

_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_to_tag", "tags_to_pg")
_HELPER_ARGUMENTS = (
    *("store", "group_name", "backend_options", "timeout", "device_id", "group_desc"),
)
_STORE_CALLS = ("check", "compare_set", "delete_key", "get", "set", "has_extended_api")


@attrs.frozen(eq=False)
class PrivateName:
    """A private name of torch.

    Attributes:
        path: Where it is, below `torch`.
        gives: What users have of it.
        checked: How it is checked.
        without: What happens instead.
        check: Says of what the path leads to why it cannot be used; None where it can.
        is_due: Whether this torch is to have it; others have a public name for it, or nothing.
        module: What must be loaded for it, if torch does not load it by itself.
    """

    path: str
    gives: str
    checked: str
    without: str
    check: Callable[[Any], str | None]
    is_due: Callable[[], bool] = lambda: True
    module: str | None = None
    look_up: Callable[[Any], Any] = attrs.field(
        default=attrs.Factory(lambda self: attrgetter(self.path), takes_self=True), repr=False
    )

    def __str__(self) -> str:
        return f"torch.{self.path}"

    def find(self, root: Any) -> Any:
        """Return what the path leads to; None where there is no such thing."""
        try:
            if self.module is not None:
                importlib.import_module(self.module)
            return self.look_up(root)
        except Exception:  # noqa: BLE001 - a module of torch may fail to load in any way
            return None


class Verdict(NamedTuple):
    """What came of a check: "works", "not due" in this torch, or "lost" with the reason."""

    name: PrivateName
    state: str
    reason: str | None


class PrivateNames:
    """Looks private names up, and checks them when they are first used.

    What replaces a name later is checked in its turn; a wrapper counts as what it wraps.

    Args:
        root: Where the paths begin: `torch`.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self._reasons: dict[str, tuple[Any, str | None]] = {}
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def works(self, name: PrivateName) -> bool:
        """Tell whether a name can be used; the first time that it cannot, the log says so."""
        return self.get(name) is not None

    def get(self, name: PrivateName) -> Any:
        """Return what a name stands for now; None where it cannot be used."""
        try:
            found = name.look_up(self.root)
        except AttributeError:
            found = name.find(self.root)
        known = self._reasons.get(name.path)
        if known is None or known[0] is not found:
            known = self._checked(name, found)
        return found if known[1] is None else None

    def why_not(self, name: PrivateName) -> str | None:
        """Say why a name cannot be used; None where it can."""
        self.get(name)
        return self._reasons[name.path][1]

    def _checked(self, name: PrivateName, found: Any) -> tuple[Any, str | None]:
        known = self._reasons.get(name.path)
        kind = _kind(found)
        if known is None or known[0] is not kind:
            reason = "is not there" if found is None else _reason(name, kind)
            known = self._reasons[name.path] = (kind, reason)
            if reason is not None:
                self._log(name, reason)
        return known

    def lost(self, name: PrivateName, reason: str) -> None:
        """File that a name cannot be used, as its first use has shown."""
        self._reasons[name.path] = (_kind(name.find(self.root)), reason)
        self._log(name, reason)

    def _log(self, name: PrivateName, reason: str) -> None:
        with self._lock:
            is_new = name.path not in self._logged
            self._logged.add(name.path)
        if is_new:
            logger.warning(
                "torch %s: %s %s, so hypercomm does without it: %s",
                torch.__version__,
                name,
                reason,
                name.without,
            )

    def verdicts(self) -> list[Verdict]:
        """Check every name that this torch is to have, and return what came of it."""
        found = []
        for name in PRIVATE_NAMES:
            is_due = name.is_due()
            reason = self.why_not(name) if is_due else None
            state = "lost" if reason else "works" if is_due else "not due"
            found.append(Verdict(name, state, reason))
        return found


def _kind(found: Any) -> Any:
    """What is wrapped, if something is: a wrapper counts as what it wraps."""
    return inspect.unwrap(found) if callable(found) else found


def _reason(name: PrivateName, found: Any) -> str | None:
    try:
        return name.check(found)
    except Exception as error:  # noqa: BLE001 - whatever it raises, there is a way without it
        return f"raises {error!r}"


def _lacks(what: Any, names: Iterable[str]) -> str | None:
    missing = [name for name in names if not hasattr(what, name)]
    return f"has no {', '.join(missing)}" if missing else None


# ---- the checks -------------------------------------------------------------------------------


def _check_helper(helper: Any) -> str | None:
    """Ask for a group by the name of WORLD: every torch refuses that before anything else."""
    taken = signature_of(helper)
    lacks = [name for name in _HELPER_ARGUMENTS if name not in taken]
    if lacks:
        return f"takes no {', '.join(f'{name}=' for name in lacks)}"
    world: Any = dist.group.WORLD
    if world is None:
        return None
    name = world.group_name if isinstance(world, dist.ProcessGroup) else _name_of(world)
    try:
        helper(1, 0, [0], "gloo", None, group_name=name)
    except ValueError as error:
        return None if "name" in str(error) else f"raises {error!r}"
    return "takes a name for a group that is taken"


def _name_of(world: Any) -> str:
    names: Mapping[Any, str] = private.get(WORLD_TABLES).pg_names
    return names[world]


def _check_store(get_store: Any) -> str | None:
    # A simulated job has no store, and what it lacks says nothing of torch.
    is_real = dist.is_initialized() and not is_other_world()
    what = get_store() if is_real else dist.Store  # type: ignore[attr-defined]
    return _lacks(what, _STORE_CALLS)


def _check_tables(world: Any) -> str | None:
    lacks = _lacks(world, (*_TABLES, "default_pg"))
    if lacks is None and dist.is_initialized() and dist.group.WORLD not in world.pg_map:
        return "does not know the default process group"
    return lacks


def _check_get_backend(get_backend: Any) -> str | None:
    world = dist.group.WORLD
    if not isinstance(world, dist.ProcessGroup) or is_other_world():
        return None
    device = dist.get_backend_config().split(":")[0]
    return _lacks(get_backend(world, torch.device(device)), ["supports_splitting"])


def _check_plugins(plugins: Any) -> str | None:
    lacks = (_lacks(plugin, ["creator_fn", "extended_api"]) for plugin in plugins.values())
    return next(filter(None, lacks), None)


def _check_naming(name_group: Any) -> str | None:
    taken = list(signature_of(name_group))
    if taken != ["ranks", "use_hashed_name"]:
        return f"takes {', '.join(taken)}"
    tables = private.get(WORLD_TABLES)
    count = getattr(tables, "group_count", None)
    name = name_group([0], use_hashed_name=True)
    if count is not None and tables.group_count == count + 1:
        tables.group_count = count  # newer ones count what they name
    return None if isinstance(name, str) else "answers no text"


def _check_color(color: Any) -> str | None:
    return None if isinstance(color([0, 1]), int) else "answers no int"


def _check_torchcomms(is_enabled: Any) -> str | None:
    return None if isinstance(is_enabled(), bool) else "answers no bool"


def _check_set_timeout(set_timeout: Any) -> str | None:
    taken = list(signature_of(set_timeout))
    return None if taken == ["timeout", "group"] else f"takes {', '.join(taken)}"


def _check_end(end: Any) -> str | None:
    taken = list(signature_of(end))
    return None if taken == ["group"] else f"takes {', '.join(taken)}"


def _check_gloo(gloo: Any) -> str | None:
    return _lacks(gloo, ["_Options", "create_default_device", "create_device"])


def _check_dispatcher(dispatcher: Any) -> str | None:
    remembered = dispatcher.sharding_propagator.propagate_op_sharding
    return _lacks(getattr(remembered, "cache", remembered), ["cache_clear"])


def _check_call(clear: Any) -> str | None:
    clear()
    return None


def _check_stash(stash: Any) -> str | None:
    key = "hypercomm/self-check"
    stash(key, None)
    torch._C._remove_obj_from_tls(key)
    return None


def _check_removal(remove: Any) -> str | None:
    key = "hypercomm/self-check"
    torch._C._stash_obj_in_tls(key, None)
    remove(key)
    return "leaves the key" if torch._C._is_key_in_tls(key) else None


def _check_lookup(is_known: Any) -> str | None:
    is_known_here = is_known("hypercomm/self-check")
    return None if is_known_here is False else "knows what nobody has told it"


def _check_symmetric(symmetric: Any) -> str | None:
    return _lacks(symmetric, ["empty", "rendezvous"])


def _check_mesh(annotations: Any) -> str | None:
    return None if "_preserve_rank_order" in annotations else "has no _preserve_rank_order"


def _check_fake(fake: Any) -> str | None:
    return _lacks(fake, ["FakeStore"])


def _check_timeout(timeout: Any) -> str | None:
    return _lacks(timeout, ["__get__"])


@functools.lru_cache(maxsize=8)
def signature_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function."""
    return inspect.signature(function).parameters


def since(release: str) -> bool:
    """Tell whether this torch is a release or one after it."""
    return release_of(torch.__version__) >= release_of(release)


# ---- the table --------------------------------------------------------------------------------

_C10D = "distributed.distributed_c10d"
_TLS_SINCE = "2.13"
"""The first release in which a key that was stashed can be removed."""

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
    _check_timeout,
)
GLOO = PrivateName(
    f"{_C10D}.ProcessGroupGloo",
    "gloo groups of one call share what they listen at; missing members are named early; Ctrl-C",
    "options and devices; a group of one is created when a first group is",
    "gloo groups are created as torch does it: those of one call share no devices, and neither "
    "news of other ranks nor Ctrl-C ends a wait for missing ranks before its timeout",
    _check_gloo,
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
    _check_color,
    is_due=lambda: not hasattr(dist.ProcessGroup, "split_group"),
)
TORCHCOMMS = PrivateName(
    f"{_C10D}._use_torchcomms_enabled",
    "groups are left to TorchComms where that is on",
    "it is called",
    "TorchComms is taken to be off",
    _check_torchcomms,
    is_due=lambda: hasattr(dist.distributed_c10d, "_use_torchcomms_enabled"),
)
SET_TIMEOUT = PrivateName(
    f"{_C10D}._set_pg_timeout",
    "the timeout of a group can be changed",
    "its arguments",
    "timeouts stay as they are",
    _check_set_timeout,
    is_due=lambda: not hasattr(dist, "set_timeout"),
)
ABORT = PrivateName(
    f"{_C10D}._abort_process_group",
    "abort() ends NCCL groups at once",
    "its arguments",
    "abort() destroys them, which waits for what is under way",
    _check_end,
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
    _check_call,
    is_due=lambda: since("2.10"),
)
STASH = PrivateName(
    "_C._stash_obj_in_tls",
    "a `use` block reaches the threads of the backward passes that it starts",
    "a key is stashed and removed",
    "a `use` block is for its own thread alone",
    _check_stash,
    is_due=lambda: since(_TLS_SINCE),
)
UNSTASH = PrivateName(
    "_C._remove_obj_from_tls",
    "a `use` block ends for those threads, too",
    "a key is stashed and removed",
    "a `use` block is for its own thread alone",
    _check_removal,
    is_due=lambda: since(_TLS_SINCE),
)
IS_STASHED = PrivateName(
    "_C._is_key_in_tls",
    "threads of a backward pass know the `use` block that started it",
    "it is called",
    "a `use` block is for its own thread alone",
    _check_lookup,
    is_due=lambda: since(_TLS_SINCE),
)
MESH_ORDER = PrivateName(
    "distributed.device_mesh.DeviceMesh.__annotations__",
    "a DeviceMesh made with preserve_rank_order=True is read, and one of listed ranks says so",
    "it has _preserve_rank_order",
    "a permuted DeviceMesh that hypercomm has not made is refused",
    _check_mesh,
    is_due=lambda: since("2.15"),
    module="torch.distributed.device_mesh",
)
SYMMETRIC = PrivateName(
    "distributed._symmetric_memory",
    "buffers in symmetric memory, for Megatron's inference",
    "its functions",
    "no symmetric memory: the ordinary collectives are used",
    _check_symmetric,
    module="torch.distributed._symmetric_memory",
)
FAKE = PrivateName(
    "testing._internal.distributed.fake_pg",
    "fake worlds",
    "its store",
    "no fake worlds",
    _check_fake,
    module="torch.testing._internal.distributed.fake_pg",
)

PRIVATE_NAMES = (
    *(HELPER, STORE, WORLD_TABLES, GET_BACKEND, PLUGINS, OPTIONS_TIMEOUT, GLOO, NAME_GROUP, COLOR),
    *(TORCHCOMMS, SET_TIMEOUT, ABORT, DISPATCHER, CLEAR_CACHE, STASH, UNSTASH, IS_STASHED),
    *(MESH_ORDER, SYMMETRIC, FAKE),
)

private = PrivateNames(torch)
"""Those of this process."""
