"""Test pictures of layouts, changes and mappings. Expected cells are computed from the layouts."""

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

from hypercomm import HyperCommGrid, RankLayout, RankMapping, draw, errors
from hypercomm.layout.difference import difference
from hypercomm.testing import layouts
from hypercomm.tools.place import Level, Topology, place, read_topology

SVG = "{http://www.w3.org/2000/svg}"
LISTED = RankLayout([2, 4], ["tp", "dp"], ranks=[7, 6, 5, 4, 3, 2, 1, 0])
FATES = {"#99DDFF": "kept", "#EE8866": "gone", "#BBCC33": "new"}


def cells_of(svg):
    """List the cells of an SVG that have a tooltip: their text, fill and tooltip."""
    found = []
    for cell in ET.fromstring(svg).iter(f"{SVG}g"):
        tip = cell.find(f"{SVG}title")
        if tip is not None:
            text, rectangle = cell.find(f"{SVG}text"), cell.find(f"{SVG}rect")
            found.append((text.text.strip(), rectangle.get("fill"), tip.text))
    return found


def texts_of(svg):
    return [(text.text or "").strip() for text in ET.fromstring(svg).iter(f"{SVG}text")]


def positions_of(svg):
    """List the texts of an SVG, each with its absolute x, and the width of its cell or None."""
    found = []

    def visit(node, x):
        moved = re.match(r"translate\((\S+) ", node.get("transform", ""))
        x += float(moved[1]) if moved else 0
        rectangle = node.find(f"{SVG}rect") if node.get("class") == "cell" else None
        for child in node:
            if child.tag == f"{SVG}text" and child.text:
                width = None if rectangle is None else float(rectangle.get("width"))
                found.append((child.text.strip(), x + float(child.get("x")), width))
            visit(child, x)

    visit(ET.fromstring(svg), 0)
    return found


def rank_of(tip):
    return int(re.match(r"rank (\d+):", tip)[1])


# Each rank of a small layout appears once per row, with the number of its group. The tooltip has
# the coordinates, the group and the host. Neighbouring groups have different colours.
@given(layout=layouts(max_ranks=64, listed=True))
def test_each_rank_appears_once(layout):
    for dim in layout.dim_names:
        cells = cells_of(draw(layout, on=4, groups=dim).svg())
        colours = {}
        assert sorted(rank_of(tip) for *_, tip in cells) == sorted(layout.ranks)
        for text, fill, tip in cells:
            rank = rank_of(tip)
            coords = layout.coords(rank)
            (group,) = [at for at, ranks in enumerate(layout.groups(dim)) if rank in ranks]
            assert text == str(group)
            listed = ", ".join(f"{name}={at}" for name, at in coords.items())
            lines = [f"rank {rank}: {listed}", f"{dim} group {group}", f"host{rank // 4}"]
            assert tip.split("\n") == lines
            assert colours.setdefault(group % 8, fill) == fill
        assert len(set(colours.values())) == len(colours)


# Numbers are in the middle of their cells. All cells have one width, so that hosts are aligned.
@pytest.mark.parametrize("sizes", ["tp=2,cp=2,dp=6", "tp=8,cp=2,dp=4"])
def test_hosts_are_aligned(sizes):
    svg = draw(sizes, on=4).svg()
    cells = ET.fromstring(svg).iter(f"{SVG}g")
    filled = [cell for cell in cells if cell.find(f"{SVG}title") is not None]
    assert filled
    for cell in filled:
        text, rectangle = cell.find(f"{SVG}text"), cell.find(f"{SVG}rect")
        assert float(text.get("x")) == pytest.approx(float(rectangle.get("width")) / 2, abs=0.1)
        assert "middle" in text.get("class").split()
    titles = [(x, width) for text, x, width in positions_of(svg) if re.match(r"host\d+ rank", text)]
    assert len({width for _, width in titles}) == 1
    assert len({x for x, _ in titles}) < len(titles)  # some hosts are below others


# A dark screen gets light text on a dark page. Text on a fill stays dark. Print stays light.
def test_dark_style():
    svg = draw("tp=2,dp=2").svg()
    assert "@media screen and (prefers-color-scheme:dark){.hc text{fill:#e6edf3}" in svg
    for cell in ET.fromstring(svg).iter(f"{SVG}g"):
        if cell.get("class") == "cell":
            is_filled = cell.find(f"{SVG}rect").get("fill") != "none"
            assert ("filled" in cell.find(f"{SVG}text").get("class").split()) == is_filled


