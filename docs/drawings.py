"""The pictures of the pages: `python docs/drawings.py --write` draws them anew into docs/pictures/.

A test notices when one is not what the library draws today.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from hypercomm import RankLayout, RankMapping
from hypercomm.draw import Drawing
from hypercomm.layout.difference import difference

FOLDER = Path(__file__).parent / "pictures"


def _cube() -> Drawing:
    return RankLayout.parse("tp=2,cp=2,dp=2").draw(on=4)


def _cell() -> Drawing:
    return RankLayout.parse("tp=2,cp=2,dp=2").draw()


def _cluster() -> Drawing:
    return RankLayout.parse("tp=8,dp=4,pp=2").draw(on=8)


def _change() -> Drawing:
    return difference(RankLayout.parse("tp=2,cp=2,dp=2"), RankLayout.parse("tp=4,dp=2")).draw()


def _loss() -> Drawing:
    after = RankLayout([2, 3], ["tp", "dp"], ranks=[0, 1, 2, 3, 6, 7])
    return difference(RankLayout.parse("tp=2,dp=4"), after).draw()


def _mapping() -> Drawing:
    encoder, llm = RankLayout.parse("tp=2,dp=4"), RankLayout.parse("tp=4,dp=2", rank_offset=8)
    return RankMapping(encoder, llm, along="dp").draw()


PICTURES: dict[str, Callable[[], Drawing]] = {
    "cube": _cube,  # index.md, start/concepts.md
    "cell": _cell,  # tutorials/notebook.md
    "cluster": _cluster,  # how-to/draw.md
    "change": _change,  # how-to/plan.md, how-to/draw.md
    "loss": _loss,  # tutorials/elastic.md
    "mapping": _mapping,  # tutorials/encoder_and_llm.md, how-to/draw.md
}
"""What is drawn, by the name of its file, and where it is shown."""


def main(arguments: list[str]) -> None:
    """Write the pictures, or say which would change."""
    for name, draw in PICTURES.items():
        file, svg = FOLDER / f"{name}.svg", draw().svg()
        if not file.exists() or file.read_text() != svg:
            print(file.name)
            if arguments == ["--write"]:
                file.write_text(svg)


if __name__ == "__main__":
    main(sys.argv[1:])
