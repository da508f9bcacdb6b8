"""The tables of frameworks: one TOML file for each, in the folder `frameworks`.

A table has the evidence for a framework, the keys of its sizes, and the order of its ranks. The
comment on top of each file names the release whose code was read.
"""

from __future__ import annotations

import difflib
import functools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hypercomm.lazy import required
from hypercomm.tools.launch_files.source import Source

_LOOKS_LIKE_A_SIZE = re.compile(
    r"(\w+_)?(tensor|pipe|pipeline|context|expert|data|sequence|model|ring)\w*_parallel\w*_"
    r"(size|degree)|(\w+_)?parallel_size|(tp|pp|cp|ep|dp|sp|etp)(_size|_degree)?|"
    r"dp_(shard|replicate)(_size)?|\w*data_parallel_(shard|replicate)_degree|ici_\w+_parallelism|"
    r"(num_|n_?)(nodes|gpus)(_per_node)?"
)
"""Keys whose names look like a size. If a table does not have such a key, it is reported."""

_CLOSE = 0.92
"""The least similarity of a misspelt key, which is one or two letters in a long key."""


@functools.cache
def _pattern(key: str) -> re.Pattern[str]:
    """Return the pattern of a key: `*` is one part of the key, `**` is any number of parts."""
    parts = [
        r"(?:[^.]+\.)*" if part == "**" else re.escape(part).replace(r"\*", "[^.]*") + r"\."
        for part in key.split(".")
    ]
    return re.compile("".join(parts))


def is_key(path: Sequence[str], key: str) -> bool:
    """Return whether a setting has a key of a table.

    >>> is_key(("a", "b", "tp"), "**.tp"), is_key(("a", "b", "tp"), "a.tp")
    (True, False)
    """
    last = key.rpartition(".")[2]
    if path and "*" not in last and last != path[-1]:
        return False
    return _pattern(key).fullmatch(".".join(path) + ".") is not None


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(value.split() if isinstance(value, str) else value)


def _keys(value: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {name: _strings(keys) for name, keys in value.items()}


def holds(when: Mapping[str, str], settings: Sequence[Source]) -> bool:
    """Return whether each key of a condition has a value that matches its pattern.

    A key that is not given has the value "".
    """
    for key, pattern in when.items():
        values = [str(one.value) for one in settings if is_key(one.path, key)]
        if not re.fullmatch(pattern, values[-1] if values else "", re.IGNORECASE | re.DOTALL):
            return False
    return True


@attrs.frozen(kw_only=True)
class Module:
    """A module of a framework's program, such as the actor.

    Attributes:
        name: The name. Several rows may have one name; the first whose condition holds counts.
        layout: The kind of its layout, see `framework_layouts`.
        sizes: The keys that set each size.
        world: The keys of its own number of ranks, if it does not have all ranks of the file.
        when: The condition under which the row counts, see `holds`.
        defaults: The sizes that are not 1 if they are not given.
        world_defaults: The same for its own number of ranks.
        inherits: The module that provides the sizes that are not given.
        own: The sizes that are not inherited.
        product: The sizes whose product is the number of ranks.
        is_apart: Whether its ranks are not ranks of the other modules.
        zero_is_one: Whether a size of 0 counts as 1.
        always: Whether it exists even if the file gives none of its sizes.
        problem: Why it cannot be shown.
    """

    name: str = "training"
    layout: str = ""
    sizes: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_keys)
    world: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_keys)
    when: Mapping[str, str] = attrs.field(factory=dict)
    defaults: Mapping[str, int] = attrs.field(factory=dict)
    world_defaults: Mapping[str, int] = attrs.field(factory=dict)
    inherits: str = ""
    own: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    product: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    is_apart: bool = False
    zero_is_one: bool = False
    always: bool = False
    problem: str = ""


@attrs.frozen
class Rule:
    """A combination of sizes that a layout ignores, rejects or completes.

    Attributes:
        layout: The kind of the layout.
        when: For each size ">1", "1", "given", "missing" or "!=N".
        says: The message, with fields such as {tp} for sizes.
        drops: The sizes that are ignored.
    """

    layout: str
    when: Mapping[str, str]
    says: str
    drops: tuple[str, ...] = attrs.field(default=(), converter=_strings)

    def applies(self, sizes: Mapping[str, Any]) -> bool:
        """Return whether sizes have this combination. Sizes that are not given are 1."""
        for name, test in self.when.items():
            size = sizes.get(name, 1)
            if test in ("given", "missing"):
                holds = (name in sizes) == (test == "given")
            elif test.startswith("!="):
                holds = str(size) != test[2:]
            else:
                holds = size > 1 if test == ">1" else size == 1
            if not holds:
                return False
        return True


