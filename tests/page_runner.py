"""Runs the blocks of the pages in docs/, and compares what they print with the page.

A page's blocks are read from its fences, in order:

* `python` with `>>>` is a doctest. Other `python` is executed. All blocks share a namespace.
* `python` with `if __name__ == "__main__":` is a program, which runs as a separate script.
* `{ .python .example }` includes an example, which tests/test_examples.py runs.
* `text` titled "Output" is what the Python block before it prints.
* `console` contains hypercomm commands after `$`. The output of each command is below the command.
* A block in another language whose title is a file name is written to that file first.

A comment before a fence changes these rules. With `<!-- figures -->`, numbers in the output are not
compared. A block with `<!-- clients -->` runs only in tests that are marked `clients`. A block with
`<!-- elsewhere -->` is run by a separate test.

Errors name the page and the line.
"""

import contextlib
import doctest
import importlib
import io
import os
import re
import shlex
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path

import attrs
from processes import run_python

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

RUN = ("python", "console")
SHOWN = ("example", "text", "sh", "yaml", "toml", "json", "diff")
"""The languages of blocks that are only shown. RUN has the languages of blocks that are run."""

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<head>.*)\n(?P<text>(?:.*\n)*?)(?P=indent)```$", re.MULTILINE
)
_NOTES = re.compile(r"<!-- ((?:figures|clients|elsewhere)(?:, \w+)*) -->\n\s*$")
_MAIN = 'if __name__ == "__main__":'
_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class PageError(AssertionError):
    """A block does not do what its page says. The message begins with page and line."""


@attrs.frozen
class Block:
    """One fenced block of a page. `line` is the line number of its first line of text."""

    page: str
    line: int
    language: str
    title: str
    notes: tuple[str, ...]
    text: str

    @property
    def is_program(self):
        """Whether the block is a separate script."""
        return self.language == "python" and _MAIN in self.text

    @property
    def is_output(self):
        """Whether the block is the output of the block before it."""
        return self.language == "text" and self.title == "Output"

    def error(self, message, line=None):
        """Return an error that names page and line."""
        return PageError(f"{self.page}:{line or self.line}: {message}")


def pages():
    """Return all pages by their path in docs/."""
    return {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}


def blocks_of(path):
    """List the fenced blocks of a page."""
    text = path.read_text()
    found = []
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    for fence in _FENCE.finditer(text):
        head = fence["head"].strip().replace("{ .python .example }", "example")
        language, _, rest = head.partition(" ")
        title = re.search(r'title="(.*?)"', rest)
        notes = _NOTES.search(text, 0, fence.start())
        block = Block(
            page=name,
            line=text.count("\n", 0, fence.start()) + 2,
            language=language,
            title=title[1] if title else "",
            notes=tuple(notes[1].split(", ")) if notes else (),
            text=textwrap.dedent(fence["text"]),
        )
        if language not in (*RUN, *SHOWN):
            raise block.error(f"language {language!r} is none of {', '.join((*RUN, *SHOWN))}")
        found.append(block)
    return found


def run_page(path, folder, *, clients=False):
    """Run a page's blocks in a folder, and return how many were run.

    Args:
        path: The page.
        folder: The folder in which programs are written and commands run.
        clients: Whether to run the blocks marked `clients`. Otherwise, all other blocks are run.
    """
    namespace = {"__name__": "page"}
    count = 0
    blocks = blocks_of(path)
    for place, block in enumerate(blocks):
        is_ours = clients == ("clients" in block.notes) and "elsewhere" not in block.notes
        if block.language in SHOWN and Path(block.title).suffix:
            (Path(folder) / block.title).write_text(block.text)
        if block.language not in RUN or not is_ours:
            continue
        after = blocks[place + 1] if place + 1 < len(blocks) else None
        wanted = after if after is not None and after.is_output else None
        if block.language == "console":
            _run_commands(block, folder)
        elif ">>> " in block.text:
            _run_doctest(block, namespace)
        else:
            printed = _run_python(block, namespace, folder)
            if wanted is not None:
                _compare(block, wanted.text, printed, wanted.line)
        count += 1
    return count


def _run_doctest(block, namespace):
    test = doctest.DocTestParser().get_doctest(
        block.text, namespace, block.page, block.page, block.line - 1
    )
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=_OPTIONS, verbose=False)
    runner.run(test, out=report.write, clear_globs=False)
    if runner.failures:
        first = re.search(r"line (\d+), in", report.getvalue())
        raise block.error(report.getvalue().strip(), int(first[1]) if first else None)
    namespace.update(test.globs)


def _run_python(block, namespace, folder):
    """Execute a block and return what it prints. Errors have the line numbers of the page."""
    source = "\n" * (block.line - 1) + block.text
    file = block.page
    try:
        with _printed() as printed:
            if block.is_program:
                file = str(Path(folder) / f"{Path(block.page).stem}_{block.line}.py")
                _run_program(source, Path(file))
            else:
                exec(compile(source, file, "exec"), namespace)
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == file
        ]
        at = lines[-1] if lines else getattr(error, "lineno", None)
        raise block.error(f"{type(error).__name__}: {error}", at) from error
    return printed[0]


@contextlib.contextmanager
def _printed():
    """Collect the output of this process and of the ranks that it starts."""
    printed = []
    before = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            with contextlib.redirect_stdout(file):
                yield printed
        finally:
            file.flush()
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            printed.append(file.read())


def _run_program(source, file):
    """Run a script in this process, whose fork server has loaded torch already.

    The functions of the script are put into a module, which the ranks import by name.
    """
    at = source.index(_MAIN)
    file.write_text(source[:at])
    main = "\n" * (source.count("\n", 0, at) + 1) + textwrap.dedent(source[at + len(_MAIN) :])
    main = main.replace("\n", "", 1)  # without the rest of the line that begins with `if`
    sys.path.insert(0, str(file.parent))
    try:
        module = importlib.import_module(file.stem)
        exec(compile(main, str(file), "exec"), vars(module))
    finally:
        sys.path.remove(str(file.parent))
        sys.modules.pop(file.stem, None)


def _run_commands(block, folder):
    commands = list(re.finditer(r"^\$ (.+)$", block.text, flags=re.MULTILINE))
    if not commands or block.text[: commands[0].start()].strip():
        raise block.error("a console block begins with a command after '$ '")
    ends = [*(command.start() for command in commands[1:]), len(block.text)]
    for command, end in zip(commands, ends, strict=True):
        line = block.line + block.text.count("\n", 0, command.start())
        words = shlex.split(command[1])
        if words[0] != "hypercomm":
            raise block.error(f"{words[0]} is not run here: write the block as `sh`", line)
        where = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        done = run_python("-m", *words, folder=folder, seconds=240, COLUMNS="100", **where)
        _compare(block, block.text[command.end() : end], done.stdout or done.stderr, line)


def _compare(block, wanted, got, line):
    """Compare the output. `...` matches anything, and runs of spaces are equal."""
    shown = [without_figures(text) if "figures" in block.notes else text for text in (wanted, got)]
    shown = [textwrap.dedent(text).strip() + "\n" for text in shown]
    if not doctest.OutputChecker().check_output(*shown, _OPTIONS):
        raise block.error(f"it prints\n{got.strip()}\nand not\n{wanted.strip()}", line)


def without_figures(text):
    """Replace numbers, which differ from run to run.

    >>> without_figures("tp   1,024 x 2   8.0 ms  ── ok")
    'tp # x # # ms  ── ok'
    """
    text = re.sub(r"\s*(?<![\w])\d[\d.,]*(?:e[-+]\d+)?", " #", text)
    return re.sub(r"─+", "──", text)
