"""The key of a group, what a call asks for, checked and resolved, and the explanation of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import attrs

from hypercomm.errors import GroupExistsError, GroupOptionsError, RankOutsideError
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.groups import RankLists, as_groups, format_sizes_of
from hypercomm.layout.layout import groups_over
from hypercomm.layout.views import View
from hypercomm.process_groups import strategies
from hypercomm.process_groups.agreement.protocol import as_entry
from hypercomm.process_groups.options import GroupOptions
from hypercomm.process_groups.strategies import NOT_YET, Choice, choose
from hypercomm.process_groups.world import World, rank_in_world

Derive = Callable[[RankGroups], RankGroups | RankLists] | RankGroups | RankLists
"""Other groups than those over dims, or a function that returns them for the groups over dims."""


@attrs.frozen
class GroupKey:
    """The key of a process group: dims in layout order, a name, and a view.

    Groups over dims that a view shares with the grid are the grid's: their view is None.
    """

    dims: tuple[str, ...]
    name: str | None = None
    view: str | None = None

    def __str__(self) -> str:
        view = f" of {self.view}" if self.view else ""
        return "+".join(self.dims) + view + (f" ({self.name})" if self.name else "")

    def says_exists(self, *, is_created: bool) -> str:
        """Say that the group exists, or that another thread creates it, and what to do instead."""
        if not is_created:
            return f"another thread is creating the process group {self.as_call()}; wait for it"
        return (
            f"Process group {self._in_words()} has already been created; get it with "
            f"get_pg({self.as_call()}), create it once with ensure_pg, or another with name=..."
        )

    def says_missing(self, created: Iterable[GroupKey]) -> str:
        """Say that the group was not created, and which were."""
        return (
            f"Process group for {self._in_words()} hasn't been created; call "
            f"create_pg({self.as_call()}) first, on every rank of the grid; created so far: "
            f"{', '.join(map(str, created)) or 'none yet'}"
        )

    def says_ended(self) -> str:
        """Say that `survivors` has ended the group, and what to do."""
        return (
            f"survivors() has ended the process group over {self.as_call()}; call "
            f"reshape(target, ranks=...) with the ranks that it returned"
        )

    def _in_words(self) -> str:
        return self.as_call().replace(", view=", " for view ")  # as Megatron says it

    def as_call(self) -> str:
        """Return the key as one writes it in a call: "'tp'", "['cp', 'dp'], name='twin'"."""
        dims = repr(self.dims[0]) if len(self.dims) == 1 else repr(list(self.dims))
        name = f", name={self.name!r}" if self.name else ""
        return dims + name + (f", view={self.view!r}" if self.view else "")


@attrs.frozen(slots=False)
class GroupSpec:
    """A group as a call asks for it, checked and with its options resolved; nothing is created.

    Attributes:
        key: The key that the group is registered under.
        view: The view that the call names, also for dims that it shares with the grid.
        layout: The layout that has the dims of the key.
        groups: All groups over the dims, or what `derive` returned for them.
        derive: The function that derived other groups from them, or these groups; None without.
        given: The options as given.
        share: Whether the group may serve other keys: "never" or "identical".
        options: The options with the defaults of the job.
        choice: The strategy, and why it was chosen.
        world: The world that the ranks are of; None before there is one.
    """

    key: GroupKey
    view: View | None
    layout: RankLayout
    groups: RankGroups
    derive: Derive | None
    given: GroupOptions
    share: str
    options: GroupOptions
    choice: Choice
    world: World | None = None

    @cached_property
    def own(self) -> tuple[int, tuple[int, ...]] | None:
        """The index and the ranks of the calling rank's group; None if it is in none."""
        try:
            index, _ = self.groups.locate(rank_in_world(world=self.world))
        except RankOutsideError:
            return None
        return index, self.groups[index]

    def place(self) -> tuple[str, int, tuple[int, ...], str]:
        """Return the place of the key among others, by which all ranks sort equally."""
        at = tuple(self.layout.dim_names.index(dim) for dim in self.key.dims)
        return self.key.view or "", len(at), at, self.key.name or ""

    def describe(self) -> str:
        """Return the request as one entry of a proposal; it must be equal on all ranks."""
        members = ""
        if self.derive is not None:  # else the dims say all
            members = f" (members {self.groups.digest()})"
        options, view = self.options, "" if self.view is None else f" in view {self.view}"
        return as_entry(
            f"{self.key} over {self.groups!r}{members}{view}",
            {
                "backend": options.backend,
                "timeout": self.given.timeout,
                "pg_options": type(options.pg_options).__name__,
                "group_desc": repr(options.group_desc),
                "share": self.share,
                "creation": self.choice.strategy,
                "lazy_init": options.lazy_init,
                "enable_reconfigure": options.enable_reconfigure or None,
            },
        )

    def check_same(self, other: GroupSpec) -> None:
        """Raise unless another call asks for the same group under this key.

        Raises:
            GroupOptionsError: Options or groups differ.
        """
        key = self.key.as_call()
        if other.given != self.given:
            raise GroupOptionsError(
                f"the process group over {key} was created with {self.given}, and cannot be had "
                f"with {other.given}; use the same options, or another name=..."
            )
        if not same_for_caller(other.groups, self.groups, self.world):
            raise GroupOptionsError(
                f"the process group over {key} was created for {self.groups!r}, and cannot be had "
                f"for {other.groups!r}; derive the same groups, or use another name=..."
            )

    def can_serve(self, other: GroupSpec) -> bool:
        """Return whether the group of this key has the ranks and options that another needs.

        Only the default description may differ. With "local" the calling rank's group must match,
        as it does on all members. The other strategies involve every rank, so all groups must.
        """
        one, two, given, others = self.options, other.options, self.given, other.given
        if (
            (one.backend, one.timeout, one.lazy_init) != (two.backend, two.timeout, two.lazy_init)
            or given.pg_options is not others.pg_options
            or (given.group_desc, given.creation) != (others.group_desc, others.creation)
            or given.enable_reconfigure != others.enable_reconfigure
        ):
            return False
        if other.choice.strategy != "local":
            return self.groups == other.groups
        is_member = self.groups.has_member(rank_in_world(world=self.world))
        return is_member and same_for_caller(self.groups, other.groups, self.world)


