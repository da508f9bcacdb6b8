"""Read the values of YAML, JSON and TOML with their lines, without constructing objects."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hypercomm.lazy import required
from hypercomm.tools.launch_files.source import Source, as_path

_MOST_VALUES = 20_000
"""The most values of a tree. Aliases of YAML can expand to billions of values."""

_MOST_PASSES = 6
"""The most levels of references between values."""

_REFERENCE = re.compile(r"\$\{([^{}]*)\}|\$([A-Za-z_]\w*)")


def read_tree(text: str, suffix: str) -> list[Source]:
    r"""Return the values of a tree in the order of the file.

    A list of scalars is one value. The key of a value in another list is that of the list.

    Args:
        text: The text.
        suffix: "yaml", "yml", "json" or "toml".

    Raises:
        ValueError: The text is not valid, or has too many values.
        MissingPackageError: YAML and JSON need pyyaml; TOML needs tomli before Python 3.11.

    Example:
        >>> [(one.key, one.value, one.line) for one in read_tree("a:\n  b: 2", "yaml")]
        [('b', '2', 2)]
    """
    return list(_of_toml(text) if suffix == "toml" else _of_yaml(text))


def _of_yaml(text: str) -> Iterator[Source]:
    yaml = required("yaml", "a launch file in YAML or JSON")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    left = _MOST_VALUES

    def walk(node: Any, path: tuple[str, ...], key: str) -> Iterator[Source]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values, with aliases expanded")
        line = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            for name, inner in node.value:
                own = () if name.value == "<<" else as_path(str(name.value))
                yield from walk(inner, path + own, str(name.value))
        elif isinstance(node, yaml.SequenceNode):
            words = [one.value for one in node.value if isinstance(one, yaml.ScalarNode)]
            left -= len(words)
            if len(words) == len(node.value):
                joined = ",".join(words)
                yield Source(joined, key, joined, "", line, path, tuple(words))
            else:
                for one in node.value:
                    yield from walk(one, path, key)
        else:
            yield Source(node.value, key, node.value, "", line, path)

    try:
        # JSON allows tabs between values, YAML does not.
        for document in yaml.compose_all(text.replace("\t", "  "), loader):
            yield from walk(document, (), "")
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _of_toml(text: str) -> Iterator[Source]:
    """Yield the values of TOML. One pass over the text finds the lines, which the parser lacks."""
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    content = required(name, "a launch file in TOML").loads(text)
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for at, line in enumerate(text.split("\n"), 1):
        header = re.match(r"\s*\[\[?([^\]]+)\]", line)
        key = re.match(r"\s*([\w.\"'-]+)\s*=", line)
        if header:
            table = tuple(part.strip(" \"'") for part in header[1].split("."))
        elif key:
            lines.setdefault((*table, *key[1].replace('"', "").split(".")), at)
    left = _MOST_VALUES

    def walk(value: Any, path: tuple[str, ...]) -> Iterator[Source]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values")
        items = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(inner, (*path, key))
        elif any(isinstance(one, dict) for one in items):
            for one in items:
                yield from walk(one, path)
        else:
            written = ",".join(str(one) for one in items)
            parts = tuple(part for key in path for part in as_path(key))
            yield Source(written, path[-1], written, "", lines.get(path, 0), parts)

    return walk(content, ())


def resolved(settings: list[Source], variables: Mapping[str, str]) -> list[Source]:
    r"""Return settings in which references to other keys and to variables are substituted.

    Args:
        settings: The values of a tree.
        variables: The values of environment variables.

    Example:
        >>> tree = read_tree("a: {b: 2}\nc: ${a.b}\nd: ${oc.env:N,4}", "yaml")
        >>> [one.value for one in resolved(tree, {})]
        ['2', '2', '4']
    """
    values = dict(variables) | {".".join(one.path): one.value for one in settings}

    def value_of(found: re.Match[str]) -> str:
        inner = re.sub(r"^oc\.(env|select):", "", found[1] or found[2] or "").strip()
        name, default = re.fullmatch(r"([^,:]*)(?:(?:,|:-?)(.*))?", inner, re.DOTALL).groups()  # type: ignore[union-attr]
        name = name.strip()
        value = values.get(name) or values.get(name.replace("-", "_").lower()) or default
        return found[0] if value is None or len(value) > 400 else value.strip()

    def fill(text: str) -> str:
        for _ in range(_MOST_PASSES):
            if "$" not in text or len(text) > 400:
                break
            text = _REFERENCE.sub(value_of, text)
        return text

    return [one if "$" not in one.value else one.with_value(fill(one.value)) for one in settings]
