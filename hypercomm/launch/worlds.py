"""`join_world` joins processes of several jobs in one world, such as trainers and servers.

The processes connect to a store of torch. They pass the store itself, or an address at which one of
the processes serves the store. When all ranks have joined, an *incarnation* of the world begins.
Its number is the number of the round in which the ranks met, and is part of all keys and names of
the incarnation. A rank that joins again begins the next incarnation. If several processes join as
one rank, the rank belongs to the last of these processes.

    hypercomm/worlds/NAME/join                the open round, and who has begun it
    hypercomm/worlds/NAME/join/claim/RANK     the process to which a rank belongs
    hypercomm/worlds/NAME/join/3/...          the meeting of round 3
    hypercomm/worlds/NAME/3/...               the meetings of incarnation 3
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    CreationError,
    GroupCreationTimeout,
    LaunchError,
    LayoutError,
    NotInitializedError,
    RankOutsideError,
    WorldRestartedError,
)
from hypercomm.layout.checks import as_int, check_duration, is_utf8
from hypercomm.layout.text import as_entry, did_you_mean, short_repr
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.meeting import Call, ask, client_of, meet
from hypercomm.process_groups.spec import check_backend
from hypercomm.process_groups.system import LateError, in_time, system
from hypercomm.process_groups.world import Memory, Scope, World, note, this_host
from hypercomm.version import __version__

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

_ROOT = "hypercomm/worlds"

_LAST_S = 5.0
"""The seconds for which the process that serves the store waits for other ranks to leave."""

_PART = re.compile(r"[\w.-]+")

TIMEOUT = timedelta(seconds=60)

_IF_STORE_LOST = "when a process serves it again, call rejoin() or join_world() on all ranks"


@attrs.define(eq=False)
class _Life:
    """The mutable state of a world that this process has joined.

    Attributes:
        store: The current store. It is replaced if another process serves the address.
        serves: Whether this process serves the store.
        pg: The process group of all ranks, or None if this process is not in the world.
        incarnation: The number of earlier incarnations, including failed ones.
        memory: What the calling rank remembers of its meetings in this incarnation.
    """

    store: Any
    serves: bool
    pg: ProcessGroup | None = None
    incarnation: int = -1
    memory: Memory = attrs.field(factory=Memory, repr=False)


@attrs.frozen(eq=False, slots=False)
class JoinedWorld(World):
    """A world that `join_world` has joined. As a context manager, it leaves the world on exit.

    Attributes:
        part: The part of this process.
        address: The address of the store, or "" if a store was given.
        device: The device that was passed to `join_world`, which made it the current device. None
            if no device was passed.
    """

    part: str = ""
    address: str = ""
    device: torch.device | None = None
    _claim: str = ""
    _may_serve: bool | None = None
    _life: _Life = attrs.field(kw_only=True)

    @property
    def is_default(self) -> bool:
        """Whether this is the world of torch's default process group: always False."""
        return False

    @property
    def store(self) -> Any:
        """The store that the ranks share, from torch."""
        return self._life.store

    @property
    def serves(self) -> bool:
        """Whether this process serves the store. If so, the process waits after a failure."""
        return self._life.serves

    @property
    def memory(self) -> Memory:
        """What the calling rank remembers of its meetings in this incarnation."""
        return self._life.memory

    @property
    def incarnation(self) -> int:
        """The number of earlier incarnations, including failed ones."""
        return self._life.incarnation

    def __repr__(self) -> str:
        parts = ", ".join(f"{part}={size}" for part, size in self.parts.items())
        here = self.title(self.rank)
        return f"<World {self.name!r} of {parts}: {here}, incarnation {self.incarnation}>"

    @property
    def pg(self) -> ProcessGroup:
        """The process group of all ranks.

        Raises:
            NotInitializedError: This process has left the world, or a `rejoin` has failed.
        """
        if self._life.pg is None:
            raise NotInitializedError(
                f"this process is not in world {self.name!r} now; call rejoin() or join_world()"
            )
        return self._life.pg

    def why_ended(self, store: Any) -> str:
        """Return a message about a rank that has left this incarnation, or "" if none has."""
        number, who = _read_round(torchdist.read_bytes(store, self._root) or b"-1", self._root)
        if number <= self.incarnation:
            return ""
        return f"{who} for world {self.name!r}; call rejoin() on all other ranks"

    @property
    def _root(self) -> str:
        return f"{_ROOT}/{self.name}/join"

    # ---- life cycle -----------------------------------------------------------------------------

    def rejoin(self, timeout: timedelta | None = None) -> None:
        """Join the next incarnation after a part has restarted.

        Every rank that did not restart must call this. First, the process groups of the previous
        incarnation are aborted. Grids of the world remain, but have no process groups. `create_pg`,
        `ensure_pg` and `grid[dims].group` create new groups.

        Args:
            timeout: How long to wait for all ranks to join. Default: the timeout of the world.

        Raises:
            GroupCreationTimeout: Ranks have not joined in time. `error.missing` lists them.
            PlanMismatchError: Processes have different parts, backends or versions.
            LaunchError: No process serves the address, or the store cannot be served here.
            WorldRestartedError: Another process has joined as this rank.
            CreationError: A rank failed, the store is lost, or the call is within `as_default`.
        """
        limit_s = _seconds(timeout or self.timeout or TIMEOUT)
        title = f"rejoin() of {self.name!r}"
        began = system.now()
        self._check_not_default()
        self._abort_groups()
        try:
            ask(self, lambda: title, lambda: self.store.check([self._root]), min(limit_s, 5.0))
        except RuntimeError:
            if not self.address or self._life.serves:
                raise
            _served.pop(self.address, None)
            left_s = max(0.1, limit_s - (system.now() - began))
            self._life.store, self._life.serves = _reach(self.address, self._may_serve, left_s)
        _enter(self, limit_s - (system.now() - began), is_new=False)

    def leave(self) -> None:
        """End all process groups of the world and its grids. A second call does nothing.

        The process that serves the store waits up to 5 s until the other ranks have left too. At
        the end of a `with` block that raises, it does not wait.
        """
        if self._life.pg is None:  # the process has left, or a rejoin() has failed
            _served.pop(self.address, None)
            return
        self._check_not_default()
        group = self._life.pg
        self._life.pg = None
        # The stack runs all callbacks in reverse order, even after an error.
        with contextlib.ExitStack() as ends:
            ends.callback(_served.pop, self.address, None)
            ends.callback(self._count_as_left)
            ends.callback(torchdist.destroy, [group])
            for owner in list(self.owners):
                ends.callback(owner.end, torchdist.destroy)

    def _check_not_default(self) -> None:
        """Raise within `as_default`, where torch would end every group of this process."""
        if self._life.pg is not None and dist.group.WORLD is self._life.pg:
            raise CreationError(
                f"world {self.name!r} is torch's default process group now: leave the block of "
                f"as_default() first"
            )

    def _count_as_left(self) -> None:
        """Add this rank to the number of ranks that have left.

        The process that serves the store waits until all ranks have left.
        """
        key = f"{self.memory.namespace}/left"
        until = system.now() + _LAST_S

        def count() -> None:
            left = self.store.add(key, 1)
            while self.serves and left < self.size and system.now() < until:
                system.sleep(0.02)
                left = self.store.add(key, 0)

        with contextlib.suppress(RuntimeError):  # the store is lost
            in_time(count, _LAST_S + 0.5)

    def _abort_groups(self) -> None:
        """Abort the process groups of this incarnation."""
        for owner in list(self.owners):
            owner.forget()
        group = self._life.pg
        self._life.pg = None
        if group is not None:
            torchdist.abort([group])

    def _begin(self, number: int, pg: ProcessGroup) -> None:
        """Begin an incarnation, and discard the state of the previous one."""
        self._life.pg = pg
        self._life.incarnation = number
        self._life.memory = Memory(namespace=f"{_ROOT}/{self.name}/{number}")
        note(self, pg)

    @contextlib.contextmanager
    def as_default(self) -> Iterator[None]:
        """Make the world torch's default process group within a `with` block, in all threads.

        Use it for functions of torch that use the default process group, such as
        `distribute_tensor`, FSDP2 and checkpoints. Collectives and operations on existing DTensors
        work outside of this block.

        Example:
            >>> parts = {"engine": 1}
            >>> world = join_world(dist.HashStore(), name="w", parts=parts, part="engine", rank=0)
            >>> with world, world.as_default():
            ...     print(dist.get_rank(), dist.get_world_size())
            0 1
        """
        with torchdist.shown_as_default(self.pg):
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._life.serves = False  # so leave() does not wait
        self.leave()


