"""How values look in a notebook, as dicts that JSON can hold, and as tables of pandas."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hypercomm import GridSet, HyperCommGrid, RankLayout, RankMapping, errors
from hypercomm.layout.difference import difference
from hypercomm.testing import fake_world, simulate

EXAMPLE = Path(__file__).parents[1] / "examples" / "grid.ipynb"
ODD = RankLayout([2, 3], ["t<p", "d&p"], 4)
LISTED = RankLayout([2, 2], ["tp", "dp"], ranks=[9, 8, 0, 1])


class Page(HTMLParser):
    """The texts of cells and items, if every tag that opens closes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):  # noqa: ARG002 - the parser gives it
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.cells.append(data)


def explained():
    with fake_world(8), HyperCommGrid("t<p=2,dp=4") as grid:
        return grid.explain("t<p")


def program():
    with HyperCommGrid("t<p=2") as grid:
        grid.create_pg("t<p")


VALUES = [
    ODD,
    LISTED,
    ODD.groups("t<p"),
    LISTED.groups("dp"),
    RankLayout.parse("dp=100").groups("dp"),
    RankLayout.parse("tp=2,dp=50").groups("tp"),
    RankMapping("t<p=2,dp=2", "dp=4"),
    RankMapping("dp=64", "dp=64"),
    difference(RankLayout.parse("t<p=2,dp=4"), RankLayout.parse("t<p=4,dp=2")),
    simulate(program, 2),
    explained(),
    GridSet.tile(8, **{"a<b": "t<p=2,dp=2", "llm": "tp=4"}),
    HyperCommGrid("t<p=2,dp=4", world_size=8),
]


# A notebook gets well-formed HTML, in which nothing of a name is a tag.
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_html(value):
    text = value._repr_html_()
    page = Page(text)
    assert "<p>" in text or "<svg" in text
    assert all("t<p" not in tag for tag in page.open)
    assert "t<p" not in text
    assert len(text) < (40_000 if "<svg" in text else 5_000)


# Layouts, grids, differences and mappings are seen as they are drawn, the large ones by host.
def test_pictures():
    layouts = RankLayout.parse("tp=2,dp=4"), RankLayout.parse("tp=4,dp=2")
    for value in (layouts[0], difference(*layouts), RankMapping(*layouts)):
        assert value.draw().svg() in value._repr_html_()
    with HyperCommGrid(layouts[0], world_size=8) as grid:
        assert layouts[0].draw().svg() in grid._repr_html_()
        assert "no process groups yet" in grid._repr_html_()
    many = RankLayout.parse("tp=8,dp=8192")
    assert len(many._repr_html_()) < 200_000
    assert many.draw()._repr_html_() == many._repr_html_()


# `repr` of all of them is one line.
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_one_line(value):
    assert "\n" not in repr(value)


def test_cells():
    large = RankLayout([2, 2**20], ["t<p", "d&p"], 4)
    assert Page(large._repr_html_()).cells == [
        *("RankLayout t<p=2,d&p=1048576: ranks 4..2097155", "dim", "size", "stride"),
        *("t<p", "2", "1", "d&p", "1048576", "2"),
    ]
    assert "and 30 more" in Page(RankLayout.parse("tp=2,dp=50").groups("tp")._repr_html_()).cells


# What `to_dict` returns goes through JSON unchanged, and a layout comes back.
@pytest.mark.parametrize("value", VALUES[:-3], ids=lambda value: type(value).__name__)
def test_to_dict(value):
    told = value.to_dict()
    assert json.loads(json.dumps(told)) == told
    if isinstance(value, RankLayout):
        assert RankLayout(**told) == value
        assert json.dumps(told) == value.to_json()


def test_what_dicts_have():
    mapping = RankMapping("tp=2,dp=2", "dp=4").to_dict()
    assert RankLayout(**mapping["source"]) == RankLayout.parse("tp=2,dp=2")
    pairs = {(message["source"], message["target"]) for message in mapping["messages"]}
    assert {target for _, target in pairs} == {0, 1, 2, 3}
    (group,) = simulate(program, 2).to_dict()["groups"]
    assert (group["ranks"], group["description"], group["timeout_s"]) == ([0, 1], "t<p", 600.0)