# The schematic of a large layout shows one host, with the rank and the group of each cell. The
# factors in the schematic multiply to the number of ranks.
@pytest.mark.parametrize(
    ("sizes", "on", "host"),
    [
        ("tp=8,cp=2,dp=8,pp=8", 8, "host0"),
        ("tp=2,ep=1,dp=512,pp=2", "8,64", "host0"),
        ("tp=8,cp=2,dp=8,pp=8", "4,72", "host0"),
        ("tp=3,dp=400", 8, "ranks"),
        ("pp=100", 1, "host0"),
    ],
)
def test_schematic_multiplies_to_all_ranks(sizes, on, host):
    layout = RankLayout(sizes)
    svg = draw(layout, on=on).svg()
    text = draw(layout, on=on).text(width=120)
    assert host in texts_of(svg)
    *path, block = text[: text.index("\n", text.index(f" {host}  "))].split("\n")[1:]
    factors = [re.match(r" *(?:x )?([\d,]+) (?!ranks)", line) for line in path]
    inner = re.findall(r"(\d+) [a-z]", block)
    numbers = [*inner, *(found[1].replace(",", "") for found in factors if found)]
    assert math.prod(map(int, numbers)) == layout.size
    groups = {
        rank: at for at, ranks in enumerate(layout.groups(layout.dim_names[0])) for rank in ranks
    }
    for shown, _, tip in cells_of(svg):
        rank, _, group = shown.partition(":")
        assert int(group) == groups[int(rank)]
        coords = ", ".join(f"{dim}={at}" for dim, at in layout.coords(int(rank)).items())
        assert tip.startswith(f"rank {rank}: {coords}\n")
    root = ET.fromstring(svg)
    assert float(root.get("width")) < 1900
    assert float(root.get("height")) < 1000
    assert len(svg) < 60_000


# Pipeline stages are columns. The first, the second and the last stage are shown with their ranks.
def test_stages_are_columns():
    svg = draw(RankLayout("tp=8,cp=2,dp=8,pp=8"), on=8).svg()
    texts = texts_of(svg)
    assert [text for text in texts if text.startswith("pp=")] == ["pp=0", "pp=1", "pp=7"]
    ends = (range(128), range(128, 256), range(896, 1024))
    assert {f"128 ranks in {end[0]}..{end[-1]}" for end in ends} <= {*texts}
    assert {"5 more", "x 8 dp", "2 cp"} <= {*texts}
    assert svg.count('class="arrow"') == 2
    assert [rank_of(tip) for *_, tip in cells_of(svg)] == [
        first + rank for first in (0, 128, 896) for rank in range(16)
    ]


# The picture shows how many hosts and domains a group has. This matches a count over all ranks.
@pytest.mark.parametrize(
    ("sizes", "on"),
    [
        ("tp=4,cp=3,dp=12", "4,36"),
        ("tp=3,dp=40", "8,16,64"),
    ],
)
def test_units_per_group_match_a_count(sizes, on):
    layout = RankLayout(sizes)
    topology = read_topology(on, layout.size)
    text = draw(layout, on=topology).text(width=160)
    for dim in layout.dim_names:
        if layout.size_of(dim) > 1:
            (row,) = [line for line in text.splitlines() if line.split()[:1] == [dim]]
            groups = [*layout.groups(dim)]
            assert f"{len(groups)} groups of {len(groups[0])}, " in row
            for level in topology.levels:
                counts = {len({level.of_rank[rank] for rank in group}) for group in groups}
                ends = " to ".join(map(str, dict.fromkeys([min(counts), max(counts)])))
                if ends == "1":
                    assert f"inside one {level.name}" in row
                    break
                assert re.search(rf"on {ends} (hosts|domains|leaves)", row)


# If the ranks do not fill hosts evenly, no hosts are drawn, and the picture says why.
def test_unevenly_filled_hosts_are_not_drawn():
    cyclic = Topology([Level("host", [rank % 64 for rank in range(512)])])
    for layout, on in (
        (RankLayout("tp=8,dp=64", rank_offset=4), 8),
        (RankLayout([8, 64], ["tp", "dp"], ranks=[*range(3, 515)]), 8),
        (RankLayout("tp=8,dp=64"), cyclic),
        (RankLayout("tp=8,dp=64"), 512),
    ):
        texts = texts_of(draw(layout, on=on).svg())
        assert any("the dims do not fill hosts evenly" in text for text in texts)
        assert "host0" not in texts
    listed = [rank for host in range(63, -1, -1) for rank in range(8 * host, 8 * host + 8)]
    texts = texts_of(draw(RankLayout([8, 64], ["tp", "dp"], ranks=listed), on=8).svg())
    assert "host63" in texts


