"""Pictures of layouts, changes and mappings as SVG: what is in them follows from size and rank."""

import itertools
import re

import numpy as np
import pytest
from draw.pictures import Picture, inside, overlap

from hypercomm import GridSet, HyperCommGrid, RankLayout, RankMapping, errors
from hypercomm.draw import palette
from hypercomm.draw.parts.cells import cells_of
from hypercomm.layout.difference import difference
from hypercomm.tools.place import read_topology

LISTED = RankLayout([2, 4], ["tp", "dp"], ranks=[7, 6, 5, 4, 3, 2, 1, 0])
LAYOUTS = [
    RankLayout.parse("tp=2,cp=2,dp=2"),
    RankLayout.parse("tp=4,dp=3,pp=5"),
    RankLayout([2, 3], ["t<p", "d&p"], 4),
    RankLayout([2, 2], ["tp", "dp"], strides=[1, 8]),
    LISTED,
]


def numbers_of_groups(layout, dims):
    """The group of each rank, from coordinates alone: counted over the other dims."""
    others = [dim for dim in layout.dim_names if dim not in dims]
    found = {}
    for index in itertools.product(*(range(size) for size in reversed(layout.shape))):
        coords = dict(zip(layout.dim_names, reversed(index), strict=True))
        number, factor = 0, 1
        for dim in others:
            number, factor = number + coords[dim] * factor, factor * layout.sizes[dim]
        found[layout.rank(**coords)] = number
    return found


def rank_of(cell):
    return int(re.match(r"rank (\d+):", cell.tip)[1])


# Every rank has one cell, which says its coordinates and its group; a group's cells are together.
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_cells(layout):
    for dim in layout.dim_names:
        (cells,) = Picture(layout.draw(on=4, dims=dim).svg()).panels
        groups = numbers_of_groups(layout, [dim])
        assert sorted(map(rank_of, cells)) == sorted(layout.ranks)
        for cell in cells:
            rank = rank_of(cell)
            coords = ", ".join(f"{name}={at}" for name, at in layout.coords(rank).items())
            host = f"host{rank // 4}"
            assert cell.tip == f"rank {rank}: {coords}\n{dim} group {groups[rank]}\n{host}"
            assert cell.texts == [str(rank), f"g{groups[rank]}"]
            assert cell.box.look == f"f{groups[rank] % 8}"
        for one, other in itertools.combinations(cells, 2):
            assert (one.group == other.group) == (groups[rank_of(one)] == groups[rank_of(other)])


# Without dims, small worlds show each dim, larger ones the first; `groups` says what else.
def test_panels():
    def captions(drawing):
        picture = Picture(drawing.svg())
        return len(picture.panels), [t for t in picture.texts if t in {"tp", "dp", "pp", "tp+dp"}]

    assert captions(RankLayout.parse("tp=2,dp=2,pp=2").draw())[0] == 3
    assert captions(RankLayout.parse("tp=2,dp=2,pp=32").draw())[0] == 1
    drawing = RankLayout.parse("tp=2,dp=2,pp=2").draw(groups=["pp", "tp+dp"])
    assert captions(drawing) == (2, ["pp", "tp+dp", "tp", "dp", "pp", "tp+dp"])


