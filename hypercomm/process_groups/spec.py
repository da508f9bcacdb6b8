"""Describes a process group before it is created: as it is requested, and resolved.

GroupOptions    how a group is created; GridOptions has the defaults of a grid
GroupRequest    the arguments of `create_pg`, as given
GroupSpec       a request in one grid: key, groups, options with all defaults, and strategy
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, get_args

import attrs

from hypercomm.errors import GroupOptionsError
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.checks import LONGEST_NAME, check_choice, check_duration, is_utf8
from hypercomm.layout.groups import RankLists, as_groups
from hypercomm.layout.layout import groups_over
from hypercomm.layout.parsing import Dims
from hypercomm.layout.text import as_entry, did_you_mean, short_repr
from hypercomm.layout.views import View
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.world import World

StrategyName = Literal["auto", "enumerate", "local", "split"]
Share = Literal["never", "identical"]


@attrs.frozen(cache_hash=True)
class GroupOptions:
    """The options of one process group. None stands for the default.

    Args:
        backend: "gloo", "nccl", "cpu:gloo,cuda:nccl", ...; default: the backend of WORLD.
        timeout: The time limit of each collective, and of the wait for the other members when the
            group is created; default: the timeout of WORLD.
        pg_options: Options of the backend, such as `ProcessGroupNCCL.Options`.
        group_desc: A description that torch's logs show; default: the dims.
        lazy_init: Whether gloo and NCCL connect each pair of members at their first message;
            default: the environment variable TORCH_GLOO_LAZY_INIT for gloo, and torch's default
            for NCCL. Other backends ignore this option.
        creation: The strategy, such as "local"; default: the strategy of the grid.
        enable_reconfigure: Whether a reshape may change the members of the group.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    pg_options: Any = None
    group_desc: str | None = None
    lazy_init: bool | None = None
    creation: str | None = None
    enable_reconfigure: bool = False

    def check(self) -> None:
        """Raise for values that torch would reject later, or ignore silently.

        Raises:
            GroupOptionsError: A value has the wrong type, or a backend is unknown.
        """
        if self.timeout is not None:
            check_duration(self.timeout)
        desc = self.group_desc
        if desc is not None and not (isinstance(desc, str) and is_utf8(desc)):
            raise GroupOptionsError(
                f"group_desc must be a string that can be written as UTF-8, got {short_repr(desc)}"
            )
        if self.lazy_init is not None:
            check_lazy_init(self.lazy_init)
        if self.backend is not None:
            check_known(self.backend)

    def resolve(self, world: World) -> GroupOptions:
        """Return the options with the defaults of a world, without strategy and description.

        Raises:
            GroupOptionsError: The backend would ignore `pg_options`, or cannot reconfigure groups.
        """
        backend = (self.backend or world.backend).lower()
        singles = torchdist.single_backends(backend)
        is_fake = world.backend == "fake"
        pg_options = self.pg_options
        if pg_options is not None:
            if not any(map(torchdist.takes_options, singles)):
                raise GroupOptionsError(
                    f"pg_options={short_repr(pg_options)} would be ignored, because torch passes "
                    f"no options to backend {backend!r}; omit pg_options="
                )
            if (is_fake or "fake" in singles) and not torchdist.has_timeout(pg_options):
                raise GroupOptionsError(
                    f"pg_options must be options of a backend, such as a ProcessGroupNCCL.Options, "
                    f"got {short_repr(pg_options)}"
                )
        timeout = self.timeout or torchdist.given_timeout(pg_options) or world.timeout_of(backend)
        if pg_options is not None:
            pg_options = torchdist.with_timeout(pg_options, timeout)
        if is_fake:  # there are no other ranks to connect to
            backend = "fake"
            singles = ("fake",)
            if not torchdist.is_fake_options(pg_options):
                pg_options = None
        enable_reconfigure = self.enable_reconfigure and not is_fake
        if enable_reconfigure:
            reason = torchdist.why_not_reconfigured(backend)
            if reason is not None:
                raise GroupOptionsError(
                    f"enable_reconfigure=True cannot work here: {reason}; without "
                    f"enable_reconfigure=, reshape() creates new process groups"
                )
        return GroupOptions(
            backend,
            timeout,
            pg_options,
            lazy_init=None if _CONNECTING.isdisjoint(singles) else self.lazy_init,
            enable_reconfigure=enable_reconfigure,
        )


def as_verified(verify: bool | None) -> bool:
    """Return whether ranks compare their calls.

    Args:
        verify: True or False, or None to read the environment variable HYPERCOMM_VERIFY.

    Raises:
        GroupOptionsError: `verify` is not True, False or None, or the variable is not 0 or 1.
    """
    if verify is not None and not isinstance(verify, bool):
        raise GroupOptionsError(f"verify must be True, False or None, got {short_repr(verify)}")
    text = os.environ.get("HYPERCOMM_VERIFY", "0")
    if verify is None and text not in {"0", "1"}:
        raise GroupOptionsError(
            f"the environment variable HYPERCOMM_VERIFY must be 0 or 1, got {text!r}"
        )
    return text == "1" if verify is None else verify