def join_world(
    address: str | Any,
    *,
    name: str,
    parts: Mapping[str, int],
    part: str,
    rank: int,
    timeout: timedelta = TIMEOUT,
    backend: str = "gloo",
    device: torch.device | str | None = None,
    serve: bool | None = None,
) -> JoinedWorld:
    """Join a world of processes of several jobs, or of processes without torch.distributed.

    Every process of every part calls this with the same name, parts and backend. The ranks are
    numbered part by part. The world's process groups are process groups of torch, and `src=` and
    `dst=` in them are ranks of the world. torch's default process group, if it exists, is not
    involved. However, `destroy_process_group()` without a group ends the groups of all worlds too.

    A process that has ended may be started again. It calls `join_world` as before, and all other
    ranks call `world.rejoin()`. Pending calls of these ranks fail with `WorldRestartedError`. If
    two processes join as the same rank, the rank belongs to the second one.

    Args:
        address: "tcp://host:port", or a store of torch that all processes share. The first process
            on that host serves the address, unless its `serve` is False. If that process ends, the
            store is lost.
        name: The name of the world. A store can have several worlds.
        parts: Maps the name of each part to its number of ranks, in the order of the ranks.
        part: The part of this process.
        rank: The rank of this process in its part.
        timeout: How long to wait for the other ranks to join. It is also the default timeout of
            later calls and of process groups.
        backend: The backend of process groups.
        device: The device of this process, which becomes the current device and is used by NCCL.
        serve: True if this process must serve the address, False if it must not. Default: it may.

    Returns:
        The world. As a context manager, it leaves the world on exit.

    Raises:
        LayoutError: A part, its size or the name is not valid.
        RankOutsideError: The part has no such rank.
        GroupOptionsError: The backend cannot run here, or the timeout is not positive.
        LaunchError: No process serves the address, another program uses the address, or this
            process cannot serve it.
        PlanMismatchError: Processes have different parts, backends or versions. The message
            shows the first difference.
        GroupCreationTimeout: Ranks have not joined in time. `error.missing` lists them.
        CreationError: A rank failed, or the store is lost.
        ValueError: torch may raise this error if this process is already in a world of this name.
        WorldRestartedError: Another process has joined as this rank.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> store, parts = dist.HashStore(), {"engine": 1}
        >>> with join_world(store, name="w", parts=parts, part="engine", rank=0) as world:
        ...     grid = HyperCommGrid("tp=1", world=world)
        ...     print(world.title(0), grid.create_pg("tp").size())
        engine rank 0 of 1 1
    """
    limit_s = _seconds(timeout)
    sizes, number = _read_parts(parts, part, rank)
    if not isinstance(name, str) or not name or "/" in name or not is_utf8(name):
        raise LayoutError(f"name must be a text without '/', got {short_repr(name)}")
    check_backend(backend)
    chosen = None if device is None else torch.device(device)
    if chosen is not None and chosen.type != "cpu":
        torch.get_device_module(chosen.type).set_device(chosen)
    began = system.now()
    serves = False
    at = ""
    if isinstance(address, str):
        at = address
        store, serves = _reach(address, serve, limit_s)
    elif hasattr(address, "compare_set"):
        store = address
    else:
        raise LayoutError(
            f"address must be 'tcp://host:port' or a store, got {short_repr(address)}"
        )
    world = JoinedWorld(
        number,
        sum(sizes.values()),
        backend,
        has_store=True,
        name=name,
        parts=sizes,
        timeout=timeout,
        part=part,
        address=at,
        device=chosen,
        store_name=f"the store of world {name!r}{at and f' at {at}'}",
        advice_if_store_lost=_IF_STORE_LOST,
        life=_Life(store, serves),
        claim=f"process {os.getpid()} on host {this_host()} {uuid4().hex}",
        may_serve=serve,
    )
    try:
        _enter(world, limit_s - (system.now() - began), is_new=True)
    except BaseException:  # also Ctrl-C after all ranks have joined
        world._abort_groups()
        raise
    return world


