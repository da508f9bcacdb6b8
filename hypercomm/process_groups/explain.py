"""Explanation: how a process group was created, or would be, and why."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from hypercomm.layout import RankGroups
from hypercomm.process_groups.spec import GroupKey, GroupSpec
from hypercomm.process_groups.strategies import STRATEGIES, obstacles, split_turns


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
            against = obstacles(spec.world, backend, spec.groups, spec.given.lazy_init)
        others = {
            name: obstacle or f"it would work too: {STRATEGIES[name].cost}"
            for name, obstacle in against.items()
            if name != strategy
        }
        turns = len(split_turns(spec.groups)) if strategy == "split" else 1
        if turns > 1:
            reason += f", in {turns} turns, because torch's colours of some groups are equal"
        return cls(spec.key, spec.groups, backend, strategy, reason, others, served_by)

    @property
    def _headline(self) -> str:
        backend = f", {self.backend}" if self.backend else ""
        return f"{self.key}: {len(self.groups)} of {self.groups.group_size} ranks{backend}"

    def __repr__(self) -> str:
        return f"<Explanation of {self._headline}: {self.strategy}>"

    def __str__(self) -> str:
        lines = [self._headline]
        if self.served_by is not None:
            lines.append(f"  served by the group over {self.served_by}: same ranks and options")
        lines.append(f"  {self.strategy}: {self.reason}")
        lines += [f"  not {name}: {reason}" for name, reason in self.alternatives.items()]
        return "\n".join(lines)