@attrs.frozen(slots=False)
class GridOptions:
    """The checked arguments of a grid that apply to all of its groups.

    Raises:
        GroupOptionsError: An argument is wrong.
    """

    backend: str | None
    name: str | None
    creation: StrategyName
    share: Share
    lazy_init: bool | None
    verify: bool = attrs.field(converter=as_verified)
    enable_reconfigure: bool = False

    def __attrs_post_init__(self) -> None:
        check_choices(self.creation, self.share)
        if self.backend is not None:
            check_known(self.backend)
        check_lazy_init(self.lazy_init)
        if self.lazy_init and self.enable_reconfigure:
            raise GroupOptionsError(
                "lazy_init=True cannot work with enable_reconfigure=True, which connects all "
                "members of a group; omit one of the two arguments"
            )
        if self.name is not None:
            check_name(self.name)

    @cached_property
    def of_groups(self) -> GroupOptions:
        """The default options of the grid's groups."""
        return GroupOptions(
            backend=self.backend,
            lazy_init=self.lazy_init,
            enable_reconfigure=self.enable_reconfigure,
        )


def check_choices(creation: object, share: object) -> None:
    """Raise unless `creation` and `share` have known values. None means the grid's value."""
    if creation not in (None, "auto"):
        check_choice("creation=", creation, get_args(StrategyName))
    if share not in (None, "never"):
        check_choice("share=", share, get_args(Share))


def check_name(name: object) -> None:
    """Raise unless a name can be part of a key in the store."""
    if not isinstance(name, str) or not name or not is_utf8(name) or len(name) > LONGEST_NAME:
        raise GroupOptionsError(
            f"name must be a string of 1 to {LONGEST_NAME} characters that can be written as "
            f"UTF-8, got {short_repr(name)}"
        )


_CONNECTING = {"gloo", *torchdist.NCCL}
"""Backends whose members connect when the group is created, or at their first message."""


def check_timeout(timeout: timedelta | None) -> None:
    """Raise unless `timeout` is a positive timedelta, or None for the default.

    Raises:
        GroupOptionsError: `timeout` is anything else. The message shows the value.
    """
    if timeout is not None:
        check_duration(timeout)


def check_lazy_init(lazy_init: bool | None) -> None:
    """Raise unless `lazy_init` is True, False or None.

    Raises:
        GroupOptionsError: `lazy_init` is anything else. The message shows the value.
    """
    if lazy_init is not None and not isinstance(lazy_init, bool):
        raise GroupOptionsError(
            f"lazy_init must be True, False or None, got {short_repr(lazy_init)}"
        )


def check_backend(backend: str | None) -> None:
    """Raise unless the installed torch knows a backend and can run it on this host.

    Raises:
        GroupOptionsError: The backend cannot be used. The message lists the usable backends.
    """
    if backend is None:
        return
    check_known(backend)
    for single in torchdist.single_backends(backend):
        reason = torchdist.why_unavailable(single)
        if reason is not None:
            usable = [
                name
                for name in torchdist.known_backends()
                if torchdist.why_unavailable(name) is None
            ]
            raise GroupOptionsError(
                f"backend {single!r} {reason}; use one of {usable} here, or plan with {single!r} "
                f"in hypercomm.testing.fake_world"
            )


def check_known(backend: str) -> None:
    """Raise unless the installed torch knows a backend. The backend may be unavailable here.

    Raises:
        GroupOptionsError: The backend is unknown. The message lists the backends that torch knows.
    """
    if not isinstance(backend, str) or not backend:
        raise GroupOptionsError(f"backend must be a name such as 'gloo', got {short_repr(backend)}")
    pairs = torchdist.pairs_of(backend)
    is_readable = all(_PART.fullmatch(part) for part in backend.lower().split(","))
    if not is_readable or len(dict(pairs)) < len(pairs):
        raise GroupOptionsError(
            f"backend {backend!r} is malformed; write it as 'gloo', or as 'cpu:gloo,cuda:nccl' "
            f"with each device once"
        )
    unknown = [single for _, single in pairs if not torchdist.is_known(single)]
    if unknown:
        known = torchdist.known_backends()
        hint = did_you_mean(unknown[0], known)
        raise GroupOptionsError(
            f"unknown backend {backend!r}; this torch knows {known}"
            f"{hint or '; another one needs a build of torch or a package that provides it'}"
        )


_PART = re.compile(r"([a-z_]+:)?[\w.-]+")
"""Matches one part of a backend string, with or without a device type."""