@attrs.frozen(kw_only=True)
class Framework:
    """A framework, as its table describes it.

    Attributes:
        name: The name.
        level: 0 for a framework, 1 for a part that others start, such as an engine, 2 for keys that
            any program may have. The lowest level counts.
        commands: Patterns of the commands and modules that it starts.
        keys: Keys that only it has, as "key" or "key=pattern of the value".
        world: The keys that set nodes, gpus_per_node and ranks. "$NAME" is a variable of a script.
        world_defaults: The values of these if they are not given.
        ignored: Keys that look like sizes, and are none of the layout.
        module: The modules.
        rewrite: Rows with the fields key, match and to: each match in the value of a key becomes
            the value of another key. `*` is the first part of the key.
        rule: The rules for its sizes.
        layout: The kinds of layouts that it defines.
        adds_apart: Whether the ranks of modules that are apart are added to the world of the keys.
    """

    name: str
    level: int = 0
    commands: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    world: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_keys)
    world_defaults: Mapping[str, int] = attrs.field(factory=dict)
    ignored: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    module: tuple[Module, ...] = ()
    rewrite: tuple[Mapping[str, str], ...] = ()
    rule: tuple[Rule, ...] = ()
    layout: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    adds_apart: bool = False

    def is_evident(self, command: str, settings: Sequence[Source]) -> bool:
        """Return whether a command, or keys with their values, belong to this framework."""
        if any(re.search(rf"(?:^|[\s/=])(?:{one})(?=$|[\s;:@])", command) for one in self.commands):
            return True
        for row in self.keys:
            key, _, pattern = row.partition("=")
            for one in settings:
                if is_key(one.path, key) and (
                    not pattern or re.fullmatch(pattern, str(one.value), re.DOTALL)
                ):
                    return True
        return False

    def rewritten(self, settings: Sequence[Source]) -> list[Source]:
        """Return settings, and those that are written inside the values of others."""
        found = list(settings)
        for row in self.rewrite:
            for one in list(found):
                if is_key(one.path, row["key"]):
                    path = row["to"].replace("*", one.path[0]).split(".")
                    found += [
                        attrs.evolve(one, value=match[1], path=tuple(path))
                        for match in re.finditer(row["match"], str(one.value))
                    ]
        return found

    def known_keys(self) -> list[str]:
        """Return all keys of the table."""
        rows = [self.world, *(module.world for module in self.module)]
        rows += [module.sizes for module in self.module]
        return [key for row in rows for keys in row.values() for key in keys]

    def complaint(self, one: Source) -> str:
        """Return what is wrong with a key that no row of the table has, or ""."""
        name = one.path[-1] if one.path else ""
        known = [*self.known_keys(), *frameworks()[-1].known_keys()]
        if any(is_key(one.path, key) for key in (*known, *self.ignored)):
            return ""
        if str(one.value).lower() in ("", "0", "1", "null", "none", "false", "~"):
            return ""
        if near := similar(name, known):
            prefix = one.key[: len(one.key) - len(name)]
            spelt = near.replace("_", "-") if "-" in one.key[len(prefix) :] else near
            return f"is an unknown option; did you mean {prefix}{spelt}?"
        if _LOOKS_LIKE_A_SIZE.fullmatch(name) and re.fullmatch(r"-?\d+|.*\$.*", str(one.value)):
            return f"looks like a size, and is not a size of {self.name} here; it is not read"
        return ""


def similar(name: str, keys: Iterable[str]) -> str:
    """Return the name of a size that a misspelt name resembles, or "" if there is none.

    Short names are never found, because frameworks have many of them.

    >>> similar("tensor_model_paralel_size", ["**.tensor_model_parallel_size", "tp"])
    'tensor_model_parallel_size'
    """
    if "par" not in name or len(name) < 12:
        return ""
    names = {key.rpartition(".")[2] for key in keys}
    long = [one for one in names if len(one) >= 12]
    plain = {name.removeprefix(prefix) for prefix in ("no_", "ds_", "disable_")}
    if plain & names:
        return ""
    return next(iter(difflib.get_close_matches(name, long, 1, _CLOSE)), "")


@functools.cache
def frameworks() -> tuple[Framework, ...]:
    """Return all frameworks, sorted by level and name. The last one is the table of launchers.

    Raises:
        MissingPackageError: Before Python 3.11, the tables need tomli.
    """
    package = required("tomllib" if sys.version_info >= (3, 11) else "tomli", "a launch file")
    folder = Path(__file__).parent / "frameworks"
    found = []
    for path in sorted(folder.glob("*.toml")):
        table = package.loads(path.read_text(encoding="utf-8"))
        table["module"] = [Module(**row) for row in table.get("module", ())]
        table["rule"] = [Rule(**row) for row in table.get("rule", ())]
        found.append(Framework(**table))
    return tuple(sorted(found, key=lambda one: one.level))


def layout_rows() -> dict[str, Mapping[str, Any]]:
    """Return the rows of all kinds of layouts, by name."""
    return {name: row for one in frameworks() for name, row in one.layout.items()}


def rules_for(layout: str) -> list[Rule]:
    """Return the rules for the sizes of a kind of layout."""
    return [rule for one in frameworks() for rule in one.rule if rule.layout == layout]
