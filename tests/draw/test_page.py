"""The HTML page as text: it loads nothing, stays small, keeps names apart from markup, and holds
what a reader of it would work out."""

import base64
import html
import json
import re
import time
import zlib
from html.parser import HTMLParser
from importlib.resources import files
from itertools import product

import attrs
import numpy as np
import pytest

from hypercomm import LayoutError, RankLayout
from hypercomm.draw.page import _SCRIPTS, _STYLES, page
from hypercomm.draw.scenes import Change, ChangeScene, GridScene, MatrixScene
from hypercomm.tools.place import read_topology

pytestmark = pytest.mark.torch_free


def grid_scene(sizes="tp=2,dp=4", on=None, **more):
    layout = RankLayout.parse(sizes)
    topology = None if on is None else read_topology(on, layout.size)
    return GridScene("a grid", (("", layout),), topology, **more)


def change_scene():
    before, after = RankLayout.parse("tp=2,dp=4"), RankLayout.parse("tp=4,dp=2")
    changes = (
        Change(("tp",), (), "gone", "4 x 2", 0),
        Change(("tp", "dp"), ("tp", "dp"), "kept", "1 x 8", 1),
    )
    return ChangeScene("a change", before, after, changes, summary="1 of 9 is kept")


def matrix_scene():
    return MatrixScene("a matrix", (0, 1), (4, 5), [(0, 4, 2**40), (1, 5, 3)], "B")


SCENES = {"grid": grid_scene, "change": change_scene, "matrix": matrix_scene}


def data_of(text):
    (data,) = re.findall(
        r'<script id="scene" type="application/json">(.*?)</script>', text, re.DOTALL
    )
    return json.loads(data)


def unpacked(text):
    content = zlib.decompress(base64.b64decode(text[1:]))
    return np.cumsum(np.frombuffer(content, {"i": "<i4", "d": "<f8"}[text[0]])).astype(int).tolist()


def names_of(text):
    return json.loads(zlib.decompress(base64.b64decode(text)))


def ranks_by(grid):
    """Each combination of coordinates and its rank, by what the page holds of a grid alone."""
    listed = None if grid["ranks"] is None else unpacked(grid["ranks"])
    for coords in product(*map(range, grid["shape"])):
        offset = sum(digit * stride for digit, stride in zip(coords, grid["strides"], strict=True))
        rank = grid["offset"] + offset if listed is None else listed[offset]
        yield dict(zip(grid["dims"], coords, strict=True)), rank


