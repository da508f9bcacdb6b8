"""Test the repr and str of values, layouts as arguments of mappings, and the example notebook."""

import json
from pathlib import Path

import pytest
from processes import run_python

from hypercomm import GridSet, GroupRequest, HyperCommGrid, RankLayout, RankMapping
from hypercomm.layout.difference import difference
from hypercomm.process_groups.world import current
from hypercomm.testing import fake_world, simulate

EXAMPLE = Path(__file__).parents[1] / "examples" / "grid.ipynb"


# repr() of a returned value is one line, and str() is not empty.
def test_repr_is_one_line():
    layout = RankLayout("tp=2,dp=4")
    listed = RankLayout([2, 2], ["tp", "dp"], ranks=[9, 8, 0, 1])
    with fake_world(8), HyperCommGrid(layout) as grid:
        grid.create_pgs(["tp", "dp"])
        values = [grid, grid.explain("tp"), grid.connect(), grid.reshape("tp=4,dp=2")]
    values += [layout, listed, listed.groups("dp"), RankMapping("dp=2", "dp=4"), simulate(int, 2)]
    values += [difference(layout, listed), GridSet.tile(8, a=layout)]
    for value in values:
        assert "\n" not in repr(value)
        assert str(value)


# A world shows its size and the calling rank, but not the tables that it keeps. A request shows
# only the arguments that are given.
def test_repr_is_short():
    with fake_world(8, rank=3):
        assert repr(current()) == "<World of 8 ranks: rank 3, backend fake>"
    with fake_world(3, rank=2, parts={"trainer": 2, "engine": 1}) as world:
        text = f"<World {world.name!r} of 3 ranks: engine rank 0 of 1, backend {world.backend}>"
        assert repr(world) == text.replace(" ''", "")
    assert repr(GroupRequest("tp")) == "GroupRequest('tp')"
    request = GroupRequest(["dp", "cp"], name="twin", lazy_init=False)
    assert repr(request) == "GroupRequest(['dp', 'cp'], name='twin', lazy_init=False)"


# A mapping accepts a grid, a view or text in place of a layout.
def test_mapping_accepts_grids_and_text():
    grid = HyperCommGrid("tp=2,dp=2", world_size=4)
    layout = RankLayout("tp=2,dp=2")
    assert RankMapping(grid, "dp=4") == RankMapping(layout, RankLayout("dp=4"))
    grid.register_view("expert", [4], ["dp"])
    assert RankMapping(layout, grid.view("expert")).target.sizes == {"dp": 4}


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
"""A program that runs the cells of the example notebook as a kernel does."""


# The cells of the example notebook run in order, also on real ranks. The notebook is stored without
# outputs.
@pytest.mark.slow
def test_example_notebook(tmp_path):
    done = run_python("-c", KERNEL, EXAMPLE, folder=tmp_path)
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
    assert notebook["nbformat"] == 4
    assert notebook["nbformat_minor"] == 5
    assert all(not cell.get("outputs") for cell in notebook["cells"])
