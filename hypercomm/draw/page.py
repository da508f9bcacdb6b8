"""One HTML page that shows a scene, and answers hover, keys and search; it loads nothing.

The page holds the sizes, strides and offset of each grid, and works out coordinates and groups by
itself, so it grows neither with the ranks nor with the combinations of dims. What has no such
short form (listed ranks, the units of a topology, the cells of a matrix) is held as differences
from one number to the next, deflated, as base64; the browser's DecompressionStream reads them.
"""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hypercomm.draw import palette
from hypercomm.draw.scenes import ChangeScene, MatrixScene, Scene
from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import LARGEST_WORLD
from hypercomm.topology import Topology

_STYLES = (
    "colours.css",
    "controls.css",
    "panel.css",
    "page.css",
)  # the last one has the narrow windows
_SCRIPTS = (  # a script uses the names of those before it, and of others once the page has loaded
    *("data.js", "grid.js", "boxes.js", "blocks.js", "theme.js", "colouring.js", "view.js"),
    *("cells.js", "paint.js", "edges.js", "ranks_picture.js", "about.js", "matrix.js", "search.js"),
    *("panel.js", "keys.js", "main.js"),
)
_INT32 = np.iinfo(np.int32)


def page(scene: Scene) -> str:
    """Return a scene as one HTML document, which needs no other file and no network.

    Args:
        scene: Grids, a change, or a matrix.

    Returns:
        The document, in UTF-8 where it is written to a file.

    Raises:
        LayoutError: A grid has more ranks than a browser can lay out.

    Example:
        >>> from hypercomm.draw.scenes import GridScene
        >>> grid = RankLayout([2, 4], ["tp", "dp"])
        >>> text = page(GridScene("two by four", (("", grid),), dims=("tp",)))
        >>> text.splitlines()[0], "<title>two by four</title>" in text
        ('<!doctype html>', True)
    """
    for numbering in _numberings(scene):
        if numbering.size > LARGEST_WORLD:
            raise LayoutError(
                f"{numbering} has {numbering.size:,} ranks, and a page shows up to "
                f"{LARGEST_WORLD:,}; draw a part of it, as select() makes them"
            )
    parts = {
        "title": html.escape(scene.title),
        "css": _assets(_STYLES),
        "data": _as_json(scene),
        "script": _assets(_SCRIPTS),
    }
    # In one pass: what is put in is not searched for further places.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def _numberings(scene: Scene) -> tuple[RankLayout, ...]:
    if isinstance(scene, MatrixScene):
        return ()
    if isinstance(scene, ChangeScene):
        return scene.before, scene.after
    return tuple(grid for _, grid in scene.grids)


def _asset(name: str) -> str:
    return (files("hypercomm.draw") / "assets" / name).read_text(encoding="utf-8")


def _assets(names: Sequence[str]) -> str:
    return "\n".join(map(_asset, names))


def _as_json(scene: Scene) -> str:
    """What the scripts read; no `<` in it ends the element that holds it."""
    given = {
        "title": scene.title,
        "levels": _levels(scene.topology),
        "palette": {
            "fills": palette.FILLS,
            "mixed": palette.MIXED,
            "results": palette.RESULTS,
            "marks": palette.MARKS,
            "amounts": palette.AMOUNTS,
        },
        **_own(scene),
    }
    return json.dumps(given, separators=(",", ":")).replace("<", "\\u003c")


def _own(scene: Scene) -> dict[str, Any]:
    """What only scenes of this kind have."""
    if isinstance(scene, MatrixScene):
        rows, columns, amounts = scene.cells.T
        return {
            "kind": "matrix",
            "sources": _pack(scene.sources),
            "targets": _pack(scene.targets),
            "rows": _pack(rows),
            "columns": _pack(columns),
            "amounts": _pack(amounts),
            "unit": scene.unit,
            "whole": scene.whole,
            "notes": scene.notes,
        }
    if isinstance(scene, ChangeScene):
        fields = ("before", "after", "result", "counts", "kept")
        return {
            "kind": "change",
            "grids": [_grid("before", scene.before), _grid("after", scene.after)],
            "changes": [{name: getattr(one, name) for name in fields} for one in scene.changes],
            "dims": scene.dims,
            "summary": scene.summary,
        }
    names = [name for name, _ in scene.grids]
    return {
        "kind": "grid",
        "grids": [_grid(name, grid) for name, grid in scene.grids],
        "dims": scene.dims,
        "edges": [[names.index(source), names.index(target)] for source, target in scene.edges],
    }


def _grid(name: str, grid: RankLayout) -> dict[str, Any]:
    return {
        "name": name,
        "dims": grid.dim_names,
        "shape": grid.shape,
        "strides": grid.strides,
        "offset": grid.rank_offset,
        "ranks": None if grid._listing is None else _pack(grid.ranks),
    }


def _levels(topology: Topology | None) -> list[dict[str, str]]:
    return [
        {"name": level.name, "of": _pack(level.of_rank), "names": _deflate(_names(level.names))}
        for level in (topology.levels if topology else ())
    ]


def _names(names: Sequence[str]) -> bytes:
    return json.dumps(names, separators=(",", ":")).encode()


def _pack(values: ArrayLike) -> str:
    """Deflate the differences from one value to the next: "i" for 32 bits, "d" for larger ones.

    >>> from base64 import b64decode
    >>> packed = _pack([5, 6, 8])
    >>> packed[0], np.frombuffer(zlib.decompress(b64decode(packed[1:])), "<i4").tolist()
    ('i', [5, 1, 2])
    """
    steps = np.diff(np.asarray(values, dtype=np.int64), prepend=0)
    # The scripts add the steps up in the same type, so the values must fit, too.
    largest = np.abs(np.asarray(values, dtype=np.int64)).max(initial=0)
    is_short = max(largest, np.abs(steps).max(initial=0)) <= _INT32.max
    kind, dtype = ("i", "<i4") if is_short else ("d", "<f8")
    return kind + _deflate(steps.astype(dtype).tobytes())


def _deflate(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 9)).decode()
