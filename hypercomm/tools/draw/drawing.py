"""draw() and Drawing: a picture of a layout, a grid, a set, a change or a mapping."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from hypercomm.errors import DrawingError, LayoutError, MissingPackageError
from hypercomm.layout import RankLayout, RankMapping
from hypercomm.layout.checks import LARGEST_WORLD, as_flag, as_tuple, positive
from hypercomm.layout.difference import LayoutDifference
from hypercomm.layout.parsing import as_dims, parse_groups
from hypercomm.layout.text import counted, shown
from hypercomm.tools.draw import pictures
from hypercomm.tools.draw.pictures import Dims, Part, Picture
from hypercomm.tools.draw.svg import svg_of
from hypercomm.tools.files import as_new_file, write_file
from hypercomm.tools.place import On, Topology, read_topology

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
        return svg_of(self._picture(48))

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

    def text(self, width: int | None = None, color: bool | None = None) -> str:
        """Return the picture as text for a terminal, with a column for each rank.

        Args:
            width: The columns of the terminal; default: those of the current one.
            color: Whether groups have colours; default: where stdout is a terminal with colours.

        Raises:
            MissingPackageError: rich is not installed.

        Example:
            >>> import hypercomm
            >>> picture = hypercomm.draw(hypercomm.RankLayout.parse("tp=2,dp=3"), dims="dp")
            >>> print(picture.text(width=40, color=False).splitlines()[-1])
            dp: 2 groups of 3
        """
        width = None if width is None else positive(width, "width")
        color = None if color is None else as_flag(color, "color")
        try:
            from rich.console import Console
        except ImportError as error:
            raise MissingPackageError("a text needs rich: pip install 'hypercomm[cli]'") from error
        console = Console(
            width=width and max(24, width),
            force_terminal=color,
            color_system="auto" if color is None else "truecolor" if color else None,
            legacy_windows=False,
        )
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))

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
        file = checked_file(path, force)
        kind = file.suffix.lower()
        content = self.png() if kind == ".png" else self.svg() if kind == ".svg" else None
        content = content or f"{self.text(width=100, color=False)}\n"
        write_file(file, content, force, DrawingError)

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        from hypercomm.tools.draw.terminal import lines_of

        picture, bar = self._picture(max(1, options.max_width // 14)), "│"
        return lines_of(picture, options.max_width, "|" if options.ascii_only else bar)

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self.svg()}</div>'

    def __str__(self) -> str:
        return self.text(color=False)

    def __repr__(self) -> str:
        return f"<Drawing of {self._picture(1).title}>"


def checked_file(path: str | os.PathLike[str], force: bool) -> Path:
    """Return a picture's file after checking its ending, and that it may be written."""
    file, _ = as_new_file(path, force, DrawingError)
    if file.suffix.lower() not in ENDINGS:
        raise DrawingError(f"{shown(str(file))} must end in one of {', '.join(ENDINGS)}")
    return file