class Tags(HTMLParser):
    """The start tags of a document, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, given):
        self.tags.append((tag, dict(given)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, text):
        self.texts.append((self.open[-1] if self.open else "", text))


# Nothing in the document has an address; what could fetch is forbidden by its own policy.
@pytest.mark.parametrize("kind", SCENES)
def test_nothing_is_loaded(kind):
    text = page(SCENES[kind]())
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bimport\(|\bfetch\(|XMLHttpRequest", text)
    tags = Tags(text).tags
    policies = [given["content"] for tag, given in tags if given.get("http-equiv")]
    assert policies[0].startswith("default-src 'none';")
    addresses = [given[name] for _, given in tags for name in ("src", "href") if name in given]
    assert addresses == ["data:,"]


# Each file of the assets is used, and none can end the element that holds it.
def test_assets():
    folder = files("hypercomm.draw") / "assets"
    names = {each.name for each in folder.iterdir()}
    assert names == {*_SCRIPTS, *_STYLES, "page.html"}
    for name in names - {"page.html"}:
        text = (folder / name).read_text(encoding="utf-8")
        assert "</" not in text
        assert len(text.splitlines()) <= 400, name


# Dense, from an offset, with gaps, and listed.
@pytest.mark.parametrize(
    "layout",
    [
        RankLayout.parse("tp=2,cp=3,dp=4"),
        RankLayout([2, 3], ["tp", "dp"], 7),
        RankLayout([2, 3], ["tp", "dp"], 5, strides=(4, 8)),
        RankLayout([2, 3], ["tp", "dp"], ranks=[9, 4, 1, 0, 30, 2]),
    ],
    ids=["dense", "offset", "gaps", "listed"],
)
def test_coordinates(layout):
    (grid,) = data_of(page(GridScene("", (("", layout),))))["grids"]
    held = list(ranks_by(grid))
    assert len(held) == layout.size
    assert all(layout.coords(rank) == coords for coords, rank in held)


# Hosts of 4, domains of 8: the page has the unit of each rank, and its name.
def test_levels():
    levels = data_of(page(grid_scene("tp=4,dp=4", "host=4,domain=8")))["levels"]
    assert [level["name"] for level in levels] == ["host", "domain"]
    assert [unpacked(level["of"]) for level in levels] == [
        [rank // 4 for rank in range(16)],
        [rank // 8 for rank in range(16)],
    ]
    assert [names_of(level["names"]) for level in levels] == [
        [f"host{i}" for i in range(4)],
        [f"domain{i}" for i in range(2)],
    ]


def test_matrix():
    data = data_of(page(matrix_scene()))
    columns = [unpacked(data[name]) for name in ("rows", "columns", "amounts")]
    assert columns == [[0, 1], [4, 5], [2**40, 3]]
    assert unpacked(data["sources"]) == [0, 1]
    assert unpacked(data["targets"]) == [4, 5]


def test_a_matrix_of_nothing():
    data = data_of(page(attrs.evolve(matrix_scene(), cells=[])))
    assert unpacked(data["rows"]) == []


# Amounts and ranks beyond 32 bits, also where only their differences are.
def test_large_numbers():
    cells = [(0, 4, 2**31 - 1), (1, 5, 2**52), (1, 4, 0)]
    data = data_of(page(attrs.evolve(matrix_scene(), cells=cells)))
    assert unpacked(data["amounts"]) == [2**31 - 1, 2**52, 0]
    last = RankLayout([2], ["dp"], ranks=[2**31 - 1, 0])
    assert (
        unpacked(data_of(page(GridScene("", (("", last),))))["grids"][0]["ranks"])[0] == 2**31 - 1
    )


def test_change():
    data = data_of(page(change_scene()))
    assert [grid["shape"] for grid in data["grids"]] == [[2, 4], [4, 2]]
    assert data["changes"][0] == {
        "before": ["tp"],
        "after": [],
        "result": "gone",
        "counts": "4 x 2",
        "kept": 0,
    }


def test_edges():
    grids = (("vision", RankLayout.parse("tp=2")), ("llm", RankLayout([4], ["tp"], 2)))
    data = data_of(page(GridScene("", grids, edges=(("vision", "llm"),))))
    assert data["edges"] == [[0, 1]]


# A name may be anything: it stays text, and the places of the page are no names.
@pytest.mark.parametrize(
    "name",
    ["</script><script>alert(1)</script>", "<!--<script>", "{{data}}", "\\1", "&amp;", "é\u2028"],
)
def test_names_are_text(name):
    plain = Tags(page(grid_scene())).tags
    dim = re.sub(r"[-\s=+,]", "", name)  # what a dim may not hold
    text = page(GridScene(name, ((name, RankLayout([2, 2], [dim, "dp"])),), dims=(dim,)))
    tags = Tags(text)
    assert tags.tags == plain
    assert ("title", name) in tags.texts
    assert ("h1", name) in tags.texts
    assert data_of(text)["grids"][0]["dims"] == [dim, "dp"]
    assert data_of(text)["grids"][0]["name"] == name
    assert f"<title>{html.escape(name)}</title>" in text


# A list has no short form, and the worst is a permutation; strides are as small as for eight ranks.
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("layout", "on", "kilobytes", "seconds"),
    [
        (RankLayout.parse("tp=8,cp=2,dp=256,pp=16"), "host=8,domain=64", 200, 10),
        (RankLayout([8, 8192], ["tp", "dp"], ranks=range(65535, -1, -1)), "host=8", 200, 10),
        (RankLayout.parse("tp=8,cp=2,dp=1024,pp=64"), "host=8,domain=64", 1000, 20),
    ],
    ids=["65536", "65536 listed", "a million"],
)
def test_size(layout, on, kilobytes, seconds):
    scene = GridScene("", (("", layout),), read_topology(on, layout.size))
    begun = time.perf_counter()
    size = len(page(scene).encode())
    took = time.perf_counter() - begun
    print(f"{layout}: {size / 1000:.0f} kB in {took:.2f} s")
    assert size < 1000 * kilobytes
    assert took < seconds


def test_a_permutation_stays_below_two_megabytes():
    order = np.random.default_rng(0).permutation(65536).tolist()
    text = page(GridScene("", (("", RankLayout([65536], ["dp"], ranks=order)),)))
    assert len(text) < 2_000_000
    assert unpacked(data_of(text)["grids"][0]["ranks"]) == order


# A browser would run out of memory, and say nothing for a minute before.
def test_too_many_ranks():
    with pytest.raises(LayoutError) as error:
        page(grid_scene("tp=8,dp=200000000"))
    assert str(error.value) == (
        "tp=8,dp=200000000 has 1,600,000,000 ranks, and a page shows up to 16,777,216; draw a part "
        "of it, as select() makes them"
    )
