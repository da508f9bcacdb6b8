"""The pictures of the pages: `python docs/drawings.py --write` writes them to docs/pictures/.

A test fails when a file differs from what these functions draw.
"""

import contextlib
import io
import itertools
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from hypercomm import RankLayout, RankMapping, draw, read_config
from hypercomm.cli import main as run_command
from hypercomm.layout.difference import difference

FOLDER = Path(__file__).parent / "pictures"


class Drawing(Protocol):
    """A picture: one of `hypercomm.draw`, or the moving one below."""

    def svg(self) -> str:
        """Return the text of the file."""


class Groups:
    """Eight ranks on two hosts; the groups of tp, cp, dp and tp+cp light up in turn."""

    COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB")
    CELL, GAP, HOST, TOP, SECONDS = 64, 8, 24, 74, 3

    def svg(self) -> str:
        """Return an SVG whose colours and arcs change without a script."""
        layout = RankLayout("tp=2,cp=2,dp=2")
        phases = ["tp", "cp", "dp", "tp+cp"]
        period = self.SECONDS * len(phases)
        end = self.left(7) + self.CELL + self.HOST
        parts = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" class="hm" role="img" '
                f'viewBox="0 0 {end} 236" width="{end}" height="236">'
            ),
            "<title>The groups of tp, cp, dp and tp+cp on eight ranks</title><style>",
            ".hm text{font:14px system-ui,'Segoe UI','DejaVu Sans',Arial,sans-serif;fill:#1b1f24}",
            ".hm .bold{font-weight:600} .hm .soft{fill:#59636e;font-size:12px}",
            ".hm .coords{font-size:12px}",
            ".hm .middle{text-anchor:middle} .hm .frame{fill:#f6f8fa;stroke:#afb8c1}",
            (
                ".hm .arc{fill:none;stroke-width:3;stroke-linecap:round;stroke-dasharray:6 7;"
                "animation:hm-move 1s linear infinite}"
            ),
            f".hm .phase{{animation:hm-show {period}s linear infinite}}",
            "@keyframes hm-move{to{stroke-dashoffset:-26}}",
            (
                f"@keyframes hm-show{{0%,{100 / len(phases) - 2:g}%{{opacity:1}}"
                f"{100 / len(phases):g}%,98%{{opacity:0}}100%{{opacity:1}}}}"
            ),
            "@media (prefers-reduced-motion:reduce){.hm *{animation:none}}",
            '</style><rect width="100%" height="100%" rx="6" fill="#fff"/>',
            f'<text x="{self.HOST}" y="30" class="bold">tp=2,cp=2,dp=2</text>',
        ]
        for host in range(2):
            x, width = self.left(4 * host) - 10, 4 * self.CELL + 3 * self.GAP + 20
            parts.append(
                f'<rect x="{x}" y="{self.TOP + 32}" width="{width}" height="118" rx="6" '
                f'class="frame"/><text x="{x + 10}" y="{self.TOP + 140}" class="soft">'
                f"host {host}; coordinates tp,cp,dp</text>"
            )
        parts += [self.phase(layout, dims, turn) for turn, dims in enumerate(phases)]
        for rank in layout.ranks:
            x = self.left(rank) + self.CELL / 2
            coords = layout.coords(rank)
            parts.append(f'<text x="{x}" y="{self.TOP + 72}" class="bold middle">{rank}</text>')
            parts.append(
                f'<text x="{x}" y="{self.TOP + 94}" class="coords middle">'
                f"{coords['tp']},{coords['cp']},{coords['dp']}</text>"
            )
        return "".join([*parts, "</svg>\n"])

    def left(self, rank: int) -> int:
        """Return where the cell of a rank begins."""
        return self.HOST + 10 + rank * (self.CELL + self.GAP) + rank // 4 * self.HOST

    def phase(self, layout: RankLayout, dims: str, turn: int) -> str:
        """Return the cells, arcs and words that are shown while `dims` is on."""
        groups = layout.groups(dims)
        ranks = "  ".join(str(group).replace(" ", "") for group in groups)
        opacity = int(turn == 0)  # all that a renderer without animation shows is the first phase
        delay = self.SECONDS * turn
        parts = [
            f'<g class="phase" opacity="{opacity}" style="animation-delay:{delay}s">',
            (
                f'<text x="190" y="30"><tspan class="bold">{dims}</tspan>: '
                f"{len(groups)} groups of {layout.size_of(*dims.split('+'))}: {ranks}</text>"
            ),
        ]
        for colour, group in zip(self.COLOURS, groups, strict=False):
            parts += [
                f'<rect x="{self.left(rank)}" y="{self.TOP + 44}" width="{self.CELL}" '
                f'height="{self.CELL}" rx="6" fill="{colour}"/>'
                for rank in group
            ]
            for one, other in itertools.pairwise(group):
                start, stop = (self.left(rank) + self.CELL / 2 for rank in (one, other))
                height = min(10 + (stop - start) / 4, 62)
                parts.append(
                    f'<path class="arc" stroke="{colour}" d="M{start} {self.TOP + 42}'
                    f"C{start} {self.TOP + 42 - height} {stop} {self.TOP + 42 - height} "
                    f'{stop} {self.TOP + 42}"/>'
                )
        return "".join([*parts, "</g>"])


