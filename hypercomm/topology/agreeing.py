"""Whether sources agree: no host is cut by a unit, and each switch is below one other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from hypercomm.errors import TopologyError
from hypercomm.topology.found import SWITCHES, Found


def check_whole(name: str, size: int, slots: Mapping[str, int]) -> None:
    """Refuse units of some GPUs that hold a part of a host, and of others besides.

    Args:
        name: What the units are.
        size: The GPUs of each.
        slots: The GPUs of each host, in the order of ranks.

    Raises:
        TopologyError: Names the first host that is cut.

    Example:
        >>> check_whole("domain", 8, {"a": 4, "b": 4, "c": 16})
    """
    begin, total = 0, sum(slots.values())
    for host, count in slots.items():
        end = begin + count
        is_cut = begin // size != (end - 1) // size
        if is_cut and (begin % size or (end % size and end != total)):
            raise TopologyError(
                f"{name}={size} cuts host {host!r}, whose {count} GPUs are ranks {begin}..{end - 1}"
                f"; give a {name} that holds whole hosts"
            )
        begin = end


def check_tree(named: Sequence[Found], hosts: Sequence[str]) -> None:
    """Refuse switches that are below two others.

    Args:
        named: What is said of hosts, each level by one source.
        hosts: Those of the machine.

    Raises:
        TopologyError: Names the first switch, and both that it is below.

    Example:
        >>> check_tree([Found("x", levels={"leaf": {"a": "l"}, "spine": {"a": "s"}})], ["a"])
    """
    said = {level: source for source in named for level in source.levels}
    for inner, outer in pairwise(level for level in _tiers(said) if level in said):
        above: dict[str, str] = {}
        for host in hosts:
            low, high = (said[level].levels[level][host] for level in (inner, outer))
            first = above.setdefault(low, host)
            other = said[outer].levels[outer][first]
            if other != high:
                raise TopologyError(
                    f"{said[outer].source} has {inner} {low!r} below {outer} {other!r} (host "
                    f"{first!r}) and {high!r} (host {host!r}); a switch has one above it, and each "
                    f"a name of its own"
                )


def _tiers(levels: Mapping[str, object]) -> list[str]:
    numbers = sorted(int(one[5:]) for one in levels if one[:5] == "tier-" and one[5:].isdecimal())
    return [*SWITCHES, *(f"tier-{number}" for number in numbers)]