# ---- arguments ----------------------------------------------------------------------------------


def _seconds(timeout: timedelta) -> float:
    check_duration(timeout)
    return timeout.total_seconds()


def _read_parts(parts: object, part: str, rank: int) -> tuple[dict[str, int], int]:
    """Return the size of each part, and the rank of this process in the world."""
    if not isinstance(parts, Mapping) or not parts:
        raise LayoutError(
            f"parts= must map names to sizes, such as {{'engine': 4}}, got {short_repr(parts)}"
        )
    for one in parts:
        if not isinstance(one, str) or not _PART.fullmatch(one):
            raise LayoutError(
                f"the name of a part must consist of letters, digits, '_', '-' and '.', got "
                f"{short_repr(one)}"
            )
    sizes = {one: as_int(size, f"parts[{one!r}]", 1) for one, size in parts.items()}
    if part not in sizes:
        raise LayoutError(
            f"unknown part {short_repr(part)}; parts are {[*sizes]}{did_you_mean(str(part), sizes)}"
        )
    number = as_int(rank, "rank")
    if not 0 <= number < sizes[part]:
        raise RankOutsideError(f"part {part!r} has ranks 0 to {sizes[part] - 1}, got rank {rank}")
    before = [*sizes].index(part)
    return sizes, number + sum([*sizes.values()][:before])