def _cube() -> Drawing:
    return draw(RankLayout("tp=2,cp=2,dp=2"), on=4)


def _cell() -> Drawing:
    return draw(RankLayout("tp=2,cp=2,dp=2"))


def _cluster() -> Drawing:
    return draw(RankLayout("tp=8,cp=2,dp=256,pp=4"), on=8)


def _change() -> Drawing:
    return draw(difference(RankLayout("tp=2,cp=2,dp=2"), RankLayout("tp=4,dp=2")))


def _loss() -> Drawing:
    after = RankLayout([2, 3], ["tp", "dp"], ranks=[0, 1, 2, 3, 6, 7])
    return draw(difference(RankLayout("tp=2,dp=4"), after))


def _mapping() -> Drawing:
    encoder, llm = RankLayout("tp=2,dp=4"), RankLayout("tp=4,dp=2", rank_offset=8)
    return draw(RankMapping(encoder, llm, along="dp"))


def _launch_file() -> Drawing:
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    config = read_config(f"torchrun --nnodes 2 --nproc-per-node 8 train.py {sizes}")
    return draw(config.layouts["training"], on=config.gpus_per_node)


class Command:
    """The picture of a command, such as `draw tp=2,dp=4 --on 8`."""

    def __init__(self, line: str) -> None:
        self.line = line

    def svg(self) -> str:
        """Run the command, and return the text of the file that it writes."""
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            file = Path(folder, "picture.svg")
            run_command([*shlex.split(self.line), "-o", str(file)])
            return file.read_text()


def commands(page: Path) -> dict[str, Callable[[], Drawing]]:
    """Return the pictures of a page that follow the commands that draw them."""
    pattern = r"\$ hypercomm (draw .+)\n(?:(?!.*\$ ).*\n)*?.*pictures/(\w+)\.svg\)"
    return {name: partial(Command, line) for line, name in re.findall(pattern, page.read_text())}


PICTURES: dict[str, Callable[[], Drawing]] = {
    "groups": Groups,  # README.md, index.md
    "cube": _cube,  # tutorials/first_hour.md, start/concepts.md, how-to/draw.md
    "cell": _cell,  # how-to/draw.md
    "cluster": _cluster,  # how-to/draw.md
    "change": _change,  # how-to/plan.md, how-to/draw.md
    "loss": _loss,  # tutorials/elastic.md
    "launch_file": _launch_file,  # how-to/launch_files.md
    "mapping": _mapping,  # tutorials/encoder_and_llm.md, how-to/draw.md
    **commands(FOLDER.parent / "how-to" / "layouts.md"),
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
