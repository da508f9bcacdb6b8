"""The options of process groups, and checks of their values."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, get_args

import attrs

from hypercomm.errors import GroupOptionsError
from hypercomm.layout.checks import LONGEST_NAME, check_choice, check_duration, is_utf8
from hypercomm.layout.text import did_you_mean, short_repr
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
