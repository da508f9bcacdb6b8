"""GroupOptions: what a process group is created with."""

from __future__ import annotations

import copy
import os
import re
from datetime import timedelta
from typing import Any

import attrs

from hypercomm.errors import GroupOptionsError
from hypercomm.layout.checks import check_duration, is_utf8
from hypercomm.layout.text import shown
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.world import World


@attrs.frozen
class GroupOptions:
    """The options of one creation, as given; None where the default holds.

    Args:
        backend: "gloo", "nccl", "cpu:gloo,cuda:nccl", ...; default: the backend of WORLD.
        timeout: How long a collective may take; default: the timeout of WORLD.
        pg_options: Options of the backend, such as `ProcessGroupNCCL.Options`.
        group_desc: A description that torch's logs show; default: the dims.
        lazy_init: Whether gloo and NCCL connect each pair of members at their first message;
            default: for gloo as the environment's TORCH_GLOO_LAZY_INIT says, for NCCL as torch
            does. Other backends have no such choice.
        creation: How it is created, "local" for example; default: as the grid says.
        enable_reconfigure: Whether its members may change while the group stays.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    pg_options: Any = None
    group_desc: str | None = None
    lazy_init: bool | None = None
    creation: str | None = None
    enable_reconfigure: bool = False

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, except the backend."""
        fields = {name: getattr(self, name) for name in ("timeout", "pg_options", "group_desc")}
        return {name: value for name, value in fields.items() if value is not None}

    def check(self) -> None:
        """Raise for what torch would reject later, or drop silently.

        Raises:
            GroupOptionsError: A value has the wrong type, or a backend is unknown.
        """
        check_timeout(self.timeout)
        desc = "" if self.group_desc is None else self.group_desc
        if not (isinstance(desc, str) and is_utf8(desc)):
            raise GroupOptionsError(
                f"group_desc must be a string that can be written as UTF-8, got {shown(desc)}"
            )
        check_lazy_init(self.lazy_init)
        if self.backend is not None:
            check_known(self.backend)

    def resolve(self, group_desc: str, world: World) -> GroupOptions:
        """Fill in the defaults of the world.

        Args:
            group_desc: The description, unless one was given.
            world: The world.

        Raises:
            GroupOptionsError: The backend would ignore `pg_options`, or cannot be reconfigured.
        """
        default = world.backend
        backend = (self.backend or default).lower()
        singles, pg_options = c10d.single_backends(backend), self.pg_options
        if pg_options is not None:
            if not any(map(c10d.takes_options, singles)):
                raise GroupOptionsError(
                    f"pg_options {shown(pg_options)} would be dropped: torch passes no options to "
                    f"backend {backend!r}; leave pg_options out"
                )
            if "fake" in {default, *singles} and not hasattr(pg_options, "_timeout"):
                raise GroupOptionsError(
                    f"pg_options must be options of a backend, such as a ProcessGroupNCCL.Options, "
                    f"got {shown(pg_options)}"
                )
        timeout = self.timeout or _own_timeout(pg_options) or world.timeout_of(backend)
        pg_options = pg_options and _with_timeout(pg_options, timeout)
        if default == "fake":  # there is nobody to connect to
            backend, singles = "fake", ("fake",)
            pg_options = pg_options and _of_fake_backend(pg_options)
        lazy_init = None if _CONNECTING.isdisjoint(singles) else self.lazy_init
        changes = self.enable_reconfigure and default != "fake"
        if changes and (reason := c10d.why_not_reconfigured(backend)) is not None:
            raise GroupOptionsError(
                f"enable_reconfigure=True cannot work here: {reason}; leave it out, and reshape() "
                f"creates new process groups"
            )
        desc = self.group_desc or group_desc
        return GroupOptions(
            backend, timeout, pg_options, desc, lazy_init, enable_reconfigure=changes
        )


_CONNECTING = {"gloo", *c10d.NCCL}
"""The backends that have an option for when to connect."""


def check_timeout(timeout: timedelta | None) -> None:
    """Raise unless `timeout` is a positive timedelta, or None for the default.

    Raises:
        GroupOptionsError: With the given value.
    """
    if timeout is not None:
        check_duration(timeout)


