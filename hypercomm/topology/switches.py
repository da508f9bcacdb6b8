"""Switches and blocks: SLURM's topology.conf, and its topology.yaml.

Sources: topology.conf(5), https://slurm.schedmd.com/topology.conf.html, and topology.yaml(5),
https://slurm.schedmd.com/topology.yaml.html: a tree of switches, or blocks, as NVLink domains are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from hypercomm.errors import TopologyError
from hypercomm.layout.text import shown
from hypercomm.topology.found import Found, tier
from hypercomm.topology.node_lists import expand_hosts

_NAMES = ("switchname", "blockname", "nodes", "switches", "blocksizes")
_IGNORED = ("linkspeed", "level", "blockindex", "blocksize", "aggregatedblock")
"""What says nothing of places, but for sizes; all but the first are of `scontrol show topology`."""

_WORD = re.compile(r'(?:"[^"]*"|[^\s"])+|"')


@attrs.frozen
class _Unit:
    """A switch or a block: where it is named, and what is below it."""

    where: str
    name: str
    nodes: Sequence[str] = ()
    switches: Sequence[str] = ()


def looks_like_switches(text: str) -> bool:
    r"""Tell whether a text is a topology.conf.

    Example:
        >>> looks_like_switches("#\nBlockName=b Nodes=n[1-2]"), looks_like_switches("n1 slots=2")
        (True, False)
    """
    return bool(
        re.search(r"^\s*(switchname|blockname|blocksizes)\s*=", text, re.IGNORECASE | re.MULTILINE)
    )


def read_switches(text: str, source: str) -> Found:
    r"""Read a topology.conf, of switches or of blocks.

    Args:
        text: What it holds.
        source: How errors name it.

    Raises:
        TopologyError: A line cannot be read, a host or switch has two places, or a switch that is
            named is not there; says which line.

    Example:
        >>> lines = "SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n3\nSwitchName=top Switches=a,b"
        >>> levels = read_switches(lines, "topology.conf").levels
        >>> dict(levels["leaf"]), dict(levels["spine"])
        ({'n1': 'a', 'n2': 'a', 'n3': 'b'}, {'n1': 'top', 'n2': 'top', 'n3': 'top'})
    """
    switches, blocks, sizes = [], [], [0]
    for number, line in _lines(text):
        where = f"{source}, line {number}"
        given = _fields(line, where)
        if "level" in given and "switches" in given:  # scontrol repeats the hosts of those below
            given.pop("nodes", None)
        lists = {name: _expanded(given.get(name, ""), where) for name in ("nodes", "switches")}
        if "switchname" in given:
            switches.append(_Unit(where, given["switchname"], **lists))
        elif "blockname" in given:
            blocks.append(_Unit(where, given["blockname"], lists["nodes"]))
            sizes[0] = sizes[0] or _count(given.get("blocksize", "0"), where)
        elif "aggregatedblock" in given:
            size = _count(given.get("blocksize", "0"), where)
            sizes += [] if size in sizes else [size]
        elif "blocksizes" in given:
            sizes = [_count(size, where) for size in given["blocksizes"].split(",")]
        else:
            raise TopologyError(f"{where} names no switch and no block: {shown(line)}")
    return _found(switches, blocks, sizes, source)


def read_slurm_yaml(content: Sequence[Any], source: str, wanted: str = "") -> Found:
    """Read what a topology.yaml holds: its default topology, or the one that is wanted.

    What the other topologies say of the same hosts is read, too: often one of them has the blocks,
    another the tree.

    Args:
        content: The list of topologies.
        source: How errors name it.
        wanted: The name of one; default: that with `cluster_default`, else the first one.

    Raises:
        TopologyError: As for `read_switches`, or there is no such topology.

    Example:
        >>> block = {"block_sizes": [2], "blocks": [{"block": "b1", "nodes": "n[1-2]"}]}
        >>> found = read_slurm_yaml([{"topology": "racks", "block": block}], "topology.yaml")
        >>> dict(found.levels["domain"])
        {'n1': 'b1', 'n2': 'b1'}
    """
    every = {str(_mapping(one, source).get("topology")): one for one in content}
    default = [name for name, one in every.items() if one.get("cluster_default") is True]
    name = wanted or (default or [*every])[0]
    if name not in every:
        raise TopologyError(f"{source} has no topology {wanted!r}; there are {[*every]}")
    found = _of_yaml(every.pop(name), f"{source}, topology {name!r}")
    if found is None:
        others = (
            f"; there are also {[*every]}: name one behind the file, as in topology.yaml#racks"
            if every
            else f"; give it one of the two, or leave {source} out"
        )
        raise TopologyError(f"{source}, topology {name!r} is neither a tree nor of blocks{others}")
    levels = dict(found.levels)
    for other, one in every.items():
        more = _of_yaml(one, f"{source}, topology {other!r}")
        if more is None or not found.slots.keys() & more.slots.keys():
            continue
        more_levels = {
            level: held if level in _tier_names(more) else _or_itself(held, found.slots)
            for level, held in more.levels.items()
        }
        for level, held in more_levels.items():
            if found.slots.keys() <= held.keys():
                levels.setdefault(level, held)
    return Found(source, found.slots, levels)


def _of_yaml(topology: Mapping[str, Any], where: str) -> Found | None:
    """Read one topology; None where it has no levels."""
    tree, block = topology.get("tree"), topology.get("block")
    if tree is None and block is None:
        return None
    switches: list[_Unit] = []
    blocks: list[_Unit] = []
    sizes = [0]
    if tree is not None:
        switches = [_unit(one, "switch", where) for one in _list(tree, "switches", where)]
    if block is not None:
        blocks = [_unit(one, "block", where) for one in _list(block, "blocks", where)]
        given = _mapping(block, where).get("block_sizes") or [0]
        sizes = [
            _count(str(size), where) for size in (given if isinstance(given, list) else [given])
        ]
    return _found(switches, blocks, sizes, where)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that say something, by number; a backslash joins a line with the next."""
    begun, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        start = start if begun else number
        begun += line.partition("#")[0].strip()
        if begun.endswith("\\"):
            begun = begun[:-1] + " "
            continue
        if begun.strip():
            yield start, begun.strip()
        begun = ""
    if begun.strip():
        yield start, begun.strip()


