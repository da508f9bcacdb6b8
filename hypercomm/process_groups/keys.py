"""What process groups are filed under and asked for, and how a grid says how it makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import attrs

from hypercomm.layout import RankGroups
from hypercomm.layout.views import View
from hypercomm.process_groups.options import GroupOptions
from hypercomm.process_groups.planned import PlannedGroup

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

    def as_call(self) -> str:
        """Return the key as one writes it in a call: "'tp'", "['cp', 'dp'], name='twin'"."""
        dims = repr(self.dims[0]) if len(self.dims) == 1 else repr(list(self.dims))
        name = f", name={self.name!r}" if self.name else ""
        return dims + name + (f", view={self.view!r}" if self.view else "")


@attrs.frozen
class GroupRequest:
    """What one call asks for; `view` is the one that it names, also for dims that it shares."""

    key: GroupKey
    view: View | None
    given: GroupOptions
    share: str
    derive: Derive | None


@attrs.frozen
class Explanation:
    """How a process group was created, or would be, and why; str() says it in lines of text.

    Attributes:
        key: The dims and the name.
        groups: All the groups over them.
        backend: Their backend; None before torch.distributed is initialised.
        strategy: "local", "split" or "enumerate"; "adopted" where a DeviceMesh made the group.
        reason: Why this strategy.
        alternatives: What speaks against each other strategy, by its name.
        served_by: The key whose group serves this one too, under `share="identical"`.
    """

    key: GroupKey
    groups: RankGroups
    backend: str | None
    strategy: str
    reason: str
    alternatives: Mapping[str, str]
    served_by: str | None

    def __str__(self) -> str:
        backend = f", {self.backend}" if self.backend else ""
        lines = [f"{self.key}: {len(self.groups)} of {self.groups.group_size} ranks{backend}"]
        if self.served_by is not None:
            lines.append(f"  served by the group over {self.served_by}: same ranks and options")
        lines.append(f"  {self.strategy}: {self.reason}")
        lines += [f"  not {name}: {reason}" for name, reason in self.alternatives.items()]
        return "\n".join(lines)


def describe(planned: PlannedGroup) -> str:
    """A planned group in words that all ranks of the grid find alike."""
    options, members = planned.resolved, ""
    if planned.derive is not None:  # else the dims tell all
        digest = hashlib.sha256(planned.groups.to_array().tobytes()).hexdigest()[:12]
        members = f" (members {digest})"
    return (
        f"{planned.title} over {planned.groups!r}{members}: {planned.choice.strategy}, "
        f"{options.backend}, timeout {options.timeout}, description {options.group_desc!r}, "
        f"lazy_init {options.lazy_init}, options {type(options.pg_options).__name__}, "
        f"share {planned.share!r}"
    )
