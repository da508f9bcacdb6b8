"""Read the commands that a shell script starts, without running any of them.

The script is parsed by tree-sitter and its assignments, functions, loops and conditions are
followed. A condition that depends on an unknown value is followed both ways, on several paths
through the script. Each branch is on at least one path.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from hypercomm.errors import LayoutError
from hypercomm.lazy import required

_MOST_PATHS = 64
"""The most paths through a script."""

_MOST_STEPS = 20_000
"""The most statements and words of all paths together."""

_MOST_ROUNDS = 64
"""The most rounds of loops inside each other."""

_MOST_PIECES = 2_000
"""The most parts of a value."""

_MOST_TEXT = 100_000
"""The most characters of a value."""

FILE = 1_000_000
"""Lines of the file that a script sources are counted from this number on, then from twice it."""

_DEEPEST = 12
"""The deepest nesting of calls of functions, and of commands quoted in commands."""

_BREAK = "\0"
"""Separates the words of an array inside a quoted text."""

_BRANCHING = {"if_statement", "case_statement", "while_statement", "for_statement"}

_PRINTERS = {
    "echo",
    "printf",
    ":",
    "cd",
    "pip",
    "pip3",
    "git",
    "grep",
    "sed",
    "awk",
    "kill",
    "pkill",
}
"""Commands whose arguments are not read."""


class Piece(NamedTuple):
    """A part of a word.

    Attributes:
        text: The text. An unknown value remains as written, such as "$TP" or "$(nproc)".
        raw: The part as written, such as "${TP:-8}".
        line: The number of the line, starting at 1.
        is_quoted: Whether the text is not split into words.
        origin: The line that assigned the value of a variable, or 0.
        unset: The name of the variable, if nothing sets it.
    """

    text: str
    raw: str
    line: int
    is_quoted: bool = False
    origin: int = 0
    unset: str = ""


Word = tuple[Piece, ...]


def text_of(word: Sequence[Piece]) -> str:
    """Return the text of a word."""
    return "".join(piece.text for piece in word)


def is_known(text: str) -> bool:
    """Return whether a text has no unknown part.

    >>> is_known("4"), is_known("$TP"), is_known("`nproc`")
    (True, False, False)
    """
    return "$" not in text and "`" not in text


@attrs.frozen
class Command:
    """A command that a script starts.

    Attributes:
        place: The positions of the calls that lead to the command, and its own. Equal on all paths.
        line: The number of its line.
        words: The command and its arguments.
        variables: The variables that the script has set.
    """

    place: tuple[int, ...]
    line: int
    words: tuple[Word, ...]
    variables: Mapping[str, Word]


@attrs.frozen
class Embedded:
    """A file that a script writes from a here-document."""

    name: str
    text: str
    line: int


class _Node:
    """A node of the syntax tree. Copied once, because attributes of tree-sitter are slow."""

    __slots__ = ("children", "end", "has_effect", "is_named", "kind", "line", "source", "start")

    def __init__(self, node: Any, source: bytes, first_line: int) -> None:
        self.kind: str = node.type
        self.is_named: bool = node.is_named
        self.line: int = node.start_point[0] + first_line
        self.start: int = node.start_byte
        self.end: int = node.end_byte
        self.source = source
        self.children = [
            _Node(child, source, first_line) for child in node.children if child.type != "comment"
        ]
        is_effect = self.kind in ("variable_assignment", "heredoc_redirect")
        if self.kind == "command":
            name = next((one.text for one in self.children if one.kind == "command_name"), "")
            is_effect = name not in (*_PRINTERS, "exit", "return")
        self.has_effect: bool = is_effect or any(one.has_effect for one in self.children)

    @property
    def text(self) -> str:
        return self.source[self.start : self.end].decode(errors="replace")

    @property
    def named(self) -> list[_Node]:
        return [child for child in self.children if child.is_named]

    def split(self, *kinds: str) -> tuple[list[_Node], list[_Node]]:
        """Return the children before and after the first child of one of these kinds."""
        for at, child in enumerate(self.children):
            if child.kind in kinds:
                return self.children[:at], self.children[at + 1 :]
        return self.children, []


@functools.lru_cache(maxsize=64)
def _parse(text: str, first_line: int) -> _Node:
    source = text.encode()
    language = required("tree_sitter_bash", "a launch file that is a shell script").language()
    package = required("tree_sitter", "a launch file that is a shell script")
    tree = package.Parser(package.Language(language)).parse(source)
    return _Node(tree.root_node, source, first_line)


def paths(
    text: str,
    file: str,
    environment: Mapping[str, str],
    given: Mapping[str, str],
    load: Callable[[str], tuple[str, str] | None] = lambda _name: None,
    *,
    only_first: bool = False,
) -> list[Path]:
    r"""Return the paths through a script.

    Args:
        text: The text of the script.
        file: The name of the file.
        environment: The values of variables that the script does not set.
        given: The values of variables and arguments that the user sets. The script cannot change
            them.
        load: A function that returns the name and the text of a file that the script sources, or
            None if the file must not be read.
        only_first: Whether to return one path only.

    Raises:
        LayoutError: The script has too many branches.

    Example:
        >>> for path in paths("case $1 in a) N=2;; b) N=4;; esac\nrun --tp $N", "", {}, {}):
        ...     print([text_of(word) for word in path.commands[0].words])
        ['run', '--tp', '2']
        ['run', '--tp', '4']
        ['run', '--tp', '$N']
    """
    found: list[Path] = []
    wanted: list[dict[Any, int]] = [{}]
    seen: set[tuple[Any, int]] = set()
    steps = 0
    while wanted:
        path = Path(wanted.pop(0), environment, given, load)
        path.run(text, file)
        steps += path.steps
        found.append(path)
        if only_first:
            break
        if len(found) > _MOST_PATHS or steps > _MOST_STEPS:
            raise LayoutError(
                f"{file or 'the text'} has too many branches; set the variables that its "
                f"conditions test, as in --set NAME=VALUE"
            )
        seen |= set(path.taken.items())
        before: dict[Any, int] = {}
        for key, count in path.choices:
            for option in range(count):
                if (key, option) not in seen:
                    seen.add((key, option))
                    wanted.append({**before, key: option})
            before[key] = path.taken[key]
    return found


class _Exit(Exception):  # noqa: N818 - it ends a path, and is no error
    """Ends a path, as `exit` ends the script."""


class _Return(Exception):  # noqa: N818
    """Ends a function."""


class Path:
    """One path through a script.

    Attributes:
        commands: The commands that the script starts.
        embedded: The files that it writes from here-documents.
        broken: The places of commands that a comment ends too early, with the next line and word.
        unread: The commands whose text is not read, such as `source FILE`, with their lines.
        taken: The option that was taken at each condition whose value is unknown.
        choices: These conditions in the order of the path, with the number of options.
        files: The names of the script and of the files that it sources.
        steps: The number of statements and words.
    """

    def __init__(
        self,
        taken: Mapping[Any, int],
        environment: Mapping[str, str],
        given: Mapping[str, str],
        load: Callable[[str], tuple[str, str] | None],
    ) -> None:
        self.commands: list[Command] = []
        self.embedded: list[Embedded] = []
        self.broken: list[tuple[tuple[int, ...], int, str]] = []
        self.unread: list[tuple[int, str]] = []
        self.taken: dict[Any, int] = {}
        self.choices: list[tuple[Any, int]] = []
        self.steps = 0
        self._wanted = taken
        self._environment = environment
        self._given = {name: self._literal(text) for name, text in given.items()}
        count = sum(name.isdecimal() for name in given)
        if count:
            self._given["#"] = self._literal(str(count))
        self._load = load
        self._variables: dict[str, list[Word]] = {}
        self._functions: dict[str, _Node] = {}
        self._stack: tuple[int, ...] = ()
        self._rounds = 1
        self.files: list[str] = []

    def where(self, line: int) -> tuple[str, int]:
        """Return the name of the file and the number of the line of a piece."""
        return self.files[line // FILE], line % FILE

    @staticmethod
    def _literal(text: str) -> list[Word]:
        return [(Piece(text, text, 0),)]

    def run(self, text: str, file: str) -> None:
        """Follow a script to its end."""
        self.files = [file]
        with contextlib.suppress(_Exit, _Return):
            self._do(_parse(text, 1))

    def read(self, text: str, line: int) -> None:
        """Follow a text that is a script inside the script."""
        if len(self._stack) < _DEEPEST:
            before, self._stack = self._stack, (*self._stack, line)
            try:
                self._do(_parse(text, line))
            except (_Exit, _Return):
                pass
            finally:
                self._stack = before

    def read_inside(self, node: _Node) -> None:
        """Follow the commands of a substitution, which may start programs in the background."""
        if len(self._stack) < _DEEPEST and node.has_effect:
            kept = dict(self._variables)
            with contextlib.suppress(_Exit, _Return):
                self._all(node.children)
            self._variables = kept

    # ---- statements ---------------------------------------------------------------------------

    def _do(self, node: _Node) -> bool | None:
        """Follow a statement. Return whether it succeeds, or None if unknown."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise LayoutError(f"{self.files[0] or 'the text'} is too long to follow")
        statement = getattr(self, f"_{node.kind}", None)
        if node.kind in _BRANCHING and not node.has_effect:
            return None  # a check that prints or ends the script does not change what it starts
        if statement is not None and node.is_named:
            result: bool | None = statement(node)
            return result
        return self._all(node.children)

    def _all(self, nodes: Sequence[_Node]) -> bool | None:
        result: bool | None = True
        for node in nodes:
            if node.is_named:
                result = self._do(node)
        return result

    def _choose(self, key: Any, count: int) -> int:
        """Return the option that this path takes at a condition."""
        if key not in self.taken:
            self.taken[key] = self._wanted.get(key, 0)
            self.choices.append((key, count))
        return min(self.taken[key], count - 1)

    def _decide(self, node: _Node, succeeds: bool | None) -> bool:
        return succeeds if succeeds is not None else self._choose(node.text, 2) == 0

    def _if_statement(self, node: _Node) -> bool | None:
        condition, rest = node.split("then")
        branch = _Node.split(node, "then")[1]
        if self._decide(node.children[1], self._all(condition[1:])):
            return self._all(
                [one for one in rest if one.kind not in ("elif_clause", "else_clause")]
            )
        for other in branch:
            if other.kind == "else_clause":
                return self._all(other.children)
            if other.kind == "elif_clause":
                condition, rest = other.split("then")
                if self._decide(other.children[1], self._all(condition[1:])):
                    return self._all(rest)
        return True

    def _case_statement(self, node: _Node) -> bool | None:
        subject = text_of(self._pieces(node.named[0]))
        items = [child for child in node.children if child.kind == "case_item"]
        patterns = [
            [text_of(self._pieces(one)) for one in item.split(")")[0] if one.is_named]
            for item in items
        ]
        has_rest = any("*" in names for names in patterns)
        if is_known(subject):
            matching = (
                at
                for at, names in enumerate(patterns)
                if any(_matches(subject, name) for name in names)
            )
            at = next(matching, len(items))
        else:
            at = self._choose((node.start, node.text[:80]), len(items) + (not has_rest))
        return self._all(items[at].split(")")[1]) if at < len(items) else True

    def _while_statement(self, node: _Node) -> bool | None:
        condition, rest = node.children[1:-1], node.children[-1]
        holds = self._all(condition)
        if self._decide(node.children[1], holds):
            self._all(rest.children)
        return True

    def _for_statement(self, node: _Node) -> bool | None:
        name, *rest = node.named
        values = [word for one in rest if one.kind != "do_group" for word in self._words(one)]
        before, outer = self._stack, self._rounds
        self._rounds *= len(values)
        if not 0 < self._rounds <= _MOST_ROUNDS:
            values, self._rounds = [(Piece(f"${name.text}", "", node.line),)], outer
        for at, word in enumerate(values):
            self._stack = (*before, node.line, at) if len(values) > 1 else before
            self._set(name.text, [word])
            self._all([one for one in rest if one.kind == "do_group"])
            if not is_known(text_of(word)):
                break
        self._stack, self._rounds = before, outer
        return True

    def _c_style_for_statement(self, node: _Node) -> bool | None:
        return self._all([one for one in node.named if one.kind == "do_group"])

    def _function_definition(self, node: _Node) -> bool | None:
        self._functions[node.named[0].text] = node.named[-1]
        return True

    def _list(self, node: _Node) -> bool | None:
        left, sign, right = node.children[0], node.children[1].kind, node.children[-1]
        succeeds = self._do(left)
        if left.kind in ("command", "redirected_statement", "pipeline", "subshell"):
            succeeds = succeeds is not False  # a command that is started is assumed to succeed
        if sign == "&&":
            return self._do(right) if self._decide(left, succeeds) else False
        return True if self._decide(left, succeeds) else self._do(right)

    def _negated_command(self, node: _Node) -> bool | None:
        succeeds = self._all(node.children)
        return None if succeeds is None else not succeeds

    def _declaration_command(self, node: _Node) -> bool | None:
        return self._all([one for one in node.named if one.kind == "variable_assignment"])

    def _variable_assignment(self, node: _Node) -> bool | None:
        name = node.children[0].text
        is_added = node.children[1].kind == "+="
        value = node.children[2] if len(node.children) > 2 else None
        before = self._variables.get(name, [])
        if value is not None and value.kind == "array":
            words = [word for one in value.named for word in self._words(one)]
            for word in words:
                entry = re.fullmatch(r"\[(.+?)\]=(.*)", text_of(word), re.DOTALL)
                if entry:
                    line = word[0].line
                    self._set(f"{name}[{entry[1]}]", [(Piece(entry[2], entry[2], line),)])
            self._set(name, [*before, *words] if is_added else words)
            return True
        word = tuple(self._pieces(value)) if value is not None else (Piece("", "", node.line),)
        word = tuple(piece._replace(is_quoted=False) for piece in word)
        only = word[0].unset if len(word) == 1 else ""
        if only.isdecimal() and before:
            return True  # the argument of an option that may not be given
        if is_added and before:
            word = (*before[0], *word)
        if len(word) > _MOST_PIECES or len(text_of(word)) > _MOST_TEXT:
            word = (Piece(f"${name}", node.text[:40], node.line),)
        self._set(name, [word])
        return True

    def _set(self, name: str, words: list[Word]) -> None:
        self._variables[name] = words

    def _test_command(self, node: _Node) -> bool | None:
        return self._all_of(node.named)

    def _compound_statement(self, node: _Node) -> bool | None:
        if node.children and node.children[0].kind == "((":
            numbers = [self._number(one) for one in node.named]
            return None if not numbers or numbers[-1] is None else numbers[-1] != 0
        return self._all(node.children)

    def _redirected_statement(self, node: _Node) -> bool | None:
        document = next((one for one in node.children if one.kind == "heredoc_redirect"), None)
        if document is None:
            return self._all([one for one in node.named if one.kind != "file_redirect"])
        body = next((one for one in document.children if one.kind == "heredoc_body"), None)
        command = node.children[0].text if node.children[0].start < document.start else ""
        others = [one.text for one in (*node.children, *document.children)]
        named = re.search(
            r"[^\s<>|'\"]+\.(ya?ml|json|toml|sh|sbatch|slurm)\b", " ".join(others[:5])
        )
        if body is None:
            return self._do(node.children[0])
        is_literal = re.match(r"""<<-?\s*["'\\]""", document.text) is not None
        text = body.text if is_literal else text_of(self._pieces(body))
        variable = re.fullmatch(r"read\s.*?(\w+)\s*", command)
        if variable:
            value = tuple(piece._replace(is_quoted=False) for piece in self._pieces(body))
            self._set(variable[1], [value])
        elif named and named[1] in ("yaml", "yml", "json", "toml"):
            self.embedded.append(Embedded(named[0].rpartition("/")[2], text, body.line))
        elif named or re.match(r"\S*\b(bash|sh|zsh|ssh|sbatch|srun|qsub|docker)\b", command):
            self.read(text, body.line)
        return True

    def _unset_command(self, node: _Node) -> bool | None:
        for one in node.named:
            self._variables.pop(one.text, None)
        return True

    def _command(self, node: _Node) -> bool | None:
        kept = dict(self._variables)
        words: list[Word] = []
        for child in node.named:
            if child.kind == "variable_assignment":
                self._variable_assignment(child)
            elif child.kind == "command_name":
                words += [word for one in child.children or [child] for word in self._words(one)]
            elif not child.kind.endswith("redirect"):
                words += self._words(child)
        name = text_of(words[0]) if words else ""
        if name in self._functions and len(self._stack) < _DEEPEST:
            return self._call(node, name, words[1:])
        builtin = _BUILTINS.get(name)
        if builtin is not None:
            result = builtin(self, node, words[1:])
            self._variables.pop("IFS", None)
            return result
        if name in _PRINTERS or not name:
            return None
        place = (*self._stack, node.start)
        variables = {key: value[0] for key, value in self._variables.items() if value}
        words = self._unquoted(words)
        if not words:
            return None
        if self.commands and re.match(r"--?\w|[\w+]+(\.\w+)+=", name):
            before = self.commands.pop()
            self.broken.append((before.place, node.line, name))
            words = [*before.words, *words]
            place = before.place
        self.commands.append(Command(place, words[0][0].line, tuple(words), variables))
        self._variables = kept
        return None

    def _unquoted(self, words: list[Word]) -> list[Word]:
        """Follow the commands that are arguments of a command, and return its other words."""
        others: list[Word] = []
        before = ""
        for word in words:
            text = text_of(word)
            is_python = before == "-c" and "python" in text_of(words[0])
            found = re.match(r"(?:--?[\w-]+=)?(?=\S)(.*\s.*)", text, re.DOTALL)
            if found and not is_python and (before.endswith("c") or re.search(r"\s--\w", text)):
                self.read(found[1], word[0].line)
            else:
                others.append(word)
            before = text
        return others

    def _call(self, node: _Node, name: str, arguments: Sequence[Word]) -> bool | None:
        outer = {key: one for key, one in self._variables.items() if key.isdecimal() or key in "@#"}
        for key in outer:
            del self._variables[key]
        stack, self._stack = self._stack, (*self._stack, node.start)
        for at in range(1, 10):
            passed = arguments[at - 1] if at <= len(arguments) else (Piece("", "", node.line),)
            self._variables[str(at)] = [passed]
        self._variables["@"] = list(arguments)
        self._variables["#"] = self._literal(str(len(arguments)))
        try:
            return self._do(self._functions[name])
        except _Return:
            return True
        finally:
            self._stack = stack
            for key in [key for key in self._variables if key.isdecimal() or key in "@#"]:
                del self._variables[key]
            self._variables |= outer

    def _shift(self, _node: _Node, _words: Sequence[Word]) -> bool | None:
        values = {**self._given, **self._variables}
        if "#" in values:
            count = int(text_of(values["#"][0]) or 0)
            for at in range(1, min(count, 9)):
                self._given[str(at)] = self._variables[str(at)] = values.get(str(at + 1), [()])
            self._given["#"] = self._variables["#"] = self._literal(str(max(0, count - 1)))
        return True

    def _eval(self, node: _Node, words: Sequence[Word]) -> bool | None:
        text = " ".join(text_of(word) for word in words)
        if re.match(r"\s*[$`]", text):
            self.unread.append((node.line, "eval"))
        else:
            self.read(text, words[0][0].line if words else node.line)
        return None

    def _source(self, node: _Node, words: Sequence[Word]) -> bool | None:
        name = text_of(words[0]) if words else ""
        found = self._load(re.sub(r".*[$`](\([^)]*\)|\{[^}]*\}|\w+)?", "", name).lstrip("/"))
        if found is None or len(self._stack) >= _DEEPEST:
            self.unread.append((node.line, f"source {name}"))
            return None
        self.files.append(found[0])
        self.read(found[1], 1 + (len(self.files) - 1) * FILE)
        return True

    def _read(self, node: _Node, words: Sequence[Word]) -> bool | None:
        """Set the variables of `read NAME ... <<< TEXT`."""
        given = next((one for one in node.named if one.kind == "herestring_redirect"), None)
        names = [text_of(word) for word in words if not text_of(word).startswith("-")]
        if given is None:
            for name in names:
                self._variables.pop(name, None)
            return None
        separators = text_of(self._variables.get("IFS", [()])[0]) or " \t\n"
        text = text_of(self._pieces(given.named[0]))
        values = re.split(f"[{re.escape(separators)}]+", text) if is_known(text) else []
        for name, value in zip(names, values, strict=False):
            self._set(name, [(Piece(value, value, node.line),)])
        return None

    def _ends(self, node: _Node, _words: Sequence[Word]) -> bool | None:
        raise _Return if node.text.startswith("return") else _Exit

    # ---- conditions ---------------------------------------------------------------------------

    def _all_of(self, nodes: Sequence[_Node]) -> bool | None:
        results = [self._test(node) for node in nodes]
        return results[-1] if results else None

    def _test(self, node: _Node) -> bool | None:
        """Return whether an expression in brackets holds, or None if unknown."""
        kind = node.kind
        if kind == "parenthesized_expression":
            return self._all_of(node.named)
        if kind == "unary_expression":
            sign, operand = node.children[0].text, node.children[-1]
            if sign == "!":
                inner = self._test(operand)
                return None if inner is None else not inner
            value = self._operand(operand, is_empty_if_unset=True)
            if sign not in ("-z", "-n") or value is None:
                return None
            return (value == "") == (sign == "-z")
        if kind == "binary_expression":
            left, sign, right = node.children[0], node.children[1].text, node.children[-1]
            if sign in ("&&", "||", "-a", "-o"):
                one, two = self._test(left), self._test(right)
                decisive = sign in ("||", "-o")
                if decisive in (one, two):
                    return decisive
                return None if None in (one, two) else not decisive
            return _compared(self._operand(left), sign, self._operand(right))
        value = self._operand(node, is_empty_if_unset=True)
        return None if value is None else value != ""

    def _operand(self, node: _Node, *, is_empty_if_unset: bool = False) -> str | None:
        pieces = self._pieces(node)
        if (
            is_empty_if_unset
            and pieces
            and all(
                re.match(r"[A-Za-z_]", piece.unset) and not piece.unset.startswith("SLURM")
                for piece in pieces
            )
        ):
            return ""
        text = text_of(pieces)
        return text if is_known(text) else None

    # ---- words --------------------------------------------------------------------------------

    def _words(self, node: _Node) -> list[Word]:
        """Return the words of an argument."""
        words: list[list[Piece]] = [[]]
        for piece in self._pieces(node):
            parts = re.split(f"({_BREAK})" if piece.is_quoted else r"((?:\s|\\\n)+|\0)", piece.text)
            line = piece.line
            for at, part in enumerate(parts):
                if at % 2:
                    words.append([])
                elif part or piece.is_quoted:
                    raw = piece.raw if len(parts) == 1 else part
                    words[-1].append(piece._replace(text=part, raw=raw, line=line))
                line += part.count("\n")
        self.steps += len(words)
        return [tuple(word) for word in words if word]

    def _pieces(self, node: _Node) -> list[Piece]:
        """Return the parts of a word or a text."""
        kind = node.kind
        if kind in ("raw_string", "ansi_c_string"):
            return [self._quote(node, node.text.lstrip("$")[1:-1])]
        if kind in ("string", "translated_string", "heredoc_body"):
            return self._string(node)
        if kind == "simple_expansion":
            return self._value(node, node.text.strip()[1:])
        if kind == "expansion":
            return self._expansion(node)
        if kind == "arithmetic_expansion":
            numbers = [self._number(one) for one in node.named]
            number = numbers[0] if len(numbers) == 1 else None
            text = "".join(node.text.split()) if number is None else str(number)
            return [Piece(text, node.text, node.line)]
        if kind in ("command_substitution", "process_substitution"):
            self.read_inside(node)
            return [Piece("$(...)", node.text[:80], node.line)]
        if kind in ("concatenation", "command_name", "array") and node.children:
            return [piece for child in node.children for piece in self._pieces(child)]
        text = re.sub(r"\\(\n|.)", lambda found: found[1].strip("\n"), node.text.strip())
        return [Piece(text, node.text.strip(), node.line)]

    @staticmethod
    def _quote(node: _Node, text: str) -> Piece:
        return Piece(text, text, node.line, is_quoted=True)

    def _string(self, node: _Node) -> list[Piece]:
        """Return the parts of a text in double quotes. The texts between its parts are literal."""
        parts = [
            one for one in node.children if one.kind != '"' and not one.kind.endswith("content")
        ]
        is_document = node.kind == "heredoc_body"
        at, end = (node.start, node.end) if is_document else (node.start + 1, node.end - 1)
        if node.kind == "translated_string":
            parts = [inner for one in parts for inner in one.children if inner.kind != '"']
            at += 1
        line = node.line
        found: list[Piece] = []
        for part in [*parts, None]:
            stop = part.start if part else end
            between = node.source[at:stop].decode(errors="replace")
            if part:
                between += re.match(r"\s*", part.text)[0]  # type: ignore[index]
            if between:
                text = re.sub(r'\\(["$`\\])', r"\1", between)
                found.append(Piece(text, text, line, is_quoted=True))
            line += between.count("\n")
            if part:
                inner = self._pieces(part)
                found += [piece._replace(is_quoted=True) for piece in inner]
                line += part.text.lstrip().count("\n")
                at = part.end
        return found or [self._quote(node, "")]

    def _value(self, node: _Node, name: str) -> list[Piece]:
        """Return the value of a variable, or its name if nothing sets it."""
        raw = node.text.strip()
        words = self._given.get(name) or self._variables.get(name)
        if words is None and name in ("*", "@"):
            return [Piece("", raw, node.line, unset=name)]
        if words is None and self._environment.get(name):
            words = self._literal(self._environment[name])
        if words is None:
            return [Piece(f"${name}", raw, node.line, unset=name)]
        if name in ("*", "@"):
            return _joined(words)
        return self._as_used(words[0] if words else (), raw, node.line)

    @staticmethod
    def _as_used(word: Word, raw: str, line: int) -> list[Piece]:
        """Return the pieces of a variable's value where the variable is used."""
        text = text_of(word)
        if len(word) and not re.search(r"\s", text):
            last = word[-1]
            return [Piece(text, raw, line, origin=last.origin or last.line, unset=last.unset)]
        return list(word)

    def _expansion(self, node: _Node) -> list[Piece]:
        """Return the value of an expansion with braces."""
        raw = node.text.strip()
        found = re.match(r"\$\{(\w+|[@*#])(\[.*?\])?(:?[-=+?])?", raw)
        if not found:
            return [Piece(raw, raw, node.line)]
        name, index, sign = found.groups()
        key = (index or "")[1:-1].strip("\"'")
        if index and key not in ("@", "*"):
            inner = next((one for one in node.named if one.kind == "subscript"), None)
            key = text_of(self._pieces(inner.named[-1])) if inner else key
            words = self._variables.get(name, [])
            if key.isdecimal() and int(key) < len(words):
                return self._as_used(words[int(key)], raw, node.line)
            value = self._value(node, f"{name}[{key}]")
        elif index:
            words = self._variables.get(name, [])
            value = _joined(words) if words else self._value(node, name)
        else:
            value = self._value(node, name)
        is_set = not any(piece.unset for piece in value) and bool(text_of(value))
        if sign in (":-", "-", ":=", "="):
            if is_set or (sign[-1:] and sign in ("-", "=") and not value[0].unset):
                return value
            default = self._default(node)
            if sign in (":=", "="):
                self._set(name, [tuple(default)])
            return default
        if sign in (":+", "+"):
            return self._default(node) if is_set else []
        is_whole = sign in (":?", "?") or raw[found.end() :] == "}"
        return value if is_whole else [Piece(raw, raw, node.line)]

    def _default(self, node: _Node) -> list[Piece]:
        """Return the text after the sign of an expansion such as `${TP:-8}`."""
        at = next(i for i, one in enumerate(node.children) if re.fullmatch(r":?[-=+]", one.kind))
        pieces = [piece for one in node.children[at + 1 : -1] for piece in self._pieces(one)]
        text = text_of(pieces)
        if re.search(r"\s", text):
            return pieces
        return [Piece(text, node.text.strip(), node.line)]

    # ---- numbers ------------------------------------------------------------------------------

    def _number(self, node: _Node) -> int | None:
        """Return the value of an arithmetic expression, or None if unknown."""
        if node.kind == "parenthesized_expression":
            return self._number(node.named[0])
        if node.kind == "binary_expression":
            one, two = self._number(node.children[0]), self._number(node.children[-1])
            compute = _ARITHMETIC.get(node.children[1].text)
            if one is None or two is None or compute is None:
                return None
            is_small = max(abs(one), abs(two)) < 10**9
            is_division = node.children[1].text in "/%"
            return int(compute(one, two)) if is_small and not (is_division and two == 0) else None
        if node.kind == "ternary_expression":
            condition = self._number(node.named[0])
            if condition is None:
                return None
            return self._number(node.named[1] if condition else node.named[2])
        name = node.text.strip()
        bare = re.fullmatch(r"[A-Za-z_]\w*", name)
        text = text_of(self._value(node, name) if bare else self._pieces(node))
        return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


