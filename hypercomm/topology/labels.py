"""Labels: what JSON and YAML say of each host: its switch, its switches, or Topograph's labels.

Source: https://docs.nvidia.com/topograph/v1.0.0/reference/node-labels-and-annotations: tier 0 is
the switch that a node is connected to; older releases write network.topology.nvidia.com.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypercomm.errors import TopologyError
from hypercomm.layout.text import shown, some_of
from hypercomm.topology.found import Found, tier

_LABELS = {
    "accelerator.topograph.run/domain": "domain",
    "accelerator.topograph.run/sub-domain": "sub-domain",
    "network.topology.nvidia.com/accelerator": "domain",
    "network.topology.nvidia.com/leaf": "leaf",
    "network.topology.nvidia.com/spine": "spine",
    "network.topology.nvidia.com/core": "core",
    "nvidia.com/gpu.clique": "domain",
}
"""Labels and what they are the level of; of several for one level the first one counts."""

_TIER = re.compile(r"fabric\.topograph\.run/tier-([0-9]{1,2})")
_COUNT = "nvidia.com/gpu.count"
_KNOWN = "'accelerator.topograph.run/domain', 'fabric.topograph.run/tier-0'"


def read_labels(content: Mapping[str, Any], source: str) -> Found:
    """Read what is said of each host: {host: switch}, {host: [leaf, spine]} or {host: labels}.

    Args:
        content: By host; or what `kubectl get nodes -o json` prints.
        source: How errors name it.

    Raises:
        TopologyError: A host has neither, or lacks what others have.

    Example:
        >>> found = read_labels({"a": "s1", "b": "s2"}, "leafs.json")
        >>> dict(found.levels["leaf"])
        {'a': 's1', 'b': 's2'}
        >>> labels = {"accelerator.topograph.run/domain": "d1", "nvidia.com/gpu.count": "4"}
        >>> found = read_labels({"a": labels}, "labels.json")
        >>> dict(found.levels["domain"]), dict(found.slots)
        ({'a': 'd1'}, {'a': 4})
    """
    nodes = _of_kubernetes(content, source) if "items" in content else dict(content)
    if not nodes:
        raise TopologyError(f"{source} holds no host")
    slots: dict[str, int | None] = {}
    levels: dict[str, dict[str, str]] = {}
    for host, said in nodes.items():
        if not isinstance(host, str) or not host:
            raise TopologyError(f"{source}: the name of a host must be a text, got {shown(host)}")
        units, slots[host] = _units_of(host, said, source)
        for level, unit in units.items():
            levels.setdefault(level, {})[host] = unit
    for level, held in levels.items():
        absent = [host for host in nodes if host not in held]
        if absent and level in {"domain", "sub-domain"}:  # a host that is in none is one by itself
            held.update({host: host for host in absent})
        elif absent:
            raise TopologyError(
                f"{source} says no {level} of {some_of(absent, 4)}, but of {next(iter(held))}; add "
                f"it, or leave these hosts out"
            )
    return Found(source, slots, levels)


def _of_kubernetes(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The labels of each node that has any of ours, or GPUs; a control plane's have none."""
    nodes: dict[str, Any] = {}
    found = False
    items = content["items"]
    for item in items if isinstance(items, list) else [items]:
        data = item.get("metadata") if isinstance(item, Mapping) else None
        name = data.get("name") if isinstance(data, Mapping) else None
        if not isinstance(data, Mapping) or not isinstance(name, str):
            raise TopologyError(f"{source} has an item that is no node: {shown(item)}")
        if name in nodes:
            raise TopologyError(f"{source} names {name!r} twice; name each host once")
        labels = data.get("labels") or {}
        if isinstance(labels, Mapping):
            labels = {_COUNT: _capacity(item), **labels}
            has_level = any(_level_of(label) for label in labels)
            found = found or has_level
            if has_level or str(labels[_COUNT] or 0) != "0":
                nodes[name] = labels
    if not found:
        raise TopologyError(f"{source} has no node with a label such as {_KNOWN}")
    return nodes


def _capacity(item: Mapping[str, Any]) -> object:
    """The GPUs that a node of Kubernetes has; None where it does not say."""
    status = item.get("status")
    held = status.get("capacity") if isinstance(status, Mapping) else None
    return held.get("nvidia.com/gpu") if isinstance(held, Mapping) else None


def _level_of(label: object) -> str | None:
    if not isinstance(label, str):
        return None
    found = _TIER.fullmatch(label)
    return tier(int(found[1])) if found else _LABELS.get(label)


def _units_of(host: str, said: object, source: str) -> tuple[dict[str, str], int | None]:
    if isinstance(said, str) and said:
        return {"leaf": said}, None
    if isinstance(said, Sequence) and said and all(isinstance(one, str) and one for one in said):
        return {tier(number): one for number, one in enumerate(said)}, None
    if not isinstance(said, Mapping):
        raise TopologyError(
            f"{source} says {shown(said)} of {host!r}; give its switch, a list of its switches "
            f"from the leaf up, or labels such as {_KNOWN}"
        )
    units = _by_level(said)
    if not units and _COUNT not in said:
        raise TopologyError(
            f"{source} has no label of {host!r} that is known, but {shown(list(said))}; give some "
            f"such as {_KNOWN}"
        )
    return units, _count_of(host, said.get(_COUNT), source)


def _by_level(labels: Mapping[str, Any]) -> dict[str, str]:
    units: dict[str, str] = {}
    ours: Iterable[str] = [*_LABELS, *(label for label in labels if label not in _LABELS)]
    for label in ours:
        level = _level_of(label)
        if level and labels.get(label):
            units.setdefault(level, str(labels[label]))
    return units


def _count_of(host: str, count: object, source: str) -> int | None:
    if count is None:
        return None
    if not re.fullmatch(r"[0-9]{1,6}", str(count)) or not int(str(count)):
        raise TopologyError(f"{source}: {_COUNT} of {host!r} must be 1 or more, got {shown(count)}")
    return int(str(count))
