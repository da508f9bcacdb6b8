"""Reading a topology of whatever says where ranks are: one reader for each kind, in one table."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hypercomm.errors import MissingPackageError, TopologyError
from hypercomm.layout.checks import as_world_size, positive
from hypercomm.layout.text import counted, shown, some_of
from hypercomm.topology.agreeing import check_tree, check_whole
from hypercomm.topology.blocks import is_blocks, read_blocks
from hypercomm.topology.found import Found, check_complete, check_size, text_of
from hypercomm.topology.hostfiles import read_hostfile
from hypercomm.topology.labels import read_labels
from hypercomm.topology.levels import Level, Topology
from hypercomm.topology.names import ARGUMENTS, Names
from hypercomm.topology.node_lists import expand_hosts
from hypercomm.topology.switches import looks_like_switches, read_slurm_yaml, read_switches

Source = int | str | os.PathLike[str] | Mapping[str, Any]
On = Source | Topology | Sequence[Source]
"""What says where ranks are."""

ORDER = ("host", "sub-domain", "domain", "", "leaf", "spine", "core")
"""Levels from the innermost; "" are those of other names."""

LIVE = "live"
"""What stands for the job that runs."""

_KINDS = (
    "GPUs for each host (8, '8,72', 'host=8,domain=72'), a hostfile, a node list such as "
    "'node[01-09]', SLURM's topology.conf or topology.yaml, or labels or switches by host as JSON "
    "or YAML"
)


def _read_json(text: str, source: str) -> Found:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
        if twice:
            raise TopologyError(f"{source} names {twice[0]!r} twice; name each host once")
        return dict(pairs)

    try:
        content = json.loads(text, object_pairs_hook=once)
    except TopologyError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5,000 digits
        raise TopologyError(f"{source} is no JSON: {error}") from error
    return _read_content(content, source)


def _read_yaml(text: str, source: str) -> Found:
    try:
        import yaml
    except ImportError as error:
        raise MissingPackageError(
            f"{source} needs pyyaml: pip install 'hypercomm[topology]', or write it as JSON"
        ) from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_keys(node, source)
        content = None if node is None else loader.construct_document(node)
    except TopologyError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise TopologyError(f"{source} is no YAML: {' '.join(str(error).split())}") from error
    return _read_content(content, source)


def _check_keys(node: Any, source: str) -> None:
    """Refuse a mapping of YAML that has a key twice: the last one would count, silently."""
    waiting, seen = [node], set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen or isinstance(one.value, str):
            continue
        seen.add(id(one))
        keys: set[str] = set()
        for child in one.value:
            pair = child if isinstance(child, tuple) else (child,)
            waiting += pair
            if len(pair) == 2 and isinstance(pair[0].value, str):
                name, line = pair[0].value, pair[0].start_mark.line + 1
                if name in keys:
                    raise TopologyError(
                        f"{source}, line {line} names {name!r} twice; write each name once"
                    )
                keys.add(name)


def _read_content(content: object, source: str) -> Found:
    """Read what a file of JSON or YAML holds."""
    if isinstance(content, list) and content:
        return read_slurm_yaml(content, source, source.partition("#")[2])
    if isinstance(content, Mapping) and content:
        return read_labels(content, source)
    raise TopologyError(
        f"{source} holds {shown(content)}; it must map hosts to switches or labels, or list "
        f"SLURM's topologies"
    )


READERS: tuple[tuple[str, Callable[[str, str], bool], Callable[[str, str], Found]], ...] = (
    ("JSON", lambda suffix, text: suffix == ".json" or text.lstrip()[:1] == "{", _read_json),
    ("YAML", lambda suffix, _: suffix in {".yaml", ".yml"}, _read_yaml),
    ("topology.conf", lambda _, text: looks_like_switches(text), read_switches),
    ("hostfile", lambda _, __: True, read_hostfile),
)
"""The kinds of files: the first one whose test a file's suffix and text pass reads it."""


def read_topology(
    on: On, world_size: int | None = None, *, gpus_per_host: int | None = None
) -> Topology:
    """Read where the ranks of a world are.

    Ranks fill the hosts in the order in which these are named, as launchers do.

    Args:
        on: GPUs for each host, 8; those of each level too, "8,72" or "host=8,domain=72"; a path of
            a hostfile, of SLURM's topology.conf or topology.yaml (topology.yaml#racks for one that
            is not its default), or of switches or Topograph's labels by host as JSON or YAML; a
            node list as SLURM writes it; a mapping of hosts to switches or labels; or several of
            these: the first one names the hosts in order, the others say more of them. A `Topology`
            is taken as it is.
        world_size: The number of ranks; default: as many as there are GPUs.
        gpus_per_host: The GPUs of hosts of which nothing tells. Default: the ranks are spread
            evenly.

    Returns:
        The levels that are known, innermost first.

    Raises:
        TopologyError: Something cannot be read, holds not all hosts, contradicts itself, or has
            fewer GPUs than ranks; names file and line.
        MissingPackageError: A file of YAML needs pyyaml.

    Example:
        >>> topology = read_topology({"a": "s1", "b": "s2", "c": "s1"}, 6)
        >>> topology.level("leaf").of_rank.tolist(), topology.level("leaf").names
        ([0, 0, 1, 1, 0, 0], ('s1', 's2'))
        >>> read_topology(["node[1-4]", "8,16"]).names
        ('host', 'domain')
    """
    return read_named(on, world_size, gpus_per_host, ARGUMENTS)


