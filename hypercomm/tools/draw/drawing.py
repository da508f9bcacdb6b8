"""draw() and Drawing: a picture of a layout, a grid, a set, a change or a mapping."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from hypercomm.errors import DrawingError, FileKeptError, LayoutError, MissingPackageError
from hypercomm.layout import RankLayout, RankMapping
from hypercomm.layout.checks import as_tuple, as_world_size
from hypercomm.layout.difference import LayoutDifference
from hypercomm.layout.layout import read_layout
from hypercomm.layout.parsing import as_dims, parse_groups
from hypercomm.layout.text import shown
from hypercomm.tools.draw import pictures
from hypercomm.tools.draw.pictures import Dims, Levels, Picture
from hypercomm.tools.draw.svg import svg_of
from hypercomm.tools.place import On, Placed, read_topology

if TYPE_CHECKING:
    from hypercomm.grid import HyperCommGrid

# The kinds of files that `Drawing.save` writes.
ENDINGS = (".svg", ".png", ".txt")


@attrs.frozen(repr=False)
class Drawing:
    """A picture, made by `hypercomm.draw`; `print` shows it, and so does a notebook.

    Example:
        >>> import hypercomm
        >>> picture = hypercomm.draw(hypercomm.RankLayout.parse("tp=2,dp=3"))
        >>> picture.svg()[:4]
        '<svg'
        >>> print(picture)
        tp=2,dp=3
        6 ranks; the first dim varies fastest
        <BLANKLINE>
        rank │ 0 1 2 3 4 5
        tp   │ 0 0 1 1 2 2
        dp   │ 0 1 0 1 0 1
        <BLANKLINE>
        tp: 3 groups of 2
        dp: 2 groups of 3
    """

    _picture: Callable[[int], Picture]

    def svg(self) -> str:
        """Return the picture as SVG, which needs nothing else; hovering shows coordinates."""
        return svg_of(self._picture(32))

    def png(self) -> bytes:
        """Return the SVG as PNG in light colours, with two pixels for each of the SVG's.

        Raises:
            MissingPackageError: resvg-py is not installed.
        """
        try:
            resvg = importlib.import_module("resvg_py")
        except ImportError as error:
            raise MissingPackageError(
                "a PNG needs resvg-py: pip install 'hypercomm[draw]', or save the picture as SVG"
            ) from error
        content = resvg.svg_to_bytes(svg_string=self.svg(), zoom=2, sans_serif_family="DejaVu Sans")
        return bytes(content)

    def text(self, width: int | None = None, color: bool = False) -> str:
        """Return the picture as text for a terminal, with a column for each rank.

        Args:
            width: The columns of the terminal; default: those of the current one.
            color: Whether groups have colours.

        Raises:
            MissingPackageError: rich is not installed.

        Example:
            >>> import hypercomm
            >>> picture = hypercomm.draw(hypercomm.RankLayout.parse("tp=2,dp=3"), groups="dp")
            >>> print(picture.text(width=40).splitlines()[-1])
            dp: 2 groups of 3
        """
        try:
            from rich.console import Console
        except ImportError as error:
            raise MissingPackageError("a text needs rich: pip install 'hypercomm[cli]'") from error
        colors: Any = "truecolor" if color else None
        console = Console(width=width, force_terminal=color, color_system=colors)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))

    def save(self, path: str | os.PathLike[str], force: bool = False) -> None:
        """Write the picture to a file; the ending selects the kind: .svg, .png or .txt.

        Args:
            path: The file.
            force: Whether to replace a file that exists.

        Raises:
            DrawingError: The ending is none of these, or the file cannot be written.
            FileKeptError: The file exists (a FileExistsError).
            MissingPackageError: As for `png` and `text`.

        Example:
            >>> import pathlib, tempfile, hypercomm
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     file = pathlib.Path(folder, "grid.svg")
            ...     hypercomm.draw(hypercomm.RankLayout.parse("tp=2,dp=3")).save(file)
            ...     file.read_text(encoding="utf-8")[:4]
            '<svg'
        """
        file = Path(path)
        kind = file.suffix.lower()
        if kind not in ENDINGS:
            raise DrawingError(f"{shown(str(file))} must end in one of {', '.join(ENDINGS)}")
        if kind == ".png":
            content = self.png()
        else:
            text = self.svg() if kind == ".svg" else f"{self.text(width=100)}\n"
            content = text.encode()
        try:
            with file.open("wb" if force else "xb") as target:
                target.write(content)
        except FileExistsError as error:
            raise FileKeptError(
                f"{file} exists, and is kept; force=True (--force) replaces it"
            ) from error
        except (OSError, ValueError) as error:
            raise DrawingError(f"{shown(str(file))} cannot be written: {error}") from error

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        from hypercomm.tools.draw.terminal import lines_of

        # A column of a matrix needs about 14 letters.
        picture = self._picture(max(1, options.max_width // 14))
        return lines_of(picture, options.max_width, "|" if options.ascii_only else "│")

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self.svg()}</div>'

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Drawing of {self._picture(1).title}>"


def draw(
    what: str
    | RankLayout
    | HyperCommGrid
    | Placed
    | Mapping[str, RankLayout]
    | Mapping[str, HyperCommGrid]
    | LayoutDifference
    | RankMapping,
    on: On | None = None,
    groups: Iterable[Any] | str | None = None,
) -> Drawing:
    """Return a picture of a layout, a grid, a set of grids, a change or a mapping.

    Up to 64 ranks, each rank is shown, in a panel for each dim; up to 256 in panels of `groups`.
    Larger layouts get a schematic: one host with its groups, what repeats it, and pipeline stages
    as columns.

    Args:
        what: A layout or its sizes, as in "tp=2,dp=4"; a grid, a `GridSet` or named layouts, a
            `difference`, a `RankMapping`, or what `place` returns, with its machine.
        on: Where the ranks are: GPUs per host, 8, or whatever `read_topology` takes, such as
            "host=4,domain=72", a hostfile or SLURM's topology.conf. Default: not shown. A mapping
            does not show it.
        groups: The dims whose groups have colours, with a panel for each, as in "tp" or
            "tp,dp+cp". Default: each dim.

    Returns:
        A drawing: print it, show it in a notebook, or `save` it as SVG, PNG or text.

    Raises:
        UnknownDimError: A dim is not one of the layout's.
        LayoutError: `what` is something else, or has ranks above 2**24, or a mapping has `groups`.
        TopologyError: `on` cannot be read, or holds fewer ranks.

    Example:
        >>> import hypercomm
        >>> layout = hypercomm.RankLayout.parse("tp=2,dp=2")
        >>> print(hypercomm.draw(layout, on=2))
        tp=2,dp=2
        4 ranks on 2 hosts; the first dim varies fastest
        <BLANKLINE>
               host0          host1
        rank │ 0 1     rank │ 2 3
        tp   │ 0 0     tp   │ 1 1
        dp   │ 0 1     dp   │ 0 1
        <BLANKLINE>
        tp: 2 groups of 2, each inside one host
        dp: 2 groups of 2, each on 2 hosts
    """
    if isinstance(what, Placed) and on is None:
        on = what.topology
    if isinstance(what, RankMapping):
        if groups is not None:
            raise LayoutError("groups does not apply to a mapping; leave it out")
        return Drawing(functools.partial(pictures.mapping_picture, what))
    if isinstance(what, LayoutDifference):
        picture = pictures.change_picture(what, *_read([what.before, what.after], on, groups))
    elif isinstance(what, Mapping) and what:
        layouts = {name: _layout_of(one) for name, one in what.items()}
        picture = pictures.set_picture(layouts, *_read([*layouts.values()], on, groups))
    else:
        layout = _layout_of(what)
        picture = pictures.layout_picture(layout, *_read([layout], on, groups))
    return Drawing(lambda _: picture)


def _layout_of(one: Any) -> RankLayout:
    if not isinstance(getattr(one, "layout", one), (str, RankLayout)):
        raise LayoutError(
            f"what must be a layout, a grid, a set of grids, a difference or a mapping, "
            f"got {shown(one)}"
        )
    return read_layout(one)


def _read(
    layouts: list[RankLayout], on: On | None, groups: Iterable[Any] | str | None
) -> tuple[Levels, list[Dims]]:
    """Return the levels that hold the ranks, and the dims of `groups` in the layouts' order."""
    last_rank = max(layout.last_rank for layout in layouts)
    world_size = as_world_size(last_rank + 1, "the number of ranks of a picture")
    levels = () if on is None else read_topology(on, world_size).levels
    asked = parse_groups(groups) if isinstance(groups, str) else as_tuple(groups or (), "groups")
    lit = []
    for dims in asked:
        names = {*as_dims(dims)}
        fitting = (layout for layout in layouts if names <= {*layout.dim_names})
        lit.append(next(fitting, layouts[0]).order_dims(dims))
    return levels, lit
