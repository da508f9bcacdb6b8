"""Read descriptions of machines: sizes, hostfiles, node lists and SLURM's topology files.

Sources of the formats:

- Open MPI hostfile, https://docs.open-mpi.org/en/v5.0.x/launching-apps/scheduling.html
- DeepSpeed hostfile, https://www.deepspeed.ai/getting-started/
- Hydra (MPICH) hostfile, https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to
- topology.conf(5), topology.yaml(5) and node lists, https://slurm.schedmd.com
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_world_size, check_choice
from hypercomm.layout.text import plural, pluralize, short_repr
from hypercomm.lazy import required
from hypercomm.tools.place.topology import Level, Topology

Hosts = Sequence[str] | Sequence[tuple[str, int]]
"""For each rank, its host, or a pair of its host and the index of its GPU on the host."""

MachineSource = int | str | os.PathLike[str] | Mapping[str, str] | Hosts
On = MachineSource | Topology | Sequence[MachineSource]
"""The sources that `read_topology` accepts."""

_MOST_LEVELS = 20

_SWITCHES = ("leaf", "spine", "core")
_LEVELS = ("host", "domain", *_SWITCHES)
_Names = Mapping[str, str]
_TEXTS = (
    "GPUs per host (8, '8,72' or 'host=8,domain=72'), a hostfile, a node list such as "
    "'node[01-09]', or SLURM's topology.conf or topology.yaml"
)
"""The forms of a source that is text."""

_KINDS = f"{_TEXTS}, a mapping of hosts to switches, or a list with the host of each rank"


@attrs.frozen
class _Found:
    """The content of one source.

    Attributes:
        source: The name of the source in error messages.
        slots: The number of GPUs of each host, or None if unknown. Hosts are in the order of ranks.
        levels: For each level, the unit of each host: its NVLink domain or its switch.
        sizes: The number of GPUs in each unit, by level, if the source names no hosts.
        hosts: The host of each rank, if the source lists the hosts rank by rank.
        gpus: The index of each rank's GPU on its host, if the source lists these indices.
    """

    source: str
    slots: Mapping[str, int | None] = attrs.field(factory=dict)
    levels: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)
    sizes: Mapping[str, int] = attrs.field(factory=dict)
    hosts: Sequence[str] = ()
    gpus: tuple[int, ...] | None = None


def read_topology(on: On, world_size: int | None = None) -> Topology:
    """Return the host, NVLink domain and switches of each rank of a world.

    Ranks fill the hosts in the order of the source, as launchers do, unless the source lists the
    host of each rank.

    A source is one of

    * the GPUs per host, 8, or per unit of each level, "8,72" or "host=8,domain=72";
    * the path of a hostfile, or of SLURM's topology.conf or topology.yaml;
    * a node list as SLURM writes it, "node[1-4]";
    * a mapping of hosts to leaf switches, or the path of a YAML file with such a mapping;
    * a list with the host of each rank, ["a", "b", "a", "b"], or with the host and GPU of each
      rank, [("a", 0), ("b", 0)].

    Several sources complete each other, and an earlier source has precedence: ["hostfile", 8]
    assigns 8 GPUs to each host that the hostfile lists without a number. The first source that
    names hosts sets their order. If no source gives the number of GPUs, the ranks are spread evenly
    over the hosts.

    Args:
        on: A source, or a list of several sources. If `on` is a `Topology`, its first `world_size`
            ranks are used.
        world_size: The number of ranks. Default: one rank for each GPU of the machine.

    Returns:
        The known levels, innermost first.

    Raises:
        LayoutError: A source cannot be read or lacks a host, or the machine has fewer GPUs than
            ranks. The message names the file and the line.
        MissingPackageError: A node list needs python-hostlist, or a YAML file needs pyyaml.

    Example:
        >>> topology = read_topology({"a": "s1", "b": "s2", "c": "s1"}, 6)
        >>> topology.level("leaf").of_rank.tolist(), topology.level("leaf").names
        ([0, 0, 1, 1, 0, 0], ('s1', 's2'))
        >>> read_topology(["node[1-4]", "8,16"]).names
        ('host', 'domain')
        >>> read_topology(["a", "b", "a", "b"]).level("host").of_rank.tolist()
        [0, 1, 0, 1]
    """
    if world_size is not None:
        as_world_size(world_size, "world_size")
    topology = _read_machine(on, world_size)
    if world_size is None or world_size == topology.world_size:
        return topology
    if world_size > topology.world_size:
        gpus = pluralize(topology.world_size, "GPU")
        hint = ""
        if _lists_hosts(on):
            hint = (
                "; on= (--on) was read as the host of each rank, because its values are not files"
            )
        raise LayoutError(f"{world_size:,} ranks need more than {gpus}{hint}")
    return topology.select(range(world_size))


def _read_machine(on: Any, world_size: int | None) -> Topology:
    """Return the machine that `on` describes, with all its ranks."""
    if isinstance(on, Topology):
        return on
    is_several = isinstance(on, (list, tuple)) and not _lists_hosts(on)
    sources = [_read(one) for one in (on if is_several else [on])]
    sizes = _merged_sizes(sources)
    named = [source for source in sources if source.slots]
    levels: dict[str, Level] = {}
    gpus = None
    note = ""
    if named:
        slots, note = _slots(named, sizes.get("host"), world_size)
        hosts = named[0].hosts or [host for host, count in slots.items() for _ in range(count)]
        gpus = named[0].gpus
        levels["host"] = Level.of("host", hosts)
        for source in named:
            for name, unit_of in source.levels.items():
                missing = [host for host in slots if host not in unit_of]
                if missing:
                    raise LayoutError(f"{source.source} has no {name} for {missing[0]!r}")
                levels.setdefault(name, Level.of(name, [unit_of[host] for host in hosts]))
        world_size = len(hosts)
    elif world_size is None:
        raise LayoutError(
            "the machine names no hosts, so the number of ranks is unknown: give all sizes, or "
            "world_size= (--world-size), or name the hosts, as in on=['node[1-4]', 8] (--on "
            "'node[1-4]' --on 8)"
        )
    for name, size in sizes.items():
        if name not in levels:
            units = np.arange(world_size)
            if named and named[0].hosts:  # a unit has neighbouring GPUs, not neighbouring ranks
                units[np.argsort(levels["host"].of_rank, kind="stable")] = units.copy()
            units //= size  # in place, because there may be 2**24 ranks
            levels[name] = Level(name, units)
    known = [levels[name] for name in sorted(levels, key=place_of)]
    return Topology(known, gpus=gpus, note=note)


def _merged_sizes(sources: Sequence[_Found]) -> dict[str, int]:
    """Return the number of GPUs in each unit, by level, the innermost level first."""
    found: dict[str, int] = {}
    for source in reversed(sources):
        found |= source.sizes
    sizes = {name: found[name] for name in sorted(found, key=place_of)}
    for (inner, small), (outer, large) in pairwise(sizes.items()):
        if large % small or large == small:
            raise LayoutError(
                f"a {outer} of {pluralize(large, 'GPU')} must contain 2 or more whole "
                f"{plural(inner)} of {small}; {max(large // small, 2) * small} GPUs would work"
            )
    return sizes


def _slots(
    named: Sequence[_Found], per_host: int | None, world_size: int | None
) -> tuple[dict[str, int], str]:
    """Return the number of GPUs of each host, in the order of ranks, and a note on assumptions."""
    note = ""
    known: dict[str, int] = {}
    for source in reversed(named):
        known |= {host: count for host, count in source.slots.items() if count is not None}
    unknown = [host for host in named[0].slots if host not in known]
    if unknown and per_host is None:
        left = (world_size or 0) - sum(known.get(host, 0) for host in named[0].slots)
        per_host, rest = divmod(left, len(unknown))
        if per_host < 1 or rest:
            text = f"{named[0].source} gives no number of GPUs for {unknown[0]!r}"
            raise LayoutError(
                f"{text}; add the number of GPUs per host, as in on=[..., 8] (--on 8)"
            )
        note = (
            f"{pluralize(per_host, 'GPU')} per host: {named[0].source} gives no number, so "
            f"{pluralize(left, 'rank')} are spread evenly over {pluralize(len(unknown), 'host')}; "
            f"give the number, as in on=[..., 8] (--on 8)"
        )
    slots = {host: known.get(host, per_host or 0) for host in named[0].slots}
    as_world_size(sum(slots.values()), f"the number of GPUs of all hosts of {named[0].source}")
    return slots, note


def tier(number: int) -> str:
    """Return the name of a level of switches. The switches of level 0 are connected to the hosts.

    Example:
        >>> tier(0), tier(1), tier(5)
        ('leaf', 'spine', 'tier-5')
    """
    return _SWITCHES[number] if number < len(_SWITCHES) else f"tier-{number}"


def place_of(level: str) -> int:
    """Return the sort key of a level, innermost first. Unknown levels are between domain and leaf.

    Example:
        >>> sorted(["spine", "tier-3", "host", "rack", "domain"], key=place_of)
        ['host', 'domain', 'rack', 'spine', 'tier-3']
    """
    if re.fullmatch(r"tier-[0-9]{1,9}", level):
        return len(_LEVELS) + 1 + int(level[5:])
    order = ("host", "domain", "", *_SWITCHES)
    return order.index(level if level in order else "")


# ---- one source ---------------------------------------------------------------------------------


_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def _lists_hosts(on: object) -> bool:
    """Return whether `on` lists the host of each rank, rather than several sources."""
    if not isinstance(on, (list, tuple)) or len(on) < 2:
        return False
    if all(isinstance(one, tuple) for one in on):
        return True
    return all(
        isinstance(one, str)
        and _HOST.fullmatch(one) is not None
        and not one.isdecimal()
        and not os.path.isfile(one)  # noqa: PTH113 - Path raises for a name that is too long
        for one in on
    )


def _read_hosts(on: Sequence[Any]) -> _Found:
    """Read a list with the host of each rank, or with the host and GPU of each rank."""
    if isinstance(on[0], str):
        return _Found("the list of hosts", Counter(on), hosts=on)
    for pair in on:
        if len(pair) != 2 or not isinstance(pair[0], str) or type(pair[1]) is not int:
            raise LayoutError(
                f"on= contains {short_repr(pair)}, which is not a pair of a host and a GPU; write "
                f"'node1', or ('node1', 0) with the index of the GPU"
            )
    (host, gpu), count = Counter(on).most_common(1)[0]
    if count > 1:
        raise LayoutError(f"on= assigns GPU {gpu} of host {host!r} to {count} ranks")
    hosts, gpus = zip(*on, strict=True)
    return _Found("the list of hosts", Counter(hosts), hosts=hosts, gpus=gpus)


def _read(on: object) -> _Found:
    if _lists_hosts(on):
        return _read_hosts(on)  # type: ignore[arg-type]
    if isinstance(on, int):
        as_world_size(on, "the number of GPUs per host")
        return _Found(f"on={on}", sizes={"host": on})
    if isinstance(on, Mapping):
        return _of_content(on, "on=")
    if not isinstance(on, (str, os.PathLike)):
        raise LayoutError(f"on= (--on) must be {_KINDS}; got a value of type {type(on).__name__}")
    text = os.fspath(on)
    if os.path.isfile(text):  # noqa: PTH113 - Path raises for a name that is too long
        found = _read_file(text)
    elif all("=" in part or part.strip(" -").isdecimal() for part in text.split(",")):
        return _read_sizes(text)
    elif re.search(r"[\[,]", text) and not re.search(r"[/\\{]", text):
        found = _Found(f"the node list {short_repr(text)}", dict.fromkeys(_expand_hosts(text)))
    else:
        raise LayoutError(f"{short_repr(text)} is not a file; on= (--on) must be {_TEXTS}")
    if not found.slots:
        raise LayoutError(f"{found.source} names no host")
    return found


def _read_sizes(text: str) -> _Found:
    """Read "8", "8,72" or "host=8,domain=72"."""
    sizes: dict[str, int] = {}
    for position, part in enumerate(text.split(",")):
        name, equals, number = (piece.strip() for piece in part.rpartition("="))
        if not equals and position < len(_LEVELS):
            name = _LEVELS[position]
        if not name or name in sizes or not re.fullmatch(r"[0-9]{1,9}", number):
            raise LayoutError(
                f"{short_repr(part)} cannot be read; write '8,72' or 'host=8,domain=72'"
            )
        if place_of(name) == place_of(""):
            check_choice(f"the level in {short_repr(text)}", name, _LEVELS, LayoutError)
        sizes[name] = int(number)
        as_world_size(sizes[name], f"the number of GPUs in {short_repr(part)}")
    return _Found(f"on={short_repr(text)}", sizes=sizes)


def _read_file(path: str) -> _Found:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LayoutError(f"{path} cannot be read: {error}") from error
    if Path(path).suffix.lower() in {".yaml", ".yml"}:
        return _read_yaml(text, path)
    if re.search(r"(?im)^[ \t]*(switchname|blockname|blocksizes)[ \t]*=", text):
        return _read_conf(text, path)
    return _read_hostfile(text, path)


def _of_content(content: Any, source: str) -> _Found:
    """Read the leaf switch of each host, or the list of topologies of a topology.yaml."""
    if isinstance(content, list):
        return _of_topologies(content, source)
    pairs = content.items() if isinstance(content, Mapping) else []
    if not pairs or not all(isinstance(text, str) and text for pair in pairs for text in pair):
        raise LayoutError(f"{source} must map the name of each host to the name of its switch")
    return _Found(source, dict.fromkeys(content), {"leaf": content})


_HOST_OPTIONS = ("slots", "max_slots", "max-slots", "user", "binding", "ifname")
"""The options that Open MPI and Hydra accept after a host. `slots` is the number of ranks."""


def _read_hostfile(text: str, source: str) -> _Found:
    """Read "name slots=N" (Open MPI, DeepSpeed) or "name:N" (Hydra) in each line."""
    slots: dict[str, int | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, _, count = words[0].rpartition(":")
        has_count = bool(host) and ":" not in host  # an IPv6 address has several colons
        host, counts = (host, [count]) if has_count else (words[0], [])
        options = [word.partition("=") for word in words[1:]]
        counts += [value for option, _, value in options if option == "slots"]
        known = all(option in _HOST_OPTIONS and equals for option, equals, _ in options)
        is_count = all(re.fullmatch(r"0{0,5}[1-9][0-9]{0,5}", one) for one in counts)
        if host in slots or not known or not is_count or len(counts) > 1:
            text = f"{source}, line {number}: cannot read {short_repr(line.strip())}"
            raise LayoutError(f"{text}; write each host once, as 'node01 slots=8' or 'node01:8'")
        slots[host] = int(counts[0]) if counts else None
    return _Found(source, slots)


def _expand_hosts(text: str, where: str = "") -> list[str]:
    """Return the hosts of a node list such as "node[01-09,12]-ib,login"."""
    text = re.sub(r"\s*,\s*", ",", text.strip())
    hosts = _expand_brackets(text, where) if re.search(r"[\[\]]", text) else text.split(",")
    hosts = [host for host in hosts if host]
    if re.search(r"\s", text) or len({*hosts}) < len(hosts):
        raise LayoutError(f"{where}{short_repr(text)} has a space, or names a host twice")
    return hosts


def _expand_brackets(text: str, where: str) -> list[str]:
    hostlist = required("hostlist", short_repr(text))
    try:
        return list(hostlist.expand_hostlist(text, allow_duplicates=True))
    except (hostlist.BadHostlist, RecursionError, ValueError) as error:
        raise LayoutError(
            f"{where}{short_repr(text)} is not a node list: {error}; write it like 'node[01-09]'"
        ) from error


# ---- SLURM's topology files ---------------------------------------------------------------------

_FIELD = re.compile(r'\b(\w+)\s*=\s*(?:"([^"]*)"|([^\s"=]+))')
_FIELDS = {"switchname", "blockname", "nodes", "switches", "blocksizes", "linkspeed"}
_FIELDS |= {"level", "blockindex", "blocksize", "aggregatedblock"}  # from `scontrol show topology`


def _read_conf(text: str, source: str) -> _Found:
    units = []
    for number, line in _logical_lines(text):
        where = f"{source}, line {number}"
        given = {name.lower(): quoted or plain for name, quoted, plain in _FIELD.findall(line)}
        if _FIELD.sub("", line).strip() or not {*given} <= _FIELDS:
            raise LayoutError(
                f"{where}: cannot read {short_repr(line)}; see topology.conf(5) for the fields"
            )
        if "level" in given and "switches" in given:  # scontrol repeats the hosts of the children
            given.pop("nodes", None)
        if {"switchname", "blockname"} & {*given}:
            units.append((where, given))
    return _of_units(units, source)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line that has content, with its number. A backslash joins two lines."""
    number = 1
    for found in re.finditer(r"(?:[^#\n]*\\[ \t]*\n)*.*\n?", text):
        joined = re.sub(r"#.*|\\[ \t]*\n", " ", found[0]).strip()
        if joined:
            yield number, joined
        number += found[0].count("\n")


