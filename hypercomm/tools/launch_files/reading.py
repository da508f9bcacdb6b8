"""Find the programs that a launch file starts, and the settings of each.

Nothing is run or imported. Files that a file names are read only if they are in its folder, or if
the user includes them.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from hypercomm.errors import LayoutError
from hypercomm.layout.text import short_repr
from hypercomm.tools.launch_files.shell import Command, Piece, Place, Script, Word, text_of
from hypercomm.tools.launch_files.source import Source, as_path, printable
from hypercomm.tools.launch_files.tables import Framework, frameworks
from hypercomm.tools.launch_files.trees import read_tree, resolved

_LARGEST = 2**18
"""The most bytes of a file."""

_MOST_FILES = 64
"""The most files that are read for one launch file."""

_MOST_COMMANDS = 64
"""The most commands in a tree that are read."""

_TREES = ("json", "toml", "yaml", "yml")
_SIGNS = {
    "sh": r"\A\s*#!",
    "json": r"\A\s*\{",
    "toml": r"(?m)^\s*\[[\w.]+\]\s*(#.*)?$",
    "bash": r"(?m)(^|\s)--?[a-z]|^\s*(export\s+)?\w+=|^\S*\w\.\w+=",
    "yaml": r"(?m)^[\s-]*[\w.-]+\s*:(\s|$)",
}
"""Patterns that select the format of a text without a known suffix. The first match counts."""

_FLAG = re.compile(r"(--?[A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"([+~$]{0,2}[A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)

_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gres": ("SLURM_GPUS_ON_NODE",),
    "gpus_per_node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "ntasks_per_node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS",),
}
"""The environment variables that SLURM sets from each of its options."""


_GIVE = "give the path of a launch file, or sizes, as in tp=8,dp=4"


@attrs.frozen
class Launch:
    """One program that a launch file starts.

    Attributes:
        framework: The framework of the program.
        line: The line that starts it. 0 for the keys of a tree.
        settings: Its settings, in the order of the file.
        job: The settings of the job that runs it, such as `#SBATCH` options.
        problems: What could not be read.
        tested: The variables that conditions of the script test.
    """

    framework: Framework
    line: int
    settings: Sequence[Source]
    job: Sequence[Source] = ()
    problems: Sequence[str] = ()
    tested: Sequence[str] = ()


class Files:
    """The launch file, and the files that may be read for it.

    Args:
        file: The path of the launch file. Empty for a text.
        included: Further files and folders that may be read.
        given: The values of variables and arguments that the user sets.
    """

    def __init__(
        self, file: Path, included: Iterable[str | os.PathLike[str]], given: Mapping[str, str]
    ) -> None:
        self.file = file
        self.given = given
        own = [file.parent] if file.name else []
        self._allowed = [Path(one).resolve() for one in (*own, *included)]
        self._texts: dict[Path, str] = {}

    def find(self, name: str, beside: Path) -> Path | str:
        """Return the path of a file that another file names, or why it must not be read."""
        for suffix in ("", ".yaml", ".yml"):
            path = beside / (name + suffix)
            if name and os.path.isfile(path):  # noqa: PTH113 - Path raises for a long text
                real = path.resolve()
                if any(real == one or one in real.parents for one in self._allowed):
                    return path
                return f"is outside the folder of the file; pass it, as in --include {path}"
        return "is not read; pass it, as in --include PATH"

    def load(self, path: Path) -> str:
        """Return the text of a file.

        Raises:
            LayoutError: It is no text, it is too large, or too many files have been read.
        """
        if path not in self._texts:
            try:
                with path.open("rb") as file:
                    self._texts[path] = self.decode(file.read(_LARGEST + 1), str(path))
            except LayoutError:
                raise
            except IsADirectoryError as error:
                raise LayoutError(f"{_name(path)} is a folder; {_GIVE}") from error
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                raise LayoutError(
                    f"{_name(path)} cannot be read as text: {why}; {_GIVE}"
                ) from error
        return self._texts[path]

    def decode(self, content: bytes, name: str) -> str:
        """Return the text of the content of one more file."""
        text = content.decode("utf-8-sig")
        if len(content) > _LARGEST or "\0" in text:
            raise LayoutError(
                f"{_name(name)} is not a launch file: it is binary, or has more than "
                f"{_LARGEST:,} bytes"
            )
        if len(self._texts) >= _MOST_FILES:
            raise LayoutError(
                f"{_name(name)} is one of more than {_MOST_FILES} files that the launch file names"
            )
        return text


def _name(path: str | Path) -> str:
    return short_repr(printable(str(path)))


def format_of(text: str, file: str) -> str:
    r"""Return the suffix of the format of a text: of its name, else of how it looks.

    >>> format_of("", "a.toml"), format_of("a:\n  b: 1", ""), format_of("run --tp 2", "")
    ('toml', 'yaml', 'bash')
    """
    suffix = file.rpartition(".")[2].lower()
    if suffix in (*_TREES, "sh", "bash", "sbatch", "slurm"):
        return suffix
    return next((one for one, sign in _SIGNS.items() if re.search(sign, text)), "sh")


def read_launches(text: str, files: Files) -> tuple[list[Launch], list[Source]]:
    """Return the programs that a text starts, and all settings in it.

    Args:
        text: The text of the launch file.
        files: Its path, the files that may be read, and the values of variables.

    Raises:
        LayoutError: The text, or a file that it names, is not valid.
        MissingPackageError: A package for the format is not installed.
    """
    path = files.file
    suffix = format_of(text, path.name)
    try:
        if suffix not in _TREES:
            return _of_script(text, files)
        problems: list[str] = []
        tree = _with_bases(text, suffix, path, files, problems, {})
        tree = resolved(tree, {**os.environ, **files.given})
        found = _of_tree(tree, problems)
        if not found or found[0].framework.level:  # other programs have such keys, too
            found = list(_of_commands(tree, files)) or found
    except RecursionError as error:
        name = _name(path) if path.name else "the text"
        raise LayoutError(f"{name} is nested too deeply") from error
    return found, tree


# ---- trees --------------------------------------------------------------------------------------


def _tree(text: str, suffix: str, file: str) -> list[Source]:
    try:
        return [attrs.evolve(one, file=file) for one in read_tree(text, suffix)]
    except (ValueError, RecursionError) as error:
        why = printable(" ".join(str(error).split()))
        name = printable(file) or "the text"
        raise LayoutError(f"{name} is not valid {suffix}: {why}") from error


def _with_bases(
    text: str,
    suffix: str,
    path: Path,
    files: Files,
    problems: list[str],
    known: dict[Path, list[Source]],
) -> list[Source]:
    """Return the values of a tree, after the values of the files in its `defaults`.

    Args:
        text: The text of the tree.
        suffix: Its format.
        path: Its path.
        files: The files that may be read.
        problems: Receives the names that are not read.
        known: The values of the files that have been read. A file that is being read has none.
    """
    known[path.resolve()] = []
    tree = _tree(text, suffix, path.name)
    own = {one.path: one for one in tree}
    named = [one for one in tree if one.path[:1] == ("defaults",) and path.name]
    bases: list[Source] = []
    for one in named:
        for name in one.words or (one.value,) if len(one.path) == 1 else ("",):
            base = files.find(name, path.parent)
            if name == "_self_":
                continue
            if isinstance(base, str):
                problems.append(f"{one} {base}")
            elif base.resolve() not in known:
                there = files.load(base)
                kind = format_of(there, base.name)
                bases += _with_bases(there, kind, base, files, problems, known)
            elif known[base.resolve()]:
                bases += known[base.resolve()]
            else:
                problems.append(f"{one} leads back to this file")
    found = [one for one in bases if one.path not in own]
    found += [one for one in tree if one.path[:1] != ("defaults",)]
    known[path.resolve()] = found
    return found


def _of_tree(tree: Sequence[Source], problems: Sequence[str]) -> list[Launch]:
    """Return the program whose keys a tree has. Parts with `enabled: false` do not count."""
    off = [
        one.path[:-1]
        for one in tree
        if one.path[-1:] == ("enabled",) and str(one.value).lower() == "false"
        if one.path[-2:-1] not in ((), ("colocated",))
    ]
    live = [one for one in tree if not any(one.path[: len(key)] == key for key in off)]
    framework = _framework("", tree)
    if framework is None:
        return []
    return [Launch(framework, 0, framework.rewritten(live), (), problems)]


def _of_commands(tree: Sequence[Source], files: Files) -> Iterator[Launch]:
    """Yield the programs that commands in a tree start, as in a manifest of Kubernetes."""
    texts: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for one in tree:
        words = " ".join(map(shlex.quote, one.words)) if one.words else str(one.value)
        if re.search(r"(^|\s)'?--?[A-Za-z]", words) or one.path[-1:] == ("command",):
            texts.setdefault(one.path[:-1], []).append((words, one.line))
    for parent, parts in list(texts.items())[:_MOST_COMMANDS]:
        context = [one for one in tree if one.path[:-1] == parent]
        is_one = len(parts) == 2 and not any("\n" in text for text, _ in parts)
        whole = [(" ".join(text for text, _ in parts), parts[0][1])]
        for words, line in whole if is_one else parts:
            text = "\n" * (line - 1) + (f"args {words}" if words[:1] == "-" else words)
            yield from _of_script(text, files, context)[0]


# ---- scripts ------------------------------------------------------------------------------------


def _of_script(
    text: str, files: Files, context: Sequence[Source] = ()
) -> tuple[list[Launch], list[Source]]:
    """Return the programs that a script starts, and all settings of its commands."""
    path = files.file
    job = _job(text, path.name)
    environment = dict(os.environ)
    for one in job:
        value = str(one.value).rpartition(":")[2]
        environment |= dict.fromkeys(_SLURM.get(one.path[-1], ()), value)

    def load(name: str) -> tuple[str, str] | None:
        found = files.find(name, path.parent)
        return None if isinstance(found, str) else (found.name, files.load(found))

    script = Script(environment, files.given, _variables(), load)
    script.follow(text, Place(path.name, 1))
    launches: list[Launch] = []
    every: list[Source] = []
    for command in script.commands:
        settings = _merged([list(_of_words(words)) for words in command.variants])
        name = " ".join(text_of(word) for word in command.variants[0])[:4000]
        settings.append(Source(name, path=("$command",)))
        every += settings
        framework = _framework(name, settings)
        if framework is None and context and not launches:
            framework = _framework(name, context)  # the image of a container tells it
        if framework is not None:
            settings = framework.rewritten(settings)
            problems = _problems(script, command)
            tested = list(dict.fromkeys(script.tested))[:3]
            launches.append(Launch(framework, command.place.line, settings, job, problems, tested))
    if any(launch.framework.level < 2 for launch in launches):
        launches = [launch for launch in launches if launch.framework.level < 2]
    return launches, every


def _framework(command: str, settings: Sequence[Source]) -> Framework | None:
    return next((one for one in frameworks() if one.is_evident(command, settings)), None)


def _job(text: str, file: str) -> list[Source]:
    """Return the `#SBATCH` options of a script."""
    found: list[Source] = []
    for line, option in enumerate(text.split("\n"), 1):
        if option.startswith("#SBATCH"):
            place = Place(file, line)
            words = option.partition(" #")[0].split()[1:]
            found += [one for one, _ in _of_words([(Piece(word, word, place),) for word in words])]
    return found


@functools.cache
def _variables() -> frozenset[str]:
    """Return the variables of scripts that set a number of ranks."""
    keys = [key for one in frameworks() for keys in one.world.values() for key in keys]
    return frozenset(key[1:].upper() for key in keys if key.startswith("$"))


def _of_words(words: Sequence[Word]) -> Iterator[tuple[Source, Place]]:
    """Yield the flags and overrides of a command, with the lines that assigned their values."""
    for word, after in zip(words, [*words[1:], ()], strict=False):
        found = _FLAG.fullmatch(text_of(word)) or _OVERRIDE.fullmatch(text_of(word))
        if not found:
            continue
        key, value = found.groups()
        raw = "".join(piece.raw for piece in word).partition("=")[2]
        origins = [piece.origin for piece in word if piece.origin] or [word[-1].place]
        next_text = text_of(after)
        if value is None and after and not _FLAG.fullmatch(next_text) and next_text != "--":
            value, raw = next_text, "".join(piece.raw for piece in after)
            origins = [piece.origin for piece in after if piece.origin] or [after[-1].place]
        path = ("nodes",) if key == "-N" else as_path(key)
        value = "true" if value is None else value
        yield Source(value, key, raw, *word[0].place, path), max(origins)


def _merged(variants: Sequence[Sequence[tuple[Source, Place]]]) -> list[Source]:
    """Return the settings of one command, with the values of all its variants."""
    last = [{one.path: (one.value, place) for one, place in settings} for settings in variants]
    found = {one.path: one for settings in reversed(variants) for one, _ in settings}
    for key, one in found.items():
        given = [each.get(key, ("", None)) for each in last]
        lines: dict[str, int] = {}
        for value, place in given:
            line = place.line if place else 0
            lines[value] = min(line, lines.get(value, line))
        if len(lines) > 1:
            others = [f"{value} in line {at}" if at else "not given" for value, at in lines.items()]
            found[key] = attrs.evolve(one, others=tuple(others))
    first = [attrs.evolve(one, others=found[one.path].others) for one, _ in variants[0]]
    return [*first, *(one for key, one in found.items() if key not in last[0])]


def _problems(script: Script, command: Command) -> list[str]:
    """Return problems about the arguments of a command that are not read, or not passed to it."""
    unset = [
        word[0].raw
        for words in command.variants
        for word in words
        if len(word) == 1 and re.match(r"[A-Za-z_]", word[0].unset)
    ]
    unread = [
        f"{name} is not read, and may set {unset[0]}; pass it, as in --include FILE or "
        f"--set NAME=VALUE"
        for name in script.unread[:1]
        if unset
    ]
    return [printable(text) for text in (*script.problems, command.problem, *unread) if text]