# ---- requests ------------------------------------------------------------------------------------

Derive = Callable[[RankGroups], RankGroups | RankLists] | RankGroups | RankLists
"""Groups that replace the groups over some dims, or a function that returns such groups."""


@attrs.frozen
class GroupKey:
    """The key of a process group. It consists of dims in layout order, a name, and a view.

    The key has no view if the dims belong to the grid, or if a view shares them with the grid.
    """

    dims: tuple[str, ...]
    name: str | None = None
    view: str | None = None

    def __str__(self) -> str:
        view = f" of {self.view}" if self.view else ""
        return "+".join(self.dims) + view + (f" ({self.name})" if self.name else "")

    def as_call(self) -> str:
        """Return the key as arguments of a call, such as "['cp', 'dp'], name='twin'"."""
        dims = repr(self.dims[0]) if len(self.dims) == 1 else repr(list(self.dims))
        name = f", name={self.name!r}" if self.name else ""
        return dims + name + (f", view={self.view!r}" if self.view else "")

    def is_same_to_users(self, other: GroupKey) -> bool:
        """Return whether two keys of different layouts differ at most in the order of dims."""
        has_same_names = (self.name, self.view) == (other.name, other.view)
        return has_same_names and set(self.dims) == set(other.dims)


@attrs.frozen
class GroupRequest:
    """The arguments of `create_pg` for one process group. `create_pgs` takes several requests.

    Args:
        dims: One name, or several in any order: "dp+cp", ["dp", "cp"].
        name, view, backend, timeout, pg_options, group_desc, share, derive, creation, lazy_init:
            See `HyperCommGrid.create_pg`.

    Example:
        >>> from hypercomm import GroupRequest, HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), HyperCommGrid("tp=2,dp=4") as grid:
        ...     _ = grid.create_pgs(["tp", GroupRequest("dp", name="gloo", backend="gloo")])
        ...     print([str(key) for key in grid.pgs])
        ['tp', 'dp (gloo)']
    """

    dims: Dims
    name: str | None = attrs.field(default=None, kw_only=True)
    view: str | None = attrs.field(default=None, kw_only=True)
    backend: str | None = attrs.field(default=None, kw_only=True)
    timeout: timedelta | None = attrs.field(default=None, kw_only=True)
    pg_options: Any = attrs.field(default=None, kw_only=True)
    group_desc: str | None = attrs.field(default=None, kw_only=True)
    share: Share | None = attrs.field(default=None, kw_only=True)
    derive: Derive | None = attrs.field(default=None, kw_only=True)
    creation: StrategyName | None = attrs.field(default=None, kw_only=True)
    lazy_init: bool | None = attrs.field(default=None, kw_only=True)

    def __repr__(self) -> str:
        values = attrs.asdict(self, recurse=False)
        dims = values.pop("dims")
        given = [f"{name}={value!r}" for name, value in values.items() if value is not None]
        return f"GroupRequest({', '.join([repr(dims), *given])})"

    @classmethod
    def of(cls, given: Dims | Mapping[str, Any] | GroupRequest) -> GroupRequest:
        """Return a request from dims, or from a mapping of arguments.

        Raises:
            GroupOptionsError: The mapping has no dims.
            TypeError: The mapping has a name that is not an argument.

        Example:
            >>> GroupRequest.of({"dims": "tp", "nam": "x"})
            Traceback (most recent call last):
            TypeError: a request has no argument 'nam'; did you mean 'name'?
        """
        if isinstance(given, GroupRequest):
            return given
        if not isinstance(given, Mapping):
            return cls(given)
        if "dims" not in given:
            raise GroupOptionsError(f"the request {short_repr(dict(given))} needs 'dims'")
        known = [field.name for field in attrs.fields(cls)]
        for name in given:
            if name not in known:
                raise TypeError(f"a request has no argument {name!r}{did_you_mean(name, known)}")
        return cls(**given)

    def options(self, defaults: GroupOptions) -> GroupOptions:
        """Return the options of the request, with the defaults of a grid.

        Raises:
            GroupOptionsError: A value has the wrong type, or a backend is unknown.
        """
        replaced = {}
        for name in _OPTIONS:
            value = getattr(self, name)
            if value is not None:
                replaced[name] = value
        if not replaced:
            return defaults
        options = attrs.evolve(defaults, **replaced)
        options.check()
        return options

    def find_groups(self, key: GroupKey, layout: RankLayout) -> RankGroups:
        """Return all groups over the dims of a key, or the groups of `derive` that replace them.

        Raises:
            GroupOptionsError: `derive` is given, but the key has no `name`.
            LayoutError: The groups of `derive` are not disjoint groups of ranks of the layout.
        """
        groups = groups_over(layout, key.dims)
        if self.derive is None:
            return groups
        if key.name is None:
            raise GroupOptionsError(
                f"derive= replaces the groups over {key.as_call()}, so the new groups need a "
                f"name; pass name=..."
            )
        found = self.derive(groups) if callable(self.derive) else self.derive
        return as_groups(found, groups)