def check_once(specs: Iterable[GroupSpec]) -> None:
    """Raise if one call asks for a key twice."""
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
    creation: str,
    world: World | None,
) -> GroupSpec:
    """Check what a call asks for, and resolve its groups, options and strategy.

    Args:
        key: The key that the group is to be registered under.
        view: The view that the call names.
        base: The grid's own layout.
        derive: Other groups than those over the key's dims, or a function that derives them.
        given: The options as given.
        share: "never" or "identical".
        creation: The strategy of the grid, if the options name none.
        world: The world of the grid; None before there is one: options stay as they are.

    Raises:
        GroupOptionsError: An option is wrong, or `derive` has no name.
        LayoutError: `derive` gives other than disjoint groups of ranks of the layout.
        CreationError: The strategy cannot work here.
    """
    given.check()
    layout = base if key.view is None or view is None else view.layout
    groups = groups_over(layout, key.dims)
    if derive is not None:
        groups = _derived(key, groups, derive)
    options, choice, creation = given, NOT_YET, given.creation or creation
    if given.enable_reconfigure and creation != "local":
        if creation != "auto":
            raise GroupOptionsError(
                f"creation={creation!r} cannot create groups with enable_reconfigure=True; use "
                f"'auto' or 'local'"
            )
        creation = "local"
    if world is not None:
        choice = choose(
            *(world, creation, given.backend, groups),
            lazily=given.lazy_init,
            by_all=base.size == world.size,
        )
        options = given.resolve(str(key), world)
    return GroupSpec(key, view, layout, groups, derive, given, share, options, choice, world)


def _derived(key: GroupKey, groups: RankGroups, derive: Derive) -> RankGroups:
    if key.name is None:
        raise GroupOptionsError(
            f"derive= needs a name: its groups are not those over {key.as_call()}; give name=..."
        )
    return as_groups(derive(groups) if callable(derive) else derive, groups)


def same_for_caller(one: RankGroups, other: RankGroups, world: World | None = None) -> bool:
    """Tell whether the calling rank is in the same group of both, or in none of either."""
    are_alone = one.sizes == other.sizes == (1,)  # to compare these, all would be read
    if not are_alone and one == other:
        return True
    here = rank_in_world(world=world)
    if not (one.has_member(here) and other.has_member(here)):
        return one.has_member(here) == other.has_member(here)
    return are_alone or one.of(here) == other.of(here)


@attrs.frozen(repr=False)
class Explanation:
    """How a process group was created, or would be, and why; str() returns it as lines of text.

    Attributes:
        key: The dims and the name.
        groups: All the groups over them.
        backend: Their backend; None before torch.distributed is initialised.
        strategy: "local", "split" or "enumerate"; "adopted" where a DeviceMesh made the group.
        reason: Why this strategy.
        alternatives: Why each other strategy was not used, by its name.
        served_by: The key whose group serves this one too, under `share="identical"`.
    """

    key: GroupKey
    groups: RankGroups
    backend: str | None
    strategy: str
    reason: str
    alternatives: Mapping[str, str]
    served_by: str | None

    @classmethod
    def of(cls, spec: GroupSpec, served_by: str | None) -> Explanation:
        """Explain a spec, whose key may be served by the group of another."""
        (strategy, reason), backend = spec.choice, spec.options.backend
        against: dict[str, str | None] = {}
        if strategy != "adopted":
            against = strategies.obstacles(spec.world, backend, spec.groups, spec.given.lazy_init)
        others = {
            name: obstacle or f"it would work too: {strategies.STRATEGIES[name].cost}"
            for name, obstacle in against.items()
            if name != strategy
        }
        turns = len(strategies.split_turns(spec.groups)) if strategy == "split" else 1
        if turns > 1:
            reason += f", in {turns} turns, because torch's colours of some groups are equal"
        return cls(spec.key, spec.groups, backend, strategy, reason, others, served_by)

    @property
    def _headline(self) -> str:
        backend = f", {self.backend}" if self.backend else ""
        return f"{self.key}: {len(self.groups)} of {format_sizes_of(self.groups)} ranks{backend}"

    def __repr__(self) -> str:
        return f"<Explanation of {self._headline}: {self.strategy}>"

    def __str__(self) -> str:
        lines = [self._headline]
        if self.served_by is not None:
            lines.append(f"  served by the group over {self.served_by}: same ranks and options")
        lines.append(f"  {self.strategy}: {self.reason}")
        lines += [f"  not {name}: {reason}" for name, reason in self.alternatives.items()]
        return "\n".join(lines)
