"""GroupKey and GroupSpec: what a group is filed under, and what a call asks for, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from hypercomm.errors import GroupExistsError, GroupOptionsError
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.layout import groups_over
from hypercomm.layout.views import View
from hypercomm.process_groups import world
from hypercomm.process_groups.options import GroupOptions

Derive = Callable[[RankGroups], RankGroups]


@attrs.frozen
class GroupKey:
    """What a process group is filed under: dims in layout order, a name of its own, and a view.

    Groups over dims that a view shares with the grid are the grid's: their view is None.
    """

    dims: tuple[str, ...]
    name: str | None = None
    view: str | None = None

    def __str__(self) -> str:
        view = f" of {self.view}" if self.view else ""
        return "+".join(self.dims) + view + (f" ({self.name})" if self.name else "")

    def in_words(self) -> str:
        """Return the key as sentences have it: "'tp'", "['cp', 'dp'] for view 'expert'"."""
        view = f" for view {self.view!r}" if self.view else ""
        return attrs.evolve(self, view=None).as_call() + view

    def says_exists(self, *, is_created: bool) -> str:
        """Say that the group was created, or planned, and what to do instead."""
        call = self.as_call()
        has, how = (
            ("created", f"get it with get_pg({call}), create it once with ensure_pg")
            if is_created
            else ("planned", f"call create() of the plan, or ensure_pg({call})")
        )
        return (
            f"Process group {self.in_words()} has already been {has}; {how}, or create another "
            f"over the same dims under a name of its own, name=..."
        )

    def says_missing(self, created: Iterable[GroupKey]) -> str:
        """Say that the group was not created, and which were."""
        return (
            f"Process group for {self.in_words()} hasn't been created; call "
            f"create_pg({self.as_call()}) first, on every rank of the grid; created so far: "
            f"{', '.join(map(str, created)) or 'none yet'}"
        )

    def as_call(self) -> str:
        """Return the key as one writes it in a call: "'tp'", "['cp', 'dp'], name='twin'"."""
        dims = repr(self.dims[0]) if len(self.dims) == 1 else repr(list(self.dims))
        name = f", name={self.name!r}" if self.name else ""
        return dims + name + (f", view={self.view!r}" if self.view else "")


@attrs.frozen
class GroupSpec:
    """What one call asks for; nobody was asked for it, and nothing is created.

    Attributes:
        key: What the group is filed under.
        view: The view that the call names, also for dims that it shares with the grid.
        layout: The layout whose dims the key has.
        groups: All groups over them, or what `derive` made of those.
        derive: What made other groups of them, if anything did.
        given: The options as given.
        share: Whether the group may serve other keys.
    """

    key: GroupKey
    view: View | None
    layout: RankLayout
    groups: RankGroups
    derive: Derive | None
    given: GroupOptions
    share: str


def check_once(specs: Iterable[GroupSpec]) -> None:
    """Refuse a key that one call asks for twice."""
    positions: dict[GroupKey, int] = {}
    for position, spec in enumerate(specs):
        if (first := positions.setdefault(spec.key, position)) < position:
            raise GroupExistsError(
                f"{spec.key.as_call()} is asked for twice in one call, at positions {first} and "
                f"{position}; leave one out, or give it a name of its own, name=..."
            )


def specify(
    key: GroupKey,
    view: View | None,
    base: RankLayout,
    derive: Derive | None,
    given: GroupOptions,
    share: str,
) -> GroupSpec:
    """Check what a call asks for, and find its groups.

    Args:
        key: What the group is to be filed under.
        view: The view that the call names.
        base: The grid's own layout.
        derive: Makes other groups of those over the key's dims.
        given: The options as given.
        share: Whether the group may serve other keys.

    Raises:
        GroupOptionsError: An option is wrong, or `derive` is.
    """
    given.check()
    layout = base if key.view is None or view is None else view.layout
    groups = groups_over(layout, key.dims)
    if derive is not None:
        groups = _derived(key, groups, derive)
    return GroupSpec(key, view, layout, groups, derive, given, share)


def _derived(key: GroupKey, groups: RankGroups, derive: Derive) -> RankGroups:
    if not callable(derive):
        raise GroupOptionsError(f"derive must be a function of RankGroups, got {derive!r}")
    if key.name is None:
        raise GroupOptionsError(
            f"derive= makes other groups than those over {key.as_call()}; file them under a "
            f"name of their own, name=..."
        )
    derived = derive(groups)
    if not isinstance(derived, RankGroups):
        raise GroupOptionsError(f"derive must return RankGroups, but it returned {derived!r}")
    return derived


def same_for_caller(one: RankGroups, other: RankGroups) -> bool:
    """Tell whether the calling rank is in the same group of both, or in none of either."""
    if one == other:
        return True
    rank = world.rank()
    if not (one.has_member(rank) and other.has_member(rank)):
        return one.has_member(rank) == other.has_member(rank)
    return one.group_size == other.group_size and one.of(rank) == other.of(rank)