def draw(
    what: RankLayout
    | HyperCommGrid
    | Mapping[str, RankLayout]
    | Mapping[str, HyperCommGrid]
    | LayoutDifference
    | RankMapping,
    on: On | None = None,
    dims: Any = None,
    *,
    groups: Iterable[Any] | str | None = None,
    edges: Iterable[tuple[str, str]] | Literal["chain"] | None = None,
    shape: Sequence[int] | None = None,
    itemsize: int | None = None,
) -> Drawing:
    """Return a picture of a layout, a grid, a set of grids, a change or a mapping.

    Up to 64 ranks, each dim has a panel; up to 256, each rank is shown. Larger layouts get a
    schematic: one host with its groups, what repeats it, and pipeline stages as columns.

    Args:
        what: A layout, a grid, a `GridSet` or named layouts, a `difference`, or a `RankMapping`.
        on: Where the ranks are: GPUs per host, 8, or whatever `read_topology` takes, such as
            "host=4,domain=72", a hostfile or SLURM's topology.conf. Default: not shown.
        dims: The dims whose groups have colours, as in "tp" or "dp+cp". Default: each dim.
        groups: Several of these, as in "tp,dp+cp", with a panel for each.
        edges: For a set: pairs of grids of which the first sends to the second, or "chain": each
            sends to the next.
        shape: For a mapping: the shape of the whole tensor, in elements. Default: amounts are
            parts of the tensor.
        itemsize: For a mapping: the bytes of an element. Default: amounts are elements.

    Returns:
        A drawing: print it, show it in a notebook, or `save` it as SVG, PNG or text.

    Raises:
        UnknownDimError: A dim is not one of the layout's.
        LayoutError: An argument does not apply to `what`, there are more than 2**24 ranks, or
            `shape` cannot be cut evenly.
        TopologyError: `on` cannot be read, or holds fewer ranks.
        DrawingError: `edges` are not pairs of names of grids.

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
    if isinstance(what, RankMapping):
        _reject("a mapping", dims=dims, groups=groups, edges=edges)
        _topology([what.source, what.target], on)
        matrix = functools.partial(pictures.matrix_of, what, shape, itemsize)
        matrix(1)  # raises what is wrong with the arguments
        return Drawing(matrix)
    if isinstance(what, LayoutDifference):
        _reject("a change", groups=groups, edges=edges, shape=shape, itemsize=itemsize)
        ends = [what.before, what.after]
        topology, lit = _topology(ends, on), _lit(ends, dims, None)
        title, _, summary = what.summary.partition(": ")
        return _drawing(title, [summary], pictures.change_of(what, topology, *lit))
    _reject("layouts and grids", shape=shape, itemsize=itemsize)
    grids = what if isinstance(what, Mapping) else {"": what}
    layouts: dict[str, Any] = {name: getattr(one, "layout", one) for name, one in grids.items()}
    every = [*layouts.values()]
    if not every or not all(isinstance(layout, RankLayout) for layout in every):
        raise LayoutError(
            f"what must be a layout, a grid, a set of grids, a difference or a mapping, "
            f"got {shown(what)}"
        )
    topology, lit = _topology(every, on), _lit(every, dims, groups)
    words = [_words(every, topology)]
    if isinstance(what, Mapping):
        arrows = _edges(edges, [*layouts])
        return _drawing(
            " + ".join(layouts), words, [pictures.grids_of(layouts, topology, lit, arrows)]
        )
    _reject("one layout", edges=edges)
    parts = [
        *pictures.parts_of(every[0], topology, lit),
        pictures.dims_table(every[0], topology, lit),
    ]
    return _drawing(str(every[0]), words, parts)


def _drawing(title: str, lines: list[str], parts: list[Part]) -> Drawing:
    return Drawing(lambda _: Picture(title, lines, parts))


def _reject(kind: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise LayoutError(f"{name} does not apply to {kind}; leave it out")


def _lit(layouts: list[RankLayout], dims: Any, groups: Iterable[Any] | str | None) -> list[Dims]:
    """Return the dims asked for, in the order of the first layout that has them all."""
    asked = [] if dims is None else [dims]
    if groups is not None:
        if dims is not None:
            raise LayoutError("dims asks for one panel, groups for several; give one of them")
        asked = parse_groups(groups) if isinstance(groups, str) else [*as_tuple(groups, "groups")]
        if not asked:
            raise LayoutError("groups is empty; name at least one, as in ['tp', 'dp+cp']")
    found = []
    for one in asked:
        names = {*as_dims(one)}
        fitting = (layout for layout in layouts if names <= {*layout.dim_names})
        found.append(next(fitting, layouts[0]).order_dims(one))
    return found


def _topology(layouts: list[RankLayout], on: On | None) -> Topology | None:
    """Return where the ranks are, after checking that they can be drawn."""
    for layout in layouts:
        if layout.size > LARGEST_WORLD or (on is not None and layout.last_rank >= LARGEST_WORLD):
            raise LayoutError(
                f"{layout} has {layout.size:,} ranks up to {layout.last_rank:,}; ranks below "
                f"{LARGEST_WORLD:,} can be drawn with on=, and as many without"
            )
    world_size = 1 + max(layout.last_rank for layout in layouts)
    if on is None or (isinstance(on, Topology) and on.world_size >= world_size):
        return on
    return read_topology(on, world_size)


def _words(layouts: list[RankLayout], topology: Topology | None) -> str:
    ranks = np.unique(np.concatenate([np.array(layout.ranks) for layout in layouts]))
    words = counted(ranks.size, "rank")
    for index, level in enumerate(topology.levels if topology else ()):
        words += ", " if index else " on "
        words += counted(np.unique(level.of_rank[ranks]).size, level.name)
    return words + "; the first dim varies fastest" * (len(layouts[0].dim_names) > 1)


def _edges(edges: Iterable[Any] | str | None, names: list[str]) -> list[tuple[str, str]]:
    if edges is None or edges == "chain":
        return [*pairwise(names)] if edges else []
    pairs = [] if isinstance(edges, str) else [tuple(edge) for edge in as_tuple(edges, "edges")]
    if not pairs or not {*pairs} <= {*product(names, names)}:
        raise DrawingError(f"edges must be 'chain' or pairs of {names}, got {shown(edges)}")
    return pairs