# ---- the address --------------------------------------------------------------------------------

_served: dict[str, Any] = {}
"""The stores that this process serves, by address. They remain after a failed join."""


def _reach(address: str, serve: bool | None, limit_s: float) -> tuple[Any, bool]:
    """Return the store at an address, and whether this process serves it.

    Raises:
        LaunchError: No process serves the address, or something other than a store does.
    """
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise LayoutError(f"address must be like 'tcp://host:29600', got {short_repr(address)}")
    if address in _served:
        return _served[address], True
    reason = ""
    if serve is not False:
        reason = _why_not_served(host)
        if not reason:
            try:
                _served[address] = _open(host, int(port), limit_s, is_server=True)
                return _served[address], True
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
        if serve:
            raise LaunchError(f"{address} cannot be served by this process: {reason}")
    try:
        open_it = partial(_open, host, int(port), limit_s, is_server=False)
        return in_time(open_it, limit_s + 1.0), False
    except RuntimeError as error:
        text = "" if isinstance(error, LateError) else f": {str(error).splitlines()[0]}"
        raise LaunchError(
            f"no store of torch answers at {address} within {limit_s:.1f} s{text}; a process on "
            f"{host!r} serves a store there when it calls join_world(), unless all pass serve=False"
            + (f"; this process does not: {reason}" if reason else "")
        ) from error


def _open(host: str, port: int, limit_s: float, *, is_server: bool) -> Any:
    timeout = timedelta(seconds=max(1.0, limit_s))
    return dist.TCPStore(host, port, None, is_server, timeout=timeout, wait_for_workers=False)


def _why_not_served(host: str) -> str:
    """Return why this process cannot serve an address on a host, or "" if it can."""
    try:
        family, kind, proto, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as attempt:
            attempt.bind(place)
    except OSError as error:
        return f"{host!r} is not an address of this host ({error})"
    return ""


# ---- joining ------------------------------------------------------------------------------------


