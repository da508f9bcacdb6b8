"""Pictures of layouts, changes, mappings and sets: what is in them follows from the layouts."""

import io
import itertools
import math
import re
import struct
import sys
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from rich.console import Console

import hypercomm
from hypercomm import GridSet, HyperCommGrid, RankLayout, RankMapping, draw, errors
from hypercomm.layout.difference import difference
from hypercomm.testing import layouts
from hypercomm.tools.place import place, read_topology

SVG = "{http://www.w3.org/2000/svg}"
LISTED = RankLayout([2, 4], ["tp", "dp"], ranks=[7, 6, 5, 4, 3, 2, 1, 0])
FATES = {"#99DDFF": "kept", "#EE8866": "gone", "#BBCC33": "new"}


def cells_of(svg):
    """The cells of an SVG: their texts, their fill, and the text for hovering."""
    root = ET.fromstring(svg)
    found = []
    for cell in root.iter(f"{SVG}g"):
        if cell.get("class") == "cell":
            tip, rectangle = cell.find(f"{SVG}title"), cell.find(f"{SVG}rect")
            texts = [text.text for text in cell.findall(f"{SVG}text")]
            found.append((texts, rectangle.get("fill"), "" if tip is None else tip.text))
    return found


def texts_of(svg):
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def rank_of(tip):
    return int(re.match(r"rank (\d+):", tip)[1])


# Each rank of a small layout appears once in each panel, and its groups are those of the layout.
@given(layout=layouts(max_ranks=64, listed=True))
def test_each_rank_once(layout):
    for dim in layout.dim_names:
        cells = cells_of(draw(layout, on=4, groups=dim).svg())
        assert sorted(rank_of(tip) for _, _, tip in cells) == sorted(layout.ranks)
        groups = layout.groups(dim)
        for texts, _, tip in cells:
            rank = rank_of(tip)
            coords = ", ".join(f"{name}={at}" for name, at in layout.coords(rank).items())
            lines = [f"rank {rank}: {coords}", f"{dim} group {groups.index_of(rank)}"]
            assert tip.split("\n") == [*lines, f"host{rank // 4}"]
            assert texts[0] == str(rank)


# Two ranks have one label where they are in one group; groups of one fill differ by label.
def test_groups_differ_in_colour_and_label():
    layout = RankLayout.parse("tp=4,dp=3,pp=2")
    for dim in layout.dim_names:
        cells = cells_of(draw(layout, groups=dim).svg())
        for (texts, fill, tip), (others, other, there) in itertools.combinations(cells, 2):
            same = rank_of(there) in layout.groups(dim).of(rank_of(tip))
            assert (texts[1] == others[1]) == same
            assert fill == other or not same


# Each dim has a panel up to 64 ranks, and each of the selected groups up to 256.
@pytest.mark.parametrize(
    ("sizes", "kwargs", "panels"),
    [
        ("tp=2,dp=2,pp=2", {}, 3),
        ("tp=2,dp=2,pp=2", {"groups": ["pp", "tp+dp"]}, 2),
        ("tp=2,dp=2,pp=2", {"groups": "tp,dp+pp"}, 2),
        ("tp=2,dp=2,pp=2", {"groups": [["dp", "tp"]]}, 1),
        ("tp=8,dp=32", {"groups": "dp"}, 1),
    ],
)
def test_panels(sizes, kwargs, panels):
    layout = RankLayout.parse(sizes)
    assert len(cells_of(draw(layout, **kwargs).svg())) == panels * layout.size


def product_of(text):
    left, _, right = text.partition(" ranks = ")
    factors = re.findall(r"([\d,]+) \w+", right.partition(";")[0].replace("in each", ""))
    return int(left.replace(",", "")), math.prod(int(one.replace(",", "")) for one in factors)


