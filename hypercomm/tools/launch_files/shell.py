"""Read the commands that a shell script starts, without running any of them.

The script is parsed by tree-sitter. Its assignments, functions, loops and conditions are followed
once. If a condition depends on an unknown value, all branches are followed, and each variable then
has an alternative for each value that the branches give it.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import attrs

from hypercomm.errors import LayoutError
from hypercomm.layout.text import first_n
from hypercomm.lazy import required

T = TypeVar("T")

_MOST_STEPS = 20_000
"""The most statements and words."""

_MOST_ALTERNATIVES = 16
"""The most alternatives of a variable."""

_MOST_TEXT = 100_000
"""The most characters of a value."""

_DEEPEST = 12
"""The deepest nesting of calls of functions, and of commands quoted in commands."""

_BREAK = "\0"
"""Separates the words of an array inside a quoted text."""

_PRINTERS = re.compile(r"echo|printf|:|true|cd|pip3?|git|grep|sed|awk|p?kill|")
"""Commands whose arguments are not read."""

_HOOKS = re.compile(
    r"""(\$\(|`)\s*["']?([\w./~${}-]*/)?((micro)?mamba|conda|modulecmd|pyenv|spack|ssh-agent)["']?[\s)`]"""
)
"""Commands whose output, which scripts pass to `eval`, sets no size."""

_HOOK = "$(hook)"
"""The text of the output of such a command."""

_PARTS = re.compile(
    r"(raw_|ansi_c_)?string|(simple_|arithmetic_)?expansion|(command|process)_substitution|"
    r"concatenation|command_name"
)
"""The kinds of nodes that are evaluated inside a word or a text."""


_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)")
"""The variables that an arithmetic expression assigns."""


class Place(NamedTuple):
    """A line of a file. "" is the name of a text."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"


class Piece(NamedTuple):
    """A part of a word.

    Attributes:
        text: The text. An unknown value remains as written, such as "$TP" or "$(nproc)".
        raw: The part as written, such as "${TP:-8}".
        place: The line where it is used.
        is_quoted: Whether the text is not split into words.
        origin: The line that assigned the value, if it is a variable's.
        unset: The name of the variable, if nothing sets it.
    """

    text: str
    raw: str
    place: Place
    is_quoted: bool = False
    origin: Place | None = None
    unset: str = ""


Word = tuple[Piece, ...]
Words = tuple[Word, ...]
Variables = dict[str, "tuple[Words | None, ...]"]
"""The alternatives of each variable. None is the alternative that it is not set."""


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
        place: Its line.
        variants: The command and its arguments, for each alternative of the variables in them.
        problem: Why the values of the variables in it are not known for sure, or "".
    """

    place: Place
    variants: Sequence[Words]
    problem: str = ""


class _Node:
    """A node of the syntax tree. Copied once, because attributes of tree-sitter are slow."""

    __slots__ = ("children", "end", "error", "is_named", "kind", "place", "source", "start")

    def __init__(self, node: Any, source: bytes, first: Place) -> None:
        self.kind: str = node.type
        self.is_named: bool = node.is_named
        self.place = Place(first.file, first.line + node.start_point[0])
        self.start: int = node.start_byte
        self.end: int = node.end_byte
        self.source = source
        if _PARTS.fullmatch(self.kind):  # tree-sitter counts blanks before an expansion as its part
            text = source[self.start : self.end]
            blanks = text[: len(text) - len(text.lstrip())]
            self.start += len(blanks)
            self.place = Place(first.file, self.place.line + blanks.count(b"\n"))
        self.children = [
            _Node(child, source, first) for child in node.children if child.type != "comment"
        ]
        errors = [child.error for child in self.children if child.error]
        is_error = self.kind == "ERROR" or node.is_missing
        self.error: Place | None = self.place if is_error else next(iter(errors), None)

    @property
    def text(self) -> str:
        return self.source[self.start : self.end].decode(errors="replace").strip()

    @property
    def named(self) -> list[_Node]:
        return [child for child in self.children if child.is_named]

    def split(self, kind: str) -> tuple[list[_Node], list[_Node]]:
        """Return the named children before and after the first child of a kind."""
        kinds = [child.kind for child in self.children]
        at = kinds.index(kind) if kind in kinds else 0
        parts = self.children[:at], self.children[at:]
        return tuple([one for one in part if one.is_named] for part in parts)  # type: ignore[return-value]


def _parse(text: str, first: Place) -> _Node:
    source = text.encode(errors="replace")
    language = required("tree_sitter_bash", "a launch file that is a shell script").language()
    package = required("tree_sitter", "a launch file that is a shell script")
    tree = package.Parser(package.Language(language)).parse(source)
    return _Node(tree.root_node, source, first)


class _End(Exception):  # noqa: N818 - no error
    """Ends a function or a script, as `return` and `exit` do."""


class Script:
    r"""Follows a script to its end.

    Args:
        environment: The values of variables that the script does not set.
        given: The values of variables and arguments that the user sets. The script cannot change
            them.
        wanted: The variables whose values are shown to commands, as words "$NAME=VALUE".
        load: A function that returns the name and the text of a file that the script sources, or
            None if the file must not be read.

    Attributes:
        commands: The commands that the script starts.
        problems: What could not be followed.
        unread: The commands that may set variables and are not followed.
        tested: The variables in conditions whose value is unknown.

    Example:
        >>> script = Script({}, {})
        >>> script.follow("case $1 in a) N=2;; *) N=4;; esac\nrun --tp $N", Place())
        >>> for words in script.commands[0].variants:
        ...     print([text_of(word) for word in words])
        ['run', '--tp', '2']
        ['run', '--tp', '4']
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        given: Mapping[str, str],
        wanted: Iterable[str] = (),
        load: Callable[[str], tuple[str, str] | None] = lambda _name: None,
    ) -> None:
        self.commands: list[Command] = []
        self.problems: list[str] = []
        self.unread: list[str] = []
        self.tested: list[str] = []
        self._given = given
        self._wanted = tuple(wanted)
        self._load = load
        self._variables: Variables = {
            name: ((_literal(text),),) for name, text in {**environment, **given}.items()
        }
        if count := max((int(name) for name in given if name.isdecimal()), default=0):
            names = [str(at) for at in range(1, count + 1)]
            words = [_literal(given.get(name, f"${name}")) for name in names]
            self._variables["@"] = (tuple(words),)
        self._functions: dict[str, _Node] = {}
        self._returned: list[Variables] = []
        self._depth = self._steps = self._variant = 0
        self._width = 1
        self._varying: set[str] = set()
        self._evals: list[tuple[str, str]] = []  # not followed: the line, and a variable to set
        self._read_names: set[str] = set()
        self._outer_names: set[str] = set()  # those that the enclosing commands read

    def follow(self, text: str, first: Place) -> None:
        """Follow a text that starts in a line."""
        if self._depth < _DEEPEST:
            self._depth += 1
            script = _parse(text, first)
            if script.error:
                self.problems.append(f"{script.error} is not valid shell; the rest may be misread")
            with contextlib.suppress(_End):
                self._do(script)
            self._depth -= 1

    # ---- statements ---------------------------------------------------------------------------

    def _do(self, node: _Node) -> bool | None:
        """Follow a statement. Return whether it succeeds, or None if unknown."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise LayoutError(f"{node.place.file or 'the text'} is too long to follow")
        statement = getattr(self, f"_do_{node.kind}", None)
        if statement is None or (node.error and node.kind != "command"):
            return self._all(node.named)
        result: bool | None = statement(node)
        return result

    def _all(self, nodes: Sequence[_Node]) -> bool | None:
        result = None
        for node in nodes:
            result = self._do(node)
        return result

    def _each(self, evaluate: Callable[[], T]) -> list[T]:
        """Return the results of an evaluation for each alternative of the variables in it."""
        outer = self._variant, self._width
        self._variant, self._width = 0, 1
        results = []
        while self._variant < self._width:
            results.append(evaluate())
            self._variant += 1
        self._variant, self._width = outer
        return results

    def _single(self, evaluate: Callable[[], T]) -> T | None:
        """Return the result of an evaluation, or None if it reads alternatives of two variables.

        It is not known which of these alternatives occur together.
        """
        outer, self._varying = self._varying, set()
        result = evaluate()
        is_single = len(self._varying) < 2
        self._varying |= outer
        return result if is_single else None

    def _branch(self, condition: str, bodies: Sequence[Sequence[_Node]]) -> bool | None:
        """Follow each body from the same variables, and unite the variables at their ends.

        Returns:
            Whether the body succeeds, or None if it is unknown or if there are several bodies.
        """
        result = None
        if len(bodies) > 1:
            self.tested += re.findall(r"\$\{?(\w+)", condition)
        before, ends = self._variables, []
        count = len(self._returned) + len(self.commands)
        for body in bodies:
            self._variables = dict(before)
            with contextlib.suppress(_End):
                result = self._all(body)
                ends.append(self._variables)
        if not ends and len(self._returned) + len(self.commands) > count:
            raise _End  # otherwise it is a check that fails only because a variable is unknown
        self._variables = _united(ends or [before])
        return result if len(bodies) == 1 else None

    def _do_if_statement(self, node: _Node) -> bool | None:
        bodies: list[Sequence[_Node]] = []
        clauses = [node, *(one for one in node.children if one.kind.endswith("_clause"))]
        for clause in clauses:
            condition, body = clause.split("then")
            holds = self._all(condition) if clause.kind != "else_clause" else True
            if holds is not False:
                bodies.append([one for one in body if not one.kind.endswith("_clause")])
            if holds:
                break
        else:
            bodies.append([])
        self._branch(" ".join(one.text.partition("then")[0] for one in clauses), bodies)
        return None

    def _do_case_statement(self, node: _Node) -> bool | None:
        items = [child for child in node.children if child.kind == "case_item"]
        bodies: dict[int, Sequence[_Node]] = {}
        for text in self._each(lambda: self._single(lambda: text_of(self._pieces(node.named[0])))):
            subject = "$" if text is None else text
            for at, item in enumerate(items):
                names, body = item.split(")")
                patterns = [text_of(self._pieces(name)) for name in names]
                if not is_known(subject) or any(fnmatchcase(subject, one) for one in patterns):
                    bodies[at] = body
                    if is_known(subject) or "*" in patterns:
                        break
            else:
                bodies[len(items)] = []
        self._branch(node.named[0].text, [bodies[at] for at in sorted(bodies)])
        return None

    def _do_while_statement(self, node: _Node) -> bool | None:
        *condition, body = node.named
        self._branch(node.children[1].text, [[*condition, body], condition])
        return None

    def _do_c_style_for_statement(self, node: _Node) -> bool | None:
        self._branch(node.children[1].text, [node.named[-1:], []])
        return None

    def _do_subshell(self, node: _Node) -> bool | None:
        before = dict(self._variables)
        result = self._all(node.named)
        self._variables = before
        return result

    def _do_compound_statement(self, node: _Node) -> bool | None:
        """Follow `{ ...; }`. What `(( ... ))` assigns is unknown."""
        if not node.text.startswith("(("):
            return self._all(node.named)
        self._forget(_ASSIGNED.findall(node.text))
        return None

    def _do_for_statement(self, node: _Node) -> bool | None:
        name, *lists, body = node.named
        variants = self._each(lambda: [word for one in lists for word in self._words(one)])
        words = variants[0]
        if len(variants) > 1 or not all(is_known(text_of(word)) for word in words):
            words = [(Piece(f"${name.text}", "", node.place),)]
        for word in words:
            self._set(name.text, [(word,)])
            self._do(body)
        return None

    def _do_function_definition(self, node: _Node) -> bool | None:
        self._functions[node.named[0].text] = node.named[-1]
        return True

    def _do_list(self, node: _Node) -> bool | None:
        left, sign, right = node.children[0], node.children[1].kind, node.children[-1]
        succeeds = self._do(left)
        if left.kind not in ("test_command", "list", "compound_statement", "negated_command"):
            succeeds = succeeds is not False  # a command that is started is assumed to succeed
        if succeeds is not None and succeeds != (sign == "&&"):
            return succeeds
        return self._branch(left.text, [[right]] if succeeds is not None else [[right], []])

    def _do_negated_command(self, node: _Node) -> bool | None:
        succeeds = self._all(node.named)
        return None if succeeds is None else not succeeds

    def _do_variable_assignment(self, node: _Node) -> bool | None:
        name, sign, *values = node.children
        if name.kind == "subscript":
            self._forget([name.named[0].text])
            return True
        is_array = any(value.kind == "array" for value in values)

        def assigned() -> Words:
            before = self._lookup(name.text) or ()
            if is_array:
                words = tuple(word for one in values[0].named for word in self._words(one))
                return (*before, *words) if sign.kind == "+=" else words
            pieces = [piece for one in values for piece in self._pieces(one)]
            word = tuple(piece._replace(is_quoted=False) for piece in pieces)
            if len(word) == 1 and word[0].unset.isdecimal() and before:
                return before  # the argument of an option that may not be given
            return ((*(before[0] if before and sign.kind == "+=" else ()), *word),)

        self._set(name.text, self._each(assigned))
        return True

    def _set(self, name: str, alternatives: Iterable[Words | None]) -> None:
        if name not in self._given:
            self._variables[name] = _distinct(alternatives)

    def _forget(self, names: Iterable[str]) -> None:
        """Note that the values of variables are no longer known."""
        for name in names:
            self._set(name, [None])

    def _do_test_command(self, node: _Node) -> bool | None:
        results: set[bool | None] = {None}
        if node.named:
            results = {*self._each(lambda: self._single(lambda: self._holds(node.named[0])))}
        return results.pop() if len(results) == 1 else None

    def _do_redirected_statement(self, node: _Node) -> bool | None:
        document = next((one for one in node.children if one.kind == "heredoc_redirect"), None)
        body = document and next((one for one in document.named if "body" in one.kind), None)
        if document is None or body is None:
            return self._do(node.children[0])
        is_literal = re.match(r"""<<-?\s*["'\\]""", document.text) is not None
        self._read_names = set()
        text = body.text if is_literal else text_of(self._pieces(body))
        line = node.source[: document.start].decode(errors="replace").rpartition("\n")[2]
        line += document.text.partition("\n")[0]
        if variable := re.search(r"\bread\s.*?(\w+)\s*<<", line):
            self._set(variable[1], [((Piece(text, text, body.place),),)])
        elif re.search(
            r"\b(bash|sh|zsh|ssh|sbatch|srun|qsub|docker)\b|\.(sh|sbatch|slurm)\b", line
        ):
            outer, self._outer_names = self._outer_names, self._outer_names | self._read_names
            self.follow(text, body.place)
            self._outer_names = outer
        else:
            self._do(node.children[0])
        return True

    def _do_unset_command(self, node: _Node) -> bool | None:
        for one in node.named:
            self._variables.pop(one.text, None)
        return True

    def _do_command(self, node: _Node) -> bool | None:
        outer = self._outer_names
        try:
            return self._command(node)
        finally:
            self._outer_names = outer

    def _command(self, node: _Node) -> bool | None:
        """Follow a command. `_outer_names` receives the names of the variables that it reads."""
        outer = dict(self._variables)
        parts = [one for one in node.named if "redirect" not in one.kind]
        self._all([one for one in parts if one.kind == "variable_assignment"])
        parts = [one for one in parts if one.kind != "variable_assignment"]
        shown = [name for name in self._wanted if name in self._variables]

        def words() -> Words:
            values = [
                (*_literal(f"${name}="), *self._value(name, "", node.place)) for name in shown
            ]
            return (*values, *(word for one in parts for word in self._words(one)))

        self._read_names = set()
        variants = self._each(words)
        self._outer_names = self._outer_names | self._read_names
        arguments = [one[len(shown) + 1 :] for one in variants]
        name = text_of(next((one[len(shown)] for one in variants if len(one) > len(shown)), ()))
        builtin = _BUILTINS.get(name)
        if name in self._functions and self._depth < _DEEPEST:
            return self._call(name, arguments)
        if builtin is not None:
            result = builtin(self, node, arguments)
            self._variables["IFS"] = outer.get("IFS", (None,))
            return result
        if re.match(r"--?\w|[\w+]+(\.\w+)+=", name):
            self.problems.append(
                f"{node.place} {name} does not belong to a command: a comment above it ends the "
                f"command"
            )
        elif not _PRINTERS.fullmatch(name):
            kept = self._unquoted(variants)
            self.commands.append(Command(node.place, kept, self._problem()))
        self._variables = outer
        return None

    def _unquoted(self, variants: Sequence[Words]) -> list[Words]:
        """Follow the commands that are arguments of a command, and return its other words."""
        texts: dict[Place, list[str]] = {}
        found = []
        for words in variants:
            others = []
            before = ""
            for word in words:
                text = re.sub(r"^--?[\w-]+=(?=\S)", "", text_of(word))
                is_command = before.endswith("c") and "python" not in text_of(words[0])
                if re.search(r"\S\s", text) and (is_command or re.search(r"\s--\w", text)):
                    texts.setdefault(word[0].place, []).append(text)
                else:
                    others.append(word)
                before = text
            found.append(tuple(others))
        for place, alternatives in texts.items():
            self._follow_all(alternatives, place)
        return found

    def _follow_all(self, texts: Sequence[str], place: Place) -> None:
        """Follow the alternatives of a text. Their commands are variants of the same commands."""
        count = len(self.commands)
        found = []
        for text in dict.fromkeys(texts):
            self.follow(text, place)
            found.append(self.commands[count:])
            del self.commands[count:]
        for same in itertools.zip_longest(*found):
            there = [command for command in same if command is not None]
            variants = [words for command in there for words in command.variants]
            problem = max(command.problem for command in there)
            self.commands.append(Command(there[0].place, variants, problem))

    def _call(self, name: str, variants: Sequence[Words]) -> bool | None:
        """Follow a function, whose arguments are its positional variables."""
        outer, self._returned = self._returned, []
        kept = self._variables.get("@", (None,))
        self._variables["@"] = _distinct(variants)
        self._depth += 1
        try:
            self._do(self._functions[name])
            self._returned.append(self._variables)
        except _End:
            if not self._returned:
                raise  # the function ends the script
        finally:
            self._depth -= 1
            self._variables = {**_united(self._returned or [self._variables]), "@": kept}
            self._returned = outer
        return None

    def _end(self, node: _Node, _variants: Sequence[Words]) -> bool | None:
        if node.text.startswith("return"):
            self._returned.append(self._variables)
        raise _End

    def _shift(self, _node: _Node, variants: Sequence[Words]) -> bool | None:
        count = text_of(variants[0][0]) if variants[0] else "1"
        arguments = self._variables.get("@", ())
        known = int(count) if count.isdecimal() else None
        self._variables["@"] = _distinct(
            None if words is None or known is None else words[known:] for words in arguments
        )
        return None

    def _let(self, node: _Node, _variants: Sequence[Words]) -> bool | None:
        self._forget(_ASSIGNED.findall(node.text))
        return None

    def _eval(self, node: _Node, variants: Sequence[Words]) -> bool | None:
        texts = [" ".join(map(text_of, words)) for words in variants]
        known = [text for text in texts if is_known(text[:1]) or text.startswith(_HOOK)]
        for text in [text for text in texts if text not in known][:1]:
            variable = re.match(r"\$\{?(\w+)", text)
            where = f"{node.place} eval {text.split()[0]}"
            self._evals.append((where, variable[1] if variable else ""))
        self._follow_all(known, node.place)
        return None

    def _problem(self) -> str:
        """Return a problem if an `eval` before a command may have set a variable that it reads."""
        names = sorted(
            name
            for name in self._outer_names
            if re.match("[A-Za-z_]", name) and name not in self._given
        )
        if not names or not self._evals:
            return ""
        where, variable = self._evals[0]
        return (
            f"{where} is not read, and may set {first_n(names, 8)}; write what it runs, or pass "
            + (
                f"--set {variable}=VALUE"
                if variable
                else f"all these, as in --set {names[0]}=VALUE"
            )
        )

    def _source(self, node: _Node, variants: Sequence[Words]) -> bool | None:
        name = text_of(variants[0][0]) if variants[0] else ""
        found = self._load(re.sub(r".*[$`](\([^)]*\)|\{[^}]*\}|\w+)?", "", name).lstrip("/"))
        if found is None:
            return self._skip(node, variants)
        kept = self._variables.get("@", (None,))
        if len(variants[0]) > 1:
            self._variables["@"] = (variants[0][1:],)
        self.follow(found[1], Place(found[0], 1))
        self._variables["@"] = kept
        return None

    def _read(self, node: _Node, variants: Sequence[Words]) -> bool | None:
        """Set the variables of `read NAME ... <<< TEXT`."""
        given = [one.named for one in node.named if one.kind == "herestring_redirect"]
        text = "".join(text_of(self._pieces(one)) for parts in given for one in parts)
        words = [text_of(word) for word in variants[0]]
        names = [word for word in words if word[:1] != "-"]
        if not text or not is_known(text):
            self._forget(names)
            return self._skip(node, [(_literal(" ".join(names)),)])
        separators = text_of(self._value("IFS", "", node.place)).replace("$IFS", " \t\n")
        parts = re.split(f"[{re.escape(separators)}]+", text)
        values = [(Piece(part, part, node.place),) for part in parts]
        is_array = any(re.match("-.*a", word) for word in words)
        found = [values] if is_array else [[value] for value in values]
        for name, alternative in zip(names, found, strict=False):
            self._set(name, [tuple(alternative)])
        return None

    def _mapfile(self, node: _Node, variants: Sequence[Words]) -> bool | None:
        """Forget the array of `mapfile NAME`."""
        self._forget([text_of(word) for word in variants[0][-1:]])
        return self._skip(node, variants)

    def _skip(self, node: _Node, variants: Sequence[Words]) -> bool | None:
        """Remember a command that may set variables and is not followed."""
        name = text_of(variants[0][0]) if variants[0] else ""
        self.unread.append(f"{node.place} {node.text.split()[0]} {name}")
        return None

    # ---- conditions ---------------------------------------------------------------------------

    def _holds(self, node: _Node) -> bool | None:
        """Return whether a comparison in brackets holds, or None if unknown."""
        if node.error:
            return None
        if node.kind == "binary_expression":
            left, right = self._operand(node.children[0]), self._operand(node.children[-1])
            sign = node.children[1].text
            if left is None or right is None:
                return None
            if sign in ("=", "==", "!="):
                return fnmatchcase(left, right) == (sign != "!=")
            compare = getattr(operator, sign[1:], None)  # such as -eq or -lt
            is_number = left.isdecimal() and right.isdecimal()
            return bool(compare(int(left), int(right))) if compare and is_number else None
        if node.kind == "unary_expression" and node.children[0].text in ("-z", "-n"):
            text = self._operand(node.children[-1], is_empty_if_unset=True)
            return None if text is None else (text == "") == (node.children[0].text == "-z")
        return None

    def _operand(self, node: _Node, *, is_empty_if_unset: bool = False) -> str | None:
        """Return the text of an operand, or None if unknown."""
        pieces = [] if node.kind.endswith("_expression") else self._pieces(node)
        text = text_of(pieces)
        names = [piece.unset for piece in pieces]
        if (
            is_empty_if_unset
            and names
            and all(re.match(r"(?!SLURM)[A-Za-z_]", one) for one in names)
        ):
            return ""
        return text if is_known(text) and pieces else None

    # ---- words --------------------------------------------------------------------------------

    def _words(self, node: _Node) -> list[Word]:
        """Return the words of an argument."""
        words: list[list[Piece]] = [[]]
        for piece in self._pieces(node):
            separator = f"({_BREAK})" if piece.is_quoted else rf"((?:\s|\\\n)+|{_BREAK})"
            parts = re.split(separator, piece.text)
            line = piece.place.line
            for at, part in enumerate(parts):
                if at % 2:
                    words.append([])
                elif part or piece.is_quoted:
                    raw = piece.raw if len(parts) == 1 else part
                    place = piece.place._replace(line=line)
                    words[-1].append(piece._replace(text=part, raw=raw, place=place))
                line += part.count("\n")
        self._steps += len(words)
        return [tuple(word) for word in words if word]

    def _pieces(self, node: _Node) -> list[Piece]:
        """Return the parts of a word or a text."""
        if node.kind in ("raw_string", "ansi_c_string"):
            text = node.text.lstrip("$")[1:-1]
            return [Piece(text, text, node.place, is_quoted=True)]
        if node.kind in ("simple_expansion", "expansion"):
            return self._expansion(node)
        if node.kind == "arithmetic_expansion":
            only = node.named[0] if len(node.named) == 1 else None
            number = None if only is None else self._single(lambda: self._number(only))
            text = "".join(node.text.split()) if number is None else str(number)
            return [Piece(text, node.text, node.place)]
        if node.kind in ("command_substitution", "process_substitution"):
            text = _HOOK if _HOOKS.match(node.text) else "$(...)"
            return [Piece(text, node.text[:80], node.place)]
        is_string = node.kind == "string"
        is_quoted = is_string or node.kind == "heredoc_body"
        at, end = (node.start + 1, node.end - 1) if is_string else (node.start, node.end)
        found: list[Piece] = []
        for part in [*(one for one in node.children if _PARTS.fullmatch(one.kind)), None]:
            between = node.source[at : part.start if part else end].decode(errors="replace")
            if between:
                escape = r'\\(["$`\\])' if is_quoted else r"\\(\n|.)"
                text = re.sub(escape, lambda escaped: escaped[1].strip("\n"), between)
                line = node.place.line + node.source[node.start : at].count(b"\n")
                found.append(Piece(text, between, node.place._replace(line=line), is_quoted))
            if part:
                inner = self._pieces(part)
                found += [one._replace(is_quoted=True) for one in inner] if is_quoted else inner
                at = part.end
        return found or [Piece("", "", node.place, is_quoted)]

    def _lookup(self, name: str) -> Words | None:
        """Return the words of the alternative of a variable that is evaluated."""
        is_argument = name.isdecimal() or name == "#"
        self._read_names.add(name)
        alternatives = self._variables.get("@" if is_argument else name) or (None,)
        self._width = max(self._width, len(alternatives))
        if len(alternatives) > 1:
            self._varying.add(name)
        words = alternatives[min(self._variant, len(alternatives) - 1)]
        if words is None or not is_argument:
            return words
        if name == "#":
            return (_literal(str(len(words))),)
        return words[int(name) - 1 : int(name)] or (_literal(""),)

    def _value(self, name: str, raw: str, place: Place) -> list[Piece]:
        """Return the value of a variable where it is used, or its name if nothing sets it."""
        words = self._lookup(name)
        if words is None:
            return [Piece("" if name in ("*", "@") else f"${name}", raw, place, unset=name)]
        word = words[0] if words else ()
        text = text_of(word)
        if not word or re.search(r"\s", text):
            return list(word)
        origin = word[-1].origin or word[-1].place
        return [Piece(text, raw, place, origin=origin, unset=word[-1].unset)]

    def _expansion(self, node: _Node) -> list[Piece]:
        """Return the value of `$NAME`, `${NAME:-DEFAULT}` or `${NAME[@]}`."""
        raw = node.text
        found = re.match(r"\$\{?(\w+|[@*#])(\[[@*]\])?(:?[-=+?]|\}?$)", raw)
        if not found or node.error:
            name = re.sub(r"^\$\{(\w+).*", r"\1", raw, flags=re.DOTALL)
            is_given = name in self._given
            return self._value(name, raw, node.place) if is_given else [Piece(raw, raw, node.place)]
        name, is_array, sign = found.groups()
        words = self._lookup(name)
        value = self._value(name, raw, node.place)
        if words is not None and (is_array or name in ("*", "@")):
            value = _joined(words)
        is_set = words is not None and bool(text_of(value) or ":" not in sign)
        is_set = is_set and not any(piece.unset for piece in value)
        if sign[-1:] in ("-", "=", "+") and is_set == (sign[-1] == "+"):
            kinds = [one.kind for one in node.children]
            parts = node.children[kinds.index(sign) + 1 : -1]
            text = "".join(text_of(self._pieces(one)) for one in parts)
            value = [Piece(text, raw, node.place)]
        return [] if sign[-1:] == "+" and not is_set else value

    def _number(self, node: _Node) -> int | None:
        """Return the value of an arithmetic expression, or None if unknown."""
        if node.error:
            return None
        if node.kind == "parenthesized_expression":
            return self._number(node.named[0])
        if node.kind == "binary_expression":
            one, two = self._number(node.children[0]), self._number(node.children[-1])
            compute = _ARITHMETIC.get(node.children[1].text)
            if one is None or two is None or compute is None or max(abs(one), abs(two)) > 10**9:
                return None
            return compute(one, two) if two or compute not in _DIVISIONS else None
        is_name = re.fullmatch(r"[A-Za-z_]\w*", node.text)
        pieces = self._value(node.text, "", node.place) if is_name else self._pieces(node)
        text = text_of(pieces)
        return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