def _enter(world: JoinedWorld, limit_s: float, *, is_new: bool) -> None:
    """Join an incarnation of the world, together with all its ranks."""
    deadline = system.now() + limit_s
    title = f"join_world({world.name!r})"
    facts = as_entry(
        f"world {world.name!r}",
        {
            "parts": ", ".join(f"{part}={size}" for part, size in world.parts.items()),
            "backend": world.backend,
            "hypercomm": __version__,
        },
    )
    lobby = Memory(namespace=f"{_ROOT}/{world.name}")
    scope = Scope(world, "join", range(world.size), is_lobby=True, memory=lobby)
    while True:
        left_s = max(0.1, deadline - system.now())
        number = ask(world, lambda: title, partial(_open_round, world, is_new=is_new), left_s)
        lobby.left["join"] = number - 1
        is_new = False
        try:
            left_s = max(0.1, deadline - system.now())
            with meet(scope, Call.of(title, [facts]), left_s) as meeting:
                world._begin(meeting.round, _create(world, meeting.round, meeting.store))
            break
        except (WorldRestartedError, GroupCreationTimeout) as error:
            # After a suspension, another process may have replaced this one.
            ask(world, lambda: title, lambda: _check_claim(world, world.store), 1.0)
            if isinstance(error, GroupCreationTimeout) or system.now() >= deadline:
                raise
    if world.rank == 0:
        with contextlib.suppress(RuntimeError):  # old keys do no harm
            in_time(partial(_delete_former, world), 2.0)


def _create(world: JoinedWorld, number: int, store: Any) -> ProcessGroup:
    """Create the process group of all ranks. Ranks connect at their first message."""
    try:
        return torchdist.new_group(
            f"{_ROOT}/{world.name}/{number}/all",
            range(world.size),
            rank=world.rank,
            backend=world.backend,
            store=store,
            timeout=world.timeout,
            group_desc=f"world {world.name}",
            lazy_init=True,
            is_default=False,
            stale=[],
        )
    except RuntimeError as error:
        raise CreationError(
            f"torch could not create the process group of world {world.name!r}, although all of "
            f"its ranks had arrived: {' '.join(str(error).split())}; call join_world() again on "
            f"all ranks"
        ) from error


def _delete_former(world: JoinedWorld) -> None:
    """Delete the keys of earlier incarnations."""
    root = f"{_ROOT}/{world.name}/"
    here = world.incarnation
    for key in world.store.list_keys():
        number = key.removeprefix(root).removeprefix("join/").partition("/")[0]
        if key.startswith(root) and number.isdecimal() and int(number) < here:
            world.store.delete_key(key)


def _open_round(world: JoinedWorld, *, is_new: bool) -> int:
    """Claim the rank, or check that it still belongs to this process. Return the open round.

    If the last round is over, this rank begins the next one.

    Raises:
        WorldRestartedError: Another process has joined as this rank.
    """
    root = world._root
    call = "join_world()" if is_new else "rejoin()"
    me = world.title(world.rank)
    who = f"{me} (host {this_host()}, process {os.getpid()}) has called {call}"
    with client_of(world.store) as store:
        if is_new or torchdist.read_bytes(store, _claim_key(world)) is None:  # in a new store
            store.set(_claim_key(world), world._claim)
        held = store.compare_set(root, "", f"0 {who}")
        while True:
            number, _ = _read_round(held, root)
            is_open = not store.check([f"{root}/{number}/go"])
            _check_claim(world, store)
            if is_open:
                return number
            wanted = f"{number + 1} {who}"
            found = store.compare_set(root, held.decode(), wanted)
            if found == wanted.encode():
                return number + 1
            held = found


def _claim_key(world: JoinedWorld) -> str:
    return f"{world._root}/claim/{world.title(world.rank).rpartition(' of ')[0]}"


def _check_claim(world: JoinedWorld, store: Any) -> None:
    """Raise unless the rank still belongs to this process."""
    claim = torchdist.read_bytes(store, _claim_key(world)) or b""
    if claim != world._claim.encode():
        holder = claim.decode(errors="replace").rpartition(" ")[0]
        raise WorldRestartedError(
            f"another process has joined world {world.name!r} as {world.title(world.rank)}: "
            f"{holder}; end this process"
        )


def _read_round(text: bytes, key: str) -> tuple[int, str]:
    """Return the number of the open round, and who has begun it."""
    number, _, who = text.decode(errors="replace").partition(" ")
    if not number.lstrip("-").isdecimal():
        raise CreationError(f"hypercomm did not write the store's key {key!r}: {text[:60]!r}")
    return int(number), who
