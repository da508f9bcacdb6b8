"""Read the settings of a file: flags, overrides and variables of a script, keys of a tree.

The file is not run, and nothing in it is imported. A script is split into words, and its variables
and products of integers are substituted. YAML is composed into nodes, without constructing objects.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from hypercomm.compat.launch_options import SLURM
from hypercomm.errors import LayoutError
from hypercomm.lazy import required

_MOST_NODES = 20_000
"""The most values of a tree. Aliases of YAML can expand to billions of values."""

_MOST_PASSES = 6
"""The most levels of references between values, and of commands quoted in commands."""

_LONGEST = 400
"""The most characters of a value with substitutions."""

_SIGNS = {
    "sh": r"\A\s*#!",
    "json": r"\A\s*\{",
    "toml": r"(?m)^\s*\[[\w.]+\]\s*(#.*)?$",
    "bash": r"(?m)(^|\s)--?[a-z]|^\s*(export\s+)?\w+=|^\S*\w\.\w+=",
    "yaml": r"(?m)^[\s-]*[\w.-]+\s*:(\s|$)",
}
"""Patterns that select the format of a text without a known suffix. The first match counts."""


@attrs.frozen
class Source:
    """One setting in a launch file, with its file and line.

    Attributes:
        value: The value: a number, or a text in which the known variables are substituted.
        key: The key or flag as written. "" for a default.
        raw: The value as written, such as "${TP:-8}".
        file: The name of the file. "" for a text.
        line: The number of the line, starting at 1. 0 for a default.
        path: The parts of the key, in lower case, with underscores.
        is_variable: Whether a script assigns the value to a variable.
    """

    value: Any
    key: str = ""
    raw: str = ""
    file: str = ""
    line: int = 0
    path: tuple[str, ...] = ()
    is_variable: bool = False

    def __str__(self) -> str:
        """Return the file, the line and the setting, as reports show them.

        >>> str(Source(8, "--tp", "$TP", "run.sh", 12)), str(Source(1))
        ('run.sh:12 --tp $TP', 'default')
        """
        where = f"{self.file}:{self.line}" if self.file else f"line {self.line}"
        return f"{where} {self.key} {self.raw}" if self.line else self.key or "default"


def read_settings(text: str, file: str, environment: Mapping[str, str]) -> list[Source]:
    r"""Return the settings of a text, in the order of the file.

    Args:
        text: The text.
        file: The name of the file. Its suffix selects the format. "" for a text.
        environment: The values of variables that a script does not set.

    Raises:
        LayoutError: The text is not valid YAML, JSON or TOML, or has too many values.
        MissingPackageError: YAML and JSON need pyyaml; TOML needs tomli before Python 3.11.

    Example:
        >>> [one.value for one in read_settings("TP=4\nrun.py --tp $TP", "", {})]
        ['4', '4']
    """
    suffix = file.rpartition(".")[2].lower()
    if suffix not in ("json", "toml", "yaml", "yml", "sh", "bash", "sbatch", "slurm"):
        suffix = next((one for one, sign in _SIGNS.items() if re.search(sign, text)), "sh")
    script = _Script(dict(environment))
    try:
        if suffix == "toml":
            script.settings += _of_toml(text)
        elif suffix in ("json", "yaml", "yml"):
            script.settings += _of_tree(text)
        else:
            script.read(text, 1)
    except (ValueError, RecursionError) as error:
        raise LayoutError(
            f"{file or 'the text'} is not valid {suffix}: {' '.join(str(error).split())}"
        ) from error
    return resolved(script.settings, script.variables, file)


def resolved(settings: list[Source], variables: Mapping[str, str], file: str) -> list[Source]:
    """Return settings in which references to variables and keys are substituted."""
    keys = {".".join(one.path): one.value for one in settings if not one.is_variable}
    values = keys | dict(variables)
    return [
        attrs.evolve(one, value=fill(one.value, values), file=one.file or file) for one in settings
    ]


def as_path(key: str) -> tuple[str, ...]:
    """Return the parts of a key, in lower case and with underscores.

    >>> as_path("+actor.Megatron.tensor-model-parallel-size")
    ('actor', 'megatron', 'tensor_model_parallel_size')
    """
    return tuple(key.strip("-+~ ").replace("-", "_").lower().split("."))


# ---- trees --------------------------------------------------------------------------------------


def _of_tree(text: str) -> Iterator[Source]:
    """Yield the values of YAML or JSON, and the arguments of commands in them."""
    yaml = required("yaml", "a launch file in YAML or JSON")
    # JSON allows tabs between values, YAML does not.
    documents = yaml.compose_all(text.replace("\t", "  "), yaml.SafeLoader)
    left = _MOST_NODES

    def walk(node: Any, path: tuple[str, ...], key: str) -> Iterator[Source]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"it has more than {_MOST_NODES:,} values, with aliases expanded")
        line = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            for name, inner in node.value:
                own = () if name.value == "<<" else as_path(str(name.value))
                yield from walk(inner, path + own, str(name.value))
            return
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        words = [one.value for one in nodes if isinstance(one, yaml.ScalarNode)]
        if re.search(r"(^|\s)--[a-z]", " ".join(words)):
            script = _Script({})
            script.read(" ".join(words), line)
            yield from script.settings
        elif len(words) == len(nodes):
            yield Source(",".join(words), key, ",".join(words), "", line, path)
        else:
            for one in nodes:
                yield from walk(one, path, key)

    try:
        for document in documents:
            yield from walk(document, (), "")
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _of_toml(text: str) -> Iterator[Source]:
    """Yield the values of TOML. The parser reports no lines, so the keys are searched for."""
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    at = 0

    def walk(
        content: Mapping[str, Any], path: tuple[str, ...], names: tuple[str, ...] = ()
    ) -> Iterator[Source]:
        nonlocal at
        for key, value in content.items():
            if isinstance(value, dict):
                header = re.escape(".".join((*names, key)))
                found = re.search(rf"(?m)^[ \t]*\[[ \t]*{header}[ \t]*\]", text)
                at = found.end() if found else at
                yield from walk(value, path + as_path(key), (*names, key))
                continue
            found = re.compile(rf"(?m)^.*\b{re.escape(key)}\s*=").search(text, at)
            at = found.end() if found else at
            written = str(value).strip("[]")
            line = 1 + text.count("\n", 0, at)
            yield Source(written, key, written, "", line, path + as_path(key))

    return walk(required(name, "a launch file in TOML").loads(text), ())


# ---- scripts ------------------------------------------------------------------------------------

# Repetitions are bounded, because many opening brackets would take quadratic time.
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|\\\r?\n) | (?P<comment>\#[^\n]*) | (?P<end>\n|[;&|()<>])
    | (?P<word>(?: \\. | '[^']*' | "(?:\\.|[^"\\])*" | `[^`\n]{0,400}`
        | \$\((?:[^()]|\((?:[^()]|\([^()]{0,99}\)){0,400}\)){0,400}\)
        | \$\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,99}\}){0,99}\}){0,99}\} | [^\s;&|()<>] )+)""",
    re.VERBOSE | re.DOTALL,
)
_FLAG = re.compile(r"(--?[A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"([+~]{0,2}\w+(?:\.[\w-]+)+)=(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"\$\{(?:oc\.(?:env|select):)?\s*([\w.]+)(?:(?::?[-=]|:(?=\d)|,)([^{}]*))?\}|"
    r"\$([A-Za-z_]\w*|\d)"
)
_PRODUCT = re.compile(r"\$\(\(\s*([1-9]\d{0,8}(?:\s*[*/]\s*[1-9]\d{0,8}){0,9})\s*\)\)")


@attrs.define
class _Script:
    """Collects the settings of a script, and the values of its variables so far."""

    variables: dict[str, str]
    settings: list[Source] = attrs.field(factory=list)
    _of_job: set[tuple[str, ...]] = attrs.field(factory=set)

    def read(self, text: str, line: int, depth: int = 0) -> None:
        """Add the settings of a text that begins at `line`. Quoted commands are read too."""
        flag: tuple[str, int] | None = None  # a flag whose value is the next word
        for token, here in _tokens(text, line, is_script=depth == 0):
            kind = token.lastgroup
            word = _unquoted(token[0]) if kind == "word" else ""
            found = _FLAG.fullmatch(word)
            is_value = bool(flag and word and not found)
            if flag and kind != "space":
                self._add(flag[0], word if is_value else "true", flag[1])
                flag = None
            if token[0].startswith("#SBATCH"):
                before = len(self.settings)
                self.read(token[0].removeprefix("#SBATCH").partition(" #")[0], here, depth)
                self._of_job |= {one.path for one in self.settings[before:]}
            elif found and found[2] is None:
                flag = found[1], here
            elif pair := found or _OVERRIDE.fullmatch("" if is_value else word):
                self._add(pair[1], pair[2], here)
            elif pair := _ASSIGNMENT.fullmatch(word):
                self.variables[pair[1]] = self._add(pair[1], pair[2], here, is_variable=True)
                word = pair[2]
            if depth < _MOST_PASSES and re.search(r"\s", word) and re.search(r"--\w|=", word):
                self.read(word, here, depth + 1)
        if flag:
            self._add(flag[0], "true", flag[1])

    def _add(self, key: str, raw: str, line: int, is_variable: bool = False) -> str:
        path = ("nodes",) if key == "-N" else as_path(key)
        value = fill(raw, self.variables)
        if path in self._of_job:
            return value  # srun --nodes=1 starts one step of a larger job
        if is_variable and re.fullmatch(r"\$\{?\d+\}?", value) and key in self.variables:
            return self.variables[key]  # the argument of an option that may not be given
        self.settings.append(Source(value, key, raw, "", line, path, is_variable))
        if not is_variable:
            self.variables |= dict.fromkeys(SLURM.get(path[-1], ()), value.rpartition(":")[2])
        return value


def _tokens(text: str, line: int, *, is_script: bool) -> Iterator[tuple[re.Match[str], int]]:
    """Yield the tokens of a text with their lines, without the texts that a script prints."""
    is_first = True  # of the words of a command
    is_printed = False
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "end":
            is_first = True
            is_printed = False
        elif token.lastgroup == "word":
            is_printed |= is_script and is_first and token[0] in ("echo", "printf")
            is_first = False
        if not is_printed:
            yield token, line
        line += token[0].count("\n")


def _unquoted(word: str) -> str:
    """Return a word without its quotes and escapes."""
    if "$(" in word or not re.search(r"""["'\\]""", word):
        return word
    try:
        return " ".join(shlex.split(word))
    except ValueError:  # a quote without an end
        return word


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return text with variables and products substituted. Unknown variables remain as written.

    Args:
        text: The text, such as "$((${GPUS:-8} * N))" or OmegaConf's "${oc.select:actor.tp,1}".
        values: The values of the variables.

    Example:
        >>> fill("$((${GPUS:-8} * $N)) $X", {"N": "2"})
        '16 $X'
    """

    def value_of(found: re.Match[str]) -> str:
        name, default, plain = found.groups()
        value = values.get(name or plain) or default
        return found[0] if value is None or len(value) > _LONGEST else value

    def in_product(found: re.Match[str]) -> str:
        return re.sub(r"\b[A-Za-z_]\w*", lambda name: values.get(name[0], name[0]), found[0])

    def product(found: re.Match[str]) -> str:
        result = 1
        for sign, number in re.findall(r"([*/]?)\s*(\d+)", found[1]):
            result = result // int(number) if sign == "/" else result * int(number)
        return str(result)

    for _ in range(_MOST_PASSES):
        if "$" not in text or len(text) > _LONGEST:
            break
        text = _VARIABLE.sub(value_of, text)
        text = re.sub(r"\$\(\([^()]*\)\)", in_product, text)
        text = _PRODUCT.sub(product, text)
    return text