_OPTIONS = [
    field.name
    for field in attrs.fields(GroupOptions)
    if field.name in attrs.fields_dict(GroupRequest)
]
"""The arguments of a request that replace an option of the grid."""


@attrs.frozen(slots=False, eq=False)
class GroupSpec:
    """A request whose groups, options and strategy are resolved. A spec creates nothing.

    Attributes:
        request: The request.
        key: The key of the group.
        layout: The layout of the dims of the key.
        view: The view that the request names. If the view shares the dims with the grid, the key
            has no view.
        groups: All groups over the dims, or the groups of `derive`.
        given: The options of the request, with the defaults of the grid.
        share: Whether the group may serve other keys: "never" or "identical".
        options: The options with the defaults of the world, without a description.
        strategy: "local", "split" or "enumerate", or "adopted" for a group of a DeviceMesh.
        reason: The reason for the strategy.
        world: The world of the ranks.
        own: The index and the ranks of the calling rank's group, or None if there is none.
    """

    request: GroupRequest
    key: GroupKey
    layout: RankLayout
    view: View | None
    groups: RankGroups
    given: GroupOptions
    share: Share
    options: GroupOptions
    strategy: str
    reason: str
    world: World
    own: tuple[int, tuple[int, ...]] | None

    @cached_property
    def title(self) -> str:
        """The key as text."""
        return str(self.key)

    @property
    def group_desc(self) -> str:
        """The description that torch's logs show."""
        return self.given.group_desc or self.title

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks of the calling rank's group, or None if there is none."""
        return None if self.own is None else self.own[1]

    @cached_property
    def facts(self) -> tuple[object, ...]:
        """The properties of the group that must be equal on all ranks. They have equal `repr`s.

        The layout of the grid is not included, because ranks with different layouts never meet.
        """
        options = self.options
        return (
            self.title,
            None if self.view is None else str(self.view),
            None if self.request.derive is None else self.groups.digest(),
            options.backend,
            self.given.timeout,
            type(options.pg_options).__name__,
            self.group_desc,
            self.share,
            self.strategy,
            options.lazy_init,
            options.enable_reconfigure,
        )

    def describe(self) -> str:
        """Return the `facts` as text, for errors: a headline, and a line for each option."""
        _, view, members, backend, timeout, pg_options, group_desc, share, *others = self.facts
        strategy, lazy_init, enable_reconfigure = others
        digest = "" if members is None else f" (members {members})"
        options: dict[str, object] = {
            "backend": backend,
            "timeout": timeout,
            "pg_options": pg_options,
            "group_desc": repr(group_desc),
            "share": share,
            "creation": strategy,
            "lazy_init": lazy_init,
            "enable_reconfigure": enable_reconfigure or None,
        }
        within = "" if view is None else f" in view {view}"
        return as_entry(f"{self.title} over {self.groups!r}{digest}{within}", options)

    def sort_key(self) -> tuple[str, int, tuple[int, ...], str]:
        """Return a key that sorts the specs of a grid in the same order on all ranks."""
        dim_names = self.layout.dim_names
        positions = tuple(dim_names.index(dim) for dim in self.key.dims)
        return self.key.view or "", len(positions), positions, self.key.name or ""

    def check_same(self, other: GroupSpec) -> None:
        """Raise unless another spec with this key has the same options and group.

        Raises:
            GroupOptionsError: Options or groups differ.
        """
        key = self.key.as_call()
        if other.given != self.given:
            raise GroupOptionsError(
                f"the process group over {key} was created with {self.given}, but is now requested "
                f"with {other.given}; use the same options, or another name=..."
            )
        if self.ranks != other.ranks:
            raise GroupOptionsError(
                f"the process group over {key} was created for {self.groups!r}, but is now "
                f"requested for {other.groups!r}; derive the same groups, or use another name=..."
            )

    def can_serve(self, other: GroupSpec) -> bool:
        """Return whether the group of this spec has the ranks and options of another spec.

        Only the default description may differ. With the strategy "local", only the calling rank's
        group must be the same, because all members of this group then get the same answer. The
        other strategies involve every rank, so all groups must be the same.
        """
        one = self.options
        two = other.options
        given = self.given
        others = other.given
        if (
            one.backend != two.backend
            or one.timeout != two.timeout
            or one.lazy_init != two.lazy_init
            or given.pg_options is not others.pg_options
            or given.group_desc != others.group_desc
            or given.creation != others.creation
            or given.enable_reconfigure != others.enable_reconfigure
        ):
            return False
        if other.strategy != "local":
            return self.groups == other.groups
        return self.ranks is not None and self.ranks == other.ranks
