"""The SVG in a headless Chromium: hovering lights one group, and no text leaves its place."""

import pytest
from chromium import Chromium, find

from hypercomm import GridSet, RankLayout, RankMapping
from hypercomm.layout.difference import difference

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(find() is None, reason="there is no chromium on this machine"),
]

P = RankLayout.parse
PAGE = "<!doctype html><html data-ready=yes><body style='margin:0'>"
LONG = {"gpu-node-a100-rack17-0001.cluster.example.com": "s1", "h2": "s1"}
DRAWINGS = [
    P("tp=2,cp=2,dp=2").draw(on=8),
    P("tp=4,dp=9,pp=25").draw(on="4,72"),
    P("tp=8,dp=16,pp=8").draw(on=8, dims="dp"),
    P("tp=8,dp=512,pp=16").draw(on="8,72"),
    RankLayout([2, 3, 2], ["a_very_long_name_of_a_dim", "x" * 90, "pp"]).draw(on=LONG),
    difference(P("tp=2,cp=2,dp=2"), P("tp=4,dp=2")).draw(on=8),
    RankMapping("tp=2,dp=64", "tp=4,dp=32").draw([64, 128], 2, on=8),
    RankMapping("dp=32", "tp=2,dp=16").draw(),
    GridSet.tile(20, encoder="tp=2,dp=2", llm="tp=2,dp=2,pp=3", head="dp=4").draw(edges="chain"),
]


@pytest.fixture(scope="module")
def browser():
    chromium = Chromium(find())
    yield chromium
    chromium.close()


# No text is cut off by the sheet, leaves the cell that it is in, or is smaller than 10 pixels.
@pytest.mark.parametrize("drawing", DRAWINGS, ids=repr)
def test_texts(browser, tmp_path, drawing):
    browser.open(PAGE + drawing.svg(), tmp_path)
    found = browser.run(
        """(() => {
          const sheet = document.querySelector("svg").getBoundingClientRect();
          const inside = (text, box) => {
            const at = text.getBoundingClientRect();
            return at.left >= box.left - 1 && at.right <= box.right + 1
              && at.top >= box.top - 1 && at.bottom <= box.bottom + 1;
          };
          const texts = [...document.querySelectorAll("text")];
          const cells = [...document.querySelectorAll(".cells text")];
          return {
            texts: texts.length,
            cut: texts.filter((text) => !inside(text, sheet)).map((text) => text.textContent),
            out: cells.filter((text) =>
              !inside(text, text.parentElement.querySelector("rect").getBoundingClientRect()))
              .map((text) => text.textContent),
            smallest: Math.min(...texts.map((text) => parseFloat(getComputedStyle(text).fontSize))),
          };
        })()"""
    )
    assert found["texts"] > 0
    assert (found["cut"], found["out"]) == ([], [])
    assert found["smallest"] >= 10
    assert browser.requests() == []
    assert browser.complaints() == []


# Under the pointer a group keeps its colours, all others fade.
@pytest.mark.parametrize("dark", [False, True])
def test_hover(browser, tmp_path, dark):
    svg = P("tp=2,dp=4").draw(dims="tp").svg()
    browser.open(PAGE + svg, tmp_path, dark=dark)
    opacities = "[...document.querySelectorAll('.g')].map((g) => getComputedStyle(g).opacity)"
    assert browser.run(opacities) == ["1"] * 4
    at = browser.run(
        """(() => {
          const cell = document.querySelectorAll(".g")[2].querySelector("rect");
          const box = cell.getBoundingClientRect();
          return [box.left + box.width / 2, box.top + box.height / 2];
        })()"""
    )
    browser.move(*at)
    assert browser.run(opacities) == ["0.22", "0.22", "1", "0.22"]
    paper = browser.run("getComputedStyle(document.querySelector('.paper')).fill")
    assert paper == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