# The multipliers of a schematic multiply to the number of ranks; a host is shown with its ranks.
@pytest.mark.parametrize(
    ("sizes", "on", "host"),
    [
        ("tp=8,cp=2,dp=8,pp=8", 8, "host0"),
        ("tp=8,cp=2,dp=256,pp=4", 8, "host0"),
        ("tp=2,dp=512,pp=2", "8,64", "host0"),
        ("tp=16,pp=4,dp=64", 8, "host0"),
        ("tp=8,ep=16,dp=128", None, "ranks 0..15"),
        ("tp=3,dp=400", 8, "ranks 0..14"),
        ("tp=509,dp=2", None, "ranks 0"),
    ],
)
def test_schematic(sizes, on, host):
    layout = RankLayout.parse(sizes)
    picture = draw(layout, on=on)
    svg = picture.svg()
    formula = next(text for text in texts_of(svg) if " ranks = " in text)
    assert product_of(formula) == (layout.size, layout.size)
    assert formula in picture.text(width=120)
    assert host in texts_of(svg)
    for texts, _, tip in cells_of(svg):
        coords = ", ".join(f"{dim}={at}" for dim, at in layout.coords(int(texts[0])).items())
        assert tip.startswith(f"rank {texts[0]}: {coords}\n")
    repeats = [text for text in texts_of(svg) if re.fullmatch(r"x [\d,]+ \w+", text)]
    assert repeats or "stages of" in svg
    root = ET.fromstring(svg)
    assert float(root.get("width")) < 1900
    assert float(root.get("height")) < 1000
    assert len(svg) < 60_000


# The stages of a pipeline are columns: the first, the second and the last have their own ranks.
def test_stages():
    svg = draw(RankLayout.parse("tp=8,cp=2,dp=8,pp=8"), on=8).svg()
    texts = texts_of(svg)
    assert [text for text in texts if text.startswith("pp=")] == ["pp=0", "pp=1", "pp=7"]
    assert {"ranks 0..127", "ranks 128..255", "ranks 896..1023", "5 more"} <= {*texts}
    assert svg.count('class="tip"') == 2
    assert [int(texts[0]) for texts, *_ in cells_of(svg)] == [
        first + rank for first in (0, 128, 896) for rank in range(16)
    ]


# Links: the innermost level that holds all groups of a dim.
def test_links():
    layout = RankLayout.parse("tp=4,cp=4,dp=8,pp=4")
    topology = read_topology("host=4,domain=16,leaf=128", 512)
    rows = [line.split() for line in draw(layout, on=topology).text(width=160).splitlines()]
    links = {row[0]: " ".join(row[-2:]) for row in rows if row and row[0] in layout.dim_names}
    assert links["tp"].endswith("NVLink")
    assert links["cp"] == "NVLink domain"
    assert links["dp"].endswith("leaf")
    assert links["pp"] == "across leaves"


# Hosts that the ranks do not fill evenly are not drawn as hosts; the picture explains why.
def test_uneven_hosts():
    for layout in (
        RankLayout.parse("tp=8,dp=64", rank_offset=4),
        RankLayout([8, 64], ["tp", "dp"], ranks=[*range(3, 515)]),
    ):
        texts = texts_of(draw(layout, on=8).svg())
        assert any("the dims do not fill hosts evenly" in text for text in texts)
        assert "host0" not in texts
    listed = [rank for host in range(63, -1, -1) for rank in range(8 * host, 8 * host + 8)]
    texts = texts_of(draw(RankLayout([8, 64], ["tp", "dp"], ranks=listed), on=8).svg())
    assert "host63" in texts


# SVG is well-formed XML without scripts or references, and names in it are text.
def test_names_are_text():
    evil = "</style><script>"
    layout = RankLayout([2, 2], [evil, "d]]>p"])
    names = {"<script>&": "s", 'h"2': "s"}
    for large in (layout, RankLayout([2, 2, 80], [evil, "d]]>p", "x" * 500])):
        for text in (draw(large).svg(), draw(large, groups=[evil]).svg()):
            root = ET.fromstring(text)
            assert {one.tag for one in root.iter()} <= {
                SVG + tag for tag in ("svg", "g", "title", "style", "path", "rect", "text")
            }
            assert "href" not in text
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    with_hosts = draw(layout, on=read_topology(names, gpus_per_host=2))
    assert "<script" not in with_hosts.svg()


# A change marks each group by whether the same ranks, in the same order, are one on the other side.
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (RankLayout.parse("tp=2,cp=2,dp=2"), RankLayout.parse("tp=4,dp=2")),
        (RankLayout.parse("tp=2,dp=8"), RankLayout.parse("tp=2,dp=4")),
        (RankLayout.parse("tp=2,dp=4"), LISTED),
        (RankLayout.parse("tp=1"), RankLayout.parse("tp=4,pp=1")),
    ],
    ids=str,
)
def test_change(before, after):
    def every(layout):
        dims = layout.dim_names
        several = (itertools.combinations(dims, count) for count in range(len(dims) + 1))
        groups = (layout.groups(*each) if each else () for each in itertools.chain(*several))
        return {*itertools.chain(*groups), *((rank,) for rank in layout.ranks)}

    cells = [cell for cell in cells_of(draw(difference(before, after), on=8).svg()) if cell[2]]
    expected = []
    for side, other, otherwise in ((before, after, "gone"), (after, before, "new")):
        for dim in [dim for dim in side.dim_names if side.size_of(dim) > 1] or side.dim_names[:1]:
            kept = [group in every(other) for group in side.groups(dim)]
            for rank in sorted(side.ranks):
                is_kept = kept[side.groups(dim).index_of(rank)]
                expected.append((rank, "kept" if is_kept else otherwise))
    assert [(rank_of(tip), FATES[fill]) for _, fill, tip in cells] == expected
    assert all(f": {FATES[fill]}" in tip for _, fill, tip in cells)