def check_lazy_init(lazy_init: bool | None) -> None:
    """Raise unless `lazy_init` is True, False or None.

    Raises:
        GroupOptionsError: With the given value.
    """
    if lazy_init is not None and not isinstance(lazy_init, bool):
        raise GroupOptionsError(f"lazy_init must be True, False or None, got {shown(lazy_init)}")


def check_backend(backend: str | None) -> None:
    """Raise unless the installed torch knows a backend and can run it on this host.

    Raises:
        GroupOptionsError: With the names that would have worked.
    """
    if backend is None:
        return
    check_known(backend)
    for single in c10d.single_backends(backend):
        reason = c10d.why_unavailable(single)
        if reason is not None:
            usable = [name for name in c10d.known_backends() if c10d.why_unavailable(name) is None]
            raise GroupOptionsError(
                f"backend {single!r} {reason}; use one of {usable} here, or plan with {single!r} "
                f"in hypercomm.testing.fake_world"
            )


def check_known(backend: str) -> None:
    """Raise unless the installed torch knows a backend, whether it can run here or not.

    Raises:
        GroupOptionsError: With the names that it knows.
    """
    if not isinstance(backend, str) or not backend:
        raise GroupOptionsError(f"backend must be a name such as 'gloo', got {shown(backend)}")
    pairs = c10d.pairs_of(backend)
    is_readable = all(_PART.fullmatch(part) for part in backend.lower().split(","))
    if not is_readable or len(dict(pairs)) < len(pairs):
        raise GroupOptionsError(
            f"backend {backend!r} cannot be read; write it as 'gloo', or as 'cpu:gloo,cuda:nccl' "
            f"with each device once"
        )
    unknown = [single for _, single in pairs if not c10d.is_known(single)]
    if unknown:
        raise GroupOptionsError(
            f"unknown backend {backend!r}; this torch knows {c10d.known_backends()}; to have "
            f"{unknown[0]!r}, install a build of torch or a package that has it"
        )


_PART = re.compile(r"([a-z_]+:)?[\w.-]+")
"""A backend, and the type of its device, if there is one."""


def _of_fake_backend(pg_options: Any) -> Any:
    """Keep the fake backend's own options; those of another go with that backend."""
    own = any(kind.__qualname__ == "FakeProcessGroup.Options" for kind in type(pg_options).__mro__)
    return pg_options if own else None


def _own_timeout(pg_options: Any) -> timedelta | None:
    """Return the timeout that a caller has set in backend options, if it is not their default."""
    own: timedelta | None = getattr(pg_options, "_timeout", None)
    try:
        return None if own is None or own == type(pg_options)()._timeout else own
    except (TypeError, AttributeError):  # their default is unknown if they need arguments
        return None


def _with_timeout(pg_options: Any, timeout: timedelta | None) -> Any:
    """Copy backend options that hold a timeout, with the one that torch will use anyway.

    torch writes the timeout, the ranks and the name of the group into the object that it is
    given; a copy lets a caller use one object for several groups. A copy of a Python subclass is
    one of the class in C++: such an object serves one group.
    """
    if timeout is None or getattr(pg_options, "_timeout", None) is None:
        return pg_options
    try:
        options = copy.deepcopy(pg_options)
    except TypeError:  # of a third party's backend
        return pg_options
    if type(options) is not type(pg_options):
        return pg_options
    options._timeout = timeout
    return options


def as_verified(verify: bool | None) -> bool:
    """Return whether ranks compare their calls; None reads the environment's HYPERCOMM_VERIFY.

    Raises:
        GroupOptionsError: It is none of True, False and None, or the variable none of 0 and 1.
    """
    if verify is not None and not isinstance(verify, bool):
        raise GroupOptionsError(f"verify must be True, False or None, got {shown(verify)}")
    text = os.environ.get("HYPERCOMM_VERIFY", "0")
    if verify is None and text not in {"0", "1"}:
        raise GroupOptionsError(f"the environment's HYPERCOMM_VERIFY must be 0 or 1, got {text!r}")
    return text == "1" if verify is None else verify
