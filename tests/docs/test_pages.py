"""Test that every block of the README and of the site's pages does what the page says.

Sybil reads the blocks and runs those of a page in order, in one namespace:

* `python` with `>>>` is a doctest. Other `python` is executed. With `if __name__ == "__main__":`,
  it is a program with its own namespace.
* `text` titled "Output" is what the Python block before it prints.
* `console` is a hypercomm command after `$`, with its output below.
* `sh` titled with a file name is written to that file.
* `{ .python .example }` includes an example, which tests/test_examples.py runs.
* A block after `<!-- skip: next -->`, and `python` with a title, is run by a separate test below.
"""

import doctest
import re
import shlex
from pathlib import Path

import pytest
from processes import run_python
from sybil import Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.example import SybilFailure
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = {str(path.relative_to(ROOT)): path for path in [README, *(ROOT / "docs").rglob("*.md")]}
CLIENTS = "docs/how-to/wrong_numbers.md"
"""The page that needs a torch newer than the oldest supported one."""

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SHOWN = re.compile(r'{ \.python \.example }|(sh|diff|text)( title=".+")?|python title="\w+\.py"')
"""The blocks that are only shown, or run by a separate test."""


def difference(wanted, printed):
    """Describe how the output differs from the page. `...` matches anything, spaces are equal."""
    example = doctest.Example("", wanted)
    checker = doctest.OutputChecker()
    if checker.check_output(example.want, printed, OPTIONS):
        return None
    return checker.output_difference(example, printed, OPTIONS)


def run_block(example):
    example.namespace["capfd"].readouterr()  # drops what the blocks before have printed
    if 'if __name__ == "__main__":' in example.parsed:
        example.namespace = {"__name__": "__main__"}
    PythonEvaluator()(example)


def compare_output(example):
    return difference(example.parsed, example.namespace["capfd"].readouterr().out)


def run_command(example):
    command, _, wanted = example.parsed.partition("\n")
    prompt, name, *arguments = shlex.split(command)
    if (prompt, name) != ("$", "hypercomm"):
        return f"{command} is not run: write the block as `sh`"
    done = example.namespace["in_process"](*arguments)
    printed = done.stdout or done.stderr
    if arguments[0] == "check":  # it measures
        wanted, printed = (re.sub(r"\s+\d[\d.]*|─+", " #", text) for text in (wanted, printed))
    return difference(wanted, printed)


def write_file(example):
    Path(example.region.lexemes["file"]).write_text(example.region.lexemes["source"])


def files(document):
    """Find the shell scripts that the commands of a page read."""
    for region in FencedCodeBlockLexer(r'sh title="(?P<file>.+)"')(document):
        region.evaluator = write_file
        yield region


PYTHON = PythonCodeBlockParser(doctest_optionflags=OPTIONS)
PYTHON.codeblock_parser = CodeBlockParser("python", run_block)
OUTPUT = CodeBlockParser('text title="Output"', compare_output)
CONSOLE = CodeBlockParser("console", run_command)
SYBIL = Sybil([PYTHON, OUTPUT, CONSOLE, SkipParser(), files], pattern="*.md")


@pytest.fixture
def run_page(tmp_path, monkeypatch, capfd, in_process):
    """Return a function that runs the blocks of a page in an empty folder."""

    def run(path):
        document = SYBIL.parse(path)
        document.namespace.update(__name__="page", capfd=capfd, in_process=in_process)
        for example in document.examples():
            example.evaluate()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return run


# Every block does what its page says, in the order of the page.
@pytest.mark.parametrize("name", sorted(PAGES.keys() - {CLIENTS}))
def test_blocks_of_a_page(name, run_page):
    run_page(PAGES[name])


@pytest.mark.clients
def test_blocks_of_clients(run_page):
    run_page(PAGES[CLIENTS])


# Sybil skips a block whose language it does not know, so a misspelt language must fail here.
def test_language_of_each_block():
    run = 0
    for name, path in PAGES.items():
        for region in FencedCodeBlockLexer(r".*")(SYBIL.parse(path)):
            language = region.lexemes["language"].strip()
            is_run = language in ("python", "console", 'text title="Output"')
            assert is_run or SHOWN.fullmatch(language), f"{name}: {language}"
            run += is_run
    assert run > 100


# A block that does not do what its page says fails, with the page and the line.
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# A\n\n```python\na = 1\nb = 1 / 0\n```\n", 5),
        ('```python\nif __name__ == "__main__":\n    1 / 0\n```\n', 3),
        ("```python\n>>> 1 + 1\n2\n>>> 1 + 2\n4\n\n```\n", 4),
        ('```python\nprint(1)\n```\n\n```text title="Output"\n2\n```\n', 5),
        ("\n```console\n$ hypercomm diff tp=2 tp=2\n1 of 2\n```\n", 2),
        ("\n```console\n$ rm -rf /\n```\n", 2),
    ],
)
def test_wrong_block_fails(run_page, tmp_path, text, line):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises((ZeroDivisionError, SybilFailure)) as caught:
        run_page(page)
    frames = [(entry.path, entry.lineno + 1) for entry in caught.traceback]
    assert f"{page}, line {line}," in str(caught.value) or (page, line) in frames


def run_pytest_of(name, folder, mistake=()):
    """Run pytest on the tests of a page that Sybil skips, each of which may have a title."""
    blocks = r'(?:<!-- skip: next -->\n```python|```python title="([\w.]+)")\n(.*?)```'
    for title, text in re.findall(blocks, PAGES[name].read_text(), re.DOTALL):
        (folder / (title or "test_it.py")).write_text(text.replace(*mistake) if mistake else text)
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", folder=folder)
    return done.stdout + done.stderr


# The property test in first_hour.md finds its bug, and shrinks it to the grid that the page shows.
@pytest.mark.full
def test_property_test_of_the_first_hour(tmp_path):
    report = run_pytest_of("docs/start/first_hour.md", tmp_path)
    assert re.search(r"^rank [01] failed: ", report, re.MULTILINE), report
    assert "AssertionError: Tensor-likes are not close!" in report
    assert "grid=HyperCommGrid(tp=2): ranks 0..1 of a world of 2" in report


# A page tests one layer twice: with a hand-written harness and with the marker. If the layer has a
# mistake, both tests fail.
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mistake", "result"),
    [
        ("docs/how-to/testing.md", (), "2 passed"),
        ("docs/how-to/port_a_test.md", (), "2 passed"),
        ("docs/how-to/port_a_test.md", ("dist.all_reduce(y)", "pass"), "2 failed"),
    ],
)
def test_skipped_tests(tmp_path, name, mistake, result):
    report = run_pytest_of(name, tmp_path, mistake)
    assert f"\n{result} in " in report, report