# SVG is well-formed XML without scripts or links, and special characters in names are escaped.
def test_names_are_escaped():
    evil = "</style><script>"
    layout = RankLayout([2, 2], [evil, "d]]>[red]p"])
    names = {"<script>&\x00\x1b[31m": "s", 'h"2': "s"}
    for large in (layout, RankLayout([2, 2, 80], [evil, "d]]>p", "x" * 250])):
        for text in (draw(large).svg(), draw(large, groups=[evil]).svg()):
            root = ET.fromstring(text)
            assert {one.tag for one in root.iter()} <= {
                SVG + tag for tag in ("svg", "g", "title", "style", "path", "rect", "text")
            }
            assert "href" not in text
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    with_hosts = draw(layout, on=read_topology([names, 2]))
    assert "<script" not in with_hosts.svg()
    assert any("<script>&\N{REPLACEMENT CHARACTER}" in text for text in texts_of(with_hosts.svg()))
    assert "d]]>[red]p" in with_hosts.text(width=120)


# In a change, a group is marked as kept if the other layout has a group of the same ranks in the
# same order.
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (RankLayout("tp=2,cp=2,dp=2"), RankLayout("tp=4,dp=2")),
        (RankLayout("tp=2,dp=8"), RankLayout("tp=2,dp=4")),
        (RankLayout("tp=2,dp=4"), LISTED),
        (RankLayout("tp=1"), RankLayout("tp=4,pp=1")),
    ],
    ids=str,
)
def test_change_marks_kept_gone_and_new_groups(before, after):
    def every(layout):
        dims = layout.dim_names
        several = (itertools.combinations(dims, count) for count in range(len(dims) + 1))
        groups = (layout.groups(*each) if each else () for each in itertools.chain(*several))
        return {*itertools.chain(*groups), *((rank,) for rank in layout.ranks)}

    picture = draw(difference(before, after), on=8)
    expected = set()
    for side, other, otherwise in ((before, after, "gone"), (after, before, "new")):
        for dim in [dim for dim in side.dim_names if side.size_of(dim) > 1] or side.dim_names[:1]:
            for group in side.groups(dim):
                fate = "kept" if group in every(other) else otherwise
                number = [*side.groups(dim)].index(group)
                expected |= {(rank, dim, number, fate) for rank in group}
    found = set()
    for text, fill, tip in cells_of(picture.svg()):
        fate = FATES[fill]
        dim = re.search(r"^(\w+) group \d+: (\w+)$", tip, re.MULTILINE)
        assert (dim[2], text[-1]) == (fate, {"kept": "=", "gone": "-", "new": "+"}[fate])
        found.add((rank_of(tip), dim[1], int(text[:-1]), fate))
    assert found == expected
    assert {f"before: {before}", f"after: {after}"} <= {*texts_of(picture.svg())}


# The matrix of a mapping shows the parts that each rank sends to each other rank. Parts that stay
# on their rank are marked. An empty cell shows a dot.
@pytest.mark.parametrize(
    ("source", "target", "roles"),
    [
        ("tp=2,dp=4", "tp=4,dp=2", {}),
        ("dp=2", "tp=3", {"along": None, "shards": {"tp": 0, "dp": 0}}),
        ("cp=2,dp=2", "cp=4", {}),
        ("tp=4,dp=64", "dp=128", {}),
    ],
)
@pytest.mark.parametrize("offset", [0, 1])
def test_matrix_counts_parts(source, target, roles, offset):
    mapping = RankMapping(source, RankLayout(target, rank_offset=offset), **roles)
    sent, whole = {}, 0
    for row in mapping.table():
        pair = int(row["source"]), int(row["target"])
        sent[pair] = sent.get(pair, 0) + math.prod((row["stop"] - row["start"]).tolist())
        whole = max(whole, math.prod(row["stop"].tolist()))
    picture, found, shades, stay = draw(mapping), {}, {}, {}
    tips = re.compile(r"(.*?): ([\d,]+) parts?(?:, ([\d,]+) parts? kept in place)?")
    for text, fill, tip in cells_of(picture.svg()):
        ends, amount, kept = tips.fullmatch(tip).groups()
        sends = amount if amount != "0" else ""
        assert text == (f"{sends}=" if kept else sends or ".")
        assert (fill == "none") == (text == ".")
        found[ends] = int(amount.replace(",", ""))
        stay[ends] = int((kept or "0").replace(",", ""))
        if sends:
            shades[found[ends]] = fill
    assert shades[max(shades)] == "#5C9CD0"  # the darkest
    kept = {ends: amount for ends, amount in sent.items() if ends[0] == ends[1]}
    assert sum(stay.values()) == sum(kept.values())
    moved = {ends: amount for ends, amount in sent.items() if ends[0] != ends[1]}
    if max(mapping.source.size, mapping.target.size) <= 16:
        shown = {ends: amount for ends, amount in found.items() if amount}
        assert shown == {f"{here} to {there}": amount for (here, there), amount in moved.items()}
        shown = {ends: amount for ends, amount in stay.items() if amount}
        assert shown == {f"{here} to {there}": amount for (here, there), amount in kept.items()}
    assert sum(found.values()) == sum(moved.values())
    text = picture.text(width=120).replace(",", "")
    assert f"{sum(moved.values())} part" in text
    assert f"a part is 1/{whole} of the tensor" in " ".join(text.split())
    assert "= marks kept parts . no parts" in " ".join(text.split())


