"""Pictures as text: they fit any width, need no colours and no box characters, and lose no rank."""

import io
import re
import sys

import pytest

from hypercomm import GridSet, RankLayout, RankMapping, errors
from hypercomm.draw import palette, terminal
from hypercomm.layout.difference import difference

P = RankLayout.parse
DRAWINGS = [
    P("tp=2,cp=2,dp=2").draw(on=8),
    P("tp=4,dp=4,pp=4").draw(on="4,72"),
    P("tp=8,dp=8,pp=4").draw(on=72),
    P("tp=8,dp=16,pp=8").draw(on=8),
    RankLayout([2, 3], ["a-very-long-name-of-a-dim".replace("-", "_"), "d&p"], 4).draw(),
    RankLayout([2, 2], ["tp", "dp"], 10**9).draw(),
    difference(P("tp=2,cp=2,dp=2"), P("tp=4,dp=2")).draw(on=8),
    difference(P("tp=8,dp=128"), P("tp=8,dp=64")).draw(on=8),
    RankMapping("tp=2,dp=4", "tp=4,dp=2").draw([64, 128], 2),
    RankMapping("tp=2,dp=64", "tp=4,dp=32").draw(on=8),
    GridSet.tile(8, encoder="tp=2,dp=2", llm="tp=4").draw(on=4, edges="chain"),
]


# A line is never wider than the terminal, from 24 columns on, nor does it end in blanks.
@pytest.mark.parametrize("drawing", DRAWINGS, ids=repr)
@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_widths(drawing, width):
    lines = drawing.text(width=width, color=False).splitlines()
    assert [line for line in lines if len(line) > width] == []
    assert all(line == line.rstrip() for line in lines)


# In the columns of a rank stand the numbers of its groups, at any width.
@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("sizes", ["tp=2,cp=2,dp=2", "tp=4,dp=4,pp=4", "tp=3,dp=5"])
def test_numbers(sizes, width):
    layout = P(sizes)
    text = layout.draw(on=4).text(width=width, color=False)
    rows = {name: [] for name in ("rank", *layout.dim_names)}
    for line in text.splitlines():
        name, _, rest = line.partition("│")
        if name.strip() in rows:
            rows[name.strip()] += re.findall(r"\d+", rest)
    assert rows.pop("rank") == [str(rank) for rank in layout.ranks]
    for dim, numbers in rows.items():
        groups = layout.groups(dim)
        assert numbers == [str(groups.index_of(rank)) for rank in layout.ranks]


# Colours come only where they are asked for, and say nothing that the text does not.
@pytest.mark.parametrize("drawing", DRAWINGS, ids=repr)
def test_colours(drawing):
    plain, coloured = (drawing.text(width=80, color=color) for color in (False, True))
    assert "\x1b" not in plain
    bare = re.sub("\x1b\\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()
    assert str(drawing) == drawing.text(color=False)


def test_colours_of_groups():
    text = P("tp=2,dp=2").draw().text(width=80, color=True)
    red, green, blue = (int(palette.FILLS[1][at : at + 2], 16) for at in (1, 3, 5))
    assert f"\x1b[30;48;2;{red};{green};{blue}m 1\x1b[0m" in text


class Terminal(io.StringIO):
    def __init__(self, encoding="utf-8", tty=True):
        super().__init__()
        self.named, self.tty = encoding, tty

    @property
    def encoding(self):
        return self.named

    def isatty(self):
        return self.tty


# By itself it has colours where stdout is a terminal that is not dumb, and NO_COLOR is not set.
@pytest.mark.parametrize(
    ("tty", "environment", "is_coloured"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_when_coloured(monkeypatch, tty, environment, is_coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal(tty=tty))
    assert terminal.has_colour() == is_coloured
    assert ("\x1b" in DRAWINGS[0].text()) == is_coloured


# Where stdout's encoding has no box characters there is ASCII only.
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8", "nonsense"])
def test_encodings(monkeypatch, encoding):
    monkeypatch.setattr(sys, "stdout", Terminal(encoding))
    for drawing in DRAWINGS:
        text = drawing.text(width=60, color=False)
        assert text.isascii() or encoding == "utf-8"
        assert "│" in DRAWINGS[0].text(color=False) or encoding != "utf-8"


# The width is that of the terminal, where none is given.
def test_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "44")
    assert DRAWINGS[1].text(color=False) == DRAWINGS[1].text(width=44, color=False)


# A side that has none of the lit dims says so, and shows its ranks.
@pytest.mark.parametrize(
    ("before", "after", "dims", "dim"),
    [("dp=2,tp=64", "tp=128", None, "dp"), ("tp=2,dp=2", "tp=4", "dp", "dp")],
)
def test_a_dim_of_one_side(before, after, dims, dim):
    text = difference(P(before), P(after)).draw(dims=dims).text(width=80, color=False)
    here, there = text.split("after: ")
    assert f"{dim}: no such dim" in there
    assert "no such dim" not in here
    assert re.search(r"^rank +│ +0 +1 ", there, re.MULTILINE)


# Names of hosts and dims cannot move the cursor.
def test_control_characters():
    layout = RankLayout([2, 2], ["t\x1b[2Jp", "d\x07p"])
    text = layout.draw(on={"ho\x1bst": "s\x1b", "other": "s"}).text(width=80, color=False)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    hosts = {"ho\x1bst": "s", "other": "s"}  # rows and columns of a matrix, too
    text = RankMapping("dp=32", "dp=16,tp=2").draw(on=hosts).text(width=80, color=False)
    assert text.count("ho?st") == 2
    assert "\x1b" not in text


@pytest.mark.parametrize("bad", [{"width": 0}, {"width": "80"}, {"color": "always"}, {"color": 1}])
def test_bad_arguments(bad):
    with pytest.raises(errors.LayoutError, match=f"^{next(iter(bad))} must be"):
        DRAWINGS[0].text(**bad)