# A side that has none of the selected dims shows all of its own.
def test_dims_of_one_side():
    change = difference(RankLayout.parse("tp=2,cp=2"), RankLayout.parse("tp=4"))
    tips = [tip for _, _, tip in cells_of(draw(change, groups="cp").svg()) if tip]
    assert [rank_of(tip) for tip in tips] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [tip.split("\n")[1].split()[0] for tip in tips] == ["cp"] * 4 + ["tp"] * 4
    same = texts_of(draw(difference(LISTED, LISTED)).svg())
    assert sum(text.startswith(("before: ", "after: ")) for text in same) == 2


def test_large_change():
    layouts_of = [RankLayout.parse(sizes) for sizes in ("tp=8,dp=64", "tp=4,dp=128")]
    texts = texts_of(draw(difference(*layouts_of), on=8).svg())
    assert sum(" ranks = " in text for text in texts) == 2
    assert {"kept", "gone"} & {*texts}


# A mapping's matrix has the parts that each rank sends to each other.
@pytest.mark.parametrize(
    ("source", "target", "roles"),
    [
        ("tp=2,dp=4", "tp=4,dp=2", {}),
        ("dp=2", "tp=3", {"along": None, "shards": {"tp": 0, "dp": 0}}),
        ("cp=2,dp=2", "cp=4", {"shards": {"cp": "zigzag"}}),
        ("tp=4,dp=64", "dp=128", {}),
    ],
)
def test_matrix(source, target, roles):
    mapping = RankMapping(source, RankLayout.parse(target, rank_offset=1), **roles)
    sent, whole = {}, 0
    for row in mapping.table():
        pair = int(row["source"]), int(row["target"])
        sent[pair] = sent.get(pair, 0) + math.prod((row["stop"] - row["start"]).tolist())
        whole = max(whole, math.prod(row["stop"].tolist()))
    picture, found = draw(mapping), {}
    for texts, _, tip in cells_of(picture.svg()):
        ends, amount = re.fullmatch(r"(.*): ([\d,]+) parts?", tip).groups()
        assert texts == [amount]
        found[ends] = int(amount.replace(",", ""))
    moved = {ends: amount for ends, amount in sent.items() if ends[0] != ends[1]}
    if max(mapping.source.size, mapping.target.size) <= 32:
        assert found == {f"{here} to {there}": amount for (here, there), amount in moved.items()}
    assert sum(found.values()) == sum(moved.values())
    text = picture.text(width=40).replace(",", "")
    assert f"{sum(moved.values())} part" in text
    assert f"a part is 1/{whole} of the tensor" in text


# Grids of a set are boxes next to each other, each as it is drawn alone.
def test_sets():
    grids = GridSet.tile(20, encoder="tp=2,dp=2", llm="tp=2,dp=2,pp=3", head="dp=4")
    picture = draw(grids, on=4, groups="dp")
    assert {"encoder", "llm", "head"} <= {*texts_of(picture.svg())}
    cells = cells_of(picture.svg())
    ranks = [rank_of(tip) for _, _, tip in cells]
    assert ranks == [rank for layout in grids.layouts.values() for rank in sorted(layout.ranks)]
    alone = [draw(layout, on=4, groups="dp") for layout in grids.layouts.values()]
    assert cells == [cell for one in alone for cell in cells_of(one.svg())]
    assert all(
        line in picture.text(width=80)
        for one in alone
        for line in one.text(width=80).split("\n")[3:]
    )
    grid = HyperCommGrid("tp=2,dp=4", world_size=8)
    assert draw(grid, on=8).svg() == draw(grid.layout, on=8).svg()