# Text output has one column per rank, with the numbers of its groups, and fits any width.
@pytest.mark.parametrize(("width", "on"), [(40, None), (80, 4), (200, 72)])
def test_text_fits_the_width(width, on):
    layout = RankLayout("tp=4,dp=3,pp=5")
    text = draw(layout, on=on).text(width=width, color=False)
    assert "tp,dp,pp" not in text  # with more than 16 ranks, coordinates are left out
    assert max(map(len, text.splitlines())) <= width
    rows = {"rank": [], "tp": [], "dp": [], "pp": []}
    for line in text.splitlines():
        for name, numbers in re.findall(r"(\w+)(?: group)?((?: +\d+)+)(?= |$)", line):
            if name in rows and "groups" not in line:
                rows[name] += map(int, numbers.split())
    assert sorted(rows["rank"]) == list(layout.ranks)
    for dim in layout.dim_names:
        numbers = dict(zip(rows["rank"], rows[dim], strict=True))
        groups = enumerate(layout.groups(dim))
        assert numbers == {rank: number for number, group in groups for rank in group}


# Output to an ASCII stream is ASCII.
@pytest.mark.parametrize("sizes", ["tp=2,dp=4", "tp=8,cp=2,dp=8,pp=8"])
def test_ascii_stream(sizes):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    Console(file=stream, width=80).print(draw(RankLayout(sizes), on="4,16"))
    stream.flush()
    assert b"host0" in stream.buffer.getvalue()


# The file suffix selects the format. An existing file is kept unless force=True.
def test_save(tmp_path):
    picture = draw(RankLayout("tp=2,cp=2,dp=2"), on=8)
    picture.save(tmp_path / "grid.SVG")
    assert (tmp_path / "grid.SVG").read_text(encoding="utf-8") == picture.svg()
    with pytest.raises(errors.LayoutError):
        picture.save(tmp_path / "grid.SVG")
    picture.save(str(tmp_path / "grid.SVG"), force=True)
    assert picture.svg() in picture._repr_html_()
    for path in ("grid.pdf", "grid", "no/such/folder/grid.svg", "a\0b.svg", "a\x1b.svg/b.svg"):
        with pytest.raises(errors.LayoutError) as caught:
            picture.save(path)
        assert str(caught.value).isprintable()


def test_png(tmp_path, monkeypatch):
    picture = draw(RankLayout("tp=2,cp=2,dp=2"), on=8)
    pytest.importorskip("resvg_py")
    picture.save(tmp_path / "grid.png")
    content = (tmp_path / "grid.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert f'width="{width // 2}" height="{height // 2}"' in picture.svg()
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(errors.MissingPackageError, match=r"pip install 'hypercomm\[draw\]'"):
        picture.png()


# draw() accepts sizes as text, a layout, a grid, and a placement with its machine.
def test_accepted_forms_of_a_layout():
    layout = RankLayout("tp=2,dp=4")
    assert draw("tp=2,dp=4", on=4).svg() == draw(layout, on=4).svg()
    assert draw(HyperCommGrid("tp=2,dp=4", world_size=8), on=8).svg() == draw(layout, on=8).svg()
    placed = place("tp=2,dp=4", on=4)
    assert draw(placed).svg() == draw(layout, on=4).svg()
    assert draw(placed, on=2).svg() == draw(layout, on=2).svg()
