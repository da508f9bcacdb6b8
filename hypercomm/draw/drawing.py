"""Drawing: a picture of a grid, a change or a mapping, in whichever form is wanted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import attrs

from hypercomm.draw.scenes import ChangeScene, GridScene, Scene
from hypercomm.errors import DrawingError
from hypercomm.layout.checks import as_flag, positive
from hypercomm.layout.text import did_you_mean, shown
from hypercomm.tools.files import as_new_file, write_file

MOST_IN_NOTEBOOK = 256
"""More ranks than this do not have a cell each in a notebook, which keeps every picture."""


MOST_DRAWN = 1 << 16
"""More ranks than this are no picture in a notebook, unless it is asked for by `draw()`."""


@attrs.frozen(repr=False)
class Drawing:
    """A picture: made by `draw()` of layouts, grids, sets, differences and mappings.

    `print` shows it in the terminal, a notebook shows it by itself, `save` writes a file.

    Args:
        scene: What is shown.

    Example:
        >>> from hypercomm import RankLayout
        >>> print(RankLayout.parse("tp=2,dp=3").draw().text(width=60, color=False))
        tp=2,dp=3
        6 ranks; the first dim varies fastest
        <BLANKLINE>
        rank │  0 1 2 3 4 5
        tp   │  0 0 1 1 2 2
        dp   │  0 1 0 1 0 1
        <BLANKLINE>
        tp: 3 groups of 2
        dp: 2 groups of 3
    """

    scene: Scene

    def svg(self) -> str:
        """Return the picture as SVG, which needs nothing else; hovering shows coordinates.

        Above 1,000 ranks a cell is a host, a domain or a block of them.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout.parse("tp=2,dp=3").draw().svg().startswith("<svg")
            True
        """
        return _svg_of(self.scene)

    def html(self) -> str:
        """Return the picture as one HTML page: hover, keys and search light up groups.

        It loads nothing else, and needs no network.

        Example:
            >>> from hypercomm import RankLayout
            >>> "</html>" in RankLayout.parse("tp=2,dp=3").draw().html()
            True
        """
        from hypercomm.draw.page import page

        return page(self.scene)

    def png(self) -> bytes:
        """Return the picture as PNG, as the SVG is in light colours.

        Raises:
            MissingPackageError: resvg-py is not installed; says how to install it.
            DrawingError: The picture is too large for pixels.
        """
        from hypercomm.draw.png import png_of

        return png_of(self.svg())

    def text(self, width: int | None = None, color: bool | None = None) -> str:
        """Return the picture as text for a terminal, with a column for each rank.

        Above 256 ranks a line is a host, a domain or a block of them.

        Args:
            width: The columns that there are; default: those of the terminal. Fewer than 24 are
                taken as 24.
            color: Whether there are colours; default: where stdout is a terminal that shows them,
                and NO_COLOR is not set.

        Raises:
            LayoutError: `width` is no number of columns, or `color` neither True nor False.

        Example:
            >>> from hypercomm import RankLayout
            >>> picture = RankLayout.parse("tp=2,dp=3").draw(dims="dp")
            >>> print(picture.text(width=40, color=False).splitlines()[-1])
            dp: 2 groups of 3
        """
        from hypercomm.draw import terminal

        width = terminal.width_of_terminal() if width is None else positive(width, "width")
        colour = terminal.has_colour() if color is None else as_flag(color, "color")
        lines = terminal.lines_of(self.scene, width, terminal.has_boxes())
        return terminal.as_text(lines, colour)

    def save(self, path: str | os.PathLike[str], force: bool = False) -> None:
        """Write the picture into a file; its ending says of which kind: .svg, .html, .png, .txt.

        Args:
            path: The file.
            force: Whether a file that exists is replaced.

        Raises:
            DrawingError: The ending is of none of these, or the file cannot be written.
            FileKeptError: The file exists (a FileExistsError), and is kept.
            MissingPackageError: As for `png`.

        Example:
            >>> import pathlib, tempfile
            >>> from hypercomm import RankLayout
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     file = pathlib.Path(folder, "grid.svg")
            ...     RankLayout.parse("tp=2,dp=3").draw().save(file)
            ...     file.read_text(encoding="utf-8")[:4]
            '<svg'
        """
        file, kind, force = writable(path, force)
        write_file(file, KINDS[kind](self), force, DrawingError)

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{_svg_of(self.scene, MOST_IN_NOTEBOOK)}</div>'

    def __str__(self) -> str:
        return self.text(color=False)

    def __repr__(self) -> str:
        return f"<Drawing of {self.scene.title}>"


KINDS: dict[str, Callable[[Drawing], str | bytes]] = {
    ".svg": Drawing.svg,
    ".html": Drawing.html,
    ".png": Drawing.png,
    ".txt": lambda drawing: f"{drawing.text(width=100, color=False)}\n",
}
"""How a file of each ending is made."""


def writable(path: str | os.PathLike[str], force: bool) -> tuple[Path, str, bool]:
    """Return a picture's file, its ending and `force`, before anything is drawn.

    Raises:
        DrawingError: There is no such kind of picture, or no such folder.
        FileKeptError: The file exists, and is not to be replaced.
    """
    if isinstance(path, (str, os.PathLike)):
        kind = Path(path).suffix.lower()
        if kind not in KINDS:
            *some, last = KINDS
            raise DrawingError(
                f"{shown(os.fspath(path))} ends in no kind of picture that can be written: use "
                f"{', '.join(some)} or {last}{did_you_mean(kind, KINDS)}"
            )
    file, replaced = as_new_file(path, force, DrawingError)
    return file, file.suffix.lower(), replaced


def _svg_of(scene: Scene, most_ranks: int | None = None) -> str:
    from hypercomm.draw.parts.cells import MOST_RANKS
    from hypercomm.draw.svg.change import svg_of_change
    from hypercomm.draw.svg.grid import svg_of_grids
    from hypercomm.draw.svg.matrix import svg_of_matrix

    most = MOST_RANKS if most_ranks is None else most_ranks
    if isinstance(scene, GridScene):
        return svg_of_grids(scene, most)
    return svg_of_change(scene, most) if isinstance(scene, ChangeScene) else svg_of_matrix(scene)
