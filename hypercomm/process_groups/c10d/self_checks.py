"""What is checked of the installed torch: its release, and each private name, once it is used.

`Replaced` puts something of ours in the place of one for a while.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import attrs
import torch

from hypercomm.errors import TorchVersionError

logger = logging.getLogger(__name__)

OLDEST = "2.6"
"""The oldest torch that hypercomm works with."""


def release_of(version: str) -> tuple[int, ...]:
    """Return the release that a version is of, which one made before it counts as.

    Example:
        >>> release_of("2.6.0a0+ecf3bae40a.nv25.01"), release_of("2.15")
        ((2, 6), (2, 15))
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@functools.lru_cache(maxsize=16)
def since(release: str) -> bool:
    """Tell whether this torch is a release or one after it."""
    return release_of(torch.__version__) >= release_of(release)


def check_release(installed: str) -> None:
    """Refuse a torch that is too old.

    Args:
        installed: Its version.

    Raises:
        TorchVersionError: With what to do.

    Example:
        >>> check_release("2.6.0+cu124")
        >>> check_release("2.5.1")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        hypercomm.errors.TorchVersionError: torch 2.5.1 is installed, and hypercomm needs 2.6 or ...
    """
    if release_of(installed) < release_of(OLDEST):
        raise TorchVersionError(
            f"torch {installed} is installed, and hypercomm needs {OLDEST} or newer: "
            f"pip install 'torch>={OLDEST}'; hypercomm.layout, and hypercomm.RankLayout, need none"
        )


check_release(torch.__version__)


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
    module: str = "torch"
    look_up: Callable[[Any], Any] = attrs.field(
        default=attrs.Factory(lambda self: attrgetter(self.path), takes_self=True), repr=False
    )

    def __str__(self) -> str:
        return f"torch.{self.path}"

    def find(self, root: Any) -> Any:
        """Return what the path leads to; None where there is no such thing."""
        try:
            return self.look_up(root)
        except AttributeError:
            try:
                importlib.import_module(self.module)
                return self.look_up(root)
            except Exception:  # noqa: BLE001 - a module of torch may fail to load in any way
                return None

    def why_not(self, found: Any) -> str | None:
        """Say why what the path leads to cannot be used; None where it can."""
        if found is None:
            return "is not there"
        try:
            return self.check(found)
        except Exception as error:  # noqa: BLE001 - whatever it raises, there is a way without it
            return f"raises {error!r}"


class Verdict(NamedTuple):
    """What came of a check: "works", "not due" in this torch, or "lost" with the reason."""

    name: PrivateName
    state: str
    reason: str | None


class PrivateNames:
    """Looks private names up, and checks them when they are first used.

    What replaces a name later is checked in its turn; a wrapper counts as what it wraps. Where a
    name cannot be used, the log says so once.

    Args:
        root: Where the paths begin: `torch`.
        table: All names.

    Attributes:
        losses: How often a name was found not to work: what was decided before is decided anew.
    """

    def __init__(self, root: Any, table: Sequence[PrivateName]) -> None:
        self.root = root
        self._table = table
        self._reasons: dict[str, tuple[Any, str | None]] = {}
        self.losses = 0
        self._lock = threading.Lock()

    def works(self, name: PrivateName) -> bool:
        """Tell whether this torch is to have a name, and it can be used."""
        return self.get(name) is not None

    def get(self, name: PrivateName) -> Any:
        """Return what a name stands for now; None where it is not due, or cannot be used."""
        known = self._reasons.get(name.path)
        if known is None and not name.is_due():
            return None
        try:
            found = name.look_up(self.root)
        except AttributeError:
            found = name.find(self.root)
        if known is None or known[0] is not found:
            kind = _kind(found)
            if known is None or known[0] is not kind:
                known = self._file(name, kind, name.why_not(kind))
        return found if known[1] is None else None

    def why_not(self, name: PrivateName) -> str | None:
        """Say why a name that is due cannot be used; None where it can."""
        self.get(name)
        return self._reasons[name.path][1]

    def call(self, name: PrivateName, *args: Any) -> bool:
        """Call what a name stands for; False where that cannot be done."""
        function = self.get(name)
        if function is None:
            return False
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - there is a way without it
            self.lost(name, f"raises {error!r}")
            return False
        return True

    def lost(self, name: PrivateName, reason: str) -> None:
        """File that a name cannot be used, as its first use has shown."""
        self._file(name, _kind(name.find(self.root)), reason)

    def _file(self, name: PrivateName, kind: Any, reason: str | None) -> tuple[Any, str | None]:
        with self._lock:
            _, known = self._reasons.get(name.path, (None, None))
            self._reasons[name.path] = kind, reason
            self.losses += reason is not None
        if reason is not None and known is None:
            logger.warning(
                "torch %s: %s %s, so hypercomm does without it: %s",
                torch.__version__,
                name,
                reason,
                name.without,
            )
        return kind, reason

    def verdicts(self) -> list[Verdict]:
        """Check every name that this torch is to have, and return what came of it."""
        found = []
        for name in self._table:
            is_due = name.is_due()
            reason = self.why_not(name) if is_due else None
            state = "lost" if reason else "works" if is_due else "not due"
            found.append(Verdict(name, state, reason))
        return found


def _kind(found: Any) -> Any:
    """What is wrapped, if something is: a wrapper counts as what it wraps."""
    return inspect.unwrap(found) if callable(found) else found


# ---- other things in their place --------------------------------------------------------------


class Replaced:
    """An attribute of torch's that is something of ours as long as some thread wants that.

    Threads that want the same have it together; one that wants something else waits for them.

    Args:
        name: The attribute's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._users = 0
        self._owner: Any = None
        self._original: Any = None
        self._ours: Any = None

    def original(self, owner: Any) -> Any:
        """Return what `owner` has when nobody replaces it; None where it has no such attribute."""
        with self._changed:
            if self._users and self._owner is owner:
                return self._original
            return getattr(owner, self._name, None)

    def can_be(self, owner: Any) -> bool:
        """Tell whether `owner` lets its attribute be set."""
        with self._changed:
            try:
                if not self._users:
                    setattr(owner, self._name, getattr(owner, self._name))
            except (AttributeError, RuntimeError, TypeError):
                return False
        return True

    @contextlib.contextmanager
    def by(self, owner: Any, ours: Any) -> Iterator[None]:
        """Let `owner` have something of ours within a `with` block."""
        with self._changed:
            while self._users and self._ours != ours:
                self._changed.wait()
            if not self._users:
                original = getattr(owner, self._name)
                if original is not ours:
                    setattr(owner, self._name, ours)
                self._owner, self._original, self._ours = owner, original, ours
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if not self._users:
                    if self._original is not self._ours:
                        setattr(self._owner, self._name, self._original)
                    self._owner = self._original = self._ours = None
                    self._changed.notify_all()