def read_named(on: On, world_size: int | None, gpus_per_host: int | None, names: Names) -> Topology:
    """Read where the ranks of a world are, where errors call arguments by other names."""
    world_size = None if world_size is None else as_world_size(world_size)
    if isinstance(on, Topology):
        return _cut(on, world_size)
    sources = _sources(on, gpus_per_host, names)
    if any(source.slots for source in sources):
        return _cut(_of_hosts(sources, world_size, names), world_size)
    if world_size is None:
        raise TopologyError(
            f"{sources[0].source} says how large units are, but not how many: give world_size"
        )
    return _of_blocks(sources, world_size)


def read_machine(
    on: On,
    ranks: int | None = None,
    gpus_per_host: int | None = None,
    names: Names = ARGUMENTS,
) -> Callable[[int], Topology]:
    """Read all GPUs that there are, those included that a job of so many ranks leaves out.

    Args:
        on: As for `read_topology`.
        ranks: How many ranks hosts of unknown size have together.
        gpus_per_host: As for `read_topology`.
        names: What errors call arguments.

    Returns:
        What gives the machine when told how many GPUs are needed: one that is given by blocks
        alone has as many whole ones, any other is as it is.

    Example:
        >>> machine = read_machine("4,72")
        >>> machine(72).world_size, machine(100).world_size
        (72, 144)
        >>> read_machine({"a": "s", "b": "s"}, 6)(100).world_size
        6
    """
    if isinstance(on, Topology):
        return lambda _: on
    sources = _sources(on, gpus_per_host, names)
    if any(source.slots for source in sources):
        topology = _of_hosts(sources, ranks, names)
        return lambda _: topology
    largest = max(_merged_blocks(sources).values())
    return lambda needed: _of_blocks(sources, -(-needed // largest) * largest)


def _sources(on: On, gpus_per_host: int | None, names: Names) -> list[Found]:
    """Read all that is said of a machine."""
    several = list(on) if isinstance(on, (list, tuple)) else [on]
    found = [_read(one, names) for one in several or [""]]
    if gpus_per_host is not None:
        argument = names["gpus_per_host"]
        size = check_size(positive(gpus_per_host, argument), argument)
        found.append(Found(argument, every={"host": size}))
    return found


def _of_hosts(sources: Sequence[Found], ranks: int | None, names: Names) -> Topology:
    """The levels of hosts that are named, each as often as it has GPUs."""
    argument = names["gpus_per_host"]
    named = [source for source in sources if source.slots]
    known = {host for one in named for host, count in one.slots.items() if count is not None}
    if known >= named[0].slots.keys():
        sources = [one for one in sources if one.source != argument]
    every = _merged_blocks(sources)
    told = next((one for one in sources if "host" in one.every and one.source != argument), None)
    slots = _slots(named, every.get("host"), ranks, told, argument)
    hosts = list(named[0].slots)
    check_size(sum(slots[host] for host in hosts), f"{named[0].source}: all hosts together")
    levels = {"host": [host for host in hosts for _ in range(slots[host])]}
    for source in named:
        for name, held in source.levels.items():
            if name in levels:
                raise TopologyError(
                    f"{source.source} says the {name} of hosts, as another did; give one of them"
                )
            check_complete(source.source, name, hosts, held)
            levels[name] = [held[host] for host in levels["host"]]
    check_tree(named, hosts)
    for name, size in every.items():
        if name != "host":
            if name in levels:
                raise TopologyError(
                    f"{name}={size}, and another source says the {name} of hosts; give one of them"
                )
            check_whole(name, size, {host: slots[host] for host in hosts})
            levels[name] = [f"{name}{rank // size}" for rank in range(len(levels["host"]))]
    return Topology(Level.of(name, levels[name]) for name in sorted(levels, key=place_of))


def place_of(name: str) -> int:
    """Return the place of a level among others, from the innermost.

    Example:
        >>> sorted(["spine", "tier-3", "host", "rack", "domain"], key=place_of)
        ['host', 'domain', 'rack', 'spine', 'tier-3']
    """
    numbered = re.fullmatch(r"tier-([0-9]{1,9})", name)
    if numbered:
        return len(ORDER) + int(numbered[1])
    return ORDER.index(name if name in ORDER else "")


def _read(on: object, names: Names) -> Found:
    """Read one source."""
    if isinstance(on, Mapping):
        return read_labels(on, names["on"])
    if isinstance(on, int) and not isinstance(on, bool):
        return read_blocks(on, names)
    if not isinstance(on, (str, os.PathLike)):
        raise TopologyError(f"{names['on']} must be {_KINDS}; got {shown(on)}")
    text = os.fspath(on)
    if isinstance(text, str) and isinstance(on, str):
        if not text.strip():
            raise TopologyError(f"{names['on']} is empty; give {_KINDS}")
        if text == LIVE:
            raise TopologyError(
                "on='live' is for `hypercomm place`; in a job give hypercomm.live_topology(), "
                "which all ranks call"
            )
        if not _is_file(text):
            if is_blocks(text):
                return read_blocks(text, names)
            if re.search(r"[\[,]", text) and not re.search(r"[/\\]|" + _SUFFIX, text):
                return Found(f"the node list {shown(text)}", _once(expand_hosts(text), text))
    return _read_file(on, names)


_SUFFIX = r"\.(?:json|ya?ml|conf)(?:#.*)?$"
"""What the name of a file ends with, and that of a host does not."""


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _once(hosts: Sequence[str], text: str) -> dict[str, int | None]:
    twice = next((host for host, times in Counter(hosts).items() if times > 1), None)
    if twice is not None:
        raise TopologyError(
            f"the node list {shown(text)} names {twice!r} twice; name each host once"
        )
    return dict.fromkeys(hosts)


def _read_file(path: str | os.PathLike[str], names: Names) -> Found:
    source = os.fspath(path)
    name = source.partition("#")[0] if isinstance(source, str) and not _is_file(source) else source
    if not isinstance(name, str) or not _is_file(name):
        raise TopologyError(f"{shown(source)} is no file; {names['on']} must be {_KINDS}")
    text, suffix = text_of(name), Path(name).suffix.lower()
    reader = next(read for _, fits, read in READERS if fits(suffix, text))
    return reader(text, source)


def _merged_blocks(sources: Sequence[Found]) -> dict[str, int]:
    every: dict[str, int] = {}
    for source in sources:
        for name, size in source.every.items():
            if every.setdefault(name, size) != size:
                raise TopologyError(
                    f"{name}={every[name]} and {name}={size} of {source.source} contradict"
                )
    ordered = sorted(every.items(), key=lambda one: (one[1], place_of(one[0])))
    for (inner, small), (outer, large) in pairwise(ordered):
        if large % small:
            raise TopologyError(
                f"{inner}={small} and {outer}={large} contradict: a {outer} would hold a part of a "
                f"{inner}; {large // small * small} or {(large // small + 1) * small} would do"
            )
    return dict(ordered)


def _of_blocks(sources: Sequence[Found], world_size: int) -> Topology:
    ranks = np.arange(world_size)
    levels = []
    for name, size in _merged_blocks(sources).items():
        count = -(-world_size // size)
        levels.append(Level(name, ranks // size, [f"{name}{unit}" for unit in range(count)]))
    return Topology(levels)


def _slots(
    named: Sequence[Found], per_host: int | None, ranks: int | None, told: Found | None, what: str
) -> dict[str, int]:
    """The GPUs of each host; `told` says them of all hosts, and `what` would."""
    hosts = list(named[0].slots)
    slots: dict[str, int] = {}
    by: dict[str, str] = {}
    for source in named:
        for host in hosts:
            count = source.slots.get(host)
            if count is None:
                continue
            if slots.setdefault(host, count) != count:
                raise TopologyError(
                    f"{by[host]} gives {host!r} {slots[host]} GPUs, {source.source} {count}; "
                    f"correct one of them"
                )
            by.setdefault(host, source.source)
            if told is not None and told.every["host"] != count:
                raise TopologyError(
                    f"{source.source} gives {host!r} {count} GPUs, {told.source} "
                    f"{told.every['host']}; correct one of them"
                )
    unknown = [host for host in hosts if host not in slots]
    if not unknown:
        return slots
    if per_host is None:
        known = sum(slots[host] for host in hosts if host in slots)
        left = 0 if ranks is None else ranks - known
        if left < 1 or left % len(unknown):
            among = f" {ranks} ranks do not spread evenly;" if ranks is not None else ""
            raise TopologyError(
                f"{named[0].source} does not say how many GPUs {some_of(unknown, 4)} have;{among} "
                f"give {what}, or write 'name slots=8' for each host"
            )
        per_host = left // len(unknown)
    return slots | dict.fromkeys(unknown, per_host)


def _cut(topology: Topology, world_size: int | None) -> Topology:
    """The topology of the first ranks."""
    if world_size is None or world_size == topology.world_size:
        return topology
    if world_size > topology.world_size:
        raise TopologyError(
            f"the topology has {counted(topology.world_size, 'GPU')}, but the world has "
            f"{world_size:,} ranks; add hosts, or start {counted(topology.world_size, 'rank')}"
        )
    return topology.select(range(world_size))
