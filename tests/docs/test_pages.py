"""Test that every block of the site's pages runs, and prints the output that the page shows."""

import re

import page_runner as runner
import pytest
from processes import run_python

PAGES = runner.pages()
BLOCKS = {name: runner.blocks_of(path) for name, path in PAGES.items()}


def has(name, is_wanted):
    return any(is_wanted(block) for block in BLOCKS[name] if block.language in runner.RUN)


RUN = [name for name in PAGES if has(name, lambda block: "clients" not in block.notes)]
CLIENTS = [name for name in PAGES if has(name, lambda block: "clients" in block.notes)]


# Every block does what its page says, in the order of the page.
@pytest.mark.parametrize("name", RUN)
def test_blocks_of_a_page(name, tmp_path):
    assert runner.run_page(PAGES[name], tmp_path) > 0


# Blocks marked `clients` start more processes, or need a torch newer than the oldest supported one.
@pytest.mark.clients
@pytest.mark.parametrize("name", CLIENTS)
def test_client_blocks_of_a_page(name, tmp_path):
    assert runner.run_page(PAGES[name], tmp_path, clients=True) > 0


# The property test in first_hour.md finds its bug, and shrinks it to the grid that the page shows.
@pytest.mark.full
def test_property_test_of_the_first_hour(tmp_path):
    programs = [block for block in BLOCKS["start/first_hour.md"] if "elsewhere" in block.notes]
    (tmp_path / "test_layer.py").write_text(programs[0].text)
    pytest_arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_layer.py"]
    done = run_python(*pytest_arguments, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^rank [01] failed: ", done.stdout, re.MULTILINE), done.stdout
    assert "AssertionError: Tensor-likes are not close!" in done.stdout
    assert "grid=HyperCommGrid(tp=2): ranks 0..1 of a world of 2" in done.stdout


def harnesses():
    blocks = {block.title: block.text for block in BLOCKS["how-to/port_a_test.md"]}
    return {name: blocks[name] for name in ("layer.py", "test_by_hand.py", "test_with_marker.py")}


# The page tests one layer twice: with a hand-written harness and with the marker. If the layer has
# a mistake, both tests fail.
@pytest.mark.full
@pytest.mark.parametrize("mistake", [None, ("dist.all_reduce(y)", "pass")])
def test_ported_test(tmp_path, mistake):
    for name, text in harnesses().items():
        (tmp_path / name).write_text(text.replace(*mistake) if mistake else text)
    for name in ("test_by_hand.py", "test_with_marker.py"):
        done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", name, folder=tmp_path)
        assert done.returncode == bool(mistake), done.stdout + done.stderr


# The page shows the number of lines of each of these two tests.
def test_lines_of_a_ported_test():
    def lines(text):
        found = [line for line in text.splitlines() if line.strip()]
        return len([line for line in found if not line.startswith(("import ", "from "))])

    texts = harnesses()
    counts = f"| {lines(texts['test_by_hand.py'])} | {lines(texts['test_with_marker.py'])} |"
    page = PAGES["how-to/port_a_test.md"].read_text()
    assert f"| lines, without imports and blank lines {counts}" in page


# The error of a block that fails names the page and the line, for every kind of block.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# A\n\n```python\na = 1\nb = 1 / 0\n```\n", "page.md:5: ZeroDivisionError: division by"),
        ("```python\n>>> 1 + 1\n2\n>>> 1 + 2\n4\n\n```\n", "page.md:4: "),
        (
            '```python\nprint(1)\n```\n\n```text title="Output"\n2\n```\n',
            "page.md:6: it prints\n1\n",
        ),
        ('```python\nif __name__ == "__main__":\n    1 / 0\n```\n', "page.md:3: ZeroDivisionError"),
        ("```console\n$ rm -rf /\n```\n", "page.md:2: rm is not run here: write the block as `sh`"),
        ("```py\n1 / 0\n```\n", "page.md:2: language 'py' is none of python, console, "),
        pytest.param(
            "\n```console\n$ hypercomm diff tp=2 tp=2\n1 of 2\n```\n",
            "page.md:3: it prints\n",
            marks=pytest.mark.full,
        ),
    ],
)
def test_error_of_a_block_names_page_and_line(tmp_path, text, message):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(runner.PageError) as caught:
        runner.run_page(page, tmp_path)
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(message)


# The runner finds all fences of all pages.
def test_every_fence_is_read():
    for name, path in PAGES.items():
        fences = [line for line in path.read_text().splitlines() if line.strip().startswith("```")]
        assert len(fences) == 2 * len(BLOCKS[name]), name
    assert len(RUN) > 25