# Text has a column for each rank and the numbers of its groups, in any width.
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("on", [None, 4, 72])
def test_text(width, on):
    layout = RankLayout.parse("tp=4,dp=3,pp=5")
    text = draw(layout, on=on).text(width=width, color=False)
    assert max(map(len, text.splitlines())) <= width
    rows = {"rank": [], "tp": [], "dp": [], "pp": []}
    for line in text.splitlines():
        for name, numbers in re.findall(r"(\w+) *│((?: *\d+)+)", line):
            rows[name] += map(int, numbers.split())
    assert sorted(rows["rank"]) == list(layout.ranks)
    for dim in layout.dim_names:
        groups = dict(zip(rows["rank"], rows[dim], strict=True))
        assert groups == {rank: layout.groups(dim).index_of(rank) for rank in layout.ranks}


def test_colours_of_text():
    picture = draw(RankLayout.parse("tp=2,dp=2"))
    plain, coloured = picture.text(width=60, color=False), picture.text(width=60, color=True)
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    assert coloured != plain
    assert str(picture) == picture.text(color=False)


# A stream that has ASCII only gets ASCII.
@pytest.mark.parametrize("sizes", ["tp=2,dp=4", "tp=8,cp=2,dp=8,pp=8"])
def test_ascii(sizes):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    Console(file=stream, width=80).print(draw(RankLayout.parse(sizes), on="4,16"))
    stream.flush()
    assert b"host0" in stream.buffer.getvalue()


# The ending of a file selects the kind; a file that exists is kept unless force is given.
def test_files(tmp_path):
    picture = draw(RankLayout.parse("tp=2,cp=2,dp=2"), on=8)
    picture.save(tmp_path / "grid.SVG")
    assert (tmp_path / "grid.SVG").read_text(encoding="utf-8") == picture.svg()
    with pytest.raises(FileExistsError):
        picture.save(tmp_path / "grid.SVG")
    picture.save(str(tmp_path / "grid.SVG"), force=True)
    picture.save(tmp_path / "grid.txt")
    expected = picture.text(width=100, color=False)
    assert (tmp_path / "grid.txt").read_text(encoding="utf-8") == f"{expected}\n"
    assert picture.svg() in picture._repr_html_()
    for path in ("grid.pdf", "grid", "no/such/folder/grid.svg", "a\0b.svg"):
        with pytest.raises(errors.DrawingError):
            picture.save(path)


def test_png(tmp_path, monkeypatch):
    picture = draw(RankLayout.parse("tp=2,cp=2,dp=2"), on=8)
    pytest.importorskip("resvg_py")
    picture.save(tmp_path / "grid.png")
    content = (tmp_path / "grid.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert f'width="{width // 2}" height="{height // 2}"' in picture.svg()
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(errors.MissingPackageError, match=r"pip install 'hypercomm\[draw\]'"):
        picture.png()


LAYOUT, MAPPING = RankLayout.parse("tp=2,dp=2"), RankMapping("dp=2", "dp=4")


@pytest.mark.parametrize(
    ("call", "error", "value"),
    [
        (lambda: draw(LAYOUT, groups="ep"), errors.UnknownDimError, "'ep'"),
        (lambda: draw(MAPPING, groups="dp"), errors.LayoutError, "groups"),
        (lambda: draw(difference(LAYOUT, LAYOUT), groups="ep"), errors.UnknownDimError, "'ep'"),
        (lambda: draw({}), errors.LayoutError, "what must be a layout"),
        (lambda: draw(3), errors.LayoutError, "what must be a layout"),
        (lambda: draw(LAYOUT, on=read_topology(2, 2)), errors.TopologyError, "2 GPUs"),
        (
            lambda: draw(RankLayout([2], ["tp"], 2**30), on=8),
            errors.LayoutError,
            "ranks of a picture",
        ),
        (lambda: draw(RankLayout([2**25], ["tp"])), errors.LayoutError, "33554432"),
    ],
)
def test_bad_calls(call, error, value):
    with pytest.raises(error) as caught:
        call()
    assert value in str(caught.value)
    assert hypercomm.draw is draw


# Sizes as text are a layout, and what place returns has its layout and its machine.
def test_forms_of_a_layout():
    layout = RankLayout.parse("tp=2,dp=4")
    assert draw("tp=2,dp=4", on=4).svg() == draw(layout, on=4).svg()
    placed = place("tp=2,dp=4", on=4)
    assert draw(placed).svg() == draw(layout, on=4).svg()
    assert draw(placed, on=2).svg() == draw(layout, on=2).svg()
