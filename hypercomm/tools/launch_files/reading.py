"""Find the programs that a launch file starts, and the settings of each.

Nothing is run or imported. Files that a file names are read only if they are in its folder, or if
the user includes them.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from hypercomm.errors import LayoutError
from hypercomm.layout.text import short_repr
from hypercomm.tools.launch_files import shell
from hypercomm.tools.launch_files.source import Source, as_path, printable
from hypercomm.tools.launch_files.tables import Framework, frameworks
from hypercomm.tools.launch_files.trees import read_tree, resolved

_LARGEST = 2**18
"""The most bytes of a launch file."""

_MOST_FILES = 64
"""The most files that are read for one launch file."""

_MOST_BYTES = 2 * 2**20
"""The most bytes of these files together."""

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
_OVERRIDE = re.compile(r"([+~]{0,2}[A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)

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
    """The files that may be read for a launch file.

    Args:
        file: The path of the launch file. Empty for a text.
        included: Further files and folders that may be read.
    """

    def __init__(self, file: Path, included: Iterable[str | os.PathLike[str]]) -> None:
        self._folder = file.parent
        self._allowed = [Path(one).resolve() for one in included]
        if file.name:
            self._allowed.append(file.parent.resolve())
        self._texts: dict[Path, str] = {}
        self._count = 0
        self._bytes = 0

    def find(self, name: str, beside: Path) -> Path | str:
        """Return the path of a file that another file names, or why it must not be read."""
        for suffix in ("", ".yaml", ".yml"):
            path = beside / (name + suffix)
            try:
                is_file = bool(name) and path.is_file()
            except (OSError, ValueError):
                is_file = False
            if is_file:
                real = path.resolve()
                if any(real == one or one in real.parents for one in self._allowed):
                    return path
                return f"is outside the folder of the file; pass it, as in --include {path}"
        return "is not read; pass it, as in --include PATH"

    def find_end(self, name: str) -> Path | None:
        """Return the file that may be read and whose path ends as a name does, if there is one.

        The begin of a name, such as "/root/job/", may not exist on this machine.
        """
        parts = [part for part in name.split("/") if part not in ("", ".", "..")]
        folders = [one if one.is_dir() else one.parent for one in self._allowed]
        ends = ["/".join(parts[at:]) for at in range(len(parts))]
        for end, folder in [(name, self._folder), *itertools.product(ends, folders)]:
            found = self.find(end, folder)
            if isinstance(found, Path):
                return found
        return None

    def load(self, path: Path) -> str:
        """Return the text of a file.

        Raises:
            LayoutError: It is no text, it is too large, or too many files have been read.
        """
        if path in self._texts:
            return self._texts[path]
        try:
            with path.open("rb") as file:
                self._texts[path] = self.decode(file.read(_LARGEST + 1), str(path))
        except LayoutError:
            raise
        except IsADirectoryError as error:
            raise LayoutError(f"{_name(path)} is a folder; {_GIVE}") from error
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise LayoutError(f"{_name(path)} cannot be read as text: {why}; {_GIVE}") from error
        return self._texts[path]

    def decode(self, content: bytes, name: str) -> str:
        """Return the text of a file's content, and count it."""
        self._count += 1
        self._bytes += len(content)
        text = content.decode("utf-8-sig")
        if len(content) > _LARGEST or "\0" in text:
            raise LayoutError(
                f"{_name(name)} is not a launch file: it is binary, or has more than "
                f"{_LARGEST:,} bytes"
            )
        if self._count > _MOST_FILES or self._bytes > _MOST_BYTES:
            raise LayoutError(
                f"{_name(name)} is one of more than {_MOST_FILES} files, or of "
                f"{_MOST_BYTES:,} bytes, that the launch file names"
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


def read_launches(
    text: str, path: Path, files: Files, given: Mapping[str, str]
) -> tuple[list[Launch], list[Source]]:
    """Return the programs that a text starts, and all settings in it.

    Args:
        text: The text of the launch file.
        path: Its path. Empty for a text.
        files: The files that may be read.
        given: The values of variables and arguments that the user sets.

    Raises:
        LayoutError: The text, or a file that it names, is not valid.
        MissingPackageError: A package for the format is not installed.
    """
    suffix = format_of(text, path.name)
    try:
        if suffix not in _TREES:
            return _of_script(text, path, files, given)
        problems: list[str] = []
        tree = _with_bases(text, suffix, path, files, problems, {})
        tree = resolved(tree, {**os.environ, **given})
        found = _launch_of_tree(tree, problems)
        if not found or found[0].framework.level:  # other programs have such keys, too
            found = list(_of_commands(tree, path, files, given)) or found
    except RecursionError as error:
        raise LayoutError(f"{_name(path) or 'the text'} is nested too deeply") from error
    return found, tree


# ---- trees --------------------------------------------------------------------------------------


def _tree(text: str, suffix: str, file: str) -> list[Source]:
    try:
        return [attrs.evolve(one, file=file) for one in read_tree(text, suffix)]
    except (ValueError, RecursionError) as error:
        why = printable(" ".join(str(error).split()))
        raise LayoutError(
            f"{printable(file) or 'the text'} is not valid {suffix}: {why}"
        ) from error


def _with_bases(
    text: str,
    suffix: str,
    path: Path,
    files: Files,
    problems: list[str],
    cache: dict[Path, list[Source]],
) -> list[Source]:
    """Return the values of a tree, after those of the files in its `defaults`.

    Args:
        text: The text of the tree.
        suffix: Its format.
        path: Its path.
        files: The files that may be read.
        problems: Receives the names that are not read.
        cache: The values of the files that have been read. A file that is being read has none.
    """
    cache[path.resolve()] = []
    own = _tree(text, suffix, path.name)
    bases: list[Source] = []
    for one in [one for one in own if one.path[:1] == ("defaults",)]:
        for name in one.words or (one.value,) if len(one.path) == 1 else ("",):
            if name == "_self_" or not path.name:
                continue
            base = files.find(name, path.parent)
            if isinstance(base, str):
                problems.append(f"{one} {base}")
            elif base.resolve() not in cache:
                there = files.load(base)
                bases += _with_bases(
                    there, format_of(there, base.name), base, files, problems, cache
                )
            elif not cache[base.resolve()]:
                problems.append(f"{one} leads back to this file")
            else:
                bases += cache[base.resolve()]
    keys = {one.path for one in own}
    found = [one for one in bases if one.path not in keys] + [
        one for one in own if one.path[:1] != ("defaults",)
    ]
    cache[path.resolve()] = found
    return found


def _launch_of_tree(tree: Sequence[Source], problems: Sequence[str]) -> list[Launch]:
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


def _of_commands(
    tree: Sequence[Source], path: Path, files: Files, given: Mapping[str, str]
) -> Iterator[Launch]:
    """Yield the programs that commands in a tree start, as in a manifest of Kubernetes."""
    texts: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for one in tree:
        words = " ".join(map(shlex.quote, one.words)) if one.words else str(one.value)
        if re.search(r"(^|\s)'?--?[A-Za-z]", words) or one.path[-1:] == ("command",):
            texts.setdefault(one.path[:-1], []).append((words, one.line))
    for place, parts in list(texts.items())[:_MOST_COMMANDS]:
        context = [one for one in tree if one.path[:-1] == place]
        is_one = len(parts) == 2 and not any("\n" in text for text, _ in parts)
        for words, line in (
            [(" ".join(text for text, _ in parts), parts[0][1])] if is_one else parts
        ):
            text = "\n" * (line - 1) + words
            yield from _of_script(text, path, files, given, context)[0]


# ---- scripts ------------------------------------------------------------------------------------


def _of_script(
    text: str,
    path: Path,
    files: Files,
    given: Mapping[str, str],
    context: Sequence[Source] = (),
) -> tuple[list[Launch], list[Source]]:
    """Return the programs that a script starts, and all settings of its commands."""
    job = _job(text, path.name)
    environment = dict(os.environ)
    for one in job:
        value = str(one.value).rpartition(":")[2]
        environment |= dict.fromkeys(_SLURM.get(one.path[-1], ()), value)

    def load(name: str) -> tuple[str, str] | None:
        found = files.find_end(name) if path.name else None
        return (found.name, files.load(found)) if found else None

    may_start = any(one.is_named_in(text) for one in frameworks()[:-1])
    paths = shell.paths(text, path.name, environment, given, load, only_first=not may_start)
    at_place: dict[tuple[int, ...], list[tuple[shell.Path, shell.Command]]] = {}
    for way in paths:
        for command in way.commands:
            at_place.setdefault(command.place, []).append((way, command))
    launches: list[Launch] = []
    every: list[Source] = []
    for present in at_place.values():
        first = present[0][1]
        settings = _merged([_of_command(way, command) for way, command in present])
        name = " ".join(shell.text_of(word) for word in first.words)[:4000]
        settings.append(Source(name, path=("$command",)))
        every += settings
        framework = _framework(name, settings)
        if framework is None and context and not launches:
            framework = _framework(name, context)  # the image of a container tells it
        if framework is not None:
            settings = framework.rewritten(settings)
            problems = _problems(paths, first)
            line = first.line % shell.FILE
            launches.append(Launch(framework, line, settings, job, problems, _tested(paths)))
    for written in {one for way in paths for one in way.embedded}:
        tree = _of_embedded(written, path.name)
        every += tree
        found = _launch_of_tree(tree, ())
        launches += [attrs.evolve(one, job=job, line=written.line) for one in found]
    least = min((launch.framework.level for launch in launches), default=0)
    if least < 2:
        launches = [launch for launch in launches if launch.framework.level < 2]
    return launches, every


def _of_embedded(written: shell.Embedded, file: str) -> list[Source]:
    """Return the settings of a file that a script writes."""
    try:
        tree = _tree(written.text, written.name.rpartition(".")[2], written.name)
    except LayoutError:
        return []  # some values are known only to the running script
    return [attrs.evolve(one, line=one.line + written.line - 1, file=file) for one in tree]


def _framework(command: str, settings: Sequence[Source]) -> Framework | None:
    return next((one for one in frameworks() if one.is_evident(command, settings)), None)


def _job(text: str, file: str) -> list[Source]:
    """Return the `#SBATCH` options of a script."""
    found = [
        one
        for line, words in shell.job_options(text)
        for one, _ in _of_words([(word, word, line, line) for word in words])
    ]
    return [attrs.evolve(one, file=file) for one in found]


def _of_command(path: shell.Path, command: shell.Command) -> list[tuple[Source, int]]:
    """Return the settings of a command, with the lines that assigned their values."""
    found: list[tuple[Source, int]] = []
    for name, word in command.variables.items():
        if f"${name}" in _variables():
            text, raw = shell.text_of(word), "".join(piece.raw for piece in word)
            found.append((Source(text, name, raw, "", word[0].line, (f"${name}",)), word[0].line))
    words = [
        (
            shell.text_of(word),
            "".join(piece.raw for piece in word),
            word[0].line,
            max((piece.origin for piece in word), default=0) or word[-1].line,
        )
        for word in command.words
    ]
    found += _of_words(words)
    located = []
    for one, origin in found:
        file, line = path.where(one.line)
        located.append((attrs.evolve(one, file=file, line=line), path.where(origin)[1]))
    return located


@functools.cache
def _variables() -> frozenset[str]:
    """Return the variables of scripts that set a number of ranks, as "$NAME"."""
    keys = [key for one in frameworks() for keys in one.world.values() for key in keys]
    return frozenset(key for key in keys if key.startswith("$"))


def _of_words(words: Sequence[tuple[str, str, int, int]]) -> list[tuple[Source, int]]:
    """Return the flags and overrides among the words of a command.

    Args:
        words: For each word its text, the text as written, its line and the line of its value.
    """
    found: list[tuple[Source, int]] = []
    flag: tuple[str, int] | None = None  # a flag whose value is the next word
    for text, raw, line, origin in [*words, ("--", "", 0, 0)]:
        matched = _FLAG.fullmatch(text)
        if flag:
            is_next = not matched and text != "--"
            value, written = (text, raw) if is_next else ("true", "")
            path = ("nodes",) if flag[0] == "-N" else as_path(flag[0])
            found.append((Source(value, flag[0], written, "", flag[1], path), origin or flag[1]))
            flag = None
            if is_next:
                continue
        pair = matched or _OVERRIDE.fullmatch(text)
        if matched and matched[2] is None:
            flag = matched[1], line
        elif pair:
            written = raw.partition("=")[2] or raw
            found.append((Source(pair[2], pair[1], written, "", line, as_path(pair[1])), origin))
    return found


def _merged(paths: Sequence[Sequence[tuple[Source, int]]]) -> list[Source]:
    """Return the settings of one command, with the values that they have on other paths."""
    last = [{one.path: (one.value, line) for one, line in settings} for settings in paths]
    found = {one.path: one for settings in reversed(paths) for one, _ in settings}
    for key, one in found.items():
        values = dict.fromkeys(each.get(key) for each in last)
        if len({value and value[0] for value in values}) > 1:
            others = (f"{v[0]} in line {v[1]}" if v else "not given" for v in values)
            found[key] = attrs.evolve(one, others=tuple(others))
    first = [one for one, _ in paths[0]]
    missing = [one for key, one in found.items() if key not in last[0]]
    return [attrs.evolve(one, others=found[one.path].others) for one in first] + missing


def _problems(paths: Sequence[shell.Path], command: shell.Command) -> list[str]:
    """Return problems about the arguments of a command that are not read, or not passed to it."""
    file = f"{paths[0].files[0]}:" if paths[0].files[0] else "line "
    found = [
        f"{file}{line} {word} does not belong to the command: a comment above it ends the command"
        for way in paths
        for place, line, word in way.broken
        if place == command.place
    ]
    unread = next((one for way in paths for one in way.unread), None)
    evals = [line for way in paths for line, name in way.unread if name == "eval"]
    if evals:
        found.append(f"{file}{evals[0]} eval runs a text that is not read")
    unset = [
        piece
        for word in command.words
        for piece in word[:1]
        if len(word) == 1
        and piece.unset
        and not piece.unset.isdecimal()
        and piece.unset not in "@*"
    ]
    if unread is not None and unset:
        found.append(
            f"{file}{unread[0]} {unread[1]} is not read, and may set {unset[0].raw}; "
            f"pass it, as in --include FILE"
        )
    return [printable(text) for text in found]


def _tested(paths: Sequence[shell.Path]) -> list[str]:
    """Return the variables that the conditions of a script test."""
    texts = [str(key) for way in paths for key, _ in way.choices]
    names = re.findall(r"\$\{?(\w+)", " ".join(texts))
    return list(dict.fromkeys(names))[:3]


def load_text(given: str | os.PathLike[str], files: Files, *, is_text: bool) -> str:
    """Return the text of a launch file, or the given text itself."""
    if is_text:
        return files.decode(str(given).encode(errors="replace"), "the text")
    return files.load(Path(given))
