"""draw() and Drawing: a picture of a layout, a grid, a change or a mapping."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_tuple, as_world_size
from hypercomm.layout.difference import LayoutDifference
from hypercomm.layout.layout import read_layout
from hypercomm.layout.parsing import parse_groups
from hypercomm.layout.text import short_repr
from hypercomm.layout.views import Views, views_of
from hypercomm.lazy import required
from hypercomm.tools.draw.pictures import Box, Scene, change_picture, mapping_picture
from hypercomm.tools.draw.svg import svg_of
from hypercomm.tools.place import Level, On, Placed, read_topology
from hypercomm.transfers.mapping import RankMapping

if TYPE_CHECKING:
    from hypercomm.grid import HyperCommGrid


@attrs.frozen(repr=False)
class Drawing:
    """A picture that `hypercomm.draw` returns. `print` and notebooks show it.

    Example:
        >>> import hypercomm
        >>> picture = hypercomm.draw("tp=2,dp=3")
        >>> picture.svg()[:4]
        '<svg'
        >>> print(picture)
        tp=2,dp=3  6 ranks; in a row, one number is one group
        <BLANKLINE>
         rank       0   1   2   3   4   5
         ────────────────────────────────
         tp,dp    0,0 1,0 0,1 1,1 0,2 1,2
         tp group   0   0   1   1   2   2
         dp group   0   1   0   1   0   1
        <BLANKLINE>
        <BLANKLINE>
         dim   groups
         ───────────────────
         tp    3 groups of 2
         dp    2 groups of 3
    """

    _picture: Box

    def svg(self) -> str:
        """Return the picture as SVG without external files. Hovering shows coordinates."""
        return svg_of(self._picture)

    def png(self) -> bytes:
        """Return the picture as PNG, with twice the resolution of the SVG.

        Raises:
            MissingPackageError: resvg-py is not installed.
        """
        resvg = required("resvg_py", "Drawing.png()")
        font = "DejaVu Sans"
        return bytes(resvg.svg_to_bytes(svg_string=self.svg(), zoom=2, sans_serif_family=font))

    def text(self, width: int | None = None, color: bool = False) -> str:
        """Return the picture as text for a terminal, with a column for each rank.

        Args:
            width: The width of the text in characters. Default: the width of the current terminal.
            color: Whether groups have colours.

        Raises:
            MissingPackageError: rich is not installed.

        Example:
            >>> import hypercomm
            >>> picture = hypercomm.draw("tp=2,dp=3", groups="dp")
            >>> print(picture.text(width=60).splitlines()[0])
            tp=2,dp=3  6 ranks; in a row, one number is one group
        """
        colors = "truecolor" if color else None
        rich = required("rich.console", "Drawing.text()")
        console = rich.Console(width=width, force_terminal=color, color_system=colors)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))

    def save(self, path: str | os.PathLike[str], force: bool = False) -> None:
        """Write the picture to a file. The ending selects the format: .svg or .png.

        Args:
            path: The file.
            force: Whether to replace an existing file.

        Raises:
            LayoutError: The path does not end in .svg or .png, the file exists, or it cannot be
                written.
            MissingPackageError: A .png file needs resvg-py, which is not installed.

        Example:
            >>> import pathlib, tempfile, hypercomm
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     file = pathlib.Path(folder, "grid.svg")
            ...     hypercomm.draw("tp=2,dp=3").save(file)
            ...     file.read_text(encoding="utf-8")[:4]
            '<svg'
        """
        file = Path(path)
        name = short_repr(os.fspath(path))
        if file.suffix.lower() not in {".svg", ".png"}:
            raise LayoutError(f"{name} must end in .svg or .png")
        content = self.png() if file.suffix.lower() == ".png" else self.svg().encode()
        try:
            with file.open("wb" if force else "xb") as target:
                target.write(content)
        except FileExistsError as error:
            raise LayoutError(f"{name} exists; force=True (--force) replaces it") from error
        except FileNotFoundError as error:
            folder = short_repr(str(file.parent))
            raise LayoutError(
                f"{name} cannot be written: there is no folder {folder}; create it first"
            ) from error
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise LayoutError(f"{name} cannot be written: {why}") from error

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        from hypercomm.tools.draw.terminal import lines_of

        return lines_of(self._picture)

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self.svg()}</div>'

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Drawing of {self._picture.bold}>"


def draw(
    what: str | RankLayout | Views | HyperCommGrid | Placed | LayoutDifference | RankMapping,
    on: On | None = None,
    groups: Iterable[Any] | str | None = None,
) -> Drawing:
    """Return a picture of a layout, a grid, a change or a mapping.

    For up to 64 ranks, the picture has a table for each host. A row has the number of each rank's
    group over some dims, as in `layout.groups("tp")`, and colours that repeat above 8 groups. Up
    to 16 ranks, another row has coordinates. Larger layouts are drawn as schematics, which show
    one host with its ranks, the dims that repeat this host, and pipeline stages as columns.

    Args:
        what: A layout or its sizes, as in "tp=2,dp=4"; a grid, the views of a module in
            `LaunchConfig.views`, a `difference`, a `RankMapping`, or the result of `place`, which
            includes the machine.
        on: The machine: GPUs per host, 8, or another form that `read_topology` accepts, such as
            "host=4,domain=72", a hostfile or SLURM's topology.conf. Default: no machine
            is shown. Pictures of mappings never show the machine.
        groups: The dims whose groups have colours, as in "tp" or "tp,dp+cp". A schematic colours
            only the groups over the first of these dims. Dims of views are allowed. Default: all
            dims of the layout.

    Returns:
        A drawing. Print it, show it in a notebook, or `save` it as SVG or PNG.

    Raises:
        UnknownDimError: `groups` names a dim that neither the layout nor a view has.
        LayoutError: `what` has another type or ranks above 2**24, `groups` is given for a change
            or a mapping, `on` cannot be read, or the machine has too few GPUs.

    Example:
        >>> import hypercomm
        >>> print(hypercomm.draw("tp=2,dp=2", on=2))
        tp=2,dp=2  4 ranks on 2 hosts; in a row, one number is one group
        <BLANKLINE>
         host0 rank   0   1     host1 rank   2   3
         ──────────────────     ──────────────────
         tp,dp      0,0 1,0     tp,dp      0,1 1,1
         tp group     0   0     tp group     1   1
         dp group     0   1     dp group     0   1
        <BLANKLINE>
        <BLANKLINE>
         dim   groups                                link
         ────────────────────────────────────────────────────────
         tp    2 groups of 2, each inside one host   NVLink
         dp    2 groups of 2, each on 2 hosts        across hosts
    """
    if isinstance(what, (RankMapping, LayoutDifference)):
        if groups is not None:
            raise LayoutError(
                "groups= (--groups) applies to a layout; leave it out for a change or a mapping"
            )
        if isinstance(what, RankMapping):
            return Drawing(mapping_picture(what))
        last_rank = max(what.before.last_rank, what.after.last_rank)
        return Drawing(change_picture(what, _levels(on, last_rank)))
    if isinstance(what, Placed) and on is None:
        on = what.topology
    layout = what.base if isinstance(what, Views) else read_layout(what)
    views = views_of(what, layout)
    asked = parse_groups(groups) if isinstance(groups, str) else as_tuple(groups or (), "groups")
    lit = [views.order_dims(dims) for dims in asked]
    return Drawing(Scene(layout, _levels(on, layout.last_rank), views).picture(lit))


def _levels(on: On | None, last_rank: int) -> Sequence[Level]:
    size = as_world_size(last_rank + 1, "the number of ranks of a picture")
    return () if on is None else read_topology(on, size).levels