def _read_yaml(text: str, source: str) -> _Found:
    yaml = required("yaml", source)
    try:
        # A BaseLoader makes texts, lists and dicts only.
        content = yaml.load(text, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise LayoutError(f"{source} is not valid YAML: {text}") from error
    return _of_content(content, source)


def _of_topologies(content: list[Any], source: str) -> _Found:
    """Read the default topology of a topology.yaml, or its only topology."""
    with suppress(AttributeError, IndexError, KeyError, TypeError):
        default = [one for one in content if one.get("cluster_default", "").lower() == "true"]
        if len(content) > 1 and len(default) != 1:
            text = f"{source} has {len(content)} topologies, {len(default)} with cluster_default"
            raise LayoutError(f"{text}; write cluster_default: true in one of them")
        units = _units_of_topology((default or content)[0], source)
        if units:
            return _of_units(units, source)
    raise LayoutError(f"{source} has no tree or blocks in its default topology")


def _units_of_topology(topology: Mapping[str, Any], source: str) -> list[tuple[str, _Names]]:
    """Return the units of a topology in the form of topology.conf."""
    units: list[tuple[str, _Names]] = []
    for section, key, kind in (("tree", "switches", "switch"), ("block", "blocks", "block")):
        for number, unit in enumerate((topology.get(section) or {key: []})[key], 1):
            given = {f"{kind}name": unit[kind], "nodes": unit.get("nodes", "")}
            given["switches"] = unit.get("children", "")
            units.append((f"{source}, {kind} {number}", given))
    return units


def _of_units(units: Sequence[tuple[str, _Names]], source: str) -> _Found:
    leaf_of: dict[str, str] = {}
    block_of: dict[str, str] = {}
    parent: dict[str, str] = {}
    switches = {given["switchname"] for _, given in units if "switchname" in given}
    defined: set[tuple[str, str]] = set()
    for where, given in units:
        kind, unit_of = ("switch", leaf_of) if "switchname" in given else ("block", block_of)
        name = given[f"{kind}name"]
        if (kind, name) in defined:
            raise LayoutError(f"{where} defines {kind} {short_repr(name)} again")
        defined.add((kind, name))
        for host in _expand_hosts(given.get("nodes", ""), f"{where}: "):
            if unit_of.setdefault(host, name) != name:
                raise LayoutError(
                    f"{where} lists host {host!r}, which another {kind} already lists"
                )
        for child in _expand_hosts(given.get("switches", ""), f"{where}: "):
            if child not in switches or child == name or parent.setdefault(child, name) != name:
                raise LayoutError(
                    f"{where} lists child {child!r}, which is not another switch, or which has two "
                    f"parents"
                )
    levels: dict[str, _Names] = {"domain": block_of} if block_of else {}
    # A branch with fewer levels than others repeats its highest switch.
    switch_of: list[_Names] = [{}, leaf_of]
    while switch_of[-1] != switch_of[-2]:
        above = {host: parent.get(switch, switch) for host, switch in switch_of[-1].items()}
        switch_of.append(above)
        if len(switch_of) > _MOST_LEVELS:
            raise LayoutError(
                f"{source}: the switches form a cycle, or have {_MOST_LEVELS} levels or more"
            )
    levels |= {tier(number): found for number, found in enumerate(switch_of[1:-1])}
    return _Found(source, dict.fromkeys([*block_of, *leaf_of]), levels)