_BUILTINS: dict[str, Callable[[Path, _Node, Sequence[Word]], bool | None]] = {
    "exit": Path._ends,
    "return": Path._ends,
    "shift": Path._shift,
    "eval": Path._eval,
    "source": Path._source,
    ".": Path._source,
    "read": Path._read,
    "true": lambda _path, _node, _words: True,
    "false": lambda _path, _node, _words: False,
}

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda one, two: int(one / two),
    "%": operator.mod,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}

_TESTS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}


def _compared(left: str | None, sign: str, right: str | None) -> bool | None:
    """Return whether two operands of a test compare as asked, or None if unknown."""
    if left is None or right is None:
        return None
    if sign in ("=", "==", "!="):
        return _matches(left, right) == (sign != "!=")
    is_number = all(re.fullmatch(r"-?[0-9]{1,9}", one) for one in (left, right))
    if sign in _TESTS and is_number:
        return bool(_ARITHMETIC[_TESTS[sign]](int(left), int(right)))
    return None


def _matches(text: str, pattern: str) -> bool:
    """Return whether a text matches a pattern of the shell.

    >>> _matches("70b", "7*b"), _matches("a.b", "a?b"), _matches("7b", "70b")
    (True, True, False)
    """
    quoted = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(quoted, text, re.DOTALL) is not None


def _joined(words: Sequence[Word]) -> list[Piece]:
    """Return the pieces of an array's words, with separators."""
    found: list[Piece] = []
    for at, word in enumerate(words):
        if at:
            found.append(Piece(_BREAK, " ", word[0].line if word else 0))
        found += [piece._replace(is_quoted=True) for piece in word]
    return found


def job_options(text: str) -> Iterator[tuple[int, list[str]]]:
    r"""Yield the line and the words of each `#SBATCH` line.

    >>> list(job_options("#!/bin/sh\n#SBATCH --nodes=2 # hosts"))
    [(2, ['--nodes=2'])]
    """
    for found in re.finditer(r"(?m)^[ \t]*#SBATCH\s+(.*)$", text):
        words = found[1].partition(" #")[0]
        try:
            yield 1 + text.count("\n", 0, found.start()), shlex.split(words)
        except ValueError:
            yield 1 + text.count("\n", 0, found.start()), words.split()
