"""Explains how a process group was created or would be created."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from hypercomm.layout import RankGroups
from hypercomm.layout.groups import format_counts
from hypercomm.process_groups.spec import GroupKey, GroupSpec
from hypercomm.process_groups.strategies import STRATEGIES, obstacles, split_turns


@attrs.frozen(repr=False)
class Explanation:
    """An explanation of how a process group was created, or would be created.

    str() returns the explanation as lines of text.

    Attributes:
        key: The key of the group.
        groups: All groups over the dims of the key.
        backend: The backend, or None before torch.distributed is initialised.
        strategy: "local", "split" or "enumerate", or "adopted" for a group of a DeviceMesh.
        reason: The reason for the strategy.
        alternatives: Maps the name of each other strategy to the reason against it.
        served_by: The key whose group also serves this key (`share="identical"`), or None.
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
        """Explain a spec. `served_by` is another key whose group also serves this key, or None."""
        options = spec.options
        others: dict[str, str] = {}
        if spec.strategy != "adopted":
            backend = options.backend or spec.world.backend
            lazily = spec.given.lazy_init
            against = obstacles(spec.world, backend, spec.groups, lazily)
            del against[spec.strategy]
            for name, obstacle in against.items():
                others[name] = obstacle or f"it would work too: {STRATEGIES[name].cost}"
        reason = spec.reason
        turns = len(split_turns(spec.groups)) if spec.strategy == "split" else 1
        if turns > 1:
            reason += f", in {turns} turns, because torch gives some groups the same colour"
        return cls(spec.key, spec.groups, options.backend, spec.strategy, reason, others, served_by)

    @classmethod
    def before_world(cls, key: GroupKey, groups: RankGroups, backend: str | None) -> Explanation:
        """Explain groups before torch.distributed is initialised and a strategy is chosen."""
        reason = "torch.distributed is not initialised"
        return cls(key, groups, backend, "enumerate", reason, {}, None)

    @property
    def _headline(self) -> str:
        backend = f", {self.backend}" if self.backend else ""
        return f"{self.key}: {format_counts(self.groups)}{backend}"

    def __repr__(self) -> str:
        return f"<Explanation of {self._headline}: {self.strategy}>"

    def __str__(self) -> str:
        lines = [self._headline]
        if self.served_by is not None:
            lines.append(
                f"  served by the group over {self.served_by}, with the same ranks and options"
            )
        lines.append(f"  {self.strategy}: {self.reason}")
        lines += [f"  not {name}: {reason}" for name, reason in self.alternatives.items()]
        return "\n".join(lines)