def _fields(line: str, where: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for word in _WORD.findall(re.sub(r"\s*=\s*", "=", line)):
        name, _, value = word.partition("=")
        name, value = name.lower(), value.replace('"', "").strip()
        if name not in _NAMES + _IGNORED or not value or "=" in value or name in given:
            raise TopologyError(
                f"{where} has {shown(word)}; write it like 'SwitchName=s1 Nodes=node[01-08]', "
                f"'SwitchName=top Switches=s[1-2]', 'BlockName=b1 Nodes=node[01-18]' or "
                f"'BlockSizes=18'"
            )
        given[name] = value
    return given


def _expanded(text: str, where: str) -> list[str]:
    try:
        return expand_hosts(text) if text else []
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from error


def _count(text: str, where: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text):
        raise TopologyError(f"{where} has {shown(text)}, which is no number of hosts of a block")
    return int(text)


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TopologyError(f"{where} has {shown(value)} where names and values belong")
    return value


def _list(value: object, name: str, where: str) -> list[Any]:
    found = _mapping(value, where).get(name)
    if not isinstance(found, list):
        raise TopologyError(f"{where} needs a list of {name}, got {shown(found)}")
    return found


def _unit(value: object, kind: str, where: str) -> _Unit:
    one = _mapping(value, where)
    name, nodes, children = one.get(kind), one.get("nodes") or "", one.get("children") or ""
    if not all(isinstance(text, (str, int)) for text in (name, nodes, children)):
        raise TopologyError(f"{where} has no {kind} with a name in {shown(dict(one))}")
    place = f"{where}, {kind} {name}"
    return _Unit(place, str(name), _expanded(str(nodes), place), _expanded(str(children), place))


def _found(
    switches: Sequence[_Unit], blocks: Sequence[_Unit], sizes: Sequence[int], source: str
) -> Found:
    levels: dict[str, dict[str, str]] = {}
    tiers = _tiers(switches, source) if switches else {}
    if blocks:
        levels["domain"] = _below(blocks, "block")
        numbers = {unit.name: number for number, unit in enumerate(blocks)}
        for size in sizes[1:]:
            together = size // max(sizes[0], 1)
            levels[f"block-{size}"] = {
                host: f"block-{size} {numbers[block] // max(together, 1)}"
                for host, block in levels["domain"].items()
            }
    for name, held in levels.items():
        levels[name] = _or_itself(
            held, dict.fromkeys(host for one in tiers.values() for host in one)
        )
    levels.update(tiers)
    hosts = dict.fromkeys(host for level in levels.values() for host in level)
    if not hosts:
        raise TopologyError(f"{source} holds no host")
    for name, level in levels.items():
        absent = next((host for host in hosts if host not in level), None)
        if absent is not None:
            raise TopologyError(f"{source} has no {name} for host {absent!r}, which it names")
    return Found(source, dict.fromkeys(hosts), levels)


def _or_itself(held: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """The block of each host; one that is in none is one by itself, as ordinary nodes are."""
    return {**held, **{host: host for host in hosts if host not in held}}


def _tier_names(found: Found) -> set[str]:
    """The levels of switches."""
    return {tier(number) for number in range(len(found.levels))} & found.levels.keys()


def _below(units: Sequence[_Unit], kind: str) -> dict[str, str]:
    """Which unit holds each host directly."""
    held: dict[str, str] = {}
    named: dict[str, str] = {}
    for unit in units:
        if unit.name in named:
            raise TopologyError(
                f"{unit.where} names {kind} {unit.name!r}, as {named[unit.name]} did"
            )
        named[unit.name] = unit.where
        for host in unit.nodes:
            if host in held:
                raise TopologyError(
                    f"{unit.where} puts host {host!r} into {kind} {unit.name!r}; it is in "
                    f"{held[host]!r} already ({named[held[host]]}); name each host once"
                )
            held[host] = unit.name
    return held


def _tiers(units: Sequence[_Unit], source: str) -> dict[str, dict[str, str]]:
    """Each level of switches, from those that hosts are connected to."""
    held, known = _below(units, "switch"), {unit.name for unit in units}
    above: dict[str, str] = {}
    for unit in units:
        for child in unit.switches:
            if child not in known:
                raise TopologyError(
                    f"{unit.where} has {child!r} below {unit.name!r}, which no line describes"
                )
            if above.setdefault(child, unit.name) != unit.name:
                raise TopologyError(
                    f"{unit.where} has switch {child!r} below {unit.name!r}; it is below "
                    f"{above[child]!r} already, and a tree has one above each"
                )
    chains: dict[str, list[str]] = {}
    for name in dict.fromkeys(held.values()):
        chain = [name]
        while chain[-1] in above:
            chain.append(above[chain[-1]])
            if len(chain) > len(known):
                raise TopologyError(
                    f"{source}: switches {sorted({*chain})} are below each other, in a circle"
                )
        chains[name] = chain
    height = max((len(chain) for chain in chains.values()), default=0)
    return {
        tier(level): {
            host: chains[leaf][min(level, len(chains[leaf]) - 1)] for host, leaf in held.items()
        }
        for level in range(height)
    }
