"""The pictures of the pages: `python docs/drawings.py --write` writes them to docs/pictures/.

A test fails when a file differs from what the library draws.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from hypercomm import RankLayout, RankMapping, draw
from hypercomm.layout.difference import difference
from hypercomm.tools.draw import Drawing

FOLDER = Path(__file__).parent / "pictures"


def _cube() -> Drawing:
    return draw(RankLayout.parse("tp=2,cp=2,dp=2"), on=4)


def _cell() -> Drawing:
    return draw(RankLayout.parse("tp=2,cp=2,dp=2"))


def _cluster() -> Drawing:
    return draw(RankLayout.parse("tp=8,cp=2,dp=256,pp=4"), on=8)


def _change() -> Drawing:
    return draw(difference(RankLayout.parse("tp=2,cp=2,dp=2"), RankLayout.parse("tp=4,dp=2")))


def _loss() -> Drawing:
    after = RankLayout([2, 3], ["tp", "dp"], ranks=[0, 1, 2, 3, 6, 7])
    return draw(difference(RankLayout.parse("tp=2,dp=4"), after))


def _mapping() -> Drawing:
    encoder, llm = RankLayout.parse("tp=2,dp=4"), RankLayout.parse("tp=4,dp=2", rank_offset=8)
    return draw(RankMapping(encoder, llm, along="dp"))


PICTURES: dict[str, Callable[[], Drawing]] = {
    "cube": _cube,  # index.md, start/concepts.md
    "cell": _cell,  # tutorials/notebook.md
    "cluster": _cluster,  # how-to/draw.md
    "change": _change,  # how-to/plan.md, how-to/draw.md
    "loss": _loss,  # tutorials/elastic.md
    "mapping": _mapping,  # tutorials/encoder_and_llm.md, how-to/draw.md
}
"""The drawing of each file; a comment names the pages that show it."""


def main(arguments: list[str]) -> None:
    """Write the pictures that differ, or print their names."""
    for name, make in PICTURES.items():
        file, svg = FOLDER / f"{name}.svg", make().svg()
        if not file.exists() or file.read_text() != svg:
            print(file.name)
            if arguments == ["--write"]:
                file.write_text(svg)


if __name__ == "__main__":
    main(sys.argv[1:])