# A mapping reads its ends off a grid or a text, as well as off a layout.
def test_ends_of_a_mapping():
    grid = HyperCommGrid("tp=2,dp=2", world_size=4)
    layout = RankLayout.parse("tp=2,dp=2")
    assert RankMapping(grid, "dp=4") == RankMapping(layout, RankLayout.parse("dp=4"))
    grid.register_view("expert", [4], ["dp"])
    assert RankMapping(layout, grid.view("expert")).target.sizes == {"dp": 4}


# Without pandas there is a sentence that says what to install.
def test_no_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for value in (ODD, ODD.groups("t<p"), RankMapping("dp=2", "dp=4")):
        with pytest.raises(errors.MissingPackageError, match=r"needs pandas: pip install pandas$"):
            value.to_pandas()


# With pandas each row says what the value's own methods say.
def test_pandas():
    pytest.importorskip("pandas")
    for layout in (ODD, LISTED):
        frame = layout.to_pandas()
        assert frame.index.name == "rank"
        assert list(frame.index) == list(layout.ranks)
        for rank, row in frame.iterrows():
            assert row.to_dict() == layout.coords(rank)
        groups = layout.groups(layout.dim_names[1])
        assert [tuple(row) for row in groups.to_pandas().itertuples(index=False)] == list(groups)
    mapping = RankMapping("tp=2,dp=2", "dp=4")
    frame = mapping.to_pandas()
    assert list(frame.columns) == ["source", "target", "start_0", "stop_0"]
    assert frame.index.name == "message"
    for rank in mapping.source_ranks:
        sent = tuple(message.target for message in mapping.sends(rank))
        assert tuple(frame[frame.source == rank].target) == sent


KERNEL = """
import ast, json, pathlib, sys

names = {"__name__": "__main__"}
for cell in json.loads(pathlib.Path(sys.argv[1]).read_text())["cells"]:
    text = "".join(cell["source"])
    if cell["cell_type"] != "code":
        continue
    if text.startswith("%%writefile "):
        first, _, rest = text.partition("\\n")
        pathlib.Path(first.split()[1]).write_text(rest)
        continue
    *lines, last = ast.parse(text).body
    if not isinstance(last, ast.Expr):
        lines, last = [*lines, last], ast.parse("None").body[0]
    exec(compile(ast.Module(lines, []), "cell", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    if value is not None:
        print("a picture" if "<svg" in getattr(value, "_repr_html_", str)() else value)
"""
"""What a kernel does with the cells of a notebook, as far as the example needs it."""


# The example's cells run in order, also those on real ranks, and it holds no outputs that grow old.
@pytest.mark.slow
def test_the_example(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, EXAMPLE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:5] == [
        "a picture",
        "{'tp': 1, 'cp': 0, 'dp': 1}",  # 5 is 1 + 0 * 2 + 1 * 4
        "{'tp': (4, 5), 'cp': (5, 7), 'dp': (1, 5)}",
        "None 1",
        "a picture",
    ]
    assert "  this is rank 5, at tp=1, cp=0, dp=1" in lines
    assert lines[-1] == str([{"tp": 2, "dp": 2}] * 4)
    notebook = json.loads(EXAMPLE.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert all(not cell.get("outputs") for cell in notebook["cells"])


# A function of a cell, which no rank would find, is refused before one starts.
def test_a_function_of_a_cell():
    cell = "from hypercomm import run_ranks\ndef work():\n    pass\nrun_ranks(work, 2)\n"
    done = subprocess.run(
        [sys.executable, "-c", cell], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.stderr.splitlines()[-1] == (
        "hypercomm.errors.LaunchError: work is defined where there is no file (a notebook, a "
        "prompt, python -c), and ranks, which are processes, do not find it; write it to a file, "
        "in a notebook with %%writefile, and import it"
    )