# Cells lie in the frame of their host, hosts in their domain, nothing on anything else, all on it.
@pytest.mark.parametrize("sizes", ["tp=4,dp=16,pp=4", "tp=2,dp=7", "dp=1", "tp=4,dp=9,pp=25"])
def test_places(sizes):
    layout = RankLayout.parse(sizes)
    picture = Picture(layout.draw(on="host=4,domain=72", dims=layout.dim_names[0]).svg())
    (cells,) = picture.panels
    boxes = [cell.box for cell in cells]
    hosts = [frame for frame in picture.frames if frame.look == "pane"]
    domains = [frame for frame in picture.frames if frame.look == "outer"]
    assert len(hosts) == -(-layout.size // 4)
    assert len(domains) == (-(-layout.size // 72) if layout.size > 4 else 0)
    assert all(box.x + box.width <= picture.width for box in [*boxes, *picture.frames])
    assert all(box.y + box.height <= picture.height for box in [*boxes, *picture.frames])
    for boxes_of_a_kind in (hosts, domains):
        assert not any(overlap(*two) for two in itertools.combinations(boxes_of_a_kind, 2))
    of_host = [[rank_of(cell) for cell in cells if inside(cell.box, host)] for host in hosts]
    ranks = list(range(layout.size))
    assert sorted(map(sorted, of_host)) == [ranks[at : at + 4] for at in ranks[::4]]
    assert not domains or all(sum(inside(host, each) for each in domains) == 1 for host in hosts)
    by_row = {}
    for box in boxes:
        by_row.setdefault(box.y, []).append(box)
    for row in by_row.values():
        row.sort()
        assert not any(overlap(*two) for two in itertools.pairwise(row))


# Above 1,000 ranks a cell is a host; it says how many ranks it has, and the groups of these.
@pytest.mark.parametrize(("dim", "groups"), [("tp", 1), ("dp", 8), ("pp", 8)])
def test_hosts(dim, groups):
    layout = RankLayout.parse("tp=8,dp=16,pp=8")
    (cells,) = Picture(layout.draw(on=8, dims=dim).svg()).panels
    number = numbers_of_groups(layout, [dim])
    assert len(cells) == 128
    for host, cell in enumerate(cells):
        own = sorted({number[rank] for rank in range(8 * host, 8 * host + 8)})
        assert len(own) == groups
        name, ranks, told = cell.texts
        assert (name, ranks) == (f"host{host}", "8 ranks")
        assert told == (f"g{own[0]}" if groups == 1 else f"g{own[0]}..g{own[-1]}")
        assert f"({groups} of {len(set(number.values()))})" in cell.tip


# Of many more, a cell is a domain, or a block of them: pictures stay small, and lose no rank.
@pytest.mark.parametrize(("on", "kind"), [("8,256", "domain"), ("8", "block"), (None, "block")])
def test_many(on, kind):
    drawing = RankLayout.parse("tp=8,dp=512,pp=16").draw(on=on)
    text = drawing.svg()
    (cells,) = Picture(text).panels
    assert len(cells) == 256
    assert all(cell.tip.startswith(kind) for cell in cells)
    assert sum(int(cell.texts[1].split()[0].replace(",", "")) for cell in cells) == 65_536
    assert len(text) < 200_000


# A topology may hold more ranks than the grid; one that holds fewer is refused.
def test_topologies():
    layout = RankLayout.parse("tp=2,dp=4", rank_offset=4)
    (cells,) = Picture(layout.draw(on=read_topology(4, 64), dims="tp").svg()).panels
    assert {cell.tip.rpartition("\n")[2] for cell in cells} == {"host1", "host2"}
    with pytest.raises(errors.TopologyError):
        layout.draw(on=read_topology(4, 8))
    with pytest.raises(errors.LayoutError, match="leave on= out"):
        RankLayout([2], ["tp"], 2**30).draw(on=8)
    assert "1073741824" in RankLayout([2], ["tp"], 2**30).draw().svg()


# Names are text, whatever is in them.
def test_names():
    evil = "</style><script>\a"
    layout = RankLayout([2, 2], [evil, "d]]>p"])
    for dims in (None, evil):
        text = layout.draw(on={"<b>&": "s", 'h"2': "s"}, dims=dims).svg()
        assert "<script" not in text
        assert "<b>" not in text
        assert text.encode()
        assert len(Picture(text).panels) == (1 if dims else 2)
    long = RankLayout([2, 2], ["x" * 500, "y"])
    assert Picture(long.draw(on={"h" * 300: "s"}).svg()).width < 2_000


def luminance(colour):
    """Relative luminance: WCAG 2.2, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(one, other):
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


# Black letters are read on every fill, and both the light and the dark look have contrast.
def test_contrast():
    fills = [*palette.FILLS, palette.MIXED, *palette.RESULTS.values(), *palette.AMOUNTS[:4]]
    assert min(contrast("#111111", fill) for fill in fills) > 4.5
    assert min(contrast("#FFFFFF", fill) for fill in palette.AMOUNTS[4:]) > 4.5
    light, _, dark = LAYOUTS[0].draw().svg().partition("@media (prefers-color-scheme:dark)")
    for text in (light, dark):
        paper = re.search(r"\.paper\{fill:(#\w{6})", text)[1]
        for look in (r"\.hc text", r"\.soft"):
            assert contrast(re.search(rf"{look}\{{fill:(#\w{{6}})", text)[1], paper) > 4.5


# Machado, Oliveira, Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", severity 1.0: what readers without one kind of cones see, in linear light.
BLIND = {
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}


# Colours differ for readers without red or green cones, too, by more than can just be noticed (2.3
# of CIE76), and neighbours in turn by far more.
@pytest.mark.parametrize("kind", BLIND)
def test_colour_blind(kind):
    def lab(colour):
        parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        seen = np.clip(np.array(BLIND[kind]) @ linear, 0, 1)
        to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
        x, y, z = np.cbrt(np.maximum(to_xyz @ seen / [0.9505, 1, 1.089], 0.009))
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    seen = [lab(fill) for fill in palette.FILLS]
    apart = {
        two: np.linalg.norm(seen[two[0]] - seen[two[1]])
        for two in itertools.combinations(range(8), 2)
    }
    assert min(apart.values()) > 4.6
    assert min(apart[two] for two in itertools.pairwise(range(8))) > 10


# Grids of a set are boxes, one below the other; an arrow goes from each that sends to another.
def test_modules():
    grids = GridSet.tile(20, encoder="tp=2,dp=2", llm="tp=2,dp=2,pp=3", head="dp=4")
    picture = Picture(grids.draw(on=4, dims="dp", edges="chain").svg())
    modules = [frame for frame in picture.frames if frame.look == "module"]
    assert len(modules) == len(picture.panels) == 3
    assert not any(overlap(*two) for two in itertools.combinations(modules, 2))
    assert {"encoder", "llm", "head", "encoder sends to llm", "llm sends to head"} <= {
        *picture.texts
    }
    edges = [("head", "encoder"), ("encoder", "head")]
    text = grids.draw(edges=edges).svg()
    assert text.count('class="arrow"') == text.count('class="tip"') == 2
    assert "head sends to encoder" in text
    for layout, cells in zip(grids.layouts.values(), picture.panels, strict=True):
        assert sorted(map(rank_of, cells)) == sorted(layout.ranks)


# A change marks each group by whether the same ranks, in the same order, are one on the other side.
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (RankLayout.parse("tp=2,cp=2,dp=2"), RankLayout.parse("tp=4,dp=2")),
        (RankLayout.parse("tp=2,dp=8"), RankLayout.parse("tp=2,dp=4")),
        (RankLayout.parse("tp=2,dp=4"), LISTED),
        (RankLayout.parse("tp=2,dp=4"), RankLayout([2, 4], ["tp", "dp"], 2)),
    ],
    ids=str,
)
def test_change(before, after):
    def every(layout):
        dims = layout.dim_names
        several = (itertools.combinations(dims, count) for count in range(1, len(dims) + 1))
        return {group for each in itertools.chain(*several) for group in layout.groups(*each)}

    picture = Picture(difference(before, after).draw(on=8).svg())
    dims = dict.fromkeys((*before.dim_names, *after.dim_names))
    sides = [(dim, side) for dim in dims for side in (before, after) if dim in side.dim_names]
    panels = picture.panels[3:]  # behind the three of the key
    assert len(panels) == len(sides)
    for (dim, side), cells in zip(sides, panels, strict=True):
        others = every(after if side is before else before)
        for cell in cells:
            group = side.groups(dim).of(rank_of(cell))
            told = "kept" if group in others else "gone" if side is before else "new"
            assert cell.box.look == told
            assert cell.texts[1].endswith(palette.MARKS[told])
            assert f": {told}" in cell.tip


# A group of one rank is kept where its rank is; nothing was made or ended.
@pytest.mark.parametrize(("before", "after"), [("tp=1", "tp=1"), ("tp=2,pp=1", "tp=4,pp=1")])
def test_groups_of_one(before, after):
    before, after = RankLayout.parse(before), RankLayout.parse(after)
    picture = Picture(difference(before, after).draw(dims=before.dim_names[-1]).svg())
    *_, one, other = picture.panels
    assert [cell.box.look for cell in one] == ["kept"] * before.size
    assert [cell.box.look for cell in other] == ["kept"] * before.size + ["new"] * (
        after.size - before.size
    )


# A block of one rank is a rank, and several of a unit are named as the page names them.
@pytest.mark.parametrize(
    ("layout", "on", "kind"),
    [
        ("tp=16", None, "rank"),
        ("tp=32", None, "block of 2 ranks"),
        ("tp=64", "host=1,leaf=2", "block of 2 leaves"),
    ],
)
def test_kinds_of_cells(layout, on, kind):
    layout = RankLayout.parse(layout)
    topology = None if on is None else read_topology(on, layout.size)
    assert cells_of(layout, topology, most_ranks=8, most_units=16).kind == kind


# A mapping's matrix has a cell for each pair of ranks, with the bytes that one sends the other.
@pytest.mark.parametrize(
    ("source", "target", "roles"),
    [
        ("tp=2,dp=4", "tp=4,dp=2", {}),
        ("dp=2", "tp=3", {"along": None, "shards": {"tp": 0, "dp": 0}}),
        ("cp=2,dp=2", "cp=4", {"shards": {"cp": "zigzag"}}),
    ],
)
def test_matrix(source, target, roles):
    mapping = RankMapping(source, RankLayout.parse(target, rank_offset=1), **roles)
    shape, whole = (24, 16, 3), np.zeros((24, 16, 3))
    sent = {}
    for rank in mapping.source_ranks:
        for message in mapping.sends(rank):
            pair = message.source, message.target
            part = whole[message.global_slices(shape)].size * 2
            sent[pair] = sent.get(pair, 0) + part
    (cells, *_) = Picture(mapping.draw(shape, 2).svg()).panels
    found = {}
    for cell in cells:
        here, there, amount = re.match(r"rank (\d+) to (\d+): .* \(([\d,]+) B\)", cell.tip).groups()
        found[int(here), int(there)] = int(amount.replace(",", ""))
        assert ("stays" in cell.tip) == (here == there)
    assert found == sent


# Without a shape amounts are parts, all of which together are what the target holds.
def test_parts():
    mapping = RankMapping("tp=2,dp=2", "dp=4")
    scene = mapping.draw().scene
    assert (scene.unit, scene.whole, int(scene.cells[:, 2].sum())) == ("parts", 4, 4)
    assert mapping.draw([8, 5]).scene.unit == "elements"
    assert int(mapping.draw([8, 5]).scene.cells[:, 2].sum()) == 40
    with pytest.raises(errors.LayoutError, match="must be a multiple of 4"):
        mapping.draw([6])
    with pytest.raises(errors.LayoutError, match="itemsize 2 needs the shape"):
        mapping.draw(itemsize=2)


# Large mappings are added up by host, small rows and columns or not: no byte is lost.
def test_large_matrix():
    mapping = RankMapping("tp=4,dp=64", "dp=128")
    (cells, *_) = Picture(mapping.draw([256], 1, on=8).svg()).panels
    told = [re.findall(r"\(([\d,]+) B\)", cell.tip) for cell in cells]
    assert sum(int(amount.replace(",", "")) for amounts in told for amount in amounts) == 256
    assert all(cell.tip.startswith("host ") for cell in cells)


# A grid draws its layout, its views included in nothing; dims that are not there are named.
def test_grids():
    grid = HyperCommGrid("tp=2,dp=4", world_size=8)
    assert grid.draw(on=8).svg() == grid.layout.draw(on=8).svg()
    with pytest.raises(errors.UnknownDimError, match="unknown dim 'ep'; the dims are"):
        grid.draw(dims="ep")
    with pytest.raises(errors.LayoutError, match="dim 'tp' comes twice"):
        grid.draw(dims="tp+tp")
    grids = GridSet.tile(8, a="tp=2,dp=2", b="ep=4")
    assert len(Picture(grids.draw(dims="ep").svg()).panels) == 2
    for edges in ("a-b", [("a",)], [("a", "c")], 3):
        with pytest.raises((errors.DrawingError, errors.LayoutError), match="edges must be"):
            grids.draw(edges=edges)