_BUILTINS: dict[str, Callable[[Script, _Node, Sequence[Words]], bool | None]] = {
    "exit": Script._end,
    "return": Script._end,
    "shift": Script._shift,
    "eval": Script._eval,
    "source": Script._source,
    ".": Script._source,
    "read": Script._read,
    "mapfile": Script._mapfile,
    "readarray": Script._mapfile,
    "let": Script._let,
}

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
}
_DIVISIONS = (operator.floordiv, operator.mod)


def _literal(text: str) -> Word:
    return (Piece(text, text, Place()),)


def _joined(words: Words) -> list[Piece]:
    """Return the pieces of an array's words, with separators."""
    found: list[Piece] = []
    for word in words:
        found += [Piece(_BREAK, " ", word[0].place)] if found and word else []
        found += [piece._replace(is_quoted=True) for piece in word]
    return found


def _distinct(alternatives: Iterable[Words | None]) -> tuple[Words | None, ...]:
    """Return the alternatives with different texts. Too many or too long ones are unknown."""
    found = {
        None if words is None else tuple(text_of(word) for word in words): words
        for words in alternatives
    }
    length = sum(len(text) for texts in found for text in texts or ())
    if len(found) > _MOST_ALTERNATIVES or length > _MOST_TEXT:
        return (None,)
    return tuple(found.values())


def _united(ends: Sequence[Variables]) -> Variables:
    """Return the alternatives that variables have in any of several states."""
    first, *others = ends
    names = {name: None for end in others for name in {**first, **end}}
    changed = [
        name for name in names if any(end.get(name) is not first.get(name) for end in others)
    ]
    return first | {
        name: _distinct(one for end in ends for one in end.get(name, (None,))) for name in changed
    }
